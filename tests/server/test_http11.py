"""HTTP itself, over plain sockets: what is none is refused in the shape of other errors, and nobody stays
connected by dribbling."""

import gc
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from harness import PATIENCE_S, Server, chat_body, serving

from isthmus.server.http11 import Http11

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Up to the end of the connection."""
    seen = b""
    while data := sock.recv(4096):
        seen += data
    return seen


def read_answer(sock: socket.socket) -> bytes:
    """One answer of a connection that stays open."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        seen += sock.recv(4096)
    head, _, body = seen.partition(b"\r\n\r\n")
    length = next(
        int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")
    )
    while len(body) < length:
        body += sock.recv(4096)
    return head + b"\r\n\r\n" + body


def assert_well(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("well"))
    assert answer.json()["choices"][0]["message"]["content"] == "well"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\0" * 100 + b"\r\n\r\n",  # TLS
        CHAT + JSON + b"Content-Length: -5\r\n\r\n",
        CHAT + JSON + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        CHAT + JSON + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        CHAT + JSON + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        CHAT + JSON + CHUNKED + b"zz\r\n",
    ],
    ids=lambda value: repr(value[-30:]),
)
def test_what_is_no_http_is_a_400_in_openais_shape(server: Server, request_: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(request_)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")
    assert_well(server)


def test_where_the_path_is_known_it_has_that_protocols_shape(server: Server) -> None:
    for path, keys in ((b"/v1/messages", {"type", "error"}), (b"/api/chat", {"error"})):
        with connected(server) as sock:
            sock.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + JSON + CHUNKED + b"zz\r\n")
            body = json.loads(read_all(sock).partition(b"\r\n\r\n")[2])
        assert set(body) == keys
        assert path != b"/api/chat" or isinstance(body["error"], str)


def test_what_is_no_http_behind_an_early_answer_ends_the_connection(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no place for another answer, and no traceback in the log for whoever likes to fill it."""
    with caplog.at_level(logging.ERROR), connected(server) as sock:
        sock.sendall(CHAT + b"Content-Type: text/plain\r\n" + CHUNKED + b"5\r\nhello\r\n")
        assert b" 415 " in read_answer(sock).split(b"\r\n")[0]
        sock.sendall(b"zz\r\n")
        assert read_all(sock) == b""
    assert not caplog.records
    assert_well(server)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"zz\r\n",
        CHAT + b"Content-Type: text/plain\r\n" + CHUNKED + b"zz\r\n",
        b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"zz\r\n",
    ],
    ids=["a body that nobody reads", "refused before it is read", "HEAD"],
)
def test_what_is_answered_without_its_body_is_answered_once(
    server: Server, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    """The application's answer comes at once too, behind that of HTTP: no traceback in the log of it."""
    with caplog.at_level(logging.ERROR), connected(server) as sock:
        sock.sendall(request_)
        seen = read_all(sock)
        assert_well(server)
        gc.collect()  # a task whose exception nobody took says so when it goes
    assert seen.startswith(b"HTTP/1.1 400 ")
    assert seen.count(b"HTTP/1.1 ") == 1
    assert not caplog.records


def test_headers_that_never_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a byte comes: the time runs from the first."""
    monkeypatch.setattr(Http11, "headers_s", 0.2)
    with serving(tmp_path) as server, connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert b" 400 " in sock.recv(1000).split(b"\r\n")[0]


def test_a_body_that_goes_on_behind_its_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a client that goes on sending; the next request of one that ends it is answered."""
    monkeypatch.setattr(Http11, "headers_s", 0.5)
    early = CHAT + b"Content-Type: text/plain\r\n" + CHUNKED + b"1\r\n \r\n"
    with serving(tmp_path) as server:
        with connected(server) as sock:
            sock.sendall(early)
            assert b" 415 " in read_answer(sock).split(b"\r\n")[0]
            sock.sendall(b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in read_answer(sock).split(b"\r\n")[0]
        with connected(server) as sock:
            sock.sendall(early)
            end = time.monotonic() + PATIENCE_S
            try:
                while time.monotonic() < end:
                    sock.sendall(b"1\r\n \r\n")
                    time.sleep(0.01)
            except (ConnectionResetError, BrokenPipeError):
                pass
            assert time.monotonic() < end, "it may dribble for ever"


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    requests = b""
    for text in ("first", "second"):
        data = json.dumps(chat_body(text)).encode()
        requests += CHAT + JSON + b"Content-Length: %d\r\n\r\n" % len(data) + data
    with connected(server) as sock:
        sock.sendall(requests)
        seen = b""
        while seen.count(b'"usage"') < 2:
            seen += sock.recv(4096)
    assert seen.index(b'"content":"first"') < seen.index(b'"content":"second"')


@pytest.mark.parametrize(
    "head", [b"Authorization: " + b"x" * (1 << 20), b"X-A: 1\r\n" * 20_000, b"no colon", b"\0: 1"]
)
def test_broken_or_giant_headers(server: Server, head: bytes) -> None:
    with connected(server) as sock:
        try:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
            status = sock.recv(1000).split(b"\r\n")[0]
        except (ConnectionResetError, BrokenPipeError):
            status = b" 400 "  # refused while it was still being sent
    assert b" 400 " in status
    assert_well(server)


def test_a_body_may_wait_for_100_continue_and_is_refused_before_it_is_sent(server: Server) -> None:
    data = json.dumps(chat_body("ok")).encode()
    expect = CHAT + JSON + b"Connection: close\r\nExpect: 100-continue\r\n"
    with connected(server) as sock:
        sock.sendall(expect + b"Content-Length: %d\r\n\r\n" % len(data))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data)
        assert b'"content":"ok"' in read_all(sock)
    with connected(server) as sock:
        sock.sendall(expect + b"Content-Length: 99999999\r\n\r\n")
        assert b" 413 " in read_all(sock).split(b"\r\n")[0]


def test_a_body_in_chunks(server: Server) -> None:
    data = json.dumps(chat_body("ok")).encode()
    chunks = b"".join(
        b"%x;a=b\r\n%s\r\n" % (len(data[i : i + 7]), data[i : i + 7]) for i in range(0, len(data), 7)
    )
    with connected(server) as sock:
        sock.sendall(CHAT + JSON + b"Connection: close\r\n" + CHUNKED + chunks + b"0\r\nX-Trailer: 1\r\n\r\n")
        assert b'"content":"ok"' in read_all(sock)


def test_a_body_in_chunks_without_end_is_refused_by_its_size_or_time(tmp_path: Path) -> None:
    with serving(tmp_path, max_body_bytes=1000, body_timeout_s=0.2) as server:
        for pieces, status in ((30, b" 413 "), (1, b" 408 ")):
            with connected(server) as sock:
                sock.sendall(CHAT + JSON + CHUNKED + b"64\r\n" + b" " * 100 + b"\r\n")
                for _ in range(pieces - 1):
                    sock.sendall(b"64\r\n" + b" " * 100 + b"\r\n")
                assert status in sock.recv(1000).split(b"\r\n")[0]
        assert_well(server)


def test_an_upgrade_is_not_taken_and_not_told_of(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    with caplog.at_level(logging.WARNING), connected(server) as sock:
        sock.sendall(head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n")
        assert b" 200 " in sock.recv(1000).split(b"\r\n")[0]
    assert not caplog.records


@pytest.mark.parametrize("method", ["GET", "A" * 3000])
def test_an_error_does_not_send_a_path_back(server: Server, method: str) -> None:
    answer = httpx.request(method, f"{server.url}/v1/{'x' * 30_000}")
    assert answer.status_code == 404
    assert len(answer.content) < 500
