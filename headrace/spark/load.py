"""Bulk load: a DataFrame becomes the state of an operator, shard by shard, in parallel.

    load(df, "account", key="id", state="balance", app=app, store="bank-store")

Rules:
1. It is a snapshot, not transactions: no function runs, there are no replies, and the changelog starts again.
2. All of it or nothing: a row that cannot be an entity stops the load, and the state stays as it was.
3. Spark groups the rows by shard; its tasks write the parts of the snapshot; the driver publishes it. No data passes
   through the driver.

The store is taken over: an app that runs on it stops, and continues with the loaded state when it is started again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.functions import col
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ByteType, DataType, IntegerType, LongType, ShortType, StringType

from headrace.config import Config
from headrace.core.program import state_codec, values_of
from headrace.core.signature import conforms
from headrace.durability.columns import Columns
from headrace.durability.identity import identity_of
from headrace.durability.reading.column_types import TableShape, declared
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.reading.views import EpochEnd, View
from headrace.durability.snapshots.bulk import (
    PARTS_MAX,
    BulkLoad,
    BulkTarget,
    ColumnSealer,
    deletions,
    duplicate,
    is_scalar,
    is_scalars,
    needs_engine,
    write,
)
from headrace.durability.snapshots.layers import by_shard
from headrace.durability.snapshots.manifests import StoredObject
from headrace.durability.store import Store, address_of, open_store
from headrace.errors import BadKey, HeadraceError, StreamError, UnknownFunction
from headrace.model.app import App
from headrace.model.fingerprint import fingerprint
from headrace.model.operator import Operator
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load as app_named
from headrace.spark.tasks import gathered
from headrace.spark.transact import quoted
from headrace.wire.values import shown

KEY, GROUP, ROWS = "__key", "group", "rows"
BUNDLES = f"{GROUP} int, {ROWS} binary"
BUNDLE_BYTES = 32 << 20  # a task collects this much before it bundles it
WRITTEN = "name string, bytes long, crc32 long, rows long, first int, last int, trouble string"
INTEGRAL = (ByteType, ShortType, IntegerType, LongType)
GROUP_BYTES = 64 << 20
SAME = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_timestamp,
)


def load(
    df: DataFrame,
    operator: Operator | str,
    *,
    key: str,
    state: str | None = None,
    app: App | str,
    store: str | Path,
    replace: bool = False,
    config: Config | None = None,
) -> dict[str, Any]:
    """Make each row of a DataFrame an entity of the operator.

    `key` names the column of the keys. `state` names that of the states; without it, the other columns are the fields
    of the dataclass or struct that is declared as the operator's state. The store may be new. An operator that has
    entities is refused, unless `replace` is true: then they are deleted. `config` is for a new store only: its
    `shards`.
    """
    app = app_named(app) if isinstance(app, str) else app
    found = find(app, operator)
    plan = planned(df, app, found, key, state)
    opened = open_store(store)
    config = configured(opened, config)
    check_empty(opened, app, found, replace)
    bring_up_to_date(opened, app, config)
    bulk = BulkLoad(opened, app, config)
    try:
        return Load(df, plan, bulk, found, config, replace).run()
    finally:
        bulk.close()


# --- before anything is touched ---------------------------------------------------------------------------------------


class LoadPlan(NamedTuple):
    """The roles of the columns."""

    key: str
    columns: list[str]
    hints: list[Any]  # the columns' types, None where nothing is declared
    hint: Any  # the type of the whole state
    record: str | None = None  # set if the columns are its fields

    @property
    def nullable(self) -> list[str]:
        given = zip(self.columns, self.hints, strict=True)
        return [name for name, hint in given if hint is not None and conforms(None, hint)]

    def is_simple(self, df: DataFrame) -> bool:
        """Whether all values can be sealed as they are, without the app's own types."""
        types = [to_arrow_type(df.schema[name].dataType, timezone="UTC") for name in self.columns]
        return all(map(is_scalars, types)) and all(hint is None or is_scalar(hint) for hint in self.hints)


def find(app: App, operator: Operator | str) -> Operator:
    name = operator.name if isinstance(operator, Operator) else operator
    if name not in app.operators:
        raise UnknownFunction(
            f"no operator {shown(name)} in app {app.name!r}; it has: {', '.join(app.operators) or 'none'}"
        )
    return app.operators[name]


def planned(df: DataFrame, app: App, operator: Operator, key: str, state: str | None) -> LoadPlan:
    if df.isStreaming:
        raise StreamError(
            "load takes a batch DataFrame (spark.read...); to turn the rows of a stream into calls, use transact"
        )
    wanted = [key] if state is None else [key, state]
    missing = [column for column in wanted if column not in df.columns]
    if missing:
        raise StreamError(f"the DataFrame has no column {', '.join(missing)}; it has: {', '.join(df.columns)}")
    kind = df.schema[key].dataType
    if not isinstance(kind, (*INTEGRAL, StringType)) and kind.typeName() != "binary":
        raise StreamError(
            f"the key {key} is a {kind.simpleString()}; a key is a string, an integer or binary: cast the column"
        )
    shape = declared(fingerprint(app), operator.name)
    if state is not None:
        if shape is not None and not shape.is_record:
            check_type(state, df.schema[state].dataType, shape.columns[0].type, shape.columns[0].is_json, "the state")
        return LoadPlan(key, [state], [operator.state], operator.state)
    if shape is None or not shape.is_record:
        raise StreamError(
            f"name the column that holds the state of {operator.name}, as in state='balance'; or declare a dataclass "
            f"or struct, as in app.operator({operator.name!r}, state=Account), whose fields are the columns"
        )
    return of_record(df, operator, shape, key)


def of_record(df: DataFrame, operator: Operator, shape: TableShape, key: str) -> LoadPlan:
    names = [column.name for column in shape.columns]
    given = [column for column in df.columns if column != key or key in names]
    missing, stranger = sorted(set(names) - set(given)), sorted(set(given) - set(names))
    if missing or stranger or len(given) != len(set(given)):
        raise StreamError(
            f"the columns besides {key} must be the fields of {operator.name}'s state: {', '.join(names)}. "
            f"Missing: {', '.join(missing) or 'none'}; too many: {', '.join(stranger) or 'none'}"
        )
    for column in shape.columns:
        check_type(
            column.name, df.schema[column.name].dataType, column.type, column.is_json, f"the field {column.name}"
        )
    kinds = [kind for kind in (operator.state, *typing.get_args(operator.state)) if hasattr(kind, "__qualname__")]
    record = next(kind for kind in kinds if kind is not type(None))
    hints = typing.get_type_hints(record, include_extras=True)
    return LoadPlan(key, names, [hints[name] for name in names], operator.state, record.__qualname__)


def check_type(name: str, given: DataType, wanted: pa.DataType, is_any: bool, what: str) -> None:
    """Numbers and strings must have their declared type. All other types are checked row by row."""
    actual = to_arrow_type(given, timezone="UTC")
    for is_kind in SAME:
        if not is_any and is_kind(wanted) and not is_kind(actual):
            raise StreamError(f"the column {name} is {given.simpleString()}, and {what} is {wanted}: cast the column")


def configured(store: Store, config: Config | None) -> Config:
    identity = identity_of(store)
    if identity is None:
        return config or Config()
    shards = int(identity["shards"])
    if config is not None and config.shards != shards:
        raise StreamError(
            f"{store.url} has {shards} shards, but the configuration has {config.shards}: leave out config"
        )
    return config or Config(shards=shards)


def check_empty(store: Store, app: App, operator: Operator, replace: bool) -> None:
    """Check by the newest snapshot; this is repeated once the store is taken over."""
    if replace or identity_of(store) is None:
        return
    view = View(store, operator.name, app)
    manifest = view.reader.snapshots.newest()
    if manifest is None:
        return
    moment = EpochEnd(manifest.epoch, manifest.snapshot_id)
    written = view.app_fingerprint(moment)
    if operator.name in written.operators:
        count = sum(map(len, itertools.islice(view.read(moment, written), 1)))
        if count:
            raise not_empty(store, operator)


def not_empty(store: Store, operator: Operator) -> StreamError:
    return StreamError(
        f"operator {operator.name!r} in {store.url} already has entities: load(..., replace=True) deletes them and "
        "puts the rows in their place; to change some of them, use transact"
    )


# The app's own configuration is not known here: drop nothing that it may still keep.
KEEP_ALL = dict.fromkeys(
    ("reply_retention_us", "request_id_retention_us", "request_ids_max", "sources_max", "snapshots_kept"), 1 << 50
)


def bring_up_to_date(store: Store, app: App, config: Config) -> None:
    """What is in the log, and in no snapshot, is run; what other code has written is migrated."""
    if identity_of(store) is not None and needs_engine(store, app, StoreReader(store, app).snapshots.newest()):
        Runtime(app, dataclasses.replace(config, **KEEP_ALL), store=store).close()


# --- the load ---------------------------------------------------------------------------------------------------------


class Load:
    def __init__(
        self, df: DataFrame, plan: LoadPlan, bulk: BulkLoad, operator: Operator, config: Config, replace: bool
    ) -> None:
        self.df, self.plan, self.bulk, self.operator, self.config = df, plan, bulk, operator, config
        self.replace = replace
        self.url = address_of(bulk.store)
        self.target = BulkTarget(bulk.snapshot_id, placed(operator), config.shards)
        self.groups = groups_for(df, config.shards)

    def run(self) -> dict[str, Any]:
        bulk, began = self.bulk, time.perf_counter()
        check_empty(bulk.store, bulk.app, self.operator, self.replace)
        try:
            gone = self._write_deletions() if self.replace and bulk.base is not None else []
            layer = self._write_rows()
        except BaseException:
            bulk.discard(set())
            raise
        named = {stored.name for stored in (*gone, *layer)}
        bulk.discard(named)
        if named:
            bulk.publish(self.operator.name, [gone, layer])
        count = sum(stored.rows for stored in layer)
        return {
            "operator": self.operator.name,
            "entities": count,
            "replaced": sum(stored.rows for stored in gone),
            "epoch": bulk.epoch,
            "bytes": sum(stored.bytes for stored in layer),
            "seconds": round(time.perf_counter() - began, 3),
            "store": self.url,
        }

    def _write_rows(self) -> list[StoredObject]:
        plan, target = self.plan, self.target
        rows = self.df.select(col(quoted(plan.key)).alias(KEY), *(col(quoted(name)) for name in plan.columns))
        rows = rows.mapInArrow(functools.partial(bundle, target, self.groups), BUNDLES)
        rows = rows.repartitionById(self.groups, col(GROUP))
        types: dict[str, Any] = {}
        if not plan.is_simple(self.df):
            types = {"hint": plan.hint, "records": self.bulk.app.records()}
        now_us = max(self.bulk.metadata.sequencing.closed_us, time.time_ns() // 1000)
        native = state_codec(self.operator, values_of(self.bulk.app, self.config)).native
        sealing = ColumnSealer(
            self.config,
            record=plan.record,
            head=native.head if native is not None else None,
            nullable=plan.nullable,
            ttl_from_us=None if self.operator.ttl_us is None else now_us,
            **types,
        )
        return self._collect(rows.mapInArrow(functools.partial(write_rows, self.url, target, sealing), WRITTEN))

    def _write_deletions(self) -> list[StoredObject]:
        """A layer that takes away what the operator has, for those to be laid over it."""
        base = self.bulk.base
        assert base is not None
        view = View(self.bulk.store, self.operator.name)
        moment = EpochEnd(base.epoch, base.snapshot_id)
        if self.operator.name not in view.app_fingerprint(moment).operators:
            return []
        ranges = self.df.sparkSession.range(0, self.groups, 1, self.groups)
        return self._collect(
            ranges.mapInArrow(functools.partial(write_deletions, self.url, self.target, moment, self.groups), WRITTEN)
        )

    def _collect(self, written: DataFrame) -> list[StoredObject]:
        table = written.toArrow().to_pylist()
        trouble = sorted(row["trouble"] for row in table if row["trouble"] is not None)
        if trouble:
            raise StreamError(f"nothing was loaded into {self.operator.name}: {trouble[0]}")
        return [
            StoredObject(row["name"], row["bytes"], row["crc32"], row["rows"], (row["first"], row["last"]))
            for row in table
        ]


def placed(operator: Operator) -> Operator:
    """What tasks need: they need not import the app, unless it partitions its keys."""
    return Operator(operator.name, partition_by=operator.partition_by)


def groups_for(df: DataFrame, shards: int) -> int:
    """How many tasks write: each holds the rows of its shards in memory. Spark's estimate is rather too high than too
    low; without an estimate, each shard is its own task."""
    slots = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 2)
    try:
        size = int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    except Exception:  # Spark Connect cannot tell
        return shards
    return min(shards, max(slots, size // GROUP_BYTES))


# --- where Spark runs -------------------------------------------------------------------------------------------------


def bundle(target: BulkTarget, groups: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows by group of shards, each group in one cell: Spark moves a few large cells at a fraction of the cost of
    moving their rows one by one."""
    for table in gathered(batches, BUNDLE_BYTES):
        yield from bundles(target, groups, table)


def bundles(target: BulkTarget, groups: int, table: pa.Table) -> Iterator[pa.RecordBatch]:
    if not table.num_rows:
        return
    group = shards_of_keys(target, flat(table.column(KEY))) * groups // target.shards
    table = table.take(pa.array(by_shard(group)))
    ends = np.cumsum(np.bincount(group, minlength=groups)).tolist()
    for number, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        if begin < end:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table.slice(begin, end - begin))
            cells = [pa.array([number], pa.int32()), pa.array([sink.getvalue().to_pybytes()], pa.binary())]
            yield pa.RecordBatch.from_arrays(cells, names=[GROUP, ROWS])


def shards_of_keys(target: BulkTarget, keys: pa.Array) -> Any:
    """The shard of each key. An invalid key is reported by the task that writes it."""
    try:
        if not keys.null_count and pa.types.is_integer(keys.type):
            return target.shards_of_keys(keys.cast(pa.int64()).to_numpy())
        return target.shards_of_keys([b"" if key is None else key for key in keys.to_pylist()])
    except BadKey:
        return np.zeros(len(keys), np.int64)


def write_rows(
    url: str, target: BulkTarget, sealing: ColumnSealer, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """One task: write the rows of some shards as parts of the layer."""
    yield reported(lambda: write(open_store(url), target, first_part(), pieces(sealing, batches)))


def pieces(sealing: ColumnSealer, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Columns, Columns]]:
    """All rows of the task, which has some shards of its own."""
    cells = [cell.as_buffer() for batch in batches for cell in batch.column(ROWS)]
    if not cells:
        return
    table = pa.concat_tables(pa.ipc.open_stream(cell).read_all() for cell in cells)
    columns = {name: flat(table.column(name)) for name in table.column_names}
    given = columns.pop(KEY)
    keys = sealing.keys(given)
    twice = duplicate(keys)
    if twice is not None:
        raise StreamError(f"the key {shown(twice)} occurs twice: drop one, as in df.dropDuplicates([...])")
    yield keys, sealing.states(columns, lambda row: given[row].as_py())


def write_deletions(
    url: str, target: BulkTarget, moment: EpochEnd, groups: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for group in itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches):
        yield reported(functools.partial(delete_group, url, target, moment, group, groups))


def delete_group(url: str, target: BulkTarget, moment: EpochEnd, group: int, groups: int) -> list[StoredObject]:
    store = open_store(url)
    view = View(store, target.operator.name)
    mine = [shard for shard in range(target.shards) if shard * groups // target.shards == group]
    scan = view.scan(moment, view.app_fingerprint(moment))
    if not scan.is_aligned:  # then it cannot be read in parts: one task reads it all
        mine = list(range(target.shards)) if group == 0 else []
    if not mine:
        return []
    found = scan.read((mine[0], mine[-1]))
    return write(store, target, first_part(), ((each.keys, deletions(each.keys)) for each in found))


def first_part() -> int:
    """Tasks may run twice, even at the same time: each attempt has its own names."""
    context = TaskContext.get()
    assert context is not None
    return context.taskAttemptId() * PARTS_MAX


def reported(work: Any) -> pa.RecordBatch:
    """What was written, or the error: an exception would reach the user under many of Spark's own."""
    rows: Sequence[tuple[Any, ...]]
    try:
        rows = [(each.name, each.bytes, each.crc32, each.rows, *each.shards, None) for each in work()]
    except HeadraceError as error:
        rows = [("", 0, 0, 0, 0, 0, str(error))]
    names = ["name", "bytes", "crc32", "rows", "first", "last", "trouble"]
    types = [pa.string(), *[pa.int64()] * 3, *[pa.int32()] * 2, pa.string()]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    arrays = [pa.array(column, type) for column, type in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def flat(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
