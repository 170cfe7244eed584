"""The keeper: makes durable what the core asks for, and tells the core when it is done.

    log         records that are waiting are written and synced as a group: `Appended`, `Checked`
    background  replies, then snapshots, compaction and deletions: `Saved`, `SaveFailed`

`StoreWork` does the work and returns events; it has no thread. `Keeper` has one thread for the log and one for the
background. A snapshot is written after the replies of its epochs, because epochs that it covers are not replayed. If
the log or the replies fail, the driver gets `Broken` and stops. A snapshot that fails is only late.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.core.epoch import Batch, Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.events import (
    Append,
    Appended,
    Broken,
    Check,
    Checked,
    Keep,
    Save,
    Saved,
    SaveFailed,
    Snapshot,
    StoreEvent,
)
from headrace.core.log_records import Note, Retired
from headrace.core.snapshot_metadata import StoreMetadata
from headrace.durability.log.records import ColumnRecord
from headrace.durability.recovery import OpenedStore
from headrace.errors import AppChanged, NotDeterministic, StoreError

LOG = logging.getLogger("headrace.durability")
GROUP_MAX = 1_000  # records, or replies of epochs, written at once
INTERVAL_S_MAX = 3_600.0  # between two writes of replies
MARKS_MAX = 64  # how many times of replies a snapshot holds


class PendingRecord(NamedTuple):
    """A record on its way to the log."""

    number: int
    columns: ColumnRecord
    pack: Callable[[ColumnRecord], bytes]
    retired: int = 0  # for a `Retired` record: the epoch below which snapshots are no longer used

    @property
    def data(self) -> bytes:
        return self.pack(self.columns)


class StoreWork:
    """All work on the store for one engine, a step at a time."""

    def __init__(self, opened_store: OpenedStore) -> None:
        self.opened_store, self.records = opened_store, opened_store.records
        self._replies: dict[int, ColumnRecord] = {}  # of epochs that are not written yet
        self.kept = opened_store.kept_epoch  # the last epoch whose replies are in the store
        self.changes = opened_store.changes

    def encode(self, effect: Append) -> PendingRecord:
        """Call this as soon as the effect arrives: the epoch has not run yet."""
        record, records = effect.record, self.records
        retired = record.epoch if isinstance(record, Retired) else 0
        if isinstance(record, Batch):
            self.opened_store.segments.note(effect.number, record)
        return PendingRecord(effect.number, records.to_columns(record), records.pack, retired)

    def append(self, group: Sequence[PendingRecord | Check]) -> list[StoreEvent]:
        """Writes, syncs, and checks that the log is still ours."""
        records = [item for item in group if isinstance(item, PendingRecord)]
        news: list[StoreEvent] = []
        if not records:
            self.opened_store.log.check()
        else:
            last = self.opened_store.log.append([record.data for record in records])
            assert last == records[-1].number, f"record {records[-1].number} of the core is record {last} of the log"
            news.append(Appended(last))
        return [*news, *(Checked(item.ticket) for item in group if isinstance(item, Check))]

    def prepare(self, epoch: Epoch, changes: Changes | None = None) -> None:
        """The first half of `keep`, which another thread may call."""
        if self.changes is not None and changes is not None:
            self.changes.prepare(epoch, changes)
        if epoch.number > self.kept and epoch.number not in self._replies:
            self._replies[epoch.number] = self.records.replies_to_columns(epoch)

    def keep(self, epochs: list[Epoch]) -> None:
        """Writes the replies of final epochs, in order, and their prepared changes. What is in the store already is not
        written again."""
        fresh = [epoch for epoch in epochs if epoch.number > self.kept]
        if fresh:
            assert fresh[0].number == self.kept + 1, f"replies of epoch {fresh[0].number} after those of {self.kept}"
            for epoch in fresh:
                self.prepare(epoch)
            self.opened_store.replies.append([self.records.pack(self._replies.pop(epoch.number)) for epoch in fresh])
            self.kept = fresh[-1].number
        if self.changes is not None:
            try:
                self.changes.keep([epoch.number for epoch in epochs])
            except (AppChanged, NotDeterministic):
                self.opened_store.log.check()  # a successor, perhaps a newer version, may have written them
                raise

    def save(self, snapshot: Snapshot) -> list[StoreEvent]:
        opened_store = self.opened_store
        marks = [*opened_store.marks, (opened_store.replies.last, snapshot.metadata.sequencing.closed_us)]
        if len(marks) > MARKS_MAX:
            marks = marks[::2]
        added = StoreMetadata(marks, opened_store.loads)
        snapshot = snapshot._replace(metadata=msgspec.structs.replace(snapshot.metadata, store=added))
        try:
            opened_store.snapshots.save(snapshot, opened_store.log.term, opened_store.fingerprint)
            opened_store.marks = marks
            return [Saved(snapshot.epoch, self._oldest())]
        except StoreError as error:
            LOG.warning(
                "the snapshot of epoch %s failed; the next one will include its changes: %s", snapshot.epoch, error
            )
            return [SaveFailed(snapshot.epoch, error)]

    def _oldest(self) -> int:
        """The epoch of the oldest snapshot to keep. The newest ones are those that a start would choose first: a
        predecessor that did not know of us yet may have saved one of a later epoch, which no start chooses."""
        complete = [each.epoch for each in self.opened_store.snapshots.manifests() if each.is_complete]
        if not complete:  # a successor has deleted them all
            self.opened_store.log.check()
            return 0
        return min(list(dict.fromkeys(reversed(complete)))[: self.opened_store.config.snapshots_kept])

    def compact(self) -> None:
        """Compaction may fail: it is tried again the next time."""
        try:
            self.opened_store.snapshots.compact(self.opened_store.log.term, self.opened_store.fingerprint)
        except StoreError as error:
            LOG.warning("compaction failed and will be retried: %s", error)

    def retire(self, epoch: int) -> None:
        """Called when the log says that snapshots before this epoch's are no longer used."""
        try:
            self.opened_store.retire(epoch)
        except StoreError as error:
            LOG.warning("some data older than epoch %s could not be deleted: %s", epoch, error)


class Keeper:
    """A `StoreWork` and its two threads. They call `tell(event)`, which must only pass the event on."""

    def __init__(self, opened_store: OpenedStore, tell: Callable[[Any], None]) -> None:
        self.store_work, self._tell = StoreWork(opened_store), tell
        self._records: queue.SimpleQueue[PendingRecord | Check | None] = queue.SimpleQueue()
        self._background: queue.SimpleQueue[Epoch | Snapshot | PendingRecord | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guarded, args=(serve,), name=f"headrace-{name}", daemon=True)
            for name, serve in (("log", self._serve_log), ("keeper", self._serve_background))
        ]
        self._broken: BaseException | None = None
        self._last = opened_store.log.last  # the last record that was handed over
        self._hurry = threading.Event()  # something waits for what is in `_background`
        for thread in self._threads:
            thread.start()

    def carry_out(self, effect: Append | Check | Keep | Save) -> None:
        """Called by the core's thread, in the order of the effects."""
        match effect:
            case Append():
                self._last = effect.number
                self._records.put(self.store_work.encode(effect))
                time.sleep(0)  # lets the log's thread begin, which then waits for the disk without the interpreter
            case Check():
                self._records.put(effect)
            case Keep(epoch, changes):
                self.store_work.prepare(epoch, changes)
                self._background.put(epoch)
            case Save(snapshot):
                self._background.put(snapshot)
                self._hurry.set()

    def close_with(self, record: Note) -> BaseException | None:
        """Make this record durable after all that was handed over, and close. Another thread than the core's may call
        it, once the core's hands nothing over any more. Returns why the record is not durable, if it is not."""
        self.carry_out(Append(self._last + 1, record))
        self.close()
        return self._broken

    def close(self) -> None:
        """Finishes all work that was handed over."""
        self._records.put(None)
        self._threads[0].join()
        self._background.put(None)
        self._hurry.set()
        self._threads[1].join()
        self.store_work.opened_store.close()

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except BaseException as error:
            self._broken = error
            self._tell(Broken(error))

    def _serve_log(self) -> None:
        is_open = True
        while is_open:
            group = take_all(self._records)
            if group[-1] is None:
                is_open = False
                group.pop()
            if group:
                for news in self.store_work.append(group):
                    self._tell(news)
            for item in group:
                if isinstance(item, PendingRecord) and item.retired:
                    self._background.put(item)
                    self._hurry.set()

    def _serve_background(self) -> None:
        # Replies are not urgent, as a replay gives lost ones again; but streams that read them wait for them.
        interval_s, rested_s = min(self.store_work.opened_store.config.reply_interval_us / 1e6, INTERVAL_S_MAX), 0.0
        while self._broken is None:
            group = take_all(self._background, self._hurry, rested_s)
            while group and self._broken is None:
                count = next((at for at, item in enumerate(group) if not isinstance(item, Epoch)), len(group))
                if count:
                    self.store_work.keep(group[:count])
                for item in group[count : count + 1]:
                    if item is None:
                        return
                    if isinstance(item, Snapshot):
                        for news in self.store_work.save(item):
                            self._tell(news)
                        self.store_work.compact()
                    else:
                        self.store_work.retire(item.retired)
                del group[: count + 1]
            rested_s = time.monotonic() + interval_s


def take_all(waiting: queue.SimpleQueue[Any], hurry: threading.Event | None = None, until_s: float = 0.0) -> list[Any]:
    """Takes all waiting items, at least one, and none after None. With `hurry`, first waits for more until this time,
    or until `hurry` is set."""
    group = [waiting.get()]
    if hurry is not None:
        hurry.wait(max(0.0, until_s - time.monotonic()))
        hurry.clear()
    while group[-1] is not None and len(group) < GROUP_MAX and not waiting.empty():
        group.append(waiting.get())
    return group
