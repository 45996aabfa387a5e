"""Sessions of tenants: keys, budgets, sampling, answers that outlive their client.

The gateway exchanges only token ids with engines, through Penstock's own client. Logprobs, versions, pauses and engine
deaths therefore behave as in every other rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections import Counter, deque
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
from penstock.rollout.episodes import Sampler, seed_of_turn
from penstock.rollout.output_parser import OutputParser
from penstock.rollout.vllm_parser import VllmOutputParser
from penstock.types import Sample, SamplingParams

MOST_NAME = 200
"""Maximum number of characters in a session's name."""
_NAME = re.compile(rf"(?!\.{{1,2}}$)[A-Za-z0-9._~:@!$&'()*+,;=-]{{1,{MOST_NAME}}}")
"""Names that a URL's path can hold unescaped."""
MOST_REPLAYED = 8
"""Answers kept per session for a client that repeats a request although it has read the answer."""
MOST_FAILED = 64
"""Failed turns remembered per session until they are requested again."""
MOST_THREADS = 4
"""Threads that read, render and encode requests. Each long body occupies one thread."""
LONG_TEXT = 1 << 14
"""Characters of a conversation above which a thread renders it."""
_SERVER_ERROR = 500
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user of the gateway, which sees only its own sessions."""

    name: str
    key: str = field(repr=False)
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class PendingTurn:
    """A turn under way or finished. Clients that repeat a request share it. `id` is the id of its node."""

    id: str
    digest: bytes
    task: asyncio.Task[Answer]
    waiters: int = 0
    delivered: bool = False

    @property
    def is_unread(self) -> bool:
        """Whether no client has received the answer or waits for it."""
        return not (self.delivered or self.waiters)

    @property
    def failed(self) -> bool:
        """Whether the turn ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True)
class ServedSession(Session):
    """A session with its budget, its own key, and parameters that override all others."""

    limits: Limits = field(default_factory=Limits)
    key: str = field(default_factory=new_key, repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: int = 0
    """Number of turns begun."""
    finished: bool = False
    """True if no further turn may begin."""
    reserved: int = 0
    """Maximum number of tokens that the turns under way may sample."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn under way has ended."""
    turns: list[PendingTurn] = field(default_factory=list[PendingTurn])
    """Turns that a request may repeat."""
    failed: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=MOST_FAILED))
    """Digests of failed turns that were not requested again."""
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set["asyncio.Task[Answer]"])
    """Turns under way. A turn that just ended is still in this set, although its node is in the session."""

    def repeated(self, digest: bytes, *, is_retry: bool) -> PendingTurn | None:
        """Return the turn that a request repeats, or None. Prefer a turn that no client has read.

        A retry of a failed turn is a new turn: the other equal turns belong to other clients.
        """
        turns = [turn for turn in self.turns if turn.digest == digest and not turn.failed]
        unread = next((turn for turn in turns if turn.is_unread), None)
        if unread is not None or not is_retry:
            return unread
        if digest in self.failed:
            self.failed.remove(digest)
            return None
        return turns[-1] if turns else None

    def next_sampling(self) -> Mapping[str, Any]:
        """Return the parameters of the next turn, with its own seed."""
        seed, turn = self.sampling.get("seed"), self.begun
        self.begun += 1
        return self.sampling if seed is None else {**self.sampling, "seed": seed_of_turn(seed, turn)}

    def check_budget(self) -> None:
        """Refuse the next turn of a session that has used up its budget. Turns under way count."""
        used = {
            "max_turns": len(self.nodes) + sum(not task.done() for task in self.tasks),
            "max_tokens": self.sampled_tokens,
            "max_seconds": time.time() - self.created,
        }
        for name, value in used.items():
            limit = getattr(self.limits, name)
            if limit is not None and value >= limit:
                raise self.over(name)

    def over(self, limit: str) -> GatewayError:
        """Return the error for a limit that is used up."""
        why = f"the budget of session {self.id} is used up: {limit}={getattr(self.limits, limit):g}"
        return GatewayError(why, code="budget_exceeded")

    async def reserve(self, wanted: int) -> int:
        """Reserve tokens of the budget for one turn and return their number. Wait for turns that may free some.

        Raises:
            GatewayError: no tokens are left.
        """
        most = self.limits.max_tokens
        while most is not None:
            left = most - self.sampled_tokens - self.reserved
            if left >= wanted or not self.reserved:
                if left < 1:
                    raise self.over("max_tokens")
                wanted = min(wanted, left)
                break
            self.freed.clear()
            await self.freed.wait()
        self.reserved += wanted
        return wanted

    def release(self, tokens: int) -> None:
        """Return a turn's reserved tokens. From now on, its sampled tokens count instead."""
        self.reserved -= tokens
        self.freed.set()

    def keep(self, turn: PendingTurn) -> None:
        """Keep a turn for requests that repeat it. Drop the oldest turns that were read."""
        read = [turn for turn in self.turns if turn.delivered]
        for old in read[:-MOST_REPLAYED]:
            self.turns.remove(old)
        self.turns.append(turn)
        self.tasks.add(turn.task)
        turn.task.add_done_callback(lambda _: self._ended(turn))

    def _ended(self, turn: PendingTurn) -> None:
        self.tasks.discard(turn.task)
        if turn.failed:  # do not keep it: its error holds the whole prompt
            self.turns.remove(turn)
            self.failed.append(turn.digest)


class Gateway:
    """Sessions of tenants over one model.

    Args:
        client: source of samples: an engine, a fleet, or a `DataClient` of a router.
        template: template of the model. If it cannot be extended, the policy is `faithful`.
        adapter: name of the LoRA adapter that every turn uses.
        parser: parser of answers; None: Penstock's own.

    Raises:
        ConfigError: no tenant, one without a name or key, or two that share a name or key.
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
        self._kept: dict[str, dict[str, ServedSession]] = {tenant.name: {} for tenant in tenants}
        self._by_key: dict[bytes, ServedSession] = {}
        workers = min(MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="penstock-gateway")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run read-only work on sessions in one of a few threads. A long body must not delay other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant with this key. A session's key belongs to no tenant."""
        return self._tenants.get(_digest(key))

    def open_session(
        self,
        tenant: Tenant,
        name: str | None = None,
        limits: Limits | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> ServedSession:
        """Open a session, or return the tenant's existing session of that name.

        The session's key permits only its turns, so a harness may have it.

        Args:
            tenant: owner of the session.
            name: name of the session; None: a new id.
            limits: further limits. The lower of these and the tenant's applies.
            sampling: parameters of all its turns. They override the gateway's and the harness's.

        Raises:
            UserError: the name is too long or malformed, or the limits differ from those of the existing session.
            GatewayError: too many sessions.
        """
        name, kept = new_id() if name is None else name, self._kept[tenant.name]
        if (session := kept.get(name)) is not None:
            if limits is not None and limits.least(tenant.limits) != session.limits:
                raise UserError(f"session {name} exists, and its limits cannot change")
            return session
        if not _NAME.fullmatch(name):
            raise UserError(
                f"a session's name has at most {MOST_NAME} characters, those of a URL's path alone, got {name[:80]!r}"
            )
        if len(kept) >= self.options.max_sessions:
            raise GatewayError(f"{len(kept)} sessions are kept; finish some", status=503, code="too_many_sessions")
        limits = (limits or Limits()).least(tenant.limits)
        session = ServedSession(name, tenant.name, limits=limits, sampling=sampling or {})
        kept[name] = self._by_key[_digest(session.key)] = session
        return session

    def session(self, key: str, name: str | None, hint: str | None = None, *, keep: bool = True) -> ServedSession:
        """Return the session of a call. It belongs to a session's key, or to a tenant's key and a name.

        Args:
            key: key of a session or of a tenant.
            name: name in the path.
            hint: name in a header of the harness, for a tenant's key without a `name`.
            keep: if there is no such session, open one; False: return an empty one that is not kept.

        Raises:
            GatewayError: the key is unknown, or belongs to another session.
        """
        if (session := self._by_key.get(_digest(key))) is not None:
            if name not in (None, session.id):
                raise GatewayError("this key is of another session", status=403, code="forbidden")
            return session
        if (tenant := self.tenant_of(key)) is None:
            raise GatewayError("missing or unknown API key", status=401, code="invalid_api_key")
        name = name or hint or "default"
        if not keep and name not in self._kept[tenant.name]:
            return ServedSession(name, tenant.name)
        return self.open_session(tenant, name)

    def find(self, tenant: Tenant, name: str) -> ServedSession:
        """Return a session of the tenant. GatewayError: the tenant has no such session."""
        if (session := self._kept[tenant.name].get(name)) is None:
            why = f"there is no session {name!r}; a finished one is forgotten as soon as its rows are sent"
            raise GatewayError(why, status=404, code="not_found")
        return session

    def sessions(self, tenant: Tenant) -> list[ServedSession]:
        """Return the tenant's sessions, oldest first."""
        return list(self._kept[tenant.name].values())

    def finish(self, tenant: Tenant, name: str) -> ServedSession:
        """End a session, so that no further turn begins. GatewayError: a turn is under way, or no such session."""
        session = self.find(tenant, name)
        if not all(task.done() for task in session.tasks):
            raise GatewayError(f"a turn of session {name} is under way; wait for it", status=409, code="busy")
        session.finished = True
        return session

    def forget(self, session: ServedSession) -> None:
        """Forget a finished session, if it is still kept."""
        if self._by_key.pop(_digest(session.key), None):
            del self._kept[session.tenant][session.id]

    async def close_session(self, tenant: Tenant, name: str) -> list[Row]:
        """End the session's turns under way, forget it, and return its rows."""
        session = self.find(tenant, name)
        session.finished = True  # before the turns end, because a harness may send requests until then
        await _cancel(session.tasks)
        self.forget(session)
        return session.rows()

    # --- turns -------------------------------------------------------------------------------------------------------

    def submit(
        self, session: ServedSession, request: ChatRequest, digest: bytes, *, is_retry: bool, size: int = 0
    ) -> PendingTurn:
        """Begin a turn, or return the turn that this request repeats.

        A request repeats an earlier one of equal `digest` if its client says so (`is_retry`), or if no client has read
        the earlier answer and none waits for it. If two clients send equal requests at once, each gets its own turn.

        Args:
            session: session of the turn.
            request: the request, parsed.
            digest: equal for equal requests.
            is_retry: the client marked the request as a retry.
            size: bytes of the body. A long body is rendered in a thread.

        Raises:
            GatewayError: the session was finished, or is over its budget.
        """
        if session.finished:
            raise GatewayError(f"session {session.id} was finished", status=404, code="not_found")
        if (turn := session.repeated(digest, is_retry=is_retry)) is not None:
            return turn
        session.check_budget()
        node_id = new_id()
        turn = PendingTurn(node_id, digest, asyncio.create_task(self._turn(session, request, node_id, size)))
        session.keep(turn)
        return turn

    async def _turn(self, session: ServedSession, request: ChatRequest, node_id: str, size: int) -> Answer:
        asked, request = request, self.codec.whole(session, request)
        if request.messages and request.messages[-1].role == "assistant":
            raise GatewayError(
                "the last message is the assistant's, and a turn cannot be begun for it; send what follows"
            )
        if max(size, sum(len(m.text) for m in request.messages)) > LONG_TEXT:
            parent, added, place = await self.in_thread(lambda: self.codec.prompt_of(session, request))
        else:  # a thread would cost more than the work: each switch of threads may wait 5 ms for the interpreter's lock
            parent, added, place = self.codec.prompt_of(session, request)
        context = [*(parent.context() if parent else ()), *added]
        params = self.codec.params(request, context, session.next_sampling())
        sample, params = await self._sampled(session, context, params)
        if not sample.token_ids:  # no row can continue from an empty sample
            raise GatewayError("the turn was aborted before its first token; send it again", status=503, code="engine")
        finish, node = sample.finish_reason, self.codec.node(parent, added, sample, request, place, params, node_id)
        session.add(node, request.tools)
        shown = tuple(tool for tool in node.tools if tool.custom)  # the only tools that a wire writes in another form
        return Answer(
            id=node.id,
            message=node.message,
            finish="tool_calls" if node.message.calls and finish == "stop" else finish,
            prompt_tokens=len(context),
            output_tokens=len(sample.token_ids),
            request=replace(asked, messages=(), tools=shown, model=request.model or self.options.model),
            created=int(node.created),
        )

    async def _sampled(
        self, session: ServedSession, context: Sequence[int], params: SamplingParams
    ) -> tuple[Sample, SamplingParams]:
        """Sample a turn within the session's budget. Return the sample, and the parameters with the granted tokens."""
        seconds = session.limits.max_seconds
        try:
            async with asyncio.timeout(None if seconds is None else session.created + seconds - time.time()):
                most = await session.reserve(params.max_tokens)
                try:
                    if most < params.max_tokens:  # building new parameters takes a noticeable part of a turn
                        params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
                    (sample,) = await self._sample(context, 1, params, f"{session.tenant}/{session.id}")
                finally:
                    session.release(most)
        except TimeoutError as error:
            raise session.over("max_seconds") from error
        except EngineHTTPError as error:
            code = "engine" if error.status >= _SERVER_ERROR else "invalid_request"
            raise GatewayError(str(error), status=error.status, code=code) from error
        except PenstockError as error:
            if isinstance(error, (RequestError, GatewayError)):
                raise
            raise GatewayError(f"no engine could answer: {error}", status=503, code="engine") from error
        return sample, params

    # --- report ------------------------------------------------------------------------------------------------------

    def report(self, tenant: Tenant) -> dict[str, Any]:
        """Return totals of a tenant's sessions: rows, tokens, and breaks by cause."""
        sessions = self.sessions(tenant)
        rows = [row for session in sessions for row in session.rows()]
        sampled = sum(session.sampled_tokens for session in sessions)
        trained = [node for row in rows for node in row.leaf.path() if node.id not in row.elsewhere]
        return {
            "sessions": len(sessions),
            "turns": sum(len(session.nodes) for session in sessions),
            "rows": len(rows),
            "sampled_tokens": sampled,
            "trained_tokens": sum(len(node.sample.token_ids) for node in trained),
            "unscored_rows": sum(row.session.reward_of(row.leaf) is None for row in rows),
            "breaks": dict(sum((session.breaks for session in sessions), Counter[str]())),
            "policy": self.policy,
        }

    async def close(self) -> None:
        """Cancel the turns under way and stop the threads."""
        await _cancel({task for session in self._by_key.values() for task in session.tasks})
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _cancel(tasks: set[asyncio.Task[Answer]]) -> None:
    under_way = list(tasks)
    for task in under_way:
        task.cancel()
    if under_way:
        await asyncio.wait(under_way)


def _digest(key: str) -> bytes:
    """Hash a key. The time of a lookup then does not depend on how much of the key is right."""
    return hashlib.sha256(key.encode()).digest()
