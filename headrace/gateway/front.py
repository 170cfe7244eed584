"""The front of the gateway: turns strangers away, sends calls and reads to plain handlers, and the rest to FastAPI.

A handler gets a `WebRequest` and answers it. An error of Headrace becomes a refusal, in the form of the request. If the
client leaves, nobody is answered and nothing is logged.
"""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.core.admission import failure_of
from headrace.errors import Forbidden, HeadraceError, MethodNotAllowed, TooLarge
from headrace.gateway.answers import JSON, MSGPACK, Receive, Scope, Send, json_encode, refusal_in_json, respond
from headrace.gateway.statuses import OK
from headrace.wire import codec
from headrace.wire.messages import Refusal

RETRY_S = b"1"  # what a client is told to wait if the server has no room


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class WebRequest:
    """One HTTP request, and how it is answered."""

    __slots__ = ("_receive", "_send", "scope")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    async def body(self) -> bytes:
        """The whole body. Raises `TooLarge` as soon as it is over the limit."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._check_size(len(message.get("body", b"")))
            return message.get("body", b"")  # type: ignore[no-any-return]
        parts, size = [], 0
        while True:
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_size(size)
            if not message.get("more_body"):
                return b"".join(parts)
            message = await self._receive()

    def _check_size(self, size: int) -> None:
        if size > codec.MESSAGE_BYTES_MAX:
            raise TooLarge(f"a message of more than {codec.MESSAGE_BYTES_MAX} bytes: send smaller batches")

    async def answer(self, value: Any, status: int = OK) -> None:
        await respond(self._send, json_encode(value), status)

    async def answer_bytes(self, body: bytes, kind: bytes = JSON) -> None:
        await respond(self._send, body, OK, kind)

    async def refuse(self, error: HeadraceError) -> None:
        more = [(b"retry-after", RETRY_S)] if error.retry else []
        if isinstance(error, MethodNotAllowed):
            more.append((b"allow", error.allowed.encode()))
        if (b"content-type", MSGPACK) in self.scope["headers"]:
            body = codec.encode(Refusal(failure_of(error)))
            await respond(self._send, body, error.http_status, MSGPACK, *more)
        else:
            await respond(self._send, json_encode(refusal_in_json(error)), error.http_status, JSON, *more)


Handler = Callable[[WebRequest], Awaitable[None]]
Rest = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """The web app, for an ASGI server. `routes` are paths with their method and handler; a path that ends with / stands
    for all that begin with it."""

    def __init__(self, routes: dict[str, tuple[str, Handler]], rest: Rest, hosts: Sequence[str]) -> None:
        self._routes, self._rest, self.hosts = routes, rest, tuple(hosts)
        self._prefixes = [path for path in routes if path.endswith("/")]
        self._is_ours = functools.lru_cache(maxsize=256)(self._is_one_of_ours)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        request = WebRequest(scope, receive, send)
        try:
            self._turn_away_strangers(scope)
            handler = self._handler(scope["path"], scope["method"])
            if handler is None:
                await self._rest(scope, receive, send)
            else:
                await handler(request)
        except HeadraceError as error:
            await request.refuse(error)
        except ClientLeft:
            pass

    def _handler(self, path: str, method: str) -> Handler | None:
        route = self._routes.get(path)
        if route is None:
            route = next((self._routes[prefix] for prefix in self._prefixes if path.startswith(prefix)), None)
        if route is None:
            return None
        wanted, handler = route
        if method != wanted:
            raise MethodNotAllowed(f"{path} takes {wanted}, not {method}", wanted)
        return handler

    def _turn_away_strangers(self, scope: Scope) -> None:
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None and host != value:
                    raise Forbidden("the request names two hosts")
                host = value
            elif name == b"origin":
                origin = value
        if host is None:
            name, port = scope.get("server") or ("", None)
            host = f"{name}:{port}".encode("latin-1")
        if not self._is_ours(host, origin):
            raise Forbidden(f"host or origin not allowed; allowed hosts: {', '.join(self.hosts)}")

    def _is_one_of_ours(self, host: bytes, origin: bytes | None) -> bool:
        """Whether it is called by one of its names, and not from a web page of another site."""
        named = host.decode("latin-1")
        try:
            is_named = urllib.parse.urlsplit(f"//{named}").hostname in self.hosts
            came_from = urllib.parse.urlsplit((origin or b"").decode("latin-1")).netloc
        except ValueError:
            return False
        return is_named and (not origin or came_from == named)
