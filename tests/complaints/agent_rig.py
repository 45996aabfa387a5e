"""One conversation of an agent through the gateway, over a scripted engine."""

from __future__ import annotations

from typing import Any

from gateway_rig import Rig as GatewayRig
from penstock.gateway.graph import Node, Session
from penstock.rollout.generator import Trajectory
from penstock.rollout.tokenizer import Tokenizer


class Rig(GatewayRig):
    """Asks over chat completions; the harness sends no reasoning back."""

    def __init__(self, tokenizer: Tokenizer, policy: str = "extend") -> None:
        super().__init__(tokenizer, policy=policy)
        self.messages: list[dict[str, Any]] = []
        self.tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    @property
    def kept(self) -> Session:
        return self.session()

    @property
    def nodes(self) -> list[Node]:
        return list(self.kept.nodes.values())

    async def ask(self, question: str | None) -> dict[str, Any]:
        """Ask, and put the answer behind the messages; None: the messages end with a tool's result already."""
        if question is not None:
            self.messages.append({"role": "user", "content": question})
        answer = await self.post("/v1/chat/completions", {"messages": self.messages, "tools": self.tools})
        message = answer["choices"][0]["message"]
        message.pop("reasoning_content", None)
        self.messages.append(message)
        return message

    def trajectories(self) -> list[Trajectory]:
        """The rows; every trained token is held against the context that the engine saw."""
        rows = self.kept.rows()
        self.check([row.as_json() for row in rows])
        return [row.trajectory() for row in rows]
