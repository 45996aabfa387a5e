"""The event streams of one OpenAI body's prompts as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from penstock.engine.completion import add_usage

Chunk = dict[str, Any]
Item = tuple[int, Chunk | BaseException | None]


async def merged(streams: Sequence[AsyncGenerator[Chunk]], *, choices_each: int) -> AsyncGenerator[Chunk]:
    """Chunks as they come, the choices of stream `i` indexed from `i * choices_each`; usage summed, once, at the end.

    The first failure of a stream ends the others and is raised. One stream passes through as it is.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield chunk
        return
    head: Chunk = {}
    usages: list[Chunk] = []
    async with aclosing(_interleaved(streams)) as items:
        async for i, chunk in items:
            head = head or {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
            choices: list[Chunk] = chunk["choices"]
            if choices:
                moved = [{**choice, "index": i * choices_each + choice["index"]} for choice in choices]
                yield {**chunk, **head, "choices": moved}
            else:
                usages.append(chunk)
    if usages:
        yield {**usages[0], **head, "usage": add_usage([chunk["usage"] for chunk in usages])}


async def _interleaved(streams: Sequence[AsyncGenerator[Chunk]]) -> AsyncGenerator[tuple[int, Chunk]]:
    queue: asyncio.Queue[Item] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_read(i, stream, queue)) for i, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            i, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(i: int, stream: AsyncGenerator[Chunk], queue: asyncio.Queue[Item]) -> None:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                await queue.put((i, chunk))
    except Exception as error:  # noqa: BLE001 - raised where the chunks are read
        await queue.put((i, error))
    else:
        await queue.put((i, None))
