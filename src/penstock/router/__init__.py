"""The data plane: bytes in, bytes out. Here: what a fleet tells it, always all of it with an epoch, never a delta."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import ConfigDict

from penstock.errors import StateError, UserError, whole_number

KEY_ENV, ADMIN_KEY_ENV = "PENSTOCK_API_KEY", "PENSTOCK_ROUTER_ADMIN_KEY"
"""Variables of a router's process: what clients send, and what calls that change it need. On the command line every
user of the machine could read them."""
_NAME = re.compile(r"[!-~]{1,128}")
_KEY = re.compile(r"[!-~]{1,1024}")


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine as the fleet announces it.

    Raises:
        UserError: for a name that is not 1 to 128 printable characters without spaces, a URL that is not
            `http://host:port`, a negative weight version or rank, or a key that is no single printable word.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    url: str
    weight_version: int = 0
    eligible: bool = True
    """Whether requests may go there; False while it loads weights or is dead."""
    draining: bool = False
    """It is to leave: only later turns of sessions that live there go there, until they finish or their TTL passes."""
    dp_rank: int | None = None
    """It is this data-parallel rank of the server at `url`, which is told so in a header of every request; None: the
    server is one engine, and shares requests out among its ranks itself."""
    max_model_len: int | None = None
    """Most tokens that one of its sequences can have; None: not known."""
    api_key: str | None = field(default=None, repr=False)
    """Key that the router sends to it as `Authorization: Bearer`; None: none. `GET /router/engines` never shows it."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"engine name {self.name!r} must be 1 to 128 printable ASCII characters without spaces")
        whole_number(self.weight_version, f"engine {self.name}: weight_version")
        if self.dp_rank is not None:
            whole_number(self.dp_rank, f"engine {self.name}: dp_rank")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UserError(f"engine {self.name}: max_model_len must be at least 1, got {self.max_model_len}")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise UserError(f"engine {self.name}: api_key must be 1 to 1024 printable ASCII characters without spaces")
        self.address()

    @property
    def place(self) -> tuple[str, int | None]:
        """What makes it another engine, even under its old name: its URL, and its rank there."""
        return self.url, self.dp_rank

    def address(self) -> tuple[str, int]:
        """Host and port of `url`."""
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # what the resolver will do: an error there would come too late to be said
        except ValueError as error:
            raise UserError(f"engine {self.name}: url {self.url!r} is malformed: {error}") from None
        extra = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme != "http" or not host or not port or extra:
            raise UserError(f"engine {self.name}: url must be of the form http://host:port, got {self.url!r}")
        return host, port


@dataclass(frozen=True, slots=True)
class Membership:
    """A full set of engines, the gate and the policy; a greater epoch replaces it."""

    epoch: int = -1
    """-1: nothing has been announced yet."""
    engines: tuple[EngineEntry, ...] = ()
    closed: bool = False
    """Requests wait until a later epoch opens the gate."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `RouterConfig` that differ from those that the router was started with."""
    cut: tuple[str, ...] = ()
    """Engines that have left. What is in flight there is broken off, to go on elsewhere; on others that have left, it
    may come to its end."""

    def __post_init__(self) -> None:
        names: set[str] = set()
        ranks: dict[str, set[int | None]] = {}
        for entry in self.engines:
            if entry.name in names:
                raise UserError(f"two engines have the name {entry.name!r}; give each its own")
            names.add(entry.name)
            taken = ranks.setdefault(entry.url, set())
            if entry.dp_rank in taken or (taken and None in {entry.dp_rank, *taken}):
                raise UserError(f"two engines have the url {entry.url!r}; give each its own, or its own rank there")
            taken.add(entry.dp_rank)

    def replaced_by(self, announced: Membership) -> Membership:
        """What is in force after another was announced; this one again where nothing changes.

        Raises:
            StateError: an older or equal epoch that says something else: a late message cannot undo a newer one.
            UserError: a negative epoch.
        """
        epoch = whole_number(announced.epoch, "epoch")
        if epoch > self.epoch:
            return announced
        if replace(announced, epoch=self.epoch) != self:
            raise StateError(f"epoch {epoch} is not newer than {self.epoch} and differs from it; nothing was changed")
        return self
