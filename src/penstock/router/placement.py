"""Placement of requests on engines, without I/O and without a clock of its own.

The router's dispatcher and the discrete-event fleet both use it. Requests with hints pass `memory.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from penstock.rooms import plugged_in
from penstock.router.membership import Engine, EngineEntry
from penstock.router.policies import Defer, Hints, Policies, RequestView
from penstock.router_settings import RouterConfig

MOST_TOKENS = 1 << 20
"""Most tokens that a request's headers can claim if no engine reports a limit: today's longest contexts."""


class Share:
    """What one request counts for on its engine, from `Placement.place` until `done`."""

    tokens = 0
    """Its prompt and expected tokens."""
    resident_tokens = 0
    """Tokens that it adds to the context there; those of a session's earlier turns count with the session."""


class Placement:
    """The engines of the membership in force, each made by `make`, and the choice of one for each request.

    `process` is the index of this process among `config.workers`; each knows its own sessions and load.
    """

    def __init__(
        self, config: RouterConfig | None = None, process: int = 0, make: Callable[[EngineEntry], Engine] = Engine
    ) -> None:
        self._make = make
        self.engines: dict[str, Engine] = {}
        self._arrange()
        self.placed = process
        """Requests placed so far, for rotation; processes begin at different engines."""
        self.set_policy(config or RouterConfig())
        self.rules: dict[str, int] = defaultdict(int)  # a Counter takes three times as long to add to
        """Placements by the policy that chose; `draining`: the session's engine takes no other requests."""
        self.turns = {"stayed": 0, "moved": 0, "rehomed": 0, "opened": 0, "single": 0}
        """Placements by the session's outcome. Later turns: `stayed`, `moved` by the policy, or `rehomed` because the
        engine could not serve them. Others: `opened` a session, or `single` without one."""

    def set_policy(self, config: RouterConfig) -> None:
        """Place by other policies from now on; sessions, loads and prefixes stay known."""
        self.policy = Policies(config)
        self.config = config

    @cached_property
    def memory(self) -> Any:
        """What is known of requests with hints: a `memory.Memory`."""
        return plugged_in("router.memory")(self)

    def set_engines(self, entries: Sequence[EngineEntry]) -> Collection[Engine]:
        """Take over a full set; return the engines that left, whose sessions have no home.

        Call `done` for their requests all the same. An engine with another URL or rank is a new one, even under its old
        name.
        """
        before = dict(self.engines)
        self.engines.clear()
        for entry in entries:
            known = before.get(entry.name)
            if known is not None and known.entry.place == entry.place:
                del before[entry.name]
                if known.weight_version != entry.weight_version:
                    known.fillings += 1  # its cache belongs to older weights
                known.set_entry(entry)
                self.engines[entry.name] = known
            else:
                self.engines[entry.name] = self._make(entry)
        for engine in before.values():
            engine.left = True
        self._arrange()
        return before.values()

    def mark(self, engine: Engine, *, down: bool) -> None:
        """Note whether an engine is down."""
        engine.down = down
        self._arrange()

    def report_kv(self, engine: Engine, *, kv_usage: float, kv_capacity: int) -> None:
        """Note an engine's report of its KV cache; negative usage and capacity 0: unknown."""
        engine.kv_reported, engine.kv_capacity = kv_usage, kv_capacity
        engine.kv_reported_at = engine.outstanding_tokens
        self._arrange()

    def place(
        self, request: Hints, share: Share, now: float, excluded: Collection[Engine] = ()
    ) -> Engine | Defer | None:
        """Choose an engine, and count the request there until `done`, as `share` says from now on.

        Token counts that no engine can hold are lowered. The engines `excluded` have failed under the request.

        Returns:
            The engine; `Defer.WAIT` until load falls; None if no engine may serve it, see `able`.
        """
        if request.prompt_tokens + request.expected_tokens > self.most_tokens:
            # Headers are hints: a false value must not fill an engine for all other requests.
            prompt = min(request.prompt_tokens, self.most_tokens)
            expected = min(request.expected_tokens, self.most_tokens - prompt)
            session, group, version = request.session_id, request.group_id, request.min_weight_version
            request = Hints(session, group, version, prompt, expected, request.prefix_hashes)
        share.tokens = tokens = request.prompt_tokens + request.expected_tokens
        # Without token counts, a request counts as one token, so that the number of requests is balanced.
        share.resident_tokens = tokens or 1
        if request.session_id is not None or request.group_id is not None or request.prefix_hashes:
            engine = self.memory.choose(request, share, now, excluded)
        elif engines := self.able(request, excluded):
            engine = self.policy.ask(engines, RequestView(placed=self.placed), self.rules)
            self.turns["single"] += 1
        else:
            return None
        if isinstance(engine, Engine):
            engine.outstanding += 1
            engine.outstanding_tokens += tokens
            engine.resident_tokens += share.resident_tokens
            self.placed += 1
        return engine

    def done(self, request: Hints, share: Share, engine: Engine, now: float) -> None:
        """Stop counting a request on an engine, once for each answer of `place`."""
        engine.outstanding -= 1
        engine.outstanding_tokens -= share.tokens
        engine.resident_tokens -= share.resident_tokens
        if request.session_id is not None:
            self.memory.sessions.end_turn(request.session_id, now)

    def able(self, request: Hints, excluded: Collection[Engine]) -> Sequence[Engine]:
        """Return the engines that may serve a new request."""
        version = request.min_weight_version
        if version <= self._oldest and not excluded:
            return self._open
        return [e for e in self._open if e.weight_version >= version and e not in excluded]

    def _arrange(self) -> None:
        """Recompute open engines and limits after a change of engines."""
        engines = self.engines.values()
        self._open = [engine for engine in engines if engine.takes_new]
        self._oldest = min([engine.weight_version for engine in self._open], default=0)
        limits = [min(filter(None, (e.entry.max_model_len, e.kv_capacity)), default=MOST_TOKENS) for e in engines]
        self.most_tokens = max(limits, default=MOST_TOKENS)
        """Most tokens of one sequence on any engine."""
