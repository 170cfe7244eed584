"""The keeper: carries out what the core wants kept, and tells the core when it is.

    log         what comes together is written and synced together: `Appended`, `Checked`
    background  replies, then snapshots, compaction and what is not needed any more: `Saved`, `SaveFailed`

`StoreWork` does the work and returns the news; it has no thread. `Keeper` has one for the log and one for the
background. A snapshot is written after the replies of its epochs: what it covers is not replayed. If the log or the
replies fail there is nothing to go on with: the driver is told `Broken`, and stops. A snapshot that fails is only late.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.core.epoch import Batch, Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.journal import (
    Append,
    Appended,
    Broken,
    Check,
    Checked,
    Event,
    Keep,
    Retired,
    Save,
    Saved,
    SaveFailed,
    Snapshot,
)
from headrace.durability.log.records import ColumnRecord
from headrace.durability.recovery import OpenedStore
from headrace.errors import StoreError

LOG = logging.getLogger("headrace.durability")
GROUP_MAX = 1_000  # records, or epochs' replies, written at once
INTERVAL_S_MAX = 3_600.0  # between two writes of replies
MARKS_MAX = 64  # of the replies' times, in a snapshot


class PendingRecord(NamedTuple):
    """A record on its way to the log."""

    number: int
    laid: ColumnRecord
    pack: Callable[[ColumnRecord], bytes]
    retired: int = 0  # of a record that says so: the epoch below which snapshots are not used any more

    @property
    def data(self) -> bytes:
        return self.pack(self.laid)


class StoreWork:
    """All that is done to the store for one engine, a step at a time."""

    def __init__(self, opened: OpenedStore) -> None:
        self.opened, self.records = opened, opened.records
        self._replies: dict[int, ColumnRecord] = {}  # of epochs that are on their way
        self.kept = opened.kept_epoch  # the last epoch whose replies are in the store
        self.changes = opened.changes

    def encode(self, effect: Append) -> PendingRecord:
        """To be called when the effect comes: the epoch has not run yet."""
        record, records = effect.record, self.records
        retired = record.epoch if isinstance(record, Retired) else 0
        if isinstance(record, Batch) and record.closed is not None:
            self.opened.segments.note(effect.number, record.closed.source)
        return PendingRecord(effect.number, records.lay_out(record), records.pack, retired)

    def append(self, group: Sequence[PendingRecord | Check]) -> list[Event]:
        """Write, sync, and make sure that the log is still ours."""
        records = [item for item in group if isinstance(item, PendingRecord)]
        news: list[Event] = []
        if not records:
            self.opened.log.check()
        else:
            last = self.opened.log.append([record.data for record in records])
            assert last == records[-1].number, f"record {records[-1].number} of the core is record {last} of the log"
            news.append(Appended(last))
        return [*news, *(Checked(item.ticket) for item in group if isinstance(item, Check))]

    def lay_out(self, epoch: Epoch, changes: Changes | None = None) -> None:
        """The first half of `keep`, which may be called by another thread."""
        if self.changes is not None and changes is not None:
            self.changes.lay_out(epoch, changes)
        if epoch.number > self.kept and epoch.number not in self._replies:
            self._replies[epoch.number] = self.records.lay_out_replies(epoch)

    def keep(self, epochs: list[Epoch]) -> None:
        """The replies of final epochs, in their order, and what was laid out of their changes; what is in the store
        already is not written again."""
        fresh = [epoch for epoch in epochs if epoch.number > self.kept]
        if fresh:
            assert fresh[0].number == self.kept + 1, f"replies of epoch {fresh[0].number} after those of {self.kept}"
            for epoch in fresh:
                self.lay_out(epoch)
            self.opened.replies.append([self.records.pack(self._replies.pop(epoch.number)) for epoch in fresh])
            self.kept = fresh[-1].number
        if self.changes is not None:
            self.changes.keep([epoch.number for epoch in epochs])

    def save(self, snapshot: Snapshot) -> list[Event]:
        opened = self.opened
        marks = [*opened.marks, (opened.replies.last, snapshot.meta["closed_us"])]
        if len(marks) > MARKS_MAX:
            marks = marks[::2]
        snapshot = snapshot._replace(meta=snapshot.meta | {"marks": marks, "loads": opened.loads})
        try:
            opened.snapshots.save(snapshot, opened.log.term, opened.fingerprint)
            opened.marks = marks
            return [Saved(snapshot.epoch, self._oldest())]
        except StoreError as error:
            LOG.warning(
                "the snapshot of epoch %s failed; the next one will include its changes: %s", snapshot.epoch, error
            )
            return [SaveFailed(snapshot.epoch, error)]

    def _oldest(self) -> int:
        """The epoch of the oldest snapshot that is to be kept."""
        complete = sorted({each.epoch for each in self.opened.snapshots.manifests() if each.is_complete})
        if not complete:  # a successor has deleted them all
            self.opened.log.check()
            return 0
        return complete[-self.opened.config.snapshots_kept :][0]

    def compact(self) -> None:
        """Housekeeping may fail: it is done the next time."""
        try:
            self.opened.snapshots.compact(self.opened.log.term, self.opened.fingerprint)
        except StoreError as error:
            LOG.warning("compaction failed and will be retried: %s", error)

    def retire(self, epoch: int) -> None:
        """The log says that snapshots before this epoch's are not used any more."""
        try:
            self.opened.retire(epoch)
        except StoreError as error:
            LOG.warning("some data older than epoch %s could not be deleted: %s", epoch, error)


class Keeper:
    """A desk, and the two threads at it. `tell(news)` is called by them, and must only hand it over."""

    def __init__(self, opened: OpenedStore, tell: Callable[[Any], None]) -> None:
        self.desk, self._tell = StoreWork(opened), tell
        self._records: queue.SimpleQueue[PendingRecord | Check | None] = queue.SimpleQueue()
        self._rest: queue.SimpleQueue[Epoch | Snapshot | PendingRecord | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guarded, args=(serve,), name=f"headrace-{name}", daemon=True)
            for name, serve in (("log", self._serve_log), ("keeper", self._serve_rest))
        ]
        self._is_broken = False
        self._hurry = threading.Event()  # somebody waits for what is in `_rest`
        for thread in self._threads:
            thread.start()

    def carry_out(self, effect: Append | Check | Keep | Save) -> None:
        """To be called by the core's thread, in the order of the effects."""
        match effect:
            case Append():
                self._records.put(self.desk.encode(effect))
            case Check():
                self._records.put(effect)
            case Keep(epoch, changes):
                self.desk.lay_out(epoch, changes)
                self._rest.put(epoch)
            case Save(snapshot):
                self._rest.put(snapshot)
                self._hurry.set()

    def close(self) -> None:
        """Finish what was handed over."""
        self._records.put(None)
        self._threads[0].join()
        self._rest.put(None)
        self._hurry.set()
        self._threads[1].join()
        self.desk.opened.close()

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except BaseException as error:
            self._is_broken = True
            self._tell(Broken(error))

    def _serve_log(self) -> None:
        is_open = True
        while is_open:
            group = take_all(self._records)
            if group[-1] is None:
                is_open = False
                group.pop()
            if group:
                for news in self.desk.append(group):
                    self._tell(news)
            for item in group:
                if isinstance(item, PendingRecord) and item.retired:
                    self._rest.put(item)
                    self._hurry.set()

    def _serve_rest(self) -> None:
        # Replies are in no hurry: if they are lost, a replay gives them again. But who waits for them in a stream is.
        interval_s, rested_s = min(self.desk.opened.config.reply_interval_us / 1e6, INTERVAL_S_MAX), 0.0
        while not self._is_broken:
            group = take_all(self._rest, self._hurry, rested_s)
            while group and not self._is_broken:
                count = next((at for at, item in enumerate(group) if not isinstance(item, Epoch)), len(group))
                if count:
                    self.desk.keep(group[:count])
                for item in group[count : count + 1]:
                    if item is None:
                        return
                    if isinstance(item, Snapshot):
                        for news in self.desk.save(item):
                            self._tell(news)
                        self.desk.compact()
                    else:
                        self.desk.retire(item.retired)
                del group[: count + 1]
            rested_s = time.monotonic() + interval_s


def take_all(waiting: queue.SimpleQueue[Any], hurry: threading.Event | None = None, until_s: float = 0.0) -> list[Any]:
    """All that waits, at least one; nothing after None. More may gather until this time, or until `hurry` is set."""
    group = [waiting.get()]
    if hurry is not None:
        hurry.wait(max(0.0, until_s - time.monotonic()))
        hurry.clear()
    while group[-1] is not None and len(group) < GROUP_MAX and not waiting.empty():
        group.append(waiting.get())
    return group
