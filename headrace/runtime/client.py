"""Clients: how a program calls functions and gets replies. Blocking and `async`, one call or many.

`Client` is the interface; subclasses decide where the calls go: `LocalClient` in this process, `RemoteClient` over
HTTP.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Never, Self, overload

import msgspec

from headrace.core.admission import KeywordCall
from headrace.errors import REFUSALS, Aborted, BadRequest, HeadraceError
from headrace.model.operator import Function
from headrace.model.type_variables import P, R
from headrace.wire.messages import Answers, Failure, RequestIds, id_of
from headrace.wire.values import shown


class Reply(msgspec.Struct, frozen=True):
    """The reply to one request."""

    request_id: str
    tid: int | None
    epoch: int | None
    result: Any
    failure: Failure | None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def status(self) -> str:
        """ "ok", "aborted" (it ran and was undone) or "refused" (it was never logged)."""
        return "ok" if self.failure is None else "refused" if self.tid is None else "aborted"

    @property
    def error(self) -> str | None:
        """Why there is no result; None if there is one."""
        return None if self.failure is None else self.failure.message

    def unwrap(self) -> Any:
        """The result, or the failure as an exception."""
        if self.failure is None:
            return self.result
        raise self.as_error(self.failure)

    def as_error(self, failure: Failure, call: str = "") -> HeadraceError:
        """The failure as an exception; its text begins with `call`."""
        if self.tid is None:
            return REFUSALS.get(failure.code, BadRequest)(call + failure.message)
        where = (failure.function or "", failure.key, self.tid)
        return Aborted(failure.type, failure.message, *where, failure.code, failure.where, call)


class Replies(Sequence[Reply]):
    """The replies to a batch, in its order. They are stored as columns; rows are made on access."""

    def __init__(self, answers: Answers, unseal: Callable[[Any], Any]) -> None:
        self.answers, self._unseal = answers, unseal
        self._called: Callable[[int], tuple[Any, Any]] | None = None  # function and key of a row, if they are known

    def naming(self, called: Callable[[int], tuple[Any, Any]]) -> Self:
        """The same replies, which know the function and the key of each call."""
        self._called = called
        return self

    def __len__(self) -> int:
        return len(self.answers.tids)

    @overload
    def __getitem__(self, at: int) -> Reply: ...
    @overload
    def __getitem__(self, at: slice) -> list[Reply]: ...
    def __getitem__(self, at: int | slice) -> Reply | list[Reply]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        a = self.answers
        return Reply(id_of(a.ids, at), a.tids[at], a.epochs[at], self._unseal(a.results[at]), a.failures.get(at))

    def __iter__(self) -> Iterator[Reply]:
        return (self[at] for at in range(len(self)))

    @property
    def results(self) -> list[Any]:
        """The results alone; None where there is none."""
        return list(map(self._unseal, self.answers.results))

    @property
    def failures(self) -> dict[int, Failure]:
        return self.answers.failures

    @property
    def committed(self) -> int:
        return len(self) - len(self.failures)

    def raise_any(self) -> Self:
        """Raise the first failure of the batch, with its row, function and key. If there is none, return the replies:
        `client.batch(calls).raise_any().results`."""
        if not self.failures:
            return self
        row = min(self.failures)
        named = "" if self._called is None else f", {'{} of {}'.format(*self._shown(row))}"
        others = len(self.failures) - 1
        more = f", and {others} more failed" if others else ""
        error = self[row].as_error(self.failures[row], f"row {row} of {len(self)}{named}{more}: ")
        error.row = row
        raise error

    def _shown(self, row: int) -> tuple[str, str]:
        assert self._called is not None
        function, key = self._called(row)
        name = function.full_name if isinstance(function, Function) else function
        return name if isinstance(name, str) else shown(name), shown(key)

    def __repr__(self) -> str:
        return f"<{len(self)} replies: {self.committed} committed, {len(self.failures)} failed>"


def called(calls: Sequence[Any], row: int) -> tuple[Any, Any]:
    """The function and the key of a call in a batch."""
    call = calls[row]
    if isinstance(call, KeywordCall):
        return call.function, call.key
    return (call[0], call[1]) if isinstance(call, tuple | list) and len(call) >= 2 else (call, None)


class Client(ABC):
    """Calls functions. Every request has an id: yours, or one made here. A repeat with the same id and the same call
    gets the same reply, and nothing runs twice."""

    def __init__(self) -> None:
        self._name, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._request_id: str | None = None  # of the next call or batch; if there is none, an id is made

    @abstractmethod
    def submit(self, ids: RequestIds, calls: Sequence[Any], wait: bool) -> Future[Replies]:
        """Send a batch. With `wait`, wait for room; without, raise `Overloaded` if there is none."""

    def options(self, *, request_id: str | None = None, **unknown: Never) -> Self:
        """This client, with options for a call: `client.options(request_id="x").call(...)`. They stand apart from the
        arguments, which belong to the function. With `request_id="x"` the calls of a batch have the ids "x/0", "x/1"
        and so on."""
        for name in unknown:
            raise BadRequest(f"a client has no option {name!r}; it has: request_id")
        if request_id is not None and type(request_id) is not str:
            raise BadRequest(f"a request id must be a str, not {shown(request_id)}")
        view = copy.copy(self)
        view._request_id = request_id
        return view

    def call(self, function: Function[P, R] | str, key: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function and wait for its result. Raises `Aborted`, or the reason why the request was refused."""
        result: R = self._one(function, key, args, kwargs, wait=True).result()[0].unwrap()
        return result

    async def acall(self, function: Function[P, R] | str, key: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same, awaited."""
        future = self._one(function, key, args, kwargs, wait=False)
        result: R = (await asyncio.wrap_future(future))[0].unwrap()
        return result

    def batch(self, calls: Sequence[Any]) -> Replies:
        """Run many calls, `(function, key, *args)` each, in this order. Each is its own transaction; a failed call does
        not raise; `raise_any()` of the replies does."""
        calls = list(calls)
        return self._many(calls, wait=True).result().naming(partial(called, calls))

    async def abatch(self, calls: Sequence[Any]) -> Replies:
        """The same, awaited."""
        calls = list(calls)
        return (await asyncio.wrap_future(self._many(calls, wait=False))).naming(partial(called, calls))

    def _one(
        self, function: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wait: bool
    ) -> Future[Replies]:
        call = KeywordCall(function, key, args, kwargs) if kwargs else (function, key, *args)
        return self.submit([self.next_id()], [call], wait)

    def _many(self, calls: list[Any], wait: bool) -> Future[Replies]:
        return self.submit(self.next_id(), calls, wait)

    def next_id(self) -> str:
        """The request id of what is sent now."""
        return self.new_id() if self._request_id is None else self._request_id

    def new_id(self) -> str:
        return f"{self._name}-{os.getpid()}-{next(self._numbers)}"  # a fork may copy a client
