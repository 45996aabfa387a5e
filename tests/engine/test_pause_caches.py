"""What a pause that clears caches empties in vLLM's own engine core: what depends on weights, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Recorder:
    """Stands for a part of the core; notes what is asked of it, and agrees."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name, self._done = name, done

    def __getattr__(self, method: str) -> Any:
        def call(*_args: Any, **_kwargs: Any) -> bool:
            if "reset" in method or "clear" in method:
                self._done.append(f"{self._name}.{method}")
            return True

        return call


def core(*, step_under_way: bool) -> tuple[Any, list[str]]:
    """VLLM's core without a model, and what becomes of its caches."""
    from vllm.v1.engine.core import EngineCoreProc

    from penstock.plugin import register

    register()
    register()  # as vLLM may
    done: list[str] = []
    made: Any = object.__new__(EngineCoreProc)
    made.scheduler, made.model_executor = Recorder("scheduler", done), Recorder("executor", done)
    made.mm_receiver_cache = Recorder("images", done)
    made.structured_output_manager = SimpleNamespace()
    made._idle_state_callbacks = []
    made.has_work = lambda: step_under_way
    return made, done


OF_WEIGHTS = ["scheduler.reset_prefix_cache", "scheduler.reset_encoder_cache", "executor.reset_encoder_cache"]


@pytest.mark.parametrize("step_under_way", [False, True])
@pytest.mark.parametrize("clear_cache", [False, True])
def test_processed_images_stay(step_under_way: bool, clear_cache: bool) -> None:  # noqa: FBT001
    """The API server would go on to send their hashes alone."""
    paused, done = core(step_under_way=step_under_way)
    future = paused.pause_scheduler("keep", clear_cache)
    assert (future is not None) == step_under_way
    paused._notify_idle_state_callbacks()
    assert done == (OF_WEIGHTS if clear_cache else [])
    if future is not None:
        assert future.result(0) is None


def test_who_asks_for_it_by_name_still_empties_them() -> None:
    asked, done = core(step_under_way=False)
    asked.pause_scheduler("keep", True)  # noqa: FBT003
    asked.reset_mm_cache()
    assert done == [*OF_WEIGHTS, "images.clear_cache", "executor.reset_mm_cache"]
