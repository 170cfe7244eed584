"""Repairs a whole store whose logs can no longer be read: `headrace log repair`.

What a snapshot covers is ignored. The log is cut before the first lost record; replies to epochs that are gone with it
are set aside too, because they are no longer valid. Lost replies after the snapshot are made again at the next start;
earlier ones are only noted as gone. A changelog is cut like the log; if it then ends before the snapshot, it starts
again from there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.epoch import Epoch
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
    last_epoch: int  # the store is complete up to this epoch
    forgotten: int  # how many epochs up to that one have lost their replies
    changes: ExamineReport | None = None  # None if there is no changelog

    @property
    def reports(self) -> list[ExamineReport]:
        return [each for each in (self.log, self.replies, self.changes) if each is not None]

    @property
    def has_changed(self) -> bool:
        return bool(self.forgotten) or any(each.lost or each.saved for each in self.reports)


def repair_store(reader: StoreReader) -> Repaired:
    """Takes the store over: a process that runs on it is fenced."""
    newest = reader.snapshots.newest()
    epoch, position = (0, 1) if newest is None else (newest.epoch, newest.position)
    oldest = 1 if newest is None else newest.metadata.ledger.oldest
    store = reader.store
    log = repair(store, "log", position)
    replies = repair(store, "replies", max(1, oldest - reader.epoch0))
    last = max(reader.last_epoch(position), epoch)
    if bounds(store, "replies")[1] + reader.epoch0 > last:
        saved = replies.saved
        replies = cut(store, "replies", last - reader.epoch0 + 1)
        replies.saved = [*saved, *replies.saved]
    changes = repair_changes(store, epoch, last)
    return Repaired(log, replies, last, pad_replies(reader, epoch), changes)


def repair_changes(store: Store, epoch: int, last: int) -> ExamineReport | None:
    """Repairs the changelog from the snapshot's epoch on, and cuts it after the log's last epoch."""
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
    """Replies have one record per epoch: adds an empty one for each epoch up to this one whose replies are gone.
    Returns how many."""
    kept = bounds(reader.store, "replies")[1] + reader.epoch0
    if kept >= epoch:
        return 0
    records = Records(Engine(App(str(reader.identity["app"])), reader.config).program)
    log = Log.take_over(reader.store, "log")
    replies = Log.take_over(reader.store, "replies", term=log.term)
    for number in range(kept + 1, epoch + 1):
        replies.append([records.encode_replies(Epoch(number, 0, 0))])
    replies.close()
    log.close()
    return epoch - kept
