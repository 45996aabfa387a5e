"""What an engine is and can do; and the error that says what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, Self

from penstock.errors import MissingCapabilityError

DEV_MODE = "start it with the environment variable VLLM_SERVER_DEV_MODE=1"

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
    weight_transfer: str | None = "penstock_shm"
    """The backend of vLLM's native weight transfer; None: it has none."""
    sampled_logprobs: bool = True
    """Logprobs are of what was sampled from: after temperature and the like."""


PENSTOCK = Capabilities()
"""Of an engine with our plugin."""
SAMPLED_FROM = ("processed_logprobs",)
"""Values of vLLM's `--logprobs-mode` that give log-softmax of what is sampled from."""

_BY_PENSTOCK = (
    "launch it by Penstock, or install penstock beside vLLM and start it by `VLLM_SERVER_DEV_MODE=1 python -m "
    "penstock.plugin.server --model MODEL --port 8001 --logprobs-mode processed_logprobs "
    '--weight-transfer-config \'{"backend": "penstock_shm"}\' --middleware '
    "penstock.plugin.middleware.PenstockMiddleware --worker-extension-cls "
    "penstock.plugin.worker.WorkerExtension`; plain vLLM takes weights by update_named_weights"
)
_WITH_SLEEP = (
    f"{DEV_MODE} and the option --enable-sleep-mode, or launch it by Penstock with enable_sleep_mode=true, on GPUs: on "
    "a CPU vLLM frees no memory"
)
_WITH_LORA = (
    "start it with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or launch it by "
    "Penstock with enable_lora=true"
)
_WITH_TRANSFER = (
    f'{DEV_MODE} and, of vLLM 0.32 or newer, --weight-transfer-config \'{{"backend": "nccl"}}\' (or another backend)'
)
_WITH_LOGPROBS = (
    "start it with the option --logprobs-mode processed_logprobs (without Penstock's plugin with the environment "
    "variable VLLM_SERVER_DEV_MODE=1 too, so that it says how it is set); or ask for logprobs=False"
)

LACKING: Mapping[Capability, tuple[str, str]] = MappingProxyType(
    {
        "plugin": ("Penstock's plugin", _BY_PENSTOCK),
        "tokens": ("the token endpoint with versions", "start it with --enable-scale-out, of vLLM 0.32 or newer"),
        "pause": ("/pause and /resume", DEV_MODE),
        "abort": ("/abort_requests", f"{DEV_MODE}, and vLLM 0.32 or newer"),
        "caches": ("/reset_prefix_cache", DEV_MODE),
        "kv_in_flight": (
            "KV that stays inside of it",
            "start it by Penstock, and without --kv-transfer-config and KV offloading, or update with kv='recompute'",
        ),
        "sleep": ("sleep mode", _WITH_SLEEP),
        "rpc": ("/collective_rpc", DEV_MODE),
        "lora": ("adapters that come and go", _WITH_LORA),
        "weight_transfer": ("native weight transfer", _WITH_TRANSFER),
        "sampled_logprobs": ("logprobs of what it samples from (it may ignore the temperature)", _WITH_LOGPROBS),
    }
)
"""Name of each capability, and how to start an engine that has it."""


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
                sampled_logprobs=answer["logprobs_mode"] in SAMPLED_FROM,
            ),
        )


def require(engines: Iterable[tuple[str, Capabilities]], needed: Capability, operation: str) -> None:
    """Refuse an operation that some engine cannot do, before anything is changed anywhere.

    MissingCapabilityError: it names those engines, what they lack, and how they get it.
    """
    lacking = [name for name, has in engines if not getattr(has, needed)]
    if lacking:
        what, how = LACKING[needed]
        raise MissingCapabilityError(
            f"{operation}: engine{'s' if len(lacking) > 1 else ''} {', '.join(lacking)} "
            f"{'lack' if len(lacking) > 1 else 'lacks'} {what}; {how}. Nothing was changed"
        )


def smallest_vocabulary(infos: Iterable[EngineInfo]) -> int | None:
    """Return the bound below which every engine takes token ids; None where none reports one."""
    return min((info.vocab_size for info in infos if info.vocab_size), default=None)
