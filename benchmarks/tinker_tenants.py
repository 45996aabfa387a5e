"""Tenants of the Tinker service that train and sample at once, against one tenant with the same work in all.

python benchmarks/tinker_tenants.py [--model 0.6b] [--profile gpu] [--tenants 8] [--out FILE] [--quick]

A tenant's round: samples with the weights of the round before, meanwhile `forward_backward` and `optim_step`, then its
adapter goes to the engines in place. One tenant has rounds of as many samples and data as all the others together.
tokens/s: tokens of the samples and of the training data, by the time of the rounds. Both take turns.
`--parts sync,training,sampling` measures these parts of tinker_service.py as well, on the same service.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import _common
import tinker_service
from tinker_service import BASE, KEY, PROMPT, RANK, Findings, data_of, parser, service_of

import tinker
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


async def measured(arguments: Any, found: Findings) -> None:
    """The one row, and those of `--parts`."""
    work, count = GPU if arguments.profile == "gpu" else CPU, arguments.tenants
    names = [f"tenant{number}" for number in range(count + 1)]
    keys = "".join(f"{name}: {{key: tml-of-{name}}}\n" for name in names) + f"parts: {{key: {KEY}}}\n"
    async with service_of(arguments, max(512, 2 * work.length), keys) as (service, model):
        many = [Tenant(service.url, f"tml-of-{name}", work) for name in names[1:]]
        groups = {"one": [Tenant(service.url, f"tml-of-{names[0]}", work.times(count))], "many": many}
        await compared(groups, work.times(count), 2 if arguments.quick else 6, found)
        await tinker_service.measured(service, model, arguments, found)


async def compared(groups: dict[str, list[Tenant]], work: Work, rounds: int, found: Findings) -> None:
    """Median tokens a second of each group's rounds, the first left out; the groups take turns."""
    tenants = [tenant for group in groups.values() for tenant in group]
    rates: dict[str, list[float]] = {name: [] for name in groups}
    case = f"{len(groups['many'])} tenants that train and sample, tokens/s"
    try:
        await asyncio.gather(*(tenant.open() for tenant in tenants))
        for _ in range(rounds + 1):
            for name, group in groups.items():
                began = time.perf_counter()
                await asyncio.gather(*(tenant.round() for tenant in group))
                took = time.perf_counter() - began
                rates[name].append((work.samples * work.tokens + work.data * work.length) / took)
            found.rows.clear()
            mid = {name: statistics.median(each[1:] or each) for name, each in rates.items()}
            row = _common.compare(case, mid["many"], mid["one"], bar=BAR, want="at least")
            found.add(row, **{"tokens/s of each round": rates})
    finally:
        await asyncio.gather(*(tenant.close() for tenant in tenants))


def main() -> int:
    """Measure, and print the document."""
    options = parser(__doc__ or "", "")
    options.add_argument("--tenants", type=int, default=8)
    arguments = options.parse_args()
    tinker_service.count_requests()
    found = Findings("tinker_tenants", arguments.out, profile=arguments.profile, engines=arguments.engines)
    return found.report(whole=asyncio.run(_common.until_ended(measured(arguments, found))))


if __name__ == "__main__":
    sys.exit(main())
