"""What arrives in one turn of the event loop is handed over to the engine as one: calls as a batch, reads as one read.

Each request gets its own answer. If the engine has no room for all of them, they are handed over one by one, so that a
request is refused only if it would be by itself.

Never here: HTTP, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.core.epoch import Batch
from headrace.core.origin import FromClient
from headrace.errors import BadRequest, HeadraceError, Overloaded, TooLarge
from headrace.runtime.client import Replies, Reply
from headrace.runtime.driver import Driver
from headrace.wire.messages import Entities

Item = TypeVar("Item")
MISSING: Any = object()


class Waiting(NamedTuple, Generic[Item]):
    """One request of this turn, and where its answer goes."""

    item: Item
    future: asyncio.Future[Any]


class Turn(Generic[Item]):
    """Gathers items until the event loop has run everything that was ready, then hands them over."""

    def __init__(self, hand_over: Callable[[list[Waiting[Item]]], None]) -> None:
        self._hand_over = hand_over
        self._waiting: list[Waiting[Item]] = []

    def add(self, item: Item) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._end)
        waiting = Waiting(item, loop.create_future())
        self._waiting.append(waiting)
        return waiting.future

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._hand_over(waiting)


class GatheredCall(NamedTuple):
    request_id: str
    row: tuple[Any, Any, Any] | BadRequest


class Turns:
    """The calls and the reads of a gateway."""

    def __init__(self, runtime: Driver) -> None:
        self._runtime = runtime
        self._unseal = runtime.engine.program.values.unseal
        self._calls: Turn[GatheredCall] = Turn(self._submit)
        self._reads: Turn[tuple[str, Any]] = Turn(self._read)

    def call(self, request_id: str, row: tuple[Any, Any, Any] | BadRequest) -> asyncio.Future[Reply]:
        """One call of this turn."""
        return self._calls.add(GatheredCall(request_id, row))

    def batch(self, ids: list[str], rows: list[tuple[Any, Any, Any] | BadRequest]) -> asyncio.Future[Replies]:
        """A batch of its own."""
        future: asyncio.Future[Replies] = asyncio.get_running_loop().create_future()
        answered = self._runtime.submit(self._admit(FromClient(ids), rows), wait=False)
        when_done(answered, lambda: settle(future, lambda: Replies(answered.result(), self._unseal)))
        return future

    def _admit(self, origin: FromClient, rows: list[tuple[Any, Any, Any] | BadRequest]) -> Batch:
        """In columns, if all calls are of one function: that is faster."""
        calls = [row for row in rows if not isinstance(row, BadRequest)]
        functions = {call[0] for call in calls}
        if len(functions) == 1 and len(calls) == len(rows):
            keys, args = [call[1] for call in calls], [call[2] for call in calls]
            return self._runtime.admission.admit_columns(origin, functions.pop(), keys, args)
        return self._runtime.admission.admit_rows(origin, rows)

    def read(self, operator: str, key: Any) -> asyncio.Future[Any]:
        """The state of an entity, or MISSING."""
        return self._reads.add(self._runtime.place_of(operator, key))

    def _submit(self, waiting: list[Waiting[GatheredCall]]) -> None:
        origin = FromClient([each.item.request_id for each in waiting])
        try:
            batch = self._admit(origin, [each.item.row for each in waiting])
            answered = self._runtime.submit(batch, wait=False)
        except (Overloaded, TooLarge) as error:
            if len(waiting) == 1:
                fail(waiting, error)
            else:
                for each in waiting:
                    self._submit([each])
        except HeadraceError as error:
            fail(waiting, error)
        else:
            when_done(answered, lambda: self._answer(waiting, answered))

    def _answer(self, waiting: list[Waiting[GatheredCall]], answered: Future[Any]) -> None:
        error = answered.exception()
        if error is not None:
            fail(waiting, error)
            return
        replies = Replies(answered.result(), self._unseal)
        for at, each in enumerate(waiting):
            settle(each.future, lambda at=at: replies[at])  # type: ignore[misc]

    def _read(self, waiting: list[Waiting[tuple[str, Any]]]) -> None:
        try:
            found = self._runtime.read(list({each.item: None for each in waiting}))
        except HeadraceError as error:
            fail(waiting, error)
        else:
            when_done(found, lambda: self._show(waiting, found))

    def _show(self, waiting: list[Waiting[tuple[str, Any]]], found: Future[Entities]) -> None:
        error = found.exception()
        if error is not None:
            fail(waiting, error)
            return
        states = {(operator, key): state for operator, key, state in found.result()}
        for each in waiting:
            state = states.get(each.item, MISSING)
            settle(each.future, lambda state=state: state if state is MISSING else self._unseal(state))  # type: ignore[misc]


def when_done(future: Future[Any], do: Callable[[], None]) -> None:
    """Do it in this event loop once the engine's thread has set the future."""
    loop = asyncio.get_running_loop()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(do)

    future.add_done_callback(wake)


def settle(future: asyncio.Future[Any], result: Callable[[], Any]) -> None:
    """Set a result, unless nobody waits for it any more."""
    if not future.done():
        try:
            future.set_result(result())
        except Exception as error:
            future.set_exception(error)


def fail(waiting: list[Any], error: BaseException) -> None:
    for each in waiting:
        if not each.future.done():
            each.future.set_exception(error)
