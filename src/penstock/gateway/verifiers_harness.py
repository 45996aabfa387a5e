"""A harness for verifiers that runs in this process: it chats, and calls the tools of the task over MCP."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import UserMessage

__all__ = ["ChatHarness"]


class ChatHarness(NullHarness):
    """Like verifiers' `null`, without a process and an environment of its own for each episode."""

    SUPPORTS_TOOL_INTERCEPTION = False

    def __init__(self, config: NullHarnessConfig) -> None:
        super().__init__(config)

    async def setup(self, runtime: Any) -> None:
        """Nothing to prepare."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Chat until an answer calls no tool, or verifiers refuses a turn."""
        del trace, runtime
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        given = [UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in given]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            shown: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **shown)
                except APIStatusError as error:  # a limit of the episode; verifiers knows whether it is one
                    return ProgramResult(1, "", str(error))
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await _called(call.function, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _called(function: Any, dispatch: Any, servers: Any) -> Any:
    """Call a tool; what is wrong with the call is its result."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(servers, dispatch, function.name, arguments)
