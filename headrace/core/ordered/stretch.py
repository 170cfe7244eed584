"""A stretch of an epoch that one worker runs with the serial mode's code, while everything below it is final.

Some transactions run better this way, and some only this way: those whose repairs do not end, those too large to try,
and those whose outcome depends on the transaction as a whole (its number of calls or bytes, a call that was not
awaited, external calls). Their worker, the *gatherer*, gets the state of their entities from the others, runs
everything from the lowest to the highest in TID order, and returns the writes.

Rules:
1. No run can be wrong: all lent state is final, as it was below the stretch.
2. A row is tried by the serial mode's fast loop. If it reaches an entity whose state is not known here, it is undone
   and run by `TrackedExecutor`, which waits for the state. So each call runs twice at most.
3. Entities of other workers that the stretch used are requested in advance the next time.

Never here: messages, which worker lends state, which transactions are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.core.bindings import Binding
from headrace.core.epoch import Epoch
from headrace.core.program import Program
from headrace.core.serial import Body, SerialExecutor, Walk
from headrace.core.state import State, States, Table
from headrace.model.operator import Operator
from headrace.wire.messages import Entities, Need
from headrace.wire.values import MISSING, Key, same

Entity = tuple[str, Any]


class Unknown(BaseException):
    """The state of this entity has not been lent."""


class BorrowedStates(States):
    """What is known of an operator's entities, MISSING where one has no state."""

    def __init__(self, operator: str, stretch: Stretch) -> None:
        super().__init__()
        self.operator, self.stretch = operator, stretch
        self.used: dict[Key, None] = {}

    def clear(self) -> None:
        super().clear()
        self.used.clear()

    def lacks(self, key: Key) -> bool:
        if key in self:
            return False
        try:
            self[key] = self.stretch.own((self.operator, key))
        except LookupError:
            return True
        return False

    def get(self, key: Key, default: Any = None) -> Any:
        if key not in self and self.lacks(key):
            self.stretch.executor.stop()
            raise Unknown
        self.used[key] = None
        return self[key]

    def pop(self, key: Key, *default: Any) -> Any:
        """The entity has no state from now on."""
        self[key] = MISSING


class BorrowedTable(Table):
    __slots__ = ()

    states: BorrowedStates

    def __init__(self, operator: Operator, stretch: Stretch) -> None:
        super().__init__(operator, BorrowedStates(operator.name, stretch))

    def lacks(self, key: Key) -> bool:
        return self.states.lacks(key)


class StretchExecutor(SerialExecutor):
    """The serial mode over borrowed state."""

    walk: Walk | None = None  # a row that waits
    is_stopped = False
    ran = 0  # functions started so far

    def __init__(self, program: Program, state: State) -> None:
        super().__init__(program, state, around=self._counted)

    def _counted(self, body: Body) -> Body:
        def run(context: Any, *args: Any) -> Any:
            self.ran += 1
            return body(context, *args)

        return run

    def stop(self) -> None:
        """The fast loop cannot continue this row."""
        self.is_stopped = True
        self.transaction.needs = self.transaction.is_marked = True

    def _run_tracked(self, epoch: Epoch, root: Binding) -> Any:
        if not self.is_stopped:
            root.run = self._give_up
        self.is_stopped = False
        tracked = self._tracked()
        return self.go_on(tracked.walk(epoch, tracked.bindings.by_number[root.number]))

    def go_on(self, walk: Walk) -> Any:
        """Continue a row that can wait. Returns what it needs: a response, or the entities whose state is not known, of
        the next call and of queued calls."""
        self.walk = None
        try:
            binding, key = next(walk)
        except StopIteration as end:
            return end.value
        self.walk = walk
        queue = self._tracked().transaction.queue
        queued = [(called, of) for called, of, _ in queue if called.table.lacks(of)]
        return list(dict.fromkeys((each.operator.name, of) for each, of in [(binding, key), *queued]))


class Stretch:
    """The gatherer's. Reused for the next stretch."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        self.tables: dict[str, BorrowedTable] = {}
        self.state = State(program, seed, self._table)
        self.state.watch(self.tables)
        self.executor = StretchExecutor(program, self.state)
        self.epoch = Epoch(0, 0, 0)
        self.own: Callable[[Entity], Any]
        self.is_new = self.is_running = False

    def _table(self, operator: Operator) -> BorrowedTable:
        table = self.tables[operator.name] = BorrowedTable(operator, self)
        return table

    def begin(self, epoch: Epoch, own: Callable[[Entity], Any]) -> None:
        """`epoch` has the rows. `own` gives the state of this worker's entities, and raises LookupError for others."""
        self.forget()
        self.epoch, self.own, self.is_new = epoch, own, True

    def forget(self) -> None:
        """The stretch is over: drop all lent state."""
        self.state.take_changes()
        for table in self.tables.values():
            table.states.clear()
        self.executor.walk, self.epoch = None, Epoch(0, 0, 0)

    def lend(self, operator: str, key: Key, state: Any) -> None:
        self.tables[operator].states.setdefault(key, MISSING if state == MISSING else state)

    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none."""
        row = len(self.epoch.results)
        return self.epoch.tids[row] if self.is_running and row < len(self.epoch.tids) else 0

    @property
    def is_done(self) -> bool:
        return len(self.epoch.results) == len(self.epoch)

    def run(self, rows: int) -> Need | list[Entity] | None:
        """Run this many rows. Returns what is needed to continue: a response, or the state of entities."""
        epoch, executor = self.epoch, self.executor
        stop = len(epoch.results) + rows
        self.is_new, self.is_running = False, True
        try:
            needs = executor.go_on(executor.walk) if executor.walk is not None else None
            if needs is None:
                needs = executor.run(epoch, len(epoch.results), stop)
        finally:
            self.is_running = False
        return needs

    def writes(self) -> Entities:
        """(operator, key, new state) of every changed entity. Call it once, at the end."""
        return [
            (operator, key, after)
            for operator, changed in self.state.take_changes().items()
            for key, before, after in zip(*changed, strict=True)
            if not same(before, after)
        ]

    def used(self) -> list[Entity]:
        """The entities whose state it read."""
        return [(operator, key) for operator, table in self.tables.items() for key in table.states.used]
