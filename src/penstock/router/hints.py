"""What a request's headers say, as far as placing it goes."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class RequestHints(Protocol):
    """What a request's headers say, as far as placing it goes. `router.head.RequestHead` is one."""

    @property
    def session_id(self) -> str | None:
        """`X-Session-ID`."""
        ...

    @property
    def group_id(self) -> str | None:
        """`X-Group-ID`."""
        ...

    @property
    def min_weight_version(self) -> int:
        """`X-Weight-Version`."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """`X-Prompt-Tokens`; 0: not said."""
        ...

    @property
    def expected_tokens(self) -> int:
        """`X-Expected-Tokens`; 0: not said."""
        ...

    @property
    def adapter(self) -> str | None:
        """`X-Adapter`."""
        ...

    @property
    def prefix_hashes(self) -> bytes | None:
        """`X-Prefix-Hashes` as it came."""
        ...


class Hints(NamedTuple):
    """`RequestHints` as plain values."""

    session_id: str | None = None
    group_id: str | None = None
    min_weight_version: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    adapter: str | None = None
    prefix_hashes: bytes | None = None
