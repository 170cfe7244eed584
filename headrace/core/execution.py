"""Execution in the serial mode: each transaction to completion, in TID order, with an undo log.

Rules:
1. A synchronous call runs at once; asynchronous calls run after the root has returned, in the order they were made,
   as one queue per transaction. The first exception in that order aborts the transaction and is its reply.
2. A call has its entity's state in hand while it runs; it is stored when the call returns or waits. What was there
   before goes to the undo log; an abort puts it back, latest first. Nothing runs twice, no read or write sets.
3. An exception that leaves a function aborts the transaction: no caller can catch it, wherever it runs.

Functions are plain calls, or coroutines driven by `send`: there is no event loop here.

Never here: time, request ids, epochs' ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from headrace.core.epoch import FINAL, Epoch
from headrace.core.program import MISSING, Args, Entry, Program, Table
from headrace.errors import BadCall, HeadraceError, LimitReached, Poisoned
from headrace.model.context import Context
from headrace.model.operator import Function
from headrace.wire.messages import Failure
from headrace.wire.values import KEPT, SMALL, Key

MESSAGE_CHARACTERS_MAX = 2_000


class Transaction:
    """The one that runs now. Reused: a serial worker has only one at a time."""

    __slots__ = ("bytes_counted", "calls_awaited", "doom", "is_marked", "queue", "tid", "undo")

    def __init__(self) -> None:
        self.tid = 0
        self.undo: list[tuple[Table, Key, Any]] = []  # what an entity's sealed state was
        self.queue: list[tuple[Entry, Key, Args]] = []  # asynchronous calls, in the order they were made
        self.reset()

    def reset(self) -> None:
        self.calls_awaited = self.bytes_counted = 0
        self.doom: LimitReached | None = None  # a limit was reached: it aborts, whatever the function does about it
        self.is_marked = False  # whether any of the three above was touched

    def close(self) -> None:
        """The end of a transaction that was marked."""
        if self.doom is not None:
            raise self.doom
        self.reset()


class Call:
    """An awaited call: yielded to the executor, which answers with the result."""

    __slots__ = ("args", "entry", "key", "made_by")

    def __init__(self, made_by: SerialContext, entry: Entry, key: Key, args: Args) -> None:
        self.made_by, self.entry, self.key, self.args = made_by, entry, key, args

    def __await__(self) -> Generator[Call, Any, Any]:
        return (yield self)


class SerialContext(Context):
    """A call's hold on its entity. Reused by the next call of the same function, unless this one waits."""

    __slots__ = (
        "_calls_max",
        "_functions",
        "_program",
        "_queue",
        "_transaction",
        "_values",
        "entry",
        "key",
        "state",
        "unawaited",
    )

    def __init__(self, program: Program, transaction: Transaction, entry: Entry) -> None:
        self.entry = entry
        self.key: Any = None
        self.state: Any = MISSING  # sealed
        self.unawaited = 0
        self._transaction, self._queue = transaction, transaction.queue
        self._program, self._functions, self._values = program, program.functions, program.values
        self._calls_max = program.config.calls_max

    @property
    def tid(self) -> int:
        return self._transaction.tid

    def get(self, default: Any = None) -> Any:
        state = self.state
        if state is MISSING:
            return default
        return self._values.decode(state) if type(state) is bytes else state

    def put(self, value: Any) -> None:
        if type(value) is int and -SMALL < value < SMALL:
            self.state = value
        else:
            self.state = self._seal(value)

    def delete(self) -> None:
        self.state = MISSING

    def merge(self, delta: Any) -> None:
        combine = self.entry.operator.combine
        if combine is None:
            raise BadCall(f"operator {self.entry.operator.name!r} has no combine, so {self.entry.name} cannot merge")
        delta = self._seal(delta)
        if self.state is not MISSING:
            unseal = self._values.unseal
            delta = self._seal(combine(unseal(self.state), unseal(delta)))
        self.state = delta

    def call(self, function: Function | str, key: Any, /, *args: Any) -> Call:
        if self.entry.is_plain:
            raise BadCall(f"{self.entry.name} is a plain def and cannot await: make it async def, or use call_async")
        call = Call(self, *self._admit(function, key, args))
        self.unawaited += 1
        return call

    def call_async(self, function: Function | str, key: Any, /, *args: Any) -> None:
        entry = self._functions.get(function)
        kind = type(key)  # of a key only its type is checked here; the rest where a call finds no state under it
        if entry is None or (kind is not str and kind is not int) or not entry.fits(args):
            entry, key, args = self._admit(function, key, args)
        queue = self._queue
        if len(queue) >= self._calls_max:
            raise self.limit_reached(f"more than {self._calls_max} calls in one transaction")
        queue.append((entry, key, args))

    def _admit(self, function: Function | str, key: Any, args: Args) -> tuple[Entry, Key, Args]:
        entry = self._program.find(function)
        self._program.check_key(key)
        if not entry.fits(args):
            entry, args = entry.admit(args)
            if entry.is_sealed:
                self._count(len(args[0]))
        return entry, key, args

    def _seal(self, value: Any) -> Any:
        sealed = self._values.seal(value)
        if type(sealed) not in KEPT and type(sealed) is not int:
            self._count(len(sealed))
        return sealed

    def _count(self, size: int) -> None:
        transaction, limit = self._transaction, self._program.config.transaction_bytes_max
        transaction.is_marked = True
        transaction.bytes_counted += size
        if transaction.bytes_counted > limit:
            raise self.limit_reached(f"values of more than {limit} bytes in one transaction")

    def limit_reached(self, reason: str) -> LimitReached:
        transaction = self._transaction
        transaction.is_marked = True
        transaction.doom = transaction.doom or LimitReached(reason)
        return transaction.doom


class SerialExecutor:
    """Runs epochs. Changes the tables of all operators; nobody else does."""

    def __init__(self, program: Program) -> None:
        self.program, self.values = program, program.values
        self.calls_max, self.depth_max = program.config.calls_max, program.config.depth_max
        self.transaction = Transaction()
        self.raised_in: tuple[Entry, Key] | None = None  # where an exception came from, if from an awaited call
        for entry in program.entries:
            entry.bind(self._context(entry))

    def _context(self, entry: Entry) -> SerialContext:
        return SerialContext(self.program, self.transaction, entry)

    def run(self, epoch: Epoch) -> None:
        """The hot loop: what a call costs beside the function itself is decided here. The root and the queued calls
        run by the same lines, written twice: a method between them would cost a tenth of the whole."""
        transaction, results, seal = self.transaction, epoch.results, self.values.seal
        undo, queue = transaction.undo, transaction.queue
        for tid, entry, key, args in zip(epoch.tids, epoch.entries, epoch.keys, epoch.args, strict=True):
            transaction.tid = tid
            try:
                context, table = entry.context, entry.table
                context.key = key
                context.state = before = table.get(key, MISSING)
                result = entry.run(*args)
                if not entry.is_plain:
                    before, result = self._drive(context, before, result)
                if context.state is not before:
                    undo.append((table, key, before))
                    if context.state is MISSING:
                        del table[key]
                    else:
                        table[key] = context.state
                if type(result) is not int or not -SMALL < result < SMALL:
                    result = seal(result)
                for entry, key, args in queue:  # which grows while they run
                    context, table = entry.context, entry.table
                    context.key = key
                    context.state = before = table.get(key, MISSING)
                    if before is MISSING:
                        self.program.check_key(key)
                    returned = entry.run(*args)
                    if not entry.is_plain:
                        before, _ = self._drive(context, before, returned)
                    if context.state is not before:
                        undo.append((table, key, before))
                        if context.state is MISSING:
                            del table[key]
                        else:
                            table[key] = context.state
                if transaction.is_marked:
                    transaction.close()
                queue.clear()
                undo.clear()
                results.append(result)
            except BaseException as error:
                self._roll_back()
                if isinstance(error, KeyboardInterrupt):
                    raise
                epoch.failures[len(results)] = self._failure(error, entry, key)
                results.append(None)
        epoch.phase = FINAL

    def _drive(self, context: SerialContext, before: Any, coroutine: Any) -> tuple[Any, Any]:
        """Run a coroutine to its end, with all that it awaits. Returns its entity's state as stored, and its result.

        The callers wait in `frames`, not on Python's stack, so that only `depth_max` limits them."""
        frames: list[tuple[SerialContext, Any]] = []
        answer: Any = None
        try:
            while True:
                try:
                    call = coroutine.send(answer)
                except StopIteration as stop:
                    answer = stop.value
                    if context.unawaited:
                        raise self._not_awaited(context) from None
                    if not frames:
                        return before, answer
                else:
                    self._check_await(context, call, len(frames))
                    self._store(context, before)
                    frames.append((context, coroutine))
                    entry, coroutine = call.entry, None
                    self._keep_waiting(context)
                    context = entry.context
                    context.key = call.key
                    context.state = before = entry.table.get(call.key, MISSING)
                    answer = entry.run(*call.args)
                    if not entry.is_plain:
                        coroutine, answer = answer, None
                        continue
                # The call has ended: its caller goes on, with its entity's state as it is now.
                self._store(context, before)
                answer = self.values.unseal(self.values.seal(answer))  # a caller shares nothing with whom it called
                context, coroutine = frames.pop()
                context.state = before = context.entry.table.get(context.key, MISSING)
        except BaseException:
            self.raised_in = (context.entry, context.key)
            for waiting, suspended in [(context, coroutine), *reversed(frames)]:
                if suspended is not None:
                    self._keep_waiting(waiting)  # for ever: whatever it still does in `finally` reaches nobody
                    with contextlib.suppress(BaseException):
                        suspended.close()
            raise

    def _store(self, context: SerialContext, before: Any) -> None:
        if context.state is not before:
            table = context.entry.table
            self.transaction.undo.append((table, context.key, before))
            put_back(table, context.key, context.state)

    def _keep_waiting(self, context: SerialContext) -> None:
        """A call keeps its context while it waits: the next call of the function gets another one."""
        if context.entry.context is context:
            context.entry.bind(self._context(context.entry))

    def _check_await(self, context: SerialContext, call: Any, depth: int) -> None:
        if type(call) is not Call or call.made_by is not context:
            raise BadCall(f"{context.entry.name} awaits {call!r:.100}; a function awaits only its own ctx.call(...)")
        if depth >= self.depth_max:
            raise LimitReached(f"calls nested deeper than {self.depth_max}")
        transaction = self.transaction
        transaction.is_marked = True
        transaction.calls_awaited += 1
        if transaction.calls_awaited + len(transaction.queue) > self.calls_max:
            raise LimitReached(f"more than {self.calls_max} calls in one transaction")
        context.unawaited -= 1

    def _not_awaited(self, context: SerialContext) -> BadCall:
        return BadCall(f"{context.entry.name} made a ctx.call(...) that it did not await: await it, or use call_async")

    def _roll_back(self) -> None:
        transaction = self.transaction
        for table, key, before in reversed(transaction.undo):
            put_back(table, key, before)
        transaction.undo.clear()
        transaction.queue.clear()
        transaction.reset()

    def _failure(self, error: BaseException, entry: Entry, key: Key) -> Failure:
        if self.raised_in is not None:
            (entry, key), self.raised_in = self.raised_in, None
        if isinstance(error, MemoryError | RecursionError):
            error = Poisoned(f"{type(error).__name__}: {describe(error)}")
        code = error.code if isinstance(error, HeadraceError) else "aborted"
        return Failure(code, type(error).__name__, describe(error), entry.name, key)


def put_back(table: Table, key: Key, state: Any) -> None:
    if state is MISSING:
        table.pop(key, None)
    else:
        table[key] = state


def describe(error: BaseException) -> str:
    """The message of an exception that may be anything: bounded, valid, and there even if its `__str__` fails."""
    try:
        text = str(error)
    except Exception:
        text = f"<a {type(error).__name__} without a message>"
    if len(text) > MESSAGE_CHARACTERS_MAX:
        text = text[:MESSAGE_CHARACTERS_MAX] + "…"
    return text.encode("utf-8", "replace").decode()
