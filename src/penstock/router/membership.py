"""The engines behind the router: the full set that the fleet announces, with an epoch, and each one's load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from penstock.checks import LARGEST
from penstock.errors import StateError, UserError


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    extra = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username or parts.password
    (parts.hostname or "").encode("idna")  # as the resolver will do; an error there would come too late to be reported
    if parts.scheme != "http" or not parts.hostname or not parts.port or extra:
        raise ValueError("it must be of the form http://host:port")
    return url


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine as the fleet announces it; the router checks it when it reads the announcement."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
    url: Annotated[str, AfterValidator(_check_url)]
    weight_version: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    eligible: bool = True
    """Whether requests may go there; False: it drains and gets none. Engines that load or are dead are left out."""
    draining: bool = False
    """The engine is to leave: it gets only later turns of its sessions, until they finish or their TTL passes."""
    dp_rank: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    """Data-parallel rank of the server at `url`; a header of every request names it. If it is None, the server is one
    engine and distributes requests among its ranks itself."""
    max_model_len: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Most tokens of one sequence; None: unknown."""
    api_key: Annotated[str, Field(pattern=r"^[!-~]{1,1024}$")] | None = field(default=None, repr=False)
    """Key that the router sends as `Authorization: Bearer`; None: no key. `GET /router/engines` never shows it."""

    @property
    def place(self) -> tuple[str, int | None]:
        """URL and rank. Another place is another engine, even under the same name."""
        return self.url, self.dp_rank

    def address(self) -> tuple[str, int]:
        """Return host and port of `url`."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


POLICY_OPTIONS = {"policy", "prefix_length", "overload_threshold"}
"""Fields of `RouterConfig` that an announcement may override."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The body of an announcement: all engines, the gate and the policy. A greater epoch replaces it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    epoch: Annotated[int, Field(ge=0, le=LARGEST)]
    engines: tuple[EngineEntry, ...]
    closed: bool = False
    """Whether the gate is closed: requests wait until a later epoch opens it."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those of `POLICY_OPTIONS` that override the options with which the router was started."""
    cut: tuple[str, ...] = ()
    """Engines that have left and whose requests in flight are broken off, to go on elsewhere. Requests on other engines
    that have left may finish."""

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [e.name for e in self.engines]),
            ("url and rank", [e.place for e in self.engines]),
        ):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise UserError(f"two engines have the {what} {twice[0]!r}; give each its own")
        if odd := self.policy.keys() - POLICY_OPTIONS:
            raise UserError(f"no option of a policy: {', '.join(map(repr, sorted(odd)))}")

    def replaced_by(self, announced: Membership) -> Membership:
        """Return the membership in force after `announced`; this one if nothing changes.

        Raises:
            StateError: an older or equal epoch with other contents, so that a late message cannot undo a newer one.
        """
        if announced.epoch > self.epoch:
            return announced
        if replace(announced, epoch=self.epoch) != self:
            what = f"epoch {announced.epoch} is not newer than {self.epoch} and differs from it"
            raise StateError(f"{what}; nothing was changed")
        return self


NO_MEMBERSHIP = Membership(-1, ())
"""What is in force before the first announcement."""


class Engine:
    """One engine as it was announced, with its load and its present state. Policies read it and change nothing."""

    down = False
    """Whether the breaker is open: a connection was refused, or an answer reported a dead core."""
    left = False
    """Whether it has left the set; its sessions then have no home."""
    outstanding = 0
    """Requests sent and not answered in full."""
    outstanding_tokens = 0
    """Prompt and expected tokens of those requests."""
    resident_tokens = 0
    """Tokens of context that live there: of sessions that count, and those that requests in flight add (all tokens of a
    request without a session)."""
    sessions = 0
    """Sessions that live there."""
    kv_capacity = 0
    """Tokens that its KV cache holds; 0: unknown."""
    fillings = 0
    """Times that its cache was emptied."""
    kv_reported = -1.0
    """Its last report of its KV usage; -1: none."""
    kv_reported_at = 0
    """Tokens in flight when it reported its KV usage."""

    def __init__(self, entry: EngineEntry) -> None:
        self.name = entry.name
        self.set_entry(entry)

    def set_entry(self, entry: EngineEntry) -> None:
        self.entry = entry
        self.weight_version = entry.weight_version

    @property
    def serves(self) -> bool:
        """Whether requests may go there, at least those of its own sessions."""
        return self.entry.eligible and not self.down and not self.left

    @property
    def takes_new(self) -> bool:
        """Whether any request may go there."""
        return self.serves and not self.entry.draining

    @property
    def kv_usage(self) -> float:
        """Fraction of its KV cache in use: the last report and tokens placed since, so it may exceed 1; -1: unknown."""
        placed = self.outstanding_tokens - self.kv_reported_at
        if placed > 0 and self.kv_capacity and self.kv_reported >= 0:
            return self.kv_reported + placed / self.kv_capacity
        return self.kv_reported
