"""`benchmarks/gateway.py`: rows a rollout of each policy; a gateway before a simulated engine, and what it lost."""

from __future__ import annotations

from pathlib import Path

import gateway


async def test_a_rollout_is_one_row_where_sampled_tokens_stay(tmp_path: Path) -> None:
    extend, faithful = await gateway.policies(tmp_path)
    assert (extend.ours, extend.ok) == (1, True)
    assert (faithful.ours, faithful.ok) == (15, True)


async def test_no_sampled_token_is_lost(tmp_path: Path) -> None:
    tokenizer = gateway._gateway_sides.save_tokenizer(tmp_path)
    with (
        gateway._gateway_sides.engine(tokens_per_second=2000) as engine,
        gateway._gateway_sides.penstock(engine, tokenizer) as side,
    ):
        async with gateway.client() as http:
            told, took = await gateway.episode(http, side, 0, 2, 5)
        assert (told <= 64, len(took)) == (True, 2)
        assert await gateway.trained([side], [0]) == told
        assert side.cpu_s() > 0
