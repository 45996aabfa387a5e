"""Which engines have seen the beginning of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.router.policies.base import PrefixHolder


class Prefixes:
    """Hashes of beginnings to engines; where it is full, the least recently used hash is forgotten.

    What an engine has seen, it may have evicted since: this is a guess at its cache, on the side of too much.

    Args:
        capacity: most hashes remembered; a prompt has up to 32.
    """

    def __init__(self, capacity: int = 131_072) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[int, None]] = OrderedDict()
        self._lives: dict[str, int] = {}
        self._names: dict[int, str] = {}
        """A cache's life to its engine: a new number when it is emptied, so that its old entries count no more."""
        self._born = 0

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, engine: str, boundaries: Sequence[tuple[int, bytes]]) -> None:
        """`engine` gets a prompt with these boundaries."""
        life = self._lives.get(engine)
        if life is None:
            self._born = life = self._born + 1
            self._lives[engine] = life
            self._names[life] = engine
        holders = self._holders
        for _, digest in boundaries:
            lives = holders.get(digest)
            if lives is None:
                holders[digest] = {life: None}
            else:
                if life not in lives:
                    if len(lives) > len(self._names):  # most of them are of emptied caches
                        lives = holders[digest] = {one: None for one in lives if one in self._names}
                    lives[life] = None
                holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def holders(self, boundaries: Sequence[tuple[int, bytes]]) -> tuple[PrefixHolder, ...]:
        """Engines that have seen one of these boundaries, each with its longest; the longest first."""
        found: dict[str, PrefixHolder] = {}
        for tokens, digest in reversed(boundaries):
            for life in self._holders.get(digest, ()):
                name = self._names.get(life)
                if name is not None and name not in found:
                    found[name] = PrefixHolder(name, tokens)
            if len(found) == len(self._names):
                break
        return tuple(found.values())

    def forget_engine(self, engine: str) -> None:
        """Its cache was emptied, or it has left."""
        life = self._lives.pop(engine, None)
        if life is not None:
            del self._names[life]
