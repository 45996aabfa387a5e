"""Between our types and the JSON bodies of vLLM's token endpoint, `POST /inference/v1/generate`.

`STRIDE:h1,h2,...`: chained hashes over blocks of 64 tokens, `h_i = H(h_(i-1) || ids of block i)`, so that equal hashes
mean equal beginnings. At most 32 are sent, one every STRIDE blocks, the least power of two that is enough; so the
boundaries of a long prompt are among those of a shorter one, and what two prompts share is found to within the greater
stride. H is blake2b of 8 bytes over little-endian 32-bit ids: the same on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from penstock.errors import EngineError
from penstock.types import FinishReason, SamplingParams, SessionId

GENERATE = "/inference/v1/generate"
"""VLLM's token endpoint."""
SESSION_HEADER = "X-Session-ID"
PROMPT_TOKENS_HEADER = "X-Prompt-Tokens"
EXPECTED_TOKENS_HEADER = "X-Expected-Tokens"
GROUP_HEADER = "X-Group-ID"
ADAPTER_HEADER = "X-Adapter"
PREFIX_HASHES_HEADER = "X-Prefix-Hashes"
SPANS_HEADER = "X-Penstock-Weight-Versions"
"""Of an answer in one piece, set by our plugin: for each choice `[[version, start, end], ...]`. A stream has the same
in the comment before its `[DONE]`, since its header goes out before its tokens are made."""
PROGRESS_HEADER = "X-Penstock-Progress"
"""Of a request: tell as you go what each sample has. A number: between lines of JSON, each time a sample has so many
tokens more (0: only with the answer). `stream`: in comments of the event stream that the body asks for."""
STREAM_PROGRESS = "stream"
LINES_TYPE = "application/x-ndjson"
COMMENT = b": penstock "
"""Begins a comment of ours in an event stream, which any other client leaves out."""
RESUME_ARG = "penstock_resume"
"""Among vLLM's extra arguments of a request, as JSON: for each sample what it has already."""

FINAL_ONLY = 2
"""vLLM's `RequestOutputKind`. 0.26 does not set it on the token endpoint, and then answers an n-way request with those
samples alone that ended in its last step; 0.32 sets it itself."""

INITIAL_VERSION = "default"
"""vLLM's label before the first update; our version 0."""

UNKNOWN_VERSION = -1
"""Of tokens of weights with a label that is no version: somebody gave it past us, and may have brought weights too."""


def version_number(label: str) -> int:
    """A weight version as vLLM writes it, as our integer.

    Raises:
        ValueError: it is none; anyone can label an engine's weights as they like.
    """
    if label == INITIAL_VERSION:
        return 0
    if not (label.isascii() and label.isdecimal()):
        raise ValueError(f"the weight label {label!r} is no whole number")
    return int(label)


def version_of_tokens(label: str) -> int:
    """The version that made tokens, by their label; `UNKNOWN_VERSION` where that is none."""
    try:
        return version_number(label)
    except ValueError:
        return UNKNOWN_VERSION


def request_headers(
    prompt_tokens: int | None,
    params: SamplingParams,
    session_id: SessionId | None,
    *,
    group_id: str | None = None,
    adapter: str | None = None,
    prefix_hashes: str | None = None,
) -> dict[str, str]:
    """What a router can place a request by without parsing its body (docs/protocol.md).

    Args:
        prompt_tokens: length of the prompt, where known.
        params: say the most that the answer may add, all samples together.
        session_id: equal ones go to one engine.
        group_id: of samples of one prompt that are sent one by one.
        adapter: name of the LoRA adapter that the request is for.
        prefix_hashes: of the prompt's beginnings, as `wire.py` makes them.
    """
    headers = {EXPECTED_TOKENS_HEADER: str(params.max_tokens * params.n)}
    optional = {
        PROMPT_TOKENS_HEADER: prompt_tokens,
        SESSION_HEADER: session_id,
        GROUP_HEADER: group_id,
        ADAPTER_HEADER: adapter,
        PREFIX_HASHES_HEADER: prefix_hashes,
    }
    return headers | {name: str(value) for name, value in optional.items() if value is not None}


def generate_body(token_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """The request: token ids in; vLLM's sampling parameters under vLLM's names."""
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "n": params.n,
        "output_kind": FINAL_ONLY,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        # Stop strings are found in text, so they need it; otherwise the engine can leave it out.
        "detokenize": bool(params.stop),
    }
    if params.logprobs:
        sampling["logprobs"] = 0
    if params.seed is not None:
        sampling["seed"] = params.seed
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    return {"token_ids": list(token_ids), "sampling_params": sampling}


def padded(spans: Sequence[Any], choices: int) -> list[Any]:
    """The spans of each choice: those at the end that have no token have none."""
    return [*spans, *([] for _ in range(choices - len(spans)))]


def finish_of(reason: Any) -> FinishReason:
    """VLLM's finish reason as ours; EngineError where it is none."""
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"the answer ended with the unknown finish reason {reason!r}")
    return reason


def as_weight_versions(versions: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """`[version, tokens]` of each stretch, in the form of the token endpoint."""
    spans: list[dict[str, Any]] = []
    start = 0
    for version, tokens in versions:
        spans.append({"version": str(version), "start": start, "end": start + tokens})
        start += tokens
    return spans


BLOCK = 64
"""Tokens."""
MOST = 32
"""Hashes in one header."""
_BLOCK_BYTES = 4 * BLOCK
_DIGITS = 16
_MOST_STRIDE = 1 << 20
_ID_BITS = (1 << 32) - 1


def prefix_hashes(token_ids: Sequence[int]) -> str | None:
    """The header of a prompt; None for one without a whole block."""
    blocks = len(token_ids) // BLOCK
    if not blocks:
        return None
    stride = stride_of(blocks)
    data = _words(token_ids[: blocks * BLOCK])
    hashes: list[str] = []
    digest = b""
    for block in range(blocks // stride * stride):
        digest = blake2b(digest + data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES], digest_size=8).digest()
        if not (block + 1) % stride:
            hashes.append(digest.hex())
    return f"{stride}:{','.join(hashes)}"


def stride_of(blocks: int) -> int:
    """Blocks between two hashes of a prompt of so many blocks."""
    return 1 << max(0, (-(-blocks // MOST) - 1).bit_length())


def parse_prefix_hashes(header: bytes) -> list[tuple[int, bytes]]:
    """Boundaries of a prompt, shortest first: (tokens up to there, hash); none where the header is malformed.

    Whoever sends nonsense places worse, no more: hashes are compared, never trusted.
    """
    stride_text, _, text = header.partition(b":")
    if not stride_text.isdigit() or len(stride_text) > len(str(_MOST_STRIDE)):
        return []
    stride = int(stride_text)
    hashes = text.split(b",")
    if not 0 < stride <= _MOST_STRIDE or stride & (stride - 1) or len(hashes) > MOST:
        return []
    if any(len(digest) != _DIGITS for digest in hashes):
        return []
    step = stride * BLOCK
    return [(place * step, digest) for place, digest in enumerate(hashes, 1)]


def _words(token_ids: Sequence[int]) -> bytes:
    try:
        words = array("I", token_ids)
    except OverflowError:  # no such token exists, but the engine is who says so
        words = array("I", [token & _ID_BITS for token in token_ids])
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
