"""Names, dtypes and shapes of a model's tensors, without loading it."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.config import EngineConfig
from penstock.engine.command import resolve_profile
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch


def model_metadata(config: EngineConfig, served: str | None) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What an update of this engine's weights has to bring, by checkpoint name, in the dtype that the engine serves.

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

    from penstock.engine.vllm_plugin.spec import expected_weights  # noqa: PLC0415 - imports torch
    from penstock.weights.pack import dtype_name  # noqa: PLC0415 - the same

    dtype: Any = served or config.dtype
    model: Any = AsyncEngineArgs(model=config.model, dtype=dtype, load_format=config.load_format).create_model_config()
    dtype = getattr(torch, dtype_name(model.dtype))
    return {name: (dtype, torch.Size(shape)) for name, shape in expected_weights(model).shapes.items()}
