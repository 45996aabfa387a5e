"""vLLM's Prometheus text to the few figures that routing and reports need."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import MissingCapabilityError
from penstock.types import EngineStats

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
_SERIES = (RUNNING, WAITING, KV_USAGE, GENERATED, PREEMPTIONS)


def engine_stats(text: str, engine: str) -> EngineStats:
    """Sum the engine's series over its data-parallel ranks (KV usage: their mean).

    Raises:
        MissingCapabilityError: a series is missing; `engine` is named.
    """
    values: dict[str, list[float]] = defaultdict(list)
    # Nearly all that vLLM answers is buckets of histograms.
    wanted = "".join(line + "\n" for line in text.splitlines() if line.startswith(_SERIES))
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            values[sample.name].append(sample.value)
    if missing := [name for name in _SERIES if not values[name]]:
        raise MissingCapabilityError(
            f"engine {engine} does not say how busy it is: its /metrics lacks {', '.join(missing)}; start it without "
            "--disable-log-stats"
        )
    return EngineStats(
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        kv_cache_usage=sum(values[KV_USAGE]) / len(values[KV_USAGE]),
        generation_tokens=int(sum(values[GENERATED])),
        preemptions=int(sum(values[PREEMPTIONS])),
    )
