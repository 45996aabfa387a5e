"""The segment cache against the block pool of the fine-grained engine, and its books."""

from __future__ import annotations

import random

import pytest

from fleet_sim.cache import Segment, SegmentCache
from penstock.sim.scheduler import Block, BlockPool

BLOCK = 16


class BlockModel:
    """The same cache, block by block: every block is named by all that comes before its end."""

    def __init__(self, capacity: int) -> None:
        self.pool = BlockPool(capacity // BLOCK, caching=True)

    def names(self, chain: list[Segment]) -> list[tuple[str, int, int]]:
        ends: list[tuple[str, int, int]] = []
        path = ""
        for key, tokens in chain:
            path += f"/{key}"
            ends += [(path, i, 0) for i in range(tokens // BLOCK)]
        return ends

    def pin(self, chain: list[Segment]) -> tuple[int, list[Block]] | None:
        names = self.names(chain)
        in_use = 0
        for name in names:
            block = self.pool._found.get(name)
            if block is None or not block.refs:
                break
            in_use += 1
        if self.pool._used + len(names) - in_use > self.pool.size:
            return None  # before anything is touched, as in vLLM
        hits = self.pool.take_cached(names)
        blocks = [*hits, *(self.pool.allocate(len(names) - len(hits), 0) or [])]
        for block, name in zip(blocks, names, strict=True):
            self.pool.publish(block, name)
        return min(len(hits), len(names) - 1) * BLOCK, blocks  # the last token is always computed

    def grow(self, chain: list[Segment], blocks: list[Block], tokens: int) -> list[Block] | None:
        fresh = self.pool.allocate(tokens // BLOCK, 0)
        if fresh is None:
            return None
        for block, name in zip(fresh, self.names(chain)[len(blocks) :], strict=True):
            self.pool.publish(block, name)
        return [*blocks, *fresh]


@pytest.mark.parametrize("seed", range(2))
def test_hits_and_evictions_are_those_of_blocks(seed: int) -> None:
    source = random.Random(seed)
    capacity = 120 * BLOCK
    cache, model = SegmentCache(capacity, BLOCK), BlockModel(capacity)
    lengths = dict.fromkeys(range(12), 2 * BLOCK)
    running: dict[int, tuple[list[Segment], list[Block]]] = {}
    pinned = refused = 0
    for _ in range(4000):
        session = source.choice(list(lengths))
        if session in running:
            chain, blocks = running.pop(session)
            grown = BLOCK * source.randint(0, 5)
            after = [*chain[:-1], (session, chain[-1][1] + grown)]
            longer = model.grow(after, blocks, grown)
            cache.grow(grown if longer is not None else 0)
            cache.release(chain, grown if longer is not None else 0)
            model.pool.release(longer or blocks)
            lengths[session] = after[-1][1] if longer is not None else chain[-1][1]
            if lengths[session] > 40 * BLOCK:  # it is over, another begins
                del lengths[session]
                lengths[max(lengths) + 1] = 2 * BLOCK
        else:
            chain = [("system", 6 * BLOCK), (f"task {session % 3}", 3 * BLOCK), (session, lengths[session])]
            hit = cache.hit(chain)
            got = model.pin(chain)
            assert cache.pin(chain) == (got is not None)
            if got is None:
                refused += 1
                continue
            pinned += 1
            assert hit == got[0]
            running[session] = (chain, got[1])
        assert cache.pinned == round(model.pool.usage * capacity)
        assert cache.pinned + cache.idle <= capacity or not cache.idle
    assert pinned > 1000
    assert refused > 10
