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
    Ran,
    Record,
    Segment,
    chain_of,
    locate,
    same,
    same_call,
    value_before,
)
from headrace.core.exchange import FAILED, Exchange, Part, Row, by_number, same_failure
from headrace.core.execution import Call as Awaitable
from headrace.core.execution import SerialContext, Transaction, describe, put_back, size_of
from headrace.core.placement import ShardMap
from headrace.core.prediction import Lessons, Predictions
from headrace.core.program import MISSING, Entry, Program
from headrace.errors import BadCall, LimitReached
from headrace.wire.messages import Failure
from headrace.wire.values import HIGH, LOW, Key, shown

NESTED_MAX = 16


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
        self._deltas = None
        if type(value) is int and value < HIGH and value > LOW:
            self._state = value
        else:
            self._state = self._seal(value)

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


class OrderedExecutor(Exchange):
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
        self.nested = 0  # calls that run within others now
        self.spare: dict[Entry, list[OrderedContext]] = {}  # contexts
        self.predictions: Predictions = {}
        self.learned: list[Any] = []  # templates that nobody has been told of
        self.chains: dict[Any, dict[Key, Any]] = {operator: {} for operator in program.app.operators.values()}

    def place(self, shards: ShardMap) -> None:
        self.shards = shards
        for entry in self.program.entries:
            entry.owners = shards.cache_of(entry.operator)

    def bind(self) -> None:
        """Take the program's functions over from the other mode."""
        for entry in self.program.entries:
            entry.bind(self._context(entry))
            entry.chains = self.chains[entry.operator]
            if entry.sealed is not entry and entry.lessons is None and entry not in self.predictions:
                entry.lessons = Lessons(self.program.config.predict_after_runs)

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

    def work(self, budget: int) -> None:
        """A slice of what there is to do: what is lowest first."""
        for part in self.parts.values():
            while part.at < len(part.rows):
                while self.lowest() and self.heap[0][0] < part.rows[part.at][:2]:
                    if budget <= 0:
                        return
                    budget -= 1
                    self.repair()
                if budget <= 0:
                    return
                budget -= self._run_rows(part, budget)
        while budget > 0 and self.lowest():
            budget -= 1
            self.repair()

    def has_work(self) -> bool:
        return self.lowest() > 0 or any(part.at < len(part.rows) for part in self.parts.values())

    def is_idle(self, part: Part) -> bool:
        lowest = self.lowest()
        return part.at == len(part.rows) and not 0 < lowest <= part.tids[-1]

    def _run_rows(self, part: Part, budget: int) -> int:
        """The hot loop: rows in their order, and what they call here, as long as each is the last of its chain. What is
        not so simple goes the long way. Returns how many rows were started."""
        rows, at, heap, transaction = part.rows, part.at, self.heap, self.transaction
        queue, calls_of, predictions, root = transaction.queue, part.calls, part.predictions, order.ROOT
        start, stop, ran = at, min(len(rows), at + budget), 0
        while at < stop and not (heap and heap[0][0] < rows[at][:2]):
            todo = [rows[at]]
            at += 1
            for tid, place, entry, key, args in todo:  # which grows
                if part.overruled and (tid, place) in part.overruled and place is not root:
                    continue
                chains = entry.chains
                chain = chains.get(key)
                if chain is not None and (chain[-1] if type(chain) is list else chain).order[0] >= tid:
                    self._start(part, (tid, place, entry, key, args))
                    continue
                is_awaited = place[0] == 1 and place is not root
                if is_awaited or not entry.is_plain or tid in self.aborted:
                    self._start(part, (tid, place, entry, key, args))
                    continue
                table, context = entry.table, entry.context
                if transaction.is_marked:
                    transaction.reset()
                queue.clear()
                context.key, context._tid = key, tid
                context._state = before = table.get(key, MISSING)
                context._read, context._deltas = False, ()
                self.running = tid
                ran += 1
                try:
                    result = entry.run(*args)
                    if place is root and (type(result) is not int or result >= HIGH or result <= LOW):
                        result = self.values.seal(result)
                except BaseException as error:
                    call = self._registered(part, tid, place, entry, key, args)
                    self._predict(part, call)
                    self._link(call, call)
                    call.must_run = False
                    self._fail(part, call, 0, before, error, context, None)
                    continue
                state = context._state
                call = Ran((tid, place), entry, key, args, before, state, context._read, result)
                if chain is None:
                    chains[key] = call
                elif type(chain) is list:
                    chain.append(call)
                else:
                    chains[key] = [chain.seen, chain, call]
                if state is not before:
                    if state is MISSING:
                        table.pop(key, None)
                    else:
                        table[key] = state
                if not context._read:
                    if context._deltas:
                        call.deltas = context._deltas
                    elif state is before:
                        call.read = True
                calls = calls_of.get(tid)
                if calls is None:
                    calls_of[tid] = call
                else:
                    self._register(part, call)
                if entry.lessons is not None:
                    self._learn(entry, key, args, queue)
                if transaction.is_marked:
                    self._count_marks(part, tid, transaction)
                if queue or (place is root and entry in predictions):
                    self._send_on(part, call, todo)
        part.at = at
        self.running = 0
        self.ran += ran
        return at - start

    def _send_on(self, part: Part, call: Call, todo: list[Row]) -> None:
        """The calls that a call made when it ran in its turn: those to own entities are next, others are told, unless
        they were predicted. What was predicted otherwise goes the long way."""
        queue, me, n = self.transaction.queue, self.me, 0
        tid, place = call.order
        templates = part.predictions.get(call.entry, ()) if place is order.ROOT else ()
        if len(queue) < len(templates) or len(queue) + self.calls_here(part, tid) > self.calls_max // self.workers:
            self._predict(part, call)
            self._dispatch_sent(part, call, queue)
            return
        told = []
        for entry, key, args in queue:
            n += 1
            if (entry.owners.get(key) or self.shards.owner(entry.operator, key)) == me:
                if n > len(templates) or templates[n - 1].entry is entry:
                    todo.append((tid, order.sent(place, n, me), entry, key, args))
                    continue
            elif n > len(templates):
                told.append(n)
                continue
            elif templates[n - 1].gives(call.key, call.args, entry, key, args):
                continue
            del todo[1:]  # only a root has predictions, and it is the first
            self._predict(part, call)
            self._dispatch_sent(part, call, queue)
            return
        call.made = queue.copy()
        for n in told:
            self._later(self._make(part, call, n, (False, *queue[n - 1])))

    def _start(self, part: Part, row: Row) -> None:
        """A row, the long way."""
        tid, place, entry, key, args = row
        if tid in part.suspects:
            return
        call = self._registered(part, tid, place, entry, key, args)
        if place[0] == 1:
            if place == order.ROOT:
                self._predict(part, call)
            else:  # predicted, and awaited by the root
                call.caller_worker, call.caller_size, call.depth, call.attempt = part.owner(tid), 1, 1, 1
        self._run(part, call)

    def _registered(self, part: Part, tid: int, place: bytes, entry: Entry, key: Key, args: Any) -> Call:
        call = Call((tid, place), entry, key, args)
        self._register(part, call)
        return call

    def _predict(self, part: Part, call: Call) -> None:
        """Calls of a root that other workers run without being told count as made."""
        if call.order[1] != order.ROOT:
            return
        for template in part.predictions.get(call.entry, ()):
            made = template.fill(call.key, call.args)
            if made is not None and self._owner(made[1], made[2]) != self.me:
                if call.made is None:
                    call.made = {}
                call.made[template.n] = made
                if template.is_awaited:
                    if call.frame is None:
                        call.frame = Frame()
                    call.frame.attempts[template.n] = 1
                    early = part.early_answers.get(call.order[0])
                    if early is not None and template.n in early:
                        call.frame.answers[template.n] = early[template.n]

    def _learn(self, entry: Entry, key: Key, args: Any, queue: list[Any]) -> None:
        made = [(bool(is_awaited), called, to, given) for called, to, given, *is_awaited in queue]
        verdict = entry.lessons.note(key, args, made)
        if verdict is not None:
            if verdict:
                self.learned += entry.lessons.templates(entry)
            entry.lessons = None

    def lowest(self) -> int:
        """The TID of what is to be done next; 0 if there is nothing."""
        heap = self.heap
        while heap and heap[0][2].is_gone:
            heapq.heappop(heap)
        return heap[0][0][0] if heap else 0

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
            return
        self._check(part, record)
        frame = call.frame
        if frame is not None and frame.coroutine is not None and frame.waits_for in frame.answers:
            self._resume(part, call, frame)

    def _go_on(self, part: Part, call: Call) -> None:
        if call.is_queued or call.order[0] in part.suspects:
            self._queue(call)
        else:
            self._resume(part, call, call.frame)  # type: ignore[arg-type]

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
        tid, chain = record.order[0], chain_of(call)
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
        elif type(chain) is not list:
            chain = chains[key] = [chain.seen, chain]
            at = 1 if record.order < chain[1].order else 2
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
            chain = chain_of(call)
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
        self.ran_again += call.is_linked
        call.must_run = False
        if type(call.made) is list:
            call.made = by_number(call.made)
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(part, call)
        entry, transaction = call.entry, self.transaction
        self._reset(transaction)
        self.ran += 1
        self.running = call.order[0]
        context = entry.context
        context.key, context._tid = call.key, call.order[0]
        if call.is_linked:
            chain = chain_of(call)
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
            self._fail(part, call, 0, before, error, context, None)
        else:
            if entry.is_plain:
                self._close(call, 0, context, before)
                self._complete(part, call, result)
            else:
                self._drive(part, call, context, result, None, 0, before)
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
        self, part: Part, call: Call, context: OrderedContext, coroutine: Any, answer: Any, n: int, before: Any
    ) -> None:
        """Go on with a coroutine until it ends or waits for what is not known yet. It runs after the answer to its call
        number `n` (0: from its start), on the state `before`."""
        queue, frame = self.transaction.queue, call.frame
        if frame is not None:
            frame.is_running = True
            if not n:
                frame.awaited.clear()
        while True:
            try:
                awaited = coroutine.send(answer)
                self._check_await(call, context, awaited)
            except StopIteration as stop:
                try:
                    result = self._sealed(call, stop.value)
                except BaseException as error:
                    self._fail(part, call, n, before, error, context, None)
                    return
                self._close(call, n, context, before)
                if frame is not None:
                    frame.is_running = False
                    self._trim(call, frame)
                if call.entry.context is not context:
                    self.spare.setdefault(call.entry, []).append(context)
                self._complete(part, call, result)
                return
            except BaseException as error:
                self._fail(part, call, n, before, error, context, coroutine)
                return
            self._close(call, n, context, before)
            if frame is None:
                frame = call.frame = Frame()
                frame.is_running = True
            queue.append((awaited.entry, awaited.key, awaited.args, True))
            n = len(queue)
            frame.awaited.append(n)
            callee = self._await(part, call, frame, n, (True, awaited.entry, awaited.key, awaited.args))
            if callee is not None:
                self._run_within(part, call, callee, context)
            if n not in frame.answers:
                self._suspend(part, call, frame, n, context, coroutine)
                return
            answer = self.values.unseal(frame.answers[n])
            before = self._state_after(call, n)
            self._hand(context, before)

    def _run_within(self, part: Part, call: Call, callee: Call, context: OrderedContext) -> None:
        """A call to an own entity is awaited: run it at once, unless that gets too deep for Python's stack."""
        if self.nested >= NESTED_MAX or callee.order[0] in part.suspects:
            self._queue(callee)
            return
        transaction = self.transaction
        if transaction.is_marked:
            unawaited, transaction.unawaited = transaction.unawaited, {}
            self._count_marks(part, call.order[0], transaction)
        else:
            unawaited = {}
        queue = transaction.queue.copy()
        if call.entry.context is context and (callee.entry is call.entry or not callee.entry.is_plain):
            self._rebind(call.entry)
        self.nested += 1
        self._run(part, callee)
        self.nested -= 1
        transaction.reset()
        transaction.queue[:] = queue
        transaction.unawaited, transaction.is_marked = unawaited, bool(unawaited)
        self.running = call.order[0]

    def _rebind(self, entry: Entry) -> None:
        """The function's context stays with a call that waits: it gets another one."""
        spare = self.spare.get(entry)
        entry.bind(spare.pop() if spare else self._context(entry))

    def _trim(self, call: Call, frame: Frame) -> None:
        """Forget what a call did after awaits that it no longer makes."""
        if frame.segments:
            for n in [n for n in frame.segments if n not in frame.awaited]:
                self._unlink(frame.segments.pop(n))

    def _state_after(self, call: Call, n: int) -> Any:
        """What a call sees when its call number `n` has been answered."""
        chain = call.entry.chains[call.key]
        if chain is call:
            return call.new
        tid, place = call.order
        return value_before(chain, locate(chain, (tid, order.after(place, n))), tid, self.aborted)

    def _record(self, call: Call, n: int) -> Record:
        """The record of what a call does after the answer to its call number `n`."""
        if not n:
            return call
        frame = call.frame
        assert frame is not None
        segment = frame.segments.get(n)
        if segment is None:
            segment = frame.segments[n] = Segment((call.order[0], order.after(call.order[1], n)), call)
        return segment

    def _close(self, call: Call, n: int, context: OrderedContext, before: Any) -> None:
        """A part of a call has ended well: note what it saw and left, and tell those above."""
        new, deltas, read = context._state, context._deltas, context._read
        if n and n not in call.frame.segments and new is before and not read and not deltas:  # type: ignore[union-attr]
            return  # it did not touch the state
        record = self._record(call, n)
        if not record.is_linked:
            chain, at = self._link(record, call)
        else:
            chain = chain_of(call)
            at = locate(chain, record.order)
        was = record.new
        record.seen, record.new = before, new
        record.read = read or (new is before and not deltas)
        if deltas and not read:
            record.deltas = deltas
        elif record.deltas:
            record.deltas = ()
        if record.order[0] in self.aborted or was is None or not same(was, new):
            self._ripple(call, chain, at)

    def _complete(self, part: Part, call: Call, result: Any) -> None:
        """A call has returned: its caller is answered, its one-way calls are made."""
        if call.entry.lessons is not None:
            self._learn(call.entry, call.key, call.args, self.transaction.queue)
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
        self, part: Part, call: Call, n: int, before: Any, error: BaseException, context: Any, coroutine: Any
    ) -> None:
        tid = call.order[0]
        self.running = 0
        failure = Failure(*describe(error), call.entry.name, call.key)
        transaction = self.transaction
        if transaction.is_marked:
            self._count_marks(part, tid, transaction)
            transaction.reset()
        if call.entry.context is context:
            self._rebind(call.entry)
        context.retire()
        if coroutine is not None:
            with contextlib.suppress(BaseException):
                coroutine.close()
        record = self._record(call, n)
        if not record.is_linked:
            self._link(record, call)
        record.seen, record.read, record.deltas = before, True, ()
        if tid in self.aborted or record.new is None or not same(record.new, before):
            record.new = before
            chain = chain_of(call)
            self._ripple(call, chain, locate(chain, record.order))
        if call.frame is not None:
            call.frame.is_running = False
            self._trim(call, call.frame)
        place = record.order[1]
        if call.failure is not None:
            if call.failed_at == place and same_failure(call.failure, failure):
                return
            if call.failed_at != place:
                self._mend(part, call)
        call.failure, call.failed_at = failure, place
        owner = part.owner(tid)
        if owner == self.me:
            self.failed(part, tid, place, self.me, failure)
        else:
            row = (FAILED, tid, place, failure.code, failure.type, failure.message, failure.function, failure.key)
            self.tell(part, owner, row)

    # --- coroutines that wait -----------------------------------------------------------------------------------------

    def _check_await(self, call: Call, context: OrderedContext, awaited: Any) -> None:
        transaction = self.transaction
        if type(awaited) is not Awaitable or awaited.made_by is not context or awaited not in transaction.unawaited:
            raise BadCall(f"{call.entry.name} awaits {shown(awaited)}; it may await its own ctx.call(...), once")
        del transaction.unawaited[awaited]
        if call.depth >= self.depth_max:
            raise LimitReached(f"calls nested deeper than {self.depth_max}")

    def _await(self, part: Part, call: Call, frame: Frame, n: int, wanted: Made) -> Call | None:
        """Make an awaited call, unless the run before made the very same. Returns it if it is to be run here."""
        made = call.made
        if made is None:
            made = call.made = {}
        old = made.get(n)
        if old is not None and same_call(old, wanted):
            return None
        frame.answers.pop(n, None)
        frame.attempts[n] = frame.attempts.get(n, 0) + 1
        return self._replace(part, call, n, old, wanted)

    def _suspend(self, part: Part, call: Call, frame: Frame, n: int, context: OrderedContext, coroutine: Any) -> None:
        transaction = self.transaction
        frame.coroutine, frame.context, frame.waits_for, frame.is_running = coroutine, context, n, False
        frame.queue = transaction.queue.copy()
        if transaction.is_marked:
            frame.unawaited, transaction.unawaited = transaction.unawaited, {}
            self._count_marks(part, call.order[0], transaction)
        part.waiting[call] = None
        self._trim(call, frame)
        if call.entry.context is context:
            self._rebind(call.entry)
        if call.failure is not None:
            self._mend(part, call)

    def _resume(self, part: Part, call: Call, frame: Frame) -> None:
        n, context, coroutine, transaction = frame.waits_for, frame.context, frame.coroutine, self.transaction
        frame.coroutine = None
        del part.waiting[call]
        transaction.reset()
        transaction.queue[:] = frame.queue
        transaction.unawaited, transaction.is_marked = frame.unawaited, bool(frame.unawaited)
        self.ran += 1
        self.running = call.order[0]
        before = self._state_after(call, n)
        self._hand(context, before)
        self._drive(part, call, context, coroutine, self.values.unseal(frame.answers[n]), n, before)
        self.running = 0

    def _let_go(self, part: Part, call: Call) -> None:
        """A coroutine that waits is void."""
        frame = call.frame
        assert frame is not None
        del part.waiting[call]
        coroutine, frame.coroutine = frame.coroutine, None
        frame.context.retire()
        with contextlib.suppress(BaseException):
            coroutine.close()

    # --- the end of calls and epochs ----------------------------------------------------------------------------------

    def _remove(self, part: Part, call: Call) -> None:
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(part, call)
        if call.frame is not None:
            call.frame.awaited.clear()
            self._trim(call, call.frame)
        self._unlink(call)

    def _look_again(self, part: Part, tid: int) -> None:
        for call in self.calls_of(part, tid).values():
            records: list[Record] = [call] if call.frame is None else [call, *call.frame.segments.values()]
            for record in records:
                if record.is_linked:
                    chain = chain_of(call)
                    at = locate(chain, record.order)
                    while at + 1 < len(chain) and chain[at + 1].order[0] == tid:
                        at += 1
                    self._ripple(call, chain, at)

    def install(self, part: Part, tid: int, n: int, entry: Entry, key: Key, state: Any) -> None:
        """A write of a transaction that ran alone."""
        call = self._registered(part, tid, order.awaited(order.ROOT, n, self.me), entry, key, ())
        chain, at = self._link(call, call)
        call.seen, call.new = value_before(chain, at, tid, self.aborted), state
        call.read = call.must_run = False
        self._ripple(call, chain, at)

    def done(self, part: Part, tid: int, entry: Entry, key: Key, result: Any) -> None:
        """The root of a transaction that ran alone: it only stands for the result."""
        call = self._registered(part, tid, order.ROOT, entry, key, ())
        call.result, call.must_run = result, False

    def let_all_go(self) -> None:
        """Nothing that has begun is going to end."""
        for part in self.parts.values():
            for call in list(part.waiting):
                self._let_go(part, call)

    def finish(self, part: Part) -> None:
        """An epoch is final: its records are history."""
        for call in list(part.waiting):  # those of aborted transactions wait in vain
            self._let_go(part, call)
        del self.parts[part.number]
        if not self.parts:
            self.heap.clear()
            self.aborted.clear()
            for chains in self.chains.values():
                chains.clear()
            return
        last = part.tids[-1]
        for chains in self.chains.values():
            alive = {
                key: chain
                for key, chain in chains.items()
                if (chain[-1] if type(chain) is list else chain).order[0] > last
            }
            for chain in alive.values():
                if type(chain) is list and chain[1].order[0] <= last:
                    at = locate(chain, (last + 1, b""))
                    chain[0] = value_before(chain, at, 0, self.aborted)
                    del chain[1:at]
            chains.clear()
            chains.update(alive)
        self.aborted.difference_update(part.tids)
