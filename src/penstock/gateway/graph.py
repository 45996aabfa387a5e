"""The turns of a session as a graph of nodes in token space.

A node's context is its parent's context, its added tokens, and its sampled tokens: exactly what the engine saw. A row
of training data is a path from a root to a leaf. A node on several paths trains only in the first of them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from pydantic import ConfigDict

from penstock.errors import UserError
from penstock.gateway.dialect import SAMPLING
from penstock.gateway.messages import ChatMessage, Tool, tools_key
from penstock.rollout.generator import TokenRow, Trajectory
from penstock.router_settings import Positive, Seconds, Section
from penstock.types import Sample, SamplingParams

ID_BYTES = 12
RECORDED = (*SAMPLING, "max_tokens", "stop")
"""Sampling parameters that a row records for each turn."""


@dataclass(slots=True)
class Node:
    """One turn.

    Attributes:
        added: ids between the parent's and the sampled ids. For a root, its whole prompt.
        message: the sample as a message, with the minted ids.
        inputs: messages between the parent's and `message`.
        seen: number of messages of the conversation, including `message`.
        digest: digest of the conversation, including `message`.
        length: tokens of the context, including the sample.
        cause: reason why the turn did not extend an earlier one. Empty: it did, or the session was new.
        children: number of turns that extend it. A list of them would be a reference cycle.
    """

    id: str
    parent: Node | None
    added: tuple[int, ...]
    sample: Sample
    message: ChatMessage
    inputs: tuple[ChatMessage, ...]
    seen: int
    digest: bytes
    length: int
    params: SamplingParams
    cause: str = ""
    tools: tuple[Tool, ...] = ()
    reward: float | None = None
    children: int = 0
    created: float = field(default_factory=time.time)

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrained the sample."""
        return self.params.structured_outputs is not None

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def history(self) -> tuple[ChatMessage, ...]:
        """Return all messages up to and including this turn's: shape `[seen]`."""
        return tuple(message for node in self.path() for message in (*node.inputs, node.message))

    def context(self) -> list[int]:
        """Return every id up to the end of the sample: shape `[length]`."""
        return [token for node in self.path() for token in (*node.added, *node.sample.token_ids)]


@dataclass(frozen=True, slots=True)
class Place:
    """The point where a conversation continues, and why no later node fits."""

    parent: Node | None
    seen: int
    messages: tuple[ChatMessage, ...]
    """Messages of the request. Answers that were recognised have the form in which the gateway sent them."""
    digest: bytes
    cause: str = ""


@dataclass(slots=True)
class Session:
    """All turns of one episode, including its sub-agents and branches."""

    id: str
    tenant: str
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    reward: float | None = None
    breaks: Counter[str] = field(default_factory=Counter[str])
    sampled_tokens: int = 0
    created: float = field(default_factory=time.time)
    _by_digest: dict[bytes, list[Node]] = field(default_factory=dict[bytes, "list[Node]"])
    _by_minted: dict[str, Node] = field(default_factory=dict[str, Node])
    _heads: set[bytes] = field(default_factory=set[bytes])

    def find(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Place:
        """Find the latest turn that a conversation continues.

        A message with a minted id stands for that turn's answer if the two agree, however the harness wrote it. The
        turn is then found by equal meaning of all messages up to its answer.
        """
        given: list[ChatMessage] = []
        cause, named = "", set[str]()
        for message in messages:
            ours = self._sent(message)
            difference = message.agrees(ours.message) if ours else ""
            cause = cause or difference
            given.append(ours.message if ours and not difference else message)
            named |= {ours.id} if ours and not difference else set()
        digests = list(digests_of(given, tools))
        for i in range(len(given) - 1, -1, -1):
            if given[i].role == "assistant" and (nodes := self._by_digest.get(digests[i + 1])):
                agreeing = [node for node in nodes if _agrees(given, node.history())]
                if not agreeing:
                    cause = cause or "edited reasoning"
                    continue
                best = max(agreeing, key=lambda node: len(named & {turn.id for turn in node.path()}))
                lost = any(m.role == "assistant" for m in given[i + 1 :])
                return Place(best, i + 1, tuple(given), digests[-1], (cause or "edited history") if lost else "")
        return Place(None, 0, tuple(given), digests[-1], cause or self._why_root(given, digests))

    def add(self, node: Node, tools: Sequence[Tool]) -> None:
        """Add a turn to the session."""
        self.nodes[node.id] = node
        self._by_digest.setdefault(node.digest, []).append(node)
        self._by_minted |= dict.fromkeys((node.id, *(call.id for call in node.message.calls)), node)
        self.sampled_tokens += len(node.sample.token_ids)
        if node.cause:
            self.breaks[node.cause] += 1
        if node.parent is not None:
            node.parent.children += 1
        else:
            self._heads |= {tools_key(tools), _head(node.inputs)}

    def _sent(self, message: ChatMessage) -> Node | None:
        if message.role != "assistant":
            return None
        named = [node for i in message.minted if (node := self._by_minted.get(i))]  # a text may also name others' calls
        return next((node for node in named if not message.agrees(node.message)), named[0] if named else None)

    def _why_root(self, given: Sequence[ChatMessage], digests: Sequence[bytes]) -> str:
        if not self.nodes:
            return ""
        if _head(given) not in self._heads:
            return "other system prompt"
        if digests[0] not in self._heads:
            return "other tools"
        return "edited history" if any(m.role == "assistant" for m in given) else "new conversation"

    def last_turn(self) -> Node:
        """Return the latest turn of the main conversation. UserError: there is no turn.

        Sub-agents and title requests have another system prompt or other tools. They run within the main conversation,
        so its root spans the most turns of the session. After compaction, it continues at another root of the same
        prompt and tools. If conversations span equally many turns, the one with the most tokens is the main one.
        """
        roots: dict[str, tuple[int, tuple[bytes, bytes]]] = {}
        spans: dict[tuple[int, tuple[bytes, bytes]], int] = {}
        latest: dict[tuple[bytes, bytes], Node] = {}
        for at, node in enumerate(self.nodes.values()):
            parent = node.parent
            root = roots[parent.id] if parent else (at, (_head(node.inputs), tools_key(node.tools)))
            roots[node.id] = root
            spans[root] = at - root[0]
            latest[root[1]] = node
        if not latest:
            raise UserError(f"session {self.id} has no turn")
        _, kind = max(spans, key=lambda root: (spans[root], latest[root[1]].length))
        return latest[kind]

    def reward_of(self, leaf: Node) -> float | None:
        """Return a row's reward: its turns' sum, plus the session's if the leaf has none. Or None: no reward yet."""
        own = [node.reward for node in leaf.path() if node.reward is not None]
        if leaf.reward is not None or self.reward is None:
            return sum(own) if own else None
        return self.reward + sum(own)

    def give_reward(self, reward: float, node_id: str | None) -> None:
        """Set the reward of the session or of a node, replacing an earlier one. UserError: no such node."""
        if node_id is None:
            self.reward = reward
            return
        node = self._by_minted.get(node_id)
        if node is None:
            raise UserError(f"session {self.id} has no node {node_id!r}")
        node.reward = reward

    def rows(self) -> list[Row]:
        """Return one row for each turn that no other extends. Every sampled token has mask 1 in exactly one row."""
        trained: set[str] = set()
        rows: list[Row] = []
        for leaf in [node for node in self.nodes.values() if not node.children]:
            rows.append(Row(self, leaf, frozenset(trained)))
            trained |= {node.id for node in leaf.path()}
        return rows


class Limits(Section):
    """Budget of a session: sampled tokens, turns, and seconds since its start; None: no limit."""

    model_config = ConfigDict(strict=True)  # true is no limit of 1

    max_turns: Positive | None = None
    max_tokens: Positive | None = None
    max_seconds: Seconds | None = None

    def least(self, other: Limits) -> Limits:
        """Return the lower limit of each kind."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in Limits.model_fields}
        return Limits(**{name: min((v for v in pair if v is not None), default=None) for name, pair in pairs.items()})


@dataclass(frozen=True, slots=True)
class Row:
    """A path from a root to a leaf. The turns in `elsewhere` train in another row."""

    session: Session
    leaf: Node
    elsewhere: frozenset[str]

    def trajectory(self, group_id: str = "", reward: float | None = None) -> Trajectory:
        """Return the row as a trajectory. UserError: the row has no reward and none is given."""
        reward = self.session.reward_of(self.leaf) if reward is None else reward
        if reward is None:
            raise UserError(f"session {self.session.id} has no reward for leaf {self.leaf.id}; post it first")
        path = self.leaf.path()
        row = TokenRow(path[0].added)
        turns: list[tuple[int, float]] = []
        for node in path:
            if node.parent is not None:
                row.add_environment(node.added)
            row.add_sample(node.sample, trained=node.id not in self.elsewhere, constrained=node.constrained)
            turns.append((len(row.ids), node.reward or 0.0))
        return row.trajectory(
            reward=reward,
            stop_reason=self.leaf.sample.finish_reason,
            group_id=group_id or self.session.id,
            episode_id=self.session.id,
            turn_rewards=turns,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row as one object of a JSONL file. Its reward may be null."""
        reward = self.session.reward_of(self.leaf)
        t = self.trajectory(reward=0.0 if reward is None else reward)
        columns = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "stop_reason", "group_id")
        return {
            "session": self.session.id,
            "tenant": self.session.tenant,
            "leaf": self.leaf.id,
            "reward": reward,
            **{name: getattr(t, name) for name in columns},
            "nodes": [
                {
                    "id": node.id,
                    "end": end,
                    "tokens": len(node.sample.token_ids),
                    "trained": node.id not in self.elsewhere,
                    "reward": node.reward,
                    "sampling": {name: getattr(node.params, name) for name in RECORDED},
                    "finish": node.sample.finish_reason,
                    "kv_kept": any(span.kv_kept for span in node.sample.spans),
                    "constrained": node.constrained,
                    "cause": node.cause,
                    "text": node.message.text,
                    "reasoning": node.message.reasoning or "",
                    "calls": [{"name": call.name, "arguments": call.arguments} for call in node.message.calls],
                }
                for node, (end, _) in zip(self.leaf.path(), t.turn_rewards, strict=True)
            ],
        }


def digests_of(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Iterator[bytes]:
    """Yield the digest of the tools, then of each prefix: `[len(messages) + 1]`.

    A tool result counts by the place of its call, because some harnesses make new ids for each request.
    """
    digest = tools_key(tools)
    yield digest
    places: dict[str, str] = {}
    for number, message in enumerate(messages):
        places |= {call.id: f"{number}.{i}" for i, call in enumerate(message.calls)}
        if message.call_id in places:
            message = replace(message, call_id=places[message.call_id])  # noqa: PLW2901
        digest = extended(digest, message)
        yield digest


def extended(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation extended by one message."""
    return hashlib.blake2b(digest + message.key, digest_size=16).digest()


def _agrees(given: Sequence[ChatMessage], history: Sequence[ChatMessage]) -> bool:
    """Whether each given reasoning equals that of our turn of equal meaning."""
    pairs = zip(given, history, strict=False)
    return not any(m.role == "assistant" and m is not ours and m.agrees(ours) for m, ours in pairs)


def new_id() -> str:
    """Return a new random id."""
    return token_hex(ID_BYTES)


def _head(messages: Sequence[ChatMessage]) -> bytes:
    text = messages[0].text.strip() if messages and messages[0].role == "system" else ""
    return b"system:" + hashlib.blake2b(text.encode(), digest_size=16).digest()
