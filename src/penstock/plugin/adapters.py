"""LoRA adapters in the engine core and its workers: each has a version of its own, and can be paused alone.

vLLM's route reloads an adapter's files in place, with four faults for a trainer: requests in flight change over with
their KV and without a mark; an adapter that was loaded in place is read from its files at every step (0.26 to 0.33);
one that its cache has dropped comes back from a path that may hold other weights by then; and 0.26 finds KV of older
weights by the adapter's name. Here the core loads between two steps. The adapter's requests give up their KV and are
computed again, or keep it with a label (`kept_kv`). New requests have a salt that names the version, and a mark among
the outputs tells where the new tokens begin.

A paused adapter's requests stay known to the scheduler, so that they can be aborted, and wait in none of its queues.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import re
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from penstock.errors import EngineError, StateError, WeightsError, parse_json
from penstock.plugin import compat
from penstock.plugin.core import field, settle
from penstock.plugin.cores import on_cores
from penstock.plugin.kept_kv import KeptKV
from penstock.plugin.middleware import RequestHooks
from penstock.plugin.patches import attempt
from penstock.plugin.spec import WeightSpec
from penstock.wire import ADAPTERS

PLACE = "penstock-adapter:"
"""Begins the path in vLLM's LoRARequest of an adapter that came by us; what it is read from, the worker knows."""
READ_S = 60.0
"""Deadline of a read while the engine goes on."""
MOST_AHEAD = 16
"""Adapters that are read and not in force yet; of more, the first are read again."""
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")
_HALF = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


# --- in the core's process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in force."""

    id: int
    """vLLM's number for it."""
    load: int
    """Which load of this core brought it: an earlier owner may have given its version to other weights."""


class CoreAdapters:
    """The adapters of one engine core; methods run in the core's thread, between two steps.

    `at_boundary` calls a function when no step is under way, with the scheduler held; see `CoreControl._change`.
    """

    def __init__(self, core: Any, at_boundary: Callable[..., Any], kv: KeptKV) -> None:
        self.loaded: dict[str, LoadedAdapter] = {}
        """By name; those that came past us are not among them."""
        self._held: dict[str, list[Any]] = {}
        """Paused adapters, and vLLM's Requests that wait."""
        self._loads = itertools.count(1)
        self._reads: dict[str, Future[float]] = {}
        """Reads whose `load` is to come, by the key of what they read."""
        self._core = core
        self._at_boundary = at_boundary
        self._kv = kv

    def load_of(self, lora_request: Any) -> int | None:
        """Load that brought a request's adapter; None: it has none, or the adapter came past us. Any thread may ask."""
        adapter = None if lora_request is None else self.loaded.get(lora_request.lora_name)
        return None if adapter is None else adapter.load

    def read(
        self, order: dict[str, Any], spec: WeightSpec, in_core: Callable[[Callable[[], Any]], Future[Any]]
    ) -> float:
        """Check an adapter, and have the workers read it while the engine goes on; runs in the caller's own thread.

        Args:
            order: `name`, `source`, and `key` of what is read, which `load` takes; again for one key reads nothing.
            spec: of the engine's model.
            in_core: see `CoreControl.in_core`.

        Returns:
            Seconds that it took.

        Raises:
            WeightsError: it does not fit the model.
        """
        mine: Future[float] = Future()
        read = self._reads.setdefault(order["key"], mine)
        if read is mine:
            while len(self._reads) > MOST_AHEAD:  # their callers went away
                self._reads.pop(next(iter(self._reads)), None)
            settle(read, lambda: self._read(order, spec, in_core))
            if read.exception() is not None:  # for `load` to try again
                self._reads.pop(order["key"], None)
        return read.result(2 * READ_S)

    def _read(
        self, order: dict[str, Any], spec: WeightSpec, in_core: Callable[[Callable[[], Any]], Future[Any]]
    ) -> float:
        began = time.perf_counter()
        check_adapter(order["source"], spec)
        with tempfile.TemporaryDirectory(prefix="penstock-read-") as folder:
            given = {**order, "done": str(Path(folder, "done"))}
            os.mkfifo(given["done"], 0o600)
            end = os.open(given["done"], os.O_RDWR | os.O_NONBLOCK)
            try:
                rpc = self._core.collective_rpc
                left = sum(in_core(lambda: rpc("penstock_adapter", args=("read", given))).result(READ_S))
                (poll := select.poll()).register(end, select.POLLIN)
                while left and poll.poll(1e3 * max(0.0, began + READ_S - time.perf_counter())):
                    left -= len(os.read(end, left))
            finally:
                os.close(end)
        return time.perf_counter() - began

    def load(self, order: Mapping[str, Any]) -> Any:
        """Put a version of an adapter in force.

        Args:
            order: `name`, `id` (vLLM's), `version`, `source` (see `read_from`), `kv` of requests in flight, `key` (see
                `read`), and `read_s`, which it returned.

        Raises:
            WeightsError: it cannot be read; the version before it stays in force.
            EngineError: only some workers have it; the engine must not serve.
            StateError: KV leaves the engine, so requests in flight alone cannot keep theirs.
        """
        if order["kv"] != "recompute":
            self._kv.check()
        began = time.perf_counter()
        return self._at_boundary(lambda: self._load(order, began), (order["name"], order["version"]))

    def _load(self, order: Mapping[str, Any], began: float) -> dict[str, Any]:
        name, version, paused = order["name"], order["version"], time.perf_counter()
        self._reads.pop(order["key"], None)
        problems = self._core.collective_rpc("penstock_load_adapter", args=(dict(order),))
        if all(problems):
            raise WeightsError(problems[0])
        if any(problems):
            raise EngineError(f"some workers lack adapter {name!r}: {next(filter(None, problems))}")
        self.loaded[name] = LoadedAdapter(order["id"], next(self._loads))
        loaded = time.perf_counter()
        self._kv.salt()
        if order["kv"] == "recompute":
            preempted, kept = self._preempt(name), 0
        else:
            preempted, kept = self._kv.keep_of(self._requests(name))
        compat.send_mark(self._core, engine_index=self._core.engine_index, adapter=name, adapter_version=version)
        end = time.perf_counter()
        seconds = {"pause": paused - began, "load": loaded - paused, "resume": end - loaded, "bubble": end - began}
        seconds["read"] = order["read_s"]
        return {"version": version, "seconds": seconds, "preempted": preempted, "kept": kept}

    def unload(self, name: str) -> dict[str, Any]:
        """Forget an adapter. StateError: requests are in flight."""
        if count := len(self._requests(name)):
            raise StateError(f"adapter {name!r} has {count} requests in flight; unload it when they have ended")
        if (adapter := self.loaded.pop(name, None)) is not None:
            self._core.collective_rpc("penstock_adapter", args=("unload", adapter.id))
        self._held.pop(name, None)
        return {"ok": True}

    def pause(self, name: str) -> Any:
        """Stop an adapter's requests at a token; they keep their tokens, and new ones wait too. Again is harmless."""
        running = any(_adapter_of(request) == name for request in self._core.scheduler.running)
        # Data-parallel replicas that step together hold together.
        together = hasattr(self._core, "dp_group")
        return self._at_boundary(lambda: self._hold(name)) if running or together else self._hold(name)

    def resume(self, name: str) -> dict[str, Any]:
        """Let an adapter's requests go on; harmless if it is not paused."""
        held, scheduler = self._held.pop(name, []), self._core.scheduler
        for request in held:
            if scheduler.requests.get(request.request_id) is request:  # else it was aborted
                scheduler._enqueue_waiting_request(request)  # noqa: SLF001
        compat.wake_replicas(self._core)
        return {"ok": True}

    def add(self, add_request: Callable[..., None], request: Any, wave: int) -> None:
        """`EngineCore.add_request`, for a request whose adapter may be gone or paused."""
        lora = request.lora_request
        if lora is not None and lora.lora_path.startswith(PLACE) and lora.lora_name not in self.loaded:
            # It was unloaded while the request was on its way here.
            compat.abort_unknown(self._core, request)
            return
        add_request(self._core, request, wave)
        if lora is not None and lora.lora_name in self._held:
            self._hold_back([request])

    def _requests(self, name: str) -> list[Any]:
        return [request for request in self._core.scheduler.requests.values() if _adapter_of(request) == name]

    def _preempt(self, name: str) -> int:
        """Take the KV of an adapter's running requests away; they wait at the head of the queue."""
        scheduler = self._core.scheduler
        chosen = [request for request in scheduler.running if _adapter_of(request) == name]
        for request in reversed(chosen):
            scheduler.running.remove(request)
            compat.preempt(scheduler, request)
        # As vLLM's own `reset_prefix_cache` has it: they must not count as scheduled in the step before.
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


def _adapter_of(request: Any) -> str:
    return "" if request.lora_request is None else request.lora_request.lora_name


def check_adapter(source: Mapping[str, Any], spec: WeightSpec) -> None:
    """Compare an adapter's tensors with the model's. WeightsError: it is one of another model.

    vLLM compares no shapes before it writes, and passes over layers that the model lacks.
    """
    file = Path(source.get("file") or Path(source["path"], "adapter_model.safetensors"))
    if not file.is_file():
        return  # a name of the hub, or other files: vLLM reads them
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
    """Return the rank that an adapter's configuration gives all matrices; None: it gives several, or there is none."""
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


# --- on a worker -----------------------------------------------------------------------------------------------------


def load_adapter(worker: Any, order: Mapping[str, Any]) -> None:
    """Load an adapter on a worker, in place of its older version; no step may run.

    Raises:
        WeightsError: the engine takes none, or vLLM refuses this one; the older version stays.
    """
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and not needed by models without

    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise WeightsError("the engine takes no adapters; launch it with enable_lora=true")
    sources, number = _sources(manager), order["id"]
    before = sources.get(number)
    request = LoRARequest(order["name"], number, PLACE + order["name"], load_inplace=True)
    sources[number] = order["source"]
    manager.penstock_next = manager.penstock_ahead.pop(order["key"], None)
    _, error = attempt(lambda: manager.add_adapter(request), f"loading adapter {order['name']!r}")
    if error is not None:
        if before is None:
            del sources[number]
            manager.remove_adapter(number)
        else:  # it may be gone already
            sources[number] = before
            manager.add_adapter(request)
        raise WeightsError(f"adapter {order['name']!r} cannot be loaded: {error}") from error


def worker_step(worker: Any, step: str, given: Any) -> Any:
    """Do a step on a worker: `read` an order, or `unload` vLLM's number."""
    return {"read": read_ahead, "unload": unload_adapter}[step](worker, given)


def read_ahead(worker: Any, order: Mapping[str, Any]) -> bool:
    """Begin to read an adapter in a thread, for the `load_adapter` whose order has the same `key`.

    Returns:
        Whether the end of the read is written, as one byte, to the pipe that `done` names: on the core's host alone.
        `load_adapter` waits for other workers.
    """
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        return False  # `load_adapter` refuses it
    _sources(manager)
    read: Future[Any] = Future()
    manager.penstock_ahead[order["key"]] = read
    while len(manager.penstock_ahead) > MOST_AHEAD:  # their callers went away
        del manager.penstock_ahead[next(iter(manager.penstock_ahead))]

    def work() -> Any:
        if worker.device.type != "cpu":  # with many, each of hundreds of small tensors waits for all of them
            torch.set_num_threads(1)
        return manager.penstock_read(order["name"], order["source"])

    def run() -> None:
        settle(read, work)
        with suppress(OSError):  # the core has stopped to wait
            end = os.open(order["done"], os.O_WRONLY | os.O_NONBLOCK)
            os.write(end, b"1")
            os.close(end)

    threading.Thread(target=run, name="penstock-adapter", daemon=True).start()
    return Path(order["done"]).is_fifo()


def unload_adapter(worker: Any, number: int) -> None:
    """Forget an adapter on a worker."""
    manager = worker.model_runner.lora_manager
    manager.remove_adapter(number)
    _sources(manager).pop(number, None)


def _sources(manager: Any) -> dict[int, Mapping[str, Any]]:
    """What our adapters are read from, by vLLM's number.

    vLLM drops the adapters that were used least when it has more than `max_cpu_loras`, and reads one again when a
    request needs it. It has no extension point for what it reads: `_load_adapter` is patched (0.26 to 0.33).
    """
    if not hasattr(manager, "penstock_sources"):
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and not needed by models without

        load, sources = manager._load_adapter, {}  # noqa: SLF001
        for known in (manager._lora_model_cls, type(manager._adapter_manager)):  # noqa: SLF001
            _leave_unpinned(sys.modules[known.__module__])

        def read(name: str, source: Mapping[str, Any]) -> Any:
            with read_from(source) as path:
                adapter = load(LoRARequest(name, 1, path))  # its number is known when it is put in force
            if not any(".experts" in module for module in adapter.loras):  # of those vLLM packs no adapter twice
                manager._adapter_manager._create_merged_loras_inplace(adapter)  # noqa: SLF001
            _pin(adapter)
            return adapter

        def load_from_source(request: Any) -> Any:
            if not request.lora_path.startswith(PLACE):
                sources.pop(request.lora_int_id, None)  # another client put its own in this one's place
                return load(request)
            ready, manager.penstock_next = manager.penstock_next, None
            number = request.lora_int_id
            adapter = read(request.lora_name, sources[number]) if ready is None else ready.result(READ_S)
            adapter.id = number
            return adapter

        manager._load_adapter = load_from_source  # noqa: SLF001
        manager.penstock_sources, manager.penstock_read = sources, read
        manager.penstock_ahead, manager.penstock_next = {}, None
    return manager.penstock_sources


def _leave_unpinned(module: Any) -> None:
    """Keep a module of vLLM's adapters from pinning each tensor of one."""
    module.PIN_MEMORY = False


def _pin(adapter: Any) -> None:
    """Lay an adapter's tensors in one piece of memory that a GPU reads without the processor.

    vLLM (0.26 to 0.33) pins each of hundreds: every one asks the driver, which other processes on the GPU hold up.
    """
    halves = [(part, half) for part in adapter.loras.values() for half in ("lora_a", "lora_b")]
    lists = [each if isinstance(each := getattr(part, half), list) else [each] for part, half in halves]
    tensors = [tensor for each in lists for tensor in each if tensor is not None]
    if not torch.cuda.is_available() or len({tensor.dtype for tensor in tensors}) != 1:
        return
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    pieces = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    for (part, half), each in zip(halves, lists, strict=True):
        pinned = [None if tensor is None else next(pieces).view(tensor.shape) for tensor in each]
        setattr(part, half, pinned if isinstance(getattr(part, half), list) else pinned[0])


@contextmanager
def read_from(source: Mapping[str, Any]) -> Generator[str]:
    """Give the folder that vLLM reads an adapter from: one made of `{"file", "config"}`, or that of `{"path"}`."""
    if "file" not in source:
        yield source["path"]
        return
    with tempfile.TemporaryDirectory(prefix="penstock-adapter-") as folder:
        Path(folder, "adapter_model.safetensors").symlink_to(source["file"])
        Path(folder, "adapter_config.json").write_text(json.dumps(source["config"]))
        yield folder


# --- in the API server's process -------------------------------------------------------------------------------------


class ServedAdapters:
    """The adapters of one API server: their names in vLLM's table, and calls that every core answers."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self._changing = asyncio.Lock()

    def routes(self, state: Any) -> dict[tuple[str, str], Any]:
        """Calls by method and path, with the state of vLLM's app; each is called with its AsyncLLM and the body."""
        return {
            ("GET", ADAPTERS): functools.partial(self.served, state),
            ("POST", ADAPTERS + "/read"): functools.partial(self.forward, "read"),
            ("POST", ADAPTERS + "/load"): functools.partial(self.load, state),
            ("POST", ADAPTERS + "/unload"): functools.partial(self.unload, state),
            ("POST", ADAPTERS + "/pause"): functools.partial(self.forward, "pause"),
            ("POST", ADAPTERS + "/resume"): functools.partial(self.forward, "resume"),
        }

    async def served(self, state: Any, engine: Any, _data: bytes) -> dict[str, Any]:
        """Name every adapter that requests can ask for: its version, its requests, and since when it had none."""
        known, now = state.openai_serving_models.lora_requests, time.monotonic()
        in_flight = [state.lora_name for state in engine.output_processor.request_states.values()]
        return {
            name: {
                "version": self._hooks.versions.adapters.get((0, name), {}).get("adapter_version"),
                "in_flight": in_flight.count(name),
                "idle_s": now - self._hooks.adapters_used.setdefault(name, now),
            }
            for name in known
        }

    async def load(self, state: Any, engine: Any, data: bytes) -> dict[str, Any]:
        """Put a version of an adapter in force on every core, then let requests ask for it."""
        body = parse_json(data, "the body", WeightsError)
        name = field(body, "name", str)
        models = state.openai_serving_models
        if engine.vllm_config.lora_config is None:
            raise WeightsError("the engine takes no adapters; launch it with enable_lora=true")
        if models.is_base_model(name):
            raise WeightsError(f"{name!r} is the name of the base model; give the adapter another")
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and not needed by models without

        self._hooks.install(engine)
        async with self._changing:
            known = models.lora_requests.get(name)
            number = models.lora_id_counter.inc(1) if known is None else known.lora_int_id
            order = orjson.dumps({**body, "id": number})
            answers = await on_cores(engine, f"{ADAPTERS}/load", order)
            models.lora_requests[name] = LoRARequest(name, number, PLACE + name)
            self._hooks.adapters_used[name] = time.monotonic()
        slowest = max(answers, key=lambda answer: answer["seconds"]["bubble"])
        return {**slowest, **{name: sum(answer[name] for answer in answers) for name in ("preempted", "kept")}}

    async def unload(self, state: Any, engine: Any, data: bytes) -> dict[str, Any]:
        """Forget an adapter; harmless if there is none of that name. StateError: it has requests in flight."""
        name = field(parse_json(data, "the body", WeightsError), "name", str)
        models = state.openai_serving_models
        async with self._changing:
            if any(state.lora_name == name for state in engine.output_processor.request_states.values()):
                raise StateError(f"adapter {name!r} has requests in flight; unload it when they have ended")
            with ExitStack() as undo:
                if (known := models.lora_requests.pop(name, None)) is not None:
                    undo.callback(models.lora_requests.setdefault, name, known)
                await on_cores(engine, f"{ADAPTERS}/unload", data)
                undo.pop_all()
        self._hooks.adapters_used.pop(name, None)
        for key in [key for key in self._hooks.versions.adapters if key[1] == name]:
            del self._hooks.versions.adapters[key]
        return {"ok": True}

    async def forward(self, step: str, engine: Any, data: bytes) -> dict[str, Any]:
        self._hooks.install(engine)
        answers = await on_cores(engine, f"{ADAPTERS}/{step}", data)
        return {"held": sum(answer.get("held", 0) for answer in answers)}
