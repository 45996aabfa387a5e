"""LoRA adapters in the engine core. Each has its own version, and can be paused by itself.

vLLM's route reloads an adapter's files in place, with four faults for a trainer. Requests in flight switch over with
their KV and without a mark. An adapter loaded in place is read from its files at every step (0.26 to 0.33). An adapter
that vLLM's cache dropped is reread from a path that may hold other weights by then. vLLM 0.26 finds KV of older weights
by the adapter's name. Here the core loads between two steps. The adapter's requests are recomputed without their KV,
or keep it with a label (`kept_kv`). New requests have a salt that names the version, and a mark among the outputs
shows where the new tokens start.

The scheduler still knows a paused adapter's requests, so they can be aborted, but none of its queues has them.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import itertools
import os
import re
import select
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checks import parse_json
from penstock.errors import EngineError, StateError, WeightsError
from penstock.plugin import compat
from penstock.plugin.adapter_worker import PLACE, READ_S, put_in_force, read_ahead, unload_adapter
from penstock.plugin.core import at_boundary, field, settle
from penstock.plugin.marks import put_output, send_mark
from penstock.wire import ADAPTERS

if TYPE_CHECKING:
    from penstock.plugin.core import CoreControl
    from penstock.weights.manifest import WeightSpec

_READ: dict[str, type] = {"name": str, "source": dict}
_LOAD = _READ | {"id": int, "version": int, "kv": str}
"""Fields of calls, with their types."""
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")
_HALF = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in force."""

    id: int
    """vLLM's number for the adapter."""
    load: int
    """Which load of this core brought it. An earlier owner may have given its version to other weights."""


class CoreAdapters:
    """The adapters of one engine core. Methods run in the core's thread, between two steps."""

    def __init__(self, control: CoreControl) -> None:
        self.loaded: dict[str, LoadedAdapter] = {}
        """By name. Adapters that Penstock did not load are missing."""
        self._held: dict[str, list[Any]] = {}
        """Waiting vLLM Requests, by paused adapter."""
        self._loads = itertools.count(1)
        self._control = control
        self._core = core = control.core
        core.add_request = functools.partial(self._add, core.add_request)

    def routes(self) -> dict[str, Callable[[Any], Future[Any]]]:
        """Return the calls of the core's port, by path."""
        control = self._control

        def read(body: Any) -> Future[Any]:
            order = {name: field(body, name, kind) for name, kind in _READ.items()}
            done: Future[Any] = Future()
            settle(done, lambda: self.read(order))
            return done

        def load(body: Any) -> Future[Any]:
            order = {name: field(body, name, kind) for name, kind in _LOAD.items()}
            self.read(order)  # does nothing, unless this engine joined since, or too many others have been read since

            def work() -> Any:
                control.pausing.require_awake()
                return self.load(order)

            return control.in_core(work)

        def named(change: Callable[[str], Any]) -> Callable[[Any], Future[Any]]:
            def route(body: Any) -> Future[Any]:
                name = field(body, "name", str)
                return control.in_core(lambda: change(name))

            return route

        steps = {"unload": self.unload, "pause": self.pause, "resume": self.resume}
        changes = {f"{ADAPTERS}/{step}": named(change) for step, change in steps.items()}
        return {f"{ADAPTERS}/read": read, f"{ADAPTERS}/load": load, **changes}

    def load_of(self, lora_request: Any) -> int | None:
        """Return which load brought a request's adapter, if Penstock did. Thread-safe."""
        adapter = self.loaded.get(lora_request.lora_name)
        return None if adapter is None else adapter.load

    def read(self, order: dict[str, Any]) -> dict[str, Any]:
        """Check an adapter, and let the workers read it during generation.

        Runs in the caller's thread. `order` has `name` and `source`. Workers read a source once before its `load`.

        Raises:
            WeightsError: the adapter does not fit the model.
        """
        check_adapter(order["source"], self._control.known_spec())
        until = time.perf_counter() + READ_S
        with tempfile.TemporaryDirectory(prefix="penstock-read-") as folder:
            given = {**order, "done": str(Path(folder, "done"))}
            os.mkfifo(given["done"], 0o600)
            end = os.open(given["done"], os.O_RDWR | os.O_NONBLOCK)
            try:
                rpc = self._core.penstock_rpc
                left = sum(self._control.in_core(lambda: rpc(read_ahead, args=(given,))).result(READ_S))
                (poll := select.poll()).register(end, select.POLLIN)
                while left and poll.poll(1e3 * max(0.0, until - time.perf_counter())):
                    left -= len(os.read(end, left))
            finally:
                os.close(end)
        return {"ok": True}

    def load(self, order: Mapping[str, Any]) -> Any:
        """Put a version of an adapter in force.

        Args:
            order: `name`, `id` (vLLM's), `version`, `source` (see `adapter_worker.read_from`), and `kv` for requests in
                flight.

        Raises:
            WeightsError: the adapter is unreadable. The version before it stays in force.
            EngineError: only some workers have it. The engine must not serve.
            StateError: KV leaves the engine, so requests in flight cannot keep theirs for themselves.
        """
        if order["kv"] != "recompute":
            self._control.kv.check()
        began = time.perf_counter()
        return self._change(lambda: self._load(order, began), (order["name"], order["version"]))

    def _load(self, order: Mapping[str, Any], began: float) -> dict[str, Any]:
        name, version, paused = order["name"], order["version"], time.perf_counter()
        problems = self._core.penstock_rpc(put_in_force, args=(dict(order),))
        if all(problems):
            raise WeightsError(problems[0])
        if any(problems):
            raise EngineError(f"some workers lack adapter {name!r}: {next(filter(None, problems))}")
        self.loaded[name] = LoadedAdapter(order["id"], next(self._loads))
        loaded = time.perf_counter()
        self._control.kv.salt()
        if order["kv"] == "recompute":
            preempted, kept = self._preempt(name), 0
        else:
            preempted, kept = self._control.kv.keep_of(self._requests(name))
        send_mark(self._core, engine_index=self._core.engine_index, adapter=name, adapter_version=version)
        end = time.perf_counter()
        seconds = {"pause": paused - began, "load": loaded - paused, "resume": end - loaded, "bubble": end - began}
        return {"version": version, "seconds": seconds, "preempted": preempted, "kept": kept}

    def unload(self, name: str) -> dict[str, Any]:
        """Forget an adapter. StateError: it has requests in flight."""
        if count := len(self._requests(name)):
            raise StateError(f"adapter {name!r} has {count} requests in flight; unload it when they have ended")
        if (adapter := self.loaded.pop(name, None)) is not None:
            self._core.penstock_rpc(unload_adapter, args=(adapter.id,))
        self._held.pop(name, None)
        return {"ok": True}

    def pause(self, name: str) -> Any:
        """Stop an adapter's requests after a token. They and new ones wait."""
        running = any(_adapter_of(request) == name for request in self._core.scheduler.running)
        # Data-parallel replicas that step together also hold together.
        together = hasattr(self._core, "dp_group")
        return self._change(lambda: self._hold(name)) if running or together else self._hold(name)

    def resume(self, name: str) -> dict[str, Any]:
        """Let an adapter's requests continue. Harmless if it is not paused."""
        held, scheduler = self._held.pop(name, []), self._core.scheduler
        for request in held:
            if scheduler.requests.get(request.request_id) is request:  # else it was aborted
                scheduler._enqueue_waiting_request(request)  # noqa: SLF001
        _wake_replicas(self._core)
        return {"ok": True}

    def _change(self, work: Callable[[], Any], update: Hashable = None) -> Any:
        """Call `work` between steps. Return a future if a step runs now. `update` names the measured update."""
        pausing = self._control.pausing

        def changed() -> Any:
            try:
                return work()
            finally:
                pausing.let_go(changed)

        if update is not None:
            pausing.measure(update)
        pausing.hold(changed)
        return at_boundary(self._core, changed)

    def _add(self, add_request: Callable[..., None], request: Any, request_wave: int = 0) -> None:
        """Replace the core's `add_request`, for adapters that are gone or paused."""
        lora = request.lora_request
        if lora is not None and lora.lora_path.startswith(PLACE) and lora.lora_name not in self.loaded:
            # The adapter was unloaded while the request was on its way.
            _abort_unknown(self._core, request)
            return
        add_request(request, request_wave)
        if lora is not None and lora.lora_name in self._held:
            self._hold_back([request])

    def _requests(self, name: str) -> list[Any]:
        return [request for request in self._core.scheduler.requests.values() if _adapter_of(request) == name]

    def _preempt(self, name: str) -> int:
        """Preempt an adapter's requests. They lose their KV and are first in the queue."""
        scheduler = self._core.scheduler
        chosen = [request for request in scheduler.running if _adapter_of(request) == name]
        for request in reversed(chosen):
            scheduler.running.remove(request)
            compat.preempt(scheduler, request)
        # As in vLLM's own `reset_prefix_cache`: they must not count as scheduled in the step before.
        scheduler.prev_step_scheduled_req_ids.difference_update(request.request_id for request in chosen)
        return len(chosen)

    def _hold(self, name: str) -> dict[str, Any]:
        self._held.setdefault(name, [])
        self._preempt(name)
        scheduler = self._core.scheduler
        self._hold_back([r for queue in compat.waiting_queues(scheduler) for r in queue if _adapter_of(r) == name])
        return {"held": sum(scheduler.requests.get(request.request_id) is request for request in self._held[name])}

    def _hold_back(self, requests: Iterable[Any]) -> None:
        chosen = list(requests)
        for queue in compat.waiting_queues(self._core.scheduler):
            queue.remove_requests(chosen)
        for request in chosen:
            self._held[_adapter_of(request)].append(request)


def _abort_unknown(core: Any, request: Any) -> None:
    """End a request that the scheduler has not accepted."""
    from vllm.v1.engine import FinishReason  # noqa: PLC0415 - only inside vLLM

    put_output(core, (request.client_index,), request_id=request.request_id, finish_reason=FinishReason.ABORT)


def _wake_replicas(core: Any) -> None:
    """Wake data-parallel replicas that step together, like vLLM's `add_request`."""
    from vllm.v1.engine import EngineCoreOutputs  # noqa: PLC0415 - only inside vLLM

    if getattr(core, "has_coordinator", False) and not core.engines_running:
        core.engines_running = True
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))


def _adapter_of(request: Any) -> str:
    return "" if request.lora_request is None else request.lora_request.lora_name


def check_adapter(source: Mapping[str, Any], spec: WeightSpec) -> None:
    """Compare an adapter's tensors with the model's. WeightsError: they do not fit.

    vLLM does not compare shapes before it writes, and skips layers that the model lacks.
    """
    file = Path(source.get("file") or Path(source["path"], "adapter_model.safetensors"))
    if not file.is_file():
        return  # a hub name, or other files: vLLM reads them
    rank, halves = _rank(source), set[tuple[str, str]]()
    known, layers = False, {match[1] for name in spec.shapes if (match := _LAYER.match(name))}
    of_adapter: set[str] = set()
    for name, shape in _shapes(file):
        if (match := _HALF.fullmatch(name)) is None:
            continue
        base, axis = spec.shapes.get(f"{match['module']}.weight"), 1 if match["half"] == "A" else 0
        known |= base is not None
        halves.add((match["module"], match["half"]))
        if rank is not None and shape[1 - axis] != rank:
            raise WeightsError(
                f"the adapter's tensor {name!r} has shape {shape}, and its configuration says r={rank}; send the "
                "configuration that it was trained with"
            )
        of_adapter |= {layer[1]} if (layer := _LAYER.match(match["module"])) else set()
        if base is not None and shape[axis] != base[axis]:
            raise WeightsError(
                f"the adapter is of another model: its tensor {name!r} has shape {shape}, and the engine's "
                f"{match['module']!r} has {base}"
            )
    if alone := sorted(module for module, half in halves if (module, "BA"[half == "B"]) not in halves):
        raise WeightsError(f"the adapter has one of lora_A and lora_B for {alone[0]!r}, and not both")
    if known and (missing := sorted(of_adapter - layers)):
        raise WeightsError(f"the adapter is of another model: the engine's has no {missing[0]!r}")


def _rank(source: Mapping[str, Any]) -> int | None:
    """Return the rank of all matrices of an adapter; None if there is no single one."""
    config = source.get("config")
    if config is None and (file := Path(source["path"], "adapter_config.json")).is_file():
        config = parse_json(file.read_bytes(), str(file), WeightsError)
    return None if not isinstance(config, dict) or config.get("rank_pattern") else config.get("r")


def _shapes(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - part of vLLM's environment

    try:
        with safe_open(file, framework="pt") as tensors:
            return [(name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the adapter's file {file} cannot be read: {error}") from error
