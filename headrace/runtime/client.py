"""Clients: how a program calls functions and gets replies. Blocking and `async`, one call or many.

`Client` is the interface; subclasses decide where the calls go: `LocalClient` in this process, `RemoteClient` over
HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, overload

import msgspec

from headrace.errors import REFUSALS, Aborted, BadRequest
from headrace.model.operator import Function
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
        failure = self.failure
        if failure is None:
            return self.result
        if self.tid is None:
            raise REFUSALS.get(failure.code, BadRequest)(failure.message)
        raise Aborted(failure.type, failure.message, failure.function or "", failure.key, self.tid, failure.code)


class Replies(Sequence[Reply]):
    """The replies to a batch, in its order. They are stored as columns; rows are made on access."""

    def __init__(self, answers: Answers, unseal: Callable[[Any], Any]) -> None:
        self.answers, self._unseal = answers, unseal

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

    def __repr__(self) -> str:
        return f"<{len(self)} replies: {self.committed} committed, {len(self.failures)} failed>"


class Client(ABC):
    """Calls functions. Every request has an id: yours, or one made here. A repeat with the same id and the same call
    gets the same reply, and nothing runs twice."""

    def __init__(self) -> None:
        self._name, self._numbers = uuid.uuid4().hex, itertools.count(1)

    @abstractmethod
    def submit(self, ids: RequestIds, calls: Sequence[Any], wait: bool) -> Future[Replies]:
        """Send a batch. With `wait`, wait for room; without, raise `Overloaded` if there is none."""

    def call(self, function: Function | str, key: Any, /, *args: Any, request_id: str | None = None) -> Any:
        """Call a function and wait for its result. Raises `Aborted`, or the reason why the request was refused."""
        return self._one(function, key, args, request_id, wait=True).result()[0].unwrap()

    async def acall(self, function: Function | str, key: Any, /, *args: Any, request_id: str | None = None) -> Any:
        """The same, awaited."""
        future = self._one(function, key, args, request_id, wait=False)
        return (await asyncio.wrap_future(future))[0].unwrap()

    def batch(self, calls: Sequence[Any], *, request_id: str | None = None) -> Replies:
        """Run many calls, `(function, key, *args)` each, in this order. Each is its own transaction; a failed call does
        not raise. With `request_id="x"` the requests have the ids "x/0", "x/1" and so on."""
        return self._many(calls, request_id, wait=True).result()

    async def abatch(self, calls: Sequence[Any], *, request_id: str | None = None) -> Replies:
        """The same, awaited."""
        return await asyncio.wrap_future(self._many(calls, request_id, wait=False))

    def _one(
        self, function: Any, key: Any, args: tuple[Any, ...], request_id: str | None, wait: bool
    ) -> Future[Replies]:
        return self.submit([self.id_or_new(request_id)], [(function, key, *args)], wait)

    def _many(self, calls: Sequence[Any], request_id: str | None, wait: bool) -> Future[Replies]:
        return self.submit(self.id_or_new(request_id), list(calls), wait)

    def id_or_new(self, given: str | None) -> str:
        if given is None:
            return self.new_id()
        if type(given) is not str:
            raise BadRequest(f"a request id must be a str, not {shown(given)}")
        return given

    def new_id(self) -> str:
        return f"{self._name}-{os.getpid()}-{next(self._numbers)}"  # a fork may copy a client
