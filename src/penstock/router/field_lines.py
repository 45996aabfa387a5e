"""The lines of heads: each is judged once, and known when it comes again, as most lines of most heads do.

A line means the same in whatever head it stands (RFC 9112, section 5: nothing is folded), so a head is valid if llhttp
has accepted each of its lines in some head before. Only a head with a line that is not known goes through llhttp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import httptools

from penstock.router.refusal import RefusalError, shown

Value = bytes | int | str
Fields = dict[bytes, Value]
Parser = type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser]

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)[ \t]*")
_MOST = 8192
_LONGEST = 160
_NEVER_KEPT = {b"authorization", b"cookie", b"traceparent", b"tracestate", b"x-request-id", b"x-prefix-hashes"}
"""What is another one in each request, or a secret."""


class FieldLines:
    """Reads the fields of heads of one kind.

    Args:
        parser: of llhttp, for this kind of head.
        wanted: the fields looked at, by name in lower case, and what makes a value of the bytes; it may raise
            RefusalError.
        lists: those of them that may occur more than once; they are joined with commas.
    """

    def __init__(
        self, parser: Parser, wanted: Mapping[bytes, Callable[[bytes], Value]], lists: AbstractSet[bytes]
    ) -> None:
        self._parser = parser
        self._wanted = wanted
        self._lists = lists
        self._known: dict[bytes, tuple[bytes, Value] | tuple[()]] = {}
        """Name and value by line; empty for a field that is not looked at."""

    def read(self, head: bytes, lines: list[bytes]) -> Fields:
        """Fields that are wanted, by name in lower case.

        Args:
            head: from the first line to the empty line.
            lines: those between the two.

        Raises:
            RefusalError: 400, for what is no head, for a field twice that may be there once, and what `wanted` raises.
        """
        seen: Fields = {}
        known = self._known.get
        checked = False
        for line in lines:
            field = known(line)
            if field is None:
                if not checked:
                    self.check(head)
                    checked = True
                field = self._judge(line)
            if field:
                name, value = field
                if name in seen:
                    value = self._joined(name, seen[name], value)
                seen[name] = value
        return seen

    def check(self, head: bytes) -> None:
        """Let llhttp, in its strict mode, vouch for the syntax. Raises RefusalError: 400."""
        try:
            self._parser(None).feed_data(head)
        except httptools.HttpParserUpgrade:
            pass  # an offer of another protocol: declined, by passing the request on without it
        except httptools.HttpParserError as error:
            raise RefusalError(400, "bad_request", f"malformed head: {error}") from None

    def _judge(self, line: bytes) -> tuple[bytes, Value] | tuple[()]:
        match = _LINE.fullmatch(line)
        if match is None:
            raise RefusalError(400, "bad_request", f"malformed head: bad field line {shown(line)}")
        name = match[1].lower()
        make = self._wanted.get(name)
        field = () if make is None else (name, make(match[2]))
        if len(line) <= _LONGEST and name not in _NEVER_KEPT:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[line] = field
        return field

    def _joined(self, name: bytes, first: Value, second: Value) -> Value:
        if name not in self._lists or not isinstance(first, bytes) or not isinstance(second, bytes):
            raise RefusalError(400, "bad_request", f"header {name.decode()} occurs more than once")
        return first + b"," + second
