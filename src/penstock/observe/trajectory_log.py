"""Sample trajectories for people: every token with its text, logprob and version."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.rollout.generator import Trajectory

SHOWN = 8
"""Number of trajectories in trajectories.md, spread over the run."""


def record_of(step: int, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a trajectory of step `step` as a row of trajectories.jsonl.

    `loss` of a token is 1 if the policy made the token and 0 if the environment did. `episode` is the session of an
    agent's episode; the episode's log is named after it. `decode` keeps special tokens.
    """
    columns = zip(trajectory.response_ids, trajectory.logprobs, trajectory.versions, trajectory.loss_mask, strict=True)
    return {
        "step": step,
        "group": trajectory.group_id,
        "prompt": decode(trajectory.prompt_ids),
        "response": decode(trajectory.response_ids),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "tokens": [
            {"id": i, "text": decode([i]), "logprob": logprob, "version": version, "loss": loss}
            for i, logprob, version, loss in columns
        ],
        "episode": trajectory.episode_id,
    }


def pick(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories to record: the first, and the next of two versions."""
    first = trajectories[:1]
    mixed = [t for t in trajectories[1:] if len(set(t.versions)) > 1][:1]
    return [*first, *mixed]


def to_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return at most `SHOWN` records as Markdown. They spread over the run, with the first and the last."""
    last, shown = len(records) - 1, min(SHOWN, len(records))
    chosen = [records[i * last // max(shown - 1, 1)] for i in range(shown)]
    return "# Sample trajectories\n\n" + "\n".join(_section(record) for record in chosen)


def _section(record: Mapping[str, Any]) -> str:
    versions = sorted({token["version"] for token in record["tokens"]})
    rows = "\n".join(
        f"| {i} | {token['id']} | {_code(token['text'])} | {token['logprob']:.4f} | {token['version']} |"
        for i, token in enumerate(record["tokens"])
    )
    return (
        f"## Step {record['step']}, group {record['group']}, reward {record['reward']:g}\n\n"
        f"Ended by {record['stop_reason']}; made by weight version {', '.join(map(str, versions)) or 'none'}.\n\n"
        f"Prompt: {_code(record['prompt'])}\n\n"
        f"Response: {_code(record['response'])}\n\n"
        f"| # | id | token | logprob | version |\n|---|---|---|---|---|\n{rows}\n"
    )


def _code(text: str) -> str:
    """Return text as one line of code for a table cell. White space shows, and no backtick or bar ends the cell."""
    escaped = json.dumps(text, ensure_ascii=False).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", escaped)), default=0))
    return f"{fence}{escaped}{fence}"
