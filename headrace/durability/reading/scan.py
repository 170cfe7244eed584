"""Scans: the entities of one operator at the end of an epoch, in columns, a few shards at a time. For readers.

Rules:
1. A scan reads a snapshot's layers and, over them, the changelog of later epochs. Of two rows of an entity the later
   one counts; deleted and expired entities are left out.
2. Only files that hold some of the wanted shards are read, and of those only the batches that do. So reading some keys
   reads little, and several readers share the work by ranges of shards.
3. Layers written by different code may have an entity in different shards. Then all shards are one range.
4. Work per entity is done by Arrow and NumPy.

Never here: what the states mean, Spark.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from headrace.core.placement import shards_of
from headrace.durability.columns import Columns, offsets_and_data, split, split_keys
from headrace.durability.snapshots.layers import (
    DELETED,
    KEY,
    OPERATOR,
    ROW,
    STATE,
    LayerSource,
    ShardedRows,
    columns_of,
    concat_tables,
    shard_ranges,
    single_array,
    table_of,
)
from headrace.durability.snapshots.manifests import Layer, Manifest, read_object
from headrace.durability.store import Store
from headrace.model.operator import Operator
from headrace.wire.values import EXPIRING, WRAP_BYTES, Key

ShardRange = tuple[int, int]  # the first and the last shard


class ScannedRows(NamedTuple):
    """Some entities: the non-empty columns of their keys and states, all of the same length."""

    keys: Columns
    states: Columns

    def __len__(self) -> int:
        return len(next(iter(self.keys.values()), ()))


class LaterStates(NamedTuple):
    """The last state of each entity that changed after the snapshot; MISSING if it was deleted."""

    changed: dict[Key, Any]


class Scan:
    """A scan of one operator in one snapshot; `manifest` is None if there is none. `operator` is None if its
    `partition_by` is not known: then the shard of a key is not known either."""

    def __init__(
        self, store: Store, manifest: Manifest | None, name: str, shards: int, operator: Operator | None
    ) -> None:
        self.store, self.manifest, self.name, self.shards, self.operator = store, manifest, name, shards, operator
        self.layers: tuple[Layer, ...] = manifest.layers if manifest is not None else ()
        self.is_aligned = len({layer.sharding for layer in self.layers}) <= 1

    # --- who reads what ---

    def ranges(self, count: int, keys: Collection[Key] | None = None) -> list[ShardRange]:
        """At most `count` ranges of shards, about equally large; with keys, only the shards that have them."""
        if not self.is_aligned or not self.layers:
            return [(0, self.shards - 1)]
        if keys is not None and self.operator is not None:
            key_shards = sorted(set(map(int, shards_of(self.operator, list(keys), self.shards))))
            if not key_shards:
                return []
            cut = [each.tolist() for each in np.array_split(np.array(key_shards), min(count, len(key_shards)))]
            return [(each[0], each[-1]) for each in cut]
        weights = np.ones(self.shards)  # each shard counts a little, even if nothing is known about it
        for layer in self.layers:
            for stored in layer.objects:
                first, last = stored.shards
                weights[first : last + 1] += stored.rows / (last - first + 1)
        total = np.cumsum(weights)
        cuts = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
        edges = [0, *sorted(set(cuts.tolist()) - {0, self.shards}), self.shards]
        return [(first, last - 1) for first, last in itertools.pairwise(edges)]

    @property
    def rows(self) -> int:
        """The rows of all operators and layers: at least as many as there are entities."""
        return sum(stored.rows for layer in self.layers for stored in layer.objects)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    # --- reading ---

    def read(
        self,
        within: ShardRange,
        keys: Collection[Key] | None = None,
        later: LaterStates | None = None,
        ttl: tuple[int, int] | None = None,
    ) -> Iterator[ScannedRows]:
        """The entities in these shards; with `keys`, only those. `ttl` is the time to live and the current time, in
        microseconds."""
        wanted = None if keys is None else split_keys(keys)
        over = None if later is None else self._table_of(later, within)
        for pieces in self._shard_groups(within):
            tables = [self._own_rows(rows.table, wanted) for rows in pieces]
            yield from self._visible_rows(
                [table for table in tables if table is not None and table.num_rows], over, ttl
            )
        if over is not None and over.num_rows:
            kept = over if wanted is None else over.filter(has_key(over, wanted))
            yield from self._visible_rows([kept] if kept.num_rows else [], None, ttl)

    def _shard_groups(self, within: ShardRange) -> Iterator[list[ShardedRows]]:
        """The rows of a few shards at a time, from all layers, the newest last."""
        layers = [self._sources(layer) for layer in self.layers]
        sources = [
            source
            for layer in layers
            for source in layer
            if source.shards[0] <= within[1] and within[0] <= source.shards[1]
        ]
        some = [(0, self.shards - 1)] if not self.is_aligned else list(shard_ranges(sources))
        for first, last in some:
            first, last = max(first, within[0]), min(last, within[1])
            if first <= last:
                yield [rows for layer in layers for rows in joined(layer, first, last)]

    def _sources(self, layer: Layer) -> list[LayerSource]:
        assert self.manifest is not None
        return [
            LayerSource(
                functools.partial(read_object, self.store, self.manifest.snapshot_id, each),
                each.bytes,
                each.rows,
                each.shards,
            )
            for each in layer.objects
        ]

    def _own_rows(self, table: pa.Table, wanted: Columns | None) -> pa.Table | None:
        """This operator's rows; with `wanted`, only those with these keys."""
        operators = single_array(table, OPERATOR)
        names = operators.dictionary.to_pylist()
        if self.name not in names:
            return None
        mine = table if len(names) == 1 else table.filter(pc.equal(operators.indices, names.index(self.name)))
        return mine if wanted is None else mine.filter(has_key(mine, wanted))

    def _table_of(self, later: LaterStates, within: ShardRange) -> pa.Table:
        changed = later.changed
        if self.operator is not None and within != (0, self.shards - 1) and changed:
            key_shards = shards_of(self.operator, list(changed), self.shards)
            mine = [key for key, shard in zip(changed, key_shards, strict=True) if within[0] <= shard <= within[1]]
            changed = {key: changed[key] for key in mine}
        if not changed:
            return pa.table({})
        return table_of(self.name, split_keys(changed.keys()), split(changed.values()))

    def _visible_rows(
        self, layers: list[pa.Table], over: pa.Table | None, ttl: tuple[int, int] | None
    ) -> Iterator[ScannedRows]:
        """The rows of these layers that count, with `over` above all of them."""
        kept: list[pa.Table] = []
        above = [] if over is None or not over.num_rows else [over]
        for table in reversed(layers):
            table = last_of_each(table)
            hidden = np.zeros(table.num_rows, np.bool_)
            for upper in above:
                hidden |= as_numpy(has_key(table, columns_of(upper, KEY)))
            above.append(table)
            hidden |= as_numpy(single_array(table, DELETED))
            kept.append(table.filter(pa.array(~hidden)) if hidden.any() else table)
        for table in reversed(kept):
            if ttl is not None and table.num_rows:
                lives_us, now_us = ttl
                table = table.filter(pa.array(now_us < written(single_array(table, STATE + "packed")) + lives_us))
            if table.num_rows:
                yield ScannedRows(*(non_empty(columns_of(table, prefix)) for prefix in (KEY, STATE)))


def joined(layer: list[LayerSource], first: int, last: int) -> Iterator[ShardedRows]:
    """A layer's rows of these shards, as one table."""
    pieces = [rows for source in layer for rows in source.rows(first, last)]
    if pieces:
        yield ShardedRows(concat_tables([rows.table for rows in pieces]), [])


def last_of_each(table: pa.Table) -> pa.Table:
    """The last row of each entity. Usually an entity is in a layer once: this is checked first."""
    keys = non_empty(columns_of(table, KEY))
    if all(is_distinct(column.drop_null()) for column in keys.values()):
        return table
    names = [KEY + kind for kind in keys]
    grouped = pa.table({**{name: single_array(table, name) for name in names}, ROW: np.arange(table.num_rows)})
    last = grouped.group_by(names, use_threads=False).aggregate([(ROW, "max")])
    return table.take(pa.array(np.sort(last.column(f"{ROW}_max").to_numpy())))


def is_distinct(column: pa.Array) -> bool:
    if pa.types.is_integer(column.type):
        ordered = np.sort(column.to_numpy())
        return not (ordered[1:] == ordered[:-1]).any()
    return len(column.dictionary_encode().dictionary) == len(column)


def has_key(table: pa.Table, keys: Columns) -> pa.Array:
    """For each row, whether it has one of these keys."""
    found = np.zeros(table.num_rows, np.bool_)
    for kind, wanted in keys.items():
        if table.num_rows and KEY + kind in table.column_names:
            found |= as_numpy(pc.is_in(single_array(table, KEY + kind), wanted.drop_null(), skip_nulls=True))
    return pa.array(found)


def non_empty(columns: Columns) -> Columns:
    """The columns that have any value."""
    return {kind: column for kind, column in columns.items() if column.null_count < len(column)}


def as_numpy(array: pa.Array) -> Any:
    return array.to_numpy(zero_copy_only=False)


def written(states: pa.Array) -> Any:
    """When each of these states with a time to live was written: 8 bytes behind 6 (see `wrap`)."""
    offsets, data = offsets_and_data(states)
    assert (offsets[1:] - offsets[:-1] > WRAP_BYTES).all(), "a state of an operator with a time to live has no time"
    assert (data[offsets[:-1] + 5] == EXPIRING).all()
    times = np.zeros(len(states), np.int64)
    for at in range(WRAP_BYTES - 8, WRAP_BYTES):
        times = times << 8 | data[offsets[:-1] + at]
    return times
