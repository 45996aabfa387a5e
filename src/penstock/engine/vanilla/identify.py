"""Finds out what a vLLM server without our plugin is and can do, by questions that change nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from penstock.engine.capabilities import SAMPLED_FROM, Capabilities, EngineInfo
from penstock.errors import EngineError, EngineHTTPError
from penstock.http import HttpTransport
from penstock.wire import GENERATE, version_number

NOT_FOUND, NOT_ALLOWED, BAD_REQUEST, VALIDATION, FAILED = 404, 405, 400, 422, 500
_CALLS = {
    "pause": "/pause", "abort": "/abort_requests", "caches": "/reset_prefix_cache", "sleep": "/sleep",
    "rpc": "/collective_rpc", "lora": "/v1/load_lora_adapter", "weight_transfer": "/init_weight_transfer_engine",
}  # fmt: skip
"""Each of them a POST: asked with GET, a server that has it answers 405, and 404 where it has not."""


async def identify(http: HttpTransport, *, labelled: int, timeout_s: float) -> EngineInfo:
    """Find out what a server is. Without dev mode it does not say how it is set.

    Args:
        http: to it.
        labelled: the version that we have given its weights, for vLLM 0.26, which keeps none; 0: as loaded.
        timeout_s: deadline of each question.

    Raises:
        EngineHTTPError: it is no vLLM server (404), or asks for another key (401).
        EngineError: it answers what no vLLM server does.
    """
    version = await _get(http, "/version", timeout_s)
    if not isinstance(version, dict) or "version" not in version:
        raise EngineHTTPError(
            f"{http.url} is neither an engine of Penstock nor a vLLM server: it has no /penstock/info and no /version",
            status=NOT_FOUND,
            engine=http.name,
        )
    answers: list[Any] = await asyncio.gather(
        http.get("/v1/models", timeout_s=timeout_s),
        _get(http, "/is_paused", timeout_s),
        _get(http, "/weight_info", timeout_s),
        _get(http, "/server_info?config_format=json", timeout_s, unless=FAILED),
        _takes_tokens(http, timeout_s),
        *(_has(http, path, timeout_s) for path in _CALLS.values()),
    )
    try:
        return _read(http, str(cast("dict[str, Any]", version)["version"]), answers, labelled)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"answers as a vLLM server does, but not what one answers ({type(error).__name__}: {error}); is something "
            "else in front of it?",
            engine=http.name,
        ) from error


def _read(http: HttpTransport, vllm: str, answers: list[Any], labelled: int) -> EngineInfo:
    models, paused, weights, set_as, tokens, *found = answers
    calls = dict(zip(_CALLS, found, strict=True))
    config = _section(set_as, "vllm_config")
    model, parallel = _section(config, "model_config"), _section(config, "parallel_config")
    return EngineInfo(
        engine="vllm",
        vllm=vllm,
        weight_version=labelled if weights is None else _version(http, weights["weight_version"]),
        paused=bool(paused and paused["is_paused"]),
        tp=int(parallel.get("tensor_parallel_size", 1)),
        pp=int(parallel.get("pipeline_parallel_size", 1)),
        dp=_ranks(parallel),
        vocab_size=int(model.get("vocab_size", 0)),
        max_model_len=int(models["data"][0]["max_model_len"]),
        transports=(),
        capabilities=_capabilities(calls, config, tokens=tokens),
        dtype=str(model.get("dtype") or "").removeprefix("torch."),
        instance=str(config.get("instance_id") or ""),
    )


def _capabilities(calls: dict[str, bool], config: dict[str, Any], *, tokens: bool) -> Capabilities:
    model, transfer = _section(config, "model_config"), _section(config, "weight_transfer_config")
    return Capabilities(
        plugin=False,
        tokens=tokens,
        pause=calls["pause"],
        abort=calls["abort"],
        caches=calls["caches"],
        sleep=calls["sleep"] and bool(model.get("enable_sleep_mode")),
        rpc=calls["rpc"],
        lora=calls["lora"],
        weight_transfer=transfer.get("backend") if calls["weight_transfer"] else None,
        sampled_logprobs=model.get("logprobs_mode") in SAMPLED_FROM,
    )


def _section(config: Any, name: str) -> dict[str, Any]:
    section: Any = config.get(name) if config else None
    return section or {}


def _ranks(parallel: dict[str, Any]) -> int:
    """Data-parallel ranks that requests to this address can go to."""
    elsewhere = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    return int(parallel.get("data_parallel_size_local" if elsewhere else "data_parallel_size", 1))


def _version(http: HttpTransport, label: str) -> int:
    try:
        return version_number(label)
    except ValueError:
        raise EngineError(
            f"labels its weights {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}',
            engine=http.name,
        ) from None


async def _get(http: HttpTransport, path: str, timeout_s: float, *, unless: int = NOT_FOUND) -> Any:
    """What is there; None where nothing is, or it answers with the status `unless`."""
    try:
        return await http.get(path, timeout_s=timeout_s)
    except EngineHTTPError as error:
        if error.status not in {NOT_FOUND, unless}:
            raise
        return None


async def _has(http: HttpTransport, path: str, timeout_s: float) -> bool:
    try:
        await http.get_text(path, timeout_s=timeout_s)
    except EngineHTTPError as error:
        return error.status == NOT_ALLOWED
    return False


async def _takes_tokens(http: HttpTransport, timeout_s: float) -> bool:
    """An empty request is refused as malformed where there is an endpoint, with 403 where it is shut (0.32)."""
    try:
        await http.post(GENERATE, {}, timeout_s=timeout_s)
    except EngineHTTPError as error:
        return error.status in {BAD_REQUEST, VALIDATION}
    return True
