"""vLLM's Prometheus text to the few figures that routing and reports need."""

from __future__ import annotations

from penstock.types import EngineStats


def engine_stats(text: str) -> EngineStats:
    """Sum the engine's series over its data-parallel ranks (KV usage: their mean)."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        sums[name] = sums.get(name, 0.0) + float(value)
        counts[name] = counts.get(name, 0) + 1
    usage = "vllm:kv_cache_usage_perc"
    return EngineStats(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums["vllm:num_requests_waiting"]),
        kv_cache_usage=sums[usage] / counts[usage],
        generation_tokens=int(sums["vllm:generation_tokens_total"]),
        preemptions=int(sums["vllm:num_preemptions_total"]),
    )
