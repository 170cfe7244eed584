"""What one worker's calls cause elsewhere: further calls, answers, failures, aborts.

The part of the ordered mode that communicates. `Exchange` tracks each call's consequences and sends only what has
changed; `core/ordered/repair.py` runs the calls.

Rules:
1. When a call reruns, the calls it makes are compared with those of its last run: equal ones stay under way, those with
   other arguments are replaced in place, and those no longer made are cancelled, with all calls that they made.
2. An answer belongs to one try of one call. A failure belongs to one place on one worker; the root's worker collects
   failures, and the transaction is aborted while there are any.

Never here: how a function runs, what an entity's chain holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.core import order
from headrace.core.bindings import Bindings
from headrace.core.ordered.chains import (
    NOT_YET,
    PREDICTED,
    Call,
    Caller,
    Made,
    OrderedBinding,
    Record,
    new_call,
    same_call,
    same_target,
)
from headrace.core.ordered.prediction import Predictions
from headrace.core.placement import ShardMap
from headrace.core.program import Program
from headrace.core.raised import TRIED_TRACES_MAX, Traces
from headrace.core.signature import Args
from headrace.wire import messages as wire
from headrace.wire.messages import (
    Answered,
    AnsweredAll,
    Cancelled,
    Failure,
    Mended,
    Rows,
    TransactionAborted,
    TransactionRevived,
)
from headrace.wire.values import Key, same, size_of


class Caps(NamedTuple):
    """How much one worker tries before a transaction is held: decision 0022. Caps never change a result."""

    tries: int = 64  # starts of one transaction's functions
    lone_tries: int = 512  # if alone in its epoch: then it is wrong only while its own calls are out of order
    repairs: int = 4  # wasted runs of one transaction,
    repairs_per_call: int = 2  # plus this for each of its calls here
    epoch_repairs: int = 64  # wasted runs of an epoch,
    epoch_part: int = 2  # plus one per this many transactions


NO_CALLER: Caller = (0, 0, 0, 0)
Turn = tuple[int, bytes, OrderedBinding, Key, Args]  # TID, place, and the call


class EpochPart:
    """One epoch, as far as this worker knows it."""

    def __init__(
        self,
        number: int,
        tids: range,
        owners: list[int],
        predictions: Predictions,
        time_us: int = 0,
        caps: Caps = Caps(),
    ) -> None:
        self.number, self.tids, self.time_us = number, tids, time_us
        self.owners = owners  # the workers of the roots, in the order of the TIDs
        self.predictions = predictions
        self.unpredicted: set[int] = set()  # own roots whose calls no other worker predicts
        self.rows: list[Turn] = []  # what starts here without a message: own roots, and predicted calls
        self.at = 0  # the next row
        self.calls: dict[int, Any] = {}  # TID -> its only call here, or its calls in turn, or its calls by place
        self.failures: dict[int, dict[tuple[bytes, int], Failure]] = {}  # of own roots: by place and worker
        self.traces = Traces(TRIED_TRACES_MAX)
        self.spread: set[int] = set()  # own roots' transactions that reached other workers, not by prediction
        self.suspects: set[int] = set()  # TIDs that wait until all below is final, then are gathered
        self.held: set[int] = set()  # suspects whose repairs did not end
        self.caps, self.tries_max = caps, caps.tries if len(tids) > 1 else caps.lone_tries
        self.vain = 0  # wasted runs: the call was rerun, or was cancelled
        self.vain_of: dict[int, int] = {}  # the same, per TID
        self.queued: dict[int, dict[bytes, int]] = {}  # counts of waiting calls' one-way calls, by TID and place
        self.touched: dict[int, set[tuple[str, Any]]] = {}  # entities that suspects wanted to call
        self.bytes: dict[int, int] = {}  # per TID, if not 0
        self.answered_bytes = 0  # in answers to other workers, so far
        self.early_answers: dict[int, dict[int, Any]] = {}  # of predicted calls, for roots that have not started
        self.overruled: set[tuple[int, bytes]] = (
            set()
        )  # predicted calls that came, or were cancelled, before their turn
        self.waiting: dict[Call, None] = {}  # calls whose coroutine waits for an answer
        self.outbox: dict[int, list[Any]] = {}
        self.answers: dict[bytes, AnsweredAll] = {}  # rows there that may grow, by the predicted calls' place

    def owner(self, tid: int) -> int:
        return self.owners[self.tids.index(tid)]


class Exchange(ABC):
    program: Program
    bindings: Bindings[OrderedBinding]
    me: int
    workers: int
    shards: ShardMap
    calls_max: int
    bytes_max: int
    aborted: set[int]
    attempts: int
    repairs: int
    waits: int

    @abstractmethod
    def _queue(self, record: Record) -> None:
        """Check or run this record in its turn."""

    @abstractmethod
    def _go_on(self, part: EpochPart, call: Call) -> None:
        """A waiting call has its answer: continue it."""

    @abstractmethod
    def _remove(self, part: EpochPart, call: Call) -> None:
        """Take a call out of its entity's chain, and end it if it waits."""

    @abstractmethod
    def _look_again(self, part: EpochPart, tid: int) -> None:
        """A transaction was aborted or revived: check what others see."""

    def calls_of(self, part: EpochPart, tid: int) -> dict[bytes, Call]:
        """A transaction's calls here, by place. (A single call, or calls that ran in turn, need no dict.)"""
        calls = part.calls.get(tid)
        if type(calls) is dict:
            return calls
        if calls is None:
            return {}
        calls = calls if type(calls) is list else [calls]
        by_place = part.calls[tid] = {call.order[1]: call for call in calls}
        return by_place

    def result_of(self, part: EpochPart, tid: int) -> Any:
        """The result of an own root's transaction; None if there is none yet."""
        calls = part.calls.get(tid)
        if type(calls) is list:
            calls = calls[0]
        elif type(calls) is dict:
            calls = calls.get(order.ROOT)
        return None if calls is None or calls.result is NOT_YET else calls.result

    def calls_here(self, part: EpochPart, tid: int) -> int:
        calls = part.calls.get(tid)
        return 0 if calls is None else 1 if type(calls) is Call else len(calls)

    def _register(self, part: EpochPart, call: Call) -> None:
        self._keep(part, call)
        self._count_calls(part, call.order[0], self.calls_here(part, call.order[0]))

    def _keep(self, part: EpochPart, call: Call) -> None:
        tid, place = call.order
        calls = part.calls.get(tid)
        if calls is None:
            part.calls[tid] = call
        elif type(calls) is list:
            calls.append(call)
        else:
            self.calls_of(part, tid)[place] = call

    def _count_calls(self, part: EpochPart, tid: int, count: int) -> None:
        """If all workers together exceed the limit, one of them exceeds its share. Queued calls of a waiting call count
        too: if another call fails meanwhile, they will never be made."""
        if part.queued:
            count += sum(part.queued.get(tid, {}).values())
        if count * self.workers > self.calls_max:
            part.suspects.add(tid)
        elif count + part.vain_of.get(tid, 0) > part.tries_max:
            self._hold(part, tid)

    def _count_bytes(self, part: EpochPart, tid: int, size: int) -> None:
        """If all workers together exceed the limit, one of them exceeds its share."""
        if size:
            part.bytes[tid] = total = part.bytes.get(tid, 0) + size
            if total * self.workers > self.bytes_max:
                part.suspects.add(tid)

    def _count_vain(self, part: EpochPart, tid: int) -> bool:
        """Count a wasted run. Hold the transaction and return False if it, or its epoch, has used up its share."""
        part.vain += 1
        part.vain_of[tid] = vain = part.vain_of.get(tid, 0) + 1
        calls, caps = self.calls_here(part, tid), part.caps
        is_few = vain <= caps.repairs + caps.repairs_per_call * calls and vain + calls <= part.tries_max
        if is_few and part.vain <= caps.epoch_repairs + len(part.calls) // caps.epoch_part:
            self.repairs += 1
            return True
        self._hold(part, tid)
        return False

    def _hold(self, part: EpochPart, tid: int) -> None:
        """Stop running this transaction: what it left here stays until it is gathered."""
        if tid not in part.suspects:
            self.waits += 1
            part.suspects.add(tid)
            part.held.add(tid)

    def _later(self, call: Call | None) -> None:
        if call is not None:
            self._queue(call)

    # --- calls made ---------------------------------------------------------------------------------------------------

    def _dispatch_sent(self, part: EpochPart, call: Call, queue: list[Any]) -> None:
        """Make the one-way calls of a call that has returned, if they differ from those under way."""
        made, size = call.made, len(queue)
        if size > part.tries_max:
            self._hold(part, call.order[0])  # gathering is better
            return
        if made is None:
            if not size:
                return
            made = call.made = {}
        elif len(made) == size and call.frame is not None and call.frame.awaited.bit_count() == size:
            return  # all were awaited
        n = 0
        for binding, key, args, *is_awaited in queue:
            n += 1
            if is_awaited:
                continue
            wanted = (False, binding, key, args)
            old = made.get(n)
            if old is None:
                made[n] = wanted
                self._later(self._make(part, call, n, wanted))
            elif not same_call(old, wanted):
                self._later(self._replace(part, call, n, old, wanted))
        if len(made) > n:
            for other in [m for m in made if m > n]:
                self._cancel(part, call, other, made.pop(other))

    def _replace(self, part: EpochPart, call: Call, n: int, old: Made | None, wanted: Made) -> Call | None:
        if old is not None and not same_target(old, wanted):
            self._cancel(part, call, n, old)
        call.made[n] = wanted
        return self._make(part, call, n, wanted)

    def _make(self, part: EpochPart, call: Call, n: int, made: Made) -> Call | None:
        """Make a call, or make it again with other arguments. Returns it if it is for this worker."""
        tid, place = call.order
        is_awaited, binding, key, args = made
        worker = self._owner(binding, key)
        at, caller = order.sent(place, n, self.me) if not is_awaited else order.awaited(place, n, self.me), None
        if is_awaited:
            caller = self._caller(call, n)
        if worker == self.me:
            return self.arrive(part, tid, at, binding, key, args, caller)
        if tid not in part.spread:
            part.spread.add(tid)
            if tid in self.aborted and part.owner(tid) == self.me:
                self._tell_all(part, TransactionAborted(tid))
        _, size, depth, attempt = caller or NO_CALLER
        self.tell(part, worker, wire.Made(tid, at, binding.number, key, args, size, depth, attempt))
        return None

    def _caller(self, call: Call, n: int) -> Caller:
        """A call as the `Caller` of its call number `n`."""
        frame: Any = call.frame
        depth = 1 if call.caller is None else call.caller[2] + 1
        return (self.me, len(call.order[1]), depth, frame.attempts.get(n, frame.first))

    def _new_attempt(self) -> int:
        """A number for a try of an awaited call, unique in this executor."""
        self.attempts += 1
        return self.attempts

    def _owner(self, binding: OrderedBinding, key: Key) -> int:
        return binding.owners.get(key) or self.shards.owner(binding.operator, key)

    def _cancel(self, part: EpochPart, call: Call, n: int, made: Made) -> None:
        tid, place = call.order
        is_awaited, binding, key, _ = made
        if is_awaited and call.frame is not None:
            call.frame.renew(n, self._new_attempt())
        at = order.awaited(place, n, self.me) if is_awaited else order.sent(place, n, self.me)
        worker = self._owner(binding, key)
        if worker == self.me:
            self.cancel(part, tid, at)
        else:
            self.tell(part, worker, Cancelled(tid, at))

    def arrive(
        self,
        part: EpochPart,
        tid: int,
        place: bytes,
        binding: OrderedBinding,
        key: Key,
        args: Args,
        caller: Caller | None,
    ) -> Call | None:
        """A call for one of this worker's entities: a new one, or one that replaces the call at its place. Returns it
        if it must run."""
        if tid in part.suspects:
            part.touched.setdefault(tid, set()).add((binding.operator.name, key))
            return None
        if part.predictions and part.at < len(part.rows):
            part.overruled.add((tid, place))  # if it was predicted and has not started
        calls = self.calls_of(part, tid)
        call = calls.get(place)
        if call is not None:
            if call.binding is binding and type(call.key) is type(key) and call.key == key:
                call.args, call.caller = args, caller
                call.answered, call.must_run = NOT_YET, True
                return call
            self._drop(part, call)
            self._count_vain(part, tid)
        call = new_call((tid, place), binding, key, args)
        call.caller = caller
        calls[place] = call
        if len(calls) == 1:
            part.calls[tid] = calls
        self._count_calls(part, tid, len(calls))
        return None if tid in part.suspects else call

    def cancel(self, part: EpochPart, tid: int, place: bytes) -> None:
        if part.predictions and part.at < len(part.rows):
            part.overruled.add((tid, place))
        call = self.calls_of(part, tid).pop(place, None)
        if call is not None:
            self._drop(part, call)
            self._count_vain(part, tid)

    def _drop(self, part: EpochPart, call: Call) -> None:
        """A call was cancelled: cancel the calls that it made."""
        self._remove(part, call)
        if call.failure is not None:
            self._mend(part, call)
        for n, made in (by_number(call.made) if type(call.made) is list else call.made or {}).items():
            self._cancel(part, call, n, made)
        call.made = None

    def forget(self, part: EpochPart, tids: range) -> None:
        """Forget these transactions here, without a message: all workers do the same."""
        for tid in [tid for tid in tids if tid in part.calls]:
            calls = self.calls_of(part, tid)
            del part.calls[tid]
            for call in calls.values():
                self._remove(part, call)
                if call.failure is not None:
                    part.traces.release(call.failure)
        for of_tid in (part.failures, part.bytes, part.queued, part.touched, part.vain_of):
            for tid in tids if of_tid else ():
                of_tid.pop(tid, None)
        for among in (part.suspects, part.held, self.aborted):
            among.difference_update(tids)

    # --- answers, failures, aborts ------------------------------------------------------------------------------------

    def _answer(self, part: EpochPart, call: Call) -> None:
        tid, place = call.order
        worker, size, _, attempt = call.caller or NO_CALLER
        n, _ = order.read_number(place, size)
        if worker == self.me:
            self._later(self.answered(part, tid, place[:size], n, attempt, call.result))
        else:
            part.answered_bytes += size_of(call.result)
            self.tell(part, worker, Answered(tid, place[:size], n, attempt, call.result))

    def answered(self, part: EpochPart, tid: int, place: bytes, n: int, attempt: int, result: Any) -> Call | None:
        """An answer has come. Returns the call that awaits it, if it can continue now."""
        call: Call | None = None
        calls = part.calls.get(tid)
        if type(calls) is Call and calls.order[1] == place:
            call = calls
        elif calls is not None:
            call = self.calls_of(part, tid).get(place)
        if call is None and part.predictions and place == order.ROOT:  # it has not started yet
            part.early_answers.setdefault(tid, {})[n] = result
        if call is None or (frame := call.frame) is None or type(call.made) is not dict:
            return None  # to a call that was cancelled
        made = call.made.get(n)
        if made is None or not made[0] or frame.attempt(n) != attempt:
            return None
        if n in frame.answers and same(frame.answers[n], result):
            return None
        frame.answers[n] = result
        if frame.coroutine is not None and frame.waits_for == n:
            return call
        if not frame.is_running and (frame.coroutine is None or n < frame.waits_for):
            call.must_run = True
            self._queue(call)
        return None

    def _note_failed(self, part: EpochPart, call: Call, place: bytes, failure: Failure) -> None:
        """A call failed, and may have failed before."""
        if call.failure is not None:
            if call.failed_at == place and same_failure(call.failure, failure):
                part.traces.release(failure)
                return
            if call.failed_at != place:
                self._mend(part, call)
            else:
                part.traces.release(call.failure)
        tid, call.failure, call.failed_at = call.order[0], failure, place
        if part.owner(tid) == self.me:
            self.failed(part, tid, place, self.me, failure)
        else:
            self.tell(part, part.owner(tid), wire.Failed(tid, place, failure))

    def _mend(self, part: EpochPart, call: Call) -> None:
        """A call that failed no longer fails."""
        assert call.failure is not None
        part.traces.release(call.failure)
        tid, place, call.failure = call.order[0], call.failed_at, None
        if part.owner(tid) == self.me:
            self.mended(part, tid, place, self.me)
        else:
            self.tell(part, part.owner(tid), Mended(tid, place))

    def failed(self, part: EpochPart, tid: int, place: bytes, worker: int, failure: Failure) -> None:
        """A call of an own root's transaction failed."""
        failures = part.failures.setdefault(tid, {})
        failures[place, worker] = failure
        if len(failures) == 1 and tid not in self.aborted:
            self.abort(part, tid)
            if part.predictions or tid in part.spread:
                self._tell_all(part, TransactionAborted(tid))

    def mended(self, part: EpochPart, tid: int, place: bytes, worker: int) -> None:
        failures = part.failures.get(tid, {})
        failures.pop((place, worker), None)
        if not failures and tid in self.aborted:
            part.failures.pop(tid, None)
            self.revive(part, tid)
            if part.predictions or tid in part.spread:
                self._tell_all(part, TransactionRevived(tid))

    def abort(self, part: EpochPart, tid: int) -> None:
        self.aborted.add(tid)
        self._look_again(part, tid)

    def revive(self, part: EpochPart, tid: int) -> None:
        self.aborted.discard(tid)
        self._look_again(part, tid)

    # --- the others ---------------------------------------------------------------------------------------------------

    def tell(self, part: EpochPart, worker: int, row: Any) -> None:
        rows = part.outbox.get(worker)
        if rows is None:
            part.outbox[worker] = [row]
        else:
            rows.append(row)

    def _tell_all(self, part: EpochPart, row: Any) -> None:
        for worker in range(1, self.workers + 1):
            if worker != self.me:
                self.tell(part, worker, row)

    def hear(self, part: EpochPart, source: int, rows: Sequence[Rows]) -> None:
        """Take rows from another worker."""
        bindings = self.bindings.by_number
        for row in rows:
            tid = row.tid
            if isinstance(row, wire.Made):
                size, binding = row.caller_size, bindings[row.function]
                caller = (source, size, row.depth, row.attempt) if size else None
                self._later(self.arrive(part, tid, row.place, binding, row.key, row.args, caller))
            elif isinstance(row, Answered):
                call = self.answered(part, tid, row.place, row.number, row.attempt, row.result)
                if call is not None:
                    self._go_on(part, call)
            elif isinstance(row, AnsweredAll):
                self._hear_all(part, row)
            elif isinstance(row, Cancelled):
                self.cancel(part, tid, row.place)
            elif isinstance(row, wire.Failed):
                self.failed(part, tid, row.place, source, row.failure)
            elif isinstance(row, Mended):
                self.mended(part, tid, row.place, source)
            elif isinstance(row, TransactionAborted):
                self.abort(part, tid)
            elif isinstance(row, TransactionRevived):
                self.revive(part, tid)

    def _hear_all(self, part: EpochPart, row: AnsweredAll) -> None:
        """Answers to roots' predicted calls; most of the roots wait for just these."""
        calls, n, root = part.calls, row.number, order.ROOT
        for tid, result in zip(row.tids, row.results, strict=True):
            call = calls.get(tid)
            frame: Any = call.frame if type(call) is Call and call.order[1] is root else None
            is_first = frame is not None and frame.first == PREDICTED and not frame.attempts
            if is_first and frame.waits_for == n and frame.coroutine is not None:
                frame.answers[n] = result
            else:
                call = self.answered(part, tid, root, n, PREDICTED, result)
            if call is not None:
                self._go_on(part, call)


def by_number(queue: list[Any]) -> dict[int, Made]:
    """Queued one-way calls, by number."""
    return {n: (False, binding, key, args) for n, (binding, key, args) in enumerate(queue, start=1)}


def same_failure(one: Failure, other: Failure) -> bool:
    """As its reply shows it."""
    return (one.code, one.type, one.message, one.where) == (other.code, other.type, other.message, other.where)
