"""OpenAI `/v1/completions` over many engines (R7): one body into one part for each prompt, the answers joined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from penstock.errors import RequestError

FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
Chunk = dict[str, Any]
Item = tuple[int, Chunk | BaseException | None]


def split(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One body for each prompt, in order. `n` stays: the samples of one prompt share its prefill.

    Raises:
        RequestError: the prompt has none of the four forms.
    """
    prompt: Any = body.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return [dict(body)]  # without a prompt: the engine's own error is the clearest
    if not isinstance(prompt, Sequence):
        raise RequestError(f"prompt must be {FORMS}, got {type(prompt).__name__}")
    items = cast("Sequence[Any]", prompt)
    if not items:
        raise RequestError(f"prompt is an empty list; give {FORMS}")
    if all(_is_id(item) for item in items):
        return [dict(body)]
    if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
        return [{**body, "prompt": item} for item in items]
    for i, item in enumerate(items):
        if not isinstance(item, str) and not _is_ids(item):
            raise RequestError(f"prompt[{i}] is {item!r}; prompt must be {FORMS}")
    raise RequestError(f"prompt mixes strings and token ids; it must be {FORMS}")


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer of the parts' answers: choices in the order of the prompts and indexed anew, usage summed.

    The other fields are the first answer's. A single answer comes back as it is.
    """
    if len(answers) == 1:
        return dict(answers[0])
    choices: list[dict[str, Any]] = []
    for answer in answers:
        part: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        first = len(choices)
        choices.extend({**choice, "index": first + i} for i, choice in enumerate(part))
    joined = {**answers[0], "choices": choices}
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    if usages:
        joined["usage"] = add_usage(usages)
    return joined


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Usage of several answers together."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            total[key] = add_usage(values)
        else:
            total[key] = sum(values) if values else None
    return total


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


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    if isinstance(item, str) or not isinstance(item, Sequence):
        return False
    ids = cast("Sequence[Any]", item)
    return len(ids) > 0 and all(_is_id(i) for i in ids)
