"""Exact weight versions of tokens on vLLM 0.26, which has none of its own (0.32 labels every token: nothing to do).

The engine core sends its outputs and the answer to our pause over one ordered channel, so when the pause has returned
and the queue behind that channel is empty, every output of the old weights has been processed, and none of the new
ones exists. Counting tokens as they are processed, under the version then in force, is therefore exact; arrival time
plays no part. The spans travel in a response header, which a non-streaming answer sends after its last token.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any

import orjson

from penstock.engine.wire import SPANS_HEADER

REQUEST_ID = b"x-request-id"
OUTPUTS_PER_TICK = 128
"""vLLM's output handler yields to the loop after so many outputs (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE's default)."""


class VersionSpans:
    """Counts tokens by version for the requests of one API server."""

    def __init__(self) -> None:
        self._version = 0
        self._installed = False
        self._native = False
        # For each HTTP request in flight: its samples by (prompt, sample index), each [[version, tokens], ...].
        self._requests: dict[str, dict[tuple[int, int], list[list[int]]]] = {}

    def install(self, engine: Any) -> None:
        """Hook into the output processor, once.

        The one method that we wrap inside vLLM. Ends with support for 0.26: vLLM's issue 54443 asks for versions of
        tokens, and 0.32 has them.
        """
        if self._installed:
            return
        self._installed = True
        self._native = hasattr(engine, "update_weight_version")
        if not self._native:
            processor = engine.output_processor
            processor.process_outputs = functools.partial(self._count, processor, processor.process_outputs)

    async def pass_on(self, app: Any, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request of vLLM's own, adding the header where vLLM has no spans."""
        if scope["type"] == "http":
            self.install(scope["app"].state.engine_client)
        if scope["type"] != "http" or scope["method"] != "POST" or self._native:
            await app(scope, receive, send)
            return
        # vLLM builds its request ids around this header; a fresh one makes ours certain to be unique.
        name = uuid.uuid4().hex
        headers = [(k, v) for k, v in scope["headers"] if k != REQUEST_ID]
        scope = {**scope, "headers": [*headers, (REQUEST_ID, name.encode())]}
        self._requests[name] = {}

        async def send_with_spans(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start" and (spans := self._spans(name)):
                header = (SPANS_HEADER.lower().encode(), orjson.dumps(spans))
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await app(scope, receive, send_with_spans)
        finally:
            del self._requests[name]

    async def settle(self, engine: Any) -> None:
        """After a pause: return when every output that the engine core made before it has been counted."""
        if self._native:
            return
        queue = engine.engine_core.outputs_queue
        while not queue.empty():  # noqa: ASYNC110 - vLLM's queue has no event for this
            await asyncio.sleep(0)  # lets the output handler, in this same loop, go on
        for _ in range(2 + len(engine.output_processor.request_states) // OUTPUTS_PER_TICK):
            await asyncio.sleep(0)

    def set_version(self, version: int) -> None:
        """Tokens counted from here on are of this version."""
        self._version = version

    def _count(self, processor: Any, process_outputs: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is None or not output.new_token_ids:
                continue
            external = state.parent_req.external_req_id if state.parent_req is not None else state.external_req_id
            name, prompt = _http_request(external)
            request = self._requests.get(name)
            if request is None:
                continue
            parts = request.setdefault((prompt, state.request_index), [])
            if not parts or parts[-1][0] != self._version:
                parts.append([self._version, 0])
            parts[-1][1] += len(output.new_token_ids)
        return process_outputs(outputs, *args, **kwargs)

    def _spans(self, name: str) -> list[list[list[int]]]:
        """For each sample, prompt by prompt; a sample without a token has no span."""
        counted = self._requests[name]
        samples = 1 + max((index for _, index in counted), default=-1)
        prompts = 1 + max((prompt for prompt, _ in counted), default=-1)
        answer: list[list[list[int]]] = []
        for place in range(prompts * samples):
            parts = counted.get(divmod(place, samples), [])
            start, spans = 0, []
            for version, tokens in parts:
                spans.append([version, start, start + tokens])
                start += tokens
            answer.append(spans)
        return answer


def _http_request(external_request_id: str) -> tuple[str, int]:
    """Our 32 hex digits, and the prompt's number, in vLLM's `cmpl-NAME-3`, `chatcmpl-NAME`, `generate-tokens-NAME`."""
    parts = external_request_id.split("-")
    place = next((i for i, part in enumerate(parts) if len(part) == len(uuid.UUID(int=0).hex)), None)
    if place is None:
        return "", 0
    number = parts[place + 1] if place + 1 < len(parts) else ""
    return parts[place], int(number) if number.isdecimal() else 0
