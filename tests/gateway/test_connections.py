"""Connections: no delay, uvloop, clients that leave, and requests that are not what they should be."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from headrace import Runtime
from headrace.gateway.server import gateway, listen, server_of
from tests.gateway import shop
from tests.gateway.served import ServedApp, ask, ask_for_all, served_app
from tests.waiting import eventually

CALL = json.dumps({"function": "account.deposit", "key": "k", "args": [1]}).encode()


@pytest.fixture(scope="module")
def served() -> Iterator[ServedApp]:
    with served_app(shop.app) as found:
        yield found


def send(served: ServedApp, *parts: bytes) -> socket.socket:
    client = socket.create_connection(served.address, timeout=30)
    for part in parts:
        client.sendall(part)
    return client


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def response_of(client: socket.socket) -> tuple[int, Any]:
    with client, client.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.partition(b": ")
            length = int(value) if name == b"content-length" else length
        return status, json.loads(stream.read(length))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_connection_is_not_delayed(loop: Any) -> None:
    """Without it, a kept-alive connection waits 40 ms for each answer."""
    listener = listen("127.0.0.1", 0)
    with Runtime(shop.app) as runtime:
        server = uvicorn.Server(uvicorn.Config(gateway(runtime), log_level="error", loop=loop))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=30) as client:
                client.sendall(head("/v1/call", len(CALL)) + CALL)
                assert client.recv(12) == b"HTTP/1.1 200"
                [protocol] = server.server_state.connections
                accepted = protocol.transport.get_extra_info("socket").fileno()  # type: ignore[union-attr]
                with socket.socket(fileno=os.dup(accepted)) as same:
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            server.should_exit = True
            thread.join(20)


def test_the_server_runs_on_uvloop_and_httptools() -> None:
    with Runtime(shop.app) as runtime:
        config = server_of(gateway(runtime)).config
        config.load()
    assert config.http_protocol_class.__module__.endswith("httptools_impl")  # type: ignore[union-attr]
    assert config.get_loop_factory().__module__.startswith("uvloop")  # type: ignore[union-attr]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the server logs."""
    kept = Kept()
    names = ("uvicorn", "uvicorn.error", "asyncio", "headrace", "")
    for name in names:
        logging.getLogger(name).addHandler(kept)
    yield kept.records
    for name in names:
        logging.getLogger(name).removeHandler(kept)


@pytest.mark.parametrize("path", ["/v1/call", "/v1/batch", "/v1/calls", "/v1/rescale"])
def test_a_client_that_leaves_in_the_middle_is_no_traceback(
    served: ServedApp, logged: list[str], capfd: pytest.CaptureFixture[str], path: str
) -> None:
    ask(served.address, "GET", "/health")
    before = served.runtime.metrics()["committed"]
    send(served, head(path, 1_000), b'{"function": ').close()
    send(served, head(path, 1_000)).close()
    eventually(lambda: not served.server.server_state.connections and not served.server.server_state.tasks)
    assert ask(served.address, "GET", "/health")[0] == 200
    assert served.runtime.metrics()["committed"] == before
    assert logged == []
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_does_not_wait_for_its_answer_is_no_traceback(
    served: ServedApp, logged: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its call has been made, and runs."""
    shop.GATE.clear()
    before = served.runtime.metrics()["committed"]
    try:
        for _ in range(3):
            body = b'{"function": "thing.wait_at_the_gate", "key": "g"}'
            send(served, head("/v1/call", len(body)) + body).close()
        eventually(lambda: served.runtime.metrics()["pending"] == 3)
    finally:
        shop.GATE.set()
    eventually(lambda: not served.server.server_state.connections and not served.server.server_state.tasks)
    eventually(lambda: served.runtime.metrics()["committed"] == before + 3)
    assert logged == []
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_body_may_come_in_parts(served: ServedApp) -> None:
    for size in (1, 7, len(CALL)):
        client = send(served, head("/v1/call", len(CALL)), *(CALL[at : at + size] for at in range(0, len(CALL), size)))
        assert response_of(client)[0] == 200
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (CALL[:10], CALL[10:])) + b"0\r\n\r\n"
    lines = b"POST /v1/call HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert response_of(send(served, lines, chunks))[0] == 200


@pytest.mark.parametrize("path", ["/v1/call", "/v1/batch", "/v1/calls"])
def test_a_message_over_the_limit_is_refused(served: ServedApp, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wire.codec.MESSAGE_BYTES_MAX", 1_000)
    for body in (b" " * 1_001, b" " * 300_000):
        status, answer = ask(served.address, "POST", path, body)
        assert (status, answer["code"]) == (413, "too_large")


@pytest.mark.parametrize("path", ["/v1/call", "/v1/batch", "/v1/calls", "/v1/state/account", "/health", "/v1/rescale"])
def test_every_route_turns_strangers_away(served: ServedApp, path: str) -> None:
    method = "GET" if path in ("/health", "/v1/state/account") else "POST"
    for headers in (
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "user@evil.example"},
        {"Host": "[bad"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "localhost", "Origin": "http://localhost:99"},
    ):
        status, answer = ask(served.address, method, path, CALL if method == "POST" else None, **headers)
        assert (status, answer["status"], answer["code"]) == (403, "refused", "forbidden"), headers
    two = send(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert response_of(two)[0] in (400, 403)


def test_another_method_is_refused_with_the_one_to_use(served: ServedApp) -> None:
    for method, path, allowed in (
        ("GET", "/v1/call", "POST"),
        ("PUT", "/v1/batch", "POST"),
        ("DELETE", "/v1/state/account", "GET"),
    ):
        status, headers, answer = ask_for_all(served.address, method, path)
        assert (status, headers["allow"], json.loads(answer)["code"]) == (405, allowed, "method_not_allowed")


def test_what_is_no_route_is_not_found(served: ServedApp) -> None:
    for path in ("/v1/nothing", "/v1/callx", "/v1/call/", "/"):
        assert ask(served.address, "POST", path, CALL)[0] == 404
