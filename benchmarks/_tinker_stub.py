"""A Tinker service that answers at once: what a benchmark measures against it is the SDK's own cost.

python benchmarks/_tinker_stub.py TOKENS     prints its URL, and serves until it is ended.
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
    "create_sampling_session": {"sampling_session_id": "stub:sample:0"},
}


def build_app(tokens: int) -> Starlette:
    """Make the application; every sample has so many tokens."""
    response = pb.SampleResponse()
    sequence = response.sequences.add(stop_reason=pb.STOP_REASON_LENGTH)
    sequence.tokens, sequence.logprobs = array("i", [5] * tokens).tobytes(), array("f", [-1.0] * tokens).tobytes()
    sample, numbers = response.SerializeToString(), itertools.count()

    async def call(http: Request) -> Response:
        path = http.path_params["path"]
        if path == "asample":
            number = next(numbers)
            return JSONResponse({"request_id": f"{number}", "sample_sequence_ids": [f"{number}:0"]})
        if path == "retrieve_future":
            return Response(sample, media_type=PROTO_TYPE)
        return JSONResponse(ANSWERS.get(path, {}))

    return Starlette(routes=[Route("/api/v1/{path:path}", call, methods=["GET", "POST"])])


async def main() -> None:
    """Serve."""
    listener = listening("127.0.0.1", 0, "the stub")
    async with serving_app(build_app(int(sys.argv[1])), listener, "the stub"):
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
