"""Execution in the serial mode: each transaction to completion, in TID order, with an undo log.

Rules:
1. A synchronous call runs at once; asynchronous calls run after the root has returned, in the order they were made,
   as one queue per transaction; their results are discarded. The first exception in that order aborts the
   transaction and is its reply.
2. The context holds its entity's state while a call runs; it is stored when the call returns or waits. The earlier
   state goes to the undo log; an abort restores it, latest first. Nothing runs twice; there are no read or write sets.
3. An exception that leaves a function aborts the transaction: no caller can catch it, wherever it runs.
4. The hot loop does not track the paths of calls. A transaction that needs them is undone and run again by
   `TrackedExecutor`, and so is every later one with the same root. Other transactions pay nothing.

Functions are plain calls, or coroutines driven by `send`: there is no event loop here.

Never here: time, request ids, epochs' ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from itertools import islice
from typing import Any

from headrace.core import order
from headrace.core.contexts import (
    Awaitable,
    SerialContext,
    TrackedContext,
    Transaction,
    Untracked,
    too_many_calls,
)
from headrace.core.epoch import Epoch
from headrace.core.later.expiring import Expiring, ExpiringTracked
from headrace.core.program import NOWHERE, Args, Entry, Program
from headrace.errors import BadCall, HeadraceError, LimitReached, Poisoned
from headrace.wire.messages import Failure, Need
from headrace.wire.values import HIGH, LOW, MISSING, Key, shown

MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX = 2_000, 200


class SerialExecutor:
    """Runs epochs. Nothing else changes the operators' tables."""

    def __init__(self, program: Program) -> None:
        self.program, self.values = program, program.values
        self.depth_max = program.config.depth_max
        self.transaction = Transaction(program.config.calls_max, program.config.transaction_bytes_max)
        self.raised_in: tuple[Entry, Key] | None = None  # the awaited call that raised, if any
        self.is_running = False
        self.tracked: TrackedExecutor | None = None  # for transactions that cannot run here
        self.bind()

    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none. Other threads may read it."""
        if not self.is_running:  # no epoch, or it waits for the response to an external call
            return 0
        epoch = self.transaction.epoch
        at = len(epoch.results)
        return epoch.tids[at] if at < len(epoch.tids) else 0

    def bind(self) -> None:
        """Take over the program's functions from the other mode."""
        self.program.watch_epochs(True)
        for entry in self.program.entries:
            entry.bind(self._context(entry))

    def decreed(self, entry: Entry, why: str) -> Entry:
        """The entry for a transaction that aborts by decree."""
        entry = entry.decreed(why)
        entry.bind(self._context(entry))
        return entry

    def _context(self, entry: Entry) -> SerialContext:
        kind = SerialContext if entry.operator.ttl_us is None else Expiring
        return kind(self.program, self.transaction, entry)

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        """Run the rows from `start` up to `stop`. If something is needed first, such as a response to an external call,
        it is returned; once it is there, continue from the row where this stopped.

        The hot loop: it decides what a call costs beyond the function itself. The root and the queued calls run the
        same lines, written twice: a shared method would cost a tenth of the whole."""
        transaction, results, seal = self.transaction, epoch.results, self.values.seal
        undo, queue = transaction.undo, transaction.queue
        transaction.epoch, self.is_running = epoch, True
        notes, first = self.program.notes, NOWHERE
        rows = zip(epoch.entries, epoch.keys, epoch.args, strict=True)
        for root, root_key, args in islice(rows, start, stop) if start or stop else rows:
            try:
                entry, key = root, root_key
                context, table = entry.context, entry.table
                context.key = key
                before = table.get(key)
                if before is None:
                    before = entry.find(key)
                context._state = first = before
                result = entry.run(*args)
                if not entry.is_plain:
                    try:
                        awaited = result.send(None)
                    except StopIteration as end:
                        result = end.value
                    else:
                        before, result = self._drive(context, key, before, result, awaited)
                if type(result) is not int or result >= HIGH or result <= LOW:
                    result = seal(result)
                state = context._state
                if state is not before:
                    if notes:
                        entry.written[key] = state
                    if state is MISSING:
                        entry.store(key, state)
                    else:
                        table[key] = state
                for call in queue:  # grows meanwhile
                    entry, key, args = call
                    context, table = entry.context, entry.table
                    context.key = key
                    before = table.get(key)
                    if before is None:
                        before = entry.find(key)
                    context._state = before
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
                        if call is not queue[-1] or transaction.is_marked:  # something can still fail
                            undo.append((entry, key, before))
                        if notes:
                            entry.written[key] = state
                        if state is MISSING:
                            entry.store(key, state)
                        else:
                            table[key] = state
                if transaction.is_marked:
                    transaction.close()
                queue.clear()
                if undo:
                    undo.clear()
                results.append(result)
            except BaseException as error:
                is_void = transaction.needs is not None
                failure = self._failure(error, entry, key)
                self._retire(context)
                self._roll_back(root, root_key, first)
                if is_void:
                    needs = self._run_tracked(epoch, root)
                    if needs is not None:
                        self.is_running = False
                        return needs
                else:
                    epoch.failures[len(results)] = failure
                    results.append(None)
        self.is_running = False
        return None

    def _run_tracked(self, epoch: Epoch, root: Entry) -> Need | None:
        """A transaction asked for what this executor does not track. From now on, those with this root are not tried
        here."""
        root.run = self._give_up
        return self._tracked().run_row(epoch, root.number)

    def _tracked(self) -> TrackedExecutor:
        program, tracked = self.program, self.tracked
        if tracked is None:
            twin = Program(program.app, program.config, program, over=program)
            tracked = self.tracked = TrackedExecutor(twin)
        tracked.program.seed = program.seed
        return tracked

    def _give_up(self, *args: Any) -> Any:
        self.transaction.needs = self.transaction.is_marked = True
        raise Untracked

    def _drive(self, context: SerialContext, key: Key, before: Any, coroutine: Any, awaited: Any) -> tuple[Any, Any]:
        """Run a coroutine that awaits something, with all that it awaits, to its end. Returns its entity's stored
        state and its result.

        Callers wait in `frames`, not on Python's stack, so only `depth_max` limits them."""
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
                before = entry.table.get(key)
                if before is None:
                    before = entry.find(key)
                context._state = before
                answer = entry.run(*awaited.args)
                if not entry.is_plain:
                    coroutine, answer = answer, None
                while True:  # until the next await
                    if coroutine is not None:
                        try:
                            awaited = coroutine.send(answer)
                            break
                        except StopIteration as stop:
                            answer = stop.value
                    if not frames:
                        return before, answer
                    # A call has ended: its caller continues, with the current state of its own entity.
                    self._store(context, key, before)
                    answer = self.values.unseal(self.values.seal(answer))  # they share nothing
                    context, key, coroutine = frames.pop()
                    before = context._entry.table.get(key)
                    if before is None:
                        before = context._entry.find(key)
                    context._state = before
        except BaseException:
            self._break_off(context, key, coroutine, frames)
            raise

    def _break_off(self, context: SerialContext, key: Key, coroutine: Any, frames: list[Any]) -> None:
        """A call failed: end it and all that wait for it."""
        self.raised_in = (context._entry, key)
        for waiting, _, suspended in [(context, key, coroutine), *reversed(frames)]:
            self._retire(waiting)
            if suspended is not None:
                with contextlib.suppress(BaseException):
                    suspended.close()

    def _store(self, context: SerialContext, key: Key, before: Any) -> None:
        if context._state is not before:
            self.transaction.undo.append((context._entry, key, before))
            context._entry.store(key, context._state)

    def _keep_waiting(self, context: SerialContext) -> None:
        """A call keeps its context while it waits: the next call of the function gets another one."""
        if context._entry.context is context:
            context._entry.bind(self._context(context._entry))

    def _retire(self, context: SerialContext) -> None:
        """A call failed: what its function still does, such as in a `finally`, has no effect."""
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

    def _roll_back(self, root: Entry, root_key: Key, first: Any) -> None:
        """`first` is the root's state before, if it got so far: its writes are not in the undo log."""
        transaction = self.transaction
        for entry, key, before in reversed(transaction.undo):
            entry.store(key, before)
        if first is not NOWHERE and root.find(root_key) is not first:
            root.store(root_key, first)
        transaction.undo.clear()
        transaction.queue.clear()
        transaction.reset()

    def _failure(self, error: BaseException, entry: Entry, key: Key) -> Failure:
        if self.raised_in is not None:
            (entry, key), self.raised_in = self.raised_in, None
        if self.transaction.needs is not None:  # it will not be seen
            error = Untracked()
        if self.transaction.doom is not None:  # the limit was reached first
            error, entry, key = self.transaction.doom
        return Failure(*describe(error), entry.name, key)


Walk = Generator[tuple[Entry, Key], None, Need | None]
"""A row that runs: yields the entities whose state it needs before it can continue."""


class Carried(BaseException):
    """Carries a function's StopIteration out of a generator: Python would turn it into a RuntimeError."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


def run_carefully(entry: Entry, args: Args) -> Any:
    try:
        return entry.run(*args)
    except StopIteration as error:
        raise Carried(error) from None


class TrackedExecutor(SerialExecutor):
    """The same, one row at a time, with the path of every call. It can wait before any call."""

    def __init__(self, program: Program) -> None:
        self.paths: list[bytes] = []  # of the calls in the queue
        super().__init__(program)

    def _context(self, entry: Entry, path: bytes = b"") -> TrackedContext:
        kind = TrackedContext if entry.operator.ttl_us is None else ExpiringTracked
        return kind(self.program, self.transaction, entry, path, self.paths)

    def run_row(self, epoch: Epoch, root: int) -> Need | None:
        """Run the next row, where all state is known; `root` is the number of its function."""
        try:
            entry, key = next(self.walk(epoch, self.program.numbered[root]))
        except StopIteration as end:
            need: Need | None = end.value
            return need
        raise AssertionError(f"the state of {entry.name} of {shown(key)} is not known")

    def walk(self, epoch: Epoch, entry: Entry) -> Walk:
        """Run the next row; `entry` is its root's, in this executor's program."""
        transaction, row = self.transaction, len(epoch.results)
        transaction.epoch = epoch
        key, context = epoch.keys[row], self._context(entry, order.ROOT)
        try:
            result = self.values.seal((yield from self._run_call(context, key, epoch.args[row])))
            for at, (entry, key, args) in enumerate(transaction.queue):  # grows meanwhile
                context = self._context(entry, self.paths[at])
                yield from self._run_call(context, key, args)
            if transaction.is_marked:
                transaction.close()
            transaction.queue.clear()
            transaction.undo.clear()
            epoch.results.append(result)
        except BaseException as error:
            raised = error.error if isinstance(error, Carried) else error
            failure, needs = self._failure(raised, entry, key), transaction.needs
            self._retire(context)
            self._roll_back(entry, key, NOWHERE)
            if needs is not None:
                return needs  # type: ignore[no-any-return]
            epoch.failures[row] = failure
            epoch.results.append(None)
        finally:
            self.paths.clear()
        return None

    def _run_call(self, context: TrackedContext, key: Key, args: Args) -> Generator[tuple[Entry, Key], None, Any]:
        entry = context._entry
        if entry.lacks(key):
            yield entry, key
        entry.bind(context)
        context.key = key
        context._state = before = entry.find(key)
        result = run_carefully(entry, args)
        if not entry.is_plain:
            try:
                awaited = result.send(None)
            except StopIteration as stop:
                result = stop.value
            else:
                before, result = yield from self._follow(context, key, before, result, awaited)
        self._store(context, key, before)
        return result

    def _follow(
        self, context: SerialContext, key: Key, before: Any, coroutine: Any, awaited: Any
    ) -> Generator[tuple[Entry, Key], None, tuple[Any, Any]]:
        """Like `_drive`, but waits where a call's state is not known."""
        frames: list[tuple[SerialContext, Key, Any]] = []
        try:
            while True:
                self._check_await(context, awaited, len(frames))
                self._store(context, key, before)
                self._keep_waiting(context)
                frames.append((context, key, coroutine))
                context, key, coroutine = awaited.entry.context, awaited.key, None
                if awaited.entry.lacks(key):
                    yield awaited.entry, key
                context.key, before = key, awaited.entry.find(key)
                context._state = before
                answer = run_carefully(awaited.entry, awaited.args)
                if not awaited.entry.is_plain:
                    coroutine, answer = answer, None
                while True:  # until the next await
                    if coroutine is not None:
                        try:
                            awaited = coroutine.send(answer)
                            break
                        except StopIteration as stop:
                            answer = stop.value
                    if not frames:
                        return before, answer
                    self._store(context, key, before)
                    answer = self.values.unseal(self.values.seal(answer))
                    context, key, coroutine = frames.pop()
                    context._state = before = context._entry.find(key)
        except BaseException:
            self._break_off(context, key, coroutine, frames)
            raise

    def _check_await(self, context: SerialContext, awaited: Any, depth: int) -> None:
        super()._check_await(context, awaited, depth)
        assert isinstance(context, TrackedContext)
        awaited.entry.bind(self._context(awaited.entry, context.path_of_awaited()))


def describe(error: BaseException) -> tuple[str, str, str]:
    """Code, type and message of any exception, even one that raises when it is inspected."""
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
    """Make a text bounded and valid."""
    cut = text if len(text) <= characters_max else text[:characters_max] + "…"
    return str.encode(cut, "utf-8", "replace").decode()
