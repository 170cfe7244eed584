"""`headrace.changes`: what each epoch changed, one row per entity, as a stream or a table.

    spark.readStream.format("headrace.changes").option("operator", "account").load("bank-store")

Rules:
1. A row is the net change of an entity in an epoch: its state at the epoch's start and at its end, null where there was
   none. Epochs come in order; within one, entities are ordered by operator and key.
2. States are JSON, made without the app: see `plain` in wire/values.py. For a single operator whose state is declared,
   `option("as", "columns")` gives typed ones, as in `headrace.state`. The type of the keys: see key_column.py.
3. An operator's changes start with the epoch in which it began to log them. A query that asks for earlier ones fails
   with the reason, and so does one that is reading when the operator stops logging them.
4. A bulk load or a migration is not a change of an epoch: the changelog starts again after it. A stream that began
   before stops there and names the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.durability.columns import Columns, kinds_of
from headrace.durability.columns import join as cells_of
from headrace.durability.identity import CURRENT, read_checked, read_fingerprint
from headrace.durability.log.changelog import DELETE, INSERT, KEY_TYPE_NAMES, Changelog, EpochChanges, spread_array
from headrace.durability.log.log import read_log
from headrace.durability.reading.column_types import TableShape, declared
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.reading.typed import Misfits, one_array
from headrace.durability.store import Store
from headrace.errors import BadValue, StreamError
from headrace.spark.sources.epoch_streams import Epochs, EpochSource
from headrace.spark.sources.key_column import common_type, keys_as
from headrace.spark.sources.options import bad_rows_are_null, one_of, plain_places
from headrace.spark.sources.replies import ResultTexts, size_of
from headrace.wire.values import shown

KIND_NAMES = pa.array(["update", "insert", "delete"])  # by their number in a record
KEY_TYPES = {"int": "long", "text": "string"}  # by kind
ROWS_MAX, BYTES_MAX = 50_000, 16 << 20  # of one record batch; more if a single epoch is larger
TIME = pa.timestamp("us", "UTC")


def schema_of(key: pa.DataType, state: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            pa.field("epoch", pa.int64(), nullable=False),
            pa.field("operator", pa.string(), nullable=False),
            pa.field("key", key, nullable=False),
            pa.field("key_type", pa.string(), nullable=False),  # long, string, binary
            pa.field("kind", pa.string(), nullable=False),  # insert, update, delete
            pa.field("before", state),
            pa.field("after", state),
            pa.field("time", TIME, nullable=False),  # the log's time at which the epoch was closed
        ]
    )


class ChangesLog(Epochs):
    """The changelog."""

    folder, what = "changes", "the changes"
    option_names = ("operator", "as", "decimals", "badRows")

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.operator = options.get("operator")
        self.is_typed = one_of(options, "as", ("json", "columns")) == "columns"
        self.plain, self.nulls_bad_rows = plain_places(options), bad_rows_are_null(options)
        self.shape: TableShape | None = None  # None: as JSON
        if self.is_typed and self.operator is None:
            raise StreamError('typed columns need one operator: name it with .option("operator", ...)')

    def origin(self, store: Store) -> int:
        _, last, newest = self._newest(store)
        return newest.epoch - last

    def begin(self, store: Store) -> int:
        """From this epoch on the changes add up to the state."""
        newest = self._newest(store)[2]
        return newest.epoch + 1 if self._loaded(store, newest) else newest.unbroken(self.operator)

    def oldest(self, store: Store) -> int:
        return self._newest(store)[2].begin

    def mark(self, store: Store, epoch: int) -> dict[str, int]:
        """How often the operators had started again by then. The stream stops when that number grows."""
        _, last, newest = self._newest(store)
        if epoch > newest.epoch:
            begun = dict(newest.header.breaks)
            for name, count in self._loaded(store, newest).items():  # the next record will know
                begun[name] = begun.get(name, 0) + count
            return self._watched(begun)
        record = EpochChanges(next(read_log(store, self.folder, epoch - newest.epoch + last)).data)
        if self.operator is not None and self.operator not in record.since:
            self.check_begin(epoch, newest.since[self.operator])
        return self._watched(record.header.breaks)

    def _watched(self, breaks: Mapping[str, int]) -> dict[str, int]:
        return {name: count for name, count in breaks.items() if count and self.operator in (None, name)}

    def _loaded(self, store: Store, newest: EpochChanges) -> dict[str, int]:
        """The operators loaded since this record, which is the newest, and how often: no epoch has run on them yet."""
        base = StoreReader(store).snapshots.newest()
        loads = {} if base is None or base.epoch < newest.epoch else base.metadata.store.loads
        fresh = {name: loads.get(name, 0) - newest.header.loads.get(name, 0) for name in newest.since}
        return {name: count for name, count in fresh.items() if count > 0 and self.operator in (None, name)}

    def look(self, store: Store) -> None:
        """Check the options and determine the types of the keys and states."""
        newest = self._newest(store)[2]
        if self.key_type is None:
            self.key_type = self._key_type(newest)
        if self.is_typed:
            assert self.operator is not None
            current = read_checked(store, CURRENT)["fingerprint"]
            self.shape = declared(read_fingerprint(store, current), self.operator, self.plain)
            if self.shape is None:
                raise StreamError(
                    f"operator {self.operator!r} does not declare its state: declare it, as in "
                    f'app.operator({self.operator!r}, state=...), or leave out option("as", "columns")'
                )

    def _key_type(self, newest: EpochChanges) -> pa.DataType:
        """The type for the keys of all changes so far."""
        names = newest.since if self.operator is None else [self.operator]
        found = [newest.header.key_types.get(name, []) for name in names]  # none of a version that did not record them
        return common_type({each for types in found for each in types}) if all(found) else pa.string()

    @property
    def schema(self) -> pa.Schema:
        state = pa.string() if self.shape is None else self.shape.whole
        return schema_of(self.key_type or pa.string(), state)

    def _newest(self, store: Store) -> tuple[int, int, EpochChanges]:
        changelog = Changelog(store)
        found = changelog.newest()
        if found is None:
            raise StreamError(str(changelog.missing(1, 1)))
        since = found[2].since
        if self.operator is not None and self.operator not in since:
            known = ", ".join(sorted(since)) or "none"
            raise StreamError(
                f"operator {self.operator!r} does not log its changes; those that do: {known}. Turn it on with "
                f"app.operator({self.operator!r}, changes=True), and restart the app"
            )
        return found

    def check_begin(self, epoch: int, oldest: int, last: int | None = None) -> None:
        if epoch < oldest:
            whose = "" if self.operator is None else f" of operator {self.operator!r}"
            raise StreamError(
                f"the changes of epoch {epoch}{whose} are not available: those of epoch {oldest} are the oldest. "
                "Earlier ones were not logged, or are no longer kept (Config(reply_retention_us=...) sets for how "
                f'long). Start there, with .option("startingEpoch", {oldest}) and a new checkpoint; for the state '
                f'before it, read .format("headrace.state").option("asOfEpoch", {oldest - 1})'
            )
        super().check_begin(epoch, oldest, last)

    def batches(self, records: Iterator[tuple[int, bytes]], mark: Any = None) -> Iterator[pa.RecordBatch]:
        gathered = self._gathered()
        for epoch, data in records:
            changes = EpochChanges(data)
            self._check(epoch, changes, mark or {})
            for name in changes.operators if self.operator is None else [self.operator]:
                gathered.add(changes, name)
            if gathered.rows >= ROWS_MAX or gathered.bytes >= BYTES_MAX:
                yield gathered.batch()
                gathered = self._gathered()
        if gathered.rows:
            yield gathered.batch()

    def _gathered(self) -> ChangeRows:
        return ChangeRows(self.schema, self.shape, self.nulls_bad_rows)

    def _check(self, epoch: int, changes: EpochChanges, mark: dict[str, int]) -> None:
        """Check that this is the expected epoch, that the operator still logged, and that it continues what was
        read."""
        if changes.epoch != epoch or epoch < changes.begin:
            raise StreamError(
                f"the changes of epochs {epoch} to {changes.begin - 1} were not logged. Start again, with "
                f'.option("startingEpoch", {changes.begin}) and a new checkpoint'
            )
        if self.operator is not None and self.operator not in changes.since:
            raise StreamError(
                f"operator {self.operator!r} stopped logging its changes before epoch {epoch}: what it changed then is "
                "not known. Set changes=True again, and start again with a new checkpoint"
            )
        if self._watched(changes.header.breaks) != mark:
            unbroken = changes.unbroken(self.operator)
            raise StreamError(
                f"before epoch {unbroken} states were loaded, migrated, or changed without being logged: the changes "
                f'read up to then do not add up to the state. Start again, with .option("startingEpoch", {unbroken}) '
                'and a new checkpoint; for the state before it, read .format("headrace.state").option("asOfEpoch", '
                f"{unbroken - 1})"
            )


class ChangesSource(EpochSource):
    epochs = ChangesLog

    @classmethod
    def name(cls) -> str:
        return "headrace.changes"


class ChangeRows:
    """Rows of epochs that are collected for one record batch."""

    def __init__(self, schema: pa.Schema, shape: TableShape | None, nulls_bad_rows: bool) -> None:
        self.rows = self.bytes = 0
        self.schema = schema
        make: Callable[[], Any] = Texts if shape is None else lambda: Typed(shape, nulls_bad_rows)
        self._befores, self._afters = make(), make()
        self._keys: list[pa.Array] = []
        self._key_types: list[pa.Array] = []
        self._kinds: list[Any] = []
        self._epochs: list[tuple[int, int, str]] = []  # epoch, time, operator
        self._counts: list[int] = []

    def add(self, changes: EpochChanges, operator: str) -> None:
        found = changes.compact(operator)
        if found is None:
            return
        keys, kinds, befores, afters = found
        kinds_of_keys = kinds_of(keys)

        def named(row: int) -> str:
            key = cells_of({kind: column.slice(row, 1) for kind, column in kinds_of_keys.items()})[0]
            return f"{operator} {shown(key)} in epoch {changes.epoch}"

        self._befores.add(befores, kinds != INSERT, named)
        self._afters.add(afters, kinds != DELETE, named)
        self._keys.append(keys_as(kinds_of_keys, self.schema.field("key").type, f"operator {operator!r}"))
        self._key_types.append(key_types(kinds_of_keys))
        self._kinds.append(kinds)
        self._epochs.append((changes.epoch, changes.closed_us, operator))
        self._counts.append(len(keys))
        self.rows += len(keys)
        self.bytes += size_of(befores) + size_of(afters)

    def batch(self) -> pa.RecordBatch:
        epochs, times, operators = zip(*self._epochs, strict=True)
        which = np.repeat(np.arange(len(self._counts)), self._counts)
        columns = [
            pa.array(np.array(epochs, np.int64)[which]),
            pa.array(operators, pa.string()).take(pa.array(which)),
            pa.concat_arrays(self._keys),
            pa.concat_arrays(self._key_types),
            KIND_NAMES.take(pa.array(np.concatenate(self._kinds))),
            self._befores.array(),
            self._afters.array(),
            pa.array(np.array(times, np.int64)[which]).cast(pa.timestamp("us")).cast(TIME),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class Texts:
    """States as JSON: many epochs at a time, values of the same kind together."""

    def __init__(self) -> None:
        self._results = ResultTexts()
        self._is_there: list[Any] = []

    def add(self, states: pa.Array, is_there: Any, named: Callable[[int], str]) -> None:
        if len(states):
            self._results.add(states)
        self._is_there.append(is_there)

    def array(self) -> pa.Array:
        is_there = np.concatenate(self._is_there)
        texts = self._results.array() if is_there.any() else pa.array([], pa.string())
        return spread_array(texts, is_there)


class Typed:
    """States as columns of a declared type."""

    def __init__(self, shape: TableShape, nulls_bad_rows: bool) -> None:
        self.shape, self.type, self.nulls_bad_rows = shape, shape.whole, nulls_bad_rows
        self._parts: list[pa.Array] = []

    def add(self, states: pa.Array, is_there: Any, named: Callable[[int], str]) -> None:
        if not len(states):
            self._parts.append(pa.nulls(len(is_there), self.type))
            return
        where = np.flatnonzero(is_there)
        misfits = Misfits(lambda row: named(int(where[row])), self.nulls_bad_rows)
        try:
            whole = one_array(kinds_of(states), self.shape, misfits)
        except BadValue as error:
            raise StreamError(str(error)) from None
        self._parts.append(spread_array(whole, is_there))

    def array(self) -> pa.Array:
        return pa.concat_arrays(self._parts)


def key_types(kinds: Columns) -> pa.Array:
    """The type of each key."""
    if len(kinds) == 1 and (kind := next(iter(kinds))) in KEY_TYPES:
        return pa.repeat(KEY_TYPES[kind], len(kinds[kind]))
    return pa.array([KEY_TYPE_NAMES[type(key)] for key in cells_of(kinds)], pa.string())
