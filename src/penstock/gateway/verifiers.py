"""`rollout.agent.callable: penstock.gateway.verifiers:play`: plays by verifiers.

verifiers supplies tools, users and agents; Penstock records the rows. Penstock's harness runs in this process. It
serves agents for which neither the options nor the taskset name a harness.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils import loaders

from penstock.errors import PenstockError
from penstock.gateway.agent import Episode

__all__ = ["ChatHarness", "play"]

HARNESS = "penstock_chat"
"""Name under which verifiers finds Penstock's harness."""


async def play(episode: Episode) -> float:
    """Play one episode of a `verifiers:ID` task, and return its reward.

    Raises:
        PenstockError: the task belongs to another environment, the episode failed, or several agents played it.
    """
    environment = episode.task.metadata.get("environment")
    if (given := getattr(environment, "config", None)) is None:
        raise PenstockError(f"task {episode.task.id!r} is no task of an environment.name verifiers:ID")
    variable = f"PENSTOCK_API_KEY_{episode.session}"  # verifiers reads a key only from a variable
    os.environ[variable] = episode.api_key
    try:
        env = loaders.load_environment(_seated(given))
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


def _seated(config: Any) -> Any:
    """Give Penstock's harness to agents without one. It runs in this process, so verifiers needs no box."""
    if loaders.default_harness_id(config.taskset.id) != "bash":  # the taskset brings its own harness
        return config
    sys.modules.setdefault(HARNESS, sys.modules[__name__])
    harness = loaders.harness_config_type(HARNESS)(id=HARNESS)
    seats: dict[str, Any] = {}
    for name, agent in config:
        if isinstance(agent, vf.AgentConfig) and agent.harness is None:
            seats[name] = agent.model_copy(update={"harness": harness, "runtime": vf.SubprocessConfig()})
    return config.model_copy(update=seats)


class ChatHarness(NullHarness):
    """Like verifiers' `null`, but without a process and an environment per episode."""

    SUPPORTS_TOOL_INTERCEPTION = False

    def __init__(self, config: NullHarnessConfig) -> None:
        super().__init__(config)

    async def setup(self, runtime: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Chat until an answer calls no tool, or verifiers refuses a turn."""
        del trace, runtime
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in given]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            shown: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **shown)
                except APIStatusError as error:  # perhaps a limit of the episode, which verifiers can tell
                    return vf.ProgramResult(1, "", str(error))
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await _called(call.function, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _called(function: Any, dispatch: Any, servers: Any) -> Any:
    """Call a tool. If the call is wrong, return the error as its result."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(servers, dispatch, function.name, arguments)
