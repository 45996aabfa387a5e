"""What an engine is and can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Self

from penstock.rooms import plugged_in

Capability = Literal[
    "plugin", "tokens", "pause", "abort", "caches", "kv_in_flight", "sleep", "rpc", "lora", "weight_transfer",
    "sampled_logprobs",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine offers. The defaults are those of an engine that Penstock launches."""

    plugin: bool = True
    """Penstock's plugin: `update_weights` while it generates, progress reports, resumed requests."""
    tokens: bool = True
    """The token endpoint, `POST /inference/v1/generate`."""
    pause: bool = True
    abort: bool = True
    caches: bool = True
    """`/reset_prefix_cache`."""
    kv_in_flight: bool = True
    """KV stays in the engine, so `kv="keep_in_flight"` can keep it from new requests."""
    sleep: bool = True
    rpc: bool = True
    """`/collective_rpc`."""
    lora: bool = True
    """Adapters can be loaded and unloaded while it runs."""
    weight_transfer: str | None = None
    """The backend of vLLM's native weight transfer; None: it has none."""
    sampled_logprobs: bool = True
    """Logprobs are of what was sampled from: after temperature and the like."""


PENSTOCK = Capabilities()
"""Of an engine with our plugin."""
SAMPLED_FROM = ("processed_logprobs",)
"""Values of vLLM's `--logprobs-mode` that give log-softmax of what is sampled from."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is: `GET /penstock/info`, or without our plugin what `vanilla.identify` finds out."""

    engine: str
    """`vllm`, or `sim`."""
    vllm: str
    """Its version."""
    weight_version: int
    paused: bool
    tp: int
    pp: int
    dp: int
    """Data-parallel ranks behind its address; each can be asked for in a request's header."""
    vocab_size: int
    """Token ids are less than this; 0: unknown."""
    max_model_len: int
    transports: tuple[str, ...]
    capabilities: Capabilities = PENSTOCK
    kv_kept: bool = False
    """The update to this version kept the KV cache."""
    dtype: str = ""
    """It computes in, by torch's name: `bfloat16`; empty: unknown."""
    instance: str = ""
    """Id that changes with each start of the server; empty: unknown."""
    model: str = ""
    """Name that it serves its model under; empty: unknown."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """Read the answer of our plugin. KeyError, TypeError: it is something else."""
        known: dict[str, Any] = {field.name: answer[field.name] for field in fields(cls) if field.default is MISSING}
        known["transports"] = tuple(known["transports"])
        return cls(
            **known,
            kv_kept=bool(answer.get("kv_kept", False)),
            dtype=str(answer.get("dtype", "")),
            instance=str(answer.get("instance", "")),
            model=str(answer.get("model", "")),
            capabilities=Capabilities(
                kv_in_flight=bool(answer.get("kv_in_flight", False)),
                sleep=bool(answer.get("sleep", True)),
                lora=bool(answer.get("lora", True)),
                weight_transfer=answer.get("weight_transfer"),
                sampled_logprobs=answer["logprobs_mode"] in SAMPLED_FROM,
            ),
        )


def require(engines: Iterable[tuple[str, Capabilities]], needed: Capability, operation: str) -> None:
    """Refuse an operation that some engine cannot do, before anything is changed anywhere.

    Raises:
        MissingCapabilityError: it names those engines, what they lack, and how they get it.
    """
    lacking = [name for name, has in engines if not getattr(has, needed)]
    if lacking:
        raise plugged_in("capabilities.lacking")(lacking, needed, operation)


def smallest_vocabulary(infos: Iterable[EngineInfo]) -> int | None:
    """Return the bound below which every engine takes token ids; None where none reports one."""
    return min((info.vocab_size for info in infos if info.vocab_size), default=None)
