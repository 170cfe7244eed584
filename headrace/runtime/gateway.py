"""The HTTP gateway of a runtime: JSON for people and other languages, msgpack for `RemoteClient`.

    POST /v1/call    {"function": "account.transfer", "key": "alice", "args": ["bob", 5], "request_id": "optional"}
                     or, by name, "args": {"to": "bob", "amount": 5}
    POST /v1/calls   a `Calls` message, answered by an `Answers` message (application/msgpack)
    GET  /v1/state/{operator}/{key}
    POST /v1/rescale {"workers": 3}
    POST /v1/snapshot
    GET  /v1/app     operators and functions
    GET  /metrics    /health

A status of 200 has a result; 409 and "aborted" means that the call ran and was undone; "refused" means that nothing
changed, except with the code "answer_too_large": the calls ran, and only their answers could not be sent. Binds to
loopback: there is no authentication yet.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from headrace.core.admission import KeywordCall, failure_of
from headrace.errors import REFUSALS, AnswerTooLarge, BadKey, BadMessage, BadRequest, Forbidden, HeadraceError, TooLarge
from headrace.runtime.client import Reply
from headrace.runtime.driver import Driver
from headrace.wire import codec
from headrace.wire.messages import Calls, Refusal

MSGPACK = "application/msgpack"
Wanted = TypeVar("Wanted")


class JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    """One call, in JSON."""

    function: str
    key: str | int
    args: list[Any] | dict[str, Any] = []
    request_id: str | None = None


class JsonRescale(msgspec.Struct, forbid_unknown_fields=True):
    """The new number of workers."""

    workers: int


json_encode = msgspec.json.Encoder(enc_hook=repr).encode
json_call = msgspec.json.Decoder(JsonCall)
json_rescale = msgspec.json.Decoder(JsonRescale)


def gateway(runtime: Driver, hosts: Sequence[str] = ("127.0.0.1", "localhost", "::1")) -> FastAPI:
    """The web app. `hosts` are the names under which it may be called: requests for other names are refused, and so are
    requests from web pages of other sites."""
    web = FastAPI(title=f"Headrace: {runtime.app.name}", openapi_url="/v1/openapi.json")
    program = runtime.engine.program

    @web.exception_handler(HeadraceError)
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadraceError)
        if request.headers.get("content-type") == MSGPACK:
            return Response(codec.encode(Refusal(failure_of(error))), error.http_status, media_type=MSGPACK)
        answer = {"status": "refused", "code": error.code, "error": str(error), "retry": error.retry}
        return json(answer, error.http_status)

    @web.middleware("http")
    async def turn_away_strangers(request: Request, go_on: Any) -> Response:
        origin = request.headers.get("origin")
        if request.url.hostname not in hosts or (origin and urllib.parse.urlsplit(origin).netloc != request.url.netloc):
            return await refuse(request, Forbidden(f"host or origin not allowed; allowed hosts: {', '.join(hosts)}"))
        response: Response = await go_on(request)
        return response

    @web.post("/v1/call")
    async def call(request: Request) -> Response:
        wanted = in_json(json_call, await body_of(request))
        entry = program.find(wanted.function)
        wished: tuple[Any, ...]
        if isinstance(wanted.args, dict):
            named = entry.signature.convert_named(wanted.args)
            wished = KeywordCall(entry.function, wanted.key, (), named)
        else:
            wished = (entry.function, wanted.key, *entry.signature.convert(wanted.args))
        client = runtime.client.options(request_id=wanted.request_id)
        replies = await asyncio.wrap_future(client.submit([client.next_id()], [wished], wait=False))
        return json(*reply_in_json(replies[0]))

    @web.post("/v1/calls")
    async def calls(request: Request) -> Response:
        message = codec.decode(await body_of(request))
        if not isinstance(message, Calls):
            raise BadMessage(f"a {type(message).__name__} is not a request")
        names = message.names or [[]] * len(message.functions)
        sizes = {len(message.functions), len(message.keys), len(message.args), len(names)}
        if len(sizes) > 1 or (isinstance(message.ids, list) and {len(message.ids)} != sizes):
            raise BadMessage("the columns of the message differ in length")
        arguments = [program.values.decode(args) for args in message.args]
        if not set(map(type, arguments)) <= {tuple}:
            raise BadMessage("the arguments of a call must be a tuple")
        batch = list(map(call_row, message.functions, message.keys, arguments, names))
        replies = await asyncio.wrap_future(runtime.client.submit(message.ids, batch, wait=False))
        try:
            answers = msgspec.structs.replace(replies.answers, tids=list(replies.answers.tids))
            return Response(codec.encode(answers), media_type=MSGPACK)
        except TooLarge as error:
            raise AnswerTooLarge(
                f"the calls ran, but {error}; ask for a few at a time, with their request ids"
            ) from None

    @web.get("/v1/state/{operator}/{key}")
    async def state(operator: str, key: str, int_key: bool = False) -> Response:
        missing = object()
        if int_key and (not key.removeprefix("-").isdecimal() or len(key) > 20):
            raise BadKey(f"{key[:60]!r} is not a 64-bit integer")
        found = await asyncio.to_thread(runtime.get, operator, int(key) if int_key else key, missing)
        return json({"state": None if found is missing else found, "exists": found is not missing})

    @web.post("/v1/rescale")
    async def rescale(request: Request) -> Response:
        workers = in_json(json_rescale, await body_of(request)).workers
        moved = await asyncio.to_thread(runtime.rescale, workers)
        return json({"status": "ok", "workers": workers, "moved_shards": moved})

    @web.post("/v1/snapshot")
    async def snapshot() -> Response:
        taken = await asyncio.to_thread(runtime.snapshot)
        return json({"status": "ok", **taken})

    @web.get("/v1/app")
    async def app() -> Response:
        operators = {
            name: [str(program.functions[function].signature) for function in operator.functions.values()]
            for name, operator in runtime.app.operators.items()
        }
        return json({"app": runtime.app.name, "operators": operators})

    @web.get("/metrics")
    async def metrics() -> Response:
        return json(runtime.metrics())

    @web.get("/health")
    async def health() -> Response:
        return json({"status": "ok"})

    return web


def call_row(function: str, key: Any, args: tuple[Any, ...], names: list[str]) -> tuple[Any, ...]:
    """A call as a client gives it."""
    if not names:
        return (function, key, *args)
    if len(set(names)) < len(names) or len(names) > len(args):
        raise BadMessage("a call has two arguments of one name, or more names than arguments")
    at = len(args) - len(names)
    return KeywordCall(function, key, args[:at], dict(zip(names, args[at:], strict=True)))


def in_json(decoder: msgspec.json.Decoder[Wanted], body: bytes) -> Wanted:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a {decoder.type.__name__.removeprefix('Json').lower()}: {error}") from None


async def body_of(request: Request) -> bytes:
    """The body. Raises `TooLarge` as soon as it is over the limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > codec.MESSAGE_BYTES_MAX:
            raise TooLarge(f"a message of more than {codec.MESSAGE_BYTES_MAX} bytes: send smaller batches")
        parts.append(part)
    return b"".join(parts)


def reply_in_json(reply: Reply) -> tuple[dict[str, Any], int]:
    answer: dict[str, Any] = {"status": reply.status, "request_id": reply.request_id}
    failure = reply.failure
    if failure is None:
        return answer | {"tid": reply.tid, "epoch": reply.epoch, "result": reply.result}, 200
    answer |= {"code": failure.code, "error": failure.message}
    if reply.tid is None:
        error = REFUSALS.get(failure.code, BadRequest)
        return answer | {"retry": error.retry}, error.http_status
    where = {"function": failure.function, "key": failure.key}
    return answer | {"tid": reply.tid, "epoch": reply.epoch, "type": failure.type, "raised_in": where}, 409


def json(value: Any, status: int = 200) -> Response:
    return Response(json_encode(value), status, media_type="application/json")
