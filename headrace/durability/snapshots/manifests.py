"""Manifests: what a snapshot consists of. A snapshot exists once its manifest does: it is complete or not there at all.

    snapshots/<epoch>-<term>-<number>.json     the manifest: written last, created and never replaced
    state/<epoch>-<term>-<number>-<part>.arrow the objects it names: one per part of a layer
    state/<epoch>-<term>-<number>-meta.zst     all else that the next epoch depends on, if it is large

Rules:
1. Names hold the writer's term, so that two writers never write the same object.
2. Of two manifests the one with the higher term is newer, then the one with the higher epoch, then the higher number:
   what a superseded writer still writes is older than all that its successor has written.
3. A manifest has its own checksum, and the sizes and checksums of its objects. An unreadable manifest was never
   finished if its writer wrote no later one.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.snapshot_metadata import SnapshotMetadata
from headrace.durability.store import Store
from headrace.errors import ObjectMissing, SnapshotBroken, WrongStore

FORMAT = 2  # of the manifest and its metadata
MANIFESTS, OBJECTS = "snapshots/", "state/"
NAME = re.compile(r"snapshots/(\d{16})-(\d{8})-(\d+)\.json")
OBJECT_NAME = re.compile(r"state/(\d{16})-(\d{8})-(\d+)-(?:\d+\.arrow|meta\.zst)")
FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{8})","manifest":(.*)\}\n', re.DOTALL)
META_INLINE_BYTES_MAX = 16 << 10
_metadata_decoder = msgspec.msgpack.Decoder(SnapshotMetadata)


class SnapshotId(NamedTuple):
    """The parts of a manifest's or object's name; newer snapshots compare as greater."""

    term: int
    epoch: int
    number: int  # grows with each attempt of a term

    def manifest(self) -> str:
        return f"{MANIFESTS}{self._stem()}.json"

    def part(self, part: int) -> str:
        return f"{OBJECTS}{self._stem()}-{part:04}.arrow"

    def meta(self) -> str:
        return f"{OBJECTS}{self._stem()}-meta.zst"

    def _stem(self) -> str:
        return f"{self.epoch:016}-{self.term:08}-{self.number:04}"


def parse_snapshot_id(name: str) -> SnapshotId | None:
    """The id in the name of a manifest or object; None if it is neither."""
    match = NAME.fullmatch(name) or OBJECT_NAME.fullmatch(name)
    if match is None:
        return None
    epoch, term, number = map(int, match.groups())
    return SnapshotId(term, epoch, number)


class StoredObject(msgspec.Struct, frozen=True):
    """An object, as it was written."""

    name: str
    bytes: int
    crc32: int
    rows: int = 0
    shards: tuple[int, int] = (0, 0)  # the first and the last shard in it


class Layer(msgspec.Struct, frozen=True):
    """The changes up to and including an epoch, applied over all earlier layers."""

    epoch: int
    sharding: str  # layers with the same sharding have an entity in the same shard
    objects: tuple[StoredObject, ...]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.objects)


class ManifestBody(msgspec.Struct, frozen=True):
    """A manifest, as it is stored."""

    format: int
    identity: dict[str, Any]
    epoch: int
    term: int
    number: int
    position: int
    fingerprint: str
    layers: tuple[Layer, ...]  # the base, then changes in the order of the epochs
    meta: bytes | StoredObject  # the metadata in msgpack

    def objects(self) -> list[StoredObject]:
        objects = [each for layer in self.layers for each in layer.objects]
        return [*objects, self.meta] if isinstance(self.meta, StoredObject) else objects


class Manifest:
    """A manifest in a store. If it is not complete, `trouble` says why, and only its id is known."""

    def __init__(self, store: Store, snapshot_id: SnapshotId, body: ManifestBody | None, trouble: str = "") -> None:
        self.store, self.snapshot_id, self.trouble = store, snapshot_id, trouble
        self._body = body
        self.term, self.epoch, self.number = snapshot_id

    @property
    def name(self) -> str:
        return self.snapshot_id.manifest()

    @property
    def is_complete(self) -> bool:
        return self._body is not None

    @property
    def body(self) -> ManifestBody:
        if self._body is None:
            raise broken(self.store, self.snapshot_id, self.name, self.trouble)
        return self._body

    @property
    def position(self) -> int:
        """The first record of the log that the snapshot does not cover."""
        return self.body.position

    @property
    def fingerprint(self) -> str:
        return self.body.fingerprint

    @property
    def identity(self) -> dict[str, Any]:
        return self.body.identity

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.body.layers

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.body.objects())

    @functools.cached_property
    def metadata(self) -> SnapshotMetadata:
        """Read from its own object if it is large. An error if it is of another format, or cannot be read."""
        self.check_format()
        meta = self.body.meta
        name = self.name if isinstance(meta, bytes) else meta.name
        try:
            data = meta if isinstance(meta, bytes) else decompressed(read_object(self.store, self.snapshot_id, meta))
            return _metadata_decoder.decode(data)
        except (msgspec.DecodeError, pa.ArrowException, ValueError) as error:
            raise broken(self.store, self.snapshot_id, name, f"its metadata cannot be read: {error}") from None

    def check_format(self) -> None:
        if self.body.format != FORMAT:
            raise WrongStore(
                f"{self.name} in {self.store.url} has format {self.body.format}, but this version of Headrace reads "
                f"format {FORMAT}: use the version that wrote it"
            )

    def __repr__(self) -> str:
        return f"Manifest({self.name!r}{'' if self.is_complete else ', not complete'})"


def encode_manifest(body: ManifestBody) -> bytes:
    data = msgspec.json.encode(body)
    return b'{"checksum":"%08x","manifest":%s}\n' % (zlib.crc32(data), data)


def decode_manifest(data: bytes, snapshot_id: SnapshotId) -> ManifestBody | str:
    """The manifest, or what is wrong with it."""
    frame = FRAME.fullmatch(data)
    if frame is None:
        return "it is truncated, or not a manifest"
    if int(frame[1], 16) != zlib.crc32(frame[2]):
        return "its checksum is wrong"
    try:
        body = msgspec.json.decode(frame[2], type=ManifestBody)
    except msgspec.DecodeError as error:  # of a newer format
        return f"it cannot be read: {error}"
    if SnapshotId(body.term, body.epoch, body.number) != snapshot_id:
        return f"it belongs to epoch {body.epoch} of term {body.term}"
    return body


def read_manifest(store: Store, snapshot_id: SnapshotId) -> Manifest:
    """Reads it twice if it seems broken: the read itself may have failed. ObjectMissing if it is gone."""
    trouble = ""
    for _ in range(2):
        found = decode_manifest(store.get(snapshot_id.manifest()), snapshot_id)
        if isinstance(found, ManifestBody):
            return Manifest(store, snapshot_id, found)
        trouble = found
    return Manifest(store, snapshot_id, None, trouble)


def compressed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + bytes(pa.compress(data, codec="zstd", asbytes=True))


def decompressed(data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    return bytes(pa.decompress(data[8:], decompressed_size=size, codec="zstd", asbytes=True))


def read_object(store: Store, snapshot_id: SnapshotId, stored: StoredObject) -> bytes:
    """An object of this snapshot, verified by its size and checksum."""
    trouble = ""
    for _ in range(2):
        try:
            data = store.get(stored.name)
        except ObjectMissing:
            trouble = "it is missing"
            continue
        if len(data) != stored.bytes:
            trouble = f"it has {len(data)} bytes instead of {stored.bytes}"
        elif zlib.crc32(data) != stored.crc32:
            trouble = "its checksum is wrong"
        else:
            return data
    raise broken(store, snapshot_id, stored.name, trouble)


def broken(store: Store, snapshot_id: SnapshotId, name: str, trouble: str) -> SnapshotBroken:
    epoch = snapshot_id.epoch
    return SnapshotBroken(
        f"{name} in {store.url}, of the snapshot of epoch {epoch}: {trouble}. Restore it from a backup, or "
        "choose an older snapshot: `headrace snapshot list` lists them, `headrace restore --epoch` starts from one"
    )
