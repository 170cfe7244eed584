"""Snapshots: the state at the end of an epoch, made durable at a cost proportional to what changed.

A snapshot is a manifest that names layers: a base, and over it the changes, epoch by epoch. Saving adds a layer;
compaction folds the last ones into one.

Rules:
1. Objects are written first, then the manifest that names them; each is created atomically and never replaced. Until
   the manifest is there, the snapshot does not exist.
2. Everything is encoded when `save` returns: it keeps no reference to the snapshot it was given.
3. Layers are folded from the first one that is not larger than all that follow it. So rewritten data ends up in a layer
   of at least twice the size: this happens a logarithmic number of times, and there are as many layers.
4. A complete manifest with a missing or broken object is an error, never a reason to use an older one: only the caller
   knows how far back the log reaches, and decides.

One thread may save while another compacts.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.events import Snapshot
from headrace.core.snapshot_metadata import SnapshotMetadata
from headrace.durability.snapshots.layers import (
    LayerPart,
    LayerSource,
    Shards,
    Tables,
    apply,
    fold_all,
    parts,
    resharded,
    rows_of,
)
from headrace.durability.snapshots.manifests import (
    FORMAT,
    MANIFESTS,
    META_INLINE_BYTES_MAX,
    OBJECTS,
    Layer,
    Manifest,
    ManifestBody,
    SnapshotId,
    StoredObject,
    broken,
    compressed,
    encode_manifest,
    parse_snapshot_id,
    read_manifest,
    read_object,
)
from headrace.durability.store import Store
from headrace.errors import Fenced, ObjectMissing, SnapshotBroken, StoreError, WrongStore

TRIES_MAX = 5  # to load, while snapshots are being retired


class LoadedSnapshot(NamedTuple):
    manifest: Manifest
    tables: Tables  # operator -> key -> sealed state; only operators that have state


class Snapshots:
    """The snapshots of one store. `identity` must be that of the store's snapshots; `shards` returns the shards of an
    operator's keys, all below `shard_count`. What is saved continues what was loaded before the first save."""

    def __init__(
        self,
        store: Store,
        identity: dict[str, Any],
        shards: Shards,
        shard_count: int,
        *,
        fold_ratio: float = 1.0,
        fold_layers_min: int = 4,
        part_bytes: int = 64 << 20,
    ) -> None:
        self.store, self.shards, self.shard_count = store, shards, shard_count
        self.identity = msgspec.json.decode(msgspec.json.encode(identity), type=dict[str, Any])
        self.fold_ratio, self.fold_layers_min, self.part_bytes = fold_ratio, fold_layers_min, part_bytes
        self._last: Manifest | None = None  # what the next snapshot continues
        self._has_loaded = False  # `load` was called; perhaps it found nothing
        self._term: int | None = None  # the term this object has written in; `_number` is the last number used there
        self._number = 0
        self._known: dict[SnapshotId, Manifest] = {}  # complete ones; a manifest never changes
        self._unpublished: set[str] = set()  # objects that were written, and that no manifest names yet
        self._lock = threading.Lock()

    # --- saving ---

    def save(self, snapshot: Snapshot, term: int, fingerprint: str) -> Manifest:
        """Durable when it returns. If it raises, nothing has changed: the next snapshot must hold these changes too."""
        snapshot_id = self._next_id(term, snapshot.epoch, snapshot.is_full)
        written: list[str] = []
        try:
            layer = self._write_layer(
                snapshot_id,
                parts([rows_of(snapshot.delta, self.shards)], self.part_bytes),
                self._sharding(fingerprint),
                written,
            )
            meta = self._write_metadata(snapshot_id, snapshot.metadata, written)
            with self._lock:
                last = self._last if not snapshot.is_full else None
                layers = (*(last.layers if last is not None else ()), *([layer] if layer.objects else ()))
                return self._publish(term, snapshot.epoch, snapshot.position, fingerprint, layers, meta)
        finally:
            self._unpublished.difference_update(written)

    def continue_from(self, manifest: Manifest | None) -> None:
        """Makes the next save continue this snapshot, as if it had been loaded, for callers that do not need its
        state."""
        with self._lock:
            self._has_loaded, self._last = True, manifest

    def new_snapshot_id(self, term: int, epoch: int) -> SnapshotId:
        """A new id under which other processes may write parts of layers, to pass to `add_layers`."""
        return self._next_id(term, epoch, False)

    def add_layers(
        self,
        snapshot_id: SnapshotId,
        position: int,
        fingerprint: str,
        objects: list[tuple[StoredObject, ...]],
        metadata: SnapshotMetadata,
    ) -> Manifest:
        """Publishes a manifest with these layers over the last one's. Their objects have this id and are durable."""
        written: list[str] = []
        try:
            kept = self._write_metadata(snapshot_id, metadata, written)
            sharding = self._sharding(fingerprint)
            with self._lock:
                last = self._last.layers if self._last is not None else ()
                layers = (*last, *(Layer(snapshot_id.epoch, sharding, each) for each in objects if each))
                return self._publish(snapshot_id.term, snapshot_id.epoch, position, fingerprint, layers, kept)
        finally:
            self._unpublished.difference_update(written)

    def _next_id(self, term: int, epoch: int, is_full: bool) -> SnapshotId:
        """The id for this attempt's objects. Its manifest gets a number of its own."""
        with self._lock:
            last = self._last.snapshot_id if self._last is not None else None
            if term != self._term:
                ids = self._ids()
                newest = ids[-1] if ids else None
                if newest is not None and newest.term > term:
                    raise Fenced(
                        f"{self.store.url} has a snapshot of term {newest.term}: this one's term {term} is over"
                    )
                if newest is not None and not (self._has_loaded or is_full):
                    raise StoreError(f"{self.store.url} has snapshots: load one before you save changes")
                if newest is not None and newest.term == term:
                    last = max(newest, last or newest)
                used = [*ids, *(parse_snapshot_id(name) for name in self.store.list(OBJECTS))]
                self._number = max(
                    (
                        snapshot_id.number
                        for snapshot_id in used
                        if snapshot_id is not None and snapshot_id.term == term
                    ),
                    default=0,
                )
            if last is not None and (term < last.term or epoch < last.epoch):
                raise StoreError(
                    f"{self.store.url}: a snapshot of epoch {epoch} in term {term} cannot follow that of epoch "
                    f"{last.epoch} in term {last.term}"
                )
            self._term = term
            self._number += 1
            return SnapshotId(term, epoch, self._number)

    def _sharding(self, fingerprint: str) -> str:
        """Depends on the code, as other code may have another `partition_by`."""
        return f"{self.shard_count}/{fingerprint}"

    def _write_layer(
        self, snapshot_id: SnapshotId, files: Iterator[LayerPart], sharding: str, written: list[str]
    ) -> Layer:
        objects = []
        for i, part in enumerate(files):
            name = snapshot_id.part(i)
            self._put(name, part.data, written)
            objects.append(StoredObject(name, len(part.data), zlib.crc32(part.data), part.rows, part.shards))
        return Layer(snapshot_id.epoch, sharding, tuple(objects))

    def _write_metadata(
        self, snapshot_id: SnapshotId, metadata: SnapshotMetadata, written: list[str]
    ) -> bytes | StoredObject:
        data = msgspec.msgpack.encode(metadata)
        if len(data) <= META_INLINE_BYTES_MAX:
            return data
        data = compressed(data)
        self._put(snapshot_id.meta(), data, written)
        return StoredObject(snapshot_id.meta(), len(data), zlib.crc32(data))

    def _put(self, name: str, data: bytes, written: list[str]) -> None:
        written.append(name)
        self._unpublished.add(name)
        self._create(name, data)

    def _create(self, name: str, data: bytes) -> None:
        """An existing object is from our own attempt whose answer got lost, or from another writer with this term."""
        if not self.store.create(name, data) and self.store.get(name) != data:
            raise Fenced(f"{name} is in {self.store.url} already: another process has term {self._term}")

    def _publish(
        self,
        term: int,
        epoch: int,
        position: int,
        fingerprint: str,
        layers: tuple[Layer, ...],
        meta: bytes | StoredObject,
    ) -> Manifest:
        """Called under the lock: each manifest continues the last published one, and is newer."""
        self._number += 1
        snapshot_id = SnapshotId(term, epoch, self._number)
        body = ManifestBody(FORMAT, self.identity, epoch, term, snapshot_id.number, position, fingerprint, layers, meta)
        self._create(snapshot_id.manifest(), encode_manifest(body))
        self._last = Manifest(self.store, snapshot_id, body)
        return self._last

    # --- what there is ---

    def manifests(self) -> list[Manifest]:
        """All manifests, oldest first, including unfinished ones."""
        found = []
        for snapshot_id in self._ids():
            manifest = self._known.get(snapshot_id)
            if manifest is None:
                try:
                    manifest = read_manifest(self.store, snapshot_id)
                except ObjectMissing:  # it has just been retired
                    continue
            found.append(manifest)
        self._known = {manifest.snapshot_id: manifest for manifest in found if manifest.is_complete}
        return found

    def newest(self) -> Manifest | None:
        """The manifest whose state is the current one, up to what the log has after it."""
        complete = (each for each in self.manifests() if each.is_complete)
        return max(complete, key=lambda each: each.snapshot_id, default=None)

    def _ids(self) -> list[SnapshotId]:
        ids = [parse_snapshot_id(name) for name in self.store.list(MANIFESTS)]
        return sorted(snapshot_id for snapshot_id in ids if snapshot_id is not None)

    # --- loading ---

    def load(self, epoch: int | None = None) -> LoadedSnapshot | None:
        """Loads the newest snapshot, at most of this epoch; None if the store has none. Anything else is an error."""
        for _ in range(TRIES_MAX):
            manifest = self._choose(epoch)
            if manifest is None:
                self._has_loaded = True
                return None
            try:
                loaded = LoadedSnapshot(manifest, self._tables(manifest))
            except SnapshotBroken:
                if self.store.exists(manifest.name):
                    raise
                continue  # it has just been retired: there is a newer one
            with self._lock:
                self._has_loaded = True
                if self._term is None:
                    self._last = manifest
            return loaded
        raise StoreError(f"{self.store.url}: snapshots are deleted faster than they can be loaded; try again")

    def _choose(self, epoch: int | None) -> Manifest | None:
        ids = self._ids()
        unfinished: Manifest | None = None
        for i, snapshot_id in reversed(list(enumerate(ids))):
            if epoch is not None and snapshot_id.epoch > epoch:
                continue
            try:
                manifest = read_manifest(self.store, snapshot_id)
            except ObjectMissing:
                continue
            if manifest.is_complete:
                self._check_identity(manifest)
                return manifest
            if i + 1 < len(ids) and ids[i + 1].term == snapshot_id.term:  # its writer went on: it was complete
                raise broken(self.store, snapshot_id, manifest.name, manifest.trouble)
            unfinished = manifest
        if unfinished is not None:
            raise SnapshotBroken(
                f"{unfinished.name} in {self.store.url}: {unfinished.trouble}, and there is no other snapshot. Restore "
                "it from a backup. Delete it only if you know that the log still has its first record"
            )
        if epoch is not None and ids:
            raise StoreError(
                f"{self.store.url} has no snapshot of epoch {epoch} or before; the oldest is of epoch {ids[0].epoch}"
            )
        return None

    def _check_identity(self, manifest: Manifest) -> None:
        manifest.check_format()
        if manifest.identity != self.identity:
            raise WrongStore(
                f"{self.store.url} holds snapshots of {shown_identity(manifest.identity)}, but this is "
                f"{shown_identity(self.identity)}: use the right store, or an empty one"
            )

    def _tables(self, manifest: Manifest) -> Tables:
        tables: Tables = {}
        for layer in manifest.layers:
            for stored in layer.objects:
                data = read_object(self.store, manifest.snapshot_id, stored)
                try:
                    apply(data, tables)
                except (pa.ArrowException, KeyError) as error:
                    raise broken(self.store, manifest.snapshot_id, stored.name, f"it cannot be read: {error}") from None
        _ = manifest.metadata
        return {operator: table for operator, table in tables.items() if table}

    # --- compaction ---

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        """Folds the last layers into one and publishes a manifest of the same epoch. None if there is no need to."""
        last = self._last
        if last is None:
            return None
        layers = last.layers
        first = first_to_fold([layer.bytes for layer in layers], self.fold_ratio)
        if len(layers) - first < self.fold_layers_min:
            return None
        snapshot_id = self._next_id(term, last.epoch, False)
        written: list[str] = []
        try:
            sharding = self._sharding(fingerprint)
            sources = [self._sources(last.snapshot_id, layer, sharding) for layer in layers[first:]]
            files = parts(fold_all(sources, is_base=first == 0), self.part_bytes)
            layer = self._write_layer(snapshot_id, files, sharding, written)
            with self._lock:
                now = self._last
                if now is None or now.layers[: len(layers)] != layers:  # a full snapshot was saved meanwhile
                    return None
                folded = (*layers[:first], *([layer] if layer.objects else ()), *now.layers[len(layers) :])
                body = now.body
                return self._publish(term, body.epoch, body.position, body.fingerprint, folded, body.meta)
        finally:
            self._unpublished.difference_update(written)

    def _sources(self, snapshot_id: SnapshotId, layer: Layer, sharding: str) -> list[LayerSource]:
        if layer.sharding == sharding:
            return [
                LayerSource(
                    functools.partial(read_object, self.store, snapshot_id, each), each.bytes, each.rows, each.shards
                )
                for each in layer.objects
            ]
        rows = resharded((read_object(self.store, snapshot_id, each) for each in layer.objects), self.shards)
        return [
            LayerSource(lambda data=part.data: data, len(part.data), part.rows, part.shards)  # type: ignore[misc]
            for part in parts([rows], self.part_bytes)
        ]

    # --- retirement ---

    def retire(self, keep: Manifest) -> list[str]:
        """The names that neither this manifest nor a newer one needs. Delete them in this order, manifests first: if
        that is interrupted, each snapshot is still complete, or not there."""
        objects = self.store.list(OBJECTS)
        being_written = set(self._unpublished)  # before the manifests: what is published later is in them
        manifests = self.manifests()
        kept = [keep, *(each for each in manifests if each.is_complete and each.snapshot_id > keep.snapshot_id)]
        if self._last is not None:  # the next one continues it, even if there is a newer one whose answer got lost
            kept.append(self._last)
        needed = {stored.name for each in kept for stored in each.body.objects()} | being_written
        names = [each.name for each in manifests if each.snapshot_id < keep.snapshot_id]
        for name in objects:
            snapshot_id = parse_snapshot_id(name)
            if snapshot_id is not None and snapshot_id < keep.snapshot_id and name not in needed:
                names.append(name)
        return names


def first_to_fold(weights: list[int], ratio: float) -> int:
    """The first layer that weighs at most `ratio` times all that follow it."""
    first, total = len(weights), 0
    for i in reversed(range(len(weights))):
        if weights[i] <= ratio * total:
            first = i
        total += weights[i]
    return first


def shown_identity(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(identity.items()))
