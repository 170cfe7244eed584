"""State: the entities of every operator, and what has changed in them.

Rules:
1. A table holds the sealed state of each entity that has one. There is one layer: an executor reads and writes
   `states` itself.
2. If deltas are taken, the key of each write is appended to `written`. `take_delta` looks up the states. An entity that
   was created and deleted in between is MISSING there. (A list grows at its end, in the processor's cache; a dict of
   the new states would cost each write an access to a second large table.)
3. In a watched table, `befores` records the state of an entity before its first write (and `written` is used as well).
   `take_changes`, at the end of an epoch, makes columns of it. An executor that has several epochs under way finds
   these itself, in its chains.
4. If digests are taken, `news` holds the new state of each write of the running epoch, beside its key in `written`;
   UNCHANGED if it is equal to the one before. An abort takes both back (`take_back`), so what remains does not depend
   on how an executor got there. `take_digest`, at the end of an epoch, hashes it.

Never here: which transaction writes, what a state means, how it is stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import repeat
from typing import Any

from headrace.core.digests import UNCHANGED, Writes, serial_digest
from headrace.core.epoch_changes import Changes, OperatorChanges
from headrace.core.placement import shards_of
from headrace.core.program import Program
from headrace.model.operator import Operator
from headrace.wire.messages import Entities
from headrace.wire.values import MISSING, Key

States = dict[Key, Any]  # sealed
WRITTEN_MAX = 200_000  # keys in the list, with repeats; then they are sorted out


class Table:
    """The entities of one operator. To write, call `change` or `put`; a hot loop may do their work itself: it uses
    `states` as a dict (`get`, `[key] =`, `pop`) and records each write in `written` and `befores`."""

    __slots__ = ("_earlier", "befores", "news", "operator", "states", "written")

    def __init__(self, operator: Operator, states: States | None = None) -> None:
        self.operator = operator
        self.states: States = {} if states is None else states
        self.written: list[Key] | None = None  # if deltas are taken, or the table is watched; always the same list
        self._earlier: dict[Key, None] = {}  # keys that were sorted out of it
        self.befores: States | None = None  # if the table is watched
        self.news: list[Any] | None = None  # if digests are taken; always the same list

    def get(self, key: Key) -> Any:
        """The sealed state, or MISSING."""
        return self.states.get(key, MISSING)

    def put(self, key: Key, state: Any) -> None:
        """Set the state of an entity; MISSING deletes it."""
        if self.written is not None:
            if self.news is not None:
                before = self.get(key)
                is_other = state != before or type(state) is not type(before)  # as in the serial mode's loop
                self.news.append(state if is_other else UNCHANGED)
            self.written.append(key)
        if state is MISSING:
            self.states.pop(key, None)
        else:
            self.states[key] = state

    def change(self, key: Key, before: Any, state: Any) -> None:
        """The same, with the state that the entity had before."""
        if self.befores is not None:
            self.befores.setdefault(key, before)
        self.put(key, state)

    def take_back(self, key: Key, before: Any) -> None:
        """Undo the newest write to this table that is not undone: the entity gets back the state it had."""
        if self.news is not None:
            assert self.written is not None
            self.news.pop()
            self.written.pop()
        elif self.written is not None:
            self.written.append(key)
        if before is MISSING:
            self.states.pop(key, None)
        else:
            self.states[key] = before

    def lacks(self, key: Key) -> bool:
        """Must the entity's state be fetched first?"""
        return False

    def load(self, states: States) -> None:
        """Add states that do not count as a change."""
        self.states.update(states)

    def items(self) -> Iterable[tuple[Key, Any]]:
        """Every entity that has a state, with this state."""
        return self.states.items()

    def by_shard(self, shards: int) -> Iterator[tuple[int, Key, Any]]:
        """The same, with the shard of each."""
        places = shards_of(self.operator, list(self.states), shards)
        for shard, (key, state) in zip(places, self.states.items(), strict=True):
            yield shard, key, state

    def __len__(self) -> int:
        """How many entities have a state. Another thread may ask."""
        return len(self.states)

    def sort_out(self) -> None:
        """Keep each written key once."""
        if self.written:
            self._earlier.update(dict.fromkeys(self.written))
            self.written.clear()

    def take_delta(self) -> States:
        self.sort_out()
        keys, self._earlier = list(self._earlier), {}
        return dict(zip(keys, self._states_of(keys), strict=True)) if keys else {}

    def _states_of(self, keys: list[Key]) -> list[Any]:
        try:
            return list(operator.itemgetter(*keys, keys[0])(self.states)[:-1])  # the fastest way, if all are there
        except KeyError:
            return list(map(self.states.get, keys, repeat(MISSING)))

    def writes(self) -> Writes | None:
        """The writes of the epoch that ends, if digests are taken."""
        if not self.news:
            return None
        assert self.written is not None
        return self.written[-len(self.news) :], self.news

    def take_changes(self) -> OperatorChanges | None:
        if not self.befores:
            return None
        keys, befores = list(self.befores), list(self.befores.values())
        self.befores.clear()
        return OperatorChanges(keys, befores, self._states_of(keys))


class State:
    """A table for each operator of a program. Several executors may run over one state."""

    def __init__(self, program: Program, seed: int = 0, table: Callable[[Operator], Table] = Table) -> None:
        self.seed = seed  # of random numbers
        self.tables = {name: table(operator) for name, operator in program.operators.items()}
        self.has_deltas = self.has_digests = False
        self.version = 0  # grows when tables begin to record writes

    def keep_deltas(self) -> None:
        """From now on, `take_delta` gives what was written since it was last called."""
        self.has_deltas = True
        self.version += 1
        for table in self.tables.values():
            table.written = [] if table.written is None else table.written

    def keep_digests(self) -> None:
        """From now on, `take_digest` gives a digest of what was written since it was last called."""
        self.has_digests = True
        self.version += 1
        for table in self.tables.values():
            table.written = [] if table.written is None else table.written
            table.news = [] if table.news is None else table.news

    def watch(self, operators: Iterable[str]) -> None:
        """From now on, `take_changes` gives what is changed in these."""
        self.version += 1
        for name in operators:
            table = self.tables[name]
            table.written = [] if table.written is None else table.written
            table.befores = {} if table.befores is None else table.befores

    def take_delta(self) -> dict[str, States]:
        """What was written since the last call, by operator. The caller owns it. Call it between two epochs."""
        return {name: written for name, table in self.tables.items() if (written := table.take_delta())}

    def watch_only(self, operators: Collection[str]) -> None:
        """From now on, `take_changes` gives what is changed in these, and in no others."""
        self.watch(operators)
        for name, table in self.tables.items():
            if name not in operators:
                table.befores = None

    def take_digest(self) -> bytes | None:
        """A digest of the writes of an epoch. Call it at its end, before `take_changes`."""
        if not self.has_digests:
            return None
        written = ((name, table.writes()) for name, table in sorted(self.tables.items()))
        digest = serial_digest((name, writes) for name, writes in written if writes is not None)
        for table in self.tables.values():
            if table.news:
                table.news.clear()
        return digest

    def take_changes(self) -> Changes:
        """What was changed in watched tables since the last call. Call it at the end of an epoch."""
        changes: Changes = {}
        for name, table in self.tables.items():
            changed = table.take_changes()
            if changed is not None:
                changes[name] = changed
            if table.written and not self.has_deltas:
                table.written.clear()
        return changes

    def sort_out(self) -> None:
        """Call it before an epoch, so that the keys of writes do not take more and more room."""
        for table in self.tables.values():
            if table.written and len(table.written) > WRITTEN_MAX and not table.news:
                table.sort_out()

    def select(
        self, operator: str | None = None, key: Any = None, places: list[tuple[str, Any]] | None = None
    ) -> Entities:
        """The entities of an operator or of all, or those with this key; or those at these places."""
        found: Entities = []
        if places is not None:
            for name, each in places:
                if (state := self.tables[name].get(each)) is not MISSING:
                    found.append((name, each, state))
            return found
        for name, table in self.tables.items():
            if operator is None or name == operator:
                if key is None:
                    found += [(name, each, state) for each, state in table.items()]
                elif (state := table.get(key)) is not MISSING:
                    found.append((name, key, state))
        return found


def entities_of(delta: dict[str, States]) -> Entities:
    """What `take_delta` gives, as rows."""
    entities: Entities = []
    for name, written in delta.items():
        entities += zip(repeat(name), written, written.values())
    return entities
