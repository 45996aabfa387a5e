"""VLLM's native weight calls over a fleet: what some engine cannot take is refused before any engine is told it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet_fakes import Bench, on_bench

from penstock.control_types import PauseMode
from penstock.engine.capabilities import PENSTOCK, Capabilities
from penstock.errors import MissingCapabilityError, StateError
from penstock.fleet.member import State
from virtual_time import virtual

JOIN = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4, "rank_offset": 1}
NAMES = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
IPC = replace(PENSTOCK, weight_transfer="ipc")
NCCL = replace(PENSTOCK, weight_transfer="nccl")
PLAIN = Capabilities(plugin=False, weight_transfer="nccl")


async def bench_of(**capabilities: Capabilities) -> Bench:
    """Engines of these names; paused, as a native update needs it."""
    bench = await Bench("".join(capabilities)).started()
    for member in bench.roster.members:
        member.info = replace(member.info, capabilities=capabilities[member.name])
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    bench.journal.clear()
    return bench


@virtual
async def test_engines_that_take_weights_in_different_ways_are_told_nothing() -> None:
    bench = await bench_of(a=IPC, b=IPC, c=PLAIN)
    ways = r"native weights in different ways: a, b by 'ipc'; c by 'nccl'\. .* Nothing was changed$"
    for info in (JOIN, {}):
        with pytest.raises(MissingCapabilityError, match=f"^init_weight_update_communicator .*{ways}"):
            await bench.operations.native.init(info)
    for info in (NAMES, {}):
        with pytest.raises(MissingCapabilityError, match=f"^update_named_weights .*{ways}"):
            await bench.operations.native.update(info, 1)
    assert bench.journal == []
    assert {member.state for member in bench.roster.members} == {State.PAUSED}
    assert bench.roster.highest_version == 0, "the number is free still"
    await bench.operations.resume()
    bench.check_belief()


@virtual
async def test_each_engine_joins_with_its_own_rank_and_one_that_has_not_joined_is_named() -> None:
    bench = await bench_of(a=NCCL, b=NCCL)
    await bench.operations.native.init(JOIN)
    assert [bench.engine[name].calls["init"]["rank_offset"] for name in "ab"] == [1, 2]
    await bench.operations.native.update(NAMES, 1)
    bench.check_belief()
    member = bench.roster.members[1]
    member.control = bench.engine["b"] = type(bench.engine["b"])("b", bench.journal)  # as one that was started anew
    bench.journal.clear()
    with pytest.raises(StateError, match=r"^update_named_weights: b joined no trainer since the start; call init_"):
        await bench.operations.native.update(NAMES, 2)
    assert bench.journal == []


@virtual
async def test_kv_that_a_native_update_keeps_is_labelled() -> None:
    bench = await Bench("ab").started()
    for version, clear_cache in ((1, True), (2, False), (3, False), (4, True)):
        await bench.operations.pause(PauseMode.KEEP, clear_cache=clear_cache)
        if version == 3:
            await bench.operations.reset_prefix_cache()
        await bench.operations.native.update(NAMES, version)
        await bench.operations.resume()
    assert bench.roster.kv_kept_versions == {2}
    bench.check_belief()


@on_bench("ab")
async def test_a_server_that_rejoins_a_paused_fleet_keeps_no_prefix_for_a_native_update(bench: Bench) -> None:
    member = bench.roster.members[1]
    await bench.roster.mark_dead(member, "died")
    member.process = None  # of others
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    member.lifecycle.to(State.LAUNCHING, "answers again")
    member.lifecycle.to(State.SYNCING, "test")
    await bench.admission.admit(member)
    assert bench.engine["b"].calls["pause"][:2] == (PauseMode.KEEP, True)
    await bench.operations.native.update(NAMES, 1)
    assert bench.roster.kv_kept_versions == set()
    await bench.operations.resume()
