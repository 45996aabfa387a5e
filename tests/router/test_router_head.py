from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import pytest

from penstock.router.answer import parse_response
from penstock.router.http import CHUNKED, RefusalError, parse_request

BAD_HEADS = {  # see test_router_hostile.py
    "length and chunked": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunked and length": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "two equal lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
    "list of lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "hexadecimal length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\n",
    "empty length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n",
    "overflowing length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another coding last": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
    "another coding first": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n",
    "almost chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n",
    "vertical tab": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
    "HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nContent-Length: 5\r\n\r\n",
    "folded value": b"POST / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
    "folded length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n 5\r\n\r\n",
    "space first": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n",
    "space before the colon": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\n",
    "tab before the colon": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n",
    "no colon": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length\r\n\r\n",
    "no name": b"POST / HTTP/1.1\r\nHost: a\r\n: 5\r\n\r\n",
    "NUL in a value": b"POST / HTTP/1.1\r\nHost: a\x00\r\n\r\n",
    "NUL in a name": b"POST / HTTP/1.1\r\nHost: a\r\nX\x00: a\r\n\r\n",
    "bare CR": b"POST / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "bare LF": b"POST / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "no host": b"POST / HTTP/1.1\r\nX: b\r\n\r\n",
    "two hosts": b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two keys": b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two sessions": b"POST / HTTP/1.1\r\nHost: a\r\nX-Session-ID: a\r\nX-Session-ID: b\r\n\r\n",
    "endless session": b"POST / HTTP/1.1\r\nHost: a\r\nX-Session-ID: " + b"a" * 600 + b"\r\n\r\n",
    "endless group": b"POST / HTTP/1.1\r\nHost: a\r\nX-Group-ID: " + b"a" * 513 + b"\r\n\r\n",
    "two groups": b"POST / HTTP/1.1\r\nHost: a\r\nX-Group-ID: a\r\nx-group-id: b\r\n\r\n",
    "tokens that are no number": b"POST / HTTP/1.1\r\nHost: a\r\nX-Prompt-Tokens: -1\r\n\r\n",
    "expected tokens that are no number": b"POST / HTTP/1.1\r\nHost: a\r\nX-Expected-Tokens: 1e3\r\n\r\n",
    "version that is no number": b"POST / HTTP/1.1\r\nHost: a\r\nX-Weight-Version: v3\r\n\r\n",
    "Connection takes the length away": b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close, Content-Length\r\n\r\n",
    "Connection takes the key away": b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Authorization\r\n\r\n",
    "unknown method": b"FROB / HTTP/1.1\r\nHost: a\r\n\r\n",
    "lower-case method": b"post / HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "absolute target": b"GET http://b/c HTTP/1.1\r\nHost: a\r\n\r\n",
    "target without a slash": b"GET c HTTP/1.1\r\nHost: a\r\n\r\n",
    "fragment": b"POST /pause#x HTTP/1.1\r\nHost: a\r\n\r\n",
    "8-bit target": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version": b"GET /\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET / HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "another protocol": b"DESCRIBE / RTSP/1.0\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "unknown expectation": b"POST / HTTP/1.1\r\nHost: a\r\nExpect: a-pony\r\n\r\n",
}


@pytest.mark.parametrize("line", [b"X: " + b" " * 30_000 + b"\x01", b"X" * 30_000, b"X:" + b"\t " * 15_000 + b"\n"])
def test_a_long_line_that_is_no_field_is_read_once(line: bytes) -> None:
    began = time.process_time()
    with pytest.raises(RefusalError, match="malformed head"):
        parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n\r\n")
    assert time.process_time() - began < 0.2, "read once for each of its bytes, it would take seconds"


def test_a_head_is_written_from_its_fields() -> None:
    head = (
        b"POST /v1/completions?a=b HTTP/1.1\r\nhOST: a\r\nX-Session-ID: 7\r\nX-Weight-Version: 3\r\n"
        b"traceparent: 00-a-b-01\r\nAuthorization: Bearer k\r\nContent-Length: 0012 \r\n"
        b"X-Odd:\t two  words\r\nEmpty:\r\n\r\n"
    )
    request = parse_request(head)
    assert request.to_engine(0, b"X-Ours: 1\r\n") == (
        b"POST /v1/completions?a=b HTTP/1.1\r\nX-Ours: 1\r\nhOST: a\r\nX-Session-ID: 7\r\nX-Weight-Version: 3\r\n"
        b"traceparent: 00-a-b-01\r\nX-Odd: two  words\r\nEmpty: \r\nContent-Length: 12\r\n\r\n"
    )
    assert request.authorization == b"Bearer k"
    assert (request.method, request.target, request.length) == (b"POST", b"/v1/completions?a=b", 12)
    assert (request.session_id, request.min_weight_version) == ("7", 3)
    assert request.keep_alive


def test_what_a_client_says_for_its_placement() -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: a\r\nx-session-ID: S-1 \r\nX-GROUP-ID:\tG\r\nX-Prompt-Tokens: 32768\r\n"
        b"X-Expected-Tokens: 512\r\nX-Prefix-Hashes: 1:00ff,AB\r\nNot-X-Group-ID: b\r\n"
        b"X-Group-ID-Too: c\r\n\r\n"
    )
    request = parse_request(head)
    assert (request.session_id, request.group_id) == ("S-1", "G")
    assert (request.prompt_tokens, request.expected_tokens) == (32768, 512)
    assert request.prefix_hashes == b"1:00ff,AB"
    assert request.to_engine(0) == head.replace(b":\tG", b": G")
    bare = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\nX-Session-ID:\r\n\r\n")
    assert (bare.session_id, bare.group_id, bare.prefix_hashes) == (None, None, None)
    assert (bare.prompt_tokens, bare.expected_tokens, bare.min_weight_version) == (0, 0, 0)


@pytest.mark.parametrize("line", [b"A: b", b"Authorization: Bearer s", b"X-Prompt-Tokens: 9"])
def test_equal_heads_are_parsed_once_without_secrets_and_counts(line: bytes) -> None:
    heads = [b"GET /%d HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % (number, line) for number in range(1025)]
    first = parse_request(heads[0])
    assert (parse_request(heads[0]) is first) == (line == b"A: b")
    with pytest.raises(FrozenInstanceError):
        first.session_id = "another"
    assert [parse_request(head).target for head in heads] == [b"/%d" % number for number in range(1025)]
    assert parse_request(heads[0]) is not first  # only the latest are kept


def test_names_beyond_ascii_are_those_that_admin_calls_say() -> None:
    head = "POST / HTTP/1.1\r\nHost: a\r\nX-Session-ID: séance\r\nX-Group-ID: modèle\r\n\r\n"
    as_utf8, as_latin = parse_request(head.encode()), parse_request(head.encode("latin-1"))
    assert (as_utf8.session_id, as_utf8.group_id) == (as_latin.session_id, as_latin.group_id) == ("séance", "modèle")
    assert as_latin.to_engine(0) == head.encode("latin-1")


def test_hop_by_hop_fields_stay_here() -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Mine\r\n"
        b"Keep-Alive: timeout=5\r\nX-Mine: 1\r\nTE: trailers\r\n"
        b"Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nUpgrade: h2c\r\nX-Other: 2\r\n"
        b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    request = parse_request(head)
    assert request.to_engine(7) == b"POST / HTTP/1.1\r\nHost: a\r\nX-Other: 2\r\nContent-Length: 7\r\n\r\n"
    assert request.expect
    assert request.length == CHUNKED


@pytest.mark.parametrize(
    ("head", "method", "length"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", b"GET", 7),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", b"HEAD", 0),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", b"GET", 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"GET", 0),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", b"GET", CHUNKED),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"GET", 0),
    ],
)
def test_length_of_an_answer(head: bytes, method: bytes, length: int) -> None:
    response = parse_response(head, method)
    assert response.length == length
    assert response.to_client(close=False).lower() == head.replace(b"200\r\n", b"200 OK\r\n").lower()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Length: 8\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"HTTP/1.1 101 Early\r\nLink: a\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n",
    ],
)
def test_ambiguous_answers_are_refused(head: bytes) -> None:
    with pytest.raises(RefusalError) as caught:
        parse_response(head, b"GET")
    assert caught.value.status == 502


def test_a_client_is_told_of_its_own_connection_alone() -> None:
    head = b"HTTP/1.1 200 Fine\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n"
    response = parse_response(head, b"GET")
    assert not response.keep_alive
    assert response.to_client(close=False) == b"HTTP/1.1 200 OK\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert response.to_client(close=True).endswith(b"chunked\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("options", ["", "keep-alive,", ", close", "close,,", " , ,x-mine, "])
def test_an_empty_connection_option_takes_no_line_away(options: str) -> None:
    line = f"Connection: {options}\r\nX-Mine: 1\r\nAccept: a\r\n".encode()
    mine = b"" if "x-mine" in options else b"X-Mine: 1\r\n"
    request = parse_request(b"POST / HTTP/1.1\r\nHost: a\r\n" + line + b"Content-Length: 1\r\n\r\n")
    assert request.to_engine(0) == (
        b"POST / HTTP/1.1\r\nHost: a\r\n" + mine + b"Accept: a\r\nContent-Length: 1\r\n\r\n"
    )
    assert request.keep_alive == ("close" not in options)
    response = parse_response(b"HTTP/1.1 200 OK\r\nA: b\r\n" + line + b"Content-Length: 1\r\n\r\n", b"GET")
    written = b"HTTP/1.1 200 OK\r\nA: b\r\n" + mine + b"Accept: a\r\nContent-Length: 1\r\n\r\n"
    assert response.to_client(close=False) == written
