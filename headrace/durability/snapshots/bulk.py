"""Bulk loads: write the rows of a table as an operator's state, as a layer over a snapshot and not as transactions.

Rules:
1. A load takes the store over and begins where the log ends, so no epoch is left to replay that does not know of the
   load. For the same reason older snapshots are retired just before the new one is published: a replay from them would
   run without what was loaded.
2. Several writers write parts of the layer, each for its own shards; the manifest that names them comes last. Until
   then the load has no effect.
3. A key is there once. A state is sealed just as if a function had put it.

Never here: Spark, where the rows come from.
"""

from __future__ import annotations

import functools
import typing
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec.msgpack import Ext

from headrace.config import Config
from headrace.core.engine import Engine
from headrace.core.log_records import Retired
from headrace.core.placement import shards_of
from headrace.core.signature import converted
from headrace.core.snapshot_metadata import SnapshotMetadata, StoreMetadata
from headrace.durability.columns import Columns, join, split, split_keys
from headrace.durability.inbox.arrow_rows import is_text, to_python
from headrace.durability.log.log import read_log
from headrace.durability.log.records import BatchHeader, EpochHeader, Records, unpack
from headrace.durability.reading.scan import is_distinct
from headrace.durability.recovery import OpenedStore
from headrace.durability.snapshots.layers import ShardedRows, ordered, parts, table_of
from headrace.durability.snapshots.manifests import OBJECTS, Manifest, SnapshotId, StoredObject, parse_snapshot_id
from headrace.durability.store import Store
from headrace.errors import BadRequest, BadValue, HeadraceError, StoreError
from headrace.model.app import App
from headrace.model.fingerprint import fingerprint
from headrace.model.operator import Operator
from headrace.wire.typed_values import Codec, record_in
from headrace.wire.values import MISSING, RECORD, Key, Values, check_key, shown, wrap

PART_BYTES = 64 << 20  # before compression, as in other layers
PARTS_MAX = 10_000  # per writer
ROWS_AT_ONCE = 10_000
SCALARS = (int, float, str, bool, bytes)


# --- the store --------------------------------------------------------------------------------------------------------


def needs_engine(store: Store, app: App, manifest: Manifest | None) -> bool:
    """Whether only an engine can bring the snapshot up to date: there are epochs after it, or the code has changed."""
    for record in read_log(store, "log", manifest.position if manifest is not None else None):
        header, _ = unpack(record.data)
        if not isinstance(header, EpochHeader | BatchHeader):
            continue
        if manifest is None or isinstance(header, BatchHeader) or header.number > manifest.epoch:
            return True
    return manifest is not None and manifest.fingerprint != fingerprint(app).digest


class BulkLoad:
    """A store, taken over for one load, with the snapshot that the load is added to."""

    def __init__(self, store: Store, app: App, config: Config) -> None:
        self.opened_store = OpenedStore(store, app, config)
        self.store, self.app = store, app
        self.base = self.opened_store.snapshots.newest()
        engine = Engine(app, config, seed=self.opened_store.seed)
        self.records = Records(engine.program, self.opened_store.app_fingerprint, store)
        if needs_engine(store, app, self.base):
            self.close()
            raise StoreError(
                f"{store.url} has epochs that are in no snapshot: another process took it over in the meantime, or an "
                "epoch waits for a response to an external call. Run the app and close it, then load again"
            )
        self.epoch, self.position, self.metadata = engine.describe() if self.base is None else place_of(self.base)
        self.opened_store.snapshots.continue_from(self.base)
        self.snapshot_id = self.opened_store.snapshots.new_snapshot_id(self.opened_store.log.term, self.epoch)

    def publish(self, operator: str, layers: list[list[StoredObject]]) -> Manifest:
        """Publishes the layers: they are part of the state from now on."""
        opened_store = self.opened_store
        if self.base is not None:
            opened_store.log.append([self.records.pack(self.records.to_columns(Retired(self.epoch)))])
            named = {each.name for layer in layers for each in layer}
            for name in opened_store.snapshots.retire(self.base):
                if name not in named:
                    self.store.delete(name)
            opened_store.log.retire(self.base.position)
        opened_store.log.check()
        before = self.metadata.store
        marks = [*before.marks, (opened_store.replies.last, self.metadata.sequencing.closed_us)]
        loads = before.loads | {operator: before.loads.get(operator, 0) + 1}
        metadata = msgspec.structs.replace(self.metadata, store=StoreMetadata(marks, loads))
        objects = [tuple(sorted(layer, key=lambda each: each.shards)) for layer in layers]
        return opened_store.snapshots.add_layers(
            self.snapshot_id, self.position, opened_store.fingerprint, objects, metadata
        )

    def discard(self, named: set[str]) -> None:
        """Deletes what writers wrote and no layer uses: all of a failed load, or parts of tasks that ran twice."""
        for name in self.store.list(OBJECTS):
            if parse_snapshot_id(name) == self.snapshot_id and name not in named:
                self.store.delete(name)

    def close(self) -> None:
        self.opened_store.close()


def place_of(manifest: Manifest) -> tuple[int, int, SnapshotMetadata]:
    return manifest.epoch, manifest.position, manifest.metadata


# --- a writer ---------------------------------------------------------------------------------------------------------


class BulkTarget(NamedTuple):
    """What a writer has to know. It is sent to other processes."""

    snapshot_id: SnapshotId
    operator: Operator  # with its `partition_by`, if it has one
    shards: int

    def shards_of_keys(self, keys: list[Key] | Any) -> Any:
        return np.asarray(shards_of(self.operator, keys, self.shards), np.int64)


def write(
    store: Store, target: BulkTarget, first_part: int, pieces: Iterator[tuple[Columns, Columns]]
) -> list[StoredObject]:
    """Writes keys and states as parts of a layer. The pieces are in the order of their shards and hold whole shards."""
    written: list[StoredObject] = []
    for part in parts((rows_of(target, *piece) for piece in pieces), PART_BYTES):
        name = target.snapshot_id.part(first_part + len(written))
        if not store.create(name, part.data):
            raise StoreError(f"{name} is in {store.url} already: are two loads running at the same time? Load again")
        written.append(StoredObject(name, len(part.data), zlib.crc32(part.data), part.rows, part.shards))
    return written


def rows_of(target: BulkTarget, keys: Columns, states: Columns) -> ShardedRows:
    ints = list(keys) == ["int"] and not keys["int"].null_count
    row_shards = target.shards_of_keys(keys["int"].to_numpy() if ints else join(keys))
    return ordered([table_of(target.operator.name, keys, states)], [row_shards])


def deletions(keys: Columns) -> Columns:
    count = len(next(iter(keys.values())))
    return split([MISSING] * count)


# --- sealing ----------------------------------------------------------------------------------------------------------


class ColumnSealer:
    """Converts Arrow columns to sealed keys and states. It is sent to other processes."""

    def __init__(
        self,
        config: Config,
        *,
        record: str | None = None,  # the record type, if the columns are its fields
        head: bytes | None = None,  # of its native form, if it has one
        nullable: Collection[str] = (),  # columns that may be null
        hint: Any = None,  # the state's type, if it is not only scalars
        records: Sequence[type] = (),  # the record types that it may hold
        ttl_from_us: int | None = None,
    ) -> None:
        self.config, self.record, self.head, self.nullable = config, record, head, nullable
        self.hint, self.records, self.ttl_from_us = hint, records, ttl_from_us

    def keys(self, column: pa.Array) -> Columns:
        if column.null_count:
            raise BadRequest("a row has no key: drop such rows, as in df.dropna(subset=[...])")
        limit = self.config.key_bytes_max
        if pa.types.is_integer(column.type):
            return {"int": column.cast(pa.int64())}
        if (pc.max(pc.binary_length(column)).as_py() or 0) > limit:
            for key in column.to_pylist():
                check_key(key, limit)
        if is_text(column.type):
            return {"text": column.cast(pa.large_utf8())}
        return split_keys(column.to_pylist())

    def states(self, columns: Mapping[str, pa.Array], key: Callable[[int], Any]) -> Columns:
        """`key` returns the key of a row, for error messages."""
        for name, column in columns.items():
            if column.null_count and name not in self.nullable:
                at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                raise BadRequest(f"{name} of the row with key {shown(key(at))} is null, but must not be")
        states = self._of_fields(columns, key) if self.record is not None else self._of_one(columns, key)
        if self.ttl_from_us is None:
            return states
        at_us = self.ttl_from_us
        return split([wrap(state, at_us) for state in join(states)])

    def _of_one(self, columns: Mapping[str, pa.Array], key: Callable[[int], Any]) -> Columns:
        ((name, column),) = columns.items()
        if self.hint is None and not column.null_count:
            if pa.types.is_integer(column.type):
                return {"int": column.cast(pa.int64())}
            if pa.types.is_floating(column.type):
                return {"float": column.cast(pa.float64())}
            if is_text(column.type):
                self._check_sizes(pc.binary_length(column), key)
                return {"text": column.cast(pa.large_utf8())}
        return split(self._sealed(name, values_of(column), key))

    def _of_fields(self, columns: Mapping[str, pa.Array], key: Callable[[int], Any]) -> Columns:
        if self.hint is None:
            return {"packed": self._packed(columns, key)}
        values = {name: values_of(column) for name, column in columns.items()}
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return split(self._sealed("the state", rows, key))

    def _packed(self, columns: Mapping[str, pa.Array], key: Callable[[int], Any]) -> pa.Array:
        """Records whose fields are all scalars: encoded as a codec seals them, without creating the objects."""
        names = {f"f{at}": name for at, name in enumerate(columns)}
        row = msgspec.defstruct("Row", list(names), rename=names, gc=False)
        encode = msgspec.msgpack.Encoder().encode
        tagged = b"\x92" + encode(self.record)
        parts = []
        for start in range(0, len(next(iter(columns.values()))), ROWS_AT_ONCE):  # which stay in the CPU's cache
            some = [values_of(column.slice(start, ROWS_AT_ONCE)) for column in columns.values()]
            cells: Iterable[bytes] = map(encode, map(row, *some))
            if self.head is None:
                cells = (encode(Ext(RECORD, tagged + each)) for each in cells)
            parts.append(pa.array(list(cells), pa.large_binary()))
        packed = pa.concat_arrays(parts) if parts else pa.array([], pa.large_binary())
        if self.head is not None:
            head, nothing = pa.scalar(self.head, packed.type), pa.scalar(b"", packed.type)
            packed = pc.binary_join_element_wise(head, packed, nothing)
        self._check_sizes(pc.binary_length(packed), key)
        return packed

    def _sealed(self, name: str, values: list[Any], key: Callable[[int], Any]) -> list[Any]:
        seal, hint = self.codec.seal if self.hint is not None else self.values.seal, self.hint
        sealed = []
        for at, value in enumerate(values):
            try:
                sealed.append(seal(converted(value, hint)) if hint is not None else seal(value))
            except HeadraceError as error:
                field, why = self._fault(name, value, str(error))
                raise BadRequest(f"{field} of the row with key {shown(key(at))} does not fit: {why}") from None
        return sealed

    def _fault(self, name: str, value: Any, why: str) -> tuple[str, str]:
        """The field that is wrong, and what about it: a row that is no record is looked at field by field."""
        declared = None if self.hint is None else record_in(self.codec.type)
        if declared is None or not isinstance(value, dict):
            return name, why
        hints = typing.get_type_hints(declared.cls, include_extras=True)
        for field, given in value.items():
            if field in declared.fields:
                found = Codec(declared.fields[field], self.values).fault(converted(given, hints[field]))
                if found is not None:
                    return field, found
        return name, why

    @functools.cached_property
    def codec(self) -> Codec:
        return Codec(self.values.hints.type_of(self.hint), self.values)

    @functools.cached_property
    def values(self) -> Values:
        return Values(self.records, bytes_max=self.config.value_bytes_max, depth_max=self.config.value_depth_max)

    def _check_sizes(self, sizes: pa.Array, key: Callable[[int], Any]) -> None:
        largest = pc.max(sizes).as_py() or 0
        if largest > self.config.value_bytes_max:
            whose = shown(key(pc.index(sizes, largest).as_py()))
            raise BadValue(
                f"the state of key {whose} has {largest} bytes, over the limit of {self.config.value_bytes_max}"
            )


def values_of(column: pa.Array) -> list[Any]:
    values = to_python(column)
    return [with_tuples(value, column.type) for value in values] if "struct<_1" in str(column.type) else values


def with_tuples(value: Any, type: pa.DataType) -> Any:
    """A struct of _1, _2 and so on becomes a tuple, as in a table of states (see typed.py)."""
    if value is None:
        return None
    if pa.types.is_list(type):
        return [with_tuples(each, type.value_type) for each in value]
    if pa.types.is_map(type):
        return {key: with_tuples(item, type.item_type) for key, item in value.items()}
    if pa.types.is_struct(type):
        parts = {field.name: with_tuples(value[field.name], field.type) for field in type}
        return tuple(parts.values()) if list(parts) == [f"_{at}" for at in range(1, len(parts) + 1)] else parts
    return value


def is_scalar(hint: Any) -> bool:
    """Whether all values of this type are sealed just as a column holds them."""
    return all(each in SCALARS or each is type(None) for each in typing.get_args(hint) or (hint,))


def is_scalars(type: pa.DataType) -> bool:
    checks = (pa.types.is_integer, pa.types.is_floating, is_text, pa.types.is_boolean, pa.types.is_binary)
    return any(check(type) for check in checks)


def duplicate(keys: Columns) -> Any | None:
    """A key that is there twice; None if there is none."""
    for column in keys.values():
        if not is_distinct(column.drop_null()):
            counts = pc.value_counts(column.drop_null())
            at = pc.index(pc.greater(counts.field("counts"), 1), True).as_py()
            return counts.field("values")[at].as_py()
    return None
