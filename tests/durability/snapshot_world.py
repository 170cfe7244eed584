"""Snapshots under a test's hand: objects in memory, processes that die, limits so small that little data is much; and
writers whose state is known at each epoch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from headrace.core.events import Snapshot
from headrace.core.placement import shards_of
from headrace.core.snapshot_metadata import (
    CountsMetadata,
    DeferredMetadata,
    LedgerMetadata,
    PlacementMetadata,
    SequencingMetadata,
    SnapshotMetadata,
    SourceMetadata,
    SourcesMetadata,
    StoreMetadata,
)
from headrace.durability.snapshots import layers, snapshots
from headrace.durability.snapshots.manifests import Manifest
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.errors import ObjectMissing
from headrace.model.operator import Operator
from headrace.wire.messages import Failure
from headrace.wire.values import MISSING

IDENTITY = {"cluster": "c1", "app": "bank", "format": 1}
SHARDS = 8
OPERATORS = {name: Operator(name) for name in ("accounts", "orders", "stock")}
Tables = dict[str, dict[Any, Any]]


class MemoryStore:
    """Objects in a dict. `hook(operation, name)` is called before each change, `after` after it."""

    url, can_append = "memory", False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.hook: Callable[[str, str], None] = lambda operation, name: None
        self.after: Callable[[str, str], None] = lambda operation, name: None
        self.written_bytes = 0

    def put(self, name: str, data: bytes) -> None:
        self.hook("put", name)
        self.objects[name] = data
        self.written_bytes += len(data)
        self.after("put", name)

    def create(self, name: str, data: bytes) -> bool:
        self.hook("create", name)
        if name in self.objects:
            return False
        self.objects[name] = data
        self.written_bytes += len(data)
        self.after("create", name)
        return True

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise ObjectMissing(name)
        return self.objects[name]

    def get_part(self, name: str, start: int, size: int) -> bytes:
        return self.get(name)[start : start + size]

    def exists(self, name: str) -> bool:
        return name in self.objects

    def list(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.hook("delete", name)
        self.objects.pop(name, None)
        self.after("delete", name)

    def append(self, name: str, data: bytes) -> None:
        raise NotImplementedError

    def sync(self, name: str) -> None:
        raise NotImplementedError


class Died(Exception):
    """The process is gone."""


@contextmanager
def dying(
    store: MemoryStore, operations: int, is_done: bool, error: Callable[[str], Exception] = Died
) -> Iterator[None]:
    """The process dies (or the store refuses) at the change after so many: before it is done, or after that."""
    left = [operations]

    def strike(operation: str, name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error(f"{operation} {name}")

    nothing = store.hook
    store.hook, store.after = (nothing, strike) if is_done else (strike, nothing)
    try:
        yield
    finally:
        store.hook, store.after = nothing, nothing


def shards(operator: str, keys: Any) -> Any:
    return shards_of(OPERATORS[operator], keys, SHARDS)


def new(store: Any, made: type[Snapshots] = Snapshots, **options: Any) -> Snapshots:
    """With limits so small that little data has several parts, batches and folds."""
    defaults: dict[str, Any] = {"shards": shards, "shard_count": SHARDS, "fold_layers_min": 2, "part_bytes": 400}
    return made(store, IDENTITY, **defaults | options)


@contextmanager
def small_limits() -> Iterator[None]:
    with (
        mock.patch.multiple(layers, BATCH_ROWS=3, FOLD_ROWS=8),
        mock.patch.multiple(snapshots, META_INLINE_BYTES_MAX=400),
    ):
        yield


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, to the bit."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is dict:
        mine, theirs = ({(type(key), key): value for key, value in each.items()} for each in (a, b))
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    return bool(a == b)


def changes(old: Tables, new: Tables) -> list[tuple[str, Any, Any]]:
    """What makes the one of the other."""
    delta = []
    for operator in sorted(old.keys() | new.keys()):
        before, after = old.get(operator, {}), new.get(operator, {})
        delta += [(operator, key, MISSING) for key in before if key not in after]
        delta += [(operator, key, state) for key, state in after.items() if not same(before.get(key, MISSING), state)]
    return delta


def without_empty(tables: Tables) -> Tables:
    return {operator: table for operator, table in tables.items() if table}


def metadata_of(epoch: int) -> SnapshotMetadata:
    sources = {
        f"source {i}": SourceMetadata(i, f"r{i}" if i % 2 else [f"r{i}", ""], {3: Failure("c", "T", "no")}, [(0, 1, i)])
        for i in range(epoch % 7)
    }
    return SnapshotMetadata(
        SequencingMetadata(epoch, epoch + 1, -epoch),
        CountsMetadata(2 * epoch, 1 << 40),
        SourcesMetadata(sources, epoch % 2 == 0),
        LedgerMetadata(epoch % 3),
        DeferredMetadata({f"timer {i}": i for i in range(epoch % 4)}),
        PlacementMetadata([1, 2, 2], epoch) if epoch % 2 else None,
        StoreMetadata([(epoch, 7), (epoch + 1, 8)], {"stock": epoch}),
    )


def tables_at(epoch: int) -> Tables:
    """Entities come, change and go."""
    stock = {i: epoch - epoch % (i + 1) for i in range(12) if (epoch + i) % 5}
    return {"stock": stock, "orders": {f"o{i}": i for i in range(epoch)}}


def save(made: Snapshots, epoch: int, before: int, term: int = 1, is_full: bool = False) -> Manifest:
    delta = changes({} if is_full or not before else tables_at(before), tables_at(epoch))
    return made.save(Snapshot(epoch, epoch + 1, delta, metadata_of(epoch), is_full), term, "f")


def loaded_epoch(store: Any, epoch: int | None = None, made: type[Snapshots] = Snapshots) -> int:
    """Of what is loaded, which must be what was there."""
    loaded = new(store, made).load(epoch)
    if loaded is None:
        return 0
    assert same(loaded.tables, without_empty(tables_at(loaded.manifest.epoch)))
    assert loaded.manifest.metadata == metadata_of(loaded.manifest.epoch)
    return loaded.manifest.epoch


def named(store: Any, name: str) -> bool:
    return any(name == stored.name for each in new(store).manifests() for stored in each.body.objects())
