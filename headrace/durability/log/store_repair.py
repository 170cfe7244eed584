"""Mending a store as a whole, when its logs cannot be read any more: `headrace log repair`.

What a snapshot covers is not looked at. The log is cut before the first record that is lost; answers to epochs that are
gone with it are set aside too, for they are not true any more. Of lost replies those after the snapshot are made again
by the next start; for earlier ones there is only the note that they are gone. A changelog is cut like the log; if it
ends before the snapshot then, it begins anew.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.epoch import FINAL, Epoch
from headrace.durability.log.changelog import FOLDER, Changelog
from headrace.durability.log.examine import ExamineReport, cut, repair
from headrace.durability.log.log import Log, bounds
from headrace.durability.log.records import Records
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.store import Store
from headrace.errors import LogBroken
from headrace.model.app import App


class Repaired(NamedTuple):
    log: ExamineReport
    replies: ExamineReport
    last_epoch: int  # up to here everything is there
    forgotten: int  # epochs up to that one whose replies are gone
    changes: ExamineReport | None = None  # if there is a changelog

    @property
    def reports(self) -> list[ExamineReport]:
        return [each for each in (self.log, self.replies, self.changes) if each is not None]

    @property
    def has_changed(self) -> bool:
        return bool(self.forgotten) or any(each.lost or each.saved for each in self.reports)


def repair_store(reader: StoreReader) -> Repaired:
    """Takes the store over; whoever serves from it is fenced."""
    newest = reader.snapshots.newest()
    epoch, position, oldest = (0, 1, 1) if newest is None else (newest.epoch, newest.position, newest.meta["oldest"])
    store = reader.store
    log = repair(store, "log", position)
    replies = repair(store, "replies", max(1, int(oldest) - reader.epoch0))
    last = max(reader.last_epoch(position), epoch)
    if bounds(store, "replies")[1] + reader.epoch0 > last:
        saved = replies.saved
        replies = cut(store, "replies", last - reader.epoch0 + 1)
        replies.saved = [*saved, *replies.saved]
    changes = repair_changes(store, epoch, last)
    return Repaired(log, replies, last, pad_replies(reader, epoch), changes)


def repair_changes(store: Store, epoch: int, last: int) -> ExamineReport | None:
    """From the snapshot's epoch on, and not beyond the log's last one."""
    changelog = Changelog(store)
    if not changelog.is_there:
        return None
    newest = None
    with suppress(LogBroken):
        newest = changelog.newest()
    if newest is None:
        return repair(store, FOLDER)
    _, end, record = newest
    report = repair(store, FOLDER, max(1, min(end + 1, end - (record.epoch - epoch))))
    newest = changelog.newest()
    if newest is not None and newest[2].epoch > last:
        saved = report.saved
        report = cut(store, FOLDER, newest[1] - (newest[2].epoch - last) + 1)
        report.saved = [*saved, *report.saved]
    return report


def pad_replies(reader: StoreReader, epoch: int) -> int:
    """There is one record per epoch: for those up to this one whose replies are gone there is an empty one."""
    kept = bounds(reader.store, "replies")[1] + reader.epoch0
    if kept >= epoch:
        return 0
    records = Records(Engine(App(str(reader.identity["app"])), reader.config).program)
    log = Log.take_over(reader.store, "log")
    replies = Log.take_over(reader.store, "replies", term=log.term)
    for number in range(kept + 1, epoch + 1):
        gone = Epoch(number, 0, 0)
        gone.phase = FINAL
        replies.append([records.encode_replies(gone)])
    replies.close()
    log.close()
    return epoch - kept
