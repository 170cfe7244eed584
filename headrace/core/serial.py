"""Execution in the serial mode: each transaction to completion, in TID order, with an undo list.

Rules:
1. An awaited call (`ctx.call`) runs at once. One-way calls (`ctx.call_async`) run after the root has returned, in the
   order in which they were made, as one queue per transaction; their results are discarded. The first exception in
   that order aborts the transaction and is its reply.
2. The context holds its entity's state while a call runs. The state is stored when the call returns or waits. If
   something can still fail after that, the earlier state is added to the undo list. The root's earlier state is kept in
   a local variable instead; if the root waits, in both. An abort restores all of them, latest first (`_roll_back`). No
   read or write sets are kept.
3. An exception that leaves a function aborts the transaction: no caller can catch it, wherever it runs.
4. The hot loop does not track the paths of calls. A transaction that needs them is undone and run again by
   `TrackedExecutor`, and so is every later one with the same root. Other transactions pay nothing.

Functions are plain calls, or coroutines driven by `send`: there is no event loop here.

Never here: time, request ids, epochs' ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from headrace.core import order
from headrace.core.bindings import Binding, Bindings
from headrace.core.contexts import (
    Awaitable,
    Doom,
    SerialContext,
    TrackedContext,
    Transaction,
    Untracked,
    cannot_await,
    dead_transaction,
    positional,
    serial_context,
    too_deep,
    too_many_calls,
)
from headrace.core.decrees import DECREE, Interrupt, check_place
from headrace.core.digests import UNCHANGED
from headrace.core.epoch import Epoch
from headrace.core.later.expiring import Expiring, ExpiringTracked
from headrace.core.program import Entry, Program
from headrace.core.raised import Traces
from headrace.core.signature import Args
from headrace.core.state import State, Table
from headrace.errors import Poisoned
from headrace.wire.messages import Failure, Need
from headrace.wire.values import HIGH, LOW, MISSING, Key, shown

NOT_READ: Any = object()
UNSEEN = Failure(Poisoned.code, Poisoned.__name__, "it runs again")  # of a run that is void

Body = Callable[..., Any]


class SerialExecutor:
    """Runs epochs, one at a time."""

    def __init__(self, program: Program, state: State, around: Callable[[Body], Body] | None = None) -> None:
        """`around` wraps the body of every function."""
        self.program, self.values, self.state, self.around = program, program.values, state, around
        self.depth_max = program.config.depth_max
        self.transaction = Transaction(program.config.calls_max, program.config.transaction_bytes_max)
        self.dead = dead_transaction()
        self.raised_in: tuple[Binding, Key] | None = None  # the awaited call that raised, if any
        self.traces = Traces()
        self.is_running = False
        self.tracked: TrackedExecutor | None = None  # for transactions that cannot run here
        self.kinds = {
            name: serial_context(program.states[name]) if operator.ttl_us is None else Expiring
            for name, operator in program.operators.items()
        }
        self.positional = {name: positional(kind) for name, kind in self.kinds.items()}
        self.bindings = Bindings(program, state, self._bind)
        for binding in self.bindings.by_number:
            binding.bind(self._context(binding))

    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none. Other threads may read it."""
        if not self.is_running:  # no epoch, or it waits for the response to an external call
            return 0
        epoch = self.transaction.epoch
        at = len(epoch.results)
        return epoch.tids[at] if at < len(epoch.tids) else 0

    def doom_running(self, tid: int) -> bool:
        """This transaction did not return in time: it aborts by decree, even if its function catches the `Interrupt`.
        False if another one runs now. Another thread may call this, while the function is stopped in its own code."""
        tracked = self.tracked
        transaction = tracked.transaction if tracked is not None and tracked.is_running else self.transaction
        epoch = transaction.epoch
        row = len(epoch.results)
        if row >= len(epoch) or epoch.tids[row] != tid:
            return False
        root = self.bindings.by_number[epoch.entries[row].number]
        transaction.is_marked = True
        transaction.doom = Doom(Poisoned(DECREE), root, epoch.keys[row])
        return True

    def _bind(self, entry: Entry, table: Table) -> Binding:
        binding = Binding(entry, table, self.program)
        if self.around is not None:
            binding.body = self.around(binding.body)
        return binding

    def _context(self, binding: Binding) -> SerialContext:
        kinds = self.positional if binding.entry.is_positional else self.kinds
        return kinds[binding.operator.name](self.bindings, self.transaction, binding)

    def _bound(self, epoch: Epoch, start: int, stop: int | None) -> list[Binding]:
        """The bindings of these rows. Rows that abort by decree get one that fails."""
        self.bindings.refresh()
        bound = self.bindings.of(epoch.entries[start:stop] if start or stop else epoch.entries)
        for row, failure in epoch.decreed.items():
            if start <= row < start + len(bound):
                aborts = bound[row - start]
                binding = Binding(aborts.entry, aborts.table, self.program)
                binding.decree(failure.message)
                binding.bind(self._context(binding))
                bound[row - start] = binding
        return bound

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        """Run the rows from `start` up to `stop`. If something is needed first, such as a response to an external call,
        it is returned; once it is there, continue from the row where this stopped.

        The hot loop: it decides what a call costs beyond the function itself. The root and the queued calls run the
        same lines, written twice: a shared method would cost a tenth of the whole."""
        transaction, results = self.transaction, epoch.results
        undo, queue = transaction.undo, transaction.queue
        transaction.epoch, self.is_running = epoch, True
        fail = self.traces.failure
        missing, first, unchanged, bytes_max = MISSING, NOT_READ, UNCHANGED, transaction.limits[1]
        keys, rows = (epoch.keys[start:stop], epoch.args[start:stop]) if start or stop else (epoch.keys, epoch.args)
        for root, root_key, args in zip(self._bound(epoch, start, stop), keys, rows, strict=True):
            try:
                binding, key, is_stored = root, root_key, False
                transaction.bytes_left = bytes_max
                context, states = binding.context, binding.states
                context.key = key
                context._state = before = first = states.get(key, missing)
                result = binding.run(*args)
                if not binding.is_plain:
                    try:
                        awaited = result.send(None)
                    except StopIteration as end:
                        result = end.value
                    else:
                        before, result = self._drive(context, key, before, result, awaited)
                if type(result) is not binding.quick or result >= HIGH or result <= LOW:
                    result = binding.seal(result)
                state = context._state
                if state is not before:
                    if binding.written is not None:
                        binding.written.append(key)
                        news = binding.news
                        if news is not None:
                            news.append(state if state != before or type(state) is not type(before) else unchanged)
                        if binding.befores is not None:
                            binding.befores.setdefault(key, before)
                    if state is missing:
                        states.pop(key, None)
                    else:
                        states[key] = state
                    is_stored = True
                for call in queue:  # grows meanwhile
                    binding, key, args = call
                    context, states = binding.context, binding.states
                    context.key = key
                    context._state = before = states.get(key, missing)
                    returned = binding.run(*args)
                    if not binding.is_plain:
                        try:
                            awaited = returned.send(None)
                        except StopIteration:
                            pass
                        else:
                            before, _ = self._drive(context, key, before, returned, awaited)
                    state = context._state
                    if state is not before:
                        if call is not queue[-1] or transaction.is_marked:  # something can still fail
                            undo.append((binding, key, before))
                        if binding.written is not None:
                            binding.written.append(key)
                            news = binding.news
                            if news is not None:
                                news.append(state if state != before or type(state) is not type(before) else unchanged)
                            if binding.befores is not None:
                                binding.befores.setdefault(key, before)
                        if state is missing:
                            states.pop(key, None)
                        else:
                            states[key] = state
                if transaction.is_marked:
                    transaction.close()
                queue.clear()
                if undo:
                    undo.clear()
                results.append(result)
            except BaseException as error:
                is_void = transaction.needs is not None
                if transaction.is_marked or self.raised_in is not None:
                    failure = self._failure(error, binding, key)
                else:
                    failure = fail(error, binding, key, epoch)
                if undo or is_stored or transaction.is_marked or root.states.get(root_key, missing) is not first:
                    self._roll_back(root, root_key, first, is_stored)
                else:
                    queue.clear()
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

    def _run_tracked(self, epoch: Epoch, root: Binding) -> Need | None:
        """A transaction asked for what this executor does not track. From now on, those with this root are not tried
        here."""
        root.run = self._give_up
        return self._tracked().run_row(epoch, root.number)

    def _tracked(self) -> TrackedExecutor:
        if self.tracked is None:
            self.tracked = TrackedExecutor(self.program, self.state, self.around)
            self.tracked.traces = self.traces
        return self.tracked

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
                binding, key, coroutine = awaited.binding, awaited.key, None
                context = binding.context
                context.key = key
                context._state = before = binding.states.get(key, MISSING)
                answer = binding.run(*awaited.args)
                if not binding.is_plain:
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
                    answer = self.values.unseal(context._binding.seal(answer))  # they share nothing
                    context, key, coroutine = frames.pop()
                    context._state = before = context._binding.states.get(key, MISSING)
        except BaseException:
            self._break_off(context, key, coroutine, frames)
            raise

    def _break_off(self, context: SerialContext, key: Key, coroutine: Any, frames: list[Any]) -> None:
        """A call failed: end it and all that wait for it."""
        self.raised_in = (context._binding, key)
        for waiting, _, suspended in [(context, key, coroutine), *reversed(frames)]:
            self._retire(waiting)
            if suspended is not None:
                with contextlib.suppress(BaseException):
                    suspended.close()

    def _store(self, context: SerialContext, key: Key, before: Any) -> None:
        if context._state is not before:
            self.transaction.undo.append((context._binding, key, before))
            context._binding.table.change(key, before, context._state)

    def _keep_waiting(self, context: SerialContext) -> None:
        """A call keeps its context while it waits: the next call of the function gets another one."""
        if context._binding.context is context:
            context._binding.bind(self._context(context._binding))

    def _retire(self, context: SerialContext) -> None:
        """A call that waited has failed: what its function still does, such as in a `finally`, has no effect."""
        self._keep_waiting(context)
        context.retire(self.dead)

    def _check_await(self, context: SerialContext, awaited: Any, depth: int) -> None:
        transaction = self.transaction
        if type(awaited) is not Awaitable or awaited.made_by is not context or awaited not in transaction.unawaited:
            raise cannot_await(context._binding.name, awaited)
        del transaction.unawaited[awaited]
        if depth >= self.depth_max:
            raise too_deep(self.depth_max)
        if len(transaction.queue) >= transaction.calls_left:
            raise too_many_calls(self.program)
        transaction.calls_left -= 1

    def _roll_back(self, root: Binding, root_key: Key, first: Any, is_stored: bool) -> None:
        """`first` is the root's state before the transaction, for the case that its last one is stored: that is not in
        the undo list."""
        transaction = self.transaction
        if transaction.undo:
            for binding, key, before in reversed(transaction.undo):
                binding.table.take_back(key, before)
            transaction.undo.clear()
        if is_stored:
            root.table.take_back(root_key, first)
        elif first is not NOT_READ and root.states.get(root_key, MISSING) is not first:  # it was interrupted there
            root.table.put(root_key, first)
        transaction.queue.clear()
        if transaction.is_marked:
            transaction.reset()

    def _failure(self, error: BaseException, binding: Binding, key: Key) -> Failure:
        if self.raised_in is not None:
            (binding, key), self.raised_in = self.raised_in, None
        transaction = self.transaction
        if transaction.is_marked:
            if transaction.needs is not None:
                return UNSEEN
            if transaction.doom is not None:  # the limit was reached first
                raised, (error, binding, key) = error, transaction.doom
                if type(raised) is Interrupt:  # it shows where the function was stopped
                    check_place(raised)
                    error = type(error)(*error.args).with_traceback(raised.__traceback__)
        return self.traces.failure(error, binding, key, transaction.epoch)


Walk = Generator[tuple[Binding, Key], None, Need | None]
"""A row that runs: yields the entities whose state it needs before it can continue."""


class WrappedStopIteration(BaseException):
    """Carries a function's StopIteration out of a generator: Python would turn it into a RuntimeError."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


def run_carefully(binding: Binding, args: Args) -> Any:
    try:
        return binding.run(*args)
    except StopIteration as error:
        raise WrappedStopIteration(error) from None


class TrackedExecutor(SerialExecutor):
    """The same, one row at a time, with the path of every call. It can wait before any call."""

    def __init__(self, program: Program, state: State, around: Callable[[Body], Body] | None = None) -> None:
        self.paths: list[bytes] = []  # of the calls in the queue
        super().__init__(program, state, around)

    def _context(self, binding: Binding, path: bytes = b"") -> TrackedContext:
        kind = TrackedContext if binding.operator.ttl_us is None else ExpiringTracked
        return kind(self.bindings, self.transaction, binding, path, self.paths)

    def run_row(self, epoch: Epoch, root: int) -> Need | None:
        """Run the next row, where all state is known; `root` is the number of its function."""
        try:
            binding, key = next(self.walk(epoch, self.bindings.by_number[root]))
        except StopIteration as end:
            need: Need | None = end.value
            return need
        raise AssertionError(f"the state of {binding.name} of {shown(key)} is not known")

    def walk(self, epoch: Epoch, binding: Binding) -> Walk:
        """Run the next row; `binding` is its root's, of this executor."""
        transaction, row = self.transaction, len(epoch.results)
        transaction.epoch, self.is_running = epoch, True
        key, context = epoch.keys[row], self._context(binding, order.ROOT)
        transaction.bytes_left = transaction.limits[1]
        try:
            result = binding.seal((yield from self._run_call(context, key, epoch.args[row])))
            for at, (binding, key, args) in enumerate(transaction.queue):  # grows meanwhile
                context = self._context(binding, self.paths[at])
                yield from self._run_call(context, key, args)
            if transaction.is_marked:
                transaction.close()
            transaction.queue.clear()
            transaction.undo.clear()
            epoch.results.append(result)
        except BaseException as error:
            raised = error.error if isinstance(error, WrappedStopIteration) else error
            failure, needs = self._failure(raised, binding, key), transaction.needs
            self._retire(context)
            self._roll_back(binding, key, NOT_READ, False)
            if needs is not None:
                return needs  # type: ignore[no-any-return]
            epoch.failures[row] = failure
            epoch.results.append(None)
        finally:
            self.is_running = False
            self.paths.clear()
        return None

    def _run_call(self, context: TrackedContext, key: Key, args: Args) -> Generator[tuple[Binding, Key], None, Any]:
        binding = context._binding
        if binding.table.lacks(key):
            yield binding, key
        binding.bind(context)
        context.key = key
        context._state = before = binding.table.get(key)
        result = run_carefully(binding, args)
        if not binding.is_plain:
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
    ) -> Generator[tuple[Binding, Key], None, tuple[Any, Any]]:
        """Like `_drive`, but waits where a call's state is not known."""
        frames: list[tuple[SerialContext, Key, Any]] = []
        try:
            while True:
                self._check_await(context, awaited, len(frames))
                self._store(context, key, before)
                self._keep_waiting(context)
                frames.append((context, key, coroutine))
                binding, key, coroutine = awaited.binding, awaited.key, None
                context = binding.context
                if binding.table.lacks(key):
                    yield binding, key
                context.key = key
                context._state = before = binding.table.get(key)
                answer = run_carefully(binding, awaited.args)
                if not binding.is_plain:
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
                    answer = self.values.unseal(context._binding.seal(answer))
                    context, key, coroutine = frames.pop()
                    context._state = before = context._binding.table.get(key)
        except BaseException:
            self._break_off(context, key, coroutine, frames)
            raise

    def _check_await(self, context: SerialContext, awaited: Any, depth: int) -> None:
        super()._check_await(context, awaited, depth)
        assert isinstance(context, TrackedContext)
        awaited.binding.bind(self._context(awaited.binding, context.path_of_awaited()))
