"""Tenants of the Tinker service that train and sample at once, against one tenant with the same work in all.

python benchmarks/tinker_tenants.py [--model PATH] [--profile cpu] [--tenants 8] [--quick]

A tenant's round: samples with the weights of the round before, meanwhile `forward_backward` and `optim_step`, then its
adapter goes to the engines in place. One tenant has rounds of as many samples and data as all the others together.
tokens/s: tokens of the samples and of the training data, by the time of the rounds. Both take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
from tinker_service import BASE, MODEL, PROMPT, RANK, data_of

import tinker
from penstock.config import EngineConfig, FleetConfig, RouterConfig, TrainConfig
from penstock.tinker.service import ServiceConfig, serving
from tinker import types

BAR = 0.9


@dataclass(frozen=True, slots=True)
class Work:
    """One tenant's round: `samples` of `tokens` each, and `data` of `length` tokens."""

    samples: int
    tokens: int
    data: int
    length: int

    def times(self, count: int) -> Work:
        """As many tenants' work."""
        return Work(self.samples * count, self.tokens, self.data * count, self.length)


CPU, GPU = Work(8, 32, 4, 64), Work(32, 128, 16, 512)


class Tenant:
    """A client with one adapter on the engines."""

    def __init__(self, url: str, key: str, work: Work) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._work = work
        self._data = data_of(work.data, work.length)
        self._params = types.SamplingParams(max_tokens=work.tokens, stop=[])

    async def open(self) -> None:
        """Create the adapter, and put it on the engines."""
        self._training = await self._service.create_lora_training_client(BASE, rank=RANK, train_unembed=False)
        await self._save()

    async def round(self) -> None:
        """Do the work once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._work.samples):
                group.create_task(self._sample())
            group.create_task(self._train())
        await self._save()

    async def close(self) -> None:
        """End its session."""
        await self._service.close("success")

    async def _sample(self) -> None:
        await self._sampling.sample(types.ModelInput.from_ints(PROMPT), 1, self._params)

    async def _train(self) -> None:
        evaluated = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        await evaluated
        await stepped

    async def _save(self) -> None:
        self._sampling = await self._training.save_weights_and_get_sampling_client(kind="inflight")


async def measured(arguments: Any) -> list[_common.Row]:
    """The one row."""
    work, count = GPU if arguments.profile == "gpu" else CPU, arguments.tenants
    longest = max(512, 2 * work.length)
    engine = EngineConfig(
        model=arguments.model, profile=arguments.profile, served_model_name=BASE, max_model_len=longest
    )
    train = TrainConfig(threads=arguments.threads)
    names = [f"tenant{number}" for number in range(count + 1)]
    with tempfile.TemporaryDirectory(prefix="tenants-") as folder:
        keys = Path(folder) / "keys.yaml"
        keys.touch(mode=0o600)
        keys.write_text("".join(f"{name}: {{key: tml-of-{name}}}\n" for name in names))
        config = ServiceConfig(
            engine, FleetConfig(engines=arguments.engines), RouterConfig(), train, Path(folder) / "data", keys=keys
        )
        async with serving(config) as service:
            many = [Tenant(service.url, f"tml-of-{name}", work) for name in names[1:]]
            groups = {"one": [Tenant(service.url, f"tml-of-{names[0]}", work.times(count))], "many": many}
            rates = await compared(groups, work.times(count), 2 if arguments.quick else 6)
    case = f"{count} tenants that train and sample, tokens/s"
    return [_common.compare(case, rates["many"], rates["one"], bar=BAR, want="at least")]


async def compared(groups: dict[str, list[Tenant]], work: Work, rounds: int) -> dict[str, float]:
    """Median tokens a second of each group's rounds, the first left out; the groups take turns."""
    tenants = [tenant for group in groups.values() for tenant in group]
    rates: dict[str, list[float]] = {name: [] for name in groups}
    try:
        await asyncio.gather(*(tenant.open() for tenant in tenants))
        for _ in range(rounds + 1):
            for name, group in groups.items():
                began = time.perf_counter()
                await asyncio.gather(*(tenant.round() for tenant in group))
                took = time.perf_counter() - began
                rates[name].append((work.samples * work.tokens + work.data * work.length) / took)
    finally:
        await asyncio.gather(*(tenant.close() for tenant in tenants))
    _common.note(f"tokens/s of each round: {rates}")
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def main() -> int:
    """Measure, and print the document."""
    options = _common.parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--profile", default="cpu", choices=["cpu", "gpu", "sim"])
    options.add_argument("--engines", type=int, default=1)
    options.add_argument("--tenants", type=int, default=8)
    options.add_argument("--threads", type=int, default=1, help="of the learner, on CPUs")
    arguments = options.parse_args()
    rows = asyncio.run(measured(arguments))
    return _common.report("tinker_tenants", rows, profile=arguments.profile, engines=arguments.engines)


if __name__ == "__main__":
    sys.exit(main())
