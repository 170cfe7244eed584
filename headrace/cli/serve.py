"""`headrace run`, `headrace call` and `headrace rescale`: an app behind HTTP, and what can be asked of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from types import FrameType
from typing import Any

import uvicorn
from rich import markup
from rich.console import Console

from headrace.errors import BadRequest, Unreachable
from headrace.runtime import garbage
from headrace.runtime.cluster import Cluster
from headrace.runtime.driver import Driver
from headrace.runtime.gateway import gateway
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load


def serve(target: str, host: str, port: int, workers: int, mode: str, store: str | None = None) -> None:
    """Run the app named by `target` and serve it, until it is interrupted. Asked to end, it ends in peace."""
    signal.signal(signal.SIGTERM, leave)
    app = load(target)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        raise BadRequest(f"cannot serve on {host}:{port}: {error.strerror}; choose another with --port") from None
    url = f"http://{host}:{listener.getsockname()[1]}"
    if workers == 1 and mode == "ordered":
        raise BadRequest("the ordered mode is for several workers: add --workers 2")
    with (
        listener,
        Runtime(app, store=store) if workers == 1 else Cluster(target, workers, mode=mode, store=store) as runtime,
    ):
        explain(runtime, url, store)
        web = gateway(runtime, hosts=("127.0.0.1", "localhost", "::1", host))
        garbage.settle()
        server = uvicorn.Server(uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=5))
        threading.Thread(target=end_with, args=(runtime, server), daemon=True).start()
        server.run(sockets=[listener])
    runtime.wait()


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def end_with(runtime: Driver, server: uvicorn.Server) -> None:
    """A runtime that has stopped itself (another one took over, the disk is full) is served no longer."""
    with contextlib.suppress(BaseException):  # told when the server has ended
        runtime.wait()
    server.should_exit = True


def explain(runtime: Driver, url: str, store: str | None) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(
        f"[bold]{runtime.app.name}[/] is served at [cyan]{url}[/]  "
        f"(Ctrl-C stops it; its state is in {'memory' if store is None else markup.escape(store)})"
    )
    figures = runtime.metrics()
    if figures["workers"] > 1:
        out.print(
            f"{figures['workers']} workers, {figures['mode']} mode: headrace rescale <workers> --url {url}",
            markup=False,
        )
    functions = [runtime.engine.program.functions[function].signature for function in runtime.app.functions]
    for signature in functions:
        out.print(f"  {signature}", markup=False)
    if functions:
        example = " ".join(f"<{name}>" for name in functions[0].names)
        out.print(f"Try: headrace call {functions[0].name} <key> {example} --url {url}", markup=False)


def call(
    url: str, function: str, key: str | int, args: list[str], request_id: str | None
) -> tuple[str, dict[str, Any]]:
    """Status and answer of one call."""
    wanted = {"function": function, "key": key, "args": [parse(arg) for arg in args], "request_id": request_id}
    return post(url, "/v1/call", wanted)


def post(url: str, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Status and answer of a request."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise BadRequest(f"{url!r} is no address; http://127.0.0.1:8090 would be one")
    request = urllib.request.Request(
        url.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"nothing answers at {url}: {reason}. Is `headrace run` running?") from None
    return answer["status"], answer


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
