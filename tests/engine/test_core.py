"""The order of things in an update that runs inside the engine core."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from patience import WAIT_S
from penstock.control_types import TokenLoss
from penstock.errors import EngineError, StateError, TransferError, WeightsError
from penstock.plugin import pause, steps
from penstock.plugin import spec as spec_module
from penstock.plugin.core import control_of
from penstock.plugin.sleeping import sleep, wake_up
from penstock.weights.manifest import WeightSpec
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
            get_request_counts=lambda: (2, 1), scheduler_config=chunked, max_num_scheduled_tokens=8192,
            max_num_running_reqs=256, num_spec_tokens=0, block_size=16,
            update_from_output=lambda _: {},
        )  # fmt: skip
        self.batch_queue: list[str] = ["a step"] if step_under_way else []
        self.paused = False
        self.waiting: Future[None] | None = Future() if step_under_way else None
        self.ranks = ranks or LOADED
        self.prepared = 4
        self.emptied = True
        self.refusals: list[str | None] = [None, None]
        self.vllm_config = SimpleNamespace(lora_config=None, model_config="a config")

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

    def get_weight_version(self) -> str | None:
        return "4"

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert (reset_running_requests, reset_connector, self.paused) == (True, True, True)
        self.done.append("reset prefix cache")
        return self.emptied

    def reset_encoder_cache(self) -> None:
        self.done.append("reset encoder cache")

    def penstock_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method in {"penstock_prepare", "penstock_join_group"}:
            self.done.append(method)
            self.given = args[0]
            return list(self.refusals)
        self.done.append(f"{method}{args or ''}")
        return [self.prepared] if method == "penstock_prepared" else self.ranks

    def end_step(self) -> None:
        self.batch_queue.clear()
        self.scheduler.update_from_output(None)

    def step(self) -> None:
        kind, call = self.input_queue.get_nowait()
        assert kind is steps._CALL
        call()


LOADED = [{"checksum": "c", "seconds": {"load": 0.1, "checksum": 0.01}}]


def ask(core: Core, step: str = "apply", version: int = 4, *, kv: str = "recompute") -> Future[Any]:
    return control_of(core).routes[f"/penstock/weights/{step}"]({"version": version, "kv": kv})


def applied(core: Core) -> Any:
    """The answer to a whole update."""
    done = ask(core)
    while not core.input_queue.empty():
        core.step()
    return done.result(0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_update_pauses_empties_the_caches_loads_labels_and_resumes_in_this_order(kv: str):
    core = Core(step_under_way=False)
    done = ask(core, kv=kv)
    core.step()
    answer = done.result(0)
    caches = ["reset prefix cache", "reset encoder cache"] if kv == "recompute" else []
    assert core.done == ["penstock_prepared", "pause keep False", *caches, "penstock_load(4,)", "label 4", "resume"]
    assert (answer["version"], answer["checksum"], answer["preempted" if kv == "recompute" else "kept"]) == (4, "c", 3)
    assert set(answer["seconds"]) == {"pause", "load", "resume", "bubble", "load.load", "load.checksum"}
    assert control_of(core).last_update() == (None if kv == "recompute" else 4, "c")
    said = control_of(core).routes["/penstock/core"]({})
    core.step()
    assert said.result(0)["checksum"] == "c", "by which an owner notices the update of another"


def test_an_update_of_an_idle_core_costs_no_tokens_and_needs_no_meter():
    core = Core(step_under_way=False)
    core.scheduler.get_request_counts = lambda: (0, 0)
    assert applied(core)["preempted"] == 0
    assert "meter" not in vars(control_of(core).pausing)
    meter = control_of(core).pausing.meter
    assert meter.loss(4).result(0) == TokenLoss(tokens=0.0, seconds=0.0, rate=0.0, back=True)
    assert meter.loss(5) is None, "it was not measured"


def test_a_core_that_has_loaded_waits_for_the_others_until_it_commits():
    core = Core(step_under_way=False)
    loaded = ask(core, "load")
    core.step()
    assert loaded.result(0)["checksum"] == "c"
    assert set(loaded.result(0)["seconds"]) == {"pause", "load", "load.load", "load.checksum"}
    control_of(core).pausing.resume()
    assert core.paused, "no resume but that of the update counts"
    ask(core, "commit")
    core.step()
    assert core.done[-3:] == ["penstock_load(4,)", "label 4", "resume"]


@pytest.mark.parametrize(("path", "given", "reply"), [
    ("/penstock/core", {}, (200, 4)),
    ("/penstock/weights/apply", {"version": 5, "kv": "keep"}, (409, "weight version 5 is not prepared here")),
    ("/penstock/weights/apply", {"version": "x", "kv": "keep"}, (400, "version")),
    ("/penstock/weights/prepare", {}, (400, "must be a JSON object with 'manifest'")),
])  # fmt: skip
def test_the_api_server_gets_what_the_port_would_answer(path: str, given: Any, reply: tuple[int, Any]):
    core = Core(step_under_way=False)
    done = control_of(core).control(path, orjson.dumps(given))
    if reply[0] != 400:
        kind, call = core.input_queue.get(timeout=WAIT_S)
        assert kind is steps._CALL
        call()
    status, answer = done.result(60)
    assert status == reply[0]
    assert answer["weight_version"] == 4 if status == 200 else reply[1] in answer["error"]


@pytest.mark.parametrize(
    ("emptied", "ranks", "error", "message"),
    [
        (False, LOADED, EngineError, "vLLM could not empty its KV cache"),
        (True, [{"error": "the trainer is gone"}], TransferError, "the trainer is gone"),
        (
            True,
            [{"error": "it is gone"}, {"fault": "RuntimeError: CUDA error"}],
            EngineError,
            "RuntimeError: CUDA error",
        ),
    ],
)
def test_a_core_that_did_not_load_is_held_until_an_update_succeeds(
    emptied: bool,  # noqa: FBT001
    ranks: list[dict[str, Any]],
    error: type[Exception],
    message: str,
):
    core = Core(step_under_way=False, ranks=ranks)
    core.emptied = emptied
    with pytest.raises(error, match=message):
        applied(core)
    assert ("penstock_load(4,)" in core.done) == emptied
    control_of(core).pausing.resume()
    assert core.paused
    core.emptied, core.ranks = True, LOADED
    assert applied(core)["version"] == 4
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


def test_a_core_says_how_long_it_was_held_whatever_held_it(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(pause, "time", clock)
    core = Core(step_under_way=False)
    pausing = control_of(core).pausing

    def at(seconds: float, *calls: Callable[[], Any]) -> float:
        clock.now = 100.0 + seconds
        for call in calls:
            call()
        return pausing.held_s

    assert at(1) == 0
    assert at(2, lambda: pausing.pause("keep", clear_cache=False)) == 0
    assert at(3, lambda: pausing.hold(pause.UPDATE), lambda: pausing.hold(pause.WEIGHTS)) == 1
    assert at(4, pausing.weights_are_in) == 2, "it is paused yet"
    assert at(6, pausing.resume, pausing.resume) == 4
    assert at(9) == 4
    assert at(10, lambda: sleep(pausing, 1, "keep")) == 4
    assert at(12, lambda: wake_up(pausing, None)) == 6


def test_a_core_counts_the_time_of_falling_asleep_as_held_and_is_awake_if_that_fails(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(pause, "time", clock)
    core = Core(step_under_way=False)
    pausing = control_of(core).pausing

    def slow(*_: Any) -> None:
        clock.now += 7.0  # it copies its weights away
        if clock.now > 110.0:
            raise RuntimeError("no memory")

    monkeypatch.setattr(core, "sleep", slow)
    sleep(pausing, 1, "keep")
    assert pausing.held_s == 7.0
    wake_up(pausing, None)
    with pytest.raises(RuntimeError, match="no memory"):
        sleep(pausing, 2, "keep")
    assert not pausing.holds


def test_a_core_says_what_it_is_in_and_how_many_calls_may_have_changed_its_weights():
    core = Core(step_under_way=False)
    pausing = control_of(core).pausing

    def state() -> dict[str, Any]:
        done = control_of(core).routes["/penstock/core"]({})
        core.step()
        return done.result(0)

    calm = {"running": 2, "waiting": 1, "weight_version": 4, "held_s": 0.0}
    assert state() == {**calm, "paused": False, "asleep": False, "torn": False, "foreign": 0, "checksum": None}
    for method in ("penstock_load", "compute_weight_checksums", "reset_weights", lambda worker: worker):
        control_of(core).count_foreign(method)
    pausing.pause("keep", clear_cache=False)
    pausing.hold(pause.WEIGHTS)
    said = state()
    assert (said["paused"], said["torn"], said["foreign"]) == (True, True, 2)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_overtakes_a_round_leaves_it_no_memory_to_write_to(level: int):
    core = Core(step_under_way=True)
    pausing, done = control_of(core).pausing, ask(core)
    core.step()
    sleep(pausing, level, "keep")
    assert core.waiting is not None
    core.waiting.set_result(None)
    with pytest.raises(StateError, match="version 4 was not loaded: the engine's weights are asleep"):
        done.result(0)
    assert "penstock_load(4,)" not in core.done
    core.step()
    wake_up(pausing, None)
    assert core.paused == (level == 2), "what the sleep kept goes on, and what it dropped does not"
    assert applied(core)["version"] == 4
    assert not core.paused


def test_a_wake_up_asks_vllm_only_for_what_sleeps():
    """Asked for memory that is there too, vLLM takes back none, and a step without its KV cache ends the engine."""
    core = Core(step_under_way=False)
    pausing = control_of(core).pausing
    sleep(pausing, 1, "keep")
    wake_up(pausing, ["weights"])
    wake_up(pausing, ["weights"])
    wake_up(pausing, ["weights", "kv_cache"])
    assert [said for said in core.done if said.startswith("wake")] == ["wake up ['weights']", "wake up ['kv_cache']"]
    assert not pausing.holds


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
    return control_of(core).routes["/penstock/weights/prepare"](body)


def test_a_version_is_checked_beside_the_core_and_prepared_between_two_of_its_steps(store):
    core, body = Core(step_under_way=True), offer(store, torch.ones(2, 3))
    control_of(core)._spec = SPEC
    done = prepare(core, body)
    assert core.done == []
    core.step()
    assert not done.done(), "a step is under way that may be long"
    core.end_step()
    assert done.result(0) == {"ok": True}
    assert core.done == ["penstock_prepare"], "nothing was paused"
    assert core.given == body["manifest"]


def test_workers_that_sleep_or_refuse_prepare_nothing(store):
    core = Core(step_under_way=False)
    control_of(core)._spec = SPEC
    core.refusals[1] = "there is no such group"
    refused = prepare(core, offer(store, torch.ones(2, 3)))
    core.step()
    with pytest.raises(WeightsError, match="there is no such group"):
        refused.result(0)
    sleep(control_of(core).pausing, 1, "keep")
    asleep = prepare(core, offer(store, torch.ones(2, 3)))
    core.step()
    with pytest.raises(StateError, match="weights are asleep"):
        asleep.result(0)
    assert core.done.count("penstock_prepare") == 1


def test_the_first_version_has_the_tensors_of_the_model_found_between_two_steps(store, monkeypatch):
    core, body, answers = Core(step_under_way=False), offer(store, torch.ones(2, 3)), queue.Queue[Future[Any]]()
    found = iter([OSError("the checkpoint is gone"), SPEC])

    def expected_weights(config: Any) -> WeightSpec:
        assert config == "a config"
        if isinstance(spec := next(found), OSError):
            raise spec
        return spec

    monkeypatch.setattr(spec_module, "expected_weights", expected_weights)
    for error in ("could not be found out: OSError: the checkpoint is gone", None):
        threading.Thread(target=lambda: answers.put(prepare(core, body)), daemon=True).start()
        _, call = core.input_queue.get(timeout=WAIT_S)
        call()
        done = answers.get(timeout=WAIT_S)
        if error is None:
            core.step()
            assert done.result(0) == {"ok": True}
        else:
            with pytest.raises(EngineError, match=error):
                done.result(0)


def test_a_group_is_joined_between_two_steps():
    core = Core(step_under_way=True)
    join = control_of(core).routes["/penstock/weights/group"]
    done = join({"epoch": "a"})
    core.step()
    assert (done.result(0), core.done, core.given) == ({"ok": True}, ["penstock_join_group"], {"epoch": "a"})


def test_an_engine_whose_kv_leaves_it_keeps_none_in_flight_alone() -> None:
    core = Core(step_under_way=False)
    core.scheduler.connector = type("SharedStorage", (), {})()
    done = ask(core, kv="keep_in_flight")
    core.step()
    with pytest.raises(StateError, match="the KV connector SharedStorage shares KV outside of the engine"):
        done.result(0)
    assert core.done == []
    status, answer = control_of(core).answer("/penstock/weights/apply", b'{"version": 4, "kv": "lose"}')
    assert status == 400
    assert "kv must be one of recompute, keep, keep_in_flight, got 'lose'" in answer["error"]


def test_without_a_key_there_is_no_port() -> None:
    with pytest.raises(StateError, match="there is none"):
        control_of(Core(step_under_way=False)).control_port([])
