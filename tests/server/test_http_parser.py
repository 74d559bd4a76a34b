"""HTTP as it should not come, on a raw connection. The same with either of uvicorn's parsers."""

from __future__ import annotations

import json
import re
import socket

import pytest

from server.conftest import ServerProcess

BODY = json.dumps({"prompt": [5, 6], "max_tokens": 1, "temperature": 0}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ENDLESS = b"x" * 2**20


def statuses(server: ServerProcess, pieces: list[bytes]) -> list[int]:
    """Of the answers until the server closes the connection."""
    answers = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                answers += data
        except ConnectionError:  # refused while it was still being sent
            pass
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)]


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_an_offer_of_another_protocol_is_read_past(server: ServerProcess, size: int) -> None:
    data = (POST + OFFER + LENGTH + b"\r\n" + BODY) * 2 + b"GET /version HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n" + LAST
    assert statuses(server, [data[i : i + size] for i in range(0, len(data), size)]) == [200, 200, 200, 200]


def test_an_offer_with_a_chunked_body(server: ServerProcess) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nUpgrade: h2c\r\n\r\n" % (len(BODY), BODY)
    assert statuses(server, [POST + OFFER + chunked, LAST]) == [200, 200]


@pytest.mark.parametrize("begin", [b"", b"GET /", POST, POST + b"X: ", POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: "])
def test_what_does_not_end_is_refused(server: ServerProcess, begin: bytes) -> None:
    assert statuses(server, [begin] + [ENDLESS] * 64) in ([400], [])  # no answer where the connection was reset first


def test_many_small_chunks_are_no_head(server: ServerProcess) -> None:
    blanks = b"1\r\n \r\n" * 100_000
    data = POST + b"Transfer-Encoding: chunked\r\n\r\n" + blanks + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert statuses(server, [data, LAST]) == [200, 200]


@pytest.mark.parametrize("target", ["x:80", "/version", "http://x/version"])
def test_no_tunnels(server: ServerProcess, target: str) -> None:
    (status,) = statuses(server, [f"CONNECT {target} HTTP/1.1\r\nHost: x\r\nUpgrade: a\r\nConnection: upgrade, close\r\n\r\n".encode()])
    assert status in (400, 404, 405)
