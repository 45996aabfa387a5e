"""vLLM without our plugin: its identity, its control, and how its requests continue.

It sends no progress reports, and cannot resume a request:

- If its engine dies, the client sends the request again from the start (`engine/client.py`).
- If a pause aborts it, the client sends each sample of the token endpoint again, with its tokens as part of the
  prompt, and joins the ids. Text, chats, and samples with stop strings or grammars start over, because their state is
  inside the engine. A stream that the caller has seen cannot start over, so it raises.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import orjson

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.checks import reading
from penstock.control_types import CoreState
from penstock.engine.capabilities import SAMPLED_FROM, Capabilities, EngineInfo
from penstock.engine.client import Answer, ResumableRequest
from penstock.engine.control import ControlClient, checked_info
from penstock.engine.lacking import require
from penstock.engine.openai import Stream
from penstock.errors import EngineError, EngineHTTPError, StateError
from penstock.http import HttpTransport, Reply
from penstock.types import SamplingParams
from penstock.wire import GENERATE, version_number

UNAUTHORIZED, NOT_FOUND, NOT_ALLOWED, REFUSED_BODY, FAILED = 401, 404, 405, frozenset({400, 422}), 500
_CALLS = {
    "pause": "/pause", "abort": "/abort_requests", "caches": "/reset_prefix_cache", "sleep": "/sleep",
    "rpc": "/collective_rpc", "weight_transfer": "/init_weight_transfer_engine",
}  # fmt: skip
"""Each is a POST route. A server with the route answers GET with 405, others with 404."""


OLD = re.compile(r"0\.([12]?\d|3[01])\.")
"""Versions of vLLM before 0.32, which label neither weights nor tokens."""


class VanillaControl(ControlClient):
    """`ControlClient` of a server with or without our plugin. `info` finds out which."""

    has_plugin = True

    async def state(self) -> CoreState:
        """Return the core's report; without our plugin, only whether it is paused."""
        return await super().state() if self.has_plugin else CoreState(await self.is_paused())

    async def info(self) -> EngineInfo:
        """Return what `ControlClient.info` does, also without our plugin; the error of a wrong key says what to do."""
        self.has_plugin = True
        try:
            return await super().info()
        except EngineHTTPError as error:
            if error.status == UNAUTHORIZED:
                does = (
                    "does not take the API key that was given"
                    if self._key
                    else "asks for an API key and none was given"
                )
                raise EngineHTTPError(
                    f"{self.url} {does}; a fleet and its servers share one key, which `penstock serve` "
                    "(PENSTOCK_API_KEY) or Fleet (api_key) takes at its start; "
                    "an engine that a fleet launched obeys that fleet alone",
                    status=error.status,
                    engine=self.name,
                ) from None
            if error.status != NOT_FOUND:
                raise
        self.has_plugin = False
        return await identify(self.http, timeout_s=self.timeout_s)


async def identify(http: HttpTransport, *, timeout_s: float) -> EngineInfo:
    """Find out a vLLM server's identity and capabilities, changing nothing.

    Without dev mode, the server does not report its settings.

    Raises:
        EngineHTTPError: it is not a vLLM server (404), or requires another key (401).
        EngineError: its answers are unlike vLLM's.
    """
    version = await _get(http, "/version", timeout_s)
    if not isinstance(version, dict) or "version" not in version:
        raise EngineHTTPError(
            f"{http.url} is neither an engine of Penstock nor a vLLM server: it has no /penstock/info and no /version",
            status=NOT_FOUND,
            engine=http.name,
        )
    models, paused, weights, settings, tokens, *found = await asyncio.gather(
        http.get("/v1/models", timeout_s=timeout_s),
        _get(http, "/is_paused", timeout_s),
        _get(http, "/weight_info", timeout_s),
        _get(http, "/server_info?config_format=json", timeout_s, unless=FAILED),
        _takes_tokens(http, timeout_s),
        *(_has(http, path, timeout_s) for path in _CALLS.values()),
    )

    def malformed(message: str) -> EngineError:
        return EngineError(f"{message}; is something else in front of vLLM?", engine=http.name)

    with reading("answers of a vLLM server", malformed):
        config = _section(settings, "vllm_config")
        model, parallel = _section(config, "model_config"), _section(config, "parallel_config")
        number = str(version["version"])  # pyright: ignore[reportUnknownArgumentType] - a JSON object
        return checked_info(
            engine="vllm",
            vllm=number,
            weight_version=0 if weights is None else _version(http, weights["weight_version"]),
            paused=bool(paused and paused["is_paused"]),
            tp=int(parallel.get("tensor_parallel_size", 1)),
            pp=int(parallel.get("pipeline_parallel_size", 1)),
            dp=_ranks(parallel),
            vocab_size=int(model.get("vocab_size", 0)),
            max_model_len=int(models["data"][0]["max_model_len"]),
            transports=(),
            capabilities=_capabilities(
                dict(zip(_CALLS, found, strict=True)), config, tokens=tokens, labels=not OLD.match(number)
            ),
            dtype=str(model.get("dtype") or "").removeprefix("torch."),
            instance=f"{of}:{http.url.rpartition(':')[2]}" if (of := config.get("instance_id")) else "",
            model=str(models["data"][0]["id"]),
        )


def _capabilities(calls: dict[str, bool], config: dict[str, Any], *, tokens: bool, labels: bool) -> Capabilities:
    """Return the capabilities. `labels`: it labels weights and tokens."""
    model, transfer = _section(config, "model_config"), _section(config, "weight_transfer_config")
    found: dict[str, Any] = {
        **calls,
        "sleep": calls["sleep"] and bool(model.get("enable_sleep_mode")),
        "weight_transfer": transfer.get("backend") if calls["weight_transfer"] and labels else None,
        "sampled_logprobs": model.get("logprobs_mode") in SAMPLED_FROM,
    }
    return Capabilities(plugin=False, lora=False, tokens=tokens and labels, **found)


def _section(config: Any, name: str) -> dict[str, Any]:
    section: Any = config.get(name) if config else None
    return section or {}


def _ranks(parallel: dict[str, Any]) -> int:
    """Return the number of data-parallel ranks that this address can reach."""
    elsewhere = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    return int(parallel.get("data_parallel_size_local" if elsewhere else "data_parallel_size", 1))


def _version(http: HttpTransport, label: str) -> int:
    try:
        return version_number(label)
    except StateError:
        raise EngineError(
            f"labels its weights {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}',
            engine=http.name,
        ) from None


async def _get(http: HttpTransport, path: str, timeout_s: float, *, unless: int = NOT_FOUND) -> Any:
    """Return the answer, or None for status 404 or `unless`."""
    try:
        return await http.get(path, timeout_s=timeout_s)
    except EngineHTTPError as error:
        if error.status not in {NOT_FOUND, unless}:
            raise
        return None


async def _has(http: HttpTransport, path: str, timeout_s: float) -> bool:
    try:
        await http.call("GET", path, None, timeout_s=timeout_s)
    except EngineHTTPError as error:
        return error.status == NOT_ALLOWED
    return False


async def _takes_tokens(http: HttpTransport, timeout_s: float) -> bool:
    """Whether the token endpoint is open: it rejects an empty body, but not with 403."""
    try:
        await http.post(GENERATE, {}, timeout_s=timeout_s)
    except EngineHTTPError as error:
        return error.status in REFUSED_BODY
    return True


# --- Requests --------------------------------------------------------------------------------------------------------

NO_VERSIONS = (
    "the answer does not say which weights made its tokens; use vLLM 0.32 or newer, or launch the engine through "
    "Penstock, whose plugin supplies it"
)


class VanillaReplies:
    """Reads the replies of vLLM without our plugin, and resends requests that a pause has cut.

    `engines` returns name and capabilities of each engine that may get a request.
    """

    def __init__(self, engines: Callable[[], Sequence[tuple[str, Capabilities]]]) -> None:
        self._engines = engines
        self._aborted_at = float("-inf")

    def expect_aborts(self) -> None:
        """Accept that requests sent so far end early: the caller will abort them."""
        self._aborted_at = asyncio.get_running_loop().time()

    def check(self, params: SamplingParams) -> None:
        """Raise MissingCapabilityError if an engine cannot serve such a request."""
        require(self._engines(), "tokens", "generate")
        if params.logprobs:
            require(self._engines(), "sampled_logprobs", "generate with logprobs")

    async def answer(self, request: ResumableRequest, reply: Reply) -> Answer:
        """Return the whole answer, joined if a pause has cut it.

        Raises:
            EngineError: the answer does not name the weights that made its tokens.
        """
        # An engine without the plugin ignores the resume data, and has started from the beginning.
        counters = request.client.counters
        counters.wasted_tokens += sum(sample.forget() for sample in request.partials)
        body = request.client.http.decode(await reply.read())
        choices: list[dict[str, Any]] = body["choices"]
        aborted = any(choice["finish_reason"] == "abort" for choice in choices)
        asked = self._aborted_at >= request.sent_at
        of_ids = request.path == wire.GENERATE
        reports = [report_of(choice, asked=asked) for choice in choices] if of_ids else []
        if any(report["versions"] is None for report in reports):
            raise EngineError(NO_VERSIONS, engine=request.client.http.name)
        params = request.body.get("sampling_params", {})
        joinable = of_ids and not params.get("stop") and "structured_outputs" not in params
        if aborted and not asked and not joinable:
            counters.wasted_tokens += int(body["usage"]["completion_tokens"]) if body.get("usage") else 0
            request.partials.get(0).finish = "abort"  # so that the request is sent again
        elif not of_ids:
            return Answer(body, None)
        elif request.partials.add(reports):  # with no new tokens, a cut request is sent again unchanged
            cut = [report["index"] for report in reports if request.partials.get(report["index"]).cut]
            await all_or_first_error(_finish(request, i) for i in cut)
        return Answer(body, [[[0, 0, len(request.partials.get(i).ids)]] for i in range(len(choices))])

    async def events(self, request: Stream, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a stream, without versions.

        Raises:
            EngineError: it is cut or starts over, and the caller has seen a part of it.
        """
        _refuse_if_begun(request)
        request.partials.get(0).whole_only = True
        async for event in request.events_of(reply):
            choices: list[dict[str, Any]] = event.get("choices") or []
            for choice in choices:
                if choice.get("finish_reason") is not None:
                    choice["weight_versions"] = None
                if choice.get("finish_reason") == "abort" and self._aborted_at < request.sent_at:
                    _refuse_if_begun(request)
                    request.partials.get(choice["index"]).finish = "abort"
            yield event


def _refuse_if_begun(request: Stream) -> None:
    if request.passed_on:
        raise EngineError(
            "a stream was cut that cannot be resumed: there are engines without Penstock's plugin; ask for it "
            "without stream, pause with mode keep, or launch all engines by Penstock"
        )


def report_of(choice: Mapping[str, Any], *, asked: bool = False) -> dict[str, Any]:
    """Convert vLLM's choice to a `wire.SampleReport`; unknown versions are None.

    `asked`: the caller asked for the abort.
    """
    ids: list[int] = choice["token_ids"] or []
    native, logprobs = choice.get("weight_versions"), choice.get("logprobs")
    versions: list[list[int]] | None = None if ids else []
    if native is not None:
        versions = [[wire.version_of_tokens(span["version"]), span["end"] - span["start"]] for span in native]
    pairs = zip(ids, logprobs["content"], strict=False) if logprobs else ()
    sampled = [[[token, entry["logprob"], 1, None]] for token, entry in pairs] if logprobs else None
    return {
        "index": choice["index"],
        "ids": ids,
        "logprobs": orjson.dumps(sampled).decode() if sampled is not None else None,
        "versions": versions,
        "finish": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "asked": asked,
    }


async def _finish(request: ResumableRequest, index: int) -> None:
    """Request the rest of a cut sample, and join it."""
    part = request.partials.get(index)
    sampling: dict[str, Any] = request.body["sampling_params"]
    left = sampling["max_tokens"] - len(part.ids)
    if left <= 0:  # aborted before it could report its end
        part.finish = "length"
        return
    rest_of = {**sampling, "n": 1, "max_tokens": left, "min_tokens": max(0, sampling["min_tokens"] - len(part.ids))}
    if "seed" in sampling:
        rest_of["seed"] += index
    ids = [*request.body["token_ids"], *part.ids]
    lengths = {wire.PROMPT_TOKENS_HEADER: str(len(ids)), wire.EXPECTED_TOKENS_HEADER: str(left)}
    request.client.counters.continued += 1
    request.client.counters.requeued_tokens += len(part.ids)
    body, headers = {"token_ids": ids, "sampling_params": rest_of}, {**request.headers, **lengths}
    again = ResumableRequest(request.client, request.path, body, headers=headers, timeout_s=request.left_s())
    await again.answer()
    rest = again.partials.get(0)
    end = {"finish": rest.finish, "stop_reason": rest.stop_reason, "asked": rest.asked}
    part.add({"ids": rest.ids, "versions": rest.versions, **end})
    part.logprobs += rest.logprobs
