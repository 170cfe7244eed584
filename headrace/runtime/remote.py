"""A client of a Headrace app that runs elsewhere: the same methods, over HTTP."""

from __future__ import annotations

import http.client
import threading
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.config import Config
from headrace.core.admission import KeywordCall, failure_of, take_apart
from headrace.errors import REFUSALS, BadMessage, BadRequest, UnknownFunction, Unreachable
from headrace.model.app import App
from headrace.model.operator import Function
from headrace.runtime.client import Client, Replies
from headrace.wire import codec
from headrace.wire.messages import Answers, Calls, Failure, RequestIds, id_of, with_refused
from headrace.wire.values import Values, check_key, shown


def connect(url: str = "http://127.0.0.1:8090", app: App | None = None) -> RemoteClient:
    """A client for what `headrace run` serves at `url`. Pass the `app` if arguments or results hold dataclasses or
    structs."""
    return RemoteClient(url, app)


class RemoteClient(Client):
    """Calls functions over HTTP. A call that got no answer can be repeated with its request id: it runs once."""

    def __init__(self, url: str, app: App | None = None, *, timeout_s: float = 60.0, connections: int = 4) -> None:
        super().__init__()
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BadRequest(f"{url!r} is not a valid URL; give one such as http://127.0.0.1:8090")
        self._url, self._host, self._port, self._timeout_s = url, parts.hostname, parts.port or 80, timeout_s
        self._values = Values(app.records() if app else ())
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="headrace-client")
        self._local = threading.local()

    def submit(self, ids: RequestIds, calls: Sequence[Any], wait: bool) -> Future[Replies]:
        """A call that cannot be encoded is refused here; the others are sent."""
        names: list[str] = []
        keys: list[Any] = []
        arguments: list[bytes] = []
        keywords: list[list[str]] = []
        refused: dict[int, Failure] = {}
        for position, call in enumerate(calls):
            try:
                name, key, args, named = self._encode(call)
            except BadRequest as error:
                refused[position] = failure_of(error)
            else:
                names.append(name)
                keys.append(key)
                arguments.append(args)
                keywords.append(named)
        sent = [id_of(ids, at) for at in range(len(calls)) if at not in refused] if refused else ids
        message = codec.encode(Calls(sent, names, keys, arguments, keywords if any(keywords) else []))
        return self._pool.submit(self._exchange, message, ids, refused)

    def _encode(self, call: Any) -> tuple[str, Any, bytes, list[str]]:
        """Function, key, arguments, and the names of the last ones. The server puts them into their places."""
        named = call.kwargs if type(call) is KeywordCall else {}
        apart = take_apart((call.function, call.key, *call.args, *named.values()) if named else call)
        if isinstance(apart, BadRequest):
            raise apart
        function, key, args = apart
        name = function.full_name if isinstance(function, Function) else function
        if type(name) is not str:
            raise UnknownFunction(f"{shown(function)} is not a registered function, nor the name of one")
        check_key(key, Config().key_bytes_max)
        return name, key, self._values.encode(args), list(named)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, message: bytes, ids: RequestIds, refused: dict[int, Failure]) -> Replies:
        answer = codec.decode(self._post(message))
        if isinstance(answer, Answers):
            return Replies(with_refused(answer, ids, refused), self._values.unseal)
        if isinstance(answer, Calls):
            raise BadMessage("the server answered with a request")
        raise REFUSALS.get(answer.failure.code, BadRequest)(answer.failure.message)

    def _post(self, message: bytes) -> bytes:
        """The connection is kept for the next call. If the server has closed it, it is opened again, once: thanks to
        the request ids nothing runs twice."""
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None:
            try:
                return self._try_post(kept, message)
            except (ConnectionError, http.client.HTTPException):
                kept.close()
            except OSError as error:  # it timed out
                raise self._unreachable(kept, error) from None
        connection = self._local.connection = http.client.HTTPConnection(
            self._host, self._port, timeout=self._timeout_s
        )
        try:
            return self._try_post(connection, message)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(connection, error) from None

    def _unreachable(self, connection: http.client.HTTPConnection, error: Exception) -> Unreachable:
        connection.close()
        self._local.connection = None
        return Unreachable(f"no answer from {self._url}: {error or type(error).__name__}")

    def _try_post(self, connection: http.client.HTTPConnection, message: bytes) -> bytes:
        connection.request("POST", "/v1/calls", message, {"Content-Type": "application/msgpack"})
        return connection.getresponse().read()
