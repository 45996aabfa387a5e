"""Counters of the simulated engine, and vLLM's Prometheus text of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.sim.config import SimConfig
from penstock.sim.scheduler import Scheduler


@dataclass(slots=True)
class EngineStats:
    """What the engine has done since its start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter[str])
    """Samples by finish reason."""


class RankMetrics(CollectorRegistry):
    """vLLM's series, true values, with a sample for each data-parallel rank of one server."""

    def __init__(self, config: SimConfig, ranks: Sequence[tuple[Scheduler, EngineStats]]) -> None:
        super().__init__()
        self._config = config
        self._ranks = ranks

    def text(self) -> str:
        """The answer of `GET /metrics`."""
        return generate_latest(self).decode()

    def collect(self) -> Iterable[Metric]:
        """One family after another."""
        model = self._config.served_model_name
        cache = GaugeMetricFamily("vllm:cache_config_info", "", labels=["block_size", "num_gpu_blocks", "engine"])
        success = CounterMetricFamily("vllm:request_success", "", labels=["engine", "model_name", "finished_reason"])
        rows: dict[str, list[float]] = {}
        for number, (scheduler, stats) in enumerate(self._ranks):
            cache.add_metric([str(self._config.block_size), str(self._config.kv_blocks), str(number)], 1)
            for reason in ("stop", "length", "abort"):
                success.add_metric([str(number), model, reason], stats.finished[reason])
            for name, value in _values(scheduler, stats).items():
                rows.setdefault(name, []).append(value)
        yield cache
        for name, values in rows.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"vllm:{name}", "", labels=["engine", "model_name"])
            for number, value in enumerate(values):
                family.add_metric([str(number), model], value)
            yield family
        yield success


def _values(scheduler: Scheduler, stats: EngineStats) -> dict[str, float]:
    return {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": scheduler.pool.usage,
        "prefix_cache_queries_total": scheduler.stats.queries,
        "prefix_cache_hits_total": scheduler.stats.hits,
        "num_preemptions_total": scheduler.stats.preemptions,
        "prompt_tokens_total": stats.prompt_tokens,
        "generation_tokens_total": stats.generation_tokens,
    }
