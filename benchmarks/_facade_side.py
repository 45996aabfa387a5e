"""One side of `facade.py`: Penstock's AsyncVLLM or TorchRL's, on its own, told what to do in lines of JSON.

python benchmarks/_facade_side.py penstock|torchrl MODEL REPLICAS

Both get the same engines: vLLM on the CPU with the same options. It imports nothing of the other side's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 256,
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
}


class Penstock:
    """Ours, with its default policy."""

    def __init__(self, model: str, replicas: int) -> None:
        from penstock import AsyncVLLM  # noqa: PLC0415 - the other side has no Penstock

        self.service = AsyncVLLM.from_pretrained(model, num_replicas=replicas, profile="cpu", **ENGINE)
        self.versions = {"penstock": version("penstock")}

    def counts(self) -> list[int]:
        """Requests that each replica got so far, as the router counts them."""
        return [load.requests for load in self.service.ask_router(lambda admin: admin.engines()).engines]

    def close(self) -> None:
        """End the engines."""
        self.service.shutdown()


class TorchRL:
    """TorchRL's, under a Ray cluster of its own, with the balancer that it makes by default."""

    def __init__(self, model: str, replicas: int) -> None:
        import ray  # noqa: PLC0415 - our side has no Ray

        # It asks Ray for a GPU for each replica; on a CPU there is none, so Ray is told that there are.
        ray.init("local", num_cpus=4, num_gpus=replicas, include_dashboard=False, log_to_driver=False)
        from torchrl.modules.llm import AsyncVLLM  # noqa: PLC0415 - our side has no TorchRL

        self._ray = ray
        self.service = AsyncVLLM.from_pretrained(model, num_replicas=replicas, verbose=False, compile=False, **ENGINE)
        self.versions = {name: version(name) for name in ("torchrl", "ray")}
        self._counts = Counter[int]()
        balancer = self.service._load_balancer  # noqa: SLF001 - nothing else says where a request went
        select = balancer.select_actor

        def counted(*args: Any, **kwargs: Any) -> int:
            chosen = select(*args, **kwargs)
            self._counts[chosen] += 1
            return chosen

        balancer.select_actor = counted

    def counts(self) -> list[int]:
        """Requests that each replica got so far."""
        return [self._counts[i] for i in range(self.service.num_replicas)]

    def close(self) -> None:
        """End the engines and Ray."""
        self.service.shutdown()
        self._ray.shutdown()


def answer(side: Penstock | TorchRL, order: dict[str, Any]) -> dict[str, Any]:
    """Generate a batch: seconds, tokens made, and how many requests went to which replica."""
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds

    params = SamplingParams(max_tokens=order["max_tokens"], ignore_eos=True, logprobs=0)
    before = side.counts()
    began = time.perf_counter()
    outputs: Any = side.service.generate(order["prompts"], params)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "counts": [now - then for then, now in zip(before, side.counts(), strict=True)],
    }


def main() -> None:
    """Answer orders until stdin ends."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        RAY_USAGE_STATS_ENABLED="0",
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and Ray print is not for the one who asks
    name, model, replicas = sys.argv[1:]
    if name == "torchrl":
        os.environ["VLLM_PLUGINS"] = ""
    side = {"penstock": Penstock, "torchrl": TorchRL}[name](model, int(replicas))
    try:
        print(json.dumps({"versions": side.versions}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(side, json.loads(line))), file=answers, flush=True)
    finally:
        side.close()


if __name__ == "__main__":
    main()
