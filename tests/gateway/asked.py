"""Requests to a gateway without a server: many in one turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from headrace.gateway.front import Front


class Asked(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


async def ask_front(front: Front, method: str, path: str, body: Any = None, query: str = "", **headers: str) -> Asked:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:80"} | headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("127.0.0.1", 80),
    }
    await front(scope, receive, send)
    start, *rest = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return Asked(start["status"], told, json.loads(b"".join(each.get("body", b"") for each in rest)))


async def ask_at_once(front: Front, *calls: dict[str, Any]) -> list[Asked]:
    """Calls in one turn."""
    return await asyncio.gather(*(ask_front(front, "POST", "/v1/call", call) for call in calls))
