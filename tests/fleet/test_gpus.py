"""Which GPUs each engine gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock import Fleet
from penstock.engine.command import server_command
from penstock.errors import ConfigError
from penstock.fleet.gpus import assign, visible_gpus
from penstock.settings import EngineConfig


def config(tp: int = 1, share: float = 0.9) -> EngineConfig:
    return EngineConfig(model="m", profile="gpu", tensor_parallel_size=tp, gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("engines", "tp", "share", "gpus", "assigned"),
    [
        (2, 1, 0.9, "01", ["0", "1"]),
        (4, 2, 0.9, "01234567", ["01", "23", "45", "67"]),
        (2, 1, 0.9, "0123", ["2", "3"]),  # the first ones are left to a trainer
        (2, 1, 0.4, "0", ["0", "0"]),
        (3, 2, 0.3, "012", ["01", "02", "12"]),  # no engine has one GPU twice
        (2, 8, 0.9, "", ["", ""]),  # not to be listed: as each finds them
    ],
)
def test_every_engine_has_its_own_or_a_fair_share(
    engines: int, tp: int, share: float, gpus: Sequence[str], assigned: Sequence[str]
) -> None:
    assert assign(config(tp, share), engines, tuple(gpus)) == [tuple(names) for names in assigned]


@pytest.mark.parametrize(
    ("engines", "tp", "share", "message"),
    [
        (4, 2, 0.9, "an engine needs 2 GPUs and 0 have room (4,5, 2 taken): ask for fewer engines, or lower gpu_mem"),
        (1, 4, 0.1, "an engine needs 4 GPUs and 2 have room (4,5, 0 taken): ask for fewer engines"),
    ],
)
def test_too_few_are_said_before_anything_starts(
    engines: int, tp: int, share: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5")
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Fleet.launch(config(tp, share), engines=engines)


def test_visible_gpus_are_those_of_the_environment_or_else_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,3")
    assert visible_gpus() == ("GPU-a", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(visible_gpus()) == len(list(Path("/dev").glob("nvidia[0-9]*")))


def test_an_engine_sees_its_own_only() -> None:
    assert server_command(config(2), api_key=None).on(1, ("2", "3")).env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in server_command(config(2), api_key=None).env
    on_cpu = config(2).model_copy(update={"profile": "cpu"})
    assert server_command(on_cpu, api_key=None).on(1, ("2",)).env["CUDA_VISIBLE_DEVICES"] == "", "it must not take one"
