"""`headrace run` and `headrace call`: an app behind HTTP, and a call to it."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import uvicorn
from rich.console import Console

from headrace.errors import BadRequest, ModelError, Unreachable
from headrace.model.app import App
from headrace.runtime.gateway import gateway
from headrace.runtime.inprocess import Runtime


def load(target: str) -> App:
    """The app named by "module:attribute"."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ModelError(f"{target!r} names no app: give module:attribute, as in examples.bank:app")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        raise ModelError(f"no module {module_name!r} here; run it from the folder that holds it") from None
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        apps = [name for name, value in vars(module).items() if isinstance(value, App)]
        known = f"it has: {', '.join(apps)}" if apps else "it has no App at all"
        raise ModelError(f"{attribute!r} in module {module_name!r} is no App; {known}")
    return found


def serve(app: App, host: str, port: int) -> None:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        raise BadRequest(f"cannot serve on {host}:{port}: {error.strerror}; choose another with --port") from None
    url = f"http://{host}:{listener.getsockname()[1]}"
    with Runtime(app) as runtime:
        explain(runtime, url)
        web = gateway(runtime, hosts=("127.0.0.1", "localhost", "::1", host))
        config = uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])


def explain(runtime: Runtime, url: str) -> None:
    out = Console(highlight=False)
    out.print(f"[bold]{runtime.app.name}[/] is served at [cyan]{url}[/]  (Ctrl-C stops it; its state is in memory)")
    functions = [runtime.engine.program.functions[function].signature for function in runtime.app.functions]
    for signature in functions:
        out.print(f"  {signature}", markup=False)
    if functions:
        example = " ".join(f"<{name}>" for name in functions[0].names)
        out.print(f"Try: headrace call {functions[0].name} <key> {example} --url {url}", markup=False)


def post(
    url: str, function: str, key: str | int, args: list[str], request_id: str | None
) -> tuple[str, dict[str, Any]]:
    """Status and answer of one call."""
    call = {"function": function, "key": key, "args": [parse(arg) for arg in args], "request_id": request_id}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/call", json.dumps(call).encode(), {"Content-Type": "application/json"}
    )
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise BadRequest(f"{url!r} is no address; http://127.0.0.1:8090 would be one")
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
