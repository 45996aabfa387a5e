"""Tenants of the Tinker service that train and sample at once, against one tenant with the same work in all.

python benchmarks/tinker_tenants.py [--model 0.6b] [--profile gpu] [--tenants 8] [--answers 512] [--quick]

A tenant's round: samples with the weights of the round before, meanwhile `forward_backward` and `optim_step`, then its
adapter goes to the engines in place. One tenant has rounds of as many samples and data as all the others together.
tokens/s: tokens of the samples and of the training data, by the time of a turn. In a turn each tenant does two rounds
and waits for no other tenant. The groups take turns, for `--seconds`.
"seconds by part" says where the time goes: of each tenant's rounds, of the parts by themselves, and of the saves in
the learner and on the engines. `--parts sync,training,sampling` measures these parts of tinker_service.py as well, on
the same service.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _common
import tinker_service
from tinker_service import BASE, KEY, PROMPT, RANK, Findings, data_of, parser, service_of

import tinker
from tinker import types

BAR = 0.9
ROUNDS = 2
"""Of a tenant in a turn."""
SAVED = re.compile(r"written in ([\d.]+) s, on the engines in ([\d.]+) s, which stopped for ([\d.]+) s")


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

    @property
    def all_tokens(self) -> int:
        """Of the samples and the data."""
        return self.samples * self.tokens + self.data * self.length


CPU, GPU = Work(8, 32, 4, 64), Work(16, 128, 8, 512)
Seconds = dict[str, list[float]]


class Tenant:
    """A client with one adapter on the engines; `took` has the seconds of its rounds by part."""

    def __init__(self, url: str, key: str, work: Work) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._work = work
        self._data = data_of(work.data, work.length)
        self._params = types.SamplingParams(max_tokens=work.tokens, stop=[])
        self.took: Seconds = defaultdict(list)

    async def open(self) -> None:
        """Create the adapter, and put it on the engines."""
        self._training = await self._service.create_lora_training_client(BASE, rank=RANK, train_unembed=False)
        await self.save()

    async def rounds(self, count: int) -> None:
        """Do the work so often."""
        for _ in range(count):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._timed("sampling", self.sample()))
                group.create_task(self._timed("training", self.train()))
            await self._timed("saving", self.save())

    async def close(self) -> None:
        """End its session."""
        await self._service.close("success")

    async def sample(self) -> None:
        """Take the samples of a round."""
        prompt = types.ModelInput.from_ints(PROMPT)
        await asyncio.gather(*(self._sampling.sample(prompt, 1, self._params) for _ in range(self._work.samples)))

    async def train(self) -> None:
        """Take the step of a round."""
        evaluated = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        await evaluated
        await stepped

    async def save(self) -> None:
        """Put the weights on the engines."""
        self._sampling = await self._training.save_weights_and_get_sampling_client(kind="inflight")

    async def _timed(self, part: str, work: Awaitable[None]) -> None:
        began = time.perf_counter()
        await work
        self.took[part].append(time.perf_counter() - began)


Groups = dict[str, list[Tenant]]


async def measured(arguments: Any, found: Findings) -> None:
    """The one row, what stands beside it, and the rows of `--parts`."""
    work, count = GPU if arguments.profile == "gpu" else CPU, arguments.tenants
    work = replace(work, tokens=arguments.answers or work.tokens)
    names = [f"tenant{number}" for number in range(count + 1)]
    keys = "".join(f"{name}: {{key: tml-of-{name}}}\n" for name in names) + f"parts: {{key: {KEY}}}\n"
    async with service_of(arguments, max(512, 2 * work.length, 2 * work.tokens), keys) as (service, model):
        many = [Tenant(service.url, f"tml-of-{name}", work) for name in names[1:]]
        groups = {"one": [Tenant(service.url, f"tml-of-{names[0]}", work.times(count))], "many": many}
        tenants = [tenant for group in groups.values() for tenant in group]
        try:
            await asyncio.gather(*(tenant.open() for tenant in tenants))
            await compared(groups, work.times(count), arguments, service.learner.log, found)
            await apart(groups, found)
        finally:
            await asyncio.gather(*(tenant.close() for tenant in tenants))
        await tinker_service.measured(service, model, arguments, found)


async def compared(groups: Groups, work: Work, arguments: Any, log: Path, found: Findings) -> None:
    """Median tokens a second of each group's turns; a round of each is left out. The groups take turns."""
    case = f"{len(groups['many'])} tenants that train and sample, tokens/s"
    rates: Seconds = {name: [] for name in groups}
    saves: dict[str, list[Any]] = {name: [] for name in groups}
    for group in groups.values():
        await of_all(group, lambda tenant: tenant.rounds(1))
        for tenant in group:
            tenant.took.clear()
    _common.note("every tenant has done a round")
    began = time.perf_counter()
    while not rates["many"] or time.perf_counter() - began < arguments.seconds:
        for name, group in groups.items():
            before = len(saves_in(log))
            took = await of_all(group, lambda tenant: tenant.rounds(ROUNDS))
            rates[name].append(ROUNDS * work.all_tokens / took)
            saves[name] += saves_in(log)[before:]
        found.rows.clear()
        mid = {name: statistics.median(each) for name, each in rates.items()}
        row = _common.compare(case, mid["many"], mid["one"], bar=BAR, want="at least")
        parts = {name: {**by_part(group), **by_save(saves[name])} for name, group in groups.items()}
        found.add(row, **{"tokens/s of each turn": rates, "seconds by part": parts})


def by_part(group: list[Tenant]) -> dict[str, Any]:
    """Seconds of the rounds' parts, over all tenants."""
    taken = {part: [s for tenant in group for s in tenant.took[part]] for part in ("sampling", "training", "saving")}
    return {part: spread(seconds) for part, seconds in taken.items()}


def saves_in(log: Path) -> list[Any]:
    """Seconds of every save that the learner's log has."""
    return SAVED.findall(log.read_text(errors="replace"))


def by_save(saves: list[Any]) -> dict[str, Any]:
    """Seconds of the saves in the learner and on the engines, as its log has them."""
    names = ("saving: written", "saving: put on the engines", "saving: engines stopped")
    return {name: spread([float(save[at]) for save in saves]) for at, name in enumerate(names) if saves}


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and greatest."""
    return {"median": round(statistics.median(seconds), 4), "greatest": round(max(seconds), 4), "count": len(seconds)}


async def apart(groups: Groups, found: Findings) -> None:
    """Seconds of each part by itself: nothing else is under way."""
    works = {"sampling": Tenant.sample, "training": Tenant.train, "saving": Tenant.save}
    taken = {
        f"{part} alone": {name: await of_all(g, work) for name, g in groups.items()} for part, work in works.items()
    }
    found.add(**{"seconds of a part alone": taken})
    _common.note(f"parts alone: {taken}")


async def of_all(group: list[Tenant], work: Callable[[Tenant], Awaitable[None]]) -> float:
    """Seconds until all tenants of a group have done some work."""
    began = time.perf_counter()
    await asyncio.gather(*(work(tenant) for tenant in group))
    return time.perf_counter() - began


def main() -> int:
    """Measure, and print the document."""
    options = parser(__doc__ or "", "")
    options.add_argument("--tenants", type=int, default=8)
    options.add_argument("--answers", type=int, help="tokens of a sample; default: 128 on GPUs, 32 elsewhere")
    options.add_argument("--seconds", type=float, help="of the turns; another one begins before; default: 240, quick 0")
    arguments = options.parse_args()
    if arguments.seconds is None:
        arguments.seconds = 0.0 if arguments.quick else 240.0
    tinker_service.count_requests()
    found = Findings("tinker_tenants", arguments.out, profile=arguments.profile, engines=arguments.engines)
    return found.report(whole=asyncio.run(_common.until_ended(measured(arguments, found))))


if __name__ == "__main__":
    sys.exit(main())
