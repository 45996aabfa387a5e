"""The order of things in an update that runs inside the engine core."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import EngineError, StateError, TransferError, WeightsError
from penstock.plugin import core as core_module
from penstock.plugin import pause
from penstock.plugin.spec import WeightSpec
from penstock.weights.shared_memory import SharedMemoryStore


class Core:
    """As much of vLLM's EngineCoreProc as a round asks for; `step` is its loop's way through one input."""

    def __init__(self, *, step_under_way: bool, ranks: list[dict[str, Any]] | None = None) -> None:
        self.done: list[str] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.addresses = SimpleNamespace(outputs=["api"])
        chunked = SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False)
        self.scheduler = SimpleNamespace(
            get_num_unfinished_requests=lambda: 3, scheduler_config=chunked, max_num_scheduled_tokens=8192,
            max_num_running_reqs=256, num_spec_tokens=0, block_size=16,
        )  # fmt: skip
        self.batch_queue: list[str] = ["a step"] if step_under_way else []
        self.step_fn = self.end_step
        self.paused = False
        self.waiting: Future[None] | None = Future() if step_under_way else None
        self.ranks = ranks or [{"checksum": "c", "seconds": {"load": 0.1, "checksum": 0.01}}]
        self.prepared = 4
        self.emptied = True
        self.refusals: list[str | None] = [None, None]

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:  # noqa: FBT001
        self.paused = True
        self.done.append(f"pause {mode} {clear_cache}")
        return self.waiting

    def resume_scheduler(self) -> None:
        self.paused = False
        self.done.append("resume")

    def sleep(self, level: int, mode: str) -> None:
        """Takes the memory when the step is done and, as vLLM has it, before anything that waited longer for that."""
        self.done.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str] | None) -> None:
        self.done.append(f"wake up {tags}")
        self.resume_scheduler()

    def set_weight_version(self, version: str) -> None:
        self.done.append(f"label {version}")

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert (reset_running_requests, reset_connector, self.paused) == (True, True, True)
        self.done.append("reset prefix cache")
        return self.emptied

    def reset_encoder_cache(self) -> None:
        self.done.append("reset encoder cache")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method in {"penstock_prepare", "penstock_join_group"}:
            self.done.append(method)
            self.given = args[0]
            return list(self.refusals)
        self.done.append(f"{method}{args or ''}")
        return [self.prepared] if method == "penstock_prepared" else self.ranks

    def end_step(self) -> tuple[None, bool]:
        self.batch_queue.clear()
        return None, False

    def step(self) -> None:
        kind, call = self.input_queue.get_nowait()
        assert kind is core_module._CALL
        call()


def ask(core: Core, version: int = 4, *, clear_cache: bool = True) -> Future[Any]:
    return core_module._in_core(
        core, lambda done: core_module._Round(core, version, clear_cache=clear_cache, done=done).begin()
    )


def test_a_round_pauses_loads_labels_and_resumes_in_this_order():
    core = Core(step_under_way=False)
    done = ask(core, clear_cache=False)
    core.step()
    answer = done.result(0)
    assert core.done == ["penstock_prepared", "pause keep False", "penstock_load(4,)", "label 4", "resume"]
    assert (answer["version"], answer["checksum"], answer["preempted"]) == (4, "c", 3)
    assert set(answer["seconds"]) == {"pause", "load", "resume", "bubble", "load.load", "load.checksum"}


def test_caches_are_cleared_before_weights_come():
    core = Core(step_under_way=False)
    done = ask(core)
    core.step()
    assert done.result(0)["version"] == 4
    assert core.done[2:] == ["reset prefix cache", "reset encoder cache", "penstock_load(4,)", "label 4", "resume"]


def test_a_core_whose_kv_cache_could_not_be_emptied_does_not_go_on():
    core = Core(step_under_way=False)
    core.emptied = False
    done = ask(core)
    core.step()
    with pytest.raises(EngineError, match="vLLM could not empty its KV cache"):
        done.result(0)
    assert "penstock_load(4,)" not in core.done
    core_module.holds_of(core).resume()
    assert core.paused
    core.emptied = True
    again = ask(core)
    while not core.input_queue.empty():
        core.step()
    assert again.result(0)["version"] == 4
    assert not core.paused


def test_a_round_that_waited_for_a_step_gives_the_core_an_input_so_that_it_does_not_wait_for_one():
    core = Core(step_under_way=True)
    done = ask(core)
    core.step()
    assert core.waiting is not None
    assert not done.done()
    core.waiting.set_result(None)  # as the core does when it is idle, and then it waits for its next input
    assert done.result(0)["version"] == 4
    core.step()


def test_a_version_that_is_not_prepared_changes_nothing():
    core = Core(step_under_way=False)
    done = ask(core, version=5)
    core.step()
    assert isinstance(done.exception(0), StateError)
    assert core.done == ["penstock_prepared"]


def test_a_load_that_was_cut_leaves_the_engine_held_whoever_resumes_until_one_comes_through():
    core = Core(step_under_way=False, ranks=[{"error": "the trainer is gone"}])
    done = ask(core)
    core.step()
    assert isinstance(done.exception(0), TransferError)
    core_module.holds_of(core).resume()
    assert core.paused
    core.ranks = [{"checksum": "c", "seconds": {"load": 0.1, "checksum": 0.01}}]
    again = ask(core)
    while not core.input_queue.empty():
        core.step()
    assert again.result(0)["version"] == 4
    assert not core.paused


def test_a_core_says_how_long_it_was_held_whatever_held_it(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(pause, "time", clock)
    core = Core(step_under_way=False)
    holds = core_module.holds_of(core)

    def at(seconds: float, *calls: Callable[[], Any]) -> float:
        clock.now = 100.0 + seconds
        for call in calls:
            call()
        return holds.held_s

    assert at(1) == 0
    assert at(2, lambda: holds.pause("keep", clear_cache=False)) == 0
    assert at(3, holds.begin_update, holds.weights_are_out) == 1
    assert at(4, holds.weights_are_in) == 2, "it is paused yet"
    assert at(6, holds.resume, holds.resume) == 4
    assert at(9) == 4
    assert at(10, lambda: holds.sleep(1, "keep")) == 4
    assert at(12, lambda: holds.wake_up(None)) == 6


def test_a_core_says_what_it_is_in_and_how_many_calls_may_have_changed_its_weights():
    core = Core(step_under_way=False)
    core.scheduler.get_request_counts = lambda: (2, 1)
    core.get_weight_version = lambda: "4"
    holds = core_module.holds_of(core)

    def state() -> dict[str, Any]:
        done = core_module._routes(core)["/penstock/core"]({})
        core.step()
        return done.result(0)

    calm = {"running": 2, "waiting": 1, "weight_version": 4, "held_s": 0.0}
    assert state() == {**calm, "paused": False, "asleep": False, "torn": False, "foreign": 0}
    for method in ("penstock_load", "compute_weight_checksums", "reset_weights", lambda worker: worker):
        core_module.count_foreign(core, method)
    holds.pause("keep", clear_cache=False)
    holds.weights_are_out()
    said = state()
    assert (said["paused"], said["torn"], said["foreign"]) == (True, True, 2)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_overtakes_a_round_leaves_it_no_memory_to_write_to(level: int):
    core = Core(step_under_way=True)
    holds, done = core_module.holds_of(core), ask(core)
    core.step()
    holds.sleep(level, "keep")
    assert core.waiting is not None
    core.waiting.set_result(None)
    with pytest.raises(StateError, match="version 4 was not loaded: the engine's weights are asleep"):
        done.result(0)
    assert "penstock_load(4,)" not in core.done
    core.step()
    holds.wake_up(None)
    assert core.paused == (level == 2), "what the sleep kept goes on, and what it dropped does not"
    again = ask(core)
    while not core.input_queue.empty():
        core.step()
    assert again.result(0)["version"] == 4
    assert not core.paused


def test_an_error_that_nobody_foresaw_is_no_torn_transfer_that_could_be_sent_again():
    ranks = [{"error": "the trainer is gone"}, {"fault": "RuntimeError: CUDA error"}]
    core = Core(step_under_way=False, ranks=ranks)
    done = ask(core)
    core.step()
    with pytest.raises(EngineError, match="RuntimeError: CUDA error"):
        done.result(0)
    core_module.holds_of(core).resume()
    assert core.paused


@pytest.mark.parametrize("tags", [None, ["scheduling"], ["scheduling", "weights"]])
def test_a_sleep_of_level_0_lasts_until_it_is_woken(tags: list[str] | None):
    core = Core(step_under_way=False)
    holds = core_module.holds_of(core)
    core.paused = True
    holds.sleep(0, "keep")
    done = ask(core)
    core.step()
    assert done.result(0)["version"] == 4, "no memory is away"
    holds.wake_up(["weights"])
    assert core.paused
    holds.wake_up(tags)
    assert not core.paused


def test_a_wake_up_asks_vllm_only_for_what_sleeps():
    """Asked for memory that is there too, vLLM takes back none, and a step without its KV cache ends the engine."""
    core = Core(step_under_way=False)
    holds = core_module.holds_of(core)
    holds.sleep(1, "keep")
    holds.wake_up(["weights"])
    holds.wake_up(["weights"])
    holds.wake_up(["weights", "kv_cache"])
    assert [said for said in core.done if said.startswith("wake")] == ["wake up ['weights']", "wake up ['kv_cache']"]
    assert holds.asleep == frozenset()


FLOATS = frozenset({"float32", "bfloat16"})
SPEC = WeightSpec({"a": (2, 3), "head": (2,)}, {"a": FLOATS, "head": FLOATS}, frozenset({"head"}))


@pytest.fixture
def store():
    store = SharedMemoryStore()
    yield store
    store.close()


def offer(store: SharedMemoryStore, tensor: torch.Tensor) -> dict[str, Any]:
    return {"manifest": store.publish(4, [("a", tensor)]).to_json()}


def prepare(core: Core, body: Any) -> Future[Any]:
    return core_module._routes(core)["/penstock/weights/prepare"](body)


def test_a_version_is_checked_beside_the_core_and_prepared_between_two_of_its_steps(store):
    core, body = Core(step_under_way=True), offer(store, torch.ones(2, 3))
    core_module._expect(core, SPEC.to_json())
    done = prepare(core, body)
    assert core.done == []
    core.step()
    assert not done.done(), "a step is under way that may be long"
    core.step_fn()
    assert done.result(0) == {"ok": True}
    assert core.done == ["penstock_prepare"], "nothing was paused"
    assert core.given == body["manifest"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3), r"shape \(3,\), the engine's has \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.float64), "cast before sending"),
        (torch.full((2, 3), torch.nan), "NaN"),
        (None, "must be a JSON object with 'manifest'"),
    ],
)
def test_what_does_not_fit_never_comes_to_the_core(store, tensor, message):
    core = Core(step_under_way=False)
    core_module._expect(core, SPEC.to_json())
    with pytest.raises(WeightsError, match=message):
        prepare(core, {} if tensor is None else offer(store, tensor)).result(0)
    assert core.input_queue.empty()


def test_workers_that_sleep_or_refuse_prepare_nothing(store):
    core = Core(step_under_way=False)
    core_module._expect(core, SPEC.to_json())
    core.refusals[1] = "there is no such group"
    refused = prepare(core, offer(store, torch.ones(2, 3)))
    core.step()
    with pytest.raises(WeightsError, match="there is no such group"):
        refused.result(0)
    core_module.holds_of(core).sleep(1, "keep")
    asleep = prepare(core, offer(store, torch.ones(2, 3)))
    core.step()
    with pytest.raises(StateError, match="weights are asleep"):
        asleep.result(0)
    assert core.done.count("penstock_prepare") == 1


def test_who_asks_before_the_api_server_has_told_what_fits_waits_for_it(store):
    core, body, answers = Core(step_under_way=False), offer(store, torch.ones(2, 3)), queue.Queue[Future[Any]]()
    threading.Thread(target=lambda: answers.put(prepare(core, body)), daemon=True).start()
    core_module._expect(core, SPEC.to_json())
    done = answers.get(timeout=20)
    core.step()
    assert done.result(0) == {"ok": True}


def test_a_spec_that_could_not_be_found_out_is_said_until_it_was(store):
    core, body = Core(step_under_way=False), offer(store, torch.ones(2, 3))
    core_module._expect(core, "OSError: the checkpoint is gone")
    with pytest.raises(EngineError, match="could not be found out: OSError: the checkpoint is gone"):
        prepare(core, body).result(0)
    core_module._expect(core, SPEC.to_json())
    done = prepare(core, body)
    core.step()
    assert done.result(0) == {"ok": True}


def test_a_group_is_joined_between_two_steps():
    core = Core(step_under_way=True)
    join = core_module._routes(core)["/penstock/weights/group"]
    with pytest.raises(WeightsError, match="must be a JSON object that describes a group"):
        join([]).result(0)
    done = join({"epoch": "a"})
    core.step()
    assert (done.result(0), core.done, core.given) == ({"ok": True}, ["penstock_join_group"], {"epoch": "a"})
