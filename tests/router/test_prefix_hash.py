"""The header of prompts' beginnings, and the table of who has seen which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prefix_hash import BLOCK, MOST, parse_prefix_hashes, prefix_hashes
from penstock.router.membership import Engine, EngineEntry
from penstock.router.memory import Prefixes


def boundaries(token_ids: list[int]) -> list[tuple[int, bytes]]:
    header = prefix_hashes(token_ids)
    return [] if header is None else parse_prefix_hashes(header.encode())


def test_fixed_vectors() -> None:
    assert prefix_hashes(list(range(63))) is None
    assert prefix_hashes(list(range(64))) == "1:7b73b0fab9b20c33"
    assert prefix_hashes(list(range(128))) == "1:7b73b0fab9b20c33,bea64eaa56dee9e7"


@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 150), st.integers(0, BLOCK - 1))
def test_what_two_prompts_share_is_found_to_within_the_greater_stride(
    shared: int, one: int, other: int, odd: int
) -> None:
    common = [(7 * i) % 50_000 for i in range(shared * BLOCK + odd)]
    a = boundaries([*common, 50_001, *[1] * (one * BLOCK)])
    b = boundaries([*common, 50_002, *[2] * (other * BLOCK)])
    met = set(a) & set(b)
    longest = max((tokens for tokens, _ in met), default=0)
    assert longest <= len(common), "equal hashes of different beginnings"
    stride = max((s[0][0] for s in (a, b) if s), default=BLOCK)
    reach = min(len(common), *(s[-1][0] if s else 0 for s in (a, b)))  # hashes end at a whole stride
    assert longest > reach - stride
    assert {tokens for tokens, _ in met} >= {tokens for tokens, _ in a if tokens <= longest and tokens % stride == 0}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.integers(0, 299))
def test_one_token_changes_every_hash_from_there_on(token_ids: list[int], place: int) -> None:
    changed = list(token_ids)
    if place < len(changed):
        changed[place] ^= 1
    for (tokens, one), (_, other) in zip(boundaries(token_ids), boundaries(changed), strict=True):
        assert (one == other) == (place >= tokens or place >= len(token_ids))


@pytest.mark.parametrize(
    "header",
    [
        b"", b":", b"1", b"1:", b"0:b6cf1e5ed95e3d11", b"3:b6cf1e5ed95e3d11", b"-1:b6cf1e5ed95e3d11",
        b"1:b6cf1e5ed95e3d1", b"1:b6cf1e5ed95e3d11,", b"2097152:b6cf1e5ed95e3d11", b"99999999999:b6cf1e5ed95e3d11",
        b"1:" + b",".join([b"b6cf1e5ed95e3d11"] * 33), b"\xb2:b6cf1e5ed95e3d11",
    ],
)  # fmt: skip
def test_a_malformed_header_is_none(header: bytes) -> None:
    assert parse_prefix_hashes(header) == []


@given(st.binary(max_size=200))
def test_no_header_raises(header: bytes) -> None:
    assert len(parse_prefix_hashes(header)) <= MOST


def some_engines() -> dict[str, Engine]:
    return {name: Engine(EngineEntry(name, "http://h:1")) for name in ("e0", "e1", "e2")}


def test_the_table_is_bounded_and_forgets_what_was_not_used() -> None:
    engines = some_engines()
    prefixes = Prefixes(capacity=10)
    used = boundaries([1] * 128)
    for i in range(100):
        prefixes.note(engines["e0"], used)
        prefixes.note(engines["e0"], boundaries([i + 2] * 128))
        assert len(prefixes) <= 10
    assert prefixes.holders(used, 3) == {"e0": 128}
    assert prefixes.holders(boundaries([2] * 128), 3) == {}
