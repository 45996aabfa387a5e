"""A Tinker service that answers at once: what a benchmark measures against it is the SDK's own cost.

python benchmarks/_tinker_stub.py TOKENS DATA LENGTH     prints its URL, and serves until it is ended.

A sample has TOKENS, and each `forward_backward` has so many DATA of LENGTH.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.asgi import listening, serving_app
from penstock.tinker.schema import PROTO_TYPE, pb

ANSWERS = {
    "client/config": {"pjwt_auth_enabled": False, "use_pyqwest_transport": True},
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "create_session": {"session_id": "stub"},
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
    "get_info": {
        "type": "get_info",
        "model_id": "stub:train:0",
        "model_name": "base",
        "model_data": {"arch": "stub", "model_name": "base", "tokenizer_id": "stub"},
        "is_lora": True,
        "lora_rank": 16,
    },
    "create_sampling_session": {"sampling_session_id": "stub:sample:0"},
}


RESULTS = {
    "create_model": {"model_id": "stub:train:0", "type": "create_model"},
    "optim_step": {"metrics": {"grad_norm:mean": 1.0}},
}
"""Of futures, in JSON."""


def sampled(tokens: int) -> bytes:
    """A sample's result."""
    response = pb.SampleResponse()
    sequence = response.sequences.add(stop_reason=pb.STOP_REASON_LENGTH)
    sequence.tokens, sequence.logprobs = array("i", [5] * tokens).tobytes(), array("f", [-1.0] * tokens).tobytes()
    return response.SerializeToString()


def evaluated(data: int, length: int) -> bytes:
    """The result of a `forward_backward`."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="TensorData")
    record = output.loss_fn_outputs.add(num_datums=data)
    logprobs = record.fields["logprobs"]
    logprobs.data, logprobs.dtype = array("f", [-1.0] * data * length).tobytes(), pb.DTYPE_FLOAT32
    logprobs.offsets = array("q", range(0, 4 * data * length + 1, 4 * length)).tobytes()
    output.metrics["loss:sum"] = float(data * length)
    return output.SerializeToString()


def build_app(tokens: int, data: int, length: int) -> Starlette:
    """Make the application; see the top of this file."""
    results = {"asample": sampled(tokens), "forward_backward": evaluated(data, length)}
    numbers = itertools.count()

    async def call(http: Request) -> Response:
        path = http.path_params["path"]
        if path in results or path in RESULTS:
            number = f"{path}:{next(numbers)}"
            return JSONResponse({"request_id": number, "model_id": "stub", "sample_sequence_ids": [f"{number}:0"]})
        if path == "retrieve_future":
            kind = (await http.json())["request_id"].partition(":")[0]
            return Response(results[kind], media_type=PROTO_TYPE) if kind in results else JSONResponse(RESULTS[kind])
        return JSONResponse(ANSWERS.get(path, {}))

    return Starlette(routes=[Route("/api/v1/{path:path}", call, methods=["GET", "POST"])])


async def main() -> None:
    """Serve."""
    listener = listening("127.0.0.1", 0, "the stub")
    async with serving_app(build_app(*map(int, sys.argv[1:])), listener, "the stub"):
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
