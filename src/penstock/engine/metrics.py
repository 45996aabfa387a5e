"""vLLM's Prometheus text to the few figures that routing and reports need."""

from __future__ import annotations

import math
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import EngineError, MissingCapabilityError
from penstock.types import EngineStats

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
_SERIES = (RUNNING, WAITING, KV_USAGE, GENERATED, PREEMPTIONS)


def engine_stats(text: str, engine: str) -> EngineStats:
    """Sum the engine's series over its data-parallel ranks (KV usage: their mean).

    Raises:
        MissingCapabilityError: a series is missing; `engine` is named.
        EngineError: a line of them is not Prometheus text, or its value is no finite number.
    """
    # Nearly all that vLLM answers is buckets of histograms.
    wanted = "".join(line + "\n" for line in text.splitlines() if line.startswith(_SERIES))
    values = _values(wanted, engine)
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


def _values(text: str, engine: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name].append(sample.value)
    except ValueError as error:  # the parser's own, of a malformed line
        raise EngineError(f"its /metrics cannot be read: {error}", engine=engine) from error
    if odd := [name for name, given in values.items() if not all(map(math.isfinite, given))]:
        raise EngineError(f"its /metrics cannot be read: {', '.join(odd)} is no finite number", engine=engine)
    return values
