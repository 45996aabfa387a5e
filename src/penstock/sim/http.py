"""Requests and answers in vLLM's forms: JSON bodies in, JSON or vLLM's error form out, and the rank addressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock.errors import EngineDeadError, RequestError, StateError, UserError
from penstock.guard import DATA_PATHS, OPEN_PATHS, cross_site, has_key
from penstock.sim.adapters import NotFoundError
from penstock.sim.config import SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.faults import RefusedError
from penstock.types import SamplingParams

RANKS: web.AppKey[tuple[SimEngine, ...]] = web.AppKey("ranks", tuple)
"""The data-parallel ranks of the server; nearly always one."""
RANK: web.RequestKey[SimEngine] = web.RequestKey("rank", SimEngine)
"""The one that a request is for."""

_INTEGERS = ("max_tokens", "n", "top_k", "seed", "min_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class InvalidFieldError(RequestError):
    """A field of the body or the query is missing or of the wrong form; FastAPI finds these in vLLM."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"1 validation error:\n  {field}: {message}")
        self.field = field


def json_answer(data: Any, status: int = 200) -> web.Response:
    """JSON, as vLLM's JSONResponse."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The `ErrorResponse` of vLLM."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_answer(message: str, kind: str, status: int, param: str | None = None) -> web.Response:
    """The `ErrorResponse` of vLLM with its status."""
    return json_answer(error_body(message, kind, status, param), status)


def engine_of(request: web.Request) -> SimEngine:
    """The rank that the request is for (`on_one`, `on_all`)."""
    return request.get(RANK, request.app[RANKS][0])


@web.middleware
async def errors_as_vllm(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into the answers that vLLM gives for them."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        answer = error_answer(error.reason, error.reason, error.status)
    except InvalidFieldError as error:
        answer = error_answer(str(error), "Bad Request", 400, error.field)
    except NotFoundError as error:
        answer = error_answer(str(error), "NotFoundError", 404, error.param)
    except UserError as error:
        answer = error_answer(str(error), "BadRequestError", 400)
    except EngineDeadError as error:
        answer = error_answer(str(error).removeprefix(f"engine {error.engine}: "), "InternalServerError", 500)
    except (RefusedError, StateError) as error:
        answer = error_answer(str(error), "InternalServerError", 500)
    return answer


def guarded(config: SimConfig) -> Middleware:
    """Middleware: 401 without the key, on every path but `OPEN_PATHS`; 403 for a web page's control call.

    The second is our plugin's doing, and a plain vLLM does not have it.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not config.plain and request.path not in DATA_PATHS:
            fields = [(name.lower(), value) for name, value in request.raw_headers]
            if (why := cross_site(fields, {config.host.lower()})) is not None:
                return json_answer({"error": why}, 403)
        given = request.headers.get("Authorization", "").encode()
        if config.api_key is not None and request.path not in OPEN_PATHS and not has_key(given, [config.api_key]):
            return json_answer({"error": "Unauthorized"}, 401)
        return await handler(request)

    return check


async def json_body(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    """The body as an object. Raises RequestError if it is no JSON, web.HTTPException if it is too large."""
    raw = await request.read()
    if not raw and optional:
        return {}
    try:
        data: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidFieldError("body", f"JSON decode error: {error}") from error
    if not isinstance(data, dict):
        raise InvalidFieldError("body", "Input should be a valid dictionary")
    return cast("dict[str, Any]", data)


def model_asked_for(engine: SimEngine, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """Name to answer with, and the LoRA's name where the model is one.

    Raises:
        NotFoundError: neither the served model nor a loaded adapter.
    """
    served = engine.config.served_model_name
    model = body.get("model")
    if not model or model == served:
        return served, None
    if isinstance(model, str) and model in engine.adapters.loaded:
        return model, model
    if not isinstance(model, str):
        raise InvalidFieldError("model", f"Input should be a valid string, got {model!r}")
    raise NotFoundError(f"The model `{model}` does not exist. Valid aliases: {served}.", "model")


def sampling_of(
    given: Mapping[str, Any], *, logprobs: bool, detokenize: bool, default_max_tokens: int
) -> SamplingParams:
    """Read sampling parameters as vLLM names them; what the simulated model cannot use is ignored.

    Raises:
        RequestError: a value of the wrong type or out of range.
    """
    values: dict[str, Any] = {"max_tokens": default_max_tokens, "logprobs": logprobs, "detokenize": detokenize}
    for name, types in (*((i, int) for i in _INTEGERS), *((f, (int, float)) for f in _NUMBERS)):
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, types) or isinstance(value, bool):
            raise InvalidFieldError(name, f"Input should be a valid number, got {value!r}")
        values[name] = value
    values["ignore_eos"] = bool(given.get("ignore_eos"))
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        value: Any = given.get(name) or []
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        if any(not isinstance(item, kind) for item in items):
            raise InvalidFieldError(name, f"Input should be a list of {kind.__name__}, got {value!r}")
        values[name] = tuple(items)
    if values.get("temperature") == 0 and values.get("n", 1) > 1:
        raise RequestError(f"n must be 1 when using greedy sampling, got {values['n']}.")
    return SamplingParams.of(values)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with its usage (`stream_options`)."""
    options: Any = body.get("stream_options")
    return isinstance(options, dict) and bool(cast("dict[str, Any]", options).get("include_usage"))


RANK_HEADER = "X-data-parallel-rank"


def on_one(handler: Handler) -> Handler:
    """On the rank that the header names, else on the one with the least to do, as vLLM places."""

    async def placed(http: web.Request) -> web.StreamResponse:
        http[RANK] = _rank(http)
        return await handler(http)

    return placed


def on_all(handler: Handler) -> Handler:
    """On every rank, one after another; the last one's answer, or the first error."""

    async def everywhere(http: web.Request) -> web.StreamResponse:
        for rank in http.app[RANKS][:-1]:
            http[RANK] = rank
            await handler(http)
        http[RANK] = http.app[RANKS][-1]
        return await handler(http)

    return everywhere


def _rank(http: web.Request) -> SimEngine:
    ranks = http.app[RANKS]
    named = http.headers.get(RANK_HEADER, "")
    if not named.lstrip("-").isdigit():  # vLLM passes over what is no number
        return min(ranks, key=lambda rank: len(rank.scheduler.running) + len(rank.scheduler.waiting))
    if not 0 <= int(named) < len(ranks):
        raise RequestError(f"data_parallel_rank {named} is out of range [0, {len(ranks)}).")
    return ranks[int(named)]
