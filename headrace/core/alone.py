"""A transaction that runs alone: by the serial mode's own code, on its root's worker, with everything below it final.

Some outcomes depend on the transaction as a whole (how many calls or bytes it has in all, a call that nobody awaited),
and no worker sees all of it. Such a *suspect* is run here. The other workers lend the state of the entities that it had
touched with them; what it asks for beyond that is lent on demand, and it starts over. Its writes go back to their
owners as records of its TID.

A transaction that makes external calls is run here, too: once for each of them, with the responses so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.core.chain import same
from headrace.core.epoch import Epoch
from headrace.core.execution import TrackedExecutor
from headrace.core.program import MISSING, Program, Table
from headrace.core.signature import Args
from headrace.wire.messages import Failure, Need, Response
from headrace.wire.values import Key

Entity = tuple[str, Any]


class Unknown(BaseException):
    """The state of this entity has not been lent."""


class LentTable(Table):
    """What is known of an operator's entities. Asked for others, it notes them."""

    def __init__(self, operator: str, alone: RunAlone) -> None:
        super().__init__()
        self.operator, self.alone = operator, alone

    def get(self, key: Key, default: Any = None) -> Any:
        entity = (self.operator, key)
        if entity not in self.alone.before:
            self.alone.want(entity)
        return super().get(key, default)


class RunAlone:
    def __init__(
        self, program: Program, own: Callable[[Entity], Any], tid: int, time_us: int, responses: list[Response]
    ) -> None:
        """`own` gives the state of an entity of this worker's; a LookupError says that it is another's."""
        self.own, self.tid, self.time_us, self.responses = own, tid, time_us, responses
        self.before: dict[Entity, Any] = {}  # as it was below the TID
        self.wanted: list[Entity] = []  # to be lent before it can run on
        self.program = Program(program.app, program.config, program, table=lambda operator: LentTable(operator, self))
        self.executor = TrackedExecutor(self.program)

    def lend(self, operator: str, key: Key, state: Any) -> None:
        self.before[operator, key] = MISSING if state == MISSING else state

    def want(self, entity: Entity) -> None:
        try:
            state = self.own(entity)
        except LookupError:
            if not self.wanted:
                waiting = [(entry.operator.name, key) for entry, key, _ in self.executor.transaction.queue]
                self.wanted = [other for other in {entity: None, **dict.fromkeys(waiting)} if self._is_strange(other)]
            raise Unknown from None
        self.before[entity] = state
        if state is not MISSING:
            self.program.tables[entity[0]][entity[1]] = state

    def _is_strange(self, entity: Entity) -> bool:
        """Is it another worker's, and not lent yet?"""
        try:
            return entity not in self.before and self.own(entity) is self
        except LookupError:
            return True

    def run(self, number: int, key: Key, args: Args, decree: str | None) -> tuple[Any, Failure | None] | Need | None:
        """Result or failure; None if `wanted` has to be lent first, a need if that must be met first. With a decree it
        fails for that reason."""
        for table in self.program.tables.values():
            table.clear()
        for (operator, known), state in self.before.items():
            if state is not MISSING:
                self.program.tables[operator][known] = state
        self.wanted = []
        epoch = Epoch(0, 0, self.time_us)
        epoch.responses = {(self.tid, response.call): response for response in self.responses}
        entry = self.program.numbered[number]
        epoch.entries = [entry if decree is None else self.executor.decreed(entry, decree)]
        epoch.keys, epoch.args = [key], [args]
        epoch.tids = range(self.tid, self.tid + 1)
        need = self.executor.run(epoch)
        if self.wanted:
            return None
        if need is not None:
            return need
        return epoch.results[0], epoch.failures.get(0)

    def writes(self) -> list[tuple[str, Any, Any]]:
        """(operator, key, state after) of every entity that it changed."""
        changed = []
        for (operator, key), before in self.before.items():
            after = dict.get(self.program.tables[operator], key, MISSING)
            if not same(before, after):
                changed.append((operator, key, after))
        return changed
