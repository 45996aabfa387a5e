"""The interception server of verifiers before a router, with its own training client; runs in verifiers' environment.

python _verifiers_side.py URL MODEL TOKENIZER SESSIONS MAX_TOKENS

Prints `{"url", "keys"}`, a key for each session. A line on stdin, or its end, ends it.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.state import State
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig


def session(url: str, model: str, tokenizer: str, max_tokens: int) -> RolloutSession:
    """A session as a rollout of verifiers makes it, without a task's hooks."""
    client = TrainClientConfig(base_url=f"{url}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=tokenizer)
    task: Any = TraceTask(type="Task", data=TaskData(prompt="x"))
    trace: Any = Trace(task=task, agent=AgentInfo(config=AgentConfig()), state=State())
    return RolloutSession(ModelContext(model, client, SamplingConfig(max_tokens=max_tokens, temperature=1.0)), trace)


async def main() -> None:
    """Serve until stdin has a line or ends."""
    url, model, tokenizer, count, max_tokens = sys.argv[1:]
    async with InterceptionServer() as server:
        sessions = [session(url, model, tokenizer, int(max_tokens)) for _ in range(int(count))]
        keys = [server.register(one)[0] for one in sessions]
        print(json.dumps({"url": server.base_url, "keys": keys}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main())
