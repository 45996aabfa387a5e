"""Text for the endpoints that speak it: one character a token, and a chat template of one line a message.

Id 0 is EOS; ids 1 to 95 are the printable ASCII characters; higher ids are characters from U+4E00 on. Decoding and
encoding again gives the same ids. A character without an id (a newline among them) becomes some id, the same each time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from penstock.errors import RequestError

_ASCII_FIRST, _ASCII_LAST = 0x20, 0x7E
_ASCII = _ASCII_LAST - _ASCII_FIRST + 1
_WIDE_FIRST = 0x4E00
_SURROGATES = range(0xD800, 0xE000)


def encode(text: str, vocab_size: int) -> list[int]:
    """Token ids of a string, one for each character."""
    return [_id_of(character, vocab_size) for character in text]


def decode(token_ids: Iterable[int], eos_token_id: int) -> str:
    """Text of token ids; EOS has none."""
    return "".join(character_of(i) for i in token_ids if i != eos_token_id)


def character_of(token_id: int) -> str:
    """The character of one id."""
    if token_id <= _ASCII:
        return chr(_ASCII_FIRST + token_id - 1) if token_id > 0 else ""
    code = _WIDE_FIRST + token_id - _ASCII - 1
    return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """The template: `<role>content` for each message, then the opening of the assistant's turn.

    Raises:
        RequestError: no messages, or one without a role.
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
