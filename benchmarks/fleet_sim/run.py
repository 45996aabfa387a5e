"""A fleet under one router in virtual time: the same trace for every router, and what came of it.

Rollout is a closed loop: `concurrency` trajectories are under way, and the next one of the trace starts when one ends.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fleet_sim.cache import Segment
from fleet_sim.engine import FleetEngine, FleetSequence
from fleet_sim.router import FleetRequest, FleetRouter
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import Trajectory
from penstock.errors import StateError
from penstock.router.membership import EngineEntry
from penstock.router.policies import Defer

START_SPACING_S = 0.005
"""Between the first trajectories: a worker starts them one after another."""
RETRY_S = 0.05
"""From a broken connection to the next try."""
ANNOUNCE_S = 1.0
"""From a death or a launch to the membership that says so."""
PATIENCE_S = 7200.0
"""How long a fleet may stand still with requests held; a router's sessions have expired by then."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something happens to an engine."""

    at_s: float
    kind: Literal["slow", "kill", "add"]
    engine: int
    factor: float = 1.0
    """`slow`: every step takes so many times its time."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Everything but the router and the trace."""

    engines: int
    concurrency: int
    speed: EngineSpeed
    limits: EngineLimits
    max_tokens: int = 4096
    """What requests say that they may generate, `X-Expected-Tokens`."""
    incidents: tuple[Incident, ...] = ()
    figures_interval_s: float = 1.0
    """Between two looks of the router at the engines' own figures."""
    finish_sessions: bool = True
    """Whether clients tell the router that a session is over."""


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """What one run came to."""

    makespan_s: float
    tokens_per_s: float
    """Tokens asked for and delivered, by the makespan."""
    steady_tokens_per_s: float
    """Tokens made until the last trajectory had started, by that time: without the tail that no router can spread."""
    p50_trajectory_s: float
    p99_trajectory_s: float
    hit_rate: float
    """Prompt tokens found in prefix caches, by prompt tokens."""
    preemptions: int
    load_max_to_mean: float
    """Of the engines' mean numbers of outstanding requests, until the last trajectory had started."""
    sessions_moved: int
    """Turns that went to another engine than the turn before."""
    delivered_tokens: int
    wasted_tokens: int
    """Generated on an engine that died before it could answer."""
    retried: int
    events: int


class _Agent:
    """A trajectory under way."""

    __slots__ = ("began", "engine", "excluded", "home", "own_tokens", "request", "trajectory", "turn")

    def __init__(self, trajectory: Trajectory, now: float) -> None:
        self.trajectory = trajectory
        self.began = now
        self.turn = 0
        self.own_tokens = trajectory.turns[0].new_tokens
        self.request: FleetRequest | None = None
        self.engine: str | None = None
        """Where its present turn is."""
        self.home: str | None = None
        """Where its turn before was served."""
        self.excluded: tuple[str, ...] = ()


@dataclass(slots=True)
class _Load:
    """Integral over time of an engine's outstanding requests."""

    outstanding: int = 0
    since: float = 0.0
    area: float = 0.0

    def change(self, by: int, now: float) -> None:
        self.area += self.outstanding * (now - self.since)
        self.since = now
        self.outstanding += by


@dataclass(slots=True)
class _Tally:
    durations: list[float] = field(default_factory=list[float])
    delivered: int = 0
    moved: int = 0
    retried: int = 0
    steady_s: float = 0.0
    steady_tokens: int = 0
    loads: tuple[float, ...] = ()


class FleetRun:
    """One run; `run` may be called once.

    Args:
        router: places every turn; fresh, since it keeps state.
        setup: the fleet.
        trace: what is to be done.
    """

    def __init__(self, router: FleetRouter, setup: FleetSetup, trace: Sequence[Trajectory]) -> None:
        self.router = router
        self.setup = setup
        self.engines: dict[str, FleetEngine] = {}
        """Those alive."""
        self.now = 0.0
        self._all: list[FleetEngine] = []
        self._loads: dict[str, _Load] = {}
        self._supply = deque(trace)
        self._unfinished = len(trace)
        self._held: deque[_Agent] = deque()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._ties = itertools.count()
        self._tally = _Tally()
        self._stalled_s = 0.0
        self._announced: list[str] = []
        for i in range(setup.engines):
            self._launch(i)

    def run(self) -> FleetFigures:
        """Run the trace to its end.

        Raises:
            StateError: the router holds requests that nothing will ever release.
        """
        self._announce()
        for i in range(min(self.setup.concurrency, len(self._supply))):
            self._at(i * START_SPACING_S, self._start_next)
        for incident in self.setup.incidents:
            self._at(incident.at_s, lambda incident=incident: self._strike(incident))
        self._report_figures()
        count = 0
        events = self._events
        while self._unfinished:
            if not events:
                raise StateError(
                    f"{len(self._held)} requests are held and nothing is under way; the router waits in vain"
                )
            self.now, _, action = heapq.heappop(events)
            action()
            count += 1
        return self._figures(count)

    # --- trajectories -------------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        if not self._supply:
            return
        trajectory = self._supply.popleft()
        if not self._supply:
            self._mark_steady()
        self._ask(_Agent(trajectory, self.now))

    def _ask(self, agent: _Agent) -> None:
        """Its next turn goes to the router."""
        trajectory = agent.trajectory
        own: Segment = (trajectory.id, agent.own_tokens)
        agent.request = FleetRequest(
            (*trajectory.shared, own),
            session_id=str(trajectory.id) if trajectory.session else None,
            group_id=None if trajectory.group is None else str(trajectory.group),
            expected_tokens=self.setup.max_tokens,
        )
        agent.excluded = ()
        if not self._send(agent):
            self._held.append(agent)

    def _send(self, agent: _Agent) -> bool:
        request = agent.request
        if request is None:
            raise StateError("an agent without a request cannot be sent")
        name = self.router.place(request, self.now, agent.excluded)
        if name is None or isinstance(name, Defer):
            return False
        agent.engine = name
        self._loads[name].change(1, self.now)
        if name not in self.engines:  # dead, and the router does not know yet
            self._at(self.now, lambda: self._broken(agent, name))
            return True
        engine = self.engines[name]
        due = engine.wake
        turn = agent.trajectory.turns[agent.turn]
        engine.submit(FleetSequence(request.chain, turn.output_tokens, agent), self.now)
        if engine.wake != due:
            self._arm(engine)
        return True

    def _answered(self, agent: _Agent, name: str) -> None:
        request, trajectory = agent.request, agent.trajectory
        if request is None:
            raise StateError("an answer without a request")
        self.router.done(request, name, self.now)
        self._loads[name].change(-1, self.now)
        if agent.home is not None and agent.home != name:
            self._tally.moved += 1
        agent.home, agent.engine = name, None
        turn = trajectory.turns[agent.turn]
        self._tally.delivered += turn.output_tokens
        agent.turn += 1
        if agent.turn < len(trajectory.turns):
            following = trajectory.turns[agent.turn]
            agent.own_tokens += turn.output_tokens + following.new_tokens
            self._at(self.now + following.delay_s, lambda: self._ask(agent))
            return
        if trajectory.session and self.setup.finish_sessions:
            self.router.finish_session(str(trajectory.id))
        self._tally.durations.append(self.now - agent.began)
        self._unfinished -= 1
        self._start_next()

    def _broken(self, agent: _Agent, name: str) -> None:
        """The connection to a dead engine broke: the turn is tried elsewhere."""
        if agent.request is not None:
            self.router.done(agent.request, name, self.now)
        self.router.mark(name, down=True)
        self._loads[name].change(-1, self.now)
        self._tally.retried += 1
        agent.engine = None
        agent.excluded = (*agent.excluded, name)
        self._at(self.now + RETRY_S, lambda: self._send(agent) or self._held.append(agent))

    def _release_held(self) -> None:
        while self._held and self._send(self._held[0]):
            self._held.popleft()

    # --- engines ------------------------------------------------------------------------------------------------------

    def _launch(self, index: int) -> None:
        engine = FleetEngine(f"engine-{index}", self.setup.speed, self.setup.limits)
        self._all.append(engine)
        self.engines[engine.name] = engine
        self._loads[engine.name] = _Load(since=self.now)

    def _arm(self, engine: FleetEngine) -> None:
        if not math.isinf(engine.wake):
            self._at(engine.wake, lambda due=engine.wake: self._wake(engine, due))

    def _wake(self, engine: FleetEngine, due: float) -> None:
        if engine.wake != due or engine.name not in self.engines:
            return  # the phase was cut short, or the engine is dead
        ended = engine.advance(self.now)
        self._arm(engine)
        for sequence in ended:
            agent = sequence.tag
            if isinstance(agent, _Agent):
                self._answered(agent, engine.name)
        if ended and self._held:
            self._release_held()

    def _strike(self, incident: Incident) -> None:
        if incident.kind == "add":
            self._launch(incident.engine)
        elif incident.kind == "slow":
            self.engines[f"engine-{incident.engine}"].slowness = incident.factor
            return
        else:
            engine = self.engines.pop(f"engine-{incident.engine}")
            for sequence in engine.kill():
                if isinstance(sequence.tag, _Agent):
                    self._broken(sequence.tag, engine.name)
        self._at(self.now + ANNOUNCE_S, self._announce)

    def _announce(self) -> None:
        """The fleet tells the router who its engines are."""
        self._announced = [*self.engines]
        ports = {engine.name: i + 1 for i, engine in enumerate(self._all)}
        self.router.set_engines([EngineEntry(name, f"http://127.0.0.1:{ports[name]}") for name in self._announced])
        self._release_held()

    def _report_figures(self) -> None:
        for name in self._announced:
            if name in self.engines:
                engine = self.engines[name]
                self.router.report_kv(name, kv_usage=engine.kv_usage, kv_capacity=engine.cache.capacity)
        self.router.expire(self.now)
        self._release_held()
        self._stalled_s = 0.0 if self._events else self._stalled_s + self.setup.figures_interval_s
        if self._stalled_s > PATIENCE_S:
            raise StateError(f"{len(self._held)} requests are held, nothing is under way: the router waits in vain")
        if self._unfinished:
            self._at(self.now + self.setup.figures_interval_s, self._report_figures)

    # --- bookkeeping --------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._ties), action))

    def _mark_steady(self) -> None:
        self._tally.steady_s = self.now
        self._tally.steady_tokens = sum(engine.counters.generated for engine in self._all)
        for load in self._loads.values():
            load.change(0, self.now)
        self._tally.loads = tuple(load.area for load in self._loads.values())

    def _figures(self, events: int) -> FleetFigures:
        tally = self._tally
        counters = [engine.counters for engine in self._all]
        mean = sum(tally.loads) / len(tally.loads)
        return FleetFigures(
            makespan_s=self.now,
            tokens_per_s=tally.delivered / self.now,
            steady_tokens_per_s=tally.steady_tokens / tally.steady_s if tally.steady_s else 0.0,
            p50_trajectory_s=quantile(tally.durations, 0.5),
            p99_trajectory_s=quantile(tally.durations, 0.99),
            hit_rate=sum(c.hits for c in counters) / max(1, sum(c.queries for c in counters)),
            preemptions=sum(c.preemptions for c in counters),
            load_max_to_mean=max(tally.loads) / mean if mean else 1.0,
            sessions_moved=tally.moved,
            delivered_tokens=tally.delivered,
            wasted_tokens=sum(c.generated for c in counters) - tally.delivered,
            retried=tally.retried,
            events=events,
        )


def quantile(values: Collection[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank); 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
