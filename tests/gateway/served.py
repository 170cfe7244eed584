"""An app behind a real server on a free port, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn

from headrace import App, Config, Runtime
from headrace.gateway.server import gateway, listen, server_of
from headrace.runtime.driver import Driver

Address = tuple[str, int]


class ServedApp(NamedTuple):
    address: Address
    runtime: Driver
    server: uvicorn.Server


@contextlib.contextmanager
def served_app(app: App, config: Config | None = None, runtime: Driver | None = None) -> Iterator[ServedApp]:
    listener = listen("127.0.0.1", 0)
    with runtime or Runtime(app, config) as runtime:
        server = server_of(gateway(runtime))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield ServedApp(listener.getsockname(), runtime, server)
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()


def ask(address: Address, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """A body that is not bytes is sent as JSON."""
    status, _, answer = ask_for_all(address, method, path, body, **headers)
    return status, json.loads(answer)


def ask_for_all(
    address: Address, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()
