"""LoRA adapters of a fleet: versions, every engine with the same, eviction and pauses, over fake engines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet_fakes import Bench, on_bench, until
from safetensors.torch import load, save_file
from supervise_rig import dies_and_returns, restarting

from penstock.engine.capabilities import PENSTOCK
from penstock.errors import MissingCapabilityError, StateError, UserError, WeightsError
from penstock.fleet.member import State

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def tensors(value: float) -> list[tuple[str, Any]]:
    return [(NAME, torch.full((2, 4), value)), (NAME.replace("lora_A", "lora_B"), np.zeros((4, 2), np.float32))]


def value_of(content: bytes) -> float:
    return float(load(content)[NAME][0, 0])


@on_bench("ab")
async def test_each_update_is_a_version_on_every_engine_and_on_those_that_return(bench: Bench) -> None:
    adapters = bench.operations.adapters
    report = await adapters.update("x", tensors(1.0), CONFIG)
    assert (report.version, [e.engine for e in report.engines], report.bytes > 64) == (1, ["a", "b"], True)
    await adapters.update("y", tensors(5.0), CONFIG, 3)
    async with restarting(bench) as restarts:
        bench.engine["a"].lora.clear()
        await dies_and_returns(bench, restarts, "a", 0)
        assert {n: (v, value_of(c)) for n, (v, c) in bench.engine["a"].lora.items()} == {"x": (1, 1.0), "y": (3, 5.0)}
    assert (await adapters.update("x", tensors(2.0), CONFIG)).version == 2
    assert {value_of(bench.engine[name].lora["x"][1]) for name in "ab"} == {2.0}
    status = await adapters.statuses()
    assert {name: (s.version, s.engines, s.in_flight) for name, s in status.items()} == {"x": (2, 2, 0), "y": (3, 2, 0)}


@on_bench("ab")
async def test_versions_grow_also_over_an_unload(bench: Bench) -> None:
    adapters = bench.operations.adapters
    await adapters.update("x", tensors(1.0), CONFIG, 4)
    for version in (4, 0, "5", True):
        with pytest.raises(UserError, match="'x' has had version 4; a new one is a greater int"):
            await adapters.update("x", tensors(1.0), CONFIG, version)  # pyright: ignore[reportArgumentType]
    await adapters.unload("x")
    assert not bench.engine["a"].lora
    with pytest.raises(UserError, match="no adapter 'x'; loaded: none"):
        await adapters.unload("x")
    assert (await adapters.update("x", tensors(1.0), CONFIG)).version == 5, "KV of version 4 may be cached still"


@pytest.mark.parametrize(
    ("given", "config", "why"),
    [
        ([], CONFIG, "no tensor"),
        (tensors(float("nan")), CONFIG, "NaN"),
        (tensors(1.0) * 2, CONFIG, "came twice"),
        (tensors(1.0), {"r": 0, "target_modules": ["q_proj"]}, "lacks r, lora_alpha"),
    ],
)
@on_bench("ab")
async def test_what_is_no_adapter_reaches_no_engine(bench: Bench, given: Any, config: Any, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        await bench.operations.adapters.update("x", given, config)
    assert not bench.journal
    with pytest.raises(UserError, match="name is 1 to 256 bytes"):
        await bench.operations.adapters.update("x" * 257, tensors(1.0), CONFIG)


@on_bench("ab")
async def test_an_adapter_goes_to_all_or_to_none(bench: Bench) -> None:
    other = bench.roster.members[1]
    other.info = replace(other.info, capabilities=replace(PENSTOCK, lora=False))
    with pytest.raises(MissingCapabilityError, match=r"load_adapter: engine b lacks .*enable_lora=true"):
        await bench.operations.adapters.load("style", "/adapters/style", 5.0)
    assert ("a", "load adapter") not in bench.journal


@on_bench("ab")
async def test_an_engine_that_fails_a_load_is_dead_and_one_that_cannot_have_them_does_not_join(bench: Bench) -> None:
    adapters = bench.operations.adapters
    bench.engine["b"].faults["load adapter"] = "die"
    report = await adapters.update("x", tensors(1.0), CONFIG)
    assert list(report.failures) == ["b"]
    assert bench.state("b") is State.DEAD
    assert bench.state("a") is State.SERVING


@on_bench("ab")
async def test_an_adapter_that_is_saved_again_is_a_new_version_under_its_name(bench: Bench, tmp_path: Path) -> None:
    adapters = bench.operations.adapters
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": ["q_proj"]}))
    for number, value in enumerate((1.0, 2.0), 1):
        save_file({NAME: torch.full((2, 4), value)}, tmp_path / "adapter_model.safetensors")
        report = await adapters.load("style", str(tmp_path), 5.0)
        assert report is not None
        assert report.version == number
        assert await adapters.load("style", str(tmp_path), 5.0) is None, "it is what was loaded last"
        (tmp_path / "adapter_model.safetensors").unlink()
        assert [(v, value_of(c)) for v, c in (bench.engine[e].lora["style"] for e in "ab")] == [(number, value)] * 2
        save_file({NAME: torch.full((2, 4), 9.0)}, tmp_path / "adapter_model.safetensors")
    async with restarting(bench) as restarts:
        bench.engine["a"].lora.clear()
        await dies_and_returns(bench, restarts, "a", 0)
    assert value_of(bench.engine["a"].lora["style"][1]) == 2.0, "what was loaded, and not what lies there now"
    await adapters.unload("style")
    assert {**adapters._saved, **adapters._order} == {}, "of a name for each save, nothing but a number stays"


@on_bench("ab")
async def test_the_one_used_least_recently_gives_way_and_never_one_in_flight_pinned_or_paused(bench: Bench) -> None:
    adapters = bench.operations.adapters
    adapters._most = 4
    for name in ("busy", "pinned", "paused", "idle"):
        await adapters.update(name, tensors(1.0), CONFIG)
    for engine in bench.engine.values():
        engine.idle_s = {"busy": 9.0, "pinned": 9.0, "paused": 9.0, "idle": 1.0}
    bench.engine["b"].in_flight["busy"] = 1
    await adapters.pin("pinned", pinned=True)
    await adapters.pause("paused")
    await adapters.update("new", tensors(1.0), CONFIG)
    assert [sorted(engine.lora) for engine in bench.engine.values()] == [["busy", "new", "paused", "pinned"]] * 2
    bench.engine["a"].in_flight["new"] = 1
    with pytest.raises(StateError, match=r"4 adapters are loaded, as many as fleet\.max_adapters allows"):
        await adapters.update("newer", tensors(1.0), CONFIG)
    await adapters.update("new", tensors(2.0), CONFIG)


@on_bench("ab")
async def test_an_adapter_that_was_evicted_while_its_load_waited_is_loaded_anew(bench: Bench, tmp_path: Path) -> None:
    adapters, queue, go = bench.operations.adapters, bench.operations.queue, asyncio.Event()
    adapters._most = 1
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": ["q_proj"]}))
    save_file({NAME: torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    await adapters.load("x", str(tmp_path), 5.0)
    waiting = [asyncio.create_task(queue.run(go.wait))]
    for number, work in enumerate((adapters.update("y", tensors(1.0), CONFIG), adapters.load("x", str(tmp_path), 5.0))):
        waiting.append(asyncio.create_task(work))  # pyright: ignore[reportArgumentType]
        await until(lambda count=number + 2: len(queue.turns) == count)
    go.set()
    await asyncio.gather(*waiting)
    assert [list(engine.lora) for engine in bench.engine.values()] == [["x"]] * 2


@on_bench("ab")
async def test_a_pause_of_one_holds_on_engines_that_join_and_ends_with_a_resume(bench: Bench) -> None:
    adapters = bench.operations.adapters
    with pytest.raises(UserError, match="no adapter 'x'"):
        await adapters.pause("x")
    await adapters.update("x", tensors(1.0), CONFIG)
    await adapters.wait("x", 1.0)
    with pytest.raises(StateError, match="'x' is not paused"):
        await adapters.resume("x")
    await adapters.pause("x")
    assert not bench.router.closed
    async with restarting(bench) as restarts:
        bench.engine["a"].paused_adapters.clear()
        await dies_and_returns(bench, restarts, "a", 0)
    assert bench.engine["a"].paused_adapters == {"x"}
    await adapters.resume("x")
    assert not bench.engine["a"].paused_adapters | bench.engine["b"].paused_adapters


@on_bench("ab")
async def test_engines_of_another_host_read_an_adapter_in_a_shared_folder(bench: Bench, tmp_path: Path) -> None:
    bench.roster.members[0].url = "http://192.0.2.1:8000"
    adapters = bench.operations.adapters
    with pytest.raises(WeightsError, match=r"a cannot read this process's memory .* set fleet\.weight_folder"):
        await adapters.update("style", tensors(1.0), CONFIG)
    adapters._folder = tmp_path
    await adapters.update("style", tensors(1.0), CONFIG)
    (file,) = tmp_path.rglob("*.safetensors")
    assert tmp_path / "adapters" in file.parents
