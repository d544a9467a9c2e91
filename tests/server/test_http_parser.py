"""The head of a request is bounded before the check of keys: 100 MB of one header silenced all streams for 10 s, and a million
headers took memory until the connection ended."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onedraw.limits import MAX_HEAD
from onedraw.server.auth import ApiKey
from onedraw.server.config import ServerOptions
from tests.server.running import PATIENCE, Served, fake_llm, serving

MEGABYTE = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n"
BODY = b'{"prompt": [5], "max_tokens": 1}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(api_keys=(ApiKey("ann", "a"),))) as found:
        yield found


def sent(served: Served, data: bytes) -> tuple[int, bytes]:
    """Send up to this much until the server closes the connection. Return how many bytes were sent, and the answer."""
    address, count, answer = httpx.URL(served.url), 0, b""
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
        try:
            while count < len(data):
                count += connection.send(data[count : count + MEGABYTE // 8])
            answer = connection.recv(1 << 16)
        except ConnectionError:
            pass
    return count, answer


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x: " + b"a" * 50 * MEGABYTE,
        HEAD + b"x: a\r\n" * 8 * MEGABYTE,
        b"POST /" + b"a" * 50 * MEGABYTE,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"t: a\r\n" * 8 * MEGABYTE,
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * 50 * MEGABYTE,
    ],
    ids=["a header", "headers", "a URL", "trailers", "a chunk's extension"],
)
def test_a_head_without_end_is_refused(served: Served, data: bytes) -> None:
    count, _ = sent(served, data)
    assert count < len(data)
    assert served.get("/health").status_code == 200


def test_the_refusal_says_why(served: Served) -> None:
    _, answer = sent(served, HEAD + b"x: " + b"a" * (2 * MAX_HEAD + MEGABYTE // 4) + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer  # A reset may overtake it.


def test_what_is_within_the_bound_is_read(served: Served) -> None:
    long = {"authorization": "Bearer a", "x": "a" * (MAX_HEAD // 2)}
    assert served.http.post("/v1/completions", content=BODY, headers=long).status_code == 200
    large = {"prompt": [5], "max_tokens": 1, "user": "a" * 4 * MAX_HEAD}  # a body has a bound of its own
    chunks = (b"%c" % byte for byte in BODY + b" " * MAX_HEAD)  # whose framing is larger than the bound
    for body in ({"json": large}, {"content": chunks}):
        assert served.http.post("/v1/completions", headers={"authorization": "Bearer a"}, **body).status_code == 200


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
def test_an_offer_to_change_the_protocol_is_ignored(served: Served, offered: str) -> None:
    """Java's HTTP client offers HTTP/2 with every request, whose body was then not read."""
    offer = {"authorization": "Bearer a", "connection": "Upgrade, HTTP2-Settings", "upgrade": offered, "http2-settings": "AAMA"}
    for _ in range(2):
        assert served.get("/v1/models", headers=offer).status_code == 200
        assert served.http.post("/v1/completions", content=BODY, headers=offer).status_code == 200
        chunks = (BODY[i : i + 7] for i in range(0, len(BODY), 7))
        assert served.http.post("/v1/completions", content=chunks, headers=offer).status_code == 200
    head = b"connection: upgrade, close\r\nupgrade: h2c\r\nauthorization: Bearer a\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    assert b"connection: close" in sent(served, HEAD + head + BODY)[1]
    assert sent(served, b"CONNECT test:80 HTTP/1.1\r\nhost: test\r\n\r\n")[1].startswith(b"HTTP/1.1 400 ")


def test_many_offers_on_one_connection_are_ignored(served: Served) -> None:
    """Regression: each was parsed inside of the one before, and the connection ended with a traceback in the log."""
    offer = b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    address, answers, many = httpx.URL(served.url), b"", 1_500
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
        connection.sendall(offer * many)
        while answers.count(b"HTTP/1.1 200 ") < many:
            part = connection.recv(1 << 16)
            assert part
            answers += part


def test_parts_of_a_body_that_arrive_together_are_joined_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one client that sent each byte as a chunk kept the event loop from all others, since each copied the body so
    far."""
    parts: list[int] = []
    on_body = HttpToolsProtocol.on_body

    def count(self: HttpToolsProtocol, body: bytes) -> None:
        parts.append(len(body))
        on_body(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", count)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 20_000)
    head = b"transfer-encoding: chunked\r\nconnection: close\r\nauthorization: Bearer a\r\n\r\n"
    assert sent(served, HEAD + head + chunks + b"0\r\n\r\n")[1].startswith(b"HTTP/1.1 200 ")
    assert sum(parts) == len(BODY) + 20_000
    assert len(parts) < 1_000


@pytest.mark.parametrize("root", ["", "/llm"])
def test_replies_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """Regression: they waited in memory for as long as their clients kept the connections. Ann asks for far more than the bound
    and reads nothing; Bob, who reads slowly, gets all of his."""
    monkeypatch.setattr("onedraw.server.http_parser.MAX_UNREAD", 24 * MEGABYTE)
    body = json.dumps({"tokens": [257] * MEGABYTE}).encode()  # The answer has twelve bytes for each token.
    keys = (ApiKey("ann", "a"), ApiKey("bob", "b"))
    with fake_llm() as llm, serving(llm, ServerOptions(api_keys=keys, root_path=root)) as served, ExitStack() as stack:

        def ask(key: str) -> socket.socket:
            address = httpx.URL(served.url)
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)  # so that little waits outside of the server
            connection.settimeout(PATIENCE)
            connection.connect((address.host, address.port))
            head = f"POST {root}/detokenize HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            return connection

        def received(connection: socket.socket) -> int:
            length = 0
            with suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    length += len(part)
            return length

        bob, whole = ask("b"), received(ask("b"))
        assert bob.recv(1)
        ann = [ask("a") for _ in range(8)]
        assert all(connection.recv(1) for connection in ann)  # All were answered before the first is read.
        lengths = [received(connection) for connection in ann]
        assert 0 < sum(length < whole - 1 for length in lengths) < len(ann)
        assert received(bob) == whole - 1
