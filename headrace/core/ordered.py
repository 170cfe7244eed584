"""Execution in the ordered mode: one worker's part of epochs whose transactions are spread over several.

Every call runs as soon as it is known, on what its entity's chain holds below it now. What comes late is inserted where
it belongs, and what that changes is repaired: nothing else runs again.

Rules:
1. A call is a function of its arguments, the state it sees and the answers to what it awaited; it gives new state, a
   result and further calls. It runs again exactly if one of the former has changed, and tells others only what changed
   of the latter.
2. What is lowest in the order of everything goes first. So the lowest call that is still wrong is mended next, and
   with every message delivered and nothing left to do, each call is what a loop over the log makes of it.
3. A call that fails marks its transaction as aborted, with the root's worker, until a repair takes that back; the lowest
   failure is the reply. An aborted transaction's writes are seen by nobody else.
4. What only a run alone can decide (limits that count over the whole transaction, a call that was never awaited) makes
   the transaction a suspect: it is run alone once everything below is final (`core/alone.py`).

Never here: sockets, terms, when an epoch is final.
"""

from __future__ import annotations

import contextlib
import heapq
from typing import Any

from headrace.core import order
from headrace.core.chain import (
    NOT_YET,
    Call,
    Chain,
    Frame,
    Made,
    Record,
    Segment,
    locate,
    same,
    same_call,
    same_target,
    value_before,
)
from headrace.core.execution import SerialContext, Transaction, describe, put_back, size_of
from headrace.core.execution import Call as Awaitable
from headrace.core.placement import ShardMap
from headrace.core.program import MISSING, Args, Entry, Program
from headrace.errors import BadCall, LimitReached
from headrace.wire.messages import Failure
from headrace.wire.values import Key, shown

# What workers tell each other: the first item of a row.
CALL, CANCEL, ANSWER, FAILED, MENDED, ABORTED, REVIVED = range(7)


class Part:
    """One epoch, as far as this worker knows it."""

    def __init__(self, number: int, tids: range) -> None:
        self.number, self.tids = number, tids
        self.calls: dict[int, dict[bytes, Call]] = {}  # by TID and place
        self.roots: dict[int, Call] = {}
        self.owners: dict[int, int] = {}  # TID -> the worker of its root
        self.failures: dict[int, dict[tuple[bytes, int], Failure]] = {}  # of own roots: by place and worker
        self.spread: set[int] = set()  # own roots' transactions that other workers know of
        self.suspects: set[int] = set()
        self.bytes: dict[int, int] = {}  # per TID, where it counts
        self.outbox: dict[int, list[Any]] = {}


class OrderedContext(SerialContext):
    """Notes whether the state was looked at, and keeps merges apart."""

    __slots__ = ("_deltas", "_read", "_tid")

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
        self._deltas = None
        super().put(value)

    def delete(self) -> None:
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


class OrderedExecutor:
    def __init__(self, program: Program, me: int) -> None:
        self.program, self.values, self.me = program, program.values, me
        self.depth_max, self.calls_max = program.config.depth_max, program.config.calls_max
        self.bytes_max = program.config.transaction_bytes_max
        self.transaction = Transaction(self.calls_max, self.bytes_max)
        self.shards = ShardMap([me])
        self.workers = 1
        self.parts: dict[int, Part] = {}  # the epochs that are not final, in order
        self.aborted: set[int] = set()
        self.heap: list[tuple[tuple[int, bytes], int, Record]] = []
        self.pushed = 0
        self.running = 0
        self.ran = self.ran_again = 0
        self.chains: dict[Any, dict[Key, Chain]] = {operator: {} for operator in program.app.operators.values()}

    def bind(self) -> None:
        """Take the program's functions over from the other mode."""
        for entry in self.program.entries:
            entry.bind(self._context(entry))
            entry.chains = self.chains[entry.operator]

    def decreed(self, entry: Entry, why: str) -> Entry:
        """The entry for a transaction that aborts by decree."""
        entry = entry.decreed(why)
        entry.bind(self._context(entry))
        return entry

    def _context(self, entry: Entry) -> OrderedContext:
        context = OrderedContext(self.program, self.transaction, entry)
        context._read, context._deltas, context._tid = False, (), 0
        return context

    # --- the loop -----------------------------------------------------------------------------------------------------

    def begin(self, part: Part) -> None:
        self.parts[part.number] = part

    def start(self, part: Part, tid: int, entry: Entry, key: Key, args: Args) -> None:
        """A root of this worker's."""
        call = Call((tid, order.ROOT), entry, key, args)
        part.roots[tid] = call
        part.calls[tid] = {order.ROOT: call}
        self._run(part, call)

    def lowest(self) -> int:
        """The TID of what is to be done next; 0 if there is nothing."""
        while self.heap and self.heap[0][2].is_gone:
            heapq.heappop(self.heap)
        return self.heap[0][0][0] if self.heap else 0

    def repair(self) -> None:
        """Do the lowest thing that there is to do."""
        _, _, record = heapq.heappop(self.heap)
        record.is_queued = False
        if record.is_gone:
            return
        call, part = record.call, self._part_of(record.order[0])
        if part is None or record.order[0] in part.suspects:
            return
        if call.must_run:
            self._run(part, call)
        elif type(record) is Segment and call.frame is not None and record is call.frame.segment:
            self._resume(part, call, call.frame)
        else:
            self._check(part, record)

    def _part_of(self, tid: int) -> Part | None:
        for part in self.parts.values():
            if tid in part.tids:
                return part
        return None

    def _queue(self, record: Record) -> None:
        if not record.is_queued:
            record.is_queued = True
            self.pushed += 1
            heapq.heappush(self.heap, (record.order, self.pushed, record))

    # --- chains -------------------------------------------------------------------------------------------------------

    def _check(self, part: Part, record: Record) -> None:
        """Something below this record has changed: does it see the same?"""
        call = record.call
        tid, chain = record.order[0], call.entry.chains[call.key]
        at = locate(chain, record.order)
        before = value_before(chain, at, tid, self.aborted)
        if not same(before, record.seen):
            if record.read:
                self._run(part, call)
                return
            if record.deltas:
                try:
                    record.new = self._fold(part, call, before, record.deltas)
                except BaseException:  # the function itself must see it fail
                    self._run(part, call)
                    return
                self._ripple(call, chain, at)
            record.seen = before
        if tid in self.aborted:
            self._ripple(call, chain, at)  # for others, what is below goes right through

    def _fold(self, part: Part, call: Call, state: Any, deltas: tuple[Any, ...]) -> Any:
        combine, values = call.entry.operator.combine, self.values
        assert combine is not None
        for delta in deltas:
            if state is MISSING:
                state = delta
            else:
                state = values.seal(combine(values.unseal(state), values.unseal(delta)))
                self._count_bytes(part, call.order[0], size_of(state))
        return state

    def _ripple(self, call: Call, chain: Chain, at: int) -> None:
        """What the record at this index leaves has changed, or who sees it."""
        if at + 1 < len(chain):
            self._queue(chain[at + 1])
        else:
            put_back(call.entry.table, call.key, value_before(chain, len(chain), 0, self.aborted))

    def _link(self, record: Record, call: Call) -> tuple[Chain, int]:
        """Put a record into its entity's chain."""
        chains, key = call.entry.chains, call.key
        chain = chains.get(key)
        if chain is None:
            chain = chains[key] = [call.entry.table.get(key, MISSING)]
            at = 1
        elif chain[-1].order < record.order:
            at = len(chain)
        else:
            at = locate(chain, record.order)
        chain.insert(at, record)
        record.is_linked = True
        return chain, at

    def _unlink(self, record: Record) -> None:
        record.is_gone = True
        if record.is_linked:
            record.is_linked = False
            call = record.call
            chain = call.entry.chains[call.key]
            at = locate(chain, record.order)
            assert chain[at] is record
            del chain[at]
            if len(chain) == 1:
                put_back(call.entry.table, call.key, chain[0])
                del call.entry.chains[call.key]
            else:
                self._ripple(call, chain, at - 1)

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(self, part: Part, call: Call) -> None:
        """Run a call from its start."""
        if not call.must_run:
            self.ran_again += 1
        call.must_run = False
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(call.frame)
        entry, transaction = call.entry, self.transaction
        self._reset(transaction)
        self.ran += 1
        self.running = call.order[0]
        context = entry.context
        context.key, context._tid = call.key, call.order[0]
        if call.is_linked:
            chain = entry.chains[call.key]
            at = locate(chain, call.order)
        else:
            chain, at = self._link(call, call)
        before = value_before(chain, at, call.order[0], self.aborted)
        self._hand(context, before)
        try:
            result = entry.run(*call.args)
            if entry.is_plain:
                result = self._sealed(call, result)
        except BaseException as error:
            self._fail(part, call, call, before, error, context, None)
        else:
            if entry.is_plain:
                self._close(call, call, context, before)
                self._complete(part, call, result)
            else:
                self._drive(part, call, context, result, None, call, before, 0)
        self.running = 0

    def _sealed(self, call: Call, result: Any) -> Any:
        """What one-way calls return is dropped unseen."""
        return self.values.seal(result) if call.caller_size or call.order[1] == order.ROOT else None

    def _reset(self, transaction: Transaction) -> None:
        transaction.queue.clear()
        if transaction.is_marked:
            transaction.reset()

    def _hand(self, context: OrderedContext, state: Any) -> None:
        context._state, context._read, context._deltas = state, False, ()

    def _drive(
        self,
        part: Part,
        call: Call,
        context: OrderedContext,
        coroutine: Any,
        answer: Any,
        record: Record,
        before: Any,
        done: int,
    ) -> None:
        """Go on with a coroutine until it ends or waits for what is not known yet. `record` is the part of it that runs,
        on the state `before`; `done` is how many awaits lie behind."""
        queue = self.transaction.queue
        while True:
            try:
                awaited = coroutine.send(answer)
                self._check_await(call, context, awaited)
            except StopIteration as stop:
                try:
                    result = self._sealed(call, stop.value)
                except BaseException as error:
                    self._fail(part, call, record, before, error, context, None)
                    return
                self._close(call, record, context, before)
                self._trim(call, done)
                self._complete(part, call, result)
                return
            except BaseException as error:
                self._fail(part, call, record, before, error, context, coroutine)
                return
            self._close(call, record, context, before)
            frame = call.frame
            if frame is None:
                frame = call.frame = Frame()
            queue.append((awaited.entry, awaited.key, awaited.args, True))
            n = len(queue)
            segment = self._segment(call, frame, done, n)
            done += 1
            self._await(part, call, frame, n, (True, awaited.entry, awaited.key, awaited.args))
            if n not in frame.answers:
                self._suspend(part, call, frame, n, segment, context, coroutine)
                return
            answer = self.values.unseal(frame.answers[n])
            record, before = segment, self._state_for(segment, call)
            self._hand(context, before)

    def _segment(self, call: Call, frame: Frame, done: int, n: int) -> Segment:
        """The record of what comes after the await number `done` (from 0), of the call numbered `n`: the one of the run
        before, if it stood at the same place."""
        at = (call.order[0], order.after(call.order[1], n))
        if done < len(frame.segments):
            if frame.segments[done].order == at:
                return frame.segments[done]
            self._trim(call, done)
        segment = Segment(at, call)
        frame.segments.append(segment)
        return segment

    def _trim(self, call: Call, count: int) -> None:
        """The call has no more than so many segments now."""
        if call.frame is not None:
            for segment in call.frame.segments[count:]:
                self._unlink(segment)
            del call.frame.segments[count:]

    def _state_for(self, segment: Segment, call: Call) -> Any:
        chain = call.entry.chains[call.key]  # it holds the call itself
        return value_before(chain, locate(chain, segment.order), segment.order[0], self.aborted)

    def _close(self, call: Call, record: Record, context: OrderedContext, before: Any) -> None:
        """A part of a call has ended well: note what it saw and left, and tell those above."""
        new, deltas, read = context._state, context._deltas, context._read
        if type(record) is Segment and not record.is_linked:
            if new is before and not read and not deltas:
                return  # it did not touch the state
            chain, at = self._link(record, call)
        else:
            chain = call.entry.chains[call.key]
            at = locate(chain, record.order)
        was = record.new
        record.seen, record.new = before, new
        record.read = read or (new is before and not deltas)
        record.deltas = deltas if deltas and not read else ()
        if record.order[0] in self.aborted or was is None or not same(was, new):
            self._ripple(call, chain, at)

    def _complete(self, part: Part, call: Call, result: Any) -> None:
        """A call has returned: its caller is answered, its one-way calls are made."""
        tid, transaction = call.order[0], self.transaction
        if transaction.is_marked:
            self._count_marks(part, tid, transaction)
        call.result = result
        if call.failure is not None:
            self._mend(part, call)
        self._dispatch_sent(part, call, transaction.queue)
        if call.caller_size and not (call.answered is not NOT_YET and same(call.answered, call.result)):
            call.answered = call.result
            self._answer(part, call)

    def _count_marks(self, part: Part, tid: int, transaction: Transaction) -> None:
        if transaction.doom is not None or transaction.unawaited:
            part.suspects.add(tid)
        self._count_bytes(part, tid, self.bytes_max - transaction.bytes_left)
        transaction.bytes_left = self.bytes_max

    def _count_bytes(self, part: Part, tid: int, size: int) -> None:
        """If all workers together are over the limit, one of them is over its share of it."""
        if size:
            part.bytes[tid] = total = part.bytes.get(tid, 0) + size
            if total * self.workers > self.bytes_max:
                part.suspects.add(tid)

    def _fail(
        self, part: Part, call: Call, record: Record, before: Any, error: BaseException, context: Any, coroutine: Any
    ) -> None:
        tid = call.order[0]
        failure = Failure(*describe(error), call.entry.name, call.key)
        transaction = self.transaction
        if transaction.is_marked:
            self._count_marks(part, tid, transaction)
            transaction.reset()
        if call.entry.context is context:
            call.entry.bind(self._context(call.entry))
        context.retire()
        if coroutine is not None:
            with contextlib.suppress(BaseException):
                coroutine.close()
        if type(record) is Segment and not record.is_linked:
            self._link(record, call)
        chain = call.entry.chains[call.key]
        record.seen, record.read, record.deltas = before, True, ()
        if record.new is None or not same(record.new, before):
            record.new = before
            self._ripple(call, chain, locate(chain, record.order))
        if call.frame is not None:
            done = 0 if record is call else call.frame.segments.index(record) + 1  # type: ignore[arg-type]
            self._trim(call, done)
        place = record.order[1]
        if call.failure is not None:
            if call.failed_at == place and same_failure(call.failure, failure):
                return
            if call.failed_at != place:
                self._mend(part, call)
        call.failure, call.failed_at = failure, place
        if part.owners[tid] == self.me:
            self.failed(part, tid, place, self.me, failure)
        else:
            row = (FAILED, tid, place, failure.code, failure.type, failure.message, failure.function, failure.key)
            self.tell(part, part.owners[tid], row)

    # --- coroutines that wait -----------------------------------------------------------------------------------------

    def _check_await(self, call: Call, context: OrderedContext, awaited: Any) -> None:
        transaction = self.transaction
        if type(awaited) is not Awaitable or awaited.made_by is not context or awaited not in transaction.unawaited:
            raise BadCall(f"{call.entry.name} awaits {shown(awaited)}; it may await its own ctx.call(...), once")
        del transaction.unawaited[awaited]
        if call.depth >= self.depth_max:
            raise LimitReached(f"calls nested deeper than {self.depth_max}")

    def _await(self, part: Part, call: Call, frame: Frame, n: int, wanted: Made) -> None:
        """Make an awaited call, unless the run before made the very same."""
        made = call.made
        if made is None:
            made = call.made = {}
        old = made.get(n)
        if old is not None and same_call(old, wanted):
            return
        frame.answers.pop(n, None)
        frame.attempts[n] = frame.attempts.get(n, 0) + 1
        self._replace(part, call, n, old, wanted)

    def _suspend(
        self, part: Part, call: Call, frame: Frame, n: int, segment: Segment, context: OrderedContext, coroutine: Any
    ) -> None:
        transaction = self.transaction
        frame.coroutine, frame.context, frame.waits_for, frame.segment = coroutine, context, n, segment
        frame.queue, frame.unawaited = list(transaction.queue), transaction.unawaited
        transaction.unawaited = {}
        self._trim(call, frame.segments.index(segment) + 1)
        if transaction.is_marked:
            self._count_marks(part, call.order[0], transaction)
        if call.entry.context is context:  # it keeps its context
            call.entry.bind(self._context(call.entry))
        if call.failure is not None:
            self._mend(part, call)

    def _resume(self, part: Part, call: Call, frame: Frame) -> None:
        transaction, segment, coroutine = self.transaction, frame.segment, frame.coroutine
        assert segment is not None and coroutine is not None
        n, context = frame.waits_for, frame.context
        if n not in frame.answers:
            return
        frame.coroutine = frame.segment = None
        transaction.reset()
        transaction.queue[:] = frame.queue
        transaction.unawaited, transaction.is_marked = frame.unawaited, bool(frame.unawaited)
        self.ran += 1
        self.running = call.order[0]
        before = self._state_for(segment, call)
        self._hand(context, before)
        answer = self.values.unseal(frame.answers[n])
        done = frame.segments.index(segment) + 1
        self._drive(part, call, context, coroutine, answer, segment, before, done)
        self.running = 0

    def _let_go(self, frame: Frame) -> None:
        """A suspended run is void."""
        coroutine, frame.coroutine, frame.segment = frame.coroutine, None, None
        frame.context.retire()
        with contextlib.suppress(BaseException):
            coroutine.close()

    # --- calls made ---------------------------------------------------------------------------------------------------

    def _dispatch_sent(self, part: Part, call: Call, queue: list[Any]) -> None:
        """Make the one-way calls of a call that has returned, as far as they differ from those under way."""
        made = call.made
        if made is None:
            if not queue:
                return
            made = call.made = {}
        n = 0
        for entry, key, args, *is_awaited in queue:
            n += 1
            if is_awaited:
                continue
            wanted = (False, entry, key, args)
            old = made.get(n)
            if old is None:
                made[n] = wanted
                self._make(part, call, n, wanted)
            elif not same_call(old, wanted):
                self._replace(part, call, n, old, wanted)
        if len(made) > n:
            for other in [m for m in made if m > n]:
                self._cancel(part, call, other, made.pop(other))

    def _replace(self, part: Part, call: Call, n: int, old: Made | None, wanted: Made) -> None:
        assert call.made is not None
        if old is not None and not same_target(old, wanted):
            self._cancel(part, call, n, old)
        call.made[n] = wanted
        self._make(part, call, n, wanted)

    def _make(self, part: Part, call: Call, n: int, made: Made) -> None:
        tid, place = call.order
        is_awaited, entry, key, args = made
        worker = self._owner(entry, key)
        caller_size = depth = attempt = 0
        if is_awaited:
            assert call.frame is not None
            at, caller_size, depth = order.awaited(place, n), len(place), call.depth + 1
            attempt = call.frame.attempts[n]
        else:
            at = order.sent(place, n)
        if worker == self.me:
            self.arrive(part, tid, at, entry, key, args, self.me, caller_size, depth, attempt)
        else:
            if tid not in part.spread:
                part.spread.add(tid)
                if tid in self.aborted and part.owners[tid] == self.me:
                    self._tell_all(part, (ABORTED, tid))
            row = (CALL, tid, at, entry.number, key, args, caller_size, depth, attempt)
            self.tell(part, worker, row)

    def _owner(self, entry: Entry, key: Key) -> int:
        return self.shards.owner(entry.operator, key)

    def _cancel(self, part: Part, call: Call, n: int, made: Made) -> None:
        tid, place = call.order
        is_awaited, entry, key, _ = made
        at = order.awaited(place, n) if is_awaited else order.sent(place, n)
        worker = self._owner(entry, key)
        if worker == self.me:
            self.cancel(part, tid, at)
        else:
            self.tell(part, worker, (CANCEL, tid, at))

    def arrive(
        self,
        part: Part,
        tid: int,
        place: bytes,
        entry: Entry,
        key: Key,
        args: Args,
        caller_worker: int = 0,
        caller_size: int = 0,
        depth: int = 0,
        attempt: int = 0,
    ) -> None:
        """A call for one of this worker's entities: a new one, or one that replaces the call at its place."""
        if tid in part.suspects:
            return
        calls = part.calls.get(tid)
        if calls is None:
            calls = part.calls[tid] = {}
        old = calls.get(place)
        if old is not None:
            if old.entry is entry and type(old.key) is type(key) and old.key == key:
                old.args, old.attempt, old.caller_worker = args, attempt, caller_worker
                old.answered, old.must_run = NOT_YET, True
                self._queue(old)
                return
            self._drop(part, old)
        call = Call((tid, place), entry, key, args)
        call.caller_worker, call.caller_size, call.depth, call.attempt = caller_worker, caller_size, depth, attempt
        calls[place] = call
        if len(calls) * self.workers > self.calls_max:
            part.suspects.add(tid)
        else:
            self._queue(call)

    def cancel(self, part: Part, tid: int, place: bytes) -> None:
        call = part.calls.get(tid, {}).pop(place, None)
        if call is not None:
            self._drop(part, call)

    def install(self, part: Part, tid: int, n: int, entry: Entry, key: Key, state: Any) -> None:
        """A write of a transaction that ran alone."""
        call = Call((tid, order.awaited(order.ROOT, n)), entry, key, ())
        part.calls.setdefault(tid, {})[call.order[1]] = call
        chain, at = self._link(call, call)
        call.seen, call.new = value_before(chain, at, tid, self.aborted), state
        call.read = call.must_run = False
        self._ripple(call, chain, at)

    def _drop(self, part: Part, call: Call) -> None:
        """A call was not made after all: nor were those that it made."""
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(call.frame)
        self._trim(call, 0)
        self._unlink(call)
        if call.failure is not None:
            self._mend(part, call)
        for n, made in (call.made or {}).items():
            self._cancel(part, call, n, made)
        call.made = None

    def forget(self, part: Part, tid: int) -> None:
        """Remove all that is known of a transaction here, without telling anybody: everybody does the same."""
        for call in part.calls.pop(tid, {}).values():
            if call.frame is not None and call.frame.coroutine is not None:
                self._let_go(call.frame)
            self._trim(call, 0)
            self._unlink(call)
        part.failures.pop(tid, None)
        part.roots.pop(tid, None)
        part.bytes.pop(tid, None)
        self.aborted.discard(tid)

    # --- answers, failures, aborts ------------------------------------------------------------------------------------

    def _answer(self, part: Part, call: Call) -> None:
        tid, place = call.order
        caller = place[: call.caller_size]
        n, _ = order.read_number(place, call.caller_size)
        if call.caller_worker == self.me:
            self.answered(part, tid, caller, n, call.attempt, call.result)
        else:
            self.tell(part, call.caller_worker, (ANSWER, tid, caller, n, call.attempt, call.result))

    def answered(self, part: Part, tid: int, place: bytes, n: int, attempt: int, result: Any) -> None:
        call = part.calls.get(tid, {}).get(place)
        if call is None or call.frame is None or call.frame.attempts.get(n) != attempt:
            return  # to a call that was not made after all
        frame = call.frame
        if n in frame.answers and same(frame.answers[n], result):
            return
        frame.answers[n] = result
        if frame.coroutine is not None and frame.waits_for == n:
            assert frame.segment is not None
            self._queue(frame.segment)
        elif frame.coroutine is None or n < frame.waits_for:
            call.must_run = True
            self._queue(call)

    def _mend(self, part: Part, call: Call) -> None:
        """A call that failed does not any more."""
        tid, place, call.failure = call.order[0], call.failed_at, None
        if part.owners[tid] == self.me:
            self.mended(part, tid, place, self.me)
        else:
            self.tell(part, part.owners[tid], (MENDED, tid, place))

    def failed(self, part: Part, tid: int, place: bytes, worker: int, failure: Failure) -> None:
        """A call of an own root's transaction failed."""
        failures = part.failures.setdefault(tid, {})
        failures[place, worker] = failure
        if len(failures) == 1 and tid not in self.aborted:
            self.abort(part, tid)
            if tid in part.spread:
                self._tell_all(part, (ABORTED, tid))

    def mended(self, part: Part, tid: int, place: bytes, worker: int) -> None:
        failures = part.failures.get(tid, {})
        failures.pop((place, worker), None)
        if not failures and tid in self.aborted:
            part.failures.pop(tid, None)
            self.revive(part, tid)
            if tid in part.spread:
                self._tell_all(part, (REVIVED, tid))

    def abort(self, part: Part, tid: int) -> None:
        self.aborted.add(tid)
        self._look_again(part, tid)

    def revive(self, part: Part, tid: int) -> None:
        self.aborted.discard(tid)
        self._look_again(part, tid)

    def _look_again(self, part: Part, tid: int) -> None:
        """Whether others see a transaction's writes has changed."""
        for call in part.calls.get(tid, {}).values():
            records: list[Record] = [call] if call.frame is None else [call, *call.frame.segments]
            for record in records:
                if record.is_linked:
                    chain = call.entry.chains[call.key]
                    at = locate(chain, record.order)
                    while at + 1 < len(chain) and chain[at + 1].order[0] == tid:
                        at += 1
                    self._ripple(call, chain, at)

    # --- the others ---------------------------------------------------------------------------------------------------

    def tell(self, part: Part, worker: int, row: Any) -> None:
        rows = part.outbox.get(worker)
        if rows is None:
            part.outbox[worker] = [row]
        else:
            rows.append(row)

    def _tell_all(self, part: Part, row: Any) -> None:
        for worker in range(1, self.workers + 1):
            if worker != self.me:
                self.tell(part, worker, row)

    def hear(self, part: Part, source: int, rows: list[Any]) -> None:
        """What another worker has told."""
        entries = self.program.numbered
        for kind, tid, *row in rows:
            if kind == CALL:
                place, number, key, args, caller_size, depth, attempt = row
                self.arrive(part, tid, place, entries[number], key, tuple(args), source, caller_size, depth, attempt)
            elif kind == CANCEL:
                self.cancel(part, tid, row[0])
            elif kind == ANSWER:
                self.answered(part, tid, *row)
            elif kind == FAILED:
                self.failed(part, tid, row[0], source, Failure(*row[1:]))
            elif kind == MENDED:
                self.mended(part, tid, row[0], source)
            elif kind == ABORTED:
                self.abort(part, tid)
            else:
                self.revive(part, tid)

    def outcome(self, part: Part, tid: int) -> tuple[Any, Failure | None]:
        """Of an own root's transaction, as things stand."""
        failures = part.failures.get(tid)
        if failures:
            return None, failures[min(failures)]
        return part.roots[tid].result, None

    def finish(self, part: Part) -> None:
        """An epoch is final: its records are history."""
        del self.parts[part.number]
        if not self.parts:
            self.heap.clear()
            self.aborted.clear()
            for chains in self.chains.values():
                chains.clear()
            return
        last = part.tids[-1]
        for calls in part.calls.values():
            for call in calls.values():
                chain = call.entry.chains.get(call.key)
                if chain is None or len(chain) == 1 or chain[1].order[0] > last:
                    continue
                at = locate(chain, (last + 1, b""))
                if at == len(chain):
                    del call.entry.chains[call.key]
                else:
                    chain[0] = value_before(chain, at, 0, self.aborted)
                    del chain[1:at]
        self.aborted.difference_update(part.tids)


def same_failure(one: Failure, other: Failure) -> bool:
    return (one.code, one.type, one.message) == (other.code, other.type, other.message)
