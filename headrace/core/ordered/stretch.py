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

Never here: messages, who lends, which transactions are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.core.epoch import Epoch
from headrace.core.program import Entry, Program, Table
from headrace.core.serial import SerialExecutor, Walk
from headrace.wire.messages import Entities, Need
from headrace.wire.values import MISSING, Key, same

Entity = tuple[str, Any]


class Unknown(BaseException):
    """The state of this entity has not been lent."""


class Borrowed(Table):
    """What is known of an operator's entities, as they were below the stretch."""

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


class StretchExecutor(SerialExecutor):
    """The serial mode over borrowed state."""

    walk: Walk | None = None  # a row that waits
    is_stopped = False
    ran = 0  # functions started so far

    def __init__(self, program: Program) -> None:
        self._count(program)
        super().__init__(program)

    def _count(self, program: Program) -> None:
        for entry in program.entries:
            entry.body = self._counted(entry.body)

    def _counted(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(context: Any, *args: Any) -> Any:
            self.ran += 1
            return body(context, *args)

        return run

    def stop(self) -> None:
        """The fast loop cannot continue this row."""
        self.is_stopped = True
        self.transaction.needs = self.transaction.is_marked = True

    def _run_tracked(self, epoch: Epoch, root: Entry) -> Any:
        if not self.is_stopped:
            root.run = self._give_up
        self.is_stopped = False
        is_new = self.tracked is None
        tracked = self._tracked()
        if is_new:
            self._count(tracked.program)
        return self.go_on(tracked.walk(epoch, tracked.program.numbered[root.number]))

    def go_on(self, walk: Walk) -> Any:
        """Continue a row that can wait. Returns what it needs: a response, or the entities whose state is not known, of
        the next call and of queued calls."""
        self.walk = None
        try:
            entry, key = next(walk)
        except StopIteration as end:
            return end.value
        self.walk = walk
        queued = [(entry, key) for entry, key, _ in self._tracked().transaction.queue if entry.lacks(key)]
        return list(dict.fromkeys((each.operator.name, of) for each, of in [(entry, key), *queued]))


class Stretch:
    """The gatherer's. Reused for the next stretch."""

    def __init__(self, program: Program) -> None:
        self.like = program
        self.program = Program(program.app, program.config, program, base=lambda operator: Borrowed(operator, self))
        self.executor = StretchExecutor(self.program)
        self.epoch = Epoch(0, 0, 0)
        self.own: Callable[[Entity], Any]
        self.is_new = self.is_running = False

    def begin(self, epoch: Epoch, decreed: dict[int, str], own: Callable[[Entity], Any]) -> None:
        """`epoch` has the rows; those in `decreed` abort for this reason. `own` gives the state of this worker's
        entities, and raises LookupError for others."""
        self.forget()
        self.epoch, self.own, self.is_new = epoch, own, True
        self.program.seed = self.like.seed
        epoch.entries = [self.program.numbered[entry.number] for entry in epoch.entries]
        for row, why in decreed.items():
            epoch.entries[row] = self.executor.decreed(epoch.entries[row], why)

    def forget(self) -> None:
        """The stretch is over: drop all lent state."""
        for layer in (self.program.tables, self.program.bases, self.program.later):
            for each in layer.values():
                each.clear()
        self.executor.walk, self.epoch = None, Epoch(0, 0, 0)

    def lend(self, operator: str, key: Key, state: Any) -> None:
        self.program.bases[operator].setdefault(key, MISSING if state == MISSING else state)

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
        """(operator, key, new state) of every changed entity."""
        return [
            (operator, key, state)
            for operator, table in self.program.tables.items()
            for key, state in table.items()
            if not same(self.program.bases[operator][key], state)
        ]

    def used(self) -> list[Entity]:
        """The entities whose state it read."""
        return [(operator, key) for operator, base in self.program.bases.items() for key in base.used]  # type: ignore[attr-defined]
