"""Admission: which calls may run. Each call is checked by itself, so the caller's thread can do it.

Rule: a refused call is never logged and changes nothing; the rest of its batch runs.

Never here: earlier requests, state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.core.epoch import Batch
from headrace.core.origin import Origin
from headrace.core.program import Entry, Program
from headrace.core.signature import Args
from headrace.errors import BadArguments, BadRequest, HeadraceError, TooLarge, UnknownFunction
from headrace.model.operator import RESERVED
from headrace.wire.messages import Failure
from headrace.wire.values import Key, shown, size_of


class KeywordCall(NamedTuple):
    """A call with arguments by name, beside `(function, key, *args)`."""

    function: Any
    key: Any
    args: Args
    kwargs: dict[str, Any]


class Admission:
    """Checks calls against the app: does the function exist, is the key a key, do the arguments fit?"""

    def __init__(self, program: Program) -> None:
        self.program = program

    def admit(self, origin: Origin, calls: Sequence[Any]) -> Batch:
        """Calls are `(function, key, *args)`, or `KeywordCall`. The batch lists those that are refused."""
        if not isinstance(origin.ids, str):
            origin = msgspec.structs.replace(origin, ids=list(origin.ids))
            if len(origin.ids) != len(calls):
                raise BadRequest(f"{len(origin.ids)} request ids for {len(calls)} calls")
        try:
            functions = {call[0] for call in calls}
            if len(functions) == 1 and set(map(type, calls)) == {tuple}:
                keys, args = [call[1] for call in calls], [call[2:] for call in calls]
                return self.admit_columns(origin, functions.pop(), keys, args)
        except (TypeError, LookupError):
            pass
        return self.admit_rows(origin, [self._positional(call) for call in calls])

    def admit_columns(self, origin: Origin, function: Any, keys: list[Any], args: list[Args]) -> Batch:
        """One function for many keys: checked in columns; one by one only if a check fails."""
        are_keys = False
        try:
            entry = self._find(function)
            are_keys = bool(keys) and self.program.check_keys(keys, entry)
            if are_keys and entry.signature.fits_all(args):
                return Batch(origin, [entry] * len(keys), keys, args)
        except UnknownFunction:
            pass
        return self.admit_rows(origin, zip([function] * len(keys), keys, args, strict=True), are_keys)

    def admit_rows(
        self, origin: Origin, calls: Iterable[tuple[Any, Any, Any] | BadRequest], are_keys: bool = False
    ) -> Batch:
        """Calls are `(function, key, args)`, or the error of an invalid call. With `are_keys`, the keys are checked."""
        entries: list[Entry] = []
        keys: list[Key] = []
        arguments: list[Args] = []
        refused: dict[int, Failure] = {}
        sizes: list[int] = []
        last, found = None, None  # a function, and its entry
        code, name = BadArguments.code, BadArguments.__name__
        for position, call in enumerate(calls):
            try:
                if isinstance(call, BadRequest):
                    raise call
                function, key, args = call
                if found is None or function is not last:
                    found = self._find(function)
                    last = function
                entry = found
                if not are_keys:
                    self.program.check_key(key, entry)
                if type(args) is not tuple:
                    raise BadArguments(f"the arguments of {entry.signature} must be a tuple, not {shown(args)}")
                if not entry.fits(args):
                    trouble = entry.signature.trouble(args)
                    if trouble is not None:
                        refused[position] = Failure(code, name, trouble)
                        continue
                    entry, args = entry.admit(args, is_checked=True)
            except BadRequest as error:
                refused[position] = failure_of(error)
            else:
                entries.append(entry)
                keys.append(key)
                arguments.append(args)
                sizes.append(sum(map(size_of, args)))
        return Batch(origin, entries, keys, arguments, refused, sizes if any(sizes) else None)

    def _positional(self, call: Any) -> tuple[Any, Any, Any] | BadRequest:
        if type(call) is not KeywordCall:
            return take_apart(call)
        try:
            return call.function, call.key, self._find(call.function).signature.bind(call.args, call.kwargs)
        except BadRequest as error:
            return error

    def _find(self, function: Any) -> Entry:
        entry = self.program.find(function)
        if entry.operator.name == RESERVED:
            raise UnknownFunction(f"{entry.name} is internal to Headrace and cannot be called")
        return entry

    def check_id(self, request_id: Any) -> None:
        limit = self.program.config.request_id_bytes_max
        if type(request_id) is not str or not request_id:
            raise BadRequest(f"a request id must be a non-empty str, not {shown(request_id)}")
        try:
            size = len(request_id.encode())
        except UnicodeEncodeError:
            raise BadRequest(f"the request id {shown(request_id)} is not valid Unicode") from None
        if size > limit:
            raise TooLarge(f"a request id of {size} bytes is over the limit of {limit} (request_id_bytes_max)")


def take_apart(call: Any) -> tuple[Any, Any, Any] | BadRequest:
    if isinstance(call, tuple | list) and len(call) >= 2:
        return call[0], call[1], tuple(call[2:])
    return BadRequest(f"a call must be (function, key, *args), not {shown(call)}")


def failure_of(error: HeadraceError) -> Failure:
    return Failure(error.code, type(error).__name__, str(error))
