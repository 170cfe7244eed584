"""The routes of calls and of state, as plain ASGI:

    POST /v1/call    {"function": "account.transfer", "key": "alice", "args": ["bob", 5], "request_id": "optional"}
                     or, by name, "args": {"to": "bob", "amount": 5}
    POST /v1/batch   {"calls": [...]}: calls as above, each a transaction; answered by {"replies": [...]}
    POST /v1/calls   a `Calls` message, answered by an `Answers` message (application/msgpack)
    GET  /v1/state/{operator}?key=...

Never here: which status an outcome has (statuses.py), what is handed over together (turns.py), what JSON becomes
(core/json_calls.py).
"""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import Any

import msgspec

from headrace.core.admission import KeywordCall
from headrace.core.json_calls import read_batch, read_call
from headrace.errors import AnswerTooLarge, BadKey, BadMessage, BadRequest, HeadraceError, TooLarge
from headrace.gateway.answers import MSGPACK, json_encode, replies_in_json, reply_in_json
from headrace.gateway.front import Handler, WebRequest
from headrace.gateway.turns import MISSING, Turns
from headrace.runtime.driver import Driver
from headrace.wire import codec
from headrace.wire.messages import Calls

STATE = "/v1/state/"
TRUTH = {"true": True, "1": True, "false": False, "0": False}
FIELDS_MAX = 10  # of a query


class CallRoutes:
    """What the routes share: the runtime, and the turns of the event loop."""

    def __init__(self, runtime: Driver) -> None:
        self._runtime, self._client = runtime, runtime.client
        self._program, self._admission = runtime.engine.program, runtime.admission
        self._turns = Turns(runtime)

    def routes(self) -> dict[str, tuple[str, Handler]]:
        return {
            "/v1/call": ("POST", self.call),
            "/v1/batch": ("POST", self.batch),
            "/v1/calls": ("POST", self.calls),
            STATE: ("GET", self.state),
        }

    async def call(self, request: WebRequest) -> None:
        given, row = read_call(await request.body(), self._program)
        request_id = self._id_of(given)
        if isinstance(row, BadRequest):
            raise row
        await request.answer(*reply_in_json(await self._turns.call(request_id, row)))

    async def batch(self, request: WebRequest) -> None:
        ids, rows = [], []
        for given, row in read_batch(await request.body(), self._program):
            try:
                ids.append(self._id_of(given))
                rows.append(row)
            except BadRequest as error:
                ids.append(self._client.new_id())
                rows.append(error)
        replies = await self._turns.batch(ids, rows)
        answered = json_encode({"replies": replies_in_json(replies)})
        if len(answered) > codec.MESSAGE_BYTES_MAX:
            raise too_large(f"their answers have {len(answered)} bytes, over the limit of {codec.MESSAGE_BYTES_MAX}")
        await request.answer_bytes(answered)

    def _id_of(self, given: str | None) -> str:
        if given is None:
            return self._client.new_id()
        self._admission.check_id(given)
        return given

    async def calls(self, request: WebRequest) -> None:
        message = codec.decode(await request.body())
        if not isinstance(message, Calls):
            raise BadMessage(f"a {type(message).__name__} is not a request")
        names = message.names or [[]] * len(message.functions)
        sizes = {len(message.functions), len(message.keys), len(message.args), len(names)}
        if len(sizes) > 1 or (isinstance(message.ids, list) and {len(message.ids)} != sizes):
            raise BadMessage("the columns of the message differ in length")
        arguments = [self._program.values.decode(args) for args in message.args]
        if not set(map(type, arguments)) <= {tuple}:
            raise BadMessage("the arguments of a call must be a tuple")
        batch = list(map(call_row, message.functions, message.keys, arguments, names))
        replies = await asyncio.wrap_future(self._client.submit(message.ids, batch, wait=False))
        try:
            answers = msgspec.structs.replace(replies.answers, tids=list(replies.answers.tids))
            encoded = codec.encode(answers)
        except TooLarge as error:
            raise too_large(str(error)) from None
        await request.answer_bytes(encoded, MSGPACK)

    async def state(self, request: WebRequest) -> None:
        operator, key = place_in(request)
        found = await self._turns.read(operator, key)
        await request.answer({"state": None if found is MISSING else found, "exists": found is not MISSING})


def call_row(function: str, key: Any, args: tuple[Any, ...], names: list[str]) -> tuple[Any, ...]:
    """A call as a client gives it."""
    if not names:
        return (function, key, *args)
    if len(set(names)) < len(names) or len(names) > len(args):
        raise BadMessage("a call has two arguments of one name, or more names than arguments")
    at = len(args) - len(names)
    return KeywordCall(function, key, args[:at], dict(zip(names, args[at:], strict=True)))


def too_large(why: str) -> HeadraceError:
    return AnswerTooLarge(f"the calls ran, but {why}; ask for a few at a time, with their request ids")


def place_in(request: WebRequest) -> tuple[str, str | int]:
    """The operator and the key. The key is in the query, or it is all of the path after the operator."""
    operator, slash, rest = request.path.removeprefix(STATE).partition("/")
    given = query_of(request, {"key", "int_key"})
    if slash and "key" in given:
        raise BadRequest("the key is in the path and in the query: give it once")
    if not slash and "key" not in given:
        raise BadRequest(f"give the key in the query: GET {STATE}{operator}?key=...")
    key = rest if slash else given["key"]
    is_int = TRUTH.get(given.get("int_key", "false"))
    if is_int is None:
        raise BadRequest(f"int_key must be true or false, not {given['int_key'][:60]!r}")
    if not is_int:
        return operator, key
    if not key.isascii() or not key.removeprefix("-").isdecimal() or len(key) > 20:
        raise BadKey(f"{key[:60]!r} is not a 64-bit integer")
    return operator, int(key)


def query_of(request: WebRequest, known: set[str]) -> dict[str, str]:
    text = bytes(request.scope.get("query_string", b"")).decode("latin-1")
    try:
        fields = urllib.parse.parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise BadRequest(f"the query cannot be read: {error}") from None
    for name, _ in fields:
        if name not in known:
            raise BadRequest(f"unknown parameter {name[:60]!r} in the query; known are: {', '.join(sorted(known))}")
    if len(dict(fields)) < len(fields):
        raise BadRequest("a parameter is in the query twice")
    return dict(fields)
