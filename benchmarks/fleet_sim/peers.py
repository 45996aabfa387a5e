"""Models of other people's routers for the discrete-event fleet: how they choose, not how fast they are.

Each was written from its source as read in November 2026, and each is given the benefit of the doubt where its real
behaviour would only break the run: a worker that died is known to be dead at the first broken connection (vllm-router
learns it from failed requests or a health check every 60 s), and a request is retried on another worker (vllm-router's
sticky policies retry on the same one).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from fleet_sim.router import FleetRequest, FleetRouter
from penstock.router.membership import EngineEntry
from penstock.router.policies import Defer


def hash64(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def request_key(request: FleetRequest) -> str:
    """What vllm-router hashes: the session header, else the body; samples of one prompt have equal bodies."""
    return f"session {request.session_id}" if request.session_id is not None else f"body {request.chain[:-1]}"


class PeerRouter:
    """What the models share: who is up, and how many requests are in flight where."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        """In the order they were announced."""
        self.down: set[str] = set()
        self.load: dict[str, int] = {}
        """Requests in flight."""

    def set_engines(self, entries: Sequence[EngineEntry]) -> None:
        """See `FleetRouter`."""
        self.workers = [entry.name for entry in entries]
        self.load = {name: self.load.get(name, 0) for name in self.workers}
        self.changed()

    def mark(self, name: str, *, down: bool) -> None:
        """See `FleetRouter`."""
        (self.down.add if down else self.down.discard)(name)

    def report_kv(self, name: str, *, kv_usage: float, kv_capacity: int) -> None:
        """See `FleetRouter`; none of these routers asks."""

    def place(self, request: FleetRequest, now: float, excluded: Collection[str] = ()) -> str | Defer | None:
        """See `FleetRouter`."""
        del now
        healthy = [name for name in self.workers if name not in self.down and name not in excluded]
        if not healthy:
            return None
        name = self.choose(request, healthy)
        self.load[name] += 1
        return name

    def done(self, request: FleetRequest, name: str, now: float) -> None:
        """See `FleetRouter`."""
        del request, now
        if name in self.load:
            self.load[name] -= 1

    def finish_session(self, session_id: str) -> bool:
        """See `FleetRouter`; only a policy that counts sessions cares."""
        del session_id
        return False

    def expire(self, now: float) -> object:
        """See `FleetRouter`; no run is as long as these routers' time limits of one and two hours."""
        del now

    def changed(self) -> None:
        """The set of workers is another."""

    def choose(self, request: FleetRequest, healthy: Sequence[str]) -> str:
        """One of `healthy`, of which there is at least one; here any."""
        del request
        return healthy[0]


class VllmConsistentHash(PeerRouter):
    """vllm-router `consistent_hash`: a ring of 160 virtual nodes a worker; not up: the first healthy worker.

    (`src/policies/consistent_hash.rs`; its hash is mcrouter's furc over MurmurHash64A, here blake2b.)
    """

    VIRTUAL_NODES = 160

    def changed(self) -> None:
        """A new ring; other workers keep their places on it."""
        nodes = sorted((hash64(f"{name}:{i}"), name) for name in self.workers for i in range(self.VIRTUAL_NODES))
        self._hashes = [node for node, _ in nodes]
        self._owners = [name for _, name in nodes]

    def choose(self, request: FleetRequest, healthy: Sequence[str]) -> str:
        """The owner of the first virtual node after the request's key."""
        place = bisect.bisect_left(self._hashes, hash64(request_key(request))) % len(self._hashes)
        owner = self._owners[place]
        return owner if owner in healthy else healthy[0]


class VllmStickyLeastLoaded(PeerRouter):
    """vllm-router `sticky_least_loaded`: a session stays; a new one goes where the fewest sessions live.

    Ties, and with them every request without a session, are broken by rendezvous hashing; requests are not counted.
    (`src/policies/sticky_least_loaded.rs`.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._homes: dict[str, str] = {}
        self._sessions: dict[str, int] = {}

    def choose(self, request: FleetRequest, healthy: Sequence[str]) -> str:
        """See the class."""
        session = request.session_id
        if session is not None:
            home = self._homes.get(session)
            if home is not None and home in healthy:
                return home
            self.finish_session(session)
        fewest = min(self._sessions.get(name, 0) for name in healthy)
        key = request_key(request)
        idlest = [name for name in healthy if self._sessions.get(name, 0) == fewest]
        chosen = idlest[0] if len(idlest) == 1 else max(idlest, key=lambda name: hash64(f"{key}:{name}"))
        if session is not None:
            self._homes[session] = chosen
            self._sessions[chosen] = self._sessions.get(chosen, 0) + 1
        return chosen

    def finish_session(self, session_id: str) -> bool:
        """See `FleetRouter`."""
        home = self._homes.pop(session_id, None)
        if home is None:
            return False
        self._sessions[home] -= 1
        return True


class VllmCacheAware(PeerRouter):
    """vllm-router `cache_aware`, its default: the worker that saw the longest prefix, unless loads differ much.

    Loads differ much where the most requests in flight exceed the fewest by more than 64 and by half; then the fewest.
    Else a known session goes to its worker; else the worker that last used the longest prefix known to the tree, where
    that is more than 0.3 of the prompt; else the fewest requests. (`src/policies/cache_aware.rs`, `src/tree.rs`, the
    defaults of `vllm_router/router_args.py` 0.1.17; its tree is cut to size only after 32 million characters a worker.)
    """

    THRESHOLD = 0.3
    ABSOLUTE = 64
    RELATIVE = 1.5

    def __init__(self) -> None:
        super().__init__()
        self._homes: dict[str, str] = {}
        self._last: dict[Hashable, tuple[int, str]] = {}
        """For each segment how far the tree knows it, and who used it last."""

    def choose(self, request: FleetRequest, healthy: Sequence[str]) -> str:
        """See the class."""
        loads = [self.load[name] for name in self.workers if name not in self.down]
        idlest = min(healthy, key=lambda name: self.load[name])
        session = request.session_id
        chosen = None
        if not (max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads)):
            chosen = self._homes.get(session) if session is not None else None
            if chosen not in healthy:
                chosen = self._match(request)
        if chosen is None or chosen not in healthy:
            chosen = idlest
        if session is not None:
            self._homes[session] = chosen
        for key, tokens in request.chain:
            known, _ = self._last.get(key, (0, ""))
            self._last[key] = (max(known, tokens), chosen)
        return chosen

    def finish_session(self, session_id: str) -> bool:
        """Its map forgets after an hour; here at once, which changes nothing but memory."""
        return self._homes.pop(session_id, None) is not None

    def _match(self, request: FleetRequest) -> str | None:
        matched, tenant = 0, None
        for key, tokens in request.chain:
            known, last = self._last.get(key, (0, ""))
            if known and tokens:
                matched, tenant = matched + min(known, tokens), last
            if known < tokens:
                break
        return tenant if matched > self.THRESHOLD * request.prompt_tokens else None


class TorchRLBalancer(PeerRouter):
    """TorchRL's `LoadBalancer` with its default strategies, `["prefix-aware", "requests"]`.

    The first 8 tokens (or words) are hashed onto the replicas, so prompts with one system prompt share one replica.
    The check for overload passes what are numbers already to `ray.get`, which raises; the error is taken for "not
    overloaded", so the second strategy never gets a turn. (`torchrl/modules/llm/backends/vllm/vllm_async.py`; Python's
    `hash` of words is salted for each process, here blake2b. It knows of no dead replica; here the next one steps in.)
    """

    def choose(self, request: FleetRequest, healthy: Sequence[str]) -> str:
        """See the class."""
        first = next(key for key, tokens in request.chain if tokens)
        preferred = self.workers[hash64(str(first)) % len(self.workers)]
        return preferred if preferred in healthy else healthy[0]


PEERS: Mapping[str, Callable[[], FleetRouter]] = {
    "vllm-router consistent_hash": VllmConsistentHash,
    "vllm-router sticky_least_loaded": VllmStickyLeastLoaded,
    "vllm-router cache_aware": VllmCacheAware,
    "torchrl": TorchRLBalancer,
}
"""Each makes a fresh one."""
