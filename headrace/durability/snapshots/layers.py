"""Layers: changes of state as Arrow files, ordered by shard; several layers can be folded into one.

Rules:
1. A row is one entity: `operator`, its key (a column per kind: key_int, key_text, key_packed), its state (likewise) and
   `is_deleted`. Of two rows of an entity the later one counts.
2. A record batch holds whole shards: one, or several small ones. The file's metadata says which, and the rows of each.
3. Folding takes the layers in the order given, which is that of the epochs. It reads a few shards at a time, and never
   holds more in memory. Deletions are dropped only if there is no layer below.
4. Work per entity is done by Arrow and NumPy, which release the GIL.

Never here: names, manifests, stores, when to fold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from headrace.durability.columns import Columns, join, packed, split, split_keys
from headrace.wire.messages import Entities
from headrace.wire.values import MISSING

Shards = Callable[[str, Any], Sequence[int]]  # (operator, keys) -> shards; keys are a list, or an array of 64-bit ints
Tables = dict[str, dict[Any, Any]]
Changes = Entities | Tables  # tables are faster to encode
Counts = list[tuple[int, int]]  # shards in ascending order, and how many rows each has

OPERATOR, DELETED, ROW = "operator", "is_deleted", "row"
KEY, STATE = "key_", "state_"  # prefixes, followed by the kind
SHARDS = b"headrace.shards"  # in the file's metadata: the counts of each batch
BATCH_ROWS = 8192  # shards with fewer rows share a batch
FOLD_ROWS, FOLD_BYTES = 1 << 17, 8 << 20  # limits of shards that are folded together; compressed bytes
THREADS_BYTES_MIN = 1 << 20  # smaller files are read faster by one thread
DELETION = packed(MISSING)


class ShardedRows(NamedTuple):
    """Rows ordered by shard, as one table."""

    table: pa.Table
    counts: Counts


class LayerPart(NamedTuple):
    """One file of a layer."""

    data: bytes
    counts: Counts

    @property
    def shards(self) -> tuple[int, int]:
        """The first and the last shard."""
        return self.counts[0][0], self.counts[-1][0]

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.counts)


# --- from changes to rows ---------------------------------------------------------------------------------------------


def rows_of(delta: Changes, shards: Shards) -> ShardedRows:
    """The rows of one snapshot's changes. `delta` is not used after this returns."""
    tables, shard_arrays = [], []
    for operator, keys, states in by_operator(delta):
        columns = split_keys(keys)
        shard_arrays.append(key_shards(operator, columns, keys, shards))
        tables.append(table_of(operator, columns, split(states)))
    return ordered(tables, shard_arrays)


def by_operator(delta: Changes) -> list[tuple[str, Collection[Any], Collection[Any]]]:
    """Operator, keys, states."""
    if isinstance(delta, dict):
        return [(name, table.keys(), table.values()) for name, table in delta.items() if table]
    whole = tuple(delta)
    operators = set(map(itemgetter(0), whole))
    runs: dict[str, Sequence[Any]] = {}
    if len(operators) == 1:
        runs[operators.pop()] = whole
    else:
        some: dict[str, list[Any]] = {}
        for operator, run in itertools.groupby(whole, itemgetter(0)):
            some.setdefault(operator, []).extend(run)
        runs.update(some)
    return [(name, list(map(itemgetter(1), run)), list(map(itemgetter(2), run))) for name, run in runs.items()]


def key_shards(operator: str, columns: Columns, keys: Collection[Any] | None, shards: Shards) -> Any:
    """The shard of each key."""
    if list(columns) == ["int"] and not columns["int"].null_count:
        return np.asarray(shards(operator, columns["int"].to_numpy()), np.int64)
    return np.asarray(shards(operator, join(columns) if keys is None else list(keys)), np.int64)


def table_of(operator: str, keys: Columns, states: Columns) -> pa.Table:
    count = len(next(iter(keys.values())))
    columns = {OPERATOR: pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([operator]))}
    columns |= {KEY + kind: column for kind, column in keys.items()}
    columns |= {STATE + kind: column for kind, column in states.items()}
    if "packed" in states:
        columns[DELETED] = pc.equal(states["packed"], DELETION).fill_null(False)
    else:
        columns[DELETED] = pa.array(np.zeros(count, np.bool_))
    return pa.table(columns)


def ordered(tables: list[pa.Table], shard_arrays: list[Any]) -> ShardedRows:
    """All rows sorted by shard; the sort is stable."""
    table, row_shards = concat_tables(tables), np.concatenate([np.zeros(0, np.int64), *shard_arrays])
    if not len(row_shards):
        return ShardedRows(table, [])
    rows = by_shard(row_shards)
    shards, counts = np.unique(row_shards, return_counts=True)
    return ShardedRows(table.take(pa.array(rows)), list(zip(shards.tolist(), counts.tolist(), strict=True)))


def by_shard(row_shards: Any) -> Any:
    """The indices of rows in the order of their shards. Uses the smallest type: NumPy radix-sorts small ints."""
    return np.argsort(row_shards.astype(np.min_scalar_type(int(row_shards.max()))), kind="stable")


def concat_tables(tables: list[pa.Table]) -> pa.Table:
    """Joins the tables into one, without chunks; a column that a table lacks is null there."""
    if not tables:
        return pa.table({})
    if len(tables) == 1:
        return tables[0].combine_chunks()
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries().combine_chunks()


# --- from rows to files -----------------------------------------------------------------------------------------------


def parts(pieces: Iterable[ShardedRows], part_bytes: int) -> Iterator[LayerPart]:
    """Files of about this size before compression. The pieces come in the order of their shards."""
    some: list[ShardedRows] = []
    size = 0
    for piece in itertools.chain.from_iterable(map(batches_of, pieces)):
        some.append(piece)
        size += piece.table.nbytes
        if size >= part_bytes:
            yield file_of(some)
            some, size = [], 0
    if some:
        yield file_of(some)


def batches_of(rows: ShardedRows) -> Iterator[ShardedRows]:
    """Splits the rows between shards into batches that are not too small."""
    first, total = 0, 0
    counts: Counts = []
    for shard, count in rows.counts:
        counts.append((shard, count))
        total += count
        if total >= BATCH_ROWS:
            yield ShardedRows(rows.table.slice(first, total), counts)
            first, total, counts = first + total, 0, []
    if counts:
        yield ShardedRows(rows.table.slice(first, total), counts)


def file_of(batches: list[ShardedRows]) -> LayerPart:
    table = pa.concat_tables([batch.table for batch in batches], promote_options="default").unify_dictionaries()
    table = table.replace_schema_metadata({SHARDS: msgspec.json.encode([batch.counts for batch in batches])})
    sink = pa.BufferOutputStream()
    # One thread: the other cores have work to do while a snapshot is written.
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)  # a batch for each of its pieces
    return LayerPart(sink.getvalue().to_pybytes(), [count for batch in batches for count in batch.counts])


# --- from files to state ----------------------------------------------------------------------------------------------


class LayerFile:
    """An opened file of a layer: its rows shard by shard, in ascending order."""

    def __init__(self, data: bytes) -> None:
        self.reader = pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=False))
        self.batches = msgspec.json.decode(self.reader.schema.metadata[SHARDS], type=list[Counts])
        assert len(self.batches) == self.reader.num_record_batches

    def rows(self, first: int, last: int) -> Iterator[ShardedRows]:
        """The rows of the shards from the first to the last."""
        for i, counts in enumerate(self.batches):
            mine = [(shard, count) for shard, count in counts if first <= shard <= last]
            if not mine:
                continue
            before = sum(count for shard, count in counts if shard < first)
            table = pa.Table.from_batches([self.reader.get_batch(i)])
            yield ShardedRows(table.slice(before, sum(count for _, count in mine)), mine)


def read_whole(data: bytes) -> pa.Table:
    options = pa.ipc.IpcReadOptions(use_threads=len(data) > THREADS_BYTES_MIN)
    whole = pa.ipc.open_file(pa.BufferReader(data), options=options).read_all()
    return whole.unify_dictionaries().combine_chunks()


def apply(data: bytes, tables: Tables) -> None:
    """Applies a file to the state of the layers below it."""
    for operator, rows in operators_of(read_whole(data)):
        keys, states = join(columns_of(rows, KEY)), join(columns_of(rows, STATE))
        table = tables.setdefault(operator, {})
        table.update(zip(keys, states, strict=True))
        deleted = single_array(rows, DELETED)
        if deleted.true_count:
            for i in np.flatnonzero(deleted.to_numpy(zero_copy_only=False)).tolist():
                if table.get(keys[i]) == MISSING:  # unless a later row has set it again
                    del table[keys[i]]


def operators_of(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    if not table.num_rows:
        return
    operators = single_array(table, OPERATOR)
    names = operators.dictionary.to_pylist()
    for code in pc.unique(operators.indices).to_pylist():
        yield names[code], table if len(names) == 1 else table.filter(pc.equal(operators.indices, code))


def columns_of(table: pa.Table, prefix: str) -> Columns:
    return {
        name.removeprefix(prefix): single_array(table, name) for name in table.column_names if name.startswith(prefix)
    }


def single_array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


# --- folding ----------------------------------------------------------------------------------------------------------


def fold(layers: list[ShardedRows], is_base: bool) -> ShardedRows:
    """Merges the rows of some shards, from all layers in the order of their epochs: an entity's last row counts."""
    table = concat_tables([rows.table for rows in layers])
    row_shards = np.concatenate([np.repeat(*np.array(rows.counts, np.int64).T) for rows in layers])
    keys = {name: table.column(name) for name in table.column_names if name.startswith(KEY)}
    grouped = pa.table({OPERATOR: single_array(table, OPERATOR).indices, **keys, ROW: np.arange(table.num_rows)})
    last = grouped.group_by([OPERATOR, *keys], use_threads=False).aggregate([(ROW, "max")])
    rows = np.sort(last.column(f"{ROW}_max").to_numpy())
    if is_base:
        rows = rows[~single_array(table, DELETED).to_numpy(zero_copy_only=False)[rows]]
    return ordered([table.take(pa.array(rows))], [row_shards[rows]])


class LayerSource:
    """A file to be folded: read when its first shard is needed, and released after its last."""

    def __init__(self, fetch: Callable[[], bytes], size: int, rows: int, shards: tuple[int, int]) -> None:
        self.fetch, self.size, self.count, self.shards = fetch, size, rows, shards
        self.file: LayerFile | None = None

    def rows(self, first: int, last: int) -> Iterator[ShardedRows]:
        if self.shards[0] <= last and first <= self.shards[1]:
            self.file = self.file or LayerFile(self.fetch())
            yield from self.file.rows(first, last)
        if self.shards[1] <= last:
            self.file = None


def fold_all(layers: Sequence[Sequence[LayerSource]], is_base: bool) -> Iterator[ShardedRows]:
    """Folds all shards, some at a time. `layers` has the files of each layer, in the order of their epochs."""
    for first, last in shard_ranges([source for layer in layers for source in layer]):
        pieces = [rows for layer in layers for source in layer for rows in source.rows(first, last)]
        if pieces:
            yield fold(pieces, is_base)


def shard_ranges(sources: list[LayerSource]) -> Iterator[tuple[int, int]]:
    """Ranges of shards to fold together, first and last: as many as fit the limits, but at least one. Assumes that a
    file's rows are spread evenly over its shards, as by a hash."""
    weights: dict[int, float] = {}
    for source in sources:
        first, last = source.shards
        weight = max(source.count / FOLD_ROWS, source.size / FOLD_BYTES) / (last - first + 1)
        for shard in range(first, last + 1):
            weights[shard] = weights.get(shard, 0) + weight
    begin, total = -1, 0.0
    for shard in sorted(weights):
        if total and total + weights[shard] > 1:
            yield begin, shard - 1
            total = 0
        begin = begin if total else shard
        total += weights[shard]
    if total:
        yield begin, max(weights)


def resharded(files: Iterable[bytes], shards: Shards) -> ShardedRows:
    """Sorts a layer that was written with another sharding by these shards. All of it is in memory: code rarely
    changes."""
    tables, shard_arrays = [], []
    for data in files:
        for operator, rows in operators_of(read_whole(data)):
            tables.append(rows)
            shard_arrays.append(key_shards(operator, columns_of(rows, KEY), None, shards))
    return ordered(tables, shard_arrays)
