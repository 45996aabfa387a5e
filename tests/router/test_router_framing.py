from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.answer import ChunkedReader

BAD_BODIES = {  # see test_router_hostile.py
    "no digits": b"\r\nabc\r\n0\r\n\r\n",
    "not hexadecimal": b"xyz\r\nabc\r\n0\r\n\r\n",
    "sign": b"+3\r\nabc\r\n0\r\n\r\n",
    "minus": b"-3\r\nabc\r\n0\r\n\r\n",
    "prefix": b"0x3\r\nabc\r\n0\r\n\r\n",
    "space before": b" 3\r\nabc\r\n0\r\n\r\n",
    "space after": b"3 \r\nabc\r\n0\r\n\r\n",
    "too many digits": b"0" * 15 + b"3\r\nabc\r\n0\r\n\r\n",
    "bare LF": b"3\nabc\r\n0\r\n\r\n",
    "extension": b"3;a=b\r\nabc\r\n0\r\n\r\n",
    "extension of the last": b"0;a\r\n\r\n",
    "chunk longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "chunk shorter than its size": b"3\r\nab\r\n0\r\n\r\n",
    "LF after a chunk": b"3\r\nabc\n0\r\n\r\n",
    "trailer": b"0\r\nA: b\r\n\r\n",
    "endless size line": b"3" * 50,
}


@st.composite
def chunked_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A well-formed chunked body and its payload."""
    wire, payload = b"", b""
    for chunk in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = draw(st.sampled_from(["%x", "%X", "00%x"])) % len(chunk)
        wire += size.encode() + b"\r\n" + chunk + b"\r\n"
        payload += chunk
    return wire + b"0\r\n\r\n", payload


@settings(max_examples=200, deadline=None)
@given(chunked_bodies(), st.binary(max_size=20), st.data())
def test_any_split_finds_the_same_end_and_payload(body: tuple[bytes, bytes], after: bytes, data: st.DataObject) -> None:
    wire, payload = body
    whole = wire + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces: list[bytes] = []
    reader = ChunkedReader(pieces)
    consumed = 0
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        if reader.done or start == end:
            continue
        prefix = data.draw(st.integers(0, 3))  # a head in front of the body
        taken = reader.feed(b"H" * prefix + whole[start:end], prefix) - prefix
        assert reader.done or taken == end - start
        consumed += taken
    assert reader.done
    assert consumed == len(wire)
    assert b"".join(pieces) == payload
    assert reader.size == len(wire)
