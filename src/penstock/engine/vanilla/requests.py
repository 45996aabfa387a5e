"""Complete requests on vLLM without our plugin, which reports nothing while it works and resumes nothing.

- Its engine died: the client sends the request again from the start (`engine/request.py`).
- A pause aborted it: the client sends each sample of the token endpoint again, with its tokens as part of the prompt,
  and joins the ids. Text, chats and samples with stop strings start again, since their state is inside the engine. A
  stream that has begun cannot: it raises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import orjson

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.engine.capabilities import Capabilities, require
from penstock.engine.openai import Stream
from penstock.engine.request import Answer, Continuation, UnreportedReplies
from penstock.engine.vanilla.control import VersionHistory
from penstock.errors import EngineError
from penstock.http import Reply
from penstock.types import SamplingParams

NO_VERSIONS = (
    "the answer does not say which weights made its tokens; use vLLM 0.32 or newer, or launch the engine through "
    "Penstock, whose plugin supplies it (of 0.26 without it, only the process that holds the fleet knows)"
)


class VanillaReplies(UnreportedReplies):
    """Reads the replies of vLLM without our plugin, and sends again what a pause has cut.

    Args:
        engines: returns name and capabilities of each engine that may get a request.
        history: which versions they served; None: another process updates them.
    """

    def __init__(
        self, engines: Callable[[], Sequence[tuple[str, Capabilities]]], history: VersionHistory | None = None
    ) -> None:
        self._engines = engines
        self._history = history

    def check(self, params: SamplingParams) -> None:
        """Raise MissingCapabilityError if an engine cannot do what a token request asks for."""
        require(self._engines(), "tokens", "generate")
        if params.logprobs:
            require(self._engines(), "sampled_logprobs", "generate with logprobs")

    async def answer(self, request: Continuation, reply: Reply) -> Answer:
        """Return the whole answer, joined where a pause has cut it.

        Raises:
            EngineError: neither the answer nor the history says which weights made its tokens.
        """
        # The engine has begun at the beginning, whatever it was given to resume.
        counters = request.client.counters
        counters.wasted_tokens += sum(sample.forget() for sample in request.partials)
        body = request.client.http.decode(await reply.read())
        choices: list[dict[str, Any]] = body["choices"]
        aborted = any(choice["finish_reason"] == "abort" for choice in choices)
        asked = request.client.aborted_at >= request.sent_at
        version = self._history.version_of(request.sent_at, aborted=aborted) if self._history is not None else None
        of_ids = request.path == wire.GENERATE
        reports = [report_of(choice, version, asked=asked) for choice in choices] if of_ids else []
        unlabelled = any(report["versions"] is None for report in reports)
        if unlabelled and self._history is None:
            raise EngineError(NO_VERSIONS, engine=request.client.http.name)
        params = request.body.get("sampling_params", {})
        joinable = of_ids and not params.get("stop") and "structured_outputs" not in params
        tokens = int(body["usage"]["completion_tokens"]) if body.get("usage") else 0
        if unlabelled or (aborted and not asked and not joinable):
            counters.wasted_tokens += tokens
            request.partials.get(0).finish = "abort"  # made again
        elif not of_ids:
            return Answer(body, [[[version, 0, tokens]]] if version is not None and len(choices) == 1 else None)
        elif request.partials.add(reports):  # else it is sent again as it is, if it was cut
            cut = [report["index"] for report in reports if request.partials.get(report["index"]).cut]
            await all_or_first_error(_finish(request, i) for i in cut)
        return Answer(body, [[[0, 0, len(request.partials.get(i).ids)]] for i in range(len(choices))])

    async def events(self, request: Stream, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a stream, without versions.

        Raises:
            EngineError: it is cut, or begins again, and the caller has seen a part of it.
        """
        _refuse_if_begun(request)
        request.partials.get(0).whole_only = True
        async for event in request.events_of(reply):
            choices: list[dict[str, Any]] = event.get("choices") or []
            for choice in choices:
                if choice.get("finish_reason") is not None:
                    choice["weight_versions"] = None
                if choice.get("finish_reason") == "abort" and request.client.aborted_at < request.sent_at:
                    _refuse_if_begun(request)
                    request.partials.get(choice["index"]).finish = "abort"
            yield event


def _refuse_if_begun(request: Stream) -> None:
    if request.passed_on:
        raise EngineError(
            "a stream was cut that cannot be resumed: there are engines without Penstock's plugin; ask for it "
            "without stream, pause with mode keep, or launch all engines by Penstock"
        )


def report_of(choice: Mapping[str, Any], version: int | None, *, asked: bool = False) -> dict[str, Any]:
    """Turn a choice of vLLM's own answer into a `wire.SampleReport`; `versions` are None where they are unknown.

    Args:
        choice: since 0.32 with its versions.
        version: of all its tokens, where it has none itself.
        asked: the caller asked for its abort.
    """
    ids: list[int] = choice["token_ids"] or []
    native, logprobs = choice.get("weight_versions"), choice.get("logprobs")
    if native is not None:
        versions = [[wire.version_of_tokens(span["version"]), span["end"] - span["start"]] for span in native]
    else:
        versions = None if ids and version is None else [[version, len(ids)]] if ids else []
    sampled = [[[entry["token_id"], entry["logprob"], 1, None]] for entry in logprobs["content"]] if logprobs else None
    return {
        "index": choice["index"],
        "ids": ids,
        "logprobs": orjson.dumps(sampled).decode() if sampled is not None else None,
        "versions": versions,
        "finish": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "asked": asked,
    }


async def _finish(request: Continuation, index: int) -> None:
    """Ask for the rest of a sample that was cut, and join it."""
    part = request.partials.get(index)
    sampling: dict[str, Any] = request.body["sampling_params"]
    left = sampling["max_tokens"] - len(part.ids)
    if left <= 0:  # it was aborted before it could say that this was the end
        part.finish = "length"
        return
    rest_of = {**sampling, "n": 1, "max_tokens": left, "min_tokens": max(0, sampling["min_tokens"] - len(part.ids))}
    if "seed" in sampling:
        rest_of["seed"] += index
    ids = [*request.body["token_ids"], *part.ids]
    lengths = {wire.PROMPT_TOKENS_HEADER: str(len(ids)), wire.EXPECTED_TOKENS_HEADER: str(left)}
    request.client.counters.continued += 1
    request.client.counters.requeued_tokens += len(part.ids)
    rest = request.part({"token_ids": ids, "sampling_params": rest_of}, {**request.headers, **lengths})
    await rest.answer()
    part.join(rest.partials.get(0))
