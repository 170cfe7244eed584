"""What happens later: which timers, schedules and messages there are, and which rows they become.

Rules:
1. The source is the state of the operator `headrace` at the end of the last final epoch. The transactions of the rows
   added here check it again: an item that was dropped earlier in the log does nothing.
2. A timer is due once the log's time has reached it. A schedule that was missed several times is due once. Timers and
   schedules become rows in the order in which they are due, and before calls that have a later time (`Engine.defer`).
3. A message leaves once the epoch that wants it is durable. When an engine ends, it is unknown whether the message was
   performed, so it is performed again, with the same idempotency key.
4. An item that aborts when it fires is not fired again: it is dropped. Until that is logged, it is `spent`.

Never here: clocks, threads, what is performed and how.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

from headrace.core.epoch import Batch, Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.events import Perform, Responded
from headrace.core.later.builtin import BUILT_IN, SEND, TIMER, drop, fire, skip, tick
from headrace.core.origin import FromEngine
from headrace.core.program import Program
from headrace.core.signature import Args
from headrace.core.snapshot_metadata import DeferredMetadata
from headrace.core.state import State
from headrace.errors import BadRequest
from headrace.model.operator import Function, Operator
from headrace.wire.messages import Failure
from headrace.wire.values import MISSING, Key, written_us

ChangedLater = list[tuple[Any, Any]]
"""Ids of `headrace` with their sealed state; and (operator, key) of expiring entities with the time of the write."""

DeferredRow = tuple[Function, Any, tuple[Any, ...]]

ROWS_MAX = 500  # added at a time


class DeferredRows(NamedTuple):
    """Rows to log."""

    batch: Batch
    first_us: int | None  # when the first timer or schedule in it was due; None if there is none
    is_more: bool  # more timers are due than fit into one batch


def later_of(changes: Changes, program: Program) -> ChangedLater:
    """The changes of an epoch that make something happen later."""
    later: ChangedLater = []
    for name in program.deferring:
        if name in changes:
            keys, _, afters = changes[name]
            if name == BUILT_IN.name:
                later += zip(keys, afters, strict=True)
            else:
                times = [state if state is MISSING else written_us(state) for state in afters]
                later += zip(zip(repeat(name), keys), times, strict=True)
    return later


class ExpiryQueue:
    """An operator's entities by the time of their last write: in log order, since logged time never goes back."""

    def __init__(self, operator: Operator) -> None:
        assert operator.ttl_us is not None
        assert operator.expire is not None
        self.ttl_us, self.expire = operator.ttl_us, operator.expire
        self.last: dict[Key, int] = {}
        self.queue: deque[tuple[int, Key]] = deque()  # with superseded writes

    def note(self, key: Key, written: Any) -> None:
        if written == MISSING:
            self.last.pop(key, None)
        elif self.last.get(key) != written:
            self.last[key] = written
            self.queue.append((written, key))

    def restore(self, entities: Iterable[tuple[int, Key]]) -> None:
        self.queue = deque(sorted(entities, key=itemgetter(0)))
        self.last = {key: written for written, key in self.queue}

    def due(self, now_us: int, rows_max: int) -> list[tuple[Function, Key, tuple[Any, ...]]]:
        """Rows that delete expired entities; each once."""
        rows: list[tuple[Function, Key, tuple[Any, ...]]] = []
        at_us = self.next_due_us()
        while at_us is not None and at_us <= now_us and len(rows) < rows_max:
            rows.append((self.expire, self.queue.popleft()[1], ()))
            at_us = self.next_due_us()
        return rows

    def next_due_us(self) -> int | None:
        queue, last = self.queue, self.last
        while queue and last.get(queue[0][1]) != queue[0][0]:
            queue.popleft()
        return queue[0][0] + self.ttl_us if queue else None


class Deferred:
    def __init__(self, program: Program) -> None:
        self.program, self.values = program, program.values
        self.timers: dict[str, int] = {}  # id -> when it is due
        self.heap: list[tuple[int, str]] = []
        self.cursors: dict[str, int] = {}  # of schedules: when they were last due
        self.sends: dict[str, Perform] = {}
        self.unsent: list[tuple[int, str]] = []  # messages that wait for a record to be durable
        self.responses: dict[str, Responded] = {}  # not logged yet
        self.fired: Counter[str] = Counter()  # logged rows that are not final: a recovery may find several of one
        self.spent: dict[str, int] = {}  # those whose row aborted; for schedules, with the time
        operators = program.app.operators.values()
        self.expiring = {operator.name: ExpiryQueue(operator) for operator in operators if operator.expire is not None}

    # --- what there is ---

    def note(self, changed: Iterable[tuple[Any, Any]], position: int) -> None:
        """Take what an epoch changed, and the position of its record. Entities of `headrace`: id and sealed state. Of
        operators with a time to live: operator and key, and the time of the write."""
        for key, sealed in changed:
            if type(key) is not str:
                self.expiring[key[0]].note(key[1], sealed)
                continue
            state = None if sealed == MISSING else self.values.unseal(sealed)
            if type(state) is int:
                self.cursors[key] = state
                continue
            if state is None:
                self.timers.pop(key, None)
                self.sends.pop(key, None)
                self.spent.pop(key, None)
                self.responses.pop(key, None)
                continue
            if key in self.timers or key in self.sends:
                continue  # it is set only once
            kind, due_us, name, args, _, _ = state
            if kind == TIMER:
                self.timers[key] = due_us
                heapq.heappush(self.heap, (due_us, key))
            elif kind == SEND:
                self.sends[key] = Perform(key, name, args)
                self.unsent.append((position, key))

    def final(self, epoch: Epoch) -> None:
        """Note the outcome of the rows that were added here."""
        for piece, start in zip(epoch.pieces, epoch.starts(), strict=True):
            if piece.is_own:
                for row in range(start, start + piece.size):
                    self._fired(epoch.entries[row].function, epoch.keys[row], epoch.args[row], epoch.failures.get(row))

    def _fired(self, function: Function, key: Any, args: Args, failure: Failure | None) -> None:
        if function.operator is BUILT_IN:
            self.fired[key] -= 1
            if self.fired[key] <= 0:
                del self.fired[key]
            if failure is not None and function is fire and (key in self.timers or key in self.sends):
                self.spent[key] = 0
            elif failure is not None and function is tick:
                self.spent[key] = args[0] if type(args[0]) is int else self.values.decode(args[0])[0]
            elif function in (drop, skip):
                self.spent.pop(key, None)

    def respond(self, responded: Responded) -> None:
        if responded.call in self.sends and responded.call not in self.spent:
            try:
                self.program.functions[fire].admit((responded.result, responded.failure))
            except BadRequest as error:  # too large with the rest of the row, or not a valid value
                room = self.program.config.value_bytes_max * 3 // 4  # it must fit itself
                responded = Responded(responded.call, None, str(error).encode()[:room].decode(errors="ignore"))
            self.responses[responded.call] = responded

    # --- what is to be done ---

    def performs(self, is_durable: Any) -> list[Perform]:
        """Messages that may leave now."""
        if not self.unsent:
            return []
        ready = [key for position, key in self.unsent if is_durable(position)]
        self.unsent = [(position, key) for position, key in self.unsent if not is_durable(position)]
        done = self.fired.keys() | self.spent.keys()  # the log has a row with the response
        return [self.sends[key] for key in dict.fromkeys(ready) if key in self.sends and key not in done]

    def due(self, now_us: int) -> DeferredRows | None:
        """The rows to log now."""
        rows: list[DeferredRow] = []
        for key, due_us in self.spent.items():
            if key not in self.fired:
                rows.append((skip, key, (due_us,)) if due_us else (drop, key, ()))
        for key, responded in list(self.responses.items())[:ROWS_MAX]:
            if key not in self.fired:
                rows.append((fire, key, (responded.result, responded.failure)))
                del self.responses[key]
        timed: list[tuple[int, DeferredRow]] = []  # with the time at which each is due
        missed: list[int] = []  # when schedules were first due
        while self.heap and self.heap[0][0] <= now_us and len(rows) + len(timed) < ROWS_MAX:
            due_us, key = heapq.heappop(self.heap)
            if self.timers.get(key) == due_us and key not in self.fired and key not in self.spent:
                timed.append((due_us, (fire, key, ())))
        for schedule in self.program.app.schedules.values():
            if schedule.key in self.fired or schedule.key in self.spent:
                continue
            last_us = self.cursors.get(schedule.key)
            tick_us = None if last_us is None else schedule.when.before(now_us, last_us)
            if last_us is None:  # new: it starts now, and that is state too
                rows.append((skip, schedule.key, (now_us,)))
            elif tick_us is not None:
                call = (tick_us, schedule.function, schedule.of, schedule.args)
                timed.append((tick_us, (tick, schedule.key, call)))
                missed.append(schedule.when.after(last_us))  # it may have been due before, and is called once
        timed.sort(key=itemgetter(0))
        rows += [row for _, row in timed]
        self.fired.update(key for _, key, _ in rows)
        for queue in self.expiring.values():
            rows += queue.due(now_us, ROWS_MAX - len(rows))
        if not rows:
            return None
        entries, arguments = [], []
        for function, _, args in rows:
            entry = self.program.functions[function]
            if not entry.fits(args):
                entry, args = entry.admit(args)
            entries.append(entry)
            arguments.append(args)
        ids = [f"headrace/{function.name}/{key}" for function, key, _ in rows]
        batch = Batch(FromEngine(ids), entries, [key for _, key, _ in rows], arguments)
        is_more = bool(self.heap) and self.heap[0][0] <= now_us
        first_us = min([*missed, *(due_us for due_us, _ in timed[:1])], default=None)
        return DeferredRows(batch, first_us, is_more)

    def next_due_us(self, now_us: int) -> int | None:
        """When there is something to log, as far as known."""
        if self.spent.keys() - self.fired or self.responses.keys() - self.fired:
            return now_us
        while self.heap and self.timers.get(self.heap[0][1]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        due = [self.heap[0][0]] if self.heap else []
        for schedule in self.program.app.schedules.values():
            if schedule.key not in self.fired:
                last_us = self.cursors.get(schedule.key)
                due.append(now_us if last_us is None else schedule.when.after(last_us))
        due += [at_us for queue in self.expiring.values() if (at_us := queue.next_due_us()) is not None]
        return min(due, default=None)

    # --- snapshots ---

    def describe(self) -> DeferredMetadata:
        return DeferredMetadata(dict(self.spent))  # as they are now

    def restore(self, metadata: DeferredMetadata, state: State) -> None:
        """`state` is that of the snapshot."""
        self.spent = dict(metadata.spent)
        self.note(state.tables[BUILT_IN.name].items(), 0)
        for name, queue in self.expiring.items():
            queue.restore((written_us(sealed), key) for key, sealed in state.tables[name].items())
