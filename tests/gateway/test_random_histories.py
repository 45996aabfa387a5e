"""Random histories of one session: whatever harnesses do, rows are what the engine saw, and each token trains once."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_clients import ECHOES, WIRES, Chat

from gateway_rig import CALL, KEY, THOUGHT, Rig
from penstock.rollout.tokenizer import Tokenizer

SAYS = ("said", f"{THOUGHT}said", CALL, f"{THOUGHT}so\n{CALL}", f"{CALL}\n{CALL}", "<think>\nnever closed")
EDITS = (
    ("let me see", "no idea"),
    ('1,\\"b\\"', '7,\\"b\\"'),
    ('"a": 1,', '"a": 7,'),
    ("said", "told"),
    ("sure", "no"),
)
"""Of reasoning, of arguments as text and as an object, of an answer, of a question."""
STEPS = st.tuples(
    st.sampled_from(
        ("turn", "turn", "cut", "edit", "drop", "branch", "compact", "agent", "tools", "retry", "parallel", "abort")
    ),
    st.integers(0, 5),
    st.integers(0, 5),
)


class Harness:
    """Conversations of one session on any wire; each step is what some harness does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.agents: list[tuple[Chat, str]] = [(Chat(rig), "be good")]
        self.asked = 0

    def agent(self, wire: int, system: str) -> Chat:
        kind = WIRES[wire % 3]
        body: Any = kind.body
        made = type("Agent", (kind,), {"body": property(lambda c: _replaced(body.fget(c), system))})(self.rig)
        self.agents.append((made, system))
        return made

    def branch(self, client: Chat, system: str) -> Chat:
        """Another agent that begins where `client` is."""
        made = self.agent([wire.path for wire in WIRES].index(client.path), system)
        made.items, made.function = json.loads(json.dumps(client.items)), client.function
        return made

    async def step(self, kind: str, which: int, how: int) -> None:
        client, system = self.agents[which % len(self.agents)]
        if kind == "edit":
            client.items = _replaced(client.items, EDITS[how % len(EDITS)][1], EDITS[how % len(EDITS)][0])
        elif kind == "drop":
            del client.items[max(1, len(client.items) - how) :]
        elif kind == "compact":
            client.items[1 if type(client).path == Chat.path else 0 :] = [{"role": "user", "content": "in short"}]
        elif kind == "branch":
            client = self.branch(client, system)
        elif kind == "agent":
            client = self.agent(how, f"be {which}")
        elif kind == "tools":
            client.function = {**client.function, "description": f"adds, version {self.asked}"}
        self.asked += 1
        client.user(f"sure {self.asked}")
        said = [SAYS[(how + i) % len(SAYS)].replace("said", f"said {self.asked}{i}") for i in range(4)]
        self.rig.engine.texts, before, sent = said, len(self.rig.engine.seen), _numbered(json.dumps(client.items))
        branches = kind in {"edit", "drop", "compact", "agent", "tools"}
        goes_on = not branches and '"assistant"' in json.dumps(client.items)
        answer = await self._asked(kind, client, how)
        client.echo(answer, ECHOES[how % 3])
        *_, node = self.rig.session().nodes.values()
        assert node.parent or not goes_on or self.rig.gateway.policy == "faithful", "a turn that extends no other"
        for context in self.rig.engine.seen[before:]:
            assert _numbered(self.rig.tokenizer.decode(context)) == sent, "another conversation than the harness sent"

    async def _asked(self, kind: str, client: Chat, how: int) -> dict[str, Any]:
        """Ask as a step does; return the answer."""
        if kind == "retry":
            client.headers = {"Idempotency-Key": str(self.asked)}
            answer = await client.ask()
            assert await client.ask() == answer
            client.headers = {}
            return answer
        if kind == "parallel":
            system = next(system for known, system in self.agents if known is client)
            other = self.branch(client, system)
            answer, others = await asyncio.gather(client.ask(), other.ask())
            other.echo(others, ECHOES[how % 3])
            return answer
        if kind == "abort":
            return await self._abort(client)
        limit = "max_output_tokens" if client.path == WIRES[1].path else "max_tokens"
        client.more = {limit: 3 + how} if kind == "cut" else {}
        answer = await client.ask()
        client.more = {}
        return answer

    async def _abort(self, client: Chat) -> dict[str, Any]:
        """Leave in the middle of a turn; the same request reads its answer later."""
        engine = self.rig.engine
        engine.hold, engine.asked, before = asyncio.Event(), asyncio.Event(), len(engine.seen)
        asking = asyncio.create_task(client.ask())
        await engine.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        engine.hold.set()
        engine.hold = None
        answer = await client.ask()
        assert len(engine.seen) == before + 1
        return answer

    def check(self) -> None:
        """Every request of the engine is one turn, trained in one row, with its own version."""
        engine, session = self.rig.engine, self.rig.session()
        rows = [row.as_json() for row in session.rows()]
        self.rig.check(rows)
        trained = Counter[int]()
        for row in rows:
            start = len(row["prompt_ids"])
            lengths = {len(row[name]) for name in ("response_ids", "loss_mask", "logprobs", "versions")}
            assert len(lengths) == 1
            ids, mask = [*row["prompt_ids"], *row["response_ids"]], row["loss_mask"]
            for node in row["nodes"]:
                span = slice(node["end"] - node["tokens"], node["end"])
                assert list(mask[span]) == [int(node["trained"])] * node["tokens"]
                if node["trained"]:
                    (version,) = set(row["versions"][span])
                    assert engine.seen[version] == ids[: start + span.start]
                    trained[version] += 1
            assert sum(mask) == sum(node["tokens"] for node in row["nodes"] if node["trained"])
        assert trained == Counter(range(len(engine.seen)))
        assert len(rows) == len(session.nodes) - len({node.parent.id for node in session.nodes.values() if node.parent})
        sampled = sum(map(len, engine.made))
        tenant = self.rig.gateway.tenant_of(KEY)
        assert tenant is not None
        report = self.rig.gateway.report(tenant)
        assert (report["sampled_tokens"], report["trained_tokens"]) == (sampled, sampled)
        assert (report["turns"], report["rows"]) == (len(engine.seen), len(rows))
        assert report["unscored_rows"] == len(rows)
        assert sum(report["breaks"].values()) == sum(bool(node.cause) for node in session.nodes.values())


def _numbered(text: str) -> list[str]:
    """Questions and answers of a conversation, in their order."""
    return re.findall(r"(?:sure|no|said|told) \d+", text)


def _replaced(value: Any, new: str, old: str = "be good") -> Any:
    return json.loads(json.dumps(value).replace(old, new))


@pytest.mark.parametrize("policy", ["extend", "faithful"])
@settings(max_examples=100, derandomize=True)
@given(steps=st.lists(STEPS, min_size=3, max_size=9))
def test_rows_are_what_the_engine_saw(policy: str, tokenizer: Tokenizer, steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        harness = Harness(Rig(tokenizer, policy=policy, max_model_len=20_000))
        for step in steps:
            await harness.step(*step)
            harness.check()
        await harness.rig.gateway.close()

    asyncio.run(asyncio.wait_for(play(), 60))
