"""Repair: one worker's chains, and how calls run and rerun on them.

The half of the ordered mode that runs single calls. `exchange.py` sends the consequences to other workers;
`executor.py` decides what is next.

Rules:
1. If what a record sees has changed, its call runs again from its start: a coroutine gets the recorded answers, and
   waits only where an answer is not known. A record that only wrote, or only merged, need not run again.
2. When what a record leaves changes, the next record of its chain is checked again.
3. What has not changed is not sent to other workers.
"""

from __future__ import annotations

import contextlib
import heapq
from abc import abstractmethod
from collections import defaultdict
from typing import Any

from headrace.core import order
from headrace.core.contexts import (
    Awaitable,
    OrderedContext,
    Transaction,
    cannot_await,
    dead_transaction,
    positional,
    too_deep,
)
from headrace.core.later.expiring import ExpiringOrdered
from headrace.core.ordered.chains import (
    NOT_YET,
    NOTHING,
    PREDICTED,
    AwaitFrame,
    Call,
    Caller,
    Chain,
    Continuation,
    Made,
    OrderedBinding,
    Record,
    chain_of,
    locate,
    same_call,
    value_before,
)
from headrace.core.ordered.exchange import EpochPart, Exchange, by_number
from headrace.core.placement import ShardMap
from headrace.core.program import Program
from headrace.core.state import State
from headrace.errors import LimitReached
from headrace.wire.values import HIGH, LOW, MISSING, Key, same, size_of

NESTED_MAX = 16
POSITIONAL: dict[Any, Any] = {kind: positional(kind) for kind in (OrderedContext, ExpiringOrdered)}


class Repair(Exchange):
    def __init__(self, program: Program, state: State, me: int) -> None:
        self.program, self.values, self.state, self.me = program, program.values, state, me
        self.depth_max, self.calls_max = program.config.depth_max, program.config.calls_max
        self.bytes_max = program.config.transaction_bytes_max
        self.transaction, self.dead = Transaction(self.calls_max, self.bytes_max), dead_transaction()
        self.shards = ShardMap([me])
        self.workers = 1
        self.aborted: set[int] = set()
        self.heap: list[tuple[tuple[int, bytes], int, Record]] = []
        self.pushed = self.running = 0
        self.ran = self.repairs = self.waits = 0
        self.nested = 0  # running calls that run inside others
        self.attempts = PREDICTED  # tries of awaited calls so far
        self.spare: defaultdict[OrderedBinding, list[OrderedContext]] = defaultdict(list)  # contexts
        self.learned: list[Any] = []  # templates that were not sent yet
        self.chains: dict[str, dict[Key, Any]] = {name: {} for name in program.operators}

    @abstractmethod
    def _run_in_turn(
        self,
        part: EpochPart,
        tid: int,
        place: bytes,
        binding: OrderedBinding,
        key: Key,
        args: Any,
        caller: Caller | None = None,
    ) -> Call | None:
        """Run a call if it is the last of its chain; else do nothing and return None."""

    @abstractmethod
    def _returned(self, part: EpochPart, call: Call) -> None:
        """Note what is needed of a call that ran in its turn and returned."""

    @abstractmethod
    def _learn(self, binding: OrderedBinding, key: Key, args: Any, queue: list[Any]) -> None:
        """Learn from the calls that a function made."""

    # --- the turn of a record ---------------------------------------------------------------------------------------

    def _queue(self, record: Record) -> None:
        if not record.is_queued:
            record.is_queued = True
            self.pushed += 1
            heapq.heappush(self.heap, (record.order, self.pushed, record))

    def _go_on(self, part: EpochPart, call: Call) -> None:
        if call.is_queued or call.order[0] in part.suspects:
            self._queue(call)
        else:
            self._resume(part, call, call.frame)  # type: ignore[arg-type]

    # --- chains -------------------------------------------------------------------------------------------------------

    def _check(self, part: EpochPart, record: Record) -> None:
        """Something below this record has changed. If it sees another state, rerun its call."""
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
                except BaseException:  # the function itself must see the failure
                    self._run(part, call)
                    return
                self._ripple(call, chain, at)
            record.seen = before
        if tid in self.aborted:
            self._ripple(call, chain, at)  # others see what is below it

    def _fold(self, part: EpochPart, call: Call, state: Any, deltas: tuple[Any, ...]) -> Any:
        combine, values, self.running = call.binding.operator.combine, self.values, call.order[0]
        assert combine is not None
        try:
            for delta in deltas:
                if state is MISSING:
                    state = delta
                else:
                    state = call.binding.codec.seal(combine(values.unseal(state), values.unseal(delta)))
                    self._count_bytes(part, call.order[0], size_of(state))
        finally:
            self.running = 0
        return state

    def _ripple(self, call: Call, chain: Chain, at: int) -> None:
        """The state that this record wrote, or the set of records that see it, has changed."""
        if at + 1 < len(chain):
            self._queue(chain[at + 1])
        else:
            call.binding.table.put(call.key, value_before(chain, len(chain), 0, self.aborted))

    def _link(self, record: Record, call: Call) -> tuple[Chain, int]:
        """Put a record into its entity's chain."""
        chains, key = call.binding.chains, call.key
        chain = chains.get(key)
        if chain is None:
            chain = chains[key] = [call.binding.table.get(key)]
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
                call.binding.table.put(call.key, chain[0])
                del call.binding.chains[call.key]
            else:
                self._ripple(call, chain, at - 1)

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(self, part: EpochPart, call: Call) -> None:
        """Run a call from its start."""
        if call.is_linked and not self._count_vain(part, call.order[0]):
            return
        call.must_run = False
        if type(call.made) is list:
            call.made = by_number(call.made)
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(part, call)
        binding, transaction = call.binding, self.transaction
        transaction.queue.clear()
        if transaction.is_marked:
            transaction.reset()
        self.ran += 1
        self.running = call.order[0]
        context = binding.context
        context.key, context._order = call.key, (call.order[0], call.order[1])
        if call.is_linked:
            chain = chain_of(call)
            at = locate(chain, call.order)
        else:
            chain, at = self._link(call, call)
        before = value_before(chain, at, call.order[0], self.aborted)
        context._state, context._read, context._deltas = before, False, ()
        try:
            result = binding.run(*call.args)
            if binding.is_plain:
                result = self._sealed(call, result)
        except BaseException as error:
            self._fail(part, call, 0, before, error, context, None)
        else:
            if binding.is_plain:
                self._close(call, 0, context, before)
                self._complete(part, call, result)
            else:
                self._drive(part, call, context, result, 0, before)
        self.running = 0

    def _sealed(self, call: Call, result: Any) -> Any:
        """Seal a result; those of one-way calls are discarded."""
        if call.caller is None:
            return call.binding.seal(result) if call.order[1] == order.ROOT else None
        return self._for_caller(call.binding, result)

    def _for_caller(self, binding: OrderedBinding, result: Any) -> Any:
        """Seal a result for another call. If it cannot be decoded again, this call fails."""
        sealed = binding.seal(result)
        if type(sealed) is bytes:
            self.values.decode(sealed)
        return sealed

    def _drive(
        self, part: EpochPart, call: Call, context: OrderedContext, coroutine: Any, n: int, before: Any = None
    ) -> None:
        """Run a coroutine until it ends or waits for an unknown answer: from the answer to its call number `n`, or (0)
        from its start, on the state `before`."""
        frame: Any = call.frame
        answer = None
        if frame is not None:
            frame.is_running = True
            if not n:
                frame.awaited = 0
        while True:
            if n:
                chain = call.binding.chains[call.key]
                last = chain[-1] if type(chain) is list else chain
                answer, before = frame.answers[n], call.new if last is call else self._state_after(call, n)
                if type(answer) is bytes:
                    answer = self.values.unseal(answer)
                context._state, context._read, context._deltas = before, False, ()
            try:
                awaited = coroutine.send(answer)
                self._check_await(call, context, awaited)
            except StopIteration as stop:
                result = stop.value
                if type(result) is not call.binding.quick or result >= HIGH or result <= LOW:
                    try:
                        result = self._sealed(call, result)
                    except BaseException as error:
                        self._fail(part, call, n, before, error, context, None)
                        return
                if not n or context._read or context._deltas != () or frame.segments:
                    self._close(call, n, context, before)
                if frame is not None:
                    frame.is_running = False
                    if frame.segments:
                        self._trim(frame)
                if call.binding.context is not context:
                    self.spare[call.binding].append(context)
                self._complete(part, call, result)
                return
            except BaseException as error:
                self._fail(part, call, n, before, error, context, coroutine)
                return
            self._close(call, n, context, before)
            n = self._wait(part, call, context, coroutine, awaited)
            if not n:
                return
            frame = call.frame

    def _wait(self, part: EpochPart, call: Call, context: OrderedContext, coroutine: Any, awaited: Any) -> int:
        """A call awaits another: make it. Returns its number if the answer is known; else 0: the caller waits."""
        frame, made, queue = call.frame, call.made, self.transaction.queue
        binding, key, args = awaited.binding, awaited.key, awaited.args
        queue.append((binding, key, args, True))
        n = len(queue)
        if frame is None:
            frame = call.frame = AwaitFrame(self._new_attempt())
        frame.is_running = True
        frame.awaited |= 1 << n
        if made is None:
            made = call.made = {}
        old = made.get(n)
        if old is not None:
            if not old[0] or old[1] is not binding or old[2] is not key or old[3] is not args:
                self._later(self._await(part, call, frame, n, (True, binding, key, args)))
        elif (
            (binding.owners.get(key) or self.shards.owner(binding.operator, key)) == self.me
            and self.nested < NESTED_MAX
            and call.order[0] not in part.suspects
        ):
            made[n] = (True, binding, key, args)
            self._run_within(part, call, n, context)
        else:
            self._later(self._await(part, call, frame, n, (True, binding, key, args)))
        if n in frame.answers:
            return n
        self._suspend(part, call, frame, n, context, coroutine)
        return 0

    def _run_within(self, part: EpochPart, call: Call, n: int, context: OrderedContext) -> None:
        """Call number `n` is awaited, new, and for an own entity: run it at once."""
        transaction, frame = self.transaction, call.frame
        assert frame is not None
        if transaction.is_marked:
            unawaited, transaction.unawaited = transaction.unawaited, {}
            self._count_marks(part, call.order[0], transaction)
        else:
            unawaited = None
        queue = transaction.queue.copy()
        _, binding, key, args = call.made[n]
        if call.binding.context is context and (binding is call.binding or not binding.is_plain):
            self._rebind(call.binding)
        tid, place = call.order
        self.nested += 1
        at, caller = order.awaited(place, n, self.me), self._caller(call, n)
        callee = self._run_in_turn(part, tid, at, binding, key, args, caller)
        if callee is None:
            callee = self._make(part, call, n, call.made[n])
            if callee is not None:
                self._run(part, callee)
        elif callee.frame is None and callee.failure is None:
            frame.answers[n] = callee.result
            if binding.lessons is not None or transaction.is_marked:
                self._returned(part, callee)
            if transaction.queue:
                self._dispatch_sent(part, callee, transaction.queue)
        self.nested -= 1
        if transaction.is_marked:
            transaction.reset()
        transaction.queue[:] = queue
        if unawaited:
            transaction.unawaited, transaction.is_marked = unawaited, True
        self.running = tid

    def _begin_waiting(self, part: EpochPart, call: Call, context: Any, coroutine: Any, awaited: Any) -> None:
        """A call has run up to its first await."""
        try:
            self._check_await(call, context, awaited)
        except BaseException as error:
            self._fail(part, call, 0, call.seen, error, context, coroutine)
            return
        n = self._wait(part, call, context, coroutine, awaited)
        if n:
            self._drive(part, call, context, coroutine, n)

    def _rebind(self, binding: OrderedBinding) -> None:
        """A waiting call keeps its context: give the function another one."""
        spare = self.spare[binding]
        binding.bind(spare.pop() if spare else self._context(binding))

    def _trim(self, frame: AwaitFrame) -> None:
        """Forget what a call did after awaits that it no longer makes."""
        for n in [n for n in frame.segments if not frame.awaited >> n & 1]:
            self._unlink(frame.segments.pop(n))

    def _state_after(self, call: Call, n: int) -> Any:
        """What a call sees after the answer to its call number `n`, if it is not the last of its chain."""
        tid, place = call.order
        chain = chain_of(call)
        return value_before(chain, locate(chain, (tid, order.after(place, n))), tid, self.aborted)

    def _record(self, call: Call, n: int) -> Record:
        """The record of what a call does after the answer to its call number `n`."""
        if not n:
            return call
        frame = call.frame
        assert frame is not None
        segment = frame.segments.get(n)
        if segment is None:
            segment = Continuation((call.order[0], order.after(call.order[1], n)), call)
            if not frame.segments:
                frame.segments = {}
            frame.segments[n] = segment
        return segment

    def _close(self, call: Call, n: int, context: OrderedContext, before: Any) -> None:
        """A part of a call ended without error: note what it saw and left, and have records above checked."""
        new, deltas, read = context._state, context._deltas, context._read
        is_untouched = not read and deltas == ()  # after a put deltas is None, even if the value is the same
        if n and is_untouched and n not in call.frame.segments:  # type: ignore[union-attr]
            return
        record = self._record(call, n)
        if not record.is_linked:
            chain, at = self._link(record, call)
        else:
            chain = chain_of(call)
            at = locate(chain, record.order)
        was = record.new
        record.seen, record.new = before, new
        record.read = read or is_untouched
        if deltas and not read:
            record.deltas = deltas
        elif record.deltas:
            record.deltas = ()
        if record.order[0] in self.aborted or was is None or not same(was, new):
            self._ripple(call, chain, at)

    def _complete(self, part: EpochPart, call: Call, result: Any) -> None:
        """A call has returned: answer its caller, and make its one-way calls."""
        if call.binding.lessons is not None:
            self._learn(call.binding, call.key, call.args, self.transaction.queue)
        transaction = self.transaction
        if transaction.is_marked:
            self._count_marks(part, call.order[0], transaction)
        call.result = result
        if call.failure is not None:
            self._mend(part, call)
        if part.queued:
            part.queued.get(call.order[0], {}).pop(call.order[1], None)
        made, frame, queue = call.made, call.frame, transaction.queue
        is_only_awaited = frame is not None and frame.awaited == 2 and len(queue) == len(made) == 1
        if not is_only_awaited and (made is not None or queue):
            self._dispatch_sent(part, call, queue)
        if call.caller is not None and not (call.answered is not NOT_YET and same(call.answered, call.result)):
            call.answered = call.result
            self._answer(part, call)

    def _count_marks(self, part: EpochPart, tid: int, transaction: Transaction) -> None:
        if transaction.doom is not None or transaction.unawaited:
            part.suspects.add(tid)
        self._count_bytes(part, tid, self.bytes_max - transaction.bytes_left)
        transaction.bytes_left = self.bytes_max

    def _count_queued(self, part: EpochPart, call: Call, count: int) -> None:
        """A call waits or fails: its queued calls are not made yet, or never."""
        tid, place = call.order
        if count:
            part.queued.setdefault(tid, {})[place] = count
        self._count_calls(part, tid, self.calls_here(part, tid))

    def _fail(
        self, part: EpochPart, call: Call, n: int, before: Any, error: BaseException, context: Any, coroutine: Any
    ) -> None:
        tid = call.order[0]
        self.running = tid  # the next lines may run user code: an exception's text, a `finally`
        failure = part.traces.failure(error, call.binding, call.key)
        transaction = self.transaction
        if isinstance(error, RecursionError | MemoryError | LimitReached):
            part.suspects.add(tid)  # only a run alone shows whether the stack suffices, or which limit is first
        self._count_queued(part, call, len(transaction.queue))
        if transaction.is_marked:
            self._count_marks(part, tid, transaction)
            transaction.reset()
        if call.binding.context is context:
            self._rebind(call.binding)
        context.retire(self.dead)
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
            self._trim(call.frame)
            self._take_back(part, call, call.frame, n)
        self._note_failed(part, call, record.order[1], failure)

    # --- coroutines that wait -----------------------------------------------------------------------------------------

    def _check_await(self, call: Call, context: OrderedContext, awaited: Any) -> None:
        transaction = self.transaction
        unawaited = transaction.unawaited
        if type(awaited) is not Awaitable or awaited.made_by is not context or awaited not in unawaited:
            raise cannot_await(call.binding.name, awaited)
        del unawaited[awaited]
        if not unawaited and transaction.doom is None and transaction.bytes_left == self.bytes_max:
            transaction.is_marked = False  # only the call awaited now had marked it
        if call.caller is not None and call.caller[2] >= self.depth_max:
            raise too_deep(self.depth_max)

    def _await(self, part: EpochPart, call: Call, frame: AwaitFrame, n: int, wanted: Made) -> Call | None:
        """Make an awaited call, unless the last run made the same one. Returns it if it must run here."""
        made = call.made
        if made is None:
            made = call.made = {}
        old = made.get(n)
        if old is not None and same_call(old, wanted):
            return None
        if old is not None:
            frame.renew(n, self._new_attempt())
        return self._replace(part, call, n, old, wanted)

    def _suspend(
        self, part: EpochPart, call: Call, frame: AwaitFrame, n: int, context: OrderedContext, coroutine: Any
    ) -> None:
        transaction = self.transaction
        frame.coroutine, frame.context, frame.waits_for, frame.is_running = coroutine, context, n, False
        frame.queue = transaction.queue.copy()
        one_way = len(frame.queue) - frame.awaited.bit_count()
        if one_way:
            self._count_queued(part, call, one_way)
        if transaction.is_marked:
            frame.unawaited, transaction.unawaited = transaction.unawaited, {}
            self._count_marks(part, call.order[0], transaction)
        part.waiting[call] = None
        if frame.segments:
            if n in frame.segments:
                self._unlink(frame.segments.pop(n))  # an earlier run's part, with a void answer
            self._trim(frame)
        if len(call.made) > 1:
            self._take_back(part, call, frame, n)
        if call.binding.context is context:
            self._rebind(call.binding)
        if call.failure is not None:
            self._mend(part, call)

    def _take_back(self, part: EpochPart, call: Call, frame: AwaitFrame, n: int) -> None:
        """Cancel calls below number `n` that are no longer awaited: their failures would come before that of the call
        awaited now. The rest can wait until the call returns."""
        made = call.made
        if made is not None and len(made) > frame.awaited.bit_count():
            for m in [m for m, old in made.items() if old[0] and m < n and not frame.awaited >> m & 1]:
                self._cancel(part, call, m, made.pop(m))

    def _resume(self, part: EpochPart, call: Call, frame: AwaitFrame) -> None:
        n, context, coroutine, transaction = frame.waits_for, frame.context, frame.coroutine, self.transaction
        frame.coroutine = None
        del part.waiting[call]
        if transaction.is_marked:
            transaction.reset()
        transaction.queue[:] = frame.queue or ()
        if frame.unawaited:
            transaction.unawaited, transaction.is_marked, frame.unawaited = frame.unawaited, True, NOTHING
        self.running = call.order[0]
        self._drive(part, call, context, coroutine, n)
        self.running = 0

    def _let_go(self, part: EpochPart, call: Call) -> None:
        """Close a waiting coroutine: it is void."""
        frame = call.frame
        assert frame is not None
        del part.waiting[call]
        coroutine, frame.coroutine = frame.coroutine, None
        frame.context.retire(self.dead)
        running, self.running = self.running, call.order[0]
        with contextlib.suppress(BaseException):
            coroutine.close()
        self.running = running

    # --- calls that are gone ------------------------------------------------------------------------------------------

    def _remove(self, part: EpochPart, call: Call) -> None:
        if call.frame is not None and call.frame.coroutine is not None:
            self._let_go(part, call)
        if call.frame is not None:
            call.frame.awaited = 0
            self._trim(call.frame)
        self._unlink(call)

    def _look_again(self, part: EpochPart, tid: int) -> None:
        for call in self.calls_of(part, tid).values():
            records: list[Record] = [call] if call.frame is None else [call, *call.frame.segments.values()]
            for record in records:
                if record.is_linked:
                    chain = chain_of(call)
                    at = locate(chain, record.order)
                    while at + 1 < len(chain) and chain[at + 1].order[0] == tid:
                        at += 1
                    self._ripple(call, chain, at)

    def _context(self, binding: OrderedBinding) -> OrderedContext:
        kind = OrderedContext if binding.operator.ttl_us is None else ExpiringOrdered
        kind = POSITIONAL[kind] if binding.entry.is_positional else kind
        return kind(self.bindings, self.transaction, binding, self.time_of)

    @abstractmethod
    def time_of(self, tid: int) -> int:
        """The logged time of its epoch."""
