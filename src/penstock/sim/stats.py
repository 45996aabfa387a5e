"""Counters of the simulated engine, and vLLM's Prometheus text of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.sim.engine import SimEngine


@dataclass(slots=True)
class Figures:
    """What the engine has done since its start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter[str])
    """Samples by finish reason."""


def prometheus(ranks: Sequence[SimEngine]) -> str:
    """`GET /metrics`: vLLM's series, true values, of each data-parallel rank."""
    return "".join(_of_rank(engine, number) for number, engine in enumerate(ranks))


def _of_rank(engine: SimEngine, number: int) -> str:
    labels = f'engine="{number}",model_name="{engine.config.served_model_name}"'
    cache, scheduler = engine.scheduler.figures, engine.scheduler
    rows: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "gauge", len(scheduler.running)),
        ("vllm:num_requests_waiting", "gauge", len(scheduler.waiting)),
        ("vllm:kv_cache_usage_perc", "gauge", scheduler.pool.usage),
        ("vllm:prefix_cache_queries_total", "counter", cache.queries),
        ("vllm:prefix_cache_hits_total", "counter", cache.hits),
        ("vllm:num_preemptions_total", "counter", cache.preemptions),
        ("vllm:prompt_tokens_total", "counter", engine.figures.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", engine.figures.generation_tokens),
    ]
    blocks = f'block_size="{engine.config.block_size}",num_gpu_blocks="{engine.config.kv_blocks}"'
    lines = ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{{blocks},engine="{number}"}} 1.0']
    for name, kind, value in rows:
        lines += [f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{{{labels}}} {float(value)}"]
    lines.append("# TYPE vllm:request_success counter")
    for reason in ("stop", "length", "abort"):
        count = float(engine.figures.finished[reason])
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}')
    return "\n".join(lines) + "\n"
