"""KV memory of one engine in the discrete-event fleet: prefixes by segment, and what is evicted first.

vLLM keeps KV in blocks and finds a block by the hash of all tokens before its end. Here a context is a chain of
segments (a system prompt, a task, one conversation), each under a key, and of each an engine holds the first so many
tokens. That is the same cache as long as contexts branch only where segments meet, and it costs a few dictionary
look-ups for a request of any length. Eviction is vLLM's: least recently released first, tails before heads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Segment = tuple[Hashable, int]
"""Key and length in tokens; equal keys hold equal tokens as far as both reach."""


class _Node:
    """What the engine holds of one segment."""

    __slots__ = ("refs", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.refs = 0


class SegmentCache:
    """Tokens of KV: pinned by running sequences, or idle and findable until their room is needed.

    Args:
        capacity: tokens in all.
        block_size: prefixes are found in whole blocks of so many tokens.
        caching: whether what a sequence leaves behind can be found again.
    """

    def __init__(self, capacity: int, block_size: int, *, caching: bool = True) -> None:
        self.capacity = capacity
        self.pinned = 0
        """Tokens in use by running sequences, shared ones counted once."""
        self.idle = 0
        """Tokens in use by nobody, still findable."""
        self._block = block_size
        self._caching = caching
        self._nodes: dict[Hashable, _Node] = {}
        self._lru: OrderedDict[Hashable, _Node] = OrderedDict()

    def hit(self, chain: Sequence[Segment]) -> int:
        """Tokens of the chain found from its start on, in whole blocks; at least the last token is left to compute."""
        found = total = 0
        unbroken = True
        for key, tokens in chain:
            total += tokens
            if unbroken:
                node = self._nodes.get(key)
                have = min(node.tokens, tokens) if node is not None else 0
                found += have
                unbroken = have == tokens
        return min(found, total - 1) // self._block * self._block

    def pin(self, chain: Sequence[Segment], reserve: int = 0) -> bool:
        """Take room for the whole chain, what is found included; False (and nothing changed) where there is too little.

        Args:
            chain: of one sequence; its last segment is its own.
            reserve: tokens that must stay free of pins besides.
        """
        grown = 0
        for key, tokens in chain:
            node = self._nodes.get(key)
            have = node.tokens if node is not None else 0
            grown += max(0, tokens - have) if node is not None and node.refs else max(tokens, have)
        if self.pinned + grown + reserve > self.capacity:
            return False
        for key, tokens in chain:
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node()
            elif not node.refs:
                self.idle -= node.tokens
                del self._lru[key]
            node.refs += 1
            node.tokens = max(node.tokens, tokens)
        self.pinned += grown
        self.trim()
        return True

    def grow(self, tokens: int) -> None:
        """Running sequences have so many tokens more between them; `release` says whose they were."""
        self.pinned += tokens

    def release(self, chain: Sequence[Segment], grown: int) -> None:
        """A sequence runs no more; `grown` tokens were added to its last segment meanwhile."""
        own_key, own_tokens = chain[-1]
        total = grown
        for _, tokens in chain:
            total += tokens
        self.pinned -= grown
        for key, _ in reversed(chain):
            node = self._nodes[key]
            node.refs -= 1
            if node.refs:
                continue
            self.pinned -= node.tokens
            if key == own_key:  # only whole blocks are found again
                node.tokens = max(0, max(node.tokens, own_tokens + grown) - total % self._block)
            if node.tokens and self._caching:
                self.idle += node.tokens
                self._lru[key] = node
            else:
                del self._nodes[key]
        self.trim()

    def trim(self) -> None:
        """Forget idle tokens that the pinned ones have taken the room of."""
        excess = self.pinned + self.idle - self.capacity
        while excess > 0 and self._lru:
            key = next(iter(self._lru))
            node = self._lru[key]
            taken = min(node.tokens, -(-excess // self._block) * self._block)
            node.tokens -= taken
            self.idle -= taken
            excess -= taken
            if not node.tokens:
                del self._lru[key], self._nodes[key]

    def clear(self) -> None:
        """Forget everything, as a process that ends does."""
        self.pinned = self.idle = 0
        self._nodes.clear()
        self._lru.clear()
