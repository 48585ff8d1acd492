"""Requests that mean harm, as bytes on a socket of the real server: each has its status and code, and none ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval_service.access.config import Scope
from eval_service.access.keyring import Access, Keyring, Token, digest_of
from eval_service.gateway.bodies import MAX_BODY_BYTES
from eval_service.serve.bounded_protocol import HEAD_BYTES
from eval_service.serve.http_server import HttpServer
from tests.support.api import Api

TOKEN = "the-token-of-this-test"
AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()
HOST = b"Host: gateway\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SLOW_S = 0.5  # of the server that is slow clients' alone
PATIENCE_S = 20.0


def request(line: bytes, *lines: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    """One request with a token; `body` with its length, unless another is told."""
    told = len(body) if length is None else length
    size = b"Content-Length: %d\r\n" % told if body or length is not None else b""
    return line + b" HTTP/1.1\r\n" + HOST + AUTH + b"".join(lines) + size + b"\r\n" + body


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    return request(b"POST " + path, JSON, *lines, body=body)


def dispatch(**fields: object) -> bytes:
    whole = {"run": "r1", "step": 1, "reservation": "0" * 32, "wait_s": 0, **fields}
    return post(b"/dispatch", json.dumps(whole).encode())


def bare(line: bytes, *lines: bytes) -> bytes:
    return line + b"\r\n" + b"".join(lines) + b"\r\n"


@dataclass(frozen=True)
class Hostile:
    """What is sent, and what has to come back; status 0: the connection is closed without an answer."""

    name: str
    sent: bytes
    status: int
    code: str | None


DEEP = b"[" * 100_000
TABLE = (
    # --- paths
    Hostile("a path that climbs", request(b"GET /../../etc/passwd"), 404, "not_found"),
    Hostile("a path that climbs, escaped", request(b"GET /runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd"), 404, "not_found"),
    Hostile("a file of the dashboard that is none", request(b"GET /dashboard/..%2f..%2fapp.py"), 404, "not_found"),
    Hostile(
        "a run that climbs",
        request(b"PUT /runs/..", JSON, body=b'{"root": "/", "suites": ["main"]}'),
        422,
        "invalid_request",
    ),
    Hostile("a run that is a path", dispatch(run="../../../tmp/x"), 422, "invalid_request"),
    Hostile("a run with a line break", dispatch(run="r1\r\nSet-Cookie: a=b"), 422, "invalid_request"),
    Hostile("a snapshot outside the roots", dispatch(snapshot="/etc"), 422, "invalid_request"),
    Hostile("a snapshot that climbs out", dispatch(snapshot="/tmp/../etc"), 422, "invalid_request"),
    Hostile("a snapshot with a NUL", dispatch(snapshot="/tmp/a\0b"), 422, "invalid_request"),
    Hostile("a NUL in the path", request(b"GET /points/a%00b"), 422, "invalid_request"),
    Hostile("a NUL in the query", request(b"GET /points?run=a%00b"), 422, "invalid_request"),
    Hostile("a path that is no UTF-8", request(b"GET /runs/%ff%fe"), 404, "not_found"),
    Hostile("a very long path", request(b"GET /runs/" + b"a" * 60_000), 404, "not_found"),
    Hostile("a whole address as the path", request(b"GET http://169.254.169.254/latest/"), 404, "not_found"),
    Hostile("no path at all", request(b"OPTIONS *"), 404, "not_found"),
    Hostile("a tunnel", request(b"CONNECT 169.254.169.254:80"), 400, "bad_request"),
    # --- sizes
    Hostile(
        "a head that is too large",
        request(b"GET /runs", *[b"X-%d: %b\r\n" % (n, b"a" * 4000) for n in range(20)]),
        431,
        "head_too_large",
    ),
    Hostile(
        "one header that is too large",
        request(b"GET /runs", b"X: " + b"a" * (HEAD_BYTES + 1) + b"\r\n"),
        431,
        "head_too_large",
    ),
    Hostile("an address that is too large", request(b"GET /" + b"a" * (HEAD_BYTES + 1)), 431, "head_too_large"),
    Hostile("a header that never ends", b"GET / HTTP/1.1\r\nX: " + b"a" * (4 * HEAD_BYTES), 431, "head_too_large"),
    Hostile("a body that is too large", post(b"/dispatch", b" " * (MAX_BODY_BYTES + 1)), 413, "too_large"),
    Hostile("a body said to be huge", request(b"POST /dispatch", JSON, length=10**18), 413, "too_large"),
    Hostile(
        "a length beyond all numbers",
        bare(b"POST /dispatch HTTP/1.1", HOST, AUTH, b"Content-Length: " + b"9" * 60 + b"\r\n"),
        400,
        "bad_request",
    ),
    Hostile(
        "a negative length", bare(b"POST /dispatch HTTP/1.1", HOST, AUTH, b"Content-Length: -1\r\n"), 400, "bad_request"
    ),
    Hostile(
        "two lengths",
        bare(b"POST /dispatch HTTP/1.1", HOST, AUTH, b"Content-Length: 2\r\nContent-Length: 5\r\n") + b"{}",
        400,
        "bad_request",
    ),
    Hostile(
        "a length and chunks",
        request(b"POST /dispatch", JSON, CHUNKED, body=b"0\r\n\r\n", length=5),
        400,
        "bad_request",
    ),
    Hostile(
        "chunks without end",
        request(b"POST /dispatch", JSON, CHUNKED) + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 20,
        413,
        "too_large",
    ),
    Hostile(
        "a chunk of no size", request(b"POST /dispatch", JSON, CHUNKED) + b"zz\r\n{}\r\n0\r\n\r\n", 400, "bad_request"
    ),
    # --- encodings and bodies
    Hostile("a body that is no UTF-8", post(b"/dispatch", b'{"run": "\xff\xfe"}'), 422, "invalid_request"),
    Hostile("a body of UTF-16", post(b"/dispatch", '{"run": "r1"}'.encode("utf-16")), 422, "invalid_request"),
    Hostile("keys twice", post(b"/runs/r1/progress", b'{"step": 1, "step": -5}'), 422, "invalid_request"),
    Hostile("a very deep body", post(b"/dispatch", DEEP), 422, "invalid_request"),
    Hostile("a huge number", post(b"/runs/r1/progress", b'{"step": ' + b"9" * 5000 + b"}"), 422, "invalid_request"),
    Hostile("a number beyond floats", post(b"/dispatch", b'{"run": "r1", "step": 1e999}'), 422, "invalid_request"),
    Hostile("no number", post(b"/drain", b'{"run": "r1", "timeout_s": NaN}'), 422, "invalid_request"),
    Hostile(
        "a form",
        request(b"POST /dispatch", b"Content-Type: application/x-www-form-urlencoded\r\n", body=b"run=r1&step=1"),
        422,
        "invalid_request",
    ),
    Hostile(
        "a body that is packed",
        post(b"/dispatch", b"\x1f\x8b\x08\x00" * 8, b"Content-Encoding: gzip\r\n"),
        422,
        "invalid_request",
    ),
    Hostile("markup and SQL", request(b"GET /points?run=%27%20OR%201=1;--%3Cscript%3E"), 404, "not_found"),
    Hostile("a huge offset", request(b"GET /points?offset=" + b"9" * 400), 422, "invalid_request"),
    Hostile("a NUL in a text", post(b"/points/x/report", b'{"detail": "a\\u0000b"}'), 404, "not_found"),
    # --- headers and tokens
    Hostile("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "bad_request"),
    Hostile("a version that there is not", b"GET /runs HTTP/9.9\r\n" + HOST + AUTH + b"\r\n", 400, "bad_request"),
    Hostile("a method that there is not", request(b"HACK /runs"), 400, "bad_request"),
    Hostile("a method that no route has", request(b"TRACE /runs"), 405, "method_not_allowed"),
    Hostile("a header with a NUL", request(b"GET /runs", b"X: a\0b\r\n"), 400, "bad_request"),
    Hostile(
        "a header folded into a second",
        request(b"GET /runs", b"X: a\r\n Authorization: Bearer b\r\n"),
        400,
        "bad_request",
    ),
    Hostile("a space before the colon", request(b"GET /runs", b"X : a\r\n"), 400, "bad_request"),
    Hostile(
        "an event number that is none", request(b"GET /events", b"Last-Event-ID: 1 OR 1=1\r\n"), 422, "invalid_request"
    ),
    Hostile(
        "an upgrade",
        request(b"GET /runs", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n"),
        200,
        None,
    ),
    Hostile("no token", bare(b"GET /runs HTTP/1.1", HOST), 401, "unauthorized"),
    Hostile("no token, and no such route", bare(b"GET /admin HTTP/1.1", HOST), 401, "unauthorized"),
    Hostile(
        "no token, and a body that is too large",
        bare(b"POST /dispatch HTTP/1.1", HOST, b"Content-Length: 99999999\r\n"),
        401,
        "unauthorized",
    ),
    Hostile(
        "a wrong token",
        bare(b"GET /runs HTTP/1.1", HOST, b"Authorization: Bearer " + b"x" * 40 + b"\r\n"),
        401,
        "unauthorized",
    ),
    Hostile(
        "a token of bytes",
        bare(b"GET /runs HTTP/1.1", HOST, b"Authorization: Bearer \xff\xfe\xfd\r\n"),
        401,
        "unauthorized",
    ),
    Hostile(
        "two tokens",
        bare(b"GET /runs HTTP/1.1", HOST, AUTH, b"Authorization: Bearer other-token-of-20\r\n"),
        401,
        "unauthorized",
    ),
    Hostile("a token in the address", bare(b"GET /runs?token=%b HTTP/1.1" % TOKEN.encode(), HOST), 401, "unauthorized"),
)
LATE = (
    Hostile("half a head, and then nothing", b"GET /runs HTTP/1.1\r\nHost: gate", 408, "too_slow"),
    Hostile("nothing at all", b"", 0, None),
    Hostile(
        "half a body, and then nothing", request(b"POST /dispatch", JSON, body=b'{"run": ', length=100), 408, "too_slow"
    ),
    Hostile("half a chunk, and then nothing", request(b"POST /dispatch", JSON, CHUNKED) + b"5\r\n{", 408, "too_slow"),
)


@contextlib.contextmanager
def listening(base: Path, patience_s: float) -> Iterator[HttpServer]:
    """The real server over the real routes, with one token; a head and a body may take so long."""
    known = Keyring((Token("all", Scope.ADMIN, (digest_of(TOKEN.encode()),)),))
    api = Api(base, access=Access(known), body_s=patience_s)
    server = HttpServer(lambda: api.app, "127.0.0.1", 0, grace_s=1.0, head_s=patience_s)
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that waits as long as the tests do."""
    with listening(tmp_path_factory.mktemp("hostile"), PATIENCE_S) as found:
        yield found.port


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Of one that does not."""
    with listening(tmp_path_factory.mktemp("hasty"), SLOW_S) as found:
        yield found


def answer(port: int, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the first answer; status 0 where there is none."""
    with connected(port) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read to its end
            connection.sendall(sent)
        return answer_on(connection)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@contextlib.contextmanager
def sent_to(hasty: HttpServer, sent: bytes) -> Iterator[socket.socket]:
    """A connection on which this was sent before the server took it: its time is not that of a client that pauses."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(PATIENCE_S)

    hasty._thread.soon(hold)
    try:
        assert held.wait(PATIENCE_S)
        connection = connected(hasty.port)
        connection.sendall(sent)
    finally:
        go_on.set()
    with connection:
        yield connection


def answer_on(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """See `answer`."""
    data = b""
    while b"\r\n\r\n" not in data or not whole(data):
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            break
        if not part:
            break
        data += part
    if not data:
        return 0, {}, b""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in lines}, body


def whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length: "):
            return len(body) >= int(line.split()[1])
    return False


@pytest.mark.parametrize("hostile", TABLE, ids=lambda hostile: hostile.name)
def test_a_hostile_request_has_its_status_and_code_and_the_service_goes_on(port: int, hostile: Hostile) -> None:
    check(hostile, *answer(port, hostile.sent))
    assert answer(port, request(b"GET /healthz"))[0] == 200


@pytest.mark.parametrize("hostile", LATE, ids=lambda hostile: hostile.name)
def test_a_request_that_does_not_come_to_its_end_is_over_in_time_and_the_service_goes_on(
    hasty: HttpServer, hostile: Hostile
) -> None:
    with sent_to(hasty, hostile.sent) as connection:
        check(hostile, *answer_on(connection))
    with sent_to(hasty, request(b"GET /healthz")) as connection:
        assert answer_on(connection)[0] == 200


def check(hostile: Hostile, status: int, headers: dict[str, str], body: bytes) -> None:
    assert status == hostile.status, body
    if status:
        assert headers["x-content-type-options"] == "nosniff"
        assert (json.loads(body)["error"]["code"] if hostile.code else None) == hostile.code
        assert TOKEN.encode() not in body
        assert "set-cookie" not in headers


def test_there_are_forty_of_them_and_no_two_alike() -> None:
    whole = TABLE + LATE
    assert len({hostile.sent for hostile in whole}) == len({hostile.name for hostile in whole}) == len(whole) >= 40


def test_an_answer_is_followed_by_the_end_of_a_connection_that_goes_on_sending_rubbish(hasty: HttpServer) -> None:
    """Clients that never end their body could hold connections for ever."""
    with sent_to(hasty, request(b"GET /healthz", CHUNKED)) as connection:
        assert b"200 OK" in connection.recv(1 << 16)
        assert ends(lambda: connection.sendall(b"1\r\n \r\n"))


def test_a_head_that_comes_a_byte_at_a_time_is_over_when_its_time_is(hasty: HttpServer) -> None:
    with connected(hasty.port) as connection:
        head = iter(b"GET /healthz HTTP/1.1\r\n" + b"X: a\r\n" * 10_000)
        assert ends(lambda: connection.sendall(bytes([next(head)])))


def ends(send: Callable[[], None]) -> bool:
    """Whether sending fails before long."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            send()
        except (BrokenPipeError, ConnectionResetError):
            return True
        time.sleep(0.02)
    return False
