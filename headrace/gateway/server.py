"""The server around a gateway: its socket, and uvicorn with uvloop and httptools."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import uvicorn

from headrace.errors import BadRequest
from headrace.gateway.call_routes import CallRoutes
from headrace.gateway.front import Front
from headrace.gateway.other_routes import other_routes
from headrace.runtime.driver import Driver

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 2_048
STOP_S_MAX = 5
KEPT_S = 75  # how long a connection may be idle: clients keep them for a minute or so


def gateway(runtime: Driver, hosts: Sequence[str] = LOOPBACK) -> Front:
    """The web app. `hosts` are the names under which it may be called: requests for other names are refused, and so are
    requests from web pages of other sites."""
    return Front(CallRoutes(runtime).routes(), other_routes(runtime), hosts)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. It says that it is TCP: only then does asyncio turn off Nagle's algorithm, which delays
    the second of two small packets until the first is acknowledged, by 40 ms or more."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadRequest(f"cannot serve on {host}:{port}: {error.strerror}; choose another port with --port") from None
    return listener


def server_of(web: Front) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            web,
            loop="uvloop",
            http="httptools",
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEPT_S,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S_MAX,
        )
    )
