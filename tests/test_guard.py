"""Which callers of a control surface may be web pages, and how few connections strangers get."""

from __future__ import annotations

import socket

import pytest

from penstock.guard import HOSTS_ENV, Strangers, cross_site, has_key


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1:8000", True), ("127.0.0.1", True), ("10.0.0.5:1", True), ("[::1]:8000", True),
        ("localhost:9", True), ("LocalHost", True),
        (socket.gethostname() + ":80", True), ("engine-0:8000", True), ("node.lab", True),
        ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("", False),
        ("localhost.evil.example", False), ("evil@127.0.0.1", False), ("127.1", False), ("[evil]", False),
    ],
)  # fmt: skip
def test_a_host_is_an_address_or_a_name_of_ours(host: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    monkeypatch.setenv(HOSTS_ENV, "node.lab, other")
    refused = cross_site([(b"accept", b"*/*"), (b"host", host.encode())], {"engine-0"})
    assert (refused is None) == may, refused


@pytest.mark.parametrize("origin", [b"http://evil.example", b"http://127.0.0.1:8000", b"null", b""])
def test_every_origin_is_refused(origin: bytes) -> None:
    assert "Origin" in str(cross_site([(b"host", b"127.0.0.1"), (b"origin", origin)]))


def test_the_second_host_counts_too() -> None:
    assert cross_site([(b"host", b"127.0.0.1"), (b"host", b"evil.example")])


def test_a_key_is_compared_whole() -> None:
    assert has_key(b"Bearer b", ["a", "b"])
    assert not any(has_key(given, ["a", "b"]) for given in (b"", b"Bearer ", b"b", b"Bearer ab", b"bearer b"))
    assert not has_key(b"Bearer ", [])


def test_the_oldest_stranger_gives_way() -> None:
    strangers, pairs = Strangers(2), [socket.socketpair() for _ in range(4)]
    for ours, _ in pairs[:2]:
        strangers.add(ours)
    strangers.remove(pairs[0][0])  # it has shown the key
    for ours, _ in pairs[2:]:
        strangers.add(ours)
    ended = []
    for ours, theirs in pairs:
        theirs.setblocking(False)  # noqa: FBT003 - the module's own signature
        try:
            ended.append(theirs.recv(1) == b"")
        except BlockingIOError:
            ended.append(False)
        ours.close()
        theirs.close()
    assert ended == [False, True, False, False]
