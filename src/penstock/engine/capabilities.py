"""An engine's identity and capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, Strict

from penstock.checks import LARGEST

Capability = Literal[
    "plugin", "tokens", "pause", "abort", "caches", "kv_in_flight", "sleep", "rpc", "lora", "weight_transfer",
    "sampled_logprobs",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an engine. The defaults are those of an engine that Penstock launches."""

    plugin: bool = True
    """Penstock's plugin: `update_weights` during generation, progress reports, resumed requests."""
    tokens: bool = True
    """The token endpoint, `POST /inference/v1/generate`."""
    pause: bool = True
    abort: bool = True
    caches: bool = True
    """`/reset_prefix_cache`."""
    kv_in_flight: bool = True
    """KV stays inside the engine, so `kv="keep_in_flight"` can hide it from new requests."""
    sleep: bool = True
    rpc: bool = True
    """`/collective_rpc`."""
    lora: bool = True
    """Adapters can be loaded and unloaded at run time."""
    weight_transfer: str | None = None
    """Backend of vLLM's native weight transfer; None if the engine has none."""
    sampled_logprobs: bool = True
    """Logprobs describe the distribution that was sampled from, after temperature and other changes."""


PENSTOCK = Capabilities()
"""Capabilities of an engine that runs the plugin."""
SAMPLED_FROM = ("processed_logprobs",)
"""Values of vLLM's `--logprobs-mode` that give log-softmax of the sampled distribution."""

Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=1024)]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Identity and state of an engine, from `GET /penstock/info` or, without our plugin, `vanilla.identify`."""

    engine: str
    """`vllm` or `sim`."""
    vllm: str
    """Version of vLLM."""
    weight_version: Count
    paused: Annotated[bool, Strict()]
    tp: Ranks
    pp: Ranks
    dp: Ranks
    """Data-parallel ranks behind its address. A request's header can choose a rank."""
    vocab_size: Count
    """Token ids are smaller than this; 0: unknown."""
    max_model_len: Count
    transports: tuple[str, ...]
    capabilities: Capabilities = PENSTOCK
    kv_kept: bool = False
    """Whether the update to this version kept the KV cache."""
    checksum: str = ""
    """Checksum of the last `update_weights`, of any owner. Empty: none or unknown."""
    dtype: str = ""
    """Torch's name of the dtype in which the engine computes, such as `bfloat16`. Empty: unknown."""
    instance: str = ""
    """Id that changes with each start of the server. Empty: unknown."""
    model: str = ""
    """Name under which it serves its model. Empty: unknown."""
