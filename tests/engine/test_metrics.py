"""vLLM's Prometheus text as the figures that a fleet shows."""

from __future__ import annotations

import pytest

from penstock.engine.control import engine_stats
from penstock.errors import EngineError
from penstock.types import EngineStats

RANK = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{rank}",model_name="a b"}} 2.0
vllm:num_requests_waiting{{engine="{rank}",model_name="a b"}} 1.0
vllm:kv_cache_usage_perc{{engine="{rank}",model_name="a b"}} 0.{rank}5
vllm:generation_tokens_total{{engine="{rank}",model_name="a b"}} 1.5e+06
vllm:generation_tokens_created{{engine="{rank}",model_name="a b"}} 1.7e+09
vllm:num_preemptions_total{{engine="{rank}",model_name="a b"}} 3.0
vllm:time_to_first_token_seconds_bucket{{engine="{rank}",le="+Inf",model_name="a b"}} 7.0
python_info{{version="3.12"}} 1.0
"""


def test_ranks_are_added_up_and_their_kv_usage_is_the_mean():
    text = "".join(RANK.format(rank=rank) for rank in range(2))
    assert engine_stats(text, "e0") == EngineStats(4, 2, pytest.approx(0.1), 3_000_000, 6)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "", "much"])
def test_figures_that_cannot_be_read_are_the_engines_error(value: str):
    text = RANK.format(rank=0).replace(" 1.5e+06", f" {value}")
    with pytest.raises(EngineError, match="engine e0: its /metrics cannot be read: "):
        engine_stats(text, "e0")
