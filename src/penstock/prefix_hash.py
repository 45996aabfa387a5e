"""Hashes of a prompt's prefixes, by which a router finds engines whose KV cache holds them.

The header, `wire.PREFIX_HASHES_HEADER`, is `STRIDE:h1,h2,...`: chained hashes over blocks of 64 tokens, h_i = H(h_(i-1)
|| ids of block i). Equal hashes mean equal prefixes. At most 32 are sent, one every STRIDE blocks, the smallest power
of two that is enough. So the boundaries of a long prompt are also boundaries of a shorter one, and a shared prefix is
found to within the larger stride. H is blake2b of 8 bytes over little-endian 32-bit ids, the same on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK = 64
"""Tokens in a block."""
MOST = 32
"""Most hashes in one header."""
_BLOCK_BYTES = 4 * BLOCK
_DIGITS = 16
_MOST_STRIDE = 1 << 20
_ID_BITS = (1 << 32) - 1


def prefix_hashes(token_ids: Sequence[int]) -> str | None:
    """Return the header of a prompt; None if it has no whole block."""
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
    """Return the number of blocks between two hashes of a prompt of `blocks` blocks."""
    return 1 << max(0, (-(-blocks // MOST) - 1).bit_length())


def parse_prefix_hashes(header: bytes) -> list[tuple[int, bytes]]:
    """Read a prompt's boundaries, shortest first: (tokens, hash); none if malformed.

    A wrong header only makes a placement worse: hashes are compared, never trusted.
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
    except OverflowError:  # no such token exists, but the engine's error is clearer
        words = array("I", [token & _ID_BITS for token in token_ids])
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
