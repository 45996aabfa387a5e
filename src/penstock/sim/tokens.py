"""The simulated model: pure functions, so that a test can check every token from prompt, position and version.

A token depends on every token before it, on its position, on the weights and on the seed. So an error shows in the
following tokens or in the token's own logprob, whether a token is lost, doubled, moved to another request or labelled
with another version. A request that continues elsewhere with prompt + partial gets the same tokens, as on a real model.

As text, a token is one character. Id 0 is EOS; ids 1 to 95 are the printable ASCII characters; higher ids are
characters from U+4E00 on. Encoding a decoded text gives the same ids. A character without an id, such as a newline,
always gets the same arbitrary id.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, cast

from penstock.errors import RequestError
from penstock.types import SamplingParams

_MASK = 2**64 - 1
_GREEDY = 0x67726565
_SEEDED = 0x73656564
_ID = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Hash of all tokens before a position: their number, and the CRC-32 of the ids as little-endian int64."""

    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Self:
        return cls().extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> Self:
        crc = zlib.crc32(array("q", token_ids).tobytes(), self.crc)
        return type(self)(self.length + len(token_ids), crc)

    def then(self, token_id: int) -> Prefix:
        return Prefix(self.length + 1, zlib.crc32(_ID.pack(token_id), self.crc))


@dataclass(frozen=True, slots=True)
class Model:
    """One simulated model; equal for all engines of a fleet.

    Attributes:
        vocab_size: ids lie in `[0, vocab_size)`.
        eos_token_id: token that ends a sample.
        eos_share: probability that a token is EOS, so 1 / mean length. If 0, only limits and stop tokens end samples.
        seed: seed for requests that carry none.
    """

    vocab_size: int = 1024
    eos_token_id: int = 0
    eos_share: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights under which a token is made.

    `version` is the version of the weights, `kv_version` that of the oldest KV block that the token attends to. If
    they differ, the token belongs to no version at all, as with stale KV in a real model. `adapter` names a LoRA.
    """

    version: int
    kv_version: int
    adapter: str = ""


def expected_token(
    model: Model, prefix: Prefix, weights: Weights, *, seed: int | None, banned: Collection[int] = ()
) -> int:
    """Return the id that follows `prefix` under these weights, never one of `banned`.

    `seed` is the request's seed plus the sample's index, as vLLM seeds sample `i`; None means greedy (temperature 0).
    """
    draw = _draw(prefix, weights, _noise(seed))
    if model.eos_token_id not in banned and (draw >> 11) / 2**53 < model.eos_share:
        return model.eos_token_id
    while True:
        draw = _mix(draw)
        token = draw % model.vocab_size
        if token not in banned and token != model.eos_token_id:
            return token


def expected_logprob(prefix: Prefix, token_id: int, weights: Weights, *, temperature: float) -> float:
    """Return the log-probability in [-8, 0) of a token after `prefix`.

    It does not depend on the seed: the same token in the same place always has the same probability.
    Temperature 0 counts as 1, as in vLLM.
    """
    draw = _draw(prefix, weights, _scale(temperature) ^ _mix(token_id + 1))
    return -8.0 * (1 + (draw >> 32)) / 2**32


def banned_before_min(model: Model, params: SamplingParams) -> frozenset[int]:
    """Return the ids masked until `min_tokens` (vLLM's MinTokensLogitsProcessor)."""
    return frozenset({model.eos_token_id, *params.stop_token_ids})


def _draw(prefix: Prefix, weights: Weights, noise: int) -> int:
    place = _mix((prefix.length << 32) ^ prefix.crc)
    return _mix(place ^ _made_by(weights) ^ noise)


@lru_cache(maxsize=1024)
def _made_by(weights: Weights) -> int:
    adapter = zlib.crc32(weights.adapter.encode()) if weights.adapter else 0
    drawn = _mix((weights.version & _MASK) ^ (adapter << 32))
    return drawn if weights.kv_version == weights.version else drawn ^ _mix(~weights.kv_version & _MASK)


@lru_cache(maxsize=65_536)
def _noise(seed: int | None) -> int:
    return _GREEDY if seed is None else _mix(_mix(seed & _MASK) ^ _SEEDED)


@lru_cache(maxsize=1024)
def _scale(temperature: float) -> int:
    return _mix(struct.unpack("<q", struct.pack("<d", temperature or 1.0))[0] & _MASK)


def _mix(value: int) -> int:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014), which mixes all bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_ASCII_FIRST, _ASCII_LAST = 0x20, 0x7E
_ASCII = _ASCII_LAST - _ASCII_FIRST + 1
_WIDE_FIRST = 0x4E00
_SURROGATES = range(0xD800, 0xE000)


def encode(text: str, vocab_size: int) -> list[int]:
    """Return the token ids of a string, one per character."""
    return [_id_of(character, vocab_size) for character in text]


def decode(token_ids: Iterable[int], eos_token_id: int) -> str:
    """Return the text of token ids. EOS has no text."""
    return "".join(character_of(i) for i in token_ids if i != eos_token_id)


def character_of(token_id: int) -> str:
    """Return the character of an id."""
    if token_id <= _ASCII:
        return chr(_ASCII_FIRST + token_id - 1) if token_id > 0 else ""
    code = _WIDE_FIRST + token_id - _ASCII - 1
    return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Apply the template: `<role>content` per message, then `<assistant>`.

    Raises:
        RequestError: there are no messages, or a message has no role.
    """
    if not messages:
        raise RequestError("messages must hold at least one message")
    parts: list[str] = []
    for message in messages:
        if "role" not in message:
            raise RequestError(f"message {dict(message)!r} has no role")
        parts.append(f"<{message['role']}>{_content(message.get('content'))}")
    return "".join(parts) + "<assistant>"


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) for part in parts):
        raise RequestError(f"message content must be a string or a list of parts, got {content!r}")
    return "".join(str(part.get("text", "")) for part in parts)


def _id_of(character: str, vocab_size: int) -> int:
    code = ord(character)
    if _ASCII_FIRST <= code <= _ASCII_LAST:
        token = code - _ASCII_FIRST + 1
    elif code >= _WIDE_FIRST:
        token = code - _WIDE_FIRST + _ASCII + 1 - (len(_SURROGATES) if code >= _SURROGATES.stop else 0)
    else:
        token = vocab_size
    return token if token < vocab_size else 1 + zlib.crc32(character.encode()) % (vocab_size - 1)
