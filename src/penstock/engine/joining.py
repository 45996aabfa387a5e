"""Requests among engines without our plugin: they tell nothing while they work, and take nothing up.

A sample of the token endpoint that one of them gave back before its end is asked for again with its tokens as part of
the prompt, and joined here from the ids: one answer, each token with its logprob and version. What cannot be joined so
(text, chats, stop strings, whose state is inside the engine) is made again from the start, and counted as wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from penstock.engine.capabilities import Capabilities, require
from penstock.engine.partial import Partials
from penstock.types import Sample, SamplingParams, VersionSpan

Named = tuple[str, Capabilities]


def _nobody() -> Sequence[Named]:
    return ()


class Stretches:
    """The versions that engines served between their stops: what tokens are of that carry no label.

    Weights change only while all engines are stopped (paused, and given no requests), so a stretch has one version.

    Args:
        version: of the weights that they have.
    """

    def __init__(self, version: int) -> None:
        self._versions = [version]

    @property
    def last(self) -> int:
        """Number of the present stretch, or, while they are stopped, of the one that is to come."""
        return len(self._versions) - 1

    def stop(self) -> None:
        """They are about to be stopped."""
        self._versions.append(self._versions[-1])

    def change(self, version: int) -> None:
        """They have other weights now, and are still stopped."""
        self._versions[-1] = version

    def version_of(self, sent: int, *, aborted: bool) -> int | None:
        """The version of all tokens of an answer that has just come; None where that is not certain.

        Args:
            sent: `last`, when its request was sent.
            aborted: it was ended early, and so by a stop.
        """
        end = max(self.last, sent + 1) if aborted else self.last + 1
        versions = set(self._versions[sent:end])
        return versions.pop() if len(versions) == 1 else None


@dataclass(slots=True)
class PlainEngines:
    """What a client has to know of the engines that may get its requests, above all of those without our plugin.

    Attributes:
        here: name and capabilities of each that has not our plugin, at this moment.
        everyone: of each, with our plugin or without: it may have been started without what a request needs.
        stretches: what all engines serve and served. None: nobody here knows that for certain.
        aborts: how often somebody has asked to end all requests. One that comes back aborted after that is not to go
            on; plain vLLM does not say why it aborts.
    """

    here: Callable[[], Sequence[Named]] = _nobody
    stretches: Stretches | None = None
    aborts: int = 0
    everyone: Callable[[], Sequence[Named]] = _nobody

    def check(self, params: SamplingParams) -> None:
        """Raise MissingCapabilityError where one of them cannot do what a token request asks for."""
        require(self.here(), "tokens", "generate")
        if params.logprobs:
            require(self.everyone(), "sampled_logprobs", "generate with logprobs")


class HandedOverError(Exception):
    """Not for callers: a token request was cut, and its samples are to be asked for one by one with what they have."""

    def __init__(self, partials: Partials, deaths: int) -> None:
        super().__init__("a request was cut and goes on in parts")
        self.partials = partials
        self.deaths = deaths
        """Of engines under it."""


def take_in(partials: Partials, choices: Sequence[dict[str, Any]], *, asked: bool) -> int:
    """Keep what the choices of a plain answer have; returns the number of their tokens."""
    tokens = 0
    for choice in choices:
        part = partials.get(choice["index"])
        part.forget()
        part.ids = list(choice["token_ids"] or ())
        given: Any = choice.get("logprobs")
        if given:
            part.logprobs = [
                orjson.dumps([[[e["token_id"], e["logprob"], 1, None]] for e in given["content"]]).decode()
            ]
        part.versions = [[number, end - start] for number, start, end in choice["spans"]]
        part.finish, part.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        part.asked = asked
        tokens += len(part.ids)
    return tokens


def rest_of(params: SamplingParams, made: int, index: int) -> SamplingParams:
    """Parameters for what is left of sample `index`, which has `made` tokens."""
    return replace(
        params,
        n=1,
        max_tokens=params.max_tokens - made,
        min_tokens=max(0, params.min_tokens - made),
        seed=None if params.seed is None else params.seed + index,
    )


def joined(begun: Sample, rest: Sample) -> Sample:
    """Two parts of one sample as one; spans of one version become one where they meet."""
    offset = len(begun.token_ids)
    spans = list(begun.spans)
    for span in rest.spans:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(VersionSpan(span.version, start, end))
    logprobs = None if begun.logprobs is None or rest.logprobs is None else begun.logprobs + rest.logprobs
    return Sample(begun.token_ids + rest.token_ids, rest.finish_reason, logprobs, tuple(spans))
