"""Snapshots: the state at the end of an epoch, made durable at a cost that follows what changed.

A snapshot is a manifest that names layers: a base, and over it what changed, epoch by epoch. Saving adds a layer;
compacting folds the last ones into one.

Rules:
1. Objects first, then the manifest that names them; each is created in one go, and none is ever replaced. Until the
   manifest is there, nothing has happened.
2. Everything is encoded when `save` returns: it keeps nothing of the snapshot it was given.
3. The layers are folded from the first one on that does not outweigh all that follow it. So what is written again ends
   up in a layer that has at least doubled: that happens a logarithmic number of times, and there are as many layers.
4. A complete manifest with an object that is missing or broken is an error, never a reason to take an older one: the
   caller decides that, who knows how far back the log reaches.

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

from headrace.core.journal import Snapshot
from headrace.durability.snapshots.layers import (
    LayerPart,
    LayerSource,
    Shards,
    Tables,
    apply,
    fold_all,
    moved,
    parts,
    rows_of,
)
from headrace.durability.snapshots.manifests import (
    FORMAT,
    MANIFESTS,
    META_INLINE_BYTES_MAX,
    OBJECTS,
    Body,
    Layer,
    Manifest,
    ManifestName,
    Stored,
    broken,
    compressed,
    encode,
    place_of,
    read,
    read_manifest,
)
from headrace.durability.store import Store
from headrace.errors import Fenced, ObjectMissing, SnapshotBroken, StoreError, WrongStore

TRIES_MAX = 5  # to load, while somebody retires what is about to be loaded


class Loaded(NamedTuple):
    manifest: Manifest
    tables: Tables  # operator -> key -> sealed; only operators that have state


class Snapshots:
    """Those of one store. `identity` says whose they are, and is compared; `shards` gives the shards of an operator's
    keys, which are less than `shard_count`. What is saved continues what was loaded before the first save."""

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
        self._last: Manifest | None = None  # what the next one continues
        self._has_looked = False  # somebody has loaded, and perhaps found nothing
        self._term: int | None = None  # in which this one has written, and the last number it has used there
        self._number = 0
        self._known: dict[ManifestName, Manifest] = {}  # complete ones; a manifest never changes
        self._unnamed: set[str] = set()  # objects that were written, and no manifest names yet
        self._lock = threading.Lock()

    # --- saving ---

    def save(self, snapshot: Snapshot, term: int, fingerprint: str) -> Manifest:
        """Durable when it returns. What it raises has changed nothing: the next one must hold its changes too."""
        place = self._next_place(term, snapshot.epoch, snapshot.is_full)
        written: list[str] = []
        try:
            layer = self._write_layer(
                place,
                parts([rows_of(snapshot.delta, self.shards)], self.part_bytes),
                self._sharding(fingerprint),
                written,
            )
            meta = self._write_meta(place, snapshot.meta, written)
            with self._lock:
                last = self._last if not snapshot.is_full else None
                layers = (*(last.layers if last is not None else ()), *([layer] if layer.objects else ()))
                return self._publish(term, snapshot.epoch, snapshot.position, fingerprint, layers, meta)
        finally:
            self._unnamed.difference_update(written)

    def begin(self, manifest: Manifest | None) -> None:
        """What is saved next continues this one, as if it had been loaded: for who does not need its state."""
        with self._lock:
            self._has_looked, self._last = True, manifest

    def place(self, term: int, epoch: int) -> ManifestName:
        """Where somebody else may write parts of layers, to be laid over what was published last."""
        return self._next_place(term, epoch, False)

    def lay_over(
        self,
        place: ManifestName,
        position: int,
        fingerprint: str,
        objects: list[tuple[Stored, ...]],
        meta: dict[str, Any],
    ) -> Manifest:
        """A manifest with these layers over the last one's. Their objects are at this place, and durable."""
        written: list[str] = []
        try:
            kept = self._write_meta(place, meta, written)
            sharding = self._sharding(fingerprint)
            with self._lock:
                last = self._last.layers if self._last is not None else ()
                layers = (*last, *(Layer(place.epoch, sharding, each) for each in objects if each))
                return self._publish(place.term, place.epoch, position, fingerprint, layers, kept)
        finally:
            self._unnamed.difference_update(written)

    def _next_place(self, term: int, epoch: int, is_full: bool) -> ManifestName:
        """Where this attempt's objects go. Its manifest gets a number of its own."""
        with self._lock:
            last = self._last.place if self._last is not None else None
            if term != self._term:
                places = self._places()
                newest = places[-1] if places else None
                if newest is not None and newest.term > term:
                    raise Fenced(
                        f"{self.store.url} has a snapshot of term {newest.term}: this one's term {term} is over"
                    )
                if newest is not None and not (self._has_looked or is_full):
                    raise StoreError(f"{self.store.url} has snapshots: load one before you save changes")
                if newest is not None and newest.term == term:
                    last = max(newest, last or newest)
                used = [*places, *(place_of(name) for name in self.store.list(OBJECTS))]
                self._number = max(
                    (place.number for place in used if place is not None and place.term == term), default=0
                )
            if last is not None and (term < last.term or epoch < last.epoch):
                raise StoreError(
                    f"{self.store.url}: a snapshot of epoch {epoch} in term {term} cannot follow that of epoch "
                    f"{last.epoch} in term {last.term}"
                )
            self._term = term
            self._number += 1
            return ManifestName(term, epoch, self._number)

    def _sharding(self, fingerprint: str) -> str:
        """Other code may partition by something else."""
        return f"{self.shard_count}/{fingerprint}"

    def _write_layer(self, place: ManifestName, files: Iterator[LayerPart], sharding: str, written: list[str]) -> Layer:
        objects = []
        for i, part in enumerate(files):
            name = place.part(i)
            self._put(name, part.data, written)
            objects.append(Stored(name, len(part.data), zlib.crc32(part.data), part.rows, part.shards))
        return Layer(place.epoch, sharding, tuple(objects))

    def _write_meta(self, place: ManifestName, meta: dict[str, Any], written: list[str]) -> bytes | Stored:
        data = msgspec.msgpack.encode(meta)
        if len(data) <= META_INLINE_BYTES_MAX:
            return data
        data = compressed(data)
        self._put(place.meta(), data, written)
        return Stored(place.meta(), len(data), zlib.crc32(data))

    def _put(self, name: str, data: bytes, written: list[str]) -> None:
        written.append(name)
        self._unnamed.add(name)
        self._create(name, data)

    def _create(self, name: str, data: bytes) -> None:
        """What is there already comes from an attempt whose answer got lost, or from somebody who has this term too."""
        if not self.store.create(name, data) and self.store.get(name) != data:
            raise Fenced(f"{name} is in {self.store.url} already: another coordinator has term {self._term}")

    def _publish(
        self, term: int, epoch: int, position: int, fingerprint: str, layers: tuple[Layer, ...], meta: bytes | Stored
    ) -> Manifest:
        """Under the lock: who publishes continues what was published last, and is newer."""
        self._number += 1
        place = ManifestName(term, epoch, self._number)
        body = Body(FORMAT, self.identity, epoch, term, place.number, position, fingerprint, layers, meta)
        self._create(place.manifest(), encode(body))
        self._last = Manifest(self.store, place, body)
        return self._last

    # --- what there is ---

    def manifests(self) -> list[Manifest]:
        """All of them, oldest first, the unfinished ones too."""
        found = []
        for place in self._places():
            manifest = self._known.get(place)
            if manifest is None:
                try:
                    manifest = read_manifest(self.store, place)
                except ObjectMissing:  # somebody else has just retired it
                    continue
            found.append(manifest)
        self._known = {manifest.place: manifest for manifest in found if manifest.is_complete}
        return found

    def newest(self) -> Manifest | None:
        """The one whose state is that of the store, but for what the log has after it."""
        complete = (each for each in self.manifests() if each.is_complete)
        return max(complete, key=lambda each: each.place, default=None)

    def _places(self) -> list[ManifestName]:
        places = [place_of(name) for name in self.store.list(MANIFESTS)]
        return sorted(place for place in places if place is not None)

    # --- loading ---

    def load(self, epoch: int | None = None) -> Loaded | None:
        """The newest one, at most of this epoch; None if the store has none at all. Other trouble is an error."""
        for _ in range(TRIES_MAX):
            manifest = self._choose(epoch)
            if manifest is None:
                self._has_looked = True
                return None
            try:
                loaded = Loaded(manifest, self._tables(manifest))
            except SnapshotBroken:
                if self.store.exists(manifest.name):
                    raise
                continue  # it has just been retired, and a newer one is there
            with self._lock:
                self._has_looked = True
                if self._term is None:
                    self._last = manifest
            return loaded
        raise StoreError(f"{self.store.url}: snapshots are deleted faster than they can be loaded; try again")

    def _choose(self, epoch: int | None) -> Manifest | None:
        places = self._places()
        unfinished: Manifest | None = None
        for i, place in reversed(list(enumerate(places))):
            if epoch is not None and place.epoch > epoch:
                continue
            try:
                manifest = read_manifest(self.store, place)
            except ObjectMissing:
                continue
            if manifest.is_complete:
                self._check_identity(manifest)
                return manifest
            if i + 1 < len(places) and places[i + 1].term == place.term:  # its writer went on: it was complete
                raise broken(self.store, place, manifest.name, manifest.trouble)
            unfinished = manifest
        if unfinished is not None:
            raise SnapshotBroken(
                f"{unfinished.name} in {self.store.url}: {unfinished.trouble}, and there is no other snapshot. Restore "
                "it from a backup. Delete it only if you know that the log still has its first record"
            )
        if epoch is not None and places:
            raise StoreError(
                f"{self.store.url} has no snapshot of epoch {epoch} or before; the oldest is of epoch {places[0].epoch}"
            )
        return None

    def _check_identity(self, manifest: Manifest) -> None:
        theirs = manifest.body
        if theirs.format != FORMAT:
            raise WrongStore(
                f"{manifest.name} in {self.store.url} has format {theirs.format}, but this version of Headrace reads "
                f"format {FORMAT}: use the version that wrote it"
            )
        if theirs.identity != self.identity:
            raise WrongStore(
                f"{self.store.url} holds snapshots of {shown_identity(theirs.identity)}, but this is "
                f"{shown_identity(self.identity)}: use the right store, or an empty one"
            )

    def _tables(self, manifest: Manifest) -> Tables:
        tables: Tables = {}
        for layer in manifest.layers:
            for stored in layer.objects:
                data = read(self.store, manifest.place, stored)
                try:
                    apply(data, tables)
                except (pa.ArrowException, KeyError) as error:
                    raise broken(self.store, manifest.place, stored.name, f"it cannot be read: {error}") from None
        _ = manifest.meta
        return {operator: table for operator, table in tables.items() if table}

    # --- compaction ---

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        """Fold the last layers into one, if it is time: a new manifest of the same epoch. None if it is not."""
        last = self._last
        if last is None:
            return None
        layers = last.layers
        first = first_to_fold([layer.bytes for layer in layers], self.fold_ratio)
        if len(layers) - first < self.fold_layers_min:
            return None
        place = self._next_place(term, last.epoch, False)
        written: list[str] = []
        try:
            sharding = self._sharding(fingerprint)
            sources = [self._sources(last.place, layer, sharding) for layer in layers[first:]]
            files = parts(fold_all(sources, is_base=first == 0), self.part_bytes)
            layer = self._write_layer(place, files, sharding, written)
            with self._lock:
                now = self._last
                if now is None or now.layers[: len(layers)] != layers:  # a full one came meanwhile
                    return None
                folded = (*layers[:first], *([layer] if layer.objects else ()), *now.layers[len(layers) :])
                body = now.body
                return self._publish(term, body.epoch, body.position, body.fingerprint, folded, body.meta)
        finally:
            self._unnamed.difference_update(written)

    def _sources(self, place: ManifestName, layer: Layer, sharding: str) -> list[LayerSource]:
        if layer.sharding == sharding:
            return [
                LayerSource(functools.partial(read, self.store, place, each), each.bytes, each.rows, each.shards)
                for each in layer.objects
            ]
        rows = moved((read(self.store, place, each) for each in layer.objects), self.shards)
        return [
            LayerSource(lambda data=part.data: data, len(part.data), part.rows, part.shards)  # type: ignore[misc]
            for part in parts([rows], self.part_bytes)
        ]

    # --- retirement ---

    def retire(self, keep: Manifest) -> list[str]:
        """Names that neither this manifest nor a newer one needs. To be deleted in this order, manifests first: what
        is left if that is cut short is still complete, or not there."""
        objects = self.store.list(OBJECTS)
        being_written = set(self._unnamed)  # in this order: what is named from now on, the manifests say
        manifests = self.manifests()
        kept = [keep, *(each for each in manifests if each.is_complete and each.place > keep.place)]
        if self._last is not None:  # the next one builds upon it, even if a newer one is there whose answer got lost
            kept.append(self._last)
        needed = {stored.name for each in kept for stored in each.body.objects()} | being_written
        names = [each.name for each in manifests if each.place < keep.place]
        for name in objects:
            place = place_of(name)
            if place is not None and place < keep.place and name not in needed:
                names.append(name)
        return names


def first_to_fold(weights: list[int], ratio: float) -> int:
    """The first that weighs at most `ratio` times all that follow it."""
    first, total = len(weights), 0
    for i in reversed(range(len(weights))):
        if weights[i] <= ratio * total:
            first = i
        total += weights[i]
    return first


def shown_identity(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(identity.items()))
