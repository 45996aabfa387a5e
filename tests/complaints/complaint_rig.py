"""Requests in flight, faults, and the check that every token belongs to its prompt and weight version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import sim_fleets
from penstock import Fleet, GenerateOutput, SamplingParams
from penstock.fleet.member import State
from penstock.http import HttpTransport

LONG = SamplingParams(max_tokens=300, detokenize=False)
SHORT = SamplingParams(max_tokens=8, detokenize=False)
DEADLINE_S = 60.0


def generate(fleet: Fleet, prompts: Sequence[Sequence[int]], params: SamplingParams) -> asyncio.Task[GenerateOutput]:
    """Start a batch; it fails when it takes longer than a minute."""
    batch = fleet.generate(prompt_token_ids=prompts, sampling_params=params)
    return asyncio.create_task(asyncio.wait_for(batch, DEADLINE_S))


async def until(reached: Callable[[], bool]) -> None:
    """Return when `reached`; no event says so."""
    async with asyncio.timeout(DEADLINE_S):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def in_flight(fleet: Fleet, requests: int) -> None:
    """Return when so many requests are on the engines."""
    await sim_fleets.in_flight(fleet, lambda count: count >= requests)


async def set_fault(fleet: Fleet, index: int, kind: str, phase: str) -> None:
    """Set a fault on one simulated engine."""
    member = fleet._roster.members[index]
    http = HttpTransport(member.url, api_key=member.api_key)
    await http.post("/sim/fault", {"kind": kind, "phase": phase}, timeout_s=60.0)
    await http.close()


async def all_serve(fleet: Fleet) -> None:
    """Return when every engine serves the fleet's version."""
    members = fleet._roster.members
    await until(lambda: all(m.state is State.SERVING for m in members))
    for status in await fleet.engines():
        assert status.weight_version == fleet.weight_version
