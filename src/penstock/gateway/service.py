"""Sessions of tenants and their turns: keys, budgets, sampling, and answers that outlive their client.

Towards engines there are only token ids, over our own client. So logprobs, versions, pauses and deaths of engines are
what they are for every other rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from penstock.errors import ConfigError, EngineHTTPError, PenstockError, RequestError, UserError
from penstock.gateway.graph import Limits, Row, Session, new_id
from penstock.gateway.messages import Answer, ChatRequest, GatewayError
from penstock.gateway.turn import GatewayOptions, TurnCodec
from penstock.guard import new_key
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.multi_turn import Sampler
from penstock.rollout.output_parser import OutputParser
from penstock.rollout.vllm_parser import VllmOutputParser

MOST_NAME = 200
"""Characters of a session's name."""
MOST_REPLAYED = 8
"""Answers of a session kept for a client that sends its request again although it has read the answer."""
MOST_THREADS = 4
"""Threads that read, render and encode requests; each long body occupies one."""
LONG_TEXT = 1 << 14
"""Characters of a conversation from which a thread renders it."""
_SERVER_ERROR = 500
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user of the gateway: sees its own sessions alone."""

    name: str
    key: str = field(repr=False)
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class PendingTurn:
    """A turn under way or finished; clients that repeat a request read the same one."""

    task: asyncio.Task[Answer]
    waiters: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True)
class _Kept:
    """A session with what belongs to its serving."""

    session: Session
    limits: Limits
    key: str
    sampling: Mapping[str, Any]
    reserved: int = 0
    """Most tokens that turns under way may sample."""
    turns: dict[bytes, PendingTurn] = field(default_factory=dict[bytes, PendingTurn])
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set["asyncio.Task[Answer]"])
    """Turns under way; of equal requests at once, `turns` has the latest alone."""

    def budget(self) -> int | None:
        """Return the tokens that one turn more may sample; None: any number. GatewayError: there are none."""
        if self.limits.max_tokens is None:
            return None
        left = self.limits.max_tokens - self.session.sampled_tokens - self.reserved
        if left < 1:  # turns under way may use the rest
            raise GatewayError(
                f"the budget of session {self.session.id} is used up: max_tokens={self.limits.max_tokens}",
                code="budget_exceeded",
            )
        return left


class Gateway:
    """Sessions of tenants over one model.

    Args:
        client: samples; an engine, a fleet, or a `DataClient` of a router.
        template: of the model. If it cannot be extended, the policy is `faithful`.
        options: see there.
        tenants: at least one.
        adapter: name of the LoRA adapter that every turn asks for.
        parser: of answers; None: our own.

    Raises:
        ConfigError: two tenants with one name or key, or an empty one.

    Attributes:
        codec: of its turns.
        policy: in force.
    """

    def __init__(
        self,
        client: Sampler,
        template: ChatTemplate,
        options: GatewayOptions,
        tenants: Sequence[Tenant],
        *,
        adapter: str | None = None,
        parser: OutputParser | VllmOutputParser | None = None,
    ) -> None:
        if not tenants or not all(t.name and t.key for t in tenants):
            raise ConfigError("give at least one tenant, each with a name and a key")
        if len({t.name for t in tenants}) < len(tenants) or len({t.key for t in tenants}) < len(tenants):
            raise ConfigError("two tenants have the same name or the same key")
        self.options = options
        self.template = template
        self.codec = TurnCodec(template, options, parser or OutputParser(template.tokenizer))
        self.policy = self.codec.policy
        sample: Any = client.sample
        self._sample = sample if adapter is None else partial(sample, adapter=adapter)
        self._tenants = {_digest(t.key): t for t in tenants}
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._by_key: dict[bytes, _Kept] = {}
        self._counts = Counter[str]()
        workers = min(MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="penstock-gateway")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work that only reads sessions in one of a few threads: a long body must not hold up the others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant whose own key this is; a session's key is not."""
        return self._tenants.get(_digest(key))

    def open_session(
        self,
        tenant: Tenant,
        name: str | None = None,
        limits: Limits | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> tuple[str, str]:
        """Open a session, or find the tenant's own of that name; return its name and its key.

        The key serves this session's turns and nothing else, so a harness can have it.

        Args:
            tenant: whose session it is.
            name: default: a new id.
            limits: besides the tenant's; the lower one holds.
            sampling: parameters of all its turns, before the gateway's own and what the harness asks for.

        Raises:
            UserError: the name is too long, or limits are given for a session that exists.
            GatewayError: too many sessions.
        """
        kept = self._open(tenant, name or new_id(), limits, sampling)
        return kept.session.id, kept.key

    def session(self, key: str, name: str | None, hint: str | None = None, *, keep: bool = True) -> Session:
        """Return the session of a call: that of a session's key, else the tenant's of that name.

        Args:
            key: of a session or of a tenant.
            name: that the path says.
            hint: name that the harness gave in a header, for a tenant's key without a `name`.
            keep: open the tenant's session if there is none of that name; else an empty one is returned, and not kept.

        Raises:
            GatewayError: the key is unknown, or of another session.
        """
        if (kept := self._by_key.get(_digest(key))) is not None:
            if name not in (None, kept.session.id):
                raise GatewayError("this key is of another session", status=403, code="forbidden")
            return kept.session
        if (tenant := self.tenant_of(key)) is None:
            raise GatewayError("missing or unknown API key", status=401, code="invalid_api_key")
        name = name or hint or "default"
        if not keep and (tenant.name, name) not in self._kept:
            return Session(name, tenant.name)
        return self._open(tenant, name, None).session

    def find(self, tenant: Tenant, name: str) -> Session:
        """Return a session of the tenant. GatewayError: there is none; those of others count as none."""
        return self._find(tenant, name).session

    def sessions(self, tenant: Tenant) -> list[Session]:
        """Sessions of the tenant, oldest first."""
        return [kept.session for (owner, _), kept in self._kept.items() if owner == tenant.name]

    def drop(self, tenant: Tenant, name: str) -> list[Row]:
        """Forget a session, and return its rows. GatewayError: a turn of it is under way, or there is none."""
        kept = self._find(tenant, name)
        if kept.tasks:
            raise GatewayError(f"a turn of session {name} is under way; wait for it", status=409, code="busy")
        del self._kept[tenant.name, name]
        del self._by_key[_digest(kept.key)]
        self._counts[tenant.name] -= 1
        return kept.session.rows()

    async def close_session(self, tenant: Tenant, name: str) -> list[Row]:
        """End the session's turns under way, forget it, and return its rows."""
        await _cancel(self._find(tenant, name).tasks)
        return self.drop(tenant, name)

    def _open(
        self, tenant: Tenant, name: str, limits: Limits | None, sampling: Mapping[str, Any] | None = None
    ) -> _Kept:
        if (kept := self._kept.get((tenant.name, name))) is not None:
            if limits is not None and limits.least(tenant.limits) != kept.limits:
                raise UserError(f"session {name} exists, and its limits cannot change")
            return kept
        if not (name.isascii() and name.isprintable()) or len(name) > MOST_NAME or "/" in name:
            raise UserError(f"a session's name has at most {MOST_NAME} printable ASCII characters and no slash")
        if self._counts[tenant.name] >= self.options.max_sessions:
            why = f"{self._counts[tenant.name]} sessions are kept; finish some"
            raise GatewayError(why, status=503, code="too_many_sessions")
        kept = _Kept(Session(name, tenant.name), (limits or Limits()).least(tenant.limits), new_key(), sampling or {})
        self._kept[tenant.name, name] = self._by_key[_digest(kept.key)] = kept
        self._counts[tenant.name] += 1
        return kept

    def _find(self, tenant: Tenant, name: str) -> _Kept:
        kept = self._kept.get((tenant.name, name))
        if kept is None:
            raise GatewayError(f"there is no session {name!r}", status=404, code="not_found")
        return kept

    # --- turns -------------------------------------------------------------------------------------------------------

    def is_waited_for(self, session: Session, digest: bytes) -> bool:
        """Whether a client waits for the answer to an equal request."""
        kept = self._kept.get((session.tenant, session.id))
        turn = None if kept is None else kept.turns.get(digest)
        return turn is not None and turn.waiters > 0

    def submit(self, session: Session, request: ChatRequest, digest: bytes, *, repeated: bool) -> PendingTurn:
        """Begin a turn, or return the one that this request repeats.

        A request repeats an earlier one of equal `digest` if its client says so (`repeated`), or if no client has read
        the earlier answer and none waits for it. Two clients that ask the same at once get a turn each.

        Raises:
            GatewayError: the session was finished meanwhile, or is over its budget.
        """
        kept = self._kept.get((session.tenant, session.id))
        if kept is None or kept.session is not session:
            raise GatewayError(
                f"session {session.id} was finished while the request came", status=404, code="not_found"
            )
        turn = kept.turns.get(digest)
        if turn is not None and not turn.failed and (repeated or not (turn.delivered or turn.waiters)):
            return turn
        kept.limits.check(session, under_way=len(kept.tasks), reserved=kept.reserved)
        task = asyncio.create_task(self._turn(kept, request))
        kept.tasks.add(task)
        task.add_done_callback(kept.tasks.discard)
        read = [key for key, turn in kept.turns.items() if turn.delivered]
        for key in read[:-MOST_REPLAYED]:
            del kept.turns[key]
        kept.turns[digest] = turn = PendingTurn(task)
        task.add_done_callback(lambda _: _forget_failed(kept, digest, turn))
        return turn

    async def _turn(self, kept: _Kept, request: ChatRequest) -> Answer:
        session, asked, request = kept.session, request, self.codec.whole(kept.session, request)
        if request.messages and request.messages[-1].role == "assistant":
            raise GatewayError(
                "the last message is the assistant's, and a turn cannot be begun for it; send what follows"
            )
        if sum(len(m.text) for m in request.messages) > LONG_TEXT:
            parent, added, place = await self.in_thread(lambda: self.codec.prompt_of(session, request))
        else:  # a thread would cost more than the work: each change of threads may wait 5 ms for the interpreter's lock
            parent, added, place = self.codec.prompt_of(session, request)
        context = [*(parent.context() if parent else ()), *added]
        params = self.codec.params(request, context, kept.sampling, kept.budget())
        kept.reserved += params.max_tokens
        try:
            (sample,) = await self._sample(context, 1, params, f"{session.tenant}/{session.id}")
        except EngineHTTPError as error:
            code = "engine" if error.status >= _SERVER_ERROR else "invalid_request"
            raise GatewayError(str(error), status=error.status, code=code) from error
        except PenstockError as error:
            if isinstance(error, (RequestError, GatewayError)):
                raise
            raise GatewayError(f"no engine could answer: {error}", status=503, code="engine") from error
        finally:
            kept.reserved -= params.max_tokens
        if not sample.token_ids:  # a row cannot go on from nothing
            raise GatewayError("the turn was aborted before its first token; send it again", status=503, code="engine")
        finish, node = sample.finish_reason, self.codec.node(parent, added, sample, request, place, params)
        session.add(node, request.tools)
        return Answer(
            id=node.id,
            message=node.message,
            finish="tool_calls" if node.message.calls and finish == "stop" else finish,
            prompt_tokens=len(context),
            output_tokens=len(sample.token_ids),
            request=replace(asked, messages=(), tools=request.tools, model=request.model or self.options.model),
            created=int(node.created),
        )

    # --- report ------------------------------------------------------------------------------------------------------

    def report(self, tenant: Tenant) -> dict[str, Any]:
        """Return what a tenant's sessions came to: rows, tokens, and breaks by cause."""
        sessions = self.sessions(tenant)
        rows = [row for session in sessions for row in session.rows()]
        sampled = sum(session.sampled_tokens for session in sessions)
        trained = sum(sum(row.trajectory(reward=0.0).loss_mask) for row in rows)
        return {
            "sessions": len(sessions),
            "turns": sum(len(session.nodes) for session in sessions),
            "rows": len(rows),
            "sampled_tokens": sampled,
            "trained_tokens": trained,
            "unscored_rows": sum(row.session.reward_of(row.leaf) is None for row in rows),
            "breaks": dict(sum((session.breaks for session in sessions), Counter[str]())),
            "policy": self.policy,
        }

    async def close(self) -> None:
        """End turns under way."""
        await _cancel({task for kept in self._kept.values() for task in kept.tasks})
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _cancel(tasks: set[asyncio.Task[Answer]]) -> None:
    under_way = list(tasks)
    for task in under_way:
        task.cancel()
    if under_way:
        await asyncio.wait(under_way)


def _digest(key: str) -> bytes:
    """Hash a key: looking it up then takes a time that does not depend on how much of it is right."""
    return hashlib.sha256(key.encode()).digest()


def _forget_failed(kept: _Kept, digest: bytes, turn: PendingTurn) -> None:
    """Let go of a turn that failed, whose error holds the whole prompt; a retry is a new turn."""
    if turn.failed and kept.turns.get(digest) is turn:
        del kept.turns[digest]
