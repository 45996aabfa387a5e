"""One call of vLLM's `generate` as completions of a fleet: prompts, sampling parameters, requests, answers."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from penstock.aio import all_or_first_error
from penstock.engine.client import DataClient
from penstock.errors import ConfigError, DeadlineError, EngineDeadError, EngineHTTPError, RequestError, UserError
from penstock.facade.outputs import Prompt, request_output
from penstock.fleet.adapters import stamp_of
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import SERVABLE
from penstock.rollout.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vllm import RequestOutput

FORMS = "a string, token ids, a TextPrompt or TokensPrompt, or a list of those"
NOT_FOUND = 404
LOAD_TIMEOUT_S = 120.0
"""Deadline of one adapter on one engine: a few hundred megabytes from a slow disk."""
_ALWAYS = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sent even where they are vLLM's defaults: in the place of what is not said, a server puts the model's own."""
_IF_SET = (
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias",
    "structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking",
)  # fmt: skip
_OURS = frozenset({
    "detokenize", "extra_args", "output_kind", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
    "stream_interval",
})  # fmt: skip
"""Read here, or about the way of an answer inside vLLM: it comes whole. vLLM sets `skip_reading_prefix_cache` itself
where prompt logprobs are asked for."""


class GenerationTimeoutError(DeadlineError, TimeoutError):
    """`timeout_seconds` passed; the engines have cancelled the requests."""


# --- prompts ---------------------------------------------------------------------------------------------------------


def prompts_of(prompts: Any, prompt_token_ids: Any) -> tuple[list[Prompt], bool]:
    """Read what was given for either argument of `generate`; a flat list of integers is one prompt.

    Returns:
        At least one prompt, and whether a list of them was given.

    Raises:
        RequestError: both or neither, an empty list, or none of the known forms.
    """
    if (prompts is None) == (prompt_token_ids is None):
        which = "neither" if prompts is None else "both"
        raise RequestError(f"give exactly one of prompts and prompt_token_ids; got {which}")
    name, given = ("prompts", prompts) if prompt_token_ids is None else ("prompt_token_ids", prompt_token_ids)
    if isinstance(given, (str, Mapping)) or _is_ids(given):
        return [_one(given, name)], False
    if not isinstance(given, Sequence):
        raise RequestError(f"{name} must be {FORMS}, got {type(given).__name__}")
    items = cast("Sequence[Any]", given)
    if not items:
        raise RequestError(f"{name} is empty; give at least one prompt")
    return [_one(item, f"{name}[{i}]") for i, item in enumerate(items)], True


def _one(given: Any, where: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    if _is_ids(given):
        return Prompt(ids=given)
    if isinstance(given, Mapping):
        parts = cast("Mapping[str, Any]", given)
        text, ids = parts.get("prompt"), parts.get("prompt_token_ids")
        if unknown := sorted(name for name in parts if name not in {"prompt", "prompt_token_ids"} and parts[name]):
            raise RequestError(f"{where} has {', '.join(unknown)}, which engines are not sent; give text or token ids")
        if (_is_ids(ids) or ids is None) and (isinstance(text, str) or (text is None and ids is not None)):
            return Prompt(text=text, ids=ids)
    shown = f"{given!r:.80}"
    raise RequestError(f"{where} is {shown}; it must be text, token ids, a TextPrompt or a TokensPrompt")


def _is_ids(given: Any) -> bool:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        return False
    ids = cast("Sequence[Any]", given)
    return len(ids) > 0 and all(type(i) is int for i in ids)


# --- sampling parameters ---------------------------------------------------------------------------------------------


def completion_fields(params: Any) -> dict[str, Any]:
    """The sampling part of a completion's body.

    Args:
        params: a `vllm.SamplingParams`.

    Raises:
        RequestError: it is something else, or sets what a completion cannot say.
    """
    names: Any = getattr(params, "__struct_fields__", None)
    if names is None or not {*_ALWAYS, "prompt_logprobs"} <= {*names}:
        raise RequestError(f"sampling_params must be vllm.SamplingParams, got {type(params).__name__}")
    plain = type(params)()
    body: dict[str, Any] = {name: getattr(params, name) for name in _ALWAYS}
    for name in cast("tuple[str, ...]", names):
        value = getattr(params, name)
        if name in _ALWAYS or name in _OURS or name.startswith("_") or _same(value, getattr(plain, name)):
            continue
        if name not in _IF_SET:
            raise RequestError(f"sampling parameter {name}={value!r} cannot be sent to an engine; leave it out")
        body[name] = _as_json(value)
    if params.extra_args:
        body["vllm_xargs"] = dict(params.extra_args)
    return body


def _same(value: Any, default: Any) -> bool:
    # Arrays do not compare to one truth value; their default is None.
    return value is default or (default is not None and value == default)


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("_")}
        return {name: _as_json(item) for name, item in given.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    return value


# --- one call --------------------------------------------------------------------------------------------------------


def _params_of(given: Any, count: int) -> list[Any]:
    """One `vllm.SamplingParams` for each of `count` prompts."""
    if given is None:
        try:
            from vllm import SamplingParams  # noqa: PLC0415 - takes seconds
        except ImportError as error:
            raise ConfigError("AsyncVLLM speaks vLLM's own types: pip install 'penstock[vllm]'") from error
        given = SamplingParams()
    each = [*cast("Sequence[Any]", given)] if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise RequestError(f"sampling_params has {len(each)} entries for {count} prompts; give one, or one for each")
    return each


class Requests:
    """Sends calls to a fleet.

    Args:
        fleet: serves them.
        model: served name of the base model.
        tokenizer: of the model, so that the router can compare prompts; None: engines tokenize.
        request_timeout_s: deadline of a request that goes to one engine past the router.
    """

    def __init__(self, fleet: Fleet, model: str, tokenizer: Tokenizer | None, request_timeout_s: float) -> None:
        self._fleet = fleet
        self._model = model
        self._tokenizer = tokenizer
        self._request_s = request_timeout_s
        self._decode = lru_cache(maxsize=None)(self._text_of)
        self._direct: dict[str, DataClient] = {}
        self._adapters: dict[str, tuple[str, Any]] = {}
        """By name its path, and its files as they were loaded last. A request for it then asks no engine about it."""
        self._loading = asyncio.Lock()

    async def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Return vLLM's outputs; see `AsyncVLLM.generate`.

        Raises:
            RequestError: prompts or parameters of an unknown form; nothing was sent.
            ConfigError: no parameters are given, and vLLM, whose defaults they would be, is not installed.
            GenerationTimeoutError: not all of them came in time; what was under way has been cancelled.
            PenstockError: of the first that failed; the others are cancelled.
        """
        given, batch = prompts_of(prompts, prompt_token_ids)
        params = _params_of(sampling_params, len(given))
        sampling = {id(one): completion_fields(one) for one in params}
        # TorchRL's own: no or negative seconds are no limit.
        limit = timeout_seconds if timeout_seconds is not None and timeout_seconds > 0 else None
        try:
            async with asyncio.timeout(limit):
                items = [self._tokenized(prompt) for prompt in given]
                target = self._fleet if actor_index is None else await self._engine(actor_index)
                model = self._model if lora_request is None else await self._load(lora_request)
                base = {"model": model, "return_token_ids": True, "return_tokens_as_token_ids": True}
                bodies = (
                    {**base, "prompt": p.text or "" if p.ids is None else list(p.ids), **sampling[id(one)]}
                    for p, one in zip(items, params, strict=True)
                )
                answers = await all_or_first_error(self._completion(target, body, lora_request) for body in bodies)
        except TimeoutError as error:
            raise GenerationTimeoutError(
                f"{len(given)} prompts were not answered within timeout_seconds={limit or 0.0:g}; they have been "
                "cancelled",
                seconds=limit or 0.0,
            ) from error
        outputs = [
            request_output(*each, lora_request, self._decode) for each in zip(answers, items, params, strict=True)
        ]
        return outputs if batch else outputs[0]

    async def close(self) -> None:
        """Close the connections to single engines."""
        for client in self._direct.values():
            await client.close()

    async def _completion(self, target: Any, body: Mapping[str, Any], lora: Any) -> dict[str, Any]:
        try:
            return await target.completion(body)
        except EngineHTTPError as error:
            if lora is None or error.status != NOT_FOUND:
                raise
            return await target.completion({**body, "model": await self._load(lora, again=True)})

    async def _load(self, lora: Any, *, again: bool = False) -> str:
        """Load a `vllm.lora.request.LoRARequest` where its files changed, or `again` where an engine has lost it.

        Files that this process does not see are loaded once for each `lora_int_id`.

        Returns:
            The name that requests ask for.

        Raises:
            RequestError: it is no LoRARequest, or its name stands for another path here.
            MissingCapabilityError: an engine was launched without `enable_lora`.
            WeightsError: the engines refused it.
        """
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise RequestError(f"lora_request must be vLLM's LoRARequest, got {type(lora).__name__}")
        async with self._loading:
            # Files that are not to be seen from here are loaded anew where vLLM would: under another id.
            stamp = stamp_of(path) or getattr(lora, "lora_int_id", None)
            now, known = (path, stamp), self._adapters.get(name)
            if known is not None and known[0] != path:
                raise RequestError(f"adapter {name!r} is {known[0]}; give {path} another name")
            if again or known != now:
                await self._fleet.load_adapter(name, path, timeout_s=LOAD_TIMEOUT_S)
                self._adapters[name] = now
        return name

    def _tokenized(self, prompt: Prompt) -> Prompt:
        if prompt.ids is not None or prompt.text is None or self._tokenizer is None:
            return prompt
        # An empty text may have no ids; the engine's own error is the clearest.
        return Prompt(prompt.text, self._tokenizer.encode(prompt.text) or None)

    async def _engine(self, index: int) -> Any:
        engines = await self._fleet.engines(stats=False)
        if not 0 <= index < len(engines):
            raise UserError(f"there is no engine {index}; the fleet has engines 0 to {len(engines) - 1}")
        engine = engines[index]
        if engine.state not in SERVABLE:  # no router keeps a request from weights that it has not confirmed
            raise EngineDeadError(f"it is {engine.state}: {engine.reason}", engine=engine.name)
        if engine.url not in self._direct:
            self._direct[engine.url] = DataClient(
                engine.url,
                api_key=self._fleet.key_of(engine.name),
                request_timeout_s=self._request_s,
                name=engine.name,
                routed=False,
            )
        return self._direct[engine.url].openai

    def _text_of(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
