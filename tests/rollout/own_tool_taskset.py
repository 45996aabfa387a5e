"""A taskset of verifiers whose task has a tool, served over MCP."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Lookups"]


class Shelf(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def look(self, book: str) -> str:
        """Say on which shelf a book stands."""
        return f"{book}: 41"


class LookupTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "41")

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        del config
        return [Shelf(vf.ToolsetConfig())]


class Lookups(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Iterable[LookupTask]:
        return [LookupTask(vf.TaskData(prompt=f"Where is book {i}?"), self.config.task) for i in range(40)]


if __name__ == "__main__":  # verifiers serves the tools by running this module
    Shelf.run()
