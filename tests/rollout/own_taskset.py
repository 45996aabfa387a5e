"""Tasksets of verifiers: one of single turns, and one with a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def asked(self, task: SumData, trace: vf.Trace) -> float:
        shown = [message.role for message in trace.messages]
        return 0.5 * (shown[:2] == ["system", "user"] and task.answer.isdigit())


class SumsConfig(vf.TasksetConfig):
    largest: int = 60


class Sums(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for i in range(1 << 60):
            a, b = i % self.config.largest, i // self.config.largest
            data = SumData(prompt=f"What is {a} + {b}?", system_prompt="Answer with a number.", answer=str(a + b))
            yield SumTask(data, self.config.task)
