"""Replies and refusals in JSON, and how they are sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from headrace.errors import REFUSALS, BadRequest, HeadraceError
from headrace.gateway.statuses import OK, status_of_abort
from headrace.runtime.client import Replies, Reply
from headrace.wire.messages import id_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON, MSGPACK = b"application/json", b"application/msgpack"

json_encode = msgspec.json.Encoder(enc_hook=repr).encode


class Committed(msgspec.Struct):
    """The answer to a call that ran."""

    status: str
    request_id: str
    tid: int | None
    epoch: int | None
    result: Any


def reply_in_json(reply: Reply) -> tuple[Any, int]:
    """The answer and its HTTP status."""
    failure = reply.failure
    if failure is None:
        return Committed("ok", reply.request_id, reply.tid, reply.epoch, reply.result), OK
    answer: dict[str, Any] = {"status": reply.status, "request_id": reply.request_id}
    answer |= {"code": failure.code, "error": failure.message}
    if reply.tid is None:
        error = REFUSALS.get(failure.code, BadRequest)
        return answer | {"retry": error.retry}, error.http_status
    where = {"function": failure.function, "key": failure.key}
    if failure.where is not None:
        where["where"] = failure.where
    answer |= {"tid": reply.tid, "epoch": reply.epoch, "type": failure.type, "raised_in": where}
    return answer, status_of_abort(failure.code)


def replies_in_json(replies: Replies) -> list[Any]:
    """The answers to a batch, each as to a call that came alone."""
    answers, failures = replies.answers, replies.failures
    rows = zip(answers.tids, answers.epochs, replies.results, strict=True)
    return [
        reply_in_json(replies[at])[0] if at in failures else Committed("ok", id_of(answers.ids, at), tid, epoch, result)
        for at, (tid, epoch, result) in enumerate(rows)
    ]


def refusal_in_json(error: HeadraceError) -> dict[str, Any]:
    return {"status": "refused", "code": error.code, "error": str(error), "retry": error.retry}


async def respond(send: Send, body: bytes, status: int = OK, kind: bytes = JSON, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
