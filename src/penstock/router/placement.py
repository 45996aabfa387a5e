"""Placement of requests on engines, without I/O and without a clock of its own.

The router's dispatcher and the discrete-event fleet both use it. Its memory of the past is in `memory.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from penstock.rooms import plugged_in
from penstock.router.membership import Engine, EngineEntry, EngineSet
from penstock.router.memory import Session, SessionTable
from penstock.router.policies import Defer, Hints, Policies, RequestView
from penstock.router_settings import RouterConfig

MOST_GROUPS = 16_384
"""Most groups that are remembered; one more replaces the least recently used."""
_NO_SAMPLES: Counter[str] = Counter()


class Placement(EngineSet):
    """Chooses an engine for each request: the policy's choice among the eligible engines, and the memory for it.

    `process` is the index of this process among `config.workers`; each knows its own sessions and load.
    """

    def __init__(
        self, config: RouterConfig | None = None, process: int = 0, make: Callable[[EngineEntry], Engine] = Engine
    ) -> None:
        super().__init__(make)
        self._placed = process
        self.set_policy(config or RouterConfig())
        self.sessions = SessionTable()
        self.rules: Counter[str] = Counter()
        """Placements by the policy that chose; `draining`: the session's engine takes no other requests."""
        self.turns = Counter(stayed=0, moved=0, rehomed=0, opened=0, single=0)
        """Placements by the session's outcome. Later turns: `stayed`, `moved` by the policy, or `rehomed` because the
        engine could not serve them. Others: `opened` a session, or `single` without one."""
        self._groups: OrderedDict[str, Counter[str]] = OrderedDict()
        """Samples of each group by engine."""

    def set_policy(self, config: RouterConfig) -> None:
        """Place by other policies from now on; sessions, loads and prefixes stay known."""
        self._policy = Policies(config)
        self.config = config

    @cached_property
    def _prefixes(self) -> Any:
        """Engines by the prompt prefixes they have seen: a `kv.Prefixes`."""
        return plugged_in("router.prefixes")()

    def place(self, request: Hints, now: float, tried: Collection[Engine] = ()) -> Engine | Defer | None:
        """Choose an engine, and count the request there until `done`.

        Token counts that no engine can hold are lowered. The engines `tried` have failed under the request.

        Returns:
            The engine; `Defer.WAIT` until load falls; None if no engine may serve it, see `could_serve`.
        """
        if request.prompt_tokens + request.expected_tokens > self.most_tokens:
            # Headers are hints: a false value must not fill an engine for all other requests.
            request.prompt_tokens = min(request.prompt_tokens, self.most_tokens)
            request.expected_tokens = min(request.expected_tokens, self.most_tokens - request.prompt_tokens)
        session_id = request.session_id
        record = None if session_id is None else self.sessions.get(session_id)
        home = None if record is None else self._home(record.engine, request, tried)
        if home is not None and not home.takes_new:
            rule, engine = "draining", home
        else:
            engines = self._able(request, tried)
            if not engines:
                return None
            rule, engine = self._ask(engines, request, record, home)
            if isinstance(engine, Defer):
                return engine
        tokens = request.prompt_tokens + request.expected_tokens
        if session_id is None:
            # Without token counts, a request counts as one token, so that the number of requests is balanced.
            turn, request.counted_tokens = "single", tokens or 1
        else:
            turn = (
                "opened" if record is None else "rehomed" if home is None else "stayed" if home is engine else "moved"
            )
            counted = self.sessions.begin_turn(session_id, request, record, engine, now, again=bool(tried))
            request.counted_tokens = counted
        engine.outstanding += 1
        engine.outstanding_tokens += tokens
        engine.resident_tokens += request.counted_tokens
        self._placed += 1
        self.rules[rule] += 1
        self.turns[turn] += 1
        return engine

    def done(self, request: Hints, engine: Engine, now: float) -> None:
        """Stop counting a request on an engine, once for each answer of `place`."""
        engine.outstanding -= 1
        engine.outstanding_tokens -= request.prompt_tokens + request.expected_tokens
        engine.resident_tokens -= request.counted_tokens
        if request.session_id is not None:
            self.sessions.end_turn(request.session_id, now)

    def could_serve(self, request: Hints) -> bool:
        """Return whether an engine may serve the request if none counted as tried."""
        return bool(self._able(request, ()))

    def _able(self, request: Hints, tried: Collection[Engine]) -> Sequence[Engine]:
        """Return the engines that may serve a new request."""
        version = request.min_weight_version
        if version <= self._oldest and not tried:
            return self._open
        return [e for e in self._open if e.weight_version >= version and e not in tried]

    def _home(self, home: Engine, request: Hints, tried: Collection[Engine]) -> Engine | None:
        if home in tried or home.weight_version < request.min_weight_version:
            return None
        return home if home.takes_new or (home.serves and self._policy.sticky) else None

    def _ask(
        self, engines: Sequence[Engine], request: Hints, record: Session | None, home: Engine | None
    ) -> tuple[str, Engine | Defer]:
        """Ask the policies; note the engine as one that has the prompt and a sample of the group."""
        boundaries = ()
        if self._policy.reads_prefixes and request.prefix_hashes:
            boundaries = self._prefixes.boundaries(request.prefix_hashes)
        group_id = None if home is not None else request.group_id
        seen = RequestView(
            request.session_id,
            home,
            0 if record is None else record.tokens,
            record is not None,
            request.prompt_tokens,
            int(request.expected_tokens * self.sessions.added_share),
            self._prefixes.holders(boundaries, len(self.engines)) if boundaries else {},
            self._groups.get(group_id or "", _NO_SAMPLES),
            self._placed,
        )
        rule, engine = self._policy.ask(engines, seen)
        if not isinstance(engine, Defer):
            if boundaries:
                self._prefixes.note(engine, boundaries, self.config.prefix_length)
            if group_id is not None:
                self._groups.setdefault(group_id, Counter())[engine.name] += 1
                self._groups.move_to_end(group_id)
                if len(self._groups) > MOST_GROUPS:
                    self._groups.popitem(last=False)
        return rule, engine
