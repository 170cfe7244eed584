"""A client of a Headrace that runs elsewhere: the same methods, over HTTP."""

from __future__ import annotations

import http.client
import threading
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.errors import REFUSALS, BadMessage, BadRequest, Unreachable
from headrace.model.app import App
from headrace.model.operator import Function
from headrace.runtime.client import Call, Client, Replies
from headrace.wire import codec
from headrace.wire.messages import Answers, Calls, RequestIds
from headrace.wire.values import Values


def connect(url: str = "http://127.0.0.1:8090", app: App | None = None) -> RemoteClient:
    """A client for what `headrace run` serves at `url`. Give the `app` if dataclasses or structs travel."""
    return RemoteClient(url, app)


class RemoteClient(Client):
    """Calls functions over HTTP. A call that got no answer may be repeated with its request id: it runs once."""

    def __init__(self, url: str, app: App | None = None, *, timeout_s: float = 60.0, connections: int = 4) -> None:
        super().__init__()
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BadRequest(f"{url!r} is no address; http://127.0.0.1:8090 would be one")
        self._url, self._host, self._port, self._timeout_s = url, parts.hostname, parts.port or 80, timeout_s
        self._values = Values(app.records() if app else ())
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="headrace-client")
        self._local = threading.local()

    def submit(self, ids: RequestIds, calls: Sequence[Call], wait: bool) -> Future[Replies]:
        names = [call[0].full_name if isinstance(call[0], Function) else call[0] for call in calls]
        args = [self._values.encode(tuple(call[2:])) for call in calls]
        message = codec.encode(Calls(ids, names, [call[1] for call in calls], args))
        return self._pool.submit(self._exchange, message)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, message: bytes) -> Replies:
        answer = codec.decode(self._post(message))
        if isinstance(answer, Answers):
            return Replies(answer, self._values.unseal)
        if isinstance(answer, Calls):
            raise BadMessage("the server answered with a request")
        raise REFUSALS.get(answer.failure.code, BadRequest)(answer.failure.message)

    def _post(self, message: bytes) -> bytes:
        connection: Any = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            self._local.connection = connection
        try:
            connection.request("POST", "/v1/calls", message, {"Content-Type": "application/msgpack"})
            return bytes(connection.getresponse().read())
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            connection.close()
            self._local.connection = None
            raise Unreachable(f"no answer from {self._url}: {error or type(error).__name__}") from None
