"""Mends of vLLM: no reply of a worker is left for the next call, and a pause empties the right caches."""

from __future__ import annotations

import functools
import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

pytestmark = pytest.mark.vllm


class Worker:
    """One rank, as a worker's process calls it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def number(self, add: int = 0) -> int:
        return self.rank + add

    def first_fails(self) -> int:
        if self.rank == 0:
            raise ValueError("out of memory")
        return self.rank

    def unsendable(self) -> Any:
        return lambda: None


class Answers(deque[Any]):
    """A worker's queue of answers, which is late where a deadline is set."""

    def dequeue(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            raise TimeoutError
        return self.popleft()


class Calls:
    """The queue of calls; every worker does them at once, as vLLM's `worker_busy_loop` does."""

    def __init__(self, queues: list[Answers]) -> None:
        self._queues = queues
        self._workers = [Worker(rank) for rank in range(len(queues))]

    def enqueue(self, call: tuple[Any, ...]) -> None:
        from vllm.v1.executor.multiproc_executor import WorkerProc

        method, args, kwargs, output_rank = call
        for worker, queue in zip(self._workers, self._queues, strict=True):
            try:
                named = isinstance(method, str)
                made = getattr(worker, method) if named else functools.partial(cloudpickle.loads(method), worker)
                output = made(*args, **kwargs)
                pickle.dumps(output)
                said = (WorkerProc.ResponseStatus.SUCCESS, output)
            except Exception as error:  # noqa: BLE001 - as there
                said = (WorkerProc.ResponseStatus.FAILURE, str(error))
            if output_rank in {None, worker.rank}:
                queue.append(said)


@pytest.fixture
def executor() -> Any:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from penstock.plugin import register

    register()
    made = MultiprocExecutor.__new__(MultiprocExecutor)
    made.response_mqs = queues = [Answers(), Answers()]
    made.rpc_broadcast_mq = Calls(queues)
    made.futures_queue = deque()
    made.is_failed = False
    return made


@pytest.mark.parametrize(
    ("method", "error"),
    [("no_such", "no attribute 'no_such'"), ("first_fails", "out of memory"), ("unsendable", "lambda")],
)
def test_a_call_that_fails_leaves_nothing_for_the_next(executor: Any, method: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=f"Worker failed with error .*{error}"):
        executor.collective_rpc(method)
    assert executor.collective_rpc("number", args=(5,)) == [5, 6]
    assert not any(executor.response_mqs)


def test_a_call_with_a_deadline_is_waited_for(executor: Any) -> None:
    assert executor.collective_rpc("number", 0.001, kwargs={"add": 3}) == [3, 4]
    assert not any(executor.response_mqs)


def test_functions_and_steps_go_as_they_did(executor: Any) -> None:
    assert executor.collective_rpc(lambda worker, add: worker.number(add), args=(1,)) == [1, 2]
    assert executor.collective_rpc("number", unique_reply_rank=1) == 1
    future = executor.collective_rpc("number", unique_reply_rank=0, non_block=True)
    assert executor.collective_rpc("number") == [0, 1]
    assert future.result() == 0


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
    from penstock.plugin.core import control_of

    register()
    register()  # as vLLM may
    done: list[str] = []
    made: Any = object.__new__(EngineCoreProc)
    made.scheduler, made.model_executor = Recorder("scheduler", done), Recorder("executor", done)
    made.mm_receiver_cache = Recorder("images", done)
    made.structured_output_manager = SimpleNamespace()
    made._idle_state_callbacks = []
    made.has_work = lambda: step_under_way
    made.vllm_config = SimpleNamespace(lora_config=None)
    control_of(made)
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


def test_tokens_of_the_base_model_get_no_adapter_on_cpus():
    """vLLM's own gives them the last one: `seen` shows it."""
    from penstock.plugin.adapter_worker import spare_base_tokens

    seen: list[torch.Tensor] = []

    def shrink(inputs, weights, _output, indices, scaling=1.0):
        seen.append(scaling * torch.einsum("bi,boi->bo", inputs, weights[indices]))

    inputs, weights, indices = torch.ones(3, 2), torch.arange(8.0).reshape(2, 2, 2), torch.tensor([0, -1, 1])
    shrink(inputs, weights, None, indices, 2.0)
    spare_base_tokens(shrink)(inputs, weights, None, indices, 2.0)
    assert seen[0][1].abs().min() > 0
    assert seen[1][1].abs().max() == 0
    assert torch.equal(seen[0][[0, 2]], seen[1][[0, 2]])
