"""The capabilities that an engine may lack, and how to start one that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from penstock.engine.capabilities import Capabilities, Capability
from penstock.errors import MissingCapabilityError

DEV_MODE = "start it with the environment variable VLLM_SERVER_DEV_MODE=1"
_BY_PENSTOCK = (
    "launch it by Penstock, or install penstock beside vLLM and start it by `VLLM_SERVER_DEV_MODE=1 python -m "
    "penstock.plugin.server --model MODEL --port 8001 --logprobs-mode processed_logprobs "
    "--middleware penstock.plugin.middleware.PenstockMiddleware --worker-extension-cls "
    "penstock.plugin.worker.WorkerExtension`; plain vLLM takes weights by update_named_weights"
)
_WITH_SLEEP = (
    f"{DEV_MODE} and the option --enable-sleep-mode, or launch it by Penstock with enable_sleep_mode=true, on GPUs: on "
    "a CPU vLLM frees no memory"
)
_WITH_LORA = (
    "launch it by Penstock with enable_lora=true, or start it with Penstock's plugin, --enable-lora and the "
    "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
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
"""Name of each capability, and how to start an engine with it."""


def require(engines: Iterable[tuple[str, Capabilities]], needed: Capability, operation: str) -> None:
    """Refuse an operation that some engine cannot do, before any engine is changed.

    Raises:
        MissingCapabilityError: it names those engines, the missing capability, and a remedy.
    """
    if lacking := [name for name, has in engines if not getattr(has, needed)]:
        raise missing_capability(lacking, needed, operation)


def missing_capability(engines: Sequence[str], needed: Capability, operation: str) -> MissingCapabilityError:
    """Return the error for engines that lack a capability that an operation needs."""
    what, how = LACKING[needed]
    several = len(engines) > 1
    return MissingCapabilityError(
        f"{operation}: engine{'s' if several else ''} {', '.join(engines)} {'lack' if several else 'lacks'} {what}; "
        f"{how}. Nothing was changed"
    )
