"""The routes besides calls and state, by FastAPI:

POST /v1/rescale {"workers": 3}
POST /v1/snapshot
GET  /v1/app     operators and functions
GET  /metrics    /health
GET  /docs       /v1/openapi.json (openapi.py)
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from headrace.errors import BadMessage, HeadraceError, Stopped, TooLarge
from headrace.gateway.answers import json_encode, refusal_in_json
from headrace.gateway.front import ClientLeft
from headrace.gateway.openapi import describe
from headrace.gateway.statuses import OK
from headrace.runtime.driver import Driver
from headrace.wire import codec

UNHEALTHY = "A function is stuck, or the runtime has stopped: the error says why"


class JsonRescale(msgspec.Struct, forbid_unknown_fields=True):
    """The new number of workers."""

    workers: int


json_rescale = msgspec.json.Decoder(JsonRescale)


def other_routes(runtime: Driver) -> FastAPI:
    web = FastAPI(title=f"Headrace: {runtime.app.name}", openapi_url="/v1/openapi.json")
    program = runtime.engine.program

    @web.exception_handler(HeadraceError)
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadraceError)
        return json(refusal_in_json(error), error.http_status)

    @web.post("/v1/rescale")
    async def rescale(request: Request) -> Response:
        """Change the number of workers: `{"workers": 3}`."""
        workers = wanted_workers(await body_of(request))
        moved = await asyncio.to_thread(runtime.rescale, workers)
        return json({"status": "ok", "workers": workers, "moved_shards": moved})

    @web.post("/v1/snapshot")
    async def snapshot() -> Response:
        """Make a snapshot now."""
        taken = await asyncio.to_thread(runtime.snapshot)
        return json({"status": "ok", **taken})

    @web.get("/v1/app")
    async def app() -> Response:
        """The operators of the app, and their functions."""
        operators = {
            name: [str(program.functions[function].signature) for function in operator.functions.values()]
            for name, operator in runtime.app.operators.items()
        }
        return json({"app": runtime.app.name, "operators": operators})

    @web.get("/metrics")
    async def metrics() -> Response:
        """Counters."""
        return json(runtime.metrics())

    @web.get("/health", responses={Stopped.http_status: {"description": UNHEALTHY}})
    async def health() -> Response:
        """Whether it serves: the status "ok", or what is wrong."""
        told = runtime.health()
        return json(told, OK if told["status"] == "ok" else Stopped.http_status)

    describe(web, program)
    return web


def wanted_workers(body: bytes) -> int:
    try:
        return json_rescale.decode(body).workers
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a rescale: {error}") from None


async def body_of(request: Request) -> bytes:
    """The body. Raises `TooLarge` as soon as it is over the limit."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > codec.MESSAGE_BYTES_MAX:
                raise TooLarge(f"a message of more than {codec.MESSAGE_BYTES_MAX} bytes: send smaller batches")
            parts.append(part)
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(parts)


def json(value: Any, status: int = 200) -> Response:
    return Response(json_encode(value), status, media_type="application/json")
