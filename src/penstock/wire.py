"""Formats that client, plugin, router and simulated engine share: headers, requests, progress reports, versions.

An engine with our plugin adds to generation answers the version that made each token. If the client asks with
`PROGRESS_HEADER`, it also reports each sample's tokens so far:

- Without the header: an answer in one piece has `SPANS_HEADER`; a stream has a comment before `[DONE]`.
- With a number N: the answer is lines of JSON. `{"samples": [SampleReport, ...]}` comes whenever a sample has N more
  tokens (0: never). The last line is `{"status", "samples", "versions", "answer"}`. The token endpoint's `answer` omits
  the tokens, which the lines have brought.
- With `stream`: the header comes back, and a comment `{"samples": [...]}` precedes each event that has tokens.

A client that lost its engine sends its samples' tokens as `RESUME_ARG`, and the next engine continues them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_args

import orjson

from penstock.errors import EngineError, StateError
from penstock.types import FinishReason, SamplingParams

GENERATE = "/inference/v1/generate"
"""Token endpoint of vLLM."""
INFO = "/penstock/info"
"""Route of our plugin that describes the engine (`engine.capabilities.EngineInfo`)."""
ADAPTERS = "/penstock/adapters"
"""Route of our plugin: GET returns the adapters by name; calls: `/read`, `/load`, `/unload`, `/pause`, `/resume`."""
SESSION_HEADER = "X-Session-ID"
PROMPT_TOKENS_HEADER = "X-Prompt-Tokens"
EXPECTED_TOKENS_HEADER = "X-Expected-Tokens"
GROUP_HEADER = "X-Group-ID"
PREFIX_HASHES_HEADER = "X-Prefix-Hashes"
SPANS_HEADER = "X-Penstock-Weight-Versions"
"""Value: `[[version, start, end], ...]` for each choice. A stream's head is sent before its tokens exist."""
MAX_SPANS_HEADER = 8000
"""Most bytes of its value; clients refuse longer header lines (aiohttp: 8190)."""
PROGRESS_HEADER = "X-Penstock-Progress"
STREAM_PROGRESS = "stream"
LINES_TYPE = "application/x-ndjson"
COMMENT = b": penstock "
"""Beginning of our comments in an event stream; other clients skip comments."""
RESUME_ARG = "penstock_resume"
"""Name of an extra argument of vLLM's requests: the tokens of each sample so far, as JSON."""

FINAL_ONLY = 2
"""Value of vLLM's `RequestOutputKind`. vLLM 0.26 does not set it on the token endpoint, and then answers an n-way
request only with the samples that ended in its last step. 0.32 sets it itself."""

INITIAL_VERSION = "default"
"""Weight label of vLLM before the first update: our version 0."""

UNKNOWN_VERSION = -1
"""Version of tokens whose weight label is no version number: another process set the label, and may have loaded other
weights too."""


class Notes(TypedDict, total=False):
    """Further facts about a stretch of tokens."""

    adapter: str
    """Name of the LoRA adapter."""
    adapter_version: int
    """The adapter's own version; absent: the fleet did not load it."""
    kv_kept: bool
    """True if the tokens attend to KV of older weights; absent otherwise."""


class SampleReport(TypedDict):
    """The additions to a sample since its last report."""

    index: int
    ids: list[int]
    logprobs: str | None
    """JSON: for each token `[[token id, logprob, rank, text], ...]`, the sampled token first; None: not asked for."""
    versions: list[list[Any]]
    """`[version, tokens]` or `[version, tokens, Notes]` for each stretch of one version."""
    finish: str | None
    stop_reason: int | str | None
    asked: bool
    """Whether the caller asked for its abort, so that it does not go on."""
    whole_only: bool
    """Whether it cannot be resumed, since its grammar or prompt logprobs begin with the engine's prompt."""


def comment(content: Mapping[str, Any]) -> bytes:
    """Return an event-stream comment that holds `content`."""
    return COMMENT + orjson.dumps(content) + b"\n\n"


def spans_of(versions: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Turn each stretch `[version, tokens]` into `[version, start, end]`, plus notes."""
    start, spans = 0, list[list[Any]]()
    for version, tokens, *notes in versions:
        spans.append([version, start, start + tokens, *notes])
        start += tokens
    return spans


def add_stretch(versions: list[list[Any]], version: int | str, tokens: int, notes: Notes | None = None) -> None:
    """Add tokens to a sample's stretches: to the last one if version and notes match."""
    made_by = [version, *([notes] if notes else [])]
    if versions and [versions[-1][0], *versions[-1][2:]] == made_by:
        versions[-1][1] += tokens
    else:
        versions.append([version, tokens, *made_by[1:]])


def as_weight_versions(versions: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Turn each stretch `[version, tokens]` into the form of vLLM's token endpoint."""
    return [
        {"version": str(version), "start": start, "end": end, **(notes[0] if notes else {})}
        for version, start, end, *notes in spans_of(versions)
    ]


def padded(spans: Sequence[Any], choices: int) -> list[Any]:
    """Return the spans of each choice; choices at the end without tokens have none."""
    return [*spans, *([] for _ in range(choices - len(spans)))]


def version_number(label: str) -> int:
    """Read vLLM's weight label as our version. StateError: the label is no version."""
    if label == INITIAL_VERSION:
        return 0
    if not (label.isascii() and label.isdecimal()):
        raise StateError(
            f"the engine's weights are labelled {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}, or the number that they have'
        )
    return int(label)


def version_of_tokens(label: str) -> int:
    """Return the version of a weight label; `UNKNOWN_VERSION` if it is no version."""
    try:
        return version_number(label)
    except StateError:
        return UNKNOWN_VERSION


def finish_of(reason: Any) -> FinishReason:
    """Return vLLM's finish reason, checked. EngineError: it is unknown."""
    if reason not in get_args(FinishReason):
        raise EngineError(f"the answer ended with the unknown finish reason {reason!r}")
    return reason


# --- Requests --------------------------------------------------------------------------------------------------------


_SAMPLING = (
    "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Sampling parameters with vLLM's names and values."""


def generate_body(token_ids: Sequence[int], params: SamplingParams, *, adapter: str | None = None) -> dict[str, Any]:
    """Return a request for the token endpoint, under vLLM's names."""
    sampling: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING}
    # Stop strings need text; otherwise the engine can leave it out.
    sampling |= {"output_kind": FINAL_ONLY, "detokenize": bool(params.stop)}
    if params.logprobs:
        sampling["logprobs"] = 0
    if params.seed is not None:
        sampling["seed"] = params.seed
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    model: dict[str, Any] = {} if adapter is None else {"model": adapter}
    if params.structured_outputs is not None:
        sampling["structured_outputs"] = dict(params.structured_outputs)
        model["reasoning_ended"] = True  # the grammar applies from the first token, with any parser of the engine
    return {**model, "token_ids": list(token_ids), "sampling_params": sampling}
