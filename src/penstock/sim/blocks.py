"""KV blocks with a prefix cache, counted as vLLM counts them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[str, int, int]
"""Names the tokens up to the end of a block: adapter, number of tokens, their CRC-32."""


@dataclass(slots=True, eq=False)
class Block:
    """`block_size` tokens of KV."""

    version: int
    """Weights that computed it."""
    key: Key | None = None
    """Set once it is full and findable."""
    refs: int = 1


class BlockPool:
    """A fixed number of blocks: in use, or free. A free block stays findable until its room is needed (LRU)."""

    def __init__(self, size: int, *, caching: bool) -> None:
        self.size = size
        self._caching = caching
        self._used = 0
        self._found: dict[Key, Block] = {}
        self._idle: OrderedDict[Key, Block] = OrderedDict()

    @property
    def usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return self._used / self.size

    def take_cached(self, keys: Sequence[Key]) -> list[Block]:
        """The longest cached run from the start of `keys`, now in use by the caller too."""
        hits: list[Block] = []
        for key in keys:
            block = self._found.get(key)
            if block is None:
                break
            if block.refs == 0:
                del self._idle[key]
                self._used += 1
            block.refs += 1
            hits.append(block)
        return hits

    def allocate(self, count: int, version: int) -> list[Block] | None:
        """`count` fresh blocks, or None (and nothing changed) where there are not that many."""
        if self._used + count > self.size:
            return None
        self._used += count
        while self._used + len(self._idle) > self.size:
            key, _ = self._idle.popitem(last=False)
            del self._found[key]
        return [Block(version) for _ in range(count)]

    def publish(self, block: Block, key: Key) -> None:
        """A block is full: others may share it. The first block of a key is the one that is found."""
        if self._caching and block.key is None and key not in self._found:
            block.key = key
            self._found[key] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """The caller uses them no more. Tail blocks are evicted first, as in vLLM."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                self._used -= 1
                if block.key is not None:
                    self._idle[block.key] = block

    def reset(self) -> bool:
        """Forget every cached block; False (and nothing changed) while blocks are in use."""
        if self._used:
            return False
        self._found.clear()
        self._idle.clear()
        return True
