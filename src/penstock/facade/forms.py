"""Converts vLLM's engine arguments, prompts and sampling parameters to ours, and completions to vLLM's outputs."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import orjson

from penstock.checks import did_you_mean
from penstock.engine.command import resolve_profile
from penstock.errors import ConfigError, EngineError, RequestError
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig

if TYPE_CHECKING:
    import torch
    from vllm import RequestOutput
    from vllm.logprobs import Logprob

# vLLM is imported inside functions, because the import takes seconds. A caller with SamplingParams has paid for it.

# --- engine arguments ------------------------------------------------------------------------------------------------

OWN = frozenset(name for section in (EngineConfig, FleetConfig, RouterConfig) for name in section.model_fields)
"""Options of `Fleet.launch`. If vLLM has an option of the same name, it has the same meaning."""
_REFUSED = {
    "engines": "num_replicas says how many there are",
    "num_devices": "it is tensor_parallel_size among vLLM's own arguments",
    "worker_extension_cls": "engines have Penstock's own; reach vLLM's methods with collective_rpc",
    "weight_transfer_config": "update_weights brings its own transport",
    "distributed_executor_backend": "each engine is a process of its own; vLLM picks how its workers run",
}


def launch_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `Fleet.launch`. Options of vLLM alone go to `extra_args`.

    Args:
        given: fields of vLLM's AsyncEngineArgs, and of EngineConfig, FleetConfig and RouterConfig, by name.

    Raises:
        ConfigError: an unknown name (with the nearest known one), an option that Penstock decides itself, or a value
            that cannot be written on a command line.
    """
    if refused := next((name for name in given if name in _REFUSED), None):
        raise ConfigError(f"{refused} cannot be chosen: {_REFUSED[refused]}")
    options = {name: value for name, value in given.items() if name in OWN}
    theirs = {name: value for name, value in given.items() if name not in OWN}
    if theirs:
        known = {field.name for field in fields(_vllm().AsyncEngineArgs)} | OWN | {"num_devices", "num_replicas"}
        if unknown := next((name for name in theirs if name not in known), None):
            raise ConfigError(f"unknown option {unknown!r}; {did_you_mean(unknown, sorted(known))}")
        extra = {key: text for name, value in theirs.items() for key, text in _argument(name, value).items()}
        options["extra_args"] = {**extra, **options.get("extra_args", {})}
    return options


def changed_fields(engine_args: Any) -> dict[str, Any]:
    """Return the model, and fields of `AsyncEngineArgs` that are not the defaults.

    ConfigError: it is not an `AsyncEngineArgs`.
    """
    if not is_dataclass(engine_args) or isinstance(engine_args, type) or not hasattr(engine_args, "model"):
        raise ConfigError(f"engine_args must be vllm.AsyncEngineArgs, got {type(engine_args).__name__}")
    given: Any = engine_args
    plain = type(given)(model=given.model)
    found = {f.name: getattr(given, f.name) for f in fields(given)}
    return {name: value for name, value in found.items() if name == "model" or value != getattr(plain, name)}


def _vllm() -> Any:
    try:
        import vllm  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("AsyncVLLM speaks vLLM's own types: pip install 'penstock[vllm]'") from error
    return vllm


def _argument(name: str, value: Any) -> dict[str, Any]:
    option = name.replace("_", "-")
    if value is None:
        return {}
    if value is False:
        return {f"no-{option}": True}
    if isinstance(value, (str, int, float)):
        return {option: value}
    if is_dataclass(value) and not isinstance(value, type):  # a config object: only values that differ from the default
        defaults = {f.name: f.default if f.default is not MISSING else None for f in fields(value)}
        value = {k: given for k, given in asdict(value).items() if given is not None and given != defaults.get(k)}
    try:
        return {option: orjson.dumps(value).decode()}
    except TypeError as error:
        raise ConfigError(
            f"{name}={value!r} has no form on a command line; give a string, a number, a dict or a list"
        ) from error


def model_metadata(config: EngineConfig, served: str | None) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of each tensor of an update, by checkpoint name.

    The dtype is the one that engines serve. Shapes come from the checkpoint's headers, else from the model's config.

    Args:
        config: the engine's configuration.
        served: dtype in which the engines compute, by their own report. This machine may have other devices.

    Raises:
        ConfigError: the engine is simulated.
    """
    if resolve_profile(config) == "sim":
        raise ConfigError("a simulated engine has no model; there is no metadata of one")
    import torch  # noqa: PLC0415 - heavy

    from penstock.plugin.spec import expected_weights  # noqa: PLC0415 - imports torch
    from penstock.weights.pack import dtype_name  # noqa: PLC0415 - the same

    dtype: Any = served or config.dtype
    arguments = _vllm().AsyncEngineArgs(model=config.model, dtype=dtype, load_format=config.load_format)
    model = arguments.create_model_config()
    dtype = getattr(torch, dtype_name(model.dtype))
    return {name: (dtype, torch.Size(shape)) for name, shape in expected_weights(model).shapes.items()}


# --- prompts ---------------------------------------------------------------------------------------------------------

FORMS = "a string, token ids, a TextPrompt or TokensPrompt, or a list of those"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, ids, or both if the ids encode the text."""

    text: str | None = None
    ids: Sequence[int] | None = None


def prompts_of(prompts: Any, prompt_token_ids: Any) -> tuple[list[Prompt], bool]:
    """Read the prompts of `generate`. A flat list of integers is one prompt.

    Returns:
        At least one prompt, and whether the argument was a list of prompts.

    Raises:
        RequestError: both or neither are given, a list is empty, or the form is unknown.
    """
    if (prompts is None) == (prompt_token_ids is None):
        which = "neither" if prompts is None else "both"
        raise RequestError(f"give exactly one of prompts and prompt_token_ids; got {which}")
    name, given = ("prompts", prompts) if prompt_token_ids is None else ("prompt_token_ids", prompt_token_ids)
    if isinstance(given, (str, Mapping)) or _is_ids(given):
        return [_one(given, name)], False
    if not isinstance(given, Sequence):
        raise RequestError(f"{name} must be {FORMS}, got {type(given).__name__}")
    if not given:
        raise RequestError(f"{name} is empty; give at least one prompt")
    return [_one(item, f"{name}[{i}]") for i, item in enumerate(given)], True


def _one(given: Any, where: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    if _is_ids(given):
        return Prompt(ids=given)
    if isinstance(given, Mapping):
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if unknown := sorted(name for name in given if name not in {"prompt", "prompt_token_ids"} and given[name]):
            raise RequestError(f"{where} has {', '.join(unknown)}, which engines are not sent; give text or token ids")
        if (_is_ids(ids) or ids is None) and (isinstance(text, str) or (text is None and ids is not None)):
            return Prompt(text=text, ids=ids)
    shown = f"{given!r:.80}"
    raise RequestError(f"{where} is {shown}; it must be text, token ids, a TextPrompt or a TokensPrompt")


def _is_ids(given: Any) -> bool:
    known = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    return known and len(given) > 0 and all(type(i) is int for i in given)


# --- sampling parameters ---------------------------------------------------------------------------------------------

_ALWAYS = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sent even with vLLM's default values, because a server replaces missing values with the model's own."""
_IF_SET = (
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias",
    "structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking",
)  # fmt: skip
_OURS = frozenset({
    "detokenize", "extra_args", "output_kind", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
    "stream_interval",
})  # fmt: skip
"""Not sent. They are handled here, or concern an answer's way inside vLLM, while our answers come whole. vLLM sets
`skip_reading_prefix_cache` itself for prompt logprobs."""


def params_of(given: Any, count: int) -> list[Any]:
    """Return one `vllm.SamplingParams` per prompt. Default: vLLM's own."""
    if given is None:
        given = _vllm().SamplingParams()
    each = [*given] if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise RequestError(f"sampling_params has {len(each)} entries for {count} prompts; give one, or one for each")
    return each


def completion_fields(params: Any) -> dict[str, Any]:
    """Return the sampling part of a completion's body.

    RequestError: `params` is not a `vllm.SamplingParams`, or sets a field that a completion does not have.
    """
    names: Any = getattr(params, "__struct_fields__", None)
    if names is None or not {*_ALWAYS, "prompt_logprobs"} <= {*names}:
        raise RequestError(f"sampling_params must be vllm.SamplingParams, got {type(params).__name__}")
    plain = type(params)()
    body: dict[str, Any] = {name: getattr(params, name) for name in _ALWAYS}
    for name in names:
        value, default = getattr(params, name), getattr(plain, name)
        same = value is default or (default is not None and value == default)  # also for arrays, whose default is None
        if same or name in _ALWAYS or name in _OURS or name.startswith("_"):
            continue
        if name not in _IF_SET:
            raise RequestError(f"sampling parameter {name}={value!r} cannot be sent to an engine; leave it out")
        body[name] = _as_json(value)
    if params.extra_args:
        body["vllm_xargs"] = dict(params.extra_args)
    return body


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("_")}
        return {name: _as_json(item) for name, item in given.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    return value


# --- answers ---------------------------------------------------------------------------------------------------------

Decode = Callable[[int], str | None]
"""Converts a token id to its text; None if the text is unknown."""
ID_PREFIX = "token_id:"
"""Prefix of an id that stands in for a token's text, because two tokens may have the same text."""


def request_output(answer: Mapping[str, Any], prompt: Prompt, params: Any, lora: Any, decode: Decode) -> RequestOutput:
    """Return one prompt's finished answer in the form of vLLM's offline API.

    `weight_versions` of its outputs are exact. vLLM 0.32 has this field; in 0.26 it is an extra attribute.

    Args:
        answer: answer with token ids, both in the body and in place of the tokens' texts.
        prompt: prompt as the caller gave it.
        params: the `vllm.SamplingParams` of the request.
        lora: LoRARequest of the request, or None.
        decode: computes `Logprob.decoded_token`.

    Raises:
        EngineError: the answer lacks a requested part.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != params.n:
        raise EngineError(f"asked for {params.n} samples, got {len(choices)}")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    answered = choices[0].get("prompt_token_ids")
    ids = prompt.ids if answered is None else answered
    return _vllm().RequestOutput(
        request_id=str(answer["id"]),
        prompt=prompt.text,
        prompt_token_ids=None if ids is None else list(ids),
        prompt_logprobs=None if params.prompt_logprobs is None else _prompt_logprobs(choices[0]),
        outputs=[_completion_output(choice, params, lora, decode) for choice in choices],
        finished=True,
        lora_request=lora,
        num_cached_tokens=details.get("cached_tokens"),
    )


def _completion_output(choice: Mapping[str, Any], params: Any, lora: Any, decode: Decode) -> Any:
    from vllm import outputs  # noqa: PLC0415

    ids: list[int] | None = choice.get("token_ids")
    if ids is None:
        raise EngineError("the answer has no token ids; the engine must follow return_token_ids (vLLM 0.26 or newer)")
    logprobs = total = None
    if params.logprobs is not None:
        logprobs = _sample_logprobs(choice, ids, params.logprobs, decode)
        total = sum(entry[token].logprob for token, entry in zip(ids, logprobs, strict=True))
    output = outputs.CompletionOutput(
        index=choice["index"],
        text=choice["text"] if params.detokenize else "",
        token_ids=ids,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        lora_request=lora,
    )
    span_of = getattr(outputs, "WeightVersionSpan", dict)  # vLLM 0.26 has no such class
    names = ("version", "start", "end")
    spans = [span_of(**{name: span[name] for name in names}) for span in choice.get("weight_versions") or ()]
    output.weight_versions = spans  # pyright: ignore[reportAttributeAccessIssue] - vLLM 0.26
    return output


def _sample_logprobs(
    choice: Mapping[str, Any], ids: Sequence[int], most: int, decode: Decode
) -> list[dict[int, Logprob]]:
    given = choice.get("logprobs") or {}
    values = given.get("token_logprobs") or ()
    tops = (given.get("top_logprobs") if most else None) or [None] * len(ids)
    if not len(values) == len(tops) == len(ids):
        raise EngineError(f"the answer has {len(ids)} tokens but {len(values)} logprobs")
    return [_position(*position, most, decode) for position in zip(ids, values, tops, strict=True)]


def _position(
    token: int, value: float, named: Mapping[str, float] | None, most: int, decode: Decode
) -> dict[int, Logprob]:
    """Return the sampled token first, as in vLLM, then the likeliest tokens.

    If the sampled token is not among the likeliest, the API does not give its rank, and the rank is None.
    """
    from vllm.logprobs import Logprob  # noqa: PLC0415

    try:
        top = {int(name.removeprefix(ID_PREFIX)): other for name, other in (named or {}).items()}
    except ValueError as error:
        raise EngineError(f"the likeliest tokens come by their text and not their id: {error}") from error
    among = 0 < len(top) <= most or most < 0
    rank = 1 + sum(other > value for other in top.values()) if among else None
    entry = {token: Logprob(value, rank, decode(token))}
    likeliest = sorted(((other, lp) for other, lp in top.items() if other != token), key=lambda pair: -pair[1])
    for place, (other, lp) in enumerate(likeliest, 1):
        entry[other] = Logprob(lp, place + (rank is not None and place >= rank), decode(other))
    return entry


def _prompt_logprobs(choice: Mapping[str, Any]) -> list[dict[int, Logprob] | None]:
    from vllm.logprobs import Logprob  # noqa: PLC0415

    given = choice.get("prompt_logprobs")
    if given is None:
        raise EngineError("the engine gives no prompt logprobs; leave out SamplingParams(prompt_logprobs=...)")
    return [
        None if position is None else {int(token): Logprob(**entry) for token, entry in position.items()}
        for position in given
    ]
