"""vLLM's Prometheus text to the few figures that routing and reports need."""

from __future__ import annotations

from penstock.errors import MissingCapabilityError
from penstock.types import EngineStats

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"


def engine_stats(text: str, engine: str) -> EngineStats:
    """Sum the engine's series over its data-parallel ranks (KV usage: their mean).

    Raises:
        MissingCapabilityError: a series is missing; `engine` is named.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        sums[name] = sums.get(name, 0.0) + float(value)
        counts[name] = counts.get(name, 0) + 1
    if missing := [name for name in (RUNNING, WAITING, KV_USAGE, GENERATED, PREEMPTIONS) if name not in sums]:
        raise MissingCapabilityError(
            f"engine {engine} does not say how busy it is: its /metrics lacks {', '.join(missing)}; start it without "
            "--disable-log-stats"
        )
    return EngineStats(
        running=int(sums[RUNNING]),
        waiting=int(sums[WAITING]),
        kv_cache_usage=sums[KV_USAGE] / counts[KV_USAGE],
        generation_tokens=int(sums[GENERATED]),
        preemptions=int(sums[PREEMPTIONS]),
    )
