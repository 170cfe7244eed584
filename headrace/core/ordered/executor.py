"""Execution in the ordered mode: one worker's part of epochs whose transactions are spread over several.

Every call runs as soon as it is known, on what its entity's chain holds below it now. Late calls are inserted where
they belong, and what they change is repaired: nothing else runs again.

Rules:
1. A call is a function of its arguments, the state it sees and the answers to what it awaited; it gives new state, a
   result and further calls. It runs again exactly if one of its inputs has changed, and sends only the outputs that
   changed.
2. The call that is lowest in the total order (TID, then place) runs or is repaired first. When all messages are
   delivered and no work is left, every call has the result that a loop over the log would give.
3. If a call fails, the worker of its root marks the transaction as aborted. A later repair can remove the mark. If
   several calls fail, the failure of the lowest one is the reply. No other transaction sees the writes of an aborted
   transaction.
4. A transaction becomes a suspect if its outcome depends on the transaction as a whole (limits that count over all of
   it, a call that was never awaited), or if it has used up its repairs. It is gathered once all below it is final
   (`core/ordered/gathering.py`).

Never here: sockets, terms, when an epoch is final.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.core import order
from headrace.core.bindings import Bindings
from headrace.core.epoch_changes import Changes, OperatorChanges
from headrace.core.ordered.chains import (
    NOT_YET,
    PREDICTED,
    AwaitFrame,
    Call,
    Caller,
    OrderedBinding,
    locate,
    new_call,
    value_before,
)
from headrace.core.ordered.exchange import EpochPart, Turn
from headrace.core.ordered.prediction import Lessons, Predictions
from headrace.core.ordered.repair import Repair
from headrace.core.placement import ShardMap
from headrace.core.program import Entry, Program
from headrace.core.state import State, Table
from headrace.wire.messages import AnsweredAll
from headrace.wire.values import HIGH, LOW, MISSING, Key


@functools.cache
def sent_by_root(worker: int) -> list[bytes]:
    """The places of the first one-way calls of roots on this worker, by number."""
    return [b"", *(order.sent(order.ROOT, n, worker) for n in range(1, 256))]


class OrderedExecutor(Repair):
    """Runs a worker's part of the epochs that are not final."""

    def __init__(self, program: Program, state: State, me: int) -> None:
        super().__init__(program, state, me)
        self.parts: dict[int, EpochPart] = {}  # in order
        self.predictions: Predictions = {}
        self.sent_by_root = sent_by_root(me)
        self.bindings = Bindings(program, state, self._bind)
        for binding in self.bindings.by_number:
            binding.bind(self._context(binding))

    def place(self, shards: ShardMap) -> None:
        self.shards = shards
        for binding in self.bindings.by_number:
            binding.owners = shards.cache_of(binding.operator)

    def _bind(self, entry: Entry, table: Table) -> OrderedBinding:
        binding = OrderedBinding(entry, table, self.program, self.chains[entry.operator.name])
        if entry.sealed is not entry:
            binding.lessons = Lessons(self.program.config.predict_after_runs)
        return binding

    def decreed(self, binding: OrderedBinding, why: str) -> OrderedBinding:
        """The binding for a transaction that aborts by decree."""
        fails = OrderedBinding(binding.entry, binding.table, self.program, binding.chains)
        fails.owners = binding.owners
        fails.decree(why)
        fails.bind(self._context(fails))
        return fails

    # --- the loop -----------------------------------------------------------------------------------------------------

    def begin(self, part: EpochPart) -> None:
        self.bindings.refresh()
        self.parts[part.number] = part

    def work(self, budget: int) -> None:
        """Do a slice of the work, lowest first."""
        for part in self._open_parts():
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
        return self.lowest() > 0 or any(part.at < len(part.rows) for part in self._open_parts())

    def _open_parts(self) -> Iterator[EpochPart]:
        """Epochs whose rows may start: those after an epoch with suspects wait for it."""
        for part in self.parts.values():
            yield part
            if part.suspects:
                return

    def is_idle(self, part: EpochPart) -> bool:
        lowest = self.lowest()
        return part.at == len(part.rows) and not 0 < lowest <= part.tids[-1]

    def _run_rows(self, part: EpochPart, budget: int) -> int:
        """Run rows in order, and what they call here, while each is the last of its chain. Others take the slow path.
        Returns how many rows were started."""
        rows, at, heap = part.rows, part.at, self.heap
        start, stop = at, min(len(rows), at + budget)
        while at < stop and not (heap and heap[0][0] < rows[at][:2]):
            todo = self._run_row(part, rows[at])
            at += 1
            for row in todo:  # grows meanwhile
                todo += self._run_row(part, row)
        part.at = at
        self.running = 0
        return at - start

    def _run_row(self, part: EpochPart, row: Turn) -> list[Turn]:
        """Run a row. Returns its calls here, which are next."""
        tid, place, binding, key, args = row
        if part.suspects and tid in part.suspects:
            return []  # it will be gathered
        if part.overruled and (tid, place) in part.overruled and place is not order.ROOT:
            return []
        call = self._run_in_turn(part, tid, place, binding, key, args)
        if call is None:
            self._start(part, row)
        elif call.frame is None and call.failure is None:
            transaction = self.transaction
            if place[0] == 1 and place is not order.ROOT:  # predicted and awaited
                if transaction.queue or transaction.is_marked or binding.lessons is not None:
                    self._complete(part, call, call.result)
                else:
                    call.answered = call.result
                    self._answer_predicted(part, call)
                return []
            if binding.lessons is not None or transaction.is_marked:
                self._returned(part, call)
            if transaction.queue or (place is order.ROOT and binding in part.predictions):
                return self._send_on(part, call)
        return []

    def _answer_predicted(self, part: EpochPart, call: Call) -> None:
        """Send the first answer of a predicted call; small ones are sent together."""
        tid, place = call.order
        if type(call.result) is not int and call.result is not None:
            self._answer(part, call)
            return
        column = part.answers.get(place)
        if column is None:
            column = part.answers[place] = AnsweredAll(tid, place[1], [], [])  # predicted calls are few: one byte
            self.tell(part, call.caller[0], column)  # type: ignore[index]
        column.tids.append(tid)
        column.results.append(call.result)

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
        """The hot path: run a call if it is the last of its chain; else do nothing and return None. A call without
        failure and frame has just returned; this method's caller handles the consequences."""
        chains = binding.chains
        chain = chains.get(key)
        if chain is not None:
            last = (chain[-1] if type(chain) is list else chain).order
            if last[0] >= tid and (caller is None or last > (tid, place)):
                return None
        if tid in self.aborted:
            return None
        states, context, transaction = binding.states, binding.context, self.transaction
        if transaction.is_marked:
            transaction.reset()
        transaction.queue.clear()
        context.key, context._order = key, (at := (tid, place))
        context._state = before = states.get(key, MISSING)
        context._read, context._deltas = False, ()
        self.running = tid
        self.ran += 1
        coroutine, is_waiting, awaited = None, False, None
        try:
            result = binding.run(*args)
            if not binding.is_plain:
                coroutine = result
                try:
                    awaited = coroutine.send(None)
                    is_waiting, result = True, NOT_YET
                except StopIteration as returned:
                    result = returned.value
            is_small = type(result) is binding.quick and result < HIGH and result > LOW
            if not is_small and not is_waiting and (caller is not None or place[0] == 1):  # it is used
                result = binding.seal(result) if place is order.ROOT else self._for_caller(binding, result)
        except BaseException as error:
            call = new_call(at, binding, key, args)
            self._register(part, call)
            self._expect(part, call, caller)
            self._link(call, call)
            call.must_run = False
            self._fail(part, call, 0, before, error, context, None)
            return call
        state = context._state
        call = Call(at, binding, key, args, before, state, context._read, result)
        if chain is None:
            chains[key] = call
        elif type(chain) is list:
            chain.append(call)
        else:
            chains[key] = [chain.seen, chain, call]
        if state is not before:
            if binding.written is not None:
                binding.written.append(key)
            if state is MISSING:
                states.pop(key, None)
            else:
                states[key] = state
        if not context._read:
            deltas = context._deltas
            if deltas:
                call.deltas = deltas
            elif deltas is not None:  # neither put nor merged: what it leaves is what it saw
                call.read = True
        calls = part.calls.get(tid)
        if calls is None and self.calls_max >= self.workers:
            part.calls[tid] = call
        elif type(calls) is Call:
            part.calls[tid] = [calls, call]
            self._count_calls(part, tid, 2)
        else:
            self._register(part, call)
        if caller is not None:
            call.caller = caller
        elif place is order.ROOT:
            if is_waiting and part.predictions and tid not in part.unpredicted:
                self._predict(part, call)
        elif place[0] == 1:
            call.caller = (part.owner(tid), 1, 1, PREDICTED)
        if is_waiting:
            self._begin_waiting(part, call, context, coroutine, awaited)
        return call

    def _returned(self, part: EpochPart, call: Call) -> None:
        """Note what is needed of a call that ran in its turn and returned."""
        if call.binding.lessons is not None:
            self._learn(call.binding, call.key, call.args, self.transaction.queue)
        if self.transaction.is_marked:
            self._count_marks(part, call.order[0], self.transaction)

    def _expect(self, part: EpochPart, call: Call, caller: Caller | None = None) -> None:
        """Before a call starts: set its caller, and its predicted calls that other workers also make."""
        tid, place = call.order
        if caller is not None:
            call.caller = caller
        elif place is order.ROOT:
            self._predict(part, call)
        elif place[0] == 1:
            call.caller = (part.owner(tid), 1, 1, PREDICTED)

    def _predict(self, part: EpochPart, call: Call) -> None:
        """A root's calls that other workers run by prediction count as made."""
        for template in part.predictions.get(call.binding, ()):
            made = template.fill(call.key, call.args)
            if made is None:
                continue
            is_awaited, binding, key, _ = made
            if (binding.owners.get(key) or self.shards.owner(binding.operator, key)) != self.me:
                n = template.n
                if call.made is None:
                    call.made = {n: made}
                else:
                    call.made[n] = made
                if is_awaited:
                    if call.frame is None:
                        call.frame = AwaitFrame(PREDICTED)
                    if part.early_answers:
                        early = part.early_answers.get(call.order[0])
                        if early is not None and n in early:
                            call.frame.answers[n] = early[n]

    def _learn(self, binding: OrderedBinding, key: Key, args: Any, queue: list[Any]) -> None:
        made = [(bool(is_awaited), called, to, given) for called, to, given, *is_awaited in queue]
        verdict = binding.lessons.note(key, args, made)
        if verdict is not None:
            if verdict:
                self.learned += binding.lessons.templates(binding)
            binding.lessons = None

    def _send_on(self, part: EpochPart, call: Call) -> list[Turn]:
        """Handle the calls that a call made when it ran in its turn: those to own entities are next; others are sent,
        unless they were predicted. Wrong predictions take the slow path."""
        queue, me = self.transaction.queue, self.me
        tid, place = call.order
        if len(queue) > part.tries_max:
            self._hold(part, tid)
        if part.suspects and tid in part.suspects:
            return []  # it will be gathered
        is_root = place is order.ROOT
        templates = part.predictions.get(call.binding, ()) if is_root else ()
        predicted, told = len(templates), []
        todo: list[Turn] = []
        for n, (binding, key, args) in enumerate(queue, start=1):
            if n <= predicted and not templates[n - 1].gives(call.key, call.args, binding, key, args):
                break
            if (binding.owners.get(key) or self.shards.owner(binding.operator, key)) == me:
                at = self.sent_by_root[n] if is_root and n < 256 else order.sent(place, n, me)
                todo.append((tid, at, binding, key, args))
            elif n > predicted:
                told.append(n)
        else:
            if len(queue) >= predicted:
                call.made = queue.copy()
                for n in told:
                    self._later(self._make(part, call, n, (False, *queue[n - 1])))
                return todo
        self._expect(part, call)
        self._dispatch_sent(part, call, queue)
        return []

    def _start(self, part: EpochPart, row: Turn) -> None:
        """Run a row by the slow path."""
        tid, place, binding, key, args = row
        if tid in part.suspects:
            return
        call = new_call((tid, place), binding, key, args)
        self._register(part, call)
        self._expect(part, call)
        self._run(part, call)

    def lowest(self) -> int:
        """The TID of the next work; 0 if there is none."""
        heap = self.heap
        while heap and heap[0][2].is_gone:
            heapq.heappop(heap)
        return heap[0][0][0] if heap else 0

    def repair(self) -> None:
        """Do the lowest work."""
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

    def time_of(self, tid: int) -> int:
        part = self._part_of(tid)
        assert part is not None
        return part.time_us

    def _part_of(self, tid: int) -> EpochPart | None:
        for part in self.parts.values():
            if tid in part.tids:
                return part
        return None

    # --- the end of calls and epochs ----------------------------------------------------------------------------------

    def install(self, part: EpochPart, tid: int, n: int, binding: OrderedBinding, key: Key, state: Any) -> None:
        """Install an entity's state after a stretch that ends with this TID."""
        call = new_call((tid, order.awaited(order.ROOT, n, self.me)), binding, key, ())
        self._keep(part, call)
        chain, at = self._link(call, call)
        call.seen, call.new = value_before(chain, at, tid, self.aborted), state
        call.read = call.must_run = False
        self._ripple(call, chain, at)

    def let_all_go(self) -> None:
        """Close all waiting coroutines: they will not end."""
        for part in self.parts.values():
            for call in list(part.waiting):
                self._let_go(part, call)

    def changes_of(self, part: EpochPart, operators: Iterable[str]) -> Changes:
        """What an epoch has changed in these. All epochs before it are finished."""
        last, aborted, changes = part.tids[-1], self.aborted, dict[str, OperatorChanges]()
        for name in operators:
            keys, befores, afters = changes[name] = OperatorChanges([], [], [])
            for key, chain in self.chains[name].items():
                is_list = type(chain) is list
                tid = (chain[1] if is_list else chain).order[0]
                if tid > last:
                    continue
                before = chain[0] if is_list else chain.seen
                if is_list:
                    after = value_before(chain, locate(chain, (last + 1, b"")), 0, aborted)
                else:
                    after = before if tid in aborted else chain.new
                if after is not before:
                    keys.append(key)
                    befores.append(before)
                    afters.append(after)
        return {name: changed for name, changed in changes.items() if changed.keys}

    def finish(self, part: EpochPart) -> None:
        """An epoch is final: drop its records."""
        for call in list(part.waiting):  # of aborted transactions: they will get no answer
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
            for key, chain in list(chains.items()):
                if type(chain) is not list:
                    if chain.order[0] <= last:
                        del chains[key]
                elif chain[-1].order[0] <= last:
                    del chains[key]
                elif chain[1].order[0] <= last:
                    at = locate(chain, (last + 1, b""))
                    chain[0] = value_before(chain, at, 0, self.aborted)
                    del chain[1:at]
        self.aborted.difference_update(part.tids)
