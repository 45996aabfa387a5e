"""The policy of a running router: changed with the engines, and asked where a request would go."""

from __future__ import annotations

import pytest
from router_rig import Rig, answer_name, rig

from penstock.errors import UserError
from penstock.prefix_hash import prefix_hashes


def hints(ids: list[int]) -> str:
    return f"X-Prompt-Tokens: {len(ids)}\r\nX-Prefix-Hashes: {prefix_hashes(ids)}\r\n"


async def rules(r: Rig) -> dict[str, int]:
    return dict((await r.settled()).placements)


async def test_from_the_next_request_on() -> None:
    async with rig(answer_name, answer_name, answer_name, engine_metrics_interval_s=0) as r:
        client = await r.client()
        await client.ask(headers="X-Session-ID: a\r\n")
        assert await rules(r) == {"bounded-sticky": 1}
        await r.set_policy("prefix-aware,round-robin", prefix_length=64, overload_threshold=3.0)
        answers = [(await client.ask()).body for _ in range(6)]
        assert answers[:3] == answers[3:]
        assert len(set(answers)) == 3
        for _ in range(5):
            await client.ask(headers=hints([7] * 200))
        assert await rules(r) == {"bounded-sticky": 1, "round-robin": 7, "prefix-aware": 4}
        state = await r.admin.engines()
        assert state.policy == {
            "policy": "prefix-aware,round-robin",
            "prefix_length": 64,
            "overload_threshold": 3.0,
        }
        assert state.sessions == 1  # what was known stays known
        r.policy = {}
        await r.again()
        assert (await r.admin.engines()).policy["policy"] == "bounded-sticky", "as it was started"


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("fastest", {}, "no policy 'fastest'"),
        ("requests,requests", {}, "named twice"),
        ("requests", {"prefix_length": 0}, "prefix_length"),
        ("requests", {"overload_threshold": 0.5}, "overload_threshold"),
    ],
)
async def test_a_wrong_one_changes_nothing(policy: str, options: dict[str, float], says: str) -> None:
    async with rig(answer_name) as r:
        before = (await r.admin.engines()).policy
        with pytest.raises(UserError, match=says):
            await r.set_policy(policy, **options)
        state = await r.admin.engines()
        assert (state.policy, state.epoch) == (before, 1)


async def test_a_choice_is_where_the_request_belongs_and_counts() -> None:
    async with rig(*[answer_name] * 4, policy="prefix-aware", prefix_length=64, engine_metrics_interval_s=0) as r:
        client = await r.client()
        prompts = [[i] * 200 for i in range(8)]
        for ids in prompts:
            await client.ask(headers=hints(ids))
        before = await r.settled()
        for ids in prompts:
            engine = await r.admin.choose(prompt_tokens=200, prefix_hashes=prefix_hashes([*ids[:128], *range(9)]))
            assert engine == (await client.ask(headers=hints(ids))).body.decode()
        after = await r.settled()
        assert after.requests == before.requests + 8
        assert sum(after.placements.values()) == sum(before.placements.values()) + 16
        assert [engine.outstanding_tokens for engine in after.engines] == [0] * 4
        await r.set_policy("round-robin")
        chosen = [await r.admin.choose() for _ in range(8)]
        assert chosen[:4] == chosen[4:]
        assert len(set(chosen)) == 4
        await r.announce([])
        assert await r.admin.choose() is None
