"""Mending a store as a whole, when its logs cannot be read any more: `headrace log repair`.

What a snapshot covers is not looked at. The log is cut before the first record that is lost; answers to epochs that are
gone with it are set aside too, for they are not true any more. Of lost replies those after the snapshot are made again
by the next start; for earlier ones there is only the note that they are gone.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.epoch import FINAL, Epoch
from headrace.durability.log import Log, bounds
from headrace.durability.mending import Report, cut, repair
from headrace.durability.past import Past
from headrace.durability.records import Records
from headrace.model.app import App


class Repaired(NamedTuple):
    log: Report
    replies: Report
    last_epoch: int  # up to here everything is there
    forgotten: int  # epochs up to that one whose replies are gone

    @property
    def has_changed(self) -> bool:
        return bool(self.log.lost or self.log.saved or self.replies.lost or self.replies.saved or self.forgotten)


def repair_store(past: Past) -> Repaired:
    """Takes the store over; whoever serves from it is fenced."""
    complete = [each for each in past.snapshots.manifests() if each.is_complete]
    newest = max(complete, key=lambda manifest: manifest.place, default=None)
    epoch, position, oldest = (0, 1, 1) if newest is None else (newest.epoch, newest.position, newest.meta["oldest"])
    store = past.store
    log = repair(store, "log", position)
    replies = repair(store, "replies", max(1, int(oldest) - past.epoch0))
    last = max(past.last_epoch(position), epoch)
    if bounds(store, "replies")[1] + past.epoch0 > last:
        saved = replies.saved
        replies = cut(store, "replies", last - past.epoch0 + 1)
        replies.saved = [*saved, *replies.saved]
    return Repaired(log, replies, last, pad_replies(past, epoch))


def pad_replies(past: Past, epoch: int) -> int:
    """There is one record per epoch: for those up to this one whose replies are gone there is an empty one."""
    kept = bounds(past.store, "replies")[1] + past.epoch0
    if kept >= epoch:
        return 0
    records = Records(Engine(App(str(past.identity["app"])), past.config).program)
    log = Log.take_over(past.store, "log")
    replies = Log.take_over(past.store, "replies", term=log.term)
    for number in range(kept + 1, epoch + 1):
        gone = Epoch(number, 0, 0)
        gone.phase = FINAL
        replies.append([records.encode_replies(gone)])
    replies.close()
    log.close()
    return epoch - kept
