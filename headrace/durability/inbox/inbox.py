"""Calls that arrive as files: segments, which the tasks of a source write, and the inbox, where a closed batch waits.

    calls/<source>@<number>@<part>   rows of a batch, as Arrow files; every attempt writes its own
    inbox/<source>@<number>          the batch is closed: its segments, in their order
    taken/<source>@<number>          the last finished batch of a source: how many rows it had
    refused/<source>@<number>        why the engine did not run the batch. If its name is still in the inbox, the batch
                                     is blocked, and the next start tries again

A source is whatever numbers its batches: a streaming query, or the write of one table.

Rules:
1. A batch is closed by creating its name in the inbox, after all its segments are durable. If it is closed already,
   nothing changes: the first close counts, even if a retry splits the rows differently.
2. The engine logs what the inbox says before it takes a row, and removes the name when all rows are final. A batch that
   is closed again after that is recognized by its number, and removed without reading its rows.
3. A source that has closed a batch waits until the previous batch is gone, so it never runs far ahead.
4. The batches of a source have no gaps. A source that starts in the middle or skips some uses the checkpoint of another
   run, and is refused.
5. Segments, also those of failed attempts, are deleted when no kept snapshot could need them again.

Never here: what the rows mean (batch_calls.py), what writes them.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import Batch
from headrace.core.origin import BatchId, FromSource
from headrace.core.snapshot_metadata import SourcesMetadata
from headrace.core.source_batches import ONCE, gap
from headrace.durability.identity import read_checked, with_checksum
from headrace.durability.inbox.sign_of_life import Watch
from headrace.durability.store import Store
from headrace.errors import LogBroken, ObjectMissing, StreamError

SEGMENTS, INBOX, TAKEN, REFUSED = "calls", "inbox", "taken", "refused"
SEPARATOR = "@"  # flat names: a folder per batch would never be removed
DIGITS = 12


class InboxSegment(msgspec.Struct, frozen=True):
    """Some rows of a batch, in one object."""

    name: str
    bytes: int
    crc32: int
    rows: int


class ClosedBatch(msgspec.Struct, frozen=True):
    """A complete batch of calls. Its columns are `call` (whole calls in JSON), perhaps with `key`; or `key`, with
    `arg0`, `arg1`... or `arg:<name>`... or `args` (JSON), and `function` if the rows call different ones. `id` is there
    if the rows have their own ids."""

    source: str
    number: int
    function: str  # of all rows; empty if there is a column for it
    segments: list[InboxSegment]

    @property
    def batch_id(self) -> BatchId:
        return BatchId(self.source, self.number)

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)


# --- for a source -----------------------------------------------------------------------------------------------------


def write_segment(store: Store, source: str, number: int, part: int, table: pa.Table) -> InboxSegment:
    """Durable when it returns. `part` is for people: the order of segments is set when the batch is closed."""
    sink = pa.BufferOutputStream()
    # A disk is faster than zstd; a network is not.
    options = pa.ipc.IpcWriteOptions(compression=None if store.can_append else "zstd", use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    name = segment_name(BatchId(source, number), part)
    store.put(name, data)  # a new name: it has 48 random bits
    return InboxSegment(name, len(data), zlib.crc32(data), table.num_rows)


def discard(store: Store, segments: Iterable[InboxSegment]) -> None:
    """Deletes the segments of an attempt that did not close its batch."""
    for segment in segments:
        store.delete(segment.name)


def discard_repeat(store: Store, closed: ClosedBatch) -> None:
    """Deletes the segments of an attempt whose batch was closed already: by another attempt, or by this one if a
    request was repeated."""
    try:
        named = {segment.name for segment in read_closed(store, closed.batch_id).segments}
    except (ObjectMissing, LogBroken):
        return  # it finished just now: these are deleted with its own segments
    discard(store, (segment for segment in closed.segments if segment.name not in named))


def close_batch(store: Store, closed: ClosedBatch) -> bool:
    """Durable when it returns. False if the batch was closed before. StreamError if it leaves a gap."""
    source, number = closed.batch_id
    finished = last_finished(store, source)
    if number <= finished:
        check_repeat(store, closed)
        return False
    if number > finished + 1 and not store.exists(name_of(BatchId(source, number - 1))):
        finished = last_finished(store, source)  # it may have finished just now
        if number > finished + 1:
            raise gap(source, number, finished)
    if store.create(name_of(closed.batch_id), with_checksum(msgspec.to_builtins(closed))):
        return True
    check_repeat(store, closed)
    return False


def check_repeat(store: Store, closed: ClosedBatch) -> None:
    """Checks that a repeated batch is the same one. If not, its source has lost its plan, and would skip the rows that
    were not in the first one."""
    rows = rows_known(store, closed.batch_id)
    if rows is not None and rows != closed.rows:
        raise StreamError(
            f"batch {closed.number} of query {closed.source} was closed with {rows} rows, and was sent again with "
            f"{closed.rows}; the closed batch runs once, as it was. If it is a table, this name has already run: give "
            "another one. If it is a stream, its source gives different rows each time, or its checkpoint has lost "
            "its plan, as may happen in a power failure: start it with a new checkpoint location, after what it has "
            "read"
        )


def rows_known(store: Store, batch: BatchId) -> int | None:
    """How many rows a closed batch had; None if that is no longer known."""
    try:
        return read_closed(store, batch).rows
    except (ObjectMissing, LogBroken):
        pass
    try:
        return int(store.get(name_of(batch, TAKEN)))
    except (ObjectMissing, ValueError):
        return None


def await_finished(store: Store, batch: BatchId, patience_s: float) -> None:
    """Waits until all rows of this batch are final. StreamError if it was refused or is blocked, or if that takes
    longer than `patience_s`."""
    source, number = batch
    if number < 0:
        return
    until_s, pause_s = time.monotonic() + patience_s, 0.001
    watch = Watch(store)
    while store.exists(name_of(batch)):
        check_held(store, batch)
        watch.look()
        if time.monotonic() > until_s:
            then = "Then start the query again"
            if source.startswith(ONCE):  # written again, it would be another batch
                then = "Do not write the table again: its rows are in the store and will run"
            raise StreamError(
                f"batch {number} of query {source} in {store.url} has not finished after {patience_s:.0f} s. If the "
                "app is not running, start it with this store. If it is running, it is slow: set a larger option "
                f"patience. {then}; nothing is lost"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02 if store.can_append else 0.5)
    if last_finished(store, source) < number:
        check_held(store, batch)


def check_held(store: Store, batch: BatchId) -> None:
    """StreamError if the engine refused this batch, or cannot take it."""
    if store.exists(name_of(batch, REFUSED)):
        raise StreamError(store.get(name_of(batch, REFUSED)).decode())


def last_finished(store: Store, source: str) -> int:
    """The number of the last finished batch of a source; -1 if there is none."""
    found = (name.rpartition(SEPARATOR) for name in store.list(f"{TAKEN}/{source}{SEPARATOR}"))
    return max((int(number) for stem, _, number in found if stem == f"{TAKEN}/{source}"), default=-1)


def stem_of(batch: BatchId) -> str:
    source, number = batch
    return f"{source}{SEPARATOR}{number:0{DIGITS}}"


def segment_name(batch: BatchId, part: int) -> str:
    return f"{SEGMENTS}/{stem_of(batch)}{SEPARATOR}{part:05}-{secrets.token_hex(6)}"


def name_of(batch: BatchId, of: str = INBOX) -> str:
    return f"{of}/{stem_of(batch)}"


def batch_ids(store: Store, of: str) -> list[BatchId]:
    """The batches with a name in this folder, in order for each source."""
    stems = (name.removeprefix(f"{of}/").rpartition(SEPARATOR) for name in store.list(f"{of}/"))
    return [BatchId(source, int(number)) for source, _, number in stems if number.isdecimal()]


# --- for the engine ---------------------------------------------------------------------------------------------------


def waiting(store: Store) -> list[BatchId]:
    """The batches in the inbox, in order for each source."""
    return batch_ids(store, INBOX)


def read_closed(store: Store, batch: BatchId) -> ClosedBatch:
    try:
        return msgspec.convert(read_checked(store, name_of(batch)), ClosedBatch)
    except (ValueError, msgspec.ValidationError) as error:
        raise LogBroken(f"{name_of(batch)} in {store.url} cannot be read: {error}. Restore it from a backup") from None


def mark_finished(store: Store, batch: BatchId) -> None:
    """Records that all rows of the batch are final. The recorded number never decreases, however late an engine that
    was replaced calls this."""
    source, number = batch
    if not source.startswith(ONCE):
        rows = rows_known(store, batch)
        store.create(name_of(batch, TAKEN), b"" if rows is None else str(rows).encode())
        store.delete(name_of(BatchId(source, number - 1), TAKEN))
    store.delete(name_of(batch))


def refuse(store: Store, batch: BatchId, reason: str) -> None:
    """Refuses a batch for good and deletes it."""
    closed = read_closed(store, batch)
    store.put(name_of(batch, REFUSED), reason.encode())
    store.delete(name_of(batch))
    discard(store, closed.segments)


def hold(store: Store, batch: BatchId, reason: str) -> None:
    """Notes why a batch cannot be taken as it is. It stays in the inbox and is taken once it is repaired."""
    store.put(name_of(batch, REFUSED), reason.encode())


def held(store: Store) -> set[BatchId]:
    """The batches that an engine refused, or could not take."""
    return set(batch_ids(store, REFUSED))


def release(store: Store, batch: BatchId) -> None:
    """Removes the note: the batch can be taken after all."""
    store.delete(name_of(batch, REFUSED))


def read_segment(store: Store, segment: InboxSegment) -> pa.Table:
    """The segment as it was written, verified by its size and checksum."""
    trouble = ""
    for _ in range(2):  # the read itself may have failed
        try:
            data = store.get(segment.name)
        except ObjectMissing:
            trouble = "it is missing"
            continue
        if len(data) != segment.bytes or zlib.crc32(data) != segment.crc32:
            trouble = "its checksum is wrong"
            continue
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    raise LogBroken(
        f"{segment.name} in {store.url}, which holds rows of a batch in the log: {trouble}. Restore it from a backup"
    )


class LiveBatch(NamedTuple):
    position: int  # of its record in the log
    batch: BatchId


class SegmentRetention:
    """Knows which batches of the log may still be read, and deletes the segments of all others."""

    def __init__(self, store: Store, known_from: int) -> None:
        """All batches with records from `known_from` on will be noted; earlier ones are unknown."""
        self.store, self.known_from = store, known_from
        self._live: list[LiveBatch] = []
        self._lock = threading.Lock()

    def note(self, position: int, batch: Batch) -> None:
        """A batch is in the log. Only one whose rows are in segments counts."""
        if isinstance(batch.origin, FromSource) and batch.origin.stored is not None:
            with self._lock:
                self._live.append(LiveBatch(position, batch.origin.batch_id))

    def retire(self, position: int, sources: SourcesMetadata) -> list[str]:
        """Deletes the segments of batches whose records come before `position`: no epoch that may run again uses them.
        `sources` has the last batch of each source, from a snapshot at that position. Returns the deleted names."""
        if position < self.known_from:
            return []
        with self._lock:
            gone = {live.batch for live in self._live if live.position < position}
            self._live = [live for live in self._live if live.position >= position]
            kept = {live.batch for live in self._live}
        names = []
        for name in self.store.list(f"{SEGMENTS}/"):
            source, number, _ = name.removeprefix(f"{SEGMENTS}/").rsplit(SEPARATOR, 2)
            batch = BatchId(source, int(number))
            is_past = batch in gone or (source in sources.last and batch.number <= sources.last[source].number)
            if is_past and batch not in kept:
                self.store.delete(name)
                names.append(name)
        return names
