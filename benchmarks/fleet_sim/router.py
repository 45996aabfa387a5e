"""What the discrete-event fleet asks of a router, and the request it shows it.

The router's real placement runs in the simulator (`OwnRouter`); models of other routers (`peers.py`) have the same
interface.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

from fleet_sim.cache import Segment
from penstock.router.membership import Engine, EngineEntry
from penstock.router.placement import Placement, Share
from penstock.router.policies import Defer, Hints
from penstock.router_settings import RouterConfig

BLOCK = 64
"""Tokens of one block of `X-Prefix-Hashes`."""
LEAST_BLOCKS = 2
MOST_HASHES = 32
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class FleetRequest(Hints):
    """One turn, as a router sees it: the headers, and for models of routers that read bodies its segments."""

    def __init__(
        self, chain: Sequence[Segment], *, session_id: str | None, group_id: str | None, expected_tokens: int
    ) -> None:
        self.chain = tuple(chain)
        prompt = sum(tokens for _, tokens in self.chain)
        # Not by the base's constructor, which would set `prefix_hashes`.
        vars(self).update(
            session_id=session_id, group_id=group_id, prompt_tokens=prompt, expected_tokens=expected_tokens
        )

    @cached_property
    def prefix_hashes(self) -> bytes | None:  # pyright: ignore[reportIncompatibleVariableOverride] - made when asked for
        """`X-Prefix-Hashes` of this prompt, None under two blocks; hashes name segments where real ones hash ids."""
        blocks = self.prompt_tokens // BLOCK
        if blocks < LEAST_BLOCKS:
            return None
        stride = 1
        while blocks // stride > MOST_HASHES:
            stride *= 2
        hashes = self._hashes([i * stride * BLOCK for i in range(1, blocks // stride + 1)])
        return f"{stride}:{','.join(hashes)}".encode()

    def _hashes(self, ends: Sequence[int]) -> list[str]:
        """For each end 16 digits, equal where the tokens before it are: the same segments, as far as they reach."""
        hashes: list[str] = []
        reached = i = 0
        path = ""
        for key, tokens in self.chain:
            path = f"{path}/{key}"
            start = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
            reached += tokens
            while i < len(ends) and ends[i] <= reached:
                hashes.append(f"{(start + ends[i] * _GOLDEN) & _MASK:016x}")
                i += 1
        return hashes


class FleetRouter(Protocol):
    """What `penstock.router.placement.Placement` does, with names for engines."""

    def set_engines(self, entries: Sequence[EngineEntry]) -> object:
        """The full set of engines from now on."""
        ...

    def mark(self, name: str, *, down: bool) -> None:
        """An engine refuses connections, or is back."""
        ...

    def report_kv(self, name: str, *, kv_usage: float, kv_capacity: int) -> None:
        """What an engine says of its KV."""
        ...

    def place(self, request: FleetRequest, now: float, excluded: Collection[str] = ()) -> str | Defer | None:
        """The engine to send the request to, WAIT, or None where none may serve it."""
        ...

    def done(self, request: FleetRequest, name: str, now: float) -> None:
        """The request has left that engine."""
        ...

    def finish_session(self, session_id: str) -> bool:
        """No turn of this session will follow."""
        ...

    def expire(self, now: float) -> object:
        """Forget sessions that nobody used for long."""
        ...


class OwnRouter(FleetRouter):
    """The placement of our router."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self._own = Placement(config)
        self._seen: dict[str, Engine] = {}
        self._placed: dict[tuple[FleetRequest, str], tuple[Share, Engine]] = {}
        self.set_engines, self.finish_session = self._own.set_engines, self._own.memory.sessions.drop

    def expire(self, now: float) -> None:
        self._own.memory.sessions.expire(now, self._own.config.session_ttl_s)

    def mark(self, name: str, *, down: bool) -> None:
        self._own.mark(self._own.engines[name], down=down)

    def report_kv(self, name: str, *, kv_usage: float, kv_capacity: int) -> None:
        self._own.report_kv(self._own.engines[name], kv_usage=kv_usage, kv_capacity=kv_capacity)

    def place(self, request: FleetRequest, now: float, excluded: Collection[str] = ()) -> str | Defer | None:
        share = Share()
        found = self._own.place(request, share, now, [self._seen[name] for name in excluded])
        if not isinstance(found, Engine):
            return found
        self._seen[found.name] = found
        self._placed[request, found.name] = share, found
        return found.name

    def done(self, request: FleetRequest, name: str, now: float) -> None:
        self._own.done(request, *self._placed.pop((request, name)), now)
