"""Calls in JSON, as `POST /v1/call`, messages and `callJson` have them: one reading and one conversion for all.

    {"function": "account.transfer", "key": "alice", "args": ["bob", 5], "request_id": "optional"}

`args` may also be an object, with the names of the parameters. Values become those of the annotated types
(`wire/from_json.py`). What does not fit is refused by admission, like the arguments of any client.

Numbers are read twice if the function has a Decimal among its types: first as usual, to find out which function it is;
then with the text of each number.

Never here: HTTP, Kafka, where a call's id or key comes from if it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.program import Program
from headrace.core.signature import Args, Signature
from headrace.errors import BadArguments, BadMessage, BadRequest
from headrace.wire.from_json import NotConverted, NumberText, to_plain
from headrace.wire.values import shown

T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

JsonArgs = list[Any] | dict[str, Any]
Row = tuple[Any, Any, Any]  # function, key and arguments by position: for `Admission.admit_rows`


class JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    """One call, as it was read."""

    function: str
    key: str | int | None = None
    args: JsonArgs = []
    request_id: str | None = None


class JsonCalls(msgspec.Struct, forbid_unknown_fields=True):
    """Many calls."""

    calls: list[JsonCall]


class UnreadCalls(msgspec.Struct, forbid_unknown_fields=True):
    """The same, if one of them is not a call."""

    calls: list[msgspec.Raw]


class Reading(Generic[T]):
    """Reads JSON of one type: as usual, or with numbers as texts."""

    def __init__(self, of: Any, what: str) -> None:
        self._plain: msgspec.json.Decoder[T] = msgspec.json.Decoder(of)
        self._exact: msgspec.json.Decoder[T] = msgspec.json.Decoder(of, float_hook=NumberText)
        self._what = what

    def read(self, data: bytes | str) -> tuple[T, bool]:
        """What was read, and whether its numbers are texts after all: one of them is too large for a float, but may be
        a Decimal. Raises BadMessage."""
        try:
            return self._plain.decode(data), False
        except UNREADABLE:
            return self.read_exactly(data), True

    def read_exactly(self, data: bytes | str) -> T:
        """With `NumberText`s."""
        try:
            return self._exact.decode(data)
        except UNREADABLE as error:
            raise BadMessage(f"not {self._what}: {error}") from None


A_CALL: Reading[JsonCall] = Reading(JsonCall, "a call")
CALLS: Reading[JsonCalls] = Reading(JsonCalls, "a batch of calls")
UNREAD_CALLS: Reading[UnreadCalls] = Reading(UnreadCalls, "a batch of calls")
ARGUMENTS: Reading[JsonArgs] = Reading(JsonArgs, "arguments")


def read_call(data: bytes, program: Program) -> tuple[str | None, Row | BadRequest]:
    """A call: its request id, if it has one, and the call for admission, or why it is not one."""
    try:
        call, has_texts = A_CALL.read(data)
    except BadMessage as error:
        return None, error
    try:
        signature = program.find(call.function).signature
        args = A_CALL.read_exactly(data).args if signature.has_decimals and not has_texts else call.args
        return call.request_id, (call.function, call.key, converted(args, signature, has_texts))
    except BadRequest as error:
        return call.request_id, error


def read_batch(data: bytes, program: Program) -> list[tuple[str | None, Row | BadRequest]]:
    """The calls of a batch, each as `read_call` gives it. Raises BadMessage if it is no batch."""
    try:
        batch, has_texts = CALLS.read(data)
    except BadMessage:
        has_texts = True
    if has_texts:  # or one of them is not a call
        return [read_call(bytes(each), program) for each in UNREAD_CALLS.read(data)[0].calls]
    functions = program.functions
    known = {call.function: entry for call in batch.calls if (entry := functions.get(call.function)) is not None}
    exact = batch
    if any(entry.signature.has_decimals for entry in known.values()):
        exact = CALLS.read_exactly(data)
    rows: list[tuple[str | None, Row | BadRequest]] = []
    for call, again in zip(batch.calls, exact.calls, strict=True):
        try:
            signature = (known.get(call.function) or program.find(call.function)).signature
            args = again.args if signature.has_decimals else call.args
            rows.append((call.request_id, (call.function, call.key, converted(args, signature))))
        except BadRequest as error:
            rows.append((call.request_id, error))
    return rows


def read_arguments(text: str, signature: Signature) -> tuple[JsonArgs, bool]:
    """Arguments alone, to be `converted`, and whether their numbers are texts."""
    try:
        return (ARGUMENTS.read_exactly(text), True) if signature.has_decimals else ARGUMENTS.read(text)
    except BadMessage as error:
        raise BadArguments(f"{shown(text)} is not a JSON list or object of arguments: {error}") from None


def converted(args: Sequence[Any] | Mapping[str, Any], signature: Signature, has_texts: bool = False) -> Args:
    """Arguments that were read from JSON, by position, with their annotated types where they have them. If the function
    has Decimals, their numbers are texts; else they are not, unless `has_texts` says so. Raises BadArguments."""
    try:
        if has_texts and not signature.has_decimals:
            args = to_plain(args)
        if isinstance(args, Mapping):
            return signature.bind((), signature.named_from_json(args))
        return signature.from_json(args)
    except NotConverted as error:
        raise BadArguments(f"{signature}: {error.why}") from None
    except RecursionError:
        raise BadArguments(f"{signature}: the arguments are nested too deep") from None
