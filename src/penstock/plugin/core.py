"""Control of one engine core, in its own process: checks, pauses and weight updates between two of its steps.

An update by calls on the API server would wait five times behind the tokens of every stream: 2.3 to 3.1 s with 256
streams, although the weights need 0.13 s. Here the update is a single piece of work in the core. Calls come to the
core's own port. The API server forwards the calls it gets, and coordinates several cores (`cores.py`). `patches.py`
adds our methods to vLLM's core.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from typing import Any, get_args

import orjson

from penstock.control_server import ControlServer, listen, respond
from penstock.control_types import KV
from penstock.errors import EngineError, StateError, TransferError, WeightsError
from penstock.plugin import attempt
from penstock.plugin.pause import ASLEEP, UPDATE, WEIGHTS, PauseState, StepCap, clear_kv, mode_in_core
from penstock.plugin.steps import Steps, between_steps
from penstock.rooms import plugged_as, plugged_in
from penstock.weights.manifest import WeightManifest, WeightSpec
from penstock.wire import version_number

SPEC_TIMEOUT_S = 600.0
"""Seconds for the core to end its step and find its tensors. Callers have their own deadlines."""
Route = Callable[[Any], Future[Any]]
"""Begins the work of a call with its body."""
READS = frozenset({"compute_weight_checksums", "get_model_inspection", "update_max_model_len"})
"""vLLM's worker methods that outside callers use and that keep the weights. Any other may change them."""


def control_of(core: Any) -> CoreControl:
    """Return the control of vLLM's EngineCore, in its process."""
    if "_penstock_control" not in core.__dict__:
        core._penstock_control = CoreControl(core)  # noqa: SLF001
    return core._penstock_control  # noqa: SLF001


class CoreControl:
    """Control of one engine core. Routes and what they check run in their caller's thread, all else between steps."""

    def __init__(self, core: Any) -> None:
        self.core = core
        steps = Steps(time.perf_counter)
        steps.follow(core.scheduler)
        self.pausing = PauseState(core, steps)
        self.step_cap = StepCap(core, steps)
        # A pause that clears the caches would empty only one half of the cache of processed images. The other half, in
        # the API server, would then send the hash of an image it has sent before, and the request would fail (0.26 to
        # 0.33). vLLM's pull request 43001 empties both, but too late for a pause that waits for a step.
        core.reset_mm_cache = lambda: None
        self.kept_version: int | None = None
        """Version of our last update, if that update kept the KV cache."""
        self.routes: dict[str, Route] = {
            "/penstock/weights/prepare": self._prepare,
            "/penstock/weights/group": lambda body: self.in_core(
                lambda: self._call_workers("penstock_join_group", body)
            ),
            "/penstock/weights/apply": lambda body: self.in_core(self._update(body, commits=True).load),
            "/penstock/weights/load": lambda body: self.in_core(self._update(body).load),
            "/penstock/weights/commit": lambda body: self.in_core(self._update(body).commit),
            "/penstock/weights/loss": lambda body: plugged_in("token_meter.loss")(self, body),
            "/penstock/pause": self._pause,
            "/penstock/resume": lambda _: self.in_core(self.pausing.resume),
            "/penstock/core": lambda _: self.in_core(self._state),
            "/penstock/core/gone": lambda _: Future(),  # no answer: the connection breaks when this process ends
        }
        self._foreign = 0
        self.loaded: str | None = None
        """Checksum of our last update, as it answered."""
        self._spec: WeightSpec | None = None
        self._server: ControlServer | None = None
        self.adapters: Any = None
        """`adapters.CoreAdapters` of an engine that takes adapters."""
        if core.vllm_config.lora_config is not None:
            self.adapters = plugged_in("adapters.core")(self)
            self.routes |= self.adapters.routes()

    @cached_property
    def kv(self) -> Any:
        """The helper for updates that keep KV in flight, `kept_kv.KeptKV`."""
        return plugged_in("kept_kv.core")(self.core, lambda lora: lora and self.adapters.load_of(lora))

    def in_core(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the core's thread call `work` between steps, and await its future."""
        done: Future[Any] = Future()
        between_steps(self.core, lambda: settle(done, work))
        return done

    def known_spec(self) -> WeightSpec:
        """Return the tensors of the engine's model. Not for the core's own thread."""
        # Found between two steps: transformers changes torch's default dtype to build a model without weights.
        return self._spec or self.in_core(self._find_spec).result(SPEC_TIMEOUT_S)

    # Utility methods, which the API server calls.

    def control_port(self, keys: list[str]) -> int:
        """Return the port of this core's server. The first call starts it, with the API keys to accept.

        StateError: there is no key, so the port would obey every user of the machine.
        """
        if not keys:
            raise StateError("the engine core takes calls only with the API key, and there is none")
        if self._server is None:
            routes = {f"POST {path}": functools.partial(self.answer, path) for path in self.routes}
            listening = listen(os.environ.get("PENSTOCK_CONTROL_HOST", "127.0.0.1"), 0)
            self._server = ControlServer(listening, routes, lambda _: keys)
            self.in_core(self._find_spec)  # start now, else the first update would wait for it
        return self._server.port

    def control(self, path: str, data: bytes) -> Future[tuple[int, Any]]:
        """Return status and answer of a route, as this core's port would give them."""
        done: Future[tuple[int, Any]] = Future()
        work = functools.partial(self.answer, path, data)
        threading.Thread(target=settle, args=(done, work), name="penstock-forwarded", daemon=True).start()
        return done

    def answer(self, path: str, data: bytes) -> tuple[int, Any]:
        """Return status and answer of a route for a JSON body, once its work has ended. Not for the core's thread."""
        return respond(lambda: self.routes[path](orjson.loads(data) if data else {}))

    def last_update(self) -> tuple[int | None, str | None]:
        """Return `kept_version` and the checksum of our last update."""
        return self.kept_version, self.loaded

    def count_foreign(self, method: Any) -> None:
        """Count a worker call that may change the weights and is not one of our updates."""
        if not (isinstance(method, str) and (method.startswith("penstock_") or method in READS)):
            self._foreign += 1

    # Routes.

    def _prepare(self, body: Any) -> Future[Any]:
        """Check a version in this thread. Then let the workers prepare it."""
        checked: Future[dict[str, Any]] = Future()
        settle(checked, lambda: self._checked(body))

        def work() -> Future[dict[str, Any]]:
            self.pausing.require_awake()
            self._call_workers("penstock_prepare", checked.result(0))
            return self.step_cap.begin()

        return checked if checked.exception(0) else self.in_core(work)

    def _checked(self, body: Any) -> dict[str, Any]:
        manifest = WeightManifest.from_json(field(body, "manifest"))
        self.known_spec().check(manifest)
        if (kind := manifest.transport) in plugged_as("check"):  # the host can read its bytes
            manifest = plugged_in(f"check.{kind}")(manifest)
        return manifest.to_json()

    def _find_spec(self) -> WeightSpec:
        if self._spec is not None:
            return self._spec
        config = self.core.vllm_config.model_config
        spec, error = attempt(lambda: plugged_in("spec")(config), "finding the tensors of the engine's model")
        if error is not None:
            raise EngineError(
                f"the tensors of the engine's model could not be found out: {type(error).__name__}: {error}"
            ) from error
        self._spec = spec
        return spec

    def _call_workers(self, method: str, given: Any) -> dict[str, Any]:
        for problem in self.core.penstock_rpc(method, args=(given,)):
            if problem is not None:
                raise WeightsError(problem)
        return {"ok": True}

    def _pause(self, body: Any) -> Future[Any]:
        mode, clear_cache = mode_in_core(str(field(body, "mode"))), bool(field(body, "clear_cache"))
        return self.in_core(lambda: self.pausing.pause(mode, clear_cache))

    def _update(self, body: Any, *, commits: bool = False) -> CoreUpdate:
        if (kv := field(body, "kv")) not in get_args(KV):
            raise WeightsError(f"kv must be one of {', '.join(get_args(KV))}, got {kv!r}")
        return CoreUpdate(self, field(body, "version", int), kv, commits=commits)

    def _state(self) -> dict[str, Any]:
        running, waiting = self.core.scheduler.get_request_counts()
        label = self.core.get_weight_version()
        return {
            "paused": self.core.is_scheduler_paused(),
            "running": running,
            "waiting": waiting,
            "held_s": self.pausing.held_s,
            "asleep": bool(ASLEEP & self.pausing.holds),
            "torn": WEIGHTS in self.pausing.holds,
            "weight_version": None if label is None else version_number(label),
            "foreign": self._foreign,
            "checksum": self.loaded,
        }


class CoreUpdate:
    """One update of one core. With `commits`, `load` is all of it. Its methods run in the core's thread."""

    def __init__(self, control: CoreControl, version: int, kv: KV, *, commits: bool) -> None:
        self._control, self._core, self._pausing = control, control.core, control.pausing
        self._version, self._kv, self._commits = version, kv, commits
        self._began = 0.0

    def load(self) -> Any:
        """Pause, load, stay held until `commit`. Return a future if a step runs now."""
        self._began = time.perf_counter()
        self._control.step_cap.end()
        self._pausing.require_awake()
        if self._kv == "keep_in_flight":
            self._control.kv.check()
        prepared = self._core.penstock_rpc("penstock_prepared")
        if any(version != self._version for version in prepared):
            raise StateError(f"weight version {self._version} is not prepared here (prepared: {prepared})")
        self._pausing.measure(self._version)
        # Also if it is paused: a `wait` pause lets requests continue, and a `keep` pause may still wait for a step.
        self._pausing.hold(UPDATE)
        return at_boundary(self._core, self._load_paused)

    def _load_paused(self) -> dict[str, Any]:
        try:  # vLLM calls the latest waiter for a step first, so a later sleep may already have happened
            self._pausing.require_awake()
        except StateError as error:
            self._pausing.let_go(UPDATE)
            raise StateError(f"weight version {self._version} was not loaded: {error}") from error
        core, paused = self._core, time.perf_counter()
        in_flight = sum(core.scheduler.get_request_counts())  # a paused scheduler counts none of them as unfinished
        self._pausing.hold(WEIGHTS)
        kept = in_flight if self._kv == "keep" else 0
        if self._kv == "recompute":
            clear_kv(core)
        elif self._kv == "keep_in_flight":
            kept = self._control.kv.keep_in_flight(self._version)
        ranks = core.penstock_rpc("penstock_load", args=(self._version,))
        for key, failure in (("fault", EngineError), ("error", TransferError)):  # the second can be sent again
            if problem := next((rank[key] for rank in ranks if key in rank), None):
                raise failure(problem)
        self._control.kept_version = self._version if self._kv == "keep" else None
        slowest = max(ranks, key=lambda rank: rank["seconds"]["load"])
        loaded = time.perf_counter()
        seconds = {"pause": paused - self._began, "load": loaded - paused}
        seconds |= {f"load.{name}": taken for name, taken in slowest["seconds"].items()}
        if self._commits:
            self.commit()
            end = time.perf_counter()
            seconds |= {"resume": end - loaded, "bubble": end - self._began}
        checksum = self._control.loaded = "-".join(rank["checksum"] for rank in ranks)
        requests = {"preempted": in_flight - kept, "kept": kept}
        return {"version": self._version, "seconds": seconds, **requests, "checksum": checksum}

    def commit(self) -> None:
        """Label the loaded weights. The core resumes unless paused or asleep."""
        self._core.set_weight_version(str(self._version))
        self._pausing.weights_are_in()


def at_boundary(core: Any, work: Callable[[], Any]) -> Any:
    """Hold a core's scheduler, and call `work` once no step is under way. Return a future if one runs now."""
    paused: Future[Any] | None = core.pause_scheduler("keep", False)  # noqa: FBT003 - leaves the KV cache as it is
    if paused is None:
        return work()
    done: Future[Any] = Future()

    def after(paused: Future[Any]) -> None:
        def checked() -> Any:
            paused.result(0)
            return work()

        settle(done, checked)
        # vLLM calls this when a step has ended and the core is about to wait for its next input. This is one.
        between_steps(core, lambda: None)

    paused.add_done_callback(after)
    return done


def settle(done: Future[Any], work: Callable[[], Any]) -> None:
    """End `done` with the result of `work`, the result of its future, or its error."""
    result, error = attempt(work, "control of the engine core")
    if error is not None:
        done.set_exception(error)
    elif isinstance(result, Future):
        result.add_done_callback(lambda ended: settle(done, ended.result))
    else:
        done.set_result(result)


def field(body: Any, name: str, *kinds: type) -> Any:
    """Return a field of a body. WeightsError: it is missing or has another type."""
    if not isinstance(body, dict) or name not in body:
        raise WeightsError(f"the body must be a JSON object with {name!r}")
    value = body[name]
    if kinds and type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WeightsError(f"{name!r} in the body must be {wanted}, got {repr(value)[:200]}")
    return value
