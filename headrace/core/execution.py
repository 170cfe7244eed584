"""Execution in the serial mode: each transaction to completion, in TID order, with an undo log.

Rules:
1. A synchronous call runs at once; asynchronous calls run after the root has returned, in the order they were made,
   as one queue per transaction, and what they return is dropped unseen. The first exception in that order aborts the
   transaction and is its reply.
2. A call has its entity's state in hand while it runs; it is stored when the call returns or waits. What was there
   before goes to the undo log; an abort puts it back, latest first. Nothing runs twice, no read or write sets.
3. An exception that leaves a function aborts the transaction: no caller can catch it, wherever it runs.

Functions are plain calls, or coroutines driven by `send`: there is no event loop here.

Never here: time, request ids, epochs' ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple

from headrace.core.epoch import FINAL, Epoch
from headrace.core.program import MISSING, Args, Entry, Program, Table
from headrace.errors import BadCall, HeadraceError, LimitReached, Poisoned, TooLarge
from headrace.model.context import Context
from headrace.model.operator import Function
from headrace.wire.messages import Failure
from headrace.wire.values import HIGH, LOW, Key, shown, size_of

MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX = 2_000, 200


class Transaction:
    """The one that runs now. Reused: a serial worker has only one at a time."""

    __slots__ = ("bytes_left", "calls_left", "doom", "epoch", "is_marked", "limits", "queue", "unawaited", "undo")

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        self.limits = (calls_max, bytes_max)
        self.epoch: Epoch
        self.undo: list[tuple[Table, Key, Any]] = []  # what an entity's sealed state was
        self.queue: list[Any] = []  # asynchronous calls, in the order they were made
        self.reset()

    def reset(self) -> None:
        self.calls_left, self.bytes_left = self.limits  # calls_left: queued ones count by the length of the queue
        self.unawaited: dict[Awaitable, None] = {}  # made by ctx.call, and not awaited yet
        self.doom: Doom | None = None  # a limit was reached: it aborts, whatever the function does about it
        self.is_marked = False  # whether any of the above was touched

    def close(self) -> None:
        """The end of a transaction that was marked."""
        for call in self.unawaited:
            name = call.made_by._entry.name
            error = BadCall(f"{name} made a ctx.call(...) that it did not await: await it, or use call_async")
            self.doom = self.doom or Doom(error, call.made_by._entry, call.made_at)
        if self.doom is not None:
            raise self.doom.error
        self.reset()


class Doom(NamedTuple):
    """Why a transaction must abort, and which call brought it about."""

    error: HeadraceError
    entry: Entry
    key: Key


class Awaitable:
    """An awaited call: yielded to the executor, which answers with the result."""

    __slots__ = ("args", "entry", "key", "made_at", "made_by")

    def __init__(self, made_by: SerialContext, entry: Entry, key: Key, args: Args) -> None:
        self.made_by, self.made_at = made_by, made_by.key
        self.entry, self.key, self.args = entry, key, args

    def __await__(self) -> Generator[Awaitable, Any, Any]:
        return (yield self)


class SerialContext(Context):
    """A call's hold on its entity. Reused by the next call of the same function, unless this one waits."""

    __slots__ = (
        "_entry",
        "_functions",
        "_program",
        "_queue",
        "_state",
        "_transaction",
        "_values",
        "key",
    )

    def __init__(self, program: Program, transaction: Transaction, entry: Entry) -> None:
        self._entry = entry
        self.key: Any = None
        self._state: Any = MISSING  # sealed
        self._transaction, self._queue = transaction, transaction.queue
        self._program, self._functions, self._values = program, program.functions, program.values

    @property
    def tid(self) -> int:
        epoch = self._transaction.epoch
        return epoch.tids[len(epoch.results)]

    def get(self, default: Any = None) -> Any:
        state = self._state
        if type(state) is bytes:
            return default if state is MISSING else self._values.decode(state)
        return state

    def put(self, value: Any) -> None:
        if type(value) is int and value < HIGH and value > LOW:
            self._state = value
        else:
            self._state = self._seal(value)

    def delete(self) -> None:
        self._state = MISSING

    def merge(self, delta: Any) -> None:
        combine = self._entry.operator.combine
        if combine is None:
            raise BadCall(f"operator {self._entry.operator.name!r} has no combine, so {self._entry.name} cannot merge")
        delta = self._seal(delta)
        if self._state is not MISSING:
            unseal = self._values.unseal
            delta = self._seal(combine(unseal(self._state), unseal(delta)))
        self._state = delta

    def call(self, function: Function | str, key: Any, /, *args: Any) -> Awaitable:
        if self._entry.is_plain:
            raise BadCall(f"{self._entry.name} is a plain def and cannot await: make it async def, or use call_async")
        entry = self._functions.get(function) if type(function) is Function else None
        if entry is None or type(key) is not int or key >= HIGH or key <= LOW or not entry.fits(args):
            entry, key, args = self._admit(function, key, args)
        call = Awaitable(self, entry, key, args)
        self._transaction.is_marked = True
        self._transaction.unawaited[call] = None
        return call

    def call_async(self, function: Function | str, key: Any, /, *args: Any) -> None:
        try:
            entry = self._functions[function]
            fits, kind = entry.fits, type(key)
            is_key = key < HIGH and key > LOW if kind is int else kind is str and key in entry.table
            if not is_key or not fits(args):
                entry, key, args = self._admit(function, key, args)
        except (KeyError, TypeError):
            entry, key, args = self._admit(function, key, args)
        queue = self._queue
        if len(queue) >= self._transaction.calls_left:
            raise self.doomed(too_many_calls(self._program))
        queue.append((entry, key, args))

    def _admit(self, function: Function | str, key: Any, args: Args) -> tuple[Entry, Key, Args]:
        """The slow and sure way for a call: checks everything, and says what is wrong."""
        entry = self._program.find(function)
        self._program.check_key(key, entry)
        if not entry.fits(args):
            try:
                entry, args = entry.admit(args)
            except TooLarge as error:
                raise self.doomed(error) from None
            self._count(sum(map(size_of, args)))
        return entry, key, args

    def _seal(self, value: Any) -> Any:
        try:
            sealed = self._values.seal(value)
        except TooLarge as error:
            raise self.doomed(error) from None
        self._count(size_of(sealed))
        return sealed

    def _count(self, size: int) -> None:
        transaction = self._transaction
        transaction.is_marked = True
        transaction.bytes_left -= size
        if transaction.bytes_left < 0:
            limit = self._program.config.transaction_bytes_max
            raise self.doomed(LimitReached(f"values of more than {limit} bytes in one transaction"))

    def doomed(self, error: HeadraceError) -> HeadraceError:
        """A limit was reached: the transaction will abort with this error, also if the function catches it now."""
        transaction = self._transaction
        transaction.is_marked = True
        transaction.doom = transaction.doom or Doom(error, self._entry, self.key)
        return transaction.doom.error

    def retire(self) -> None:
        """Nothing that is still done with this context reaches anybody."""
        self._transaction = Transaction(1 << 62, 1 << 62)
        self._queue = self._transaction.queue


class OrderedContext(SerialContext):
    """Notes whether the state was looked at, and keeps merges apart."""

    __slots__ = ("_deltas", "_read", "_tid")

    _deltas: tuple[Any, ...] | None
    _read: bool
    _tid: int

    @property
    def tid(self) -> int:
        return self._tid

    def get(self, default: Any = None) -> Any:
        self._read = True
        state = self._state
        if type(state) is bytes:
            return default if state is MISSING else self._values.decode(state)
        return state

    def put(self, value: Any) -> None:
        if self._deltas:
            self._read = True  # whether a merge before it failed depends on the state
        self._deltas = None
        if type(value) is int and value < HIGH and value > LOW:
            self._state = value
        else:
            self._state = self._seal(value)

    def delete(self) -> None:
        self._read |= bool(self._deltas)
        self._deltas = None
        self._state = MISSING

    def merge(self, delta: Any) -> None:
        try:
            super().merge(delta)
        except BaseException:
            self._read = True  # whether it fails depends on the state
            raise
        if self._deltas is not None and not self._read:
            self._deltas = (*self._deltas, self._values.seal(delta))


def too_many_calls(program: Program) -> LimitReached:
    return LimitReached(f"more than {program.config.calls_max} calls in one transaction")


class SerialExecutor:
    """Runs epochs. Changes the tables of all operators; nobody else does."""

    def __init__(self, program: Program) -> None:
        self.program, self.values = program, program.values
        self.depth_max = program.config.depth_max
        self.transaction = Transaction(program.config.calls_max, program.config.transaction_bytes_max)
        self.raised_in: tuple[Entry, Key] | None = None  # where an exception came from, if from an awaited call
        self.bind()

    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none. For an onlooker in another thread."""
        epoch = getattr(self.transaction, "epoch", None)
        at = len(epoch.results) if epoch is not None else 0
        return epoch.tids[at] if epoch is not None and at < len(epoch.tids) else 0

    def bind(self) -> None:
        """Take the program's functions over from the other mode."""
        for entry in self.program.entries:
            entry.bind(self._context(entry))

    def decreed(self, entry: Entry, why: str) -> Entry:
        """The entry for a transaction that aborts by decree."""
        entry = entry.decreed(why)
        entry.bind(self._context(entry))
        return entry

    def _context(self, entry: Entry) -> SerialContext:
        return SerialContext(self.program, self.transaction, entry)

    def run(self, epoch: Epoch) -> None:
        """The hot loop: what a call costs beside the function itself is decided here. The root and the queued calls
        run by the same lines, written twice: a method between them would cost a tenth of the whole."""
        transaction, results, seal = self.transaction, epoch.results, self.values.seal
        undo, queue = transaction.undo, transaction.queue
        transaction.epoch = epoch
        for entry, key, args in zip(epoch.entries, epoch.keys, epoch.args, strict=True):
            try:
                context, table = entry.context, entry.table
                context.key = key
                context._state = before = table.get(key, MISSING)
                result = entry.run(*args)
                if not entry.is_plain:
                    try:
                        awaited = result.send(None)
                    except StopIteration as stop:
                        result = stop.value
                    else:
                        before, result = self._drive(context, key, before, result, awaited)
                if type(result) is not int or result >= HIGH or result <= LOW:
                    result = seal(result)
                state = context._state
                if state is not before:
                    if queue or transaction.is_marked:  # undo is needed only while something can still fail
                        undo.append((table, key, before))
                    if state is MISSING:
                        del table[key]
                    else:
                        table[key] = state
                for call in queue:  # which grows while they run
                    entry, key, args = call
                    context, table = entry.context, entry.table
                    context.key = key
                    context._state = before = table.get(key, MISSING)
                    returned = entry.run(*args)
                    if not entry.is_plain:
                        try:
                            awaited = returned.send(None)
                        except StopIteration:
                            pass
                        else:
                            before, _ = self._drive(context, key, before, returned, awaited)
                    state = context._state
                    if state is not before:
                        if call is not queue[-1] or transaction.is_marked:
                            undo.append((table, key, before))
                        if state is MISSING:
                            del table[key]
                        else:
                            table[key] = state
                if transaction.is_marked:
                    transaction.close()
                queue.clear()
                undo.clear()
                results.append(result)
            except BaseException as error:
                failure = self._failure(error, entry, key)
                self._retire(context)
                self._roll_back()
                epoch.failures[len(results)] = failure
                results.append(None)
        epoch.phase = FINAL

    def _drive(self, context: SerialContext, key: Key, before: Any, coroutine: Any, awaited: Any) -> tuple[Any, Any]:
        """Go on with a coroutine that awaits something: to its end, and with all that it awaits. Returns its entity's
        state as stored, and its result.

        The callers wait in `frames`, not on Python's stack, so that only `depth_max` limits them."""
        frames: list[tuple[SerialContext, Key, Any]] = []
        try:
            while True:
                self._check_await(context, awaited, len(frames))
                self._store(context, key, before)
                self._keep_waiting(context)
                frames.append((context, key, coroutine))
                entry, key, coroutine = awaited.entry, awaited.key, None
                context = entry.context
                context.key = key
                context._state = before = entry.table.get(key, MISSING)
                answer = entry.run(*awaited.args)
                if not entry.is_plain:
                    coroutine, answer = answer, None
                while True:  # until somebody awaits again
                    if coroutine is not None:
                        try:
                            awaited = coroutine.send(answer)
                            break
                        except StopIteration as stop:
                            answer = stop.value
                    if not frames:
                        return before, answer
                    # A call has ended: its caller goes on, with its own entity's state as it is now.
                    self._store(context, key, before)
                    answer = self.values.unseal(self.values.seal(answer))  # they share nothing
                    context, key, coroutine = frames.pop()
                    context._state = before = context._entry.table.get(key, MISSING)
        except BaseException:
            self.raised_in = (context._entry, key)
            for waiting, _, suspended in [(context, key, coroutine), *reversed(frames)]:
                self._retire(waiting)
                if suspended is not None:
                    with contextlib.suppress(BaseException):
                        suspended.close()
            raise

    def _store(self, context: SerialContext, key: Key, before: Any) -> None:
        if context._state is not before:
            table = context._entry.table
            self.transaction.undo.append((table, key, before))
            put_back(table, key, context._state)

    def _keep_waiting(self, context: SerialContext) -> None:
        """A call keeps its context while it waits: the next call of the function gets another one."""
        if context._entry.context is context:
            context._entry.bind(self._context(context._entry))

    def _retire(self, context: SerialContext) -> None:
        """A call failed: whatever its function still does, in a `finally` say, is in vain."""
        self._keep_waiting(context)
        context.retire()

    def _check_await(self, context: SerialContext, awaited: Any, depth: int) -> None:
        transaction = self.transaction
        if type(awaited) is not Awaitable or awaited.made_by is not context or awaited not in transaction.unawaited:
            raise BadCall(f"{context._entry.name} awaits {shown(awaited)}; it may await its own ctx.call(...), once")
        del transaction.unawaited[awaited]
        if depth >= self.depth_max:
            raise LimitReached(f"calls nested deeper than {self.depth_max}")
        if len(transaction.queue) >= transaction.calls_left:
            raise too_many_calls(self.program)
        transaction.calls_left -= 1

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
        if self.transaction.doom is not None:  # a limit was reached before whatever happened after it
            error, entry, key = self.transaction.doom
        return Failure(*describe(error), entry.name, key)


def put_back(table: Table, key: Key, state: Any) -> None:
    if state is MISSING:
        table.pop(key, None)
    else:
        table[key] = state


def describe(error: BaseException) -> tuple[str, str, str]:
    """Code, type and message of an exception that may be anything, also one that breaks when it is looked at."""
    kind, code, name, text = type(error), "aborted", "Exception", "<an exception without a message>"
    with contextlib.suppress(BaseException):
        code = kind.code if issubclass(kind, HeadraceError) and type(kind.code) is str else code
    with contextlib.suppress(BaseException):
        name = fit(kind.__name__, NAME_CHARACTERS_MAX)
    with contextlib.suppress(BaseException):
        text = fit(str(error), MESSAGE_CHARACTERS_MAX)
    if issubclass(kind, MemoryError | RecursionError):
        return Poisoned.code, Poisoned.__name__, f"{name}: {text}"
    return code, name, text


def fit(text: str, characters_max: int) -> str:
    """Bounded and valid."""
    cut = text if len(text) <= characters_max else text[:characters_max] + "…"
    return str.encode(cut, "utf-8", "replace").decode()
