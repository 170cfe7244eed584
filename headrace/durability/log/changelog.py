"""The changelog: what each epoch changed in operators with `changes=True`, one record per epoch in the log `changes/`.

Rules:
1. A record holds each entity whose state at the epoch's end differs from its start, once, with both states: ordered by
   operator, then by key (ints, then texts, then bytes). Which worker ran the epoch, and in which mode, does not matter.
2. It is written before a snapshot that covers its epoch; a replay writes again what a crash lost. Records that are
   there already are compared with the replay.
3. Records have no gaps: the epoch of a record is its number plus a constant. A changelog begins with a record without
   changes, and so it does after it was off; `begin` is the first epoch after that record. For each operator `since` is
   the first epoch from which on all its changes are there: not before it was turned on, loaded or migrated. `breaks`
   counts how often it had logged changes before: a reader of those must not continue as if nothing had happened.
   `loads` counts the loads and migrations that the record knows of.
4. `key_types` says which types of keys the changes of each operator had so far; it is not there for an operator whose
   earlier records do not say.

    header:       epoch, time, begin, since, operators, breaks, loads, key_types
    operators:    keys, states before and states after; if some are missing, kinds with the keys, and two more tables

Never here: how changes come about, Spark.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, repeat
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes, OperatorChanges
from headrace.durability.columns import KINDS, sealed_to_arrow
from headrace.durability.log.column_bytes import ROWS_FOR_ARROW, WIDTHS, Columns, Ints, Streams, from_column, to_column
from headrace.durability.log.log import Log, bounds, read_log
from headrace.durability.log.records import ChangesHeader, ColumnRecord, pack, unpack
from headrace.durability.log.segments import refs_in
from headrace.durability.store import Store
from headrace.errors import AppChanged, LogBroken, NotDeterministic, StoreError
from headrace.wire.renewal import same_renewed
from headrace.wire.values import MISSING, Values, same, shown

FOLDER = "changes"
UPDATE, INSERT, DELETE = range(3)
RANKS = {int: 0, str: 1, bytes: 2}
KEY_TYPE_NAMES: dict[type, str] = {int: "long", str: "string", bytes: "binary"}
WIDTH_OF: dict[str, Any] = {"H": np.uint16, "i": np.int32, "q": np.int64}


# --- records ----------------------------------------------------------------------------------------------------------


class EpochChanges:
    """A record of the changelog."""

    def __init__(self, data: bytes) -> None:
        header, self._columns = unpack(data)
        if not isinstance(header, ChangesHeader):
            raise LogBroken(f"a record of the changelog holds {type(header).__name__}")
        self.header = header
        self.epoch, self.closed_us, self.begin, self.since = header.epoch, header.closed_us, header.begin, header.since

    def unbroken(self, operator: str | None) -> int:
        """The first epoch from which on the changes lead to the state: of one operator, or of all that log changes."""
        if operator is not None:
            return self.since[operator]
        return max([self.begin, *(epoch for name, epoch in self.since.items() if self.header.breaks.get(name))])

    @property
    def operators(self) -> list[str]:
        """The operators that changed."""
        return self.header.operators

    def of(self, operator: str) -> OperatorChanges | None:
        """The changes of an operator, as lists; MISSING where there is no state."""
        if operator not in self.operators:
            return None
        at = self.operators.index(operator)
        keys = from_column(self._columns[f"{at}.key"])
        kinds = self._kinds(at)
        befores, afters = self._list(f"{at}.before"), self._list(f"{at}.after")
        if kinds is not None:
            befores = spread(befores, (kinds != INSERT).tolist())
            afters = spread(afters, (kinds != DELETE).tolist())
        return OperatorChanges(keys, befores, afters)

    def arrow(self, operator: str) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array] | None:
        """The same as Arrow arrays: keys, kinds, states before and after (see columns.py); null for no state."""
        found = self.compact(operator)
        if found is None:
            return None
        keys, kinds, befores, afters = found
        return keys, pa.array(kinds), spread_array(befores, kinds != INSERT), spread_array(afters, kinds != DELETE)

    def compact(self, operator: str) -> tuple[pa.Array, Any, pa.Array, pa.Array] | None:
        """The same, but only with the states that exist: the kinds, in NumPy, say which rows have one."""
        if operator not in self.operators:
            return None
        at = self.operators.index(operator)
        keys = self._array(f"{at}.key")
        kinds = self._kinds(at)
        kinds = np.full(len(keys), UPDATE, np.uint8) if kinds is None else kinds
        return keys, kinds, self._array(f"{at}.before"), self._array(f"{at}.after")

    def _kinds(self, at: int) -> Any:
        column = self._columns.get(f"{at}.kind")
        return None if column is None else np.array(from_column(column), np.uint8)

    def _list(self, name: str) -> list[Any]:
        return from_column(self._columns[name]) if name in self._columns else []

    def _array(self, name: str) -> pa.Array:
        column = self._columns.get(name, [])
        if type(column) is list:
            return sealed_to_arrow(column)
        return column.cast(KINDS["int"]) if column.type in WIDTHS.values() else column


def spread(values: list[Any], is_there: list[bool]) -> list[Any]:
    rest = iter(values)
    return [next(rest) if there else MISSING for there in is_there]


def spread_array(values: pa.Array, is_there: Any) -> pa.Array:
    if is_there.all():
        return values
    if not len(values):
        return pa.nulls(len(is_there), values.type)
    return values.take(pa.array(np.cumsum(is_there) - 1, mask=~is_there))


def changes_to_columns(header: ChangesHeader, changes: Changes) -> ColumnRecord:
    """The record as columns. Its header lists the operators in it."""
    tables: list[Columns] = []
    operators: list[str] = []
    for name in sorted(changes):
        columns = columns_of(changes[name])
        if columns is not None:
            at = len(operators)
            operators.append(name)
            tables += [{f"{at}.{column}": values for column, values in table.items()} for table in columns]
    return ColumnRecord(msgspec.structs.replace(header, operators=operators), tuple(tables))


def columns_of(changed: OperatorChanges) -> tuple[Columns, ...] | None:
    """The changes in order, without states that stay the same. None if nothing is left."""
    quick = columns_of_ints(changed)
    if quick is not None:
        return quick or None
    rows = [row for row in zip(*changed, strict=True) if not same(row[1], row[2])]
    if not rows:
        return None
    kinds = set(map(type, changed.keys))
    rows.sort(key=itemgetter(0) if len(kinds) == 1 else lambda row: (RANKS[type(row[0])], row[0]))
    keys, befores, afters = map(list, zip(*rows, strict=True))
    is_old, is_kept = [is_state(state) for state in befores], [is_state(state) for state in afters]
    if all(is_old) and all(is_kept):
        return ({"key": to_column(keys), "before": to_column(befores), "after": to_column(afters)},)
    kind = [UPDATE if old and kept else DELETE if old else INSERT for old, kept in zip(is_old, is_kept, strict=True)]
    there = (("before", list(compress(befores, is_old))), ("after", list(compress(afters, is_kept))))
    tables = ({name: to_column(states)} for name, states in there if states)
    return {"key": to_column(keys), "kind": to_column(kind)}, *tables


def columns_of_ints(changed: OperatorChanges) -> tuple[Columns, ...] | None:
    """The same for keys and states that are all ints, without a Python loop; None if they are not."""
    if len(changed.keys) < ROWS_FOR_ARROW or type(changed.keys[0]) is not int or type(changed.befores[0]) is not int:
        return None
    try:
        keys, befores, afters = (
            np.frombuffer(
                struct.pack(f"<{len(column)}q", *msgspec.convert(column, list[int])), np.int64
            )  # True is none
            for column in changed
        )
    except (msgspec.ValidationError, struct.error):
        return None
    is_new = befores != afters
    if not is_new.all():
        keys, befores, afters = keys[is_new], befores[is_new], afters[is_new]
        if not len(keys):
            return ()
    order = np.argsort(keys)
    return (
        {"key": ints_column(keys[order]), "before": ints_column(befores[order]), "after": ints_column(afters[order])},
    )


def ints_column(values: Any) -> Any:
    """`to_column` for a NumPy array."""
    if len(values) < ROWS_FOR_ARROW:
        return values.tolist()
    least, most = int(values.min()), int(values.max())
    code = next(c for c, width in WIDTH_OF.items() if np.iinfo(width).min <= least and most <= np.iinfo(width).max)
    return Ints(code, len(values), values.astype(WIDTH_OF[code]).tobytes())


def types_of_keys(column: Any) -> set[str]:
    """Of a column as `to_column` makes it."""
    if isinstance(column, Ints) or (not isinstance(column, list) and column.type == KINDS["int"]):
        return {KEY_TYPE_NAMES[int]}
    if not isinstance(column, list) and column.type == KINDS["text"]:
        return {KEY_TYPE_NAMES[str]}
    return {KEY_TYPE_NAMES[kind] for kind in set(map(type, from_column(column)))}


def is_state(state: Any) -> bool:
    return type(state) is not bytes or state != MISSING


# --- the writer -------------------------------------------------------------------------------------------------------


class ChangeWriter:
    """Writes the changes of one engine's epochs. It is fenced with the log, whose term it has."""

    def __init__(self, store: Store, term: int, segment_bytes: int) -> None:
        self.values = Values()  # the app's, for states that an older version of the app wrote
        self.fingerprint = ""  # the app's
        self.log = Log.take_over(store, FOLDER, segment_bytes=segment_bytes, term=term)
        self.kept = 0  # the last epoch in it
        self.begin = 1  # the first epoch after the record without changes
        self.since: dict[str, int] = {}
        self.breaks: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        self.key_types: dict[str, list[str]] = {}
        self._streams = Streams()
        self._recorded: dict[int, bytes] = {}  # of epochs that will be run again
        self._prepared: dict[int, ColumnRecord] = {}  # of epochs that are not written yet
        self._newest: EpochChanges | None = None
        if self.log.last >= self.log.first:
            self._newest = EpochChanges(next(iter(self.log.read(self.log.last))).data)
            self.kept, self.begin = self._newest.epoch, self._newest.begin

    def start(self, epoch: int, closed_us: int, operators: Iterable[str], loads: Mapping[str, int]) -> None:
        """Called when an engine starts from the end of this epoch and logs the changes of these operators. `loads`
        counts how often each one's state was replaced outside of transactions: older changes do not lead to it."""
        newest, reached = self._newest, max(self.kept, epoch)
        is_gapless = newest is not None and self.kept >= epoch
        known = newest.since if newest is not None and is_gapless else {}
        loads_known = newest.header.loads if newest is not None else {}
        self.breaks, self.loads = dict(newest.header.breaks) if newest is not None else {}, dict(loads)
        for name in operators:
            fresh = loads.get(name, 0) - loads_known.get(name, 0)
            goes_on = name in known and not fresh
            self.since[name] = known[name] if goes_on else reached + 1
            has_broken = not goes_on and (name in known or name in self.breaks)
            self.breaks[name] = self.breaks.get(name, 0) + (max(fresh, 1) if has_broken else 0)
            if newest is None or (name not in newest.since and name not in newest.header.breaks):
                self.key_types[name] = []
            elif name in newest.header.key_types:
                self.key_types[name] = newest.header.key_types[name]
        if not is_gapless:
            self.kept, self.begin = epoch, epoch + 1
            self._append([self._to_columns(epoch, closed_us, {})])
        elif self.kept > epoch:
            first = self.log.last - (self.kept - epoch) + 1
            for record in self.log.read(max(first, self.log.first)):
                self._recorded[EpochChanges(record.data).epoch] = record.data

    def prepare(self, epoch: Epoch, changes: Changes) -> None:
        """The first half of `keep`, which another thread may call."""
        self._prepared[epoch.number] = self._to_columns(epoch.number, epoch.closed_us, changes)

    def keep(self, epochs: list[int]) -> None:
        """Writes the changes of final epochs, in order; those that are there already must be the same."""
        fresh: list[ColumnRecord] = []
        for number in epochs:
            assert number in self._prepared, f"epoch {number} is to be kept without its changes"
            record = self._prepared.pop(number)
            if number <= self.kept:
                self._compare(number, EpochChanges(pack(self._streams, record)))
            else:
                assert number == self.kept + 1 + len(fresh), f"changes of epoch {number} after those of {self.kept}"
                fresh.append(record)
        if fresh:
            self._append(fresh)
            self.kept += len(fresh)

    def retire(self, epoch: int) -> None:
        """Deletes epochs below this one, which are no longer needed."""
        self.log.retire(self.log.last - (self.kept - epoch))

    def close(self) -> None:
        self.log.close()

    def _to_columns(self, epoch: int, closed_us: int, changes: Changes) -> ColumnRecord:
        since, breaks, loads = dict(self.since), dict(self.breaks), dict(self.loads)
        header = ChangesHeader(epoch, closed_us, self.begin, since, [], breaks, loads, fingerprint=self.fingerprint)
        record = changes_to_columns(header, changes)
        return record._replace(header=msgspec.structs.replace(record.header, key_types=self._see_keys(record)))

    def _see_keys(self, record: ColumnRecord) -> dict[str, list[str]]:
        """The types of keys so far, with those of this record, which is the newest."""
        columns = {name: column for table in record.tables for name, column in table.items()}
        for at, name in enumerate(record.header.operators):
            known = self.key_types.get(name)
            if known is not None and not (fresh := types_of_keys(columns[f"{at}.key"])) <= {*known}:
                self.key_types[name] = sorted(fresh | {*known})
        return dict(self.key_types)

    def _append(self, record: list[ColumnRecord]) -> None:
        self.log.append([pack(self._streams, each) for each in record])

    def _compare(self, number: int, again: EpochChanges) -> None:
        before = EpochChanges(self._recorded.pop(number))
        for name in sorted({*before.since} & {*again.since}):
            difference = first_difference(before.of(name), again.of(name), self.values)
            if difference is not None and before.since[name] <= number:
                if before.header.fingerprint not in ("", self.fingerprint):
                    raise AppChanged(
                        f"epoch {number}, {name} {difference}: the changes were written by other code, perhaps by a "
                        "newer version. Start with that code"
                    )
                raise NotDeterministic(
                    f"epoch {number}, {name} {difference}: its functions depend on something other than their "
                    "arguments and state"
                )


def first_difference(before: OperatorChanges | None, again: OperatorChanges | None, values: Values) -> str | None:
    """Describes the first entity that two runs of an epoch changed differently; None if there is none. A field that an
    older version of the app did not have counts as equal if it is at its default."""
    nothing = OperatorChanges([], [], [])
    one, other = (
        {(type(key), key): states for key, *states in zip(*changed, strict=True)}
        for changed in (before or nothing, again or nothing)
    )
    for entity in {**one, **other}:
        states, now = one.get(entity), other.get(entity)
        if states is None or now is None or not all(map(same_renewed, states, now, repeat(values))):
            was, became = describe_change(states), describe_change(now)
            return f"{shown(entity[1])}: it was {was}, but in a second run it is {became}"
    return None


def describe_change(states: list[Any] | None) -> str:
    if states is None:
        return "not changed"
    before, after = (shown(state) if is_state(state) else "nothing" for state in states)
    return f"changed from {before} to {after}"


# --- the reader -------------------------------------------------------------------------------------------------------


class Changelog:
    """Reads the changelog of a store. Each call reads it as it is at that time."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def is_there(self) -> bool:
        return bool(refs_in(self.store, FOLDER))

    def newest(self) -> tuple[int, int, EpochChanges] | None:
        """The numbers of the first and the last record, and the last record."""
        for attempt in (1, 2, 3):
            first, last = bounds(self.store, FOLDER)
            if last < first:
                return None
            try:
                return first, last, EpochChanges(next(read_log(self.store, FOLDER, last)).data)
            except (LogBroken, StopIteration):  # the machine went down meanwhile, and what was not synced is gone
                if attempt == 3:
                    raise
        raise AssertionError("not reached")

    def bounds(self) -> tuple[int, int]:
        """The first and the last epoch whose changes are kept; (1, 0) if there are none."""
        found = self.newest()
        if found is None:
            return 1, 0
        first, last, newest = found
        return max(newest.begin, newest.epoch - (last - first)), newest.epoch

    def since(self, operator: str) -> int | None:
        """The first epoch from which on all changes of this operator are kept; None if they are not logged."""
        found = self.newest()
        if found is None or operator not in found[2].since:
            return None
        return max(found[2].since[operator], found[2].epoch - (found[1] - found[0]))

    def loads(self, operator: str) -> int:
        """How many loads and migrations of this operator the changelog knows of."""
        found = self.newest()
        return 0 if found is None else found[2].header.loads.get(operator, 0)

    def read(self, first: int, last: int | None = None) -> Iterator[EpochChanges]:
        """The changes of these epochs, in order; up to the newest unless `last` is given."""
        found = self.newest()
        oldest, end = self.bounds()
        last = end if last is None else last
        if first > last:
            return
        if found is None or first < oldest or last > end:
            raise self.missing(first, last)
        origin = found[2].epoch - found[1]
        for record in read_log(self.store, FOLDER, first - origin):
            changes = EpochChanges(record.data)
            if changes.epoch != record.number + origin or changes.epoch < changes.begin:  # it was off since we looked
                raise self.missing(first, last)
            if changes.epoch > last:
                return
            yield changes
            if changes.epoch == last:
                return

    def missing(self, first: int, last: int) -> StoreError:
        if not self.is_there:
            return StoreError(
                f"{self.store.url} has no changelog: no operator of its app logs changes. Turn it on with "
                "app.operator(..., changes=True), and restart the app"
            )
        oldest, newest = self.bounds()
        return StoreError(
            f"the changes of epochs {first} to {last} are not all in {self.store.url}: it has those of {oldest} to "
            f"{newest}. Older ones have been deleted, or were made while the operator had no changes=True"
        )
