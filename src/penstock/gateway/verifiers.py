"""`rollout.agent.callable: penstock.gateway.verifiers:play`: verifiers plays its own environment over the gateway.

Tools, users and several agents' turns are verifiers'; the rows are ours.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from penstock.errors import PenstockError
from penstock.gateway.agent import Episode

HARNESS = "penstock_chat"
"""Name of our harness for agents to which neither the options nor the taskset give one."""


async def play(episode: Episode) -> float:
    """Play one episode of a `verifiers:ID` task, and return its reward.

    Raises:
        PenstockError: the task is of another environment, the episode failed, or several agents played it.
    """
    environment = episode.task.metadata.get("environment")
    if (given := getattr(environment, "config", None)) is None:
        raise PenstockError(f"task {episode.task.id!r} is no task of an environment.name verifiers:ID")
    vf: Any = importlib.import_module("verifiers.v1")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    variable = f"PENSTOCK_API_KEY_{episode.session}"  # verifiers reads a key from a variable alone
    os.environ[variable] = episode.api_key
    try:
        env = loaders.load_environment(_seated(given, vf, loaders))
        client = vf.EvalClientConfig(base_url=f"{episode.base_url}/v1", api_key_var=variable)
        async with env.serving():
            played = await env.run_episode(episode.task.metadata["task"], vf.ModelContext(episode.model, client))
    finally:
        del os.environ[variable]
    if not played.ok:
        found = [error.message for error in (*played.errors, *(e for trace in played.traces for e in trace.errors))]
        raise PenstockError(f"verifiers' episode failed: {'; '.join(found) or 'it says no reason'}"[:2000])
    if len(played.traces) != 1:
        raise PenstockError(f"{len(played.traces)} agents played the episode; rows have one reward, so one can be had")
    return float(played.traces[0].reward)


def _seated(config: Any, vf: Any, loaders: Any) -> Any:
    """Give our harness to agents that have none; it runs in this process, so verifiers needs no box for it."""
    if loaders.default_harness_id(config.taskset.id) != "bash":  # the taskset brings its own
        return config
    sys.modules.setdefault(HARNESS, importlib.import_module("penstock.gateway.verifiers_harness"))
    harness = loaders.harness_config_type(HARNESS)(id=HARNESS)
    seats: dict[str, Any] = {}
    for name, agent in config:
        if isinstance(agent, vf.AgentConfig) and agent.harness is None:
            seats[name] = agent.model_copy(update={"harness": harness, "runtime": vf.SubprocessConfig()})
    return config.model_copy(update=seats)
