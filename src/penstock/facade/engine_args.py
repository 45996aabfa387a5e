"""Translate vLLM's engine arguments to options of `Fleet.launch`."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import orjson

from penstock.engine.launch import resolve_profile
from penstock.errors import ConfigError
from penstock.settings import EngineConfig, FleetConfig, RouterConfig

if TYPE_CHECKING:
    import torch

OWN = frozenset(name for section in (EngineConfig, FleetConfig, RouterConfig) for name in section.model_fields)
"""Options of `Fleet.launch`; where vLLM has one of the same name, it means the same."""
_REFUSED = {
    "engines": "num_replicas says how many there are",
    "worker_extension_cls": "engines have Penstock's own; reach vLLM's methods with collective_rpc",
    "weight_transfer_config": "update_weights brings its own transport",
    "distributed_executor_backend": "each engine is a process of its own; vLLM picks how its workers run",
}


def launch_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `Fleet.launch`; those that only vLLM knows are in `extra_args`, as on a command line.

    Args:
        given: fields of vLLM's AsyncEngineArgs, and of EngineConfig, FleetConfig and RouterConfig, by name.

    Raises:
        ConfigError: an unknown name (with the nearest known one), one that Penstock decides itself, or a value that
            has no form on a command line.
    """
    options: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    known = None
    for name, value in given.items():
        if name in _REFUSED:
            raise ConfigError(f"{name} cannot be chosen: {_REFUSED[name]}")
        if name in OWN:
            options[name] = value
            continue
        known = known or _engine_arguments()
        if name not in known:
            near = get_close_matches(name, {*known, *OWN}, n=1)
            raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        extra.update(_argument(name, value))
    if extra:
        options["extra_args"] = {**extra, **options.get("extra_args", {})}
    return options


def changed_fields(engine_args: Any) -> dict[str, Any]:
    """Return the model and all other fields of vLLM's `AsyncEngineArgs` that differ from their defaults.

    Raises:
        ConfigError: it is something else.
    """
    if not is_dataclass(engine_args) or isinstance(engine_args, type) or not hasattr(engine_args, "model"):
        raise ConfigError(f"engine_args must be vllm.AsyncEngineArgs, got {type(engine_args).__name__}")
    given: Any = engine_args
    plain = type(given)(model=given.model)
    found = {f.name: getattr(given, f.name) for f in fields(given)}
    return {name: value for name, value in found.items() if name == "model" or value != getattr(plain, name)}


def _engine_arguments() -> set[str]:
    try:
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - takes seconds
    except ImportError as error:
        raise ConfigError("options of vLLM need vLLM: pip install 'penstock[vllm]'") from error
    return {f.name for f in fields(AsyncEngineArgs)}


def _argument(name: str, value: Any) -> dict[str, Any]:
    option = name.replace("_", "-")
    if value is None:
        return {}
    if value is False:
        return {f"no-{option}": True}
    if isinstance(value, (str, int, float)):
        return {option: value}
    try:
        return {option: orjson.dumps(_plain(value)).decode()}
    except TypeError as error:
        raise ConfigError(
            f"{name}={value!r} has no form on a command line; give a string, a number, a dict or a list"
        ) from error


def _plain(value: Any) -> Any:
    """A config object of vLLM as the dict that makes it: what is not as by default."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    defaults = {f.name: f.default if f.default is not MISSING else None for f in fields(value)}
    return {name: given for name, given in asdict(value).items() if given is not None and given != defaults.get(name)}


def model_metadata(config: EngineConfig, served: str | None) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of each tensor of an update, by checkpoint name, in the dtype that the engine serves.

    From the checkpoint's headers, or from the model's config where only that is at hand.

    Args:
        config: of the engine.
        served: the dtype that the engines say they compute in. This machine may have other devices than theirs.

    Raises:
        ConfigError: the engine is a simulated one.
    """
    if resolve_profile(config) == "sim":
        raise ConfigError("a simulated engine has no model; there is no metadata of one")
    import torch  # noqa: PLC0415 - heavy
    from vllm import AsyncEngineArgs  # noqa: PLC0415 - takes seconds

    from penstock.plugin.spec import expected_weights  # noqa: PLC0415 - imports torch
    from penstock.weights.pack import dtype_name  # noqa: PLC0415 - the same

    dtype: Any = served or config.dtype
    model: Any = AsyncEngineArgs(model=config.model, dtype=dtype, load_format=config.load_format).create_model_config()
    dtype = getattr(torch, dtype_name(model.dtype))
    return {name: (dtype, torch.Size(shape)) for name, shape in expected_weights(model).shapes.items()}
