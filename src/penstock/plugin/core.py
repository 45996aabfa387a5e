"""A whole weight update as one piece of work of vLLM's engine core: pause, load, label, resume.

Made of calls on the API server it takes five rounds through that process's event loop, and each waits behind the tokens
of every stream that is being served there, while the GPU stands still: 2.3 to 3.1 s with 256 streams where 0.13 s are
needed. Here the core does all of it between two of its steps. `core_server.py` brings the request to it past the API
server. The checks before it (`preparing.py`) take the same way, each in the thread of its connection, and only what
workers do for them is a piece of the core's own work.

`EngineCoreProc`, the core's process, has no extension point for this. Three things are hung in, all in vLLM 0.26 and
0.32: one more kind of item in its input queue, a utility method that tells where `core_server.py` listens, and one that
takes what only the API server knows.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.errors import EngineError, StateError, TransferError
from penstock.plugin import compat
from penstock.plugin.core_http import CoreServer
from penstock.plugin.pause import clear_kv, holds_of, mode_in_core, step_cap_of
from penstock.plugin.preparing import Preparing, group_of, raise_refusal
from penstock.plugin.spec import WeightSpec

READS = frozenset({"compute_weight_checksums", "get_model_inspection", "update_max_model_len"})
"""Worker methods of vLLM's own that are called from outside and leave the weights as they are; any other may not."""

_CALL = object()
"""The kind of an item in the core's input queue that is a function to call."""


def install() -> None:
    """Hang into this process's EngineCoreProc; more than once is harmless."""
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - only inside vLLM

    if hasattr(EngineCoreProc, "penstock_control_port"):
        return
    handle: Any = EngineCoreProc._handle_client_request  # noqa: SLF001

    @functools.wraps(handle)
    def handle_or_call(self: Any, request_type: Any, request: Any) -> None:
        if request_type is _CALL:
            request()
        else:
            handle(self, request_type, request)

    EngineCoreProc._handle_client_request = handle_or_call  # noqa: SLF001
    EngineCoreProc.collective_rpc = _sendable(EngineCoreProc.collective_rpc)
    EngineCoreProc.penstock_control_port = _control_port  # pyright: ignore[reportAttributeAccessIssue]
    EngineCoreProc.penstock_expect = _expect  # pyright: ignore[reportAttributeAccessIssue]
    EngineCoreProc.penstock_kv_kept = _kv_kept  # pyright: ignore[reportAttributeAccessIssue]


def _sendable(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.collective_rpc`, which fails where what workers answer cannot be sent to who asked.

    The core's output thread, which would find that out, ends of it (vLLM 0.26 to 0.32): no request is answered again.
    """
    from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult  # noqa: PLC0415 - only inside vLLM

    @functools.wraps(collective_rpc)  # vLLM reads the signature
    def call(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        count_foreign(core, method)
        results = collective_rpc(core, method, *args, **kwargs)
        try:
            MsgpackEncoder().encode(UtilityResult(results))
        except Exception as error:
            raise TypeError(f"what {method!r} returns cannot be sent to another process: {error}") from error
        return results

    return call


def count_foreign(core: Any, method: Any) -> None:
    """Note a call of a worker method that may change the weights and is not one of our updates."""
    if not (isinstance(method, str) and (method.startswith("penstock_") or method in READS)):
        core._penstock_foreign = getattr(core, "_penstock_foreign", 0) + 1  # noqa: SLF001


def _control_port(core: Any, keys: list[str]) -> int:
    """Of the server in this core's process; started by the first call, which says what API keys it takes."""
    server: CoreServer | None = getattr(core, "_penstock_server", None)
    if server is None:
        server = core._penstock_server = CoreServer(_routes(core), keys)  # noqa: SLF001
    return server.port


def _expect(core: Any, spec: Any) -> None:
    """Take the spec of the engine's weights (`WeightSpec` as JSON), or why there is none."""
    _preparing_of(core).expect(spec if isinstance(spec, str) else WeightSpec.from_json(spec))


def _preparing_of(core: Any) -> Preparing:
    if not hasattr(core, "_penstock_preparing"):
        core._penstock_preparing = Preparing()  # noqa: SLF001
    return core._penstock_preparing  # noqa: SLF001


def _routes(core: Any) -> dict[str, Callable[[Any], Future[Any]]]:
    """What a body says is read before the core is asked."""
    preparing = _preparing_of(core)

    def apply(body: Any) -> Future[Any]:
        version, clear_cache = int(body["version"]), bool(body["clear_cache"])
        return _in_core(core, lambda done: _Round(core, version, clear_cache, done).begin())

    def prepare(body: Any) -> Future[Any]:
        in_force = functools.partial(compat.core_version, core)
        return _checked(lambda: preparing.check(body, in_force), functools.partial(_prepare, core))

    def group(body: Any) -> Future[Any]:
        return _checked(lambda: group_of(body), functools.partial(_join_group, core))

    def _checked(check: Callable[[], Any], work: Callable[[Any, Future[Any]], None]) -> Future[Any]:
        """Check in this thread; then let the core work with what came of it, and end the future."""
        try:
            given = check()
        except Exception as error:  # noqa: BLE001 - handed to who asked
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused
        return _in_core(core, lambda done: work(given, done))

    def pause(body: Any) -> Future[Any]:
        mode, clear_cache = mode_in_core(str(body["mode"])), bool(body["clear_cache"])
        return _in_core(core, lambda done: _pause(core, mode, clear_cache, done))

    return {
        "/penstock/weights/prepare": prepare,
        "/penstock/weights/group": group,
        "/penstock/weights/apply": apply,
        "/penstock/pause": pause,
        "/penstock/resume": lambda _: _in_core(core, lambda done: done.set_result(holds_of(core).resume())),
        "/penstock/core": lambda _: _in_core(core, lambda done: done.set_result(_state(core))),
        "/penstock/core/gone": lambda _: Future(),  # never answered: its connection breaks when this process ends
    }


def _in_core(core: Any, work: Callable[[Future[Any]], None]) -> Future[Any]:
    """Let the core's own thread do something between two steps; the work has to end the future."""
    done: Future[Any] = Future()

    def call() -> None:
        try:
            work(done)
        except Exception as error:  # noqa: BLE001 - handed to who asked; it must not end the core's loop
            done.set_exception(error)

    core.input_queue.put_nowait((_CALL, call))
    return done


def _pause(core: Any, mode: str, clear_cache: bool, done: Future[Any]) -> None:  # noqa: FBT001
    paused: Future[Any] | None = holds_of(core).pause(mode, clear_cache)
    if paused is None:
        done.set_result(None)
    else:
        paused.add_done_callback(lambda paused: _copy(paused, done))


def _copy(ended: Future[Any], done: Future[Any]) -> None:
    error = ended.exception()
    if error is None:
        done.set_result(ended.result())
    else:
        done.set_exception(error)


def _prepare(core: Any, manifest: dict[str, Any], done: Future[Any]) -> None:
    if asleep := holds_of(core).check_awake():
        raise StateError(asleep)
    raise_refusal(core.collective_rpc("penstock_prepare", args=(manifest,)))
    step_cap_of(core).begin(lambda: done.set_result({"ok": True}))


def _join_group(core: Any, group: dict[str, Any], done: Future[Any]) -> None:
    raise_refusal(core.collective_rpc("penstock_join_group", args=(group,)))
    done.set_result({"ok": True})


def _kv_kept(core: Any) -> int | None:
    """The version of the last update of ours, if that kept the KV cache."""
    return getattr(core, "_penstock_kv_kept", None)


def _state(core: Any) -> dict[str, Any]:
    running, waiting = core.scheduler.get_request_counts()
    holds = holds_of(core)
    return {
        "paused": core.is_scheduler_paused(),
        "running": running,
        "waiting": waiting,
        "held_s": holds.held_s,
        "asleep": bool(holds.asleep),
        "torn": holds.without_weights,
        "weight_version": compat.core_label(core),
        "foreign": getattr(core, "_penstock_foreign", 0),
    }


class _Round:
    """One update; its methods run in the core's own thread, one after the other."""

    def __init__(self, core: Any, version: int, clear_cache: bool, done: Future[Any]) -> None:  # noqa: FBT001
        self._core = core
        self._version = version
        self._clear_cache = clear_cache
        self._done = done
        self._began = time.perf_counter()
        self._preempted = core.scheduler.get_num_unfinished_requests()

    def begin(self) -> None:
        """Pause. With a step on the device, vLLM answers with a future that ends when it is done."""
        step_cap_of(self._core).end()
        if asleep := holds_of(self._core).check_awake():
            raise StateError(asleep)
        held = self._core.collective_rpc("penstock_prepared")
        if any(version != self._version for version in held):
            raise StateError(f"weight version {self._version} is not prepared here (prepared: {held})")
        # Also where it is paused: a pause that waits lets requests go on, and one that keeps may wait for a step yet.
        holds_of(self._core).begin_update()
        paused: Future[Any] | None = self._core.pause_scheduler("keep", False)  # noqa: FBT003 - cleared in `_load`
        if paused is None:
            self._load(None)
        else:
            paused.add_done_callback(self._load)

    def _load(self, paused: Future[Any] | None) -> None:
        try:
            if paused is not None:
                paused.result(0)
                self._check_still_awake()
            self._done.set_result(self._load_and_resume())
        except Exception as error:  # noqa: BLE001 - handed to who asked; the engine stays paused
            self._done.set_exception(error)
        # Called when a step has ended, this runs where the core is about to wait for its next input.
        self._core.input_queue.put_nowait((_CALL, lambda: None))

    def _check_still_awake(self) -> None:
        """Of those that wait for a step, vLLM lets the last go first: a sleep that came later has happened by now."""
        holds = holds_of(self._core)
        if asleep := holds.check_awake():
            holds.drop_update()
            raise StateError(f"weight version {self._version} was not loaded: {asleep}")

    def _load_and_resume(self) -> dict[str, Any]:
        core, holds = self._core, holds_of(self._core)
        paused = time.perf_counter()
        holds.weights_are_out()
        if self._clear_cache:
            clear_kv(core)
        ranks = core.collective_rpc("penstock_load", args=(self._version,))
        raise_failure(ranks)
        compat.label_core(core, self._version)
        core._penstock_kv_kept = None if self._clear_cache else self._version  # noqa: SLF001
        loaded = time.perf_counter()
        holds.weights_are_in()  # and goes on, unless somebody has paused it or put it to sleep
        end = time.perf_counter()
        slowest = max(ranks, key=lambda rank: rank["seconds"]["load"])
        return {
            "version": self._version,
            "seconds": {
                "pause": paused - self._began,
                "load": loaded - paused,
                "resume": end - loaded,
                "bubble": end - self._began,
                **{f"load.{name}": seconds for name, seconds in slowest["seconds"].items()},
            },
            "preempted": self._preempted,
            "checksum": "-".join(rank["checksum"] for rank in ranks),
        }


def raise_failure(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Of what the ranks answered to `penstock_load`; the model must not run.

    Raises:
        EngineError: something unforeseen: the same weights again may meet with the same.
        TransferError: a version that comes whole makes it good.
    """
    for key, error in (("fault", EngineError), ("error", TransferError)):
        if problem := next((rank[key] for rank in ranks if key in rank), None):
            raise error(problem)
