"""Rows of metrics.jsonl as pure functions (docs/reference/run-folder.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.control_types import UpdateReport
from penstock.errors import StateError
from penstock.observe.summary import STALENESS_PREFIX
from penstock.rollout.generator import Trajectory

LOGPROB_DIFFERENCE = "logprob_diff_max_equal"
"""The learner's name for the largest |trainer - engine logprob| over tokens of its own version."""
STEPS_WITHOUT_COMPARISON = 10
"""So many in a row warn: an asynchronous run has single ones, because its first tokens of a version come late."""
SOLVED = 1 - 1e-9
"""Least reward of a solved episode. It is below 1 because ten turns of 0.1 add up to less than 1."""


def policy_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of response tokens that the policy made."""
    return sum(sum(t.loss_mask) for t in trajectories)


def token_ages(trajectories: Sequence[Trajectory], trainer_version: int, max_staleness: int) -> Counter[int]:
    """Count the policy's tokens by age in versions under trainer `trainer_version`.

    Raises:
        StateError: a token is older than the schedule can cause, or of no version that exists: an engine serves, or
            claims, a wrong version.
    """
    versions: Counter[int] = Counter()
    for t in trajectories:
        versions.update(version for version, made in zip(t.versions, t.loss_mask, strict=True) if made)
    for version, tokens in versions.items():
        if version < 0:
            raise StateError(
                f"{tokens} tokens have no weight version: an engine was given a label that is no number, past this "
                "fleet; update its weights through the fleet alone"
            )
        if not 0 <= (age := trainer_version - version) <= max_staleness:
            raise StateError(
                f"{tokens} tokens are {age} versions old where 0 to {max_staleness} is possible: an engine serves "
                "weights that it was not given, or labels them wrongly; see `penstock status`"
            )
    return Counter({trainer_version - version: count for version, count in versions.items()})


def batch_metrics(trajectories: Sequence[Trajectory], ages: Mapping[int, int]) -> dict[str, float]:
    """Return the metrics of the batch that a step trains on. The batch must not be empty."""
    n = len(trajectories)
    tokens = sum(ages.values())
    groups: dict[str, set[float]] = {}
    episodes: dict[str, list[float]] = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(t.group_id, set()).add(t.reward)
        episodes.setdefault(t.episode_id or str(i), []).append(t.reward)
    rewards = [sum(leaves) / len(leaves) for leaves in episodes.values()]
    return {
        "samples": n,
        "tokens": tokens,
        "reward_mean": sum(rewards) / len(rewards),
        "solved_share": sum(reward >= SOLVED for reward in rewards) / len(rewards),
        "zero_variance_share": sum(len(rewards) == 1 for rewards in groups.values()) / len(groups),
        "response_tokens_mean": sum(len(t.response_ids) for t in trajectories) / n,
        "truncated_share": sum(t.stop_reason == "length" for t in trajectories) / n,
        "multi_version_share": sum(len(set(t.versions)) > 1 for t in trajectories) / n,
        **{f"{STALENESS_PREFIX}{age}": count for age, count in sorted(ages.items())},
        "staleness_mean": sum(age * count for age, count in ages.items()) / tokens if tokens else 0.0,
        "staleness_max": max(ages, default=0),
        **agent_metrics(trajectories),
    }


def agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the agents' episodes of a batch; empty for other generators."""
    episodes = {t.episode_id: t.metrics for t in trajectories if "agent/failed" in t.metrics}
    names = {name for figures in episodes.values() for name in figures if name.startswith("agent/")}
    return {name: sum(e.get(name, 0.0) for e in episodes.values()) / len(episodes) for name in sorted(names)}


def replayed_share(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of the policy's tokens with their engine's experts."""
    replayed = [t for t in trajectories if t.routed_experts is not None]
    return policy_tokens(replayed) / (policy_tokens(trajectories) or 1)


def learner_metrics(learned: Mapping[str, float], *, simulated: bool = False) -> dict[str, float]:
    """Return the learner's results under `learner/`, and `logprob_difference` unless the engines invent logprobs."""
    metrics = {f"learner/{name}": value for name, value in learned.items()}
    if LOGPROB_DIFFERENCE in learned and not simulated:
        metrics["logprob_difference"] = learned[LOGPROB_DIFFERENCE]
    return metrics


@dataclass(slots=True)
class LogprobAlarm:
    """Warns if trainer and engine disagree at equal weights. Their models then differ.

    Attributes:
        limit: largest accepted mean |trainer logprob - engine logprob|, in nats.
        simulated: the engines invent their logprobs, which is reported once and instead of any comparison.
    """

    limit: float
    simulated: bool = False
    _not_compared: int = 0

    def warning(self, learned: Mapping[str, float]) -> str | None:
        """Return a warning about a step's results, or None. A run of steps that cannot be compared warns once."""
        gap = learned.get("logprob_diff_staleness/0")
        if self.simulated or gap is None:
            self._not_compared += 1
            if self.simulated and self._not_compared == 1:
                return (
                    "simulated engines (engine.profile: sim) invent tokens and logprobs: trainer and engine disagree, "
                    "and reward, ratios and accuracy say nothing of the model"
                )
            if not self.simulated and self._not_compared == STEPS_WITHOUT_COMPARISON:
                return (
                    f"trainer and engine could not be compared for {STEPS_WITHOUT_COMPARISON} steps: no token "
                    "was of the trainer's own weights and their KV alone, so train.logprob_alarm measures nothing; a "
                    "run with train.schedule: sync measures every step"
                )
            return None
        self._not_compared = 0
        if gap <= self.limit:
            return None
        return (
            f"trainer and engine disagree by {gap:.3g} nats a token at equal weights (train.logprob_alarm: "
            f"{self.limit:g}); compare their dtypes and quantisation, the temperature, and the model's config on both "
            "sides"
        )


def update_metrics(report: UpdateReport) -> dict[str, float]:
    """Return the metrics of one weight update."""
    return {
        "update/bubble": report.bubble,
        "update/bytes": report.bytes,
        "update/engines": len(report.engines),
        "update/failures": len(report.failures),
        "update/preempted": sum(engine.preempted for engine in report.engines),
        "update/kept": sum(engine.kept for engine in report.engines),
        **{f"update/{phase}": seconds for phase, seconds in report.seconds.items()},
    }


class Stopwatch:
    """Adds up seconds by name, on top of the `totals` of the run before it was resumed.

    Attributes:
        on_span: callback for each measured block: its name, its start (see `now`), and its seconds.
    """

    def __init__(self, earlier: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_span: Callable[[str, float, float], None] | None = None
        self._clock = clock
        self._totals = dict(earlier or {})
        self._started = clock() - self._totals.pop("total", 0.0)
        self._lap: dict[str, float] = {}
        self._lap_started = clock()

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Count the time of a `with` block as `name`, unless it raises."""
        started = self._clock()
        yield
        seconds = self._clock() - started
        self._lap[name] = self._lap.get(name, 0.0) + seconds
        self._totals[name] = self._totals.get(name, 0.0) + seconds
        if self.on_span is not None:
            self.on_span(name, started - self._started, seconds)

    def now(self) -> float:
        """Return the run's seconds so far, without those between an end and a resume."""
        return self._clock() - self._started

    def lap(self) -> dict[str, float]:
        """Return seconds by name since the last lap, and `step`: the total since then."""
        now = self._clock()
        lap = {**self._lap, "step": now - self._lap_started}
        self._lap = {}
        self._lap_started = now
        return lap

    def totals(self) -> dict[str, float]:
        """Return seconds by name since the run began, and `total`: the whole time."""
        return {**self._totals, "total": self.now()}
