"""`headrace run`, `headrace call` and `headrace rescale`: an app behind HTTP, and what can be asked of it."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import uvicorn
from rich.console import Console

from headrace.errors import BadRequest, Unreachable
from headrace.runtime.cluster import Cluster
from headrace.runtime.driver import Driver
from headrace.runtime.gateway import gateway
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load


def serve(target: str, host: str, port: int, workers: int, mode: str) -> None:
    """Run the app named by `target` and serve it, until it is interrupted."""
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
    with listener, Runtime(app) if workers == 1 else Cluster(target, workers, mode=mode) as runtime:
        explain(runtime, url)
        web = gateway(runtime, hosts=("127.0.0.1", "localhost", "::1", host))
        config = uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])


def explain(runtime: Driver, url: str) -> None:
    out = Console(highlight=False)
    out.print(f"[bold]{runtime.app.name}[/] is served at [cyan]{url}[/]  (Ctrl-C stops it; its state is in memory)")
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
