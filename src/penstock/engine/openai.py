"""OpenAI's calls of a `DataClient`: completions of several prompts, chats, and streams that survive their engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, TypeVar, cast

import orjson

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.checks import reading
from penstock.engine.client import LEAST_HASHED, DataClient, ResumableRequest
from penstock.engine.interface import Engine
from penstock.errors import EngineDeadError, EngineError, RequestError
from penstock.http import Reply
from penstock.prefix_hash import prefix_hashes
from penstock.types import SessionId

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
DONE = b"data: [DONE]"
Body = Mapping[str, Any]
T = TypeVar("T")


class OpenAIEngine(Engine):
    """An engine, or many that appear as one, with OpenAI's calls."""

    @cached_property
    def _calls(self) -> OpenAICalls:
        return OpenAICalls(self.data)

    async def completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/completions` (R7); see `openai.OpenAICalls.completion`."""
        return await self.while_serving(self._calls.completion(body, session_id))

    async def chat_completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/chat/completions` with the API's body and answer."""
        return await self.while_serving(self._calls.chat_completion(body, session_id))

    def completion_stream(self, body: Body, session_id: SessionId | None = None) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of `/v1/completions`.

        Each choice's last chunk has its `weight_versions`. The reader sees no pause or death: no gaps, no repetitions.
        """
        return self.each_while_serving(self._calls.completion_stream(body, session_id))

    def chat_completion_stream(self, body: Body, session_id: SessionId | None = None) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of `/v1/chat/completions`; see `completion_stream`."""
        return self.each_while_serving(self._calls.chat_completion_stream(body, session_id))

    def each_while_serving(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yield the items of a stream. Raise as `while_serving`."""
        return items


class OpenAICalls:
    """Makes OpenAI's calls with a client's connections, deadline and state."""

    def __init__(self, client: DataClient) -> None:
        self._client = client

    async def completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/completions`, with one request per prompt (R7).

        Each choice has its `weight_versions`, `[{"version", "start", "end"}, ...]`, as in vLLM's token endpoint.
        They are None for vLLM without our plugin.

        Raises:
            RequestError: the prompt has none of the four forms, or `stream` is set.
            EngineHTTPError: the error of the first failed prompt. The other prompts are cancelled.
        """
        _refuse_stream(body, "completion_stream")
        answers = (self._whole(COMPLETIONS, part, session_id) for part in split(body))
        return join(await all_or_first_error(answers))

    async def chat_completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/chat/completions`; see `completion` for the versions."""
        _refuse_stream(body, "chat_completion_stream")
        return await self._whole(CHAT, body, session_id)

    async def completion_stream(
        self, body: Body, session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of `/v1/completions` for one prompt. Raises as `completion`.

        Each choice's last chunk has its `weight_versions`. RequestError: the body has several prompts.
        """
        _check(body)
        part, *more = split(body)
        if more:
            raise RequestError(f"a stream is of one prompt, got {1 + len(more)}; iterate over one stream for each")
        async with aclosing(self._request(COMPLETIONS, {**part, "stream": True}, session_id).chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chat_completion_stream(
        self, body: Body, session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of OpenAI's `/v1/chat/completions`; see `completion_stream`."""
        _check(body)
        async for chunk in self._request(CHAT, {**body, "stream": True}, session_id).chunks():
            yield chunk

    def _headers(self, path: str, body: Body, session_id: SessionId | None) -> dict[str, str]:
        """Return the headers for a session, and for placing a prompt of token ids."""
        headers = {} if session_id is None else {wire.SESSION_HEADER: str(session_id)}
        ids: Any = body.get("prompt")
        if path != COMPLETIONS or not self._client.routed or isinstance(ids, str) or not ids:
            return headers
        headers[wire.PROMPT_TOKENS_HEADER] = str(len(ids))
        if len(ids) >= LEAST_HASHED and (hashes := prefix_hashes(ids)) is not None:
            headers[wire.PREFIX_HASHES_HEADER] = hashes
        limit, n = body.get("max_tokens"), body.get("n")
        if isinstance(limit, int):
            headers[wire.EXPECTED_TOKENS_HEADER] = str(limit * (n if isinstance(n, int) else 1))
        return headers

    async def _whole(self, path: str, body: Body, session_id: SessionId | None) -> dict[str, Any]:
        answer = await self._request(path, body, session_id).answer()
        choices: list[dict[str, Any]] = answer.body["choices"]
        for choice, spans in zip(choices, wire.padded(answer.spans or (), len(choices)), strict=True):
            versions = wire.as_weight_versions([(v, end - start, *notes) for v, start, end, *notes in spans])
            choice["weight_versions"] = versions if answer.spans is not None else None
        return answer.body

    def _request(self, path: str, body: Body, session_id: SessionId | None) -> Stream:
        headers, client = self._headers(path, body, session_id), self._client
        return Stream(client, path, body, headers=headers, timeout_s=client.request_timeout_s)


def _check(body: object) -> None:
    if not isinstance(body, Mapping):
        raise RequestError(f"a request's body is a mapping, got {type(body).__name__}")


def _refuse_stream(body: Body, instead: str) -> None:
    _check(body)
    if body.get("stream"):
        raise RequestError(f"stream=true gives no single answer; iterate over {instead}")


# --- A completion of several prompts, with one request per prompt ----------------------------------------------------


def split(body: Body) -> list[dict[str, Any]]:
    """Return one body per prompt, in order. `n` stays: samples share the prefill.

    Raises:
        RequestError: the prompt has none of the four forms.
    """
    prompt: Any = body.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return [dict(body)]  # without a prompt, the engine's own error is the clearest
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


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    if isinstance(item, str) or not isinstance(item, Sequence):
        return False
    ids = cast("Sequence[Any]", item)
    return len(ids) > 0 and all(_is_id(i) for i in ids)


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the answers to `split` bodies: choices are renumbered, usage is summed."""
    if len(answers) == 1:
        return dict(answers[0])
    choices: list[dict[str, Any]] = []
    for answer in answers:
        part: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        first = len(choices)
        choices.extend({**choice, "index": first + i} for i, choice in enumerate(part))
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    return {**answers[0], "choices": choices, **({"usage": add_usage(usages)} if usages else {})}


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the usage of several answers."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            total[key] = add_usage(values)
        else:
            total[key] = sum(values) if values else None
    return total


# --- A stream --------------------------------------------------------------------------------------------------------


class Stream(ResumableRequest):
    """One request with a streamed answer."""

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of an OpenAI body with `stream`, each part once.

        Raises as `answer`. Each choice's last event has its `weight_versions`, in the form of vLLM's token endpoint.
        """
        headers = {**self.headers, wire.PROGRESS_HEADER: wire.STREAM_PROGRESS}
        seen = StreamDeduplicator()
        while True:
            try:
                async with self.sent(headers) as reply:
                    async for event in self._events(reply):
                        if not self._ends_cut(event) and (new := seen.of(event)) is not None:
                            self.passed_on = True
                            yield new
            except EngineError as error:
                await self.after_death(error)
            else:
                if not self.partials.cut:
                    return
                await self.after_abort()
            seen.begin_again()

    async def events_of(self, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
        """Yield a stream's events. Add the reports in its comments to `partials`.

        Raises:
            EngineDeadError: the stream broke off.
            EngineHTTPError: one of its events is an error.
        """
        async for line in reply.lines():
            if line.startswith(wire.COMMENT):
                with reading("report of the engine", EngineError):
                    report: dict[str, Any] = orjson.loads(line[len(wire.COMMENT) :])
                    self.reported += self.partials.add(report.get("samples", ()))
            elif line.startswith(DONE):
                return
            elif line.startswith(b"data: "):
                event: dict[str, Any] = self.client.http.decode(line[6:])
                if "error" in event:  # else the [DONE] that follows would look like a normal end
                    raise self.client.http.http_error(int(event["error"].get("code") or 500), line[6:])
                yield event
        raise EngineDeadError("its stream broke off", engine=self.client.http.name)

    async def _events(self, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
        """Yield a stream's events. An event that ends a choice gets the choice's versions."""
        if wire.PROGRESS_HEADER not in reply.headers:
            async for event in self.client.replies_unreported().events(self, reply):
                yield event
            return
        async for event in self.events_of(reply):
            for choice in event.get("choices") or ():
                if choice.get("finish_reason") is not None:
                    choice["weight_versions"] = wire.as_weight_versions(self.partials.get(choice["index"]).versions)
            yield event

    def _ends_cut(self, event: Mapping[str, Any]) -> bool:
        """Whether an event only ends cut samples. It may hold a part of a stop string."""
        choices: list[dict[str, Any]] = event.get("choices") or []
        if not choices:
            return self.partials.cut  # the usage
        return all(self.partials.get(choice["index"]).cut for choice in choices)


class StreamDeduplicator:
    """Passes on only the new parts of a resumed stream, which each engine sends from the start.

    One rule: for each path in a choice (`delta.content`, `logprobs.tokens`, a tool call's `arguments`), it counts the
    amount passed on, in characters or list entries, or one for a whole field. A resuming engine has the state of the
    engine before it, so its text starts with the text already passed on. But its chunks are cut at other places, and it
    has other random ids (of the answer and of tool calls). The first ids stay.
    """

    def __init__(self) -> None:
        self._over = False
        """Whether the event without choices (usage) was passed on. No later event is new."""
        self._head: dict[str, Any] = {}
        self._begun: set[int] = set()
        """Choices with an event that was passed on."""
        self._passed: dict[tuple[Any, ...], int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        """Amount seen of the current engine's stream, per path."""
        self._found_new = False

    def begin_again(self) -> None:
        self._seen.clear()

    def of(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return the part of an event that the reader has not seen; None if empty."""
        if not self._head:
            self._head = {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        new: list[dict[str, Any]] = []
        for choice in choices:
            self._found_new = choice["index"] not in self._begun
            self._begun.add(choice["index"])
            part = self._part((choice["index"],), choice)
            if self._found_new:
                new.append(part)
        if not (new if choices else not self._over):
            return None
        self._over = not choices
        return {**chunk, **self._head, "choices": new}

    def _part(self, path: tuple[Any, ...], value: Any) -> Any:
        """Return the part of `value` that was not passed on under `path`, and count it."""
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            return {key: one if key == "index" else self._part((*path, key), one) for key, one in fields.items()}
        name = path[-1]
        if name == "tool_calls" and isinstance(value, list):
            calls = cast("list[dict[str, Any]]", value)
            return [self._part((*path, call.get("index", 0)), {"index": 0, **call}) for call in calls]
        if name in _ONCE and value is not None:
            return value if self._advance(path, 0, 1) == 0 else None
        if isinstance(value, (str, list)):
            whole = cast("str | list[Any]", value)
            return whole[self._advance(path, self._seen.get(path, 0), len(whole)) :]
        return value

    def _advance(self, path: tuple[Any, ...], start: int, length: int) -> int:
        """Count `length` more after `start`. Return how many were passed on before."""
        passed = self._passed.get(path, 0)
        self._seen[path] = start + length
        if start + length > passed:
            self._passed[path] = start + length
            self._found_new = True
        return max(0, passed - start)


_ONCE = frozenset({"role", "id", "type", "name", "finish_reason", "stop_reason"})
"""Whole fields that come once per choice or tool call."""


async def each_until_lost(engines: Any, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Yield a stream's items, never None. Raise `lost_error` if no engine is left.

    `engines` is a roster. Items are read in the caller's own task: a task per item would cost as much as reading it.
    """
    waiting: asyncio.Timeout | None = None

    def give_up(_: asyncio.Task[bool]) -> None:
        if waiting is not None:
            waiting.reschedule(0.0)

    lost = asyncio.create_task(engines.all_lost.wait())
    lost.add_done_callback(give_up)
    try:
        async with aclosing(items):
            while True:
                try:
                    async with asyncio.timeout(0.0 if lost.done() else None) as waiting:
                        item = await anext(items, None)
                finally:
                    waiting = None
                if item is None:
                    return
                yield item
    except TimeoutError:
        raise engines.lost_error() from None
    except EngineError:
        engines.raise_if_lost()
        raise
    finally:
        lost.cancel()
