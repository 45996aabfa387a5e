"""The life of an update over fakes: every phase, every kind of failure."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fleet_fakes import Bench, FakeEngine, on_bench, until

from patience import WAIT_S, give_up
from penstock.control_types import KV, EngineUpdate, PauseMode
from penstock.errors import EngineError, StateError, UpdateError, UserError, WeightsError
from penstock.fleet.member import State
from penstock.fleet.update import odd_ones_out
from penstock.weights.manifest import WeightManifest

AFTER_GATE = ["apply-pause", "apply-load", "apply-resume"]
FAILURES = [
    *itertools.product(["prepare", *AFTER_GATE], ["refuse", "hang", "die", "garbage"]),
    ("checksum", "wrong"),
]


async def test_a_store_that_takes_long_to_commit_keeps_neither_requests_nor_the_event_loop() -> None:
    bench = await Bench("ab").started()
    goes_on, seen = threading.Event(), list[dict[str, int]]()
    commit, loop = bench.store.commit, asyncio.get_running_loop()

    def slow(manifest: WeightManifest) -> None:
        loop.call_soon_threadsafe(lambda: seen.append({"closed": bench.router.closed, **bench.router.serves()}))
        loop.call_soon_threadsafe(goes_on.set)
        assert goes_on.wait(WAIT_S), "the event loop stood still"
        commit(manifest)

    bench.store.commit = slow
    assert (await bench.operations.update([], None)).version == 1
    assert seen == [{"closed": False, "a": 1, "b": 1}]
    assert bench.store.current is not None


@on_bench("ab")
async def test_a_good_update_in_order_and_its_report(bench: Bench) -> None:
    report = await bench.operations.update([("w", None)], None)
    assert bench.store.published == [(1, [("w", None)])]
    assert bench.store.current is not None
    assert bench.store.current.version == 1
    assert report.version == bench.roster.version == 1
    assert [e.engine for e in report.engines] == ["a", "b"]
    assert report.bubble == 1.0
    assert set(report.engines[0].seconds) == {"prepare", "pause", "load", "resume", "bubble"}
    assert set(report.seconds) == {"publish", "prepare", "gate", "total"}
    assert report.failures == {}
    steps = [step for _, step in bench.journal]
    assert steps[:2] == ["prepare", "prepare"], "engines prepare before the gate closes"
    assert steps[2] == "gate closed"
    assert steps[-2:] == ["set", "gate open"], "the router knows the new versions before it lets requests through"
    assert bench.router.serves() == {"a": 1, "b": 1}


@pytest.mark.parametrize(("phase", "kind"), FAILURES)
@on_bench("abc")
async def test_an_engine_that_fails_leaves_and_the_others_commit(bench: Bench, phase: str, kind) -> None:
    bench.engine["b"].faults[phase] = kind
    report = await asyncio.wait_for(bench.operations.update([], None), 60.0)
    assert [e.engine for e in report.engines] == ["a", "c"]
    assert list(report.failures) == ["b"]
    assert bench.state("b") is State.DEAD
    assert bench.router.serves() == {"a": 1, "c": 1}
    assert not bench.router.closed
    bench.check_belief()
    again = await bench.operations.update([], None)
    assert (again.version, len(again.engines), again.failures) == (2, 2, {})


@on_bench("ab")
async def test_a_failed_engine_leaves_the_router_at_once_not_when_the_slowest_has_answered(bench: Bench) -> None:
    bench.engine["a"].faults["apply-pause"] = "die"
    bench.engine["b"].faults["apply-load"] = "hang"
    update = asyncio.create_task(bench.operations.update([], None))
    await until(lambda: "a" not in bench.router.serves())
    assert not update.done()
    assert bench.router.serves() == {"b": 0}
    with pytest.raises(UpdateError):
        await update


@pytest.mark.parametrize("paused", [False, True])
@on_bench("abc")
async def test_one_refusal_refuses_the_update_and_nothing_changes(bench: Bench, *, paused: bool) -> None:
    if paused:
        await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    bench.journal.clear()
    bench.engine["c"].faults["prepare"] = "unfit"
    with pytest.raises(WeightsError, match=r"engine c: tensor 'w' has shape \(2,\), not \(3,\)"):
        await bench.operations.update([], None)
    assert {step for _, step in bench.journal} == {"prepare"}, "no gate, no membership, no apply"
    assert bench.store.current is None
    bench.check_belief()
    del bench.engine["c"].faults["prepare"]
    assert (await bench.operations.update([], None)).version == 1


@on_bench("ab", min_engines=2)
async def test_too_few_engines_and_nothing_to_go_back_to(bench: Bench) -> None:
    bench.engine["a"].faults["apply-load"] = "die"
    with pytest.raises(UpdateError):
        await bench.operations.update([], None)
    assert bench.state("b") is State.DEAD, "it holds weights that were not committed"
    assert bench.router.serves() == {}
    assert not bench.router.closed


@on_bench("abc", min_engines=3)
async def test_too_few_engines_before_the_gate_leave_the_rest_untouched(bench: Bench) -> None:
    bench.engine["b"].faults["prepare"] = "hang"
    with pytest.raises(UpdateError, match="2 engines were good when they had prepared it"):
        await bench.operations.update([], None)
    assert ("router", "gate closed") not in bench.journal
    bench.check_belief()
    with pytest.raises(
        UpdateError, match=r"2 engines were good before it began.*; b dead: prepare of weight version 1"
    ):
        await bench.operations.update([], None)
    assert len(bench.store.published) == 1


@on_bench("ab")
async def test_an_engine_that_dies_by_itself_during_the_update_is_not_counted(bench: Bench) -> None:
    bench.engine["b"].busy.clear()
    update = asyncio.create_task(bench.operations.update([], None))
    await until(lambda: ("b", "prepare") in bench.journal)
    await bench.roster.mark_dead(bench.roster.members[1], "its process exited with status -9")
    bench.engine["b"].busy.set()
    report = await update
    assert report.failures == {"b": "its process exited with status -9"}
    assert bench.router.serves() == {"a": 1}


@on_bench("ab")
async def test_a_cancelled_caller_leaves_no_update_half_done(bench: Bench) -> None:
    bench.engine["a"].busy.clear()
    caller = asyncio.create_task(bench.operations.update([], None))
    await until(lambda: ("a", "prepare") in bench.journal)
    await give_up(caller)
    with pytest.raises(StateError, match="a weight update is under way"):
        await bench.operations.update([], None)
    bench.engine["a"].busy.set()
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)  # in its turn, so after the update
    assert bench.roster.version == 1


async def test_teardown_waits_for_the_thread_that_writes_into_the_store() -> None:
    bench = await Bench("a").started()
    began, go = threading.Event(), threading.Event()

    def publish(*_: object) -> None:
        began.set()
        assert go.wait(WAIT_S)

    bench.store.publish = publish
    update = asyncio.create_task(bench.operations.update([], None))
    await until(began.is_set)
    closing = asyncio.create_task(bench.operations.close())
    await asyncio.sleep(0.05)
    assert not closing.done(), "what comes next is closing the store"
    go.set()
    await asyncio.wait_for(closing, WAIT_S)
    with pytest.raises(StateError, match="torn down"):
        await update


@pytest.mark.parametrize("version", [True, 1.0, 1.5, "1", np.int64(1), torch.tensor(1), 2**63])
@on_bench("ab")
async def test_a_version_that_engines_cannot_be_told_is_refused_and_none_dies_of_it(bench: Bench, version: Any) -> None:
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    bench.journal.clear()
    for update in (bench.operations.update([], version), bench.operations.native.update({}, version)):
        with pytest.raises(UserError, match=r"a weight version is an int below 2\*\*63, got "):
            await update
    assert bench.journal == []


ONE, TWO = (1, 1, 1), (2, 1, 1)


@pytest.mark.parametrize(
    ("layouts", "sums", "odd"),
    [
        ([], "", ""),
        ([ONE], "z", ""),
        ([ONE, ONE, TWO], "x x y", ""),
        ([ONE, ONE, ONE], "x x y", "c"),
        ([ONE, ONE, TWO, TWO], "x x y z", "cd"),  # nobody knows who is right
        ([TWO, TWO], "sums:x-sums:x sums:x-p", ""),  # one has read its second rank, the other has not
        ([TWO] * 4, "sums:x-sums:x sums:x-p q-p q-sums:x", ""),
        ([TWO] * 4, "sums:x-p sums:x-p sums:x-q sums:x-sums:x", "c"),
        ([TWO] * 3, "sums:x-p sums:x-q sums:x-sums:x", "ab"),
        ([TWO] * 4, "p-q p-r s-q p-q", "bc"),
        ([TWO] * 2, "split:p-split:q spread:r-spread:s", ""),  # experts that are spread are others
        ([TWO] * 3, "split:p-split:q spread:r-spread:s spread:r-spread:t", "bc"),
    ],
)
def test_checksums_are_compared_rank_by_rank_within_a_layout(layouts: Any, sums: str, odd: str) -> None:
    found = odd_ones_out(dict(zip("abcd", sums.split(), strict=False)), dict(zip("abcd", layouts, strict=False)))
    assert set(found) == set(odd)


def says(bench: Bench, **checksums: str) -> None:
    """Have engines give these checksums after an update."""
    for name, checksum in checksums.items():

        async def apply(
            version: int, *, kv: KV = "recompute", engine: FakeEngine = bench.engine[name], checksum: str = checksum
        ) -> EngineUpdate:
            return replace(await FakeEngine.apply_weights(engine, version, kv=kv), checksum=checksum)

        bench.engine[name].apply_weights = apply


@on_bench("abc")
async def test_an_engine_that_returns_is_compared_with_every_rank_that_a_peer_has_read(bench: Bench) -> None:
    says(bench, a="sums:x-p", b="sums:x-p", c="sums:x-sums:x")
    await bench.operations.update([], None)
    for checksum, good in {"q-p": True, "q-sums:x": True, "sums:x-q": False, "q-q": False}.items():
        says(bench, a=checksum)
        member = replace(bench.roster.members[0], weight_version=0)
        returns = bench.admission.bring_to_version(member)
        if good:
            assert await returns is None
            continue
        with pytest.raises(EngineError, match=f"checksum {checksum}, its peers' sums:x-p"):
            await returns
