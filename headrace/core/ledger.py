"""The ledger: which request ids were seen before.

Rules:
1. A request id stands for one call. A repeat gets the transaction of the first request, even while that still waits;
   with another function, key or arguments it is refused.
2. Ids are kept for `request_id_retention_us` of logged time and at most `request_ids_max` transactions. They are
   dropped by whole epochs, oldest first.

Never here: whether a call may run.
"""

from __future__ import annotations

from bisect import bisect_right

from headrace.config import Config
from headrace.core.admission import failure_of
from headrace.core.epoch import FINAL, Epoch
from headrace.core.snapshot_metadata import LedgerMetadata
from headrace.errors import RequestIdReused
from headrace.wire.messages import Failure, RequestIds
from headrace.wire.values import shown


class Ledger:
    """The kept epochs, and the row of each request id in them. Rows are counted from the first one ever."""

    def __init__(self, config: Config) -> None:
        self.rows_max, self.retention_us = config.request_ids_max, config.request_id_retention_us
        self.singles: dict[str, int] = {}  # id -> row
        self.runs: dict[str, range] = {}  # stem -> rows
        self.stems: dict[str, int] = {}  # how many singles look like a row of a run with this stem
        self.epochs: list[Epoch] = []
        self.kept = 0  # rows, without those of the open epoch

    def claim(self, ids: RequestIds, first: int, count: int) -> bool:
        """Take the ids for `count` rows from `first` on. False, with nothing taken, if any was seen before."""
        if isinstance(ids, str):
            if ids in self.runs or ids in self.stems:
                return False
            self.runs[ids] = range(first, first + count)
            return True
        if len(set(ids)) < len(ids) or any(map(self.find, ids)):
            return False
        self._take(ids, first)
        return True

    def _take(self, ids: list[str], first: int) -> None:
        for row, request_id in enumerate(ids, start=first):
            if "/" in request_id and request_id not in self.singles:
                stem = request_id.rpartition("/")[0]
                self.stems[stem] = self.stems.get(stem, 0) + 1
            self.singles[request_id] = row

    def find(self, request_id: str) -> tuple[Epoch, int] | None:
        row = self.singles.get(request_id)
        if row is None and "/" in request_id:
            stem, _, number = request_id.rpartition("/")
            run = self.runs.get(stem, range(0))
            if number.isdecimal() and len(number) < 19 and number == str(int(number)) and int(number) < len(run):
                row = run[int(number)]
        if row is None or row < self.epochs[0].first:
            return None
        epoch = self.epochs[bisect_right(self.epochs, row, key=lambda epoch: epoch.first) - 1]
        return epoch, row - epoch.first

    def adopt(self, epoch: Epoch) -> None:
        """Replace the open epoch by one of an earlier run, and take its ids. If an id was forgotten and used again, the
        later use counts."""
        self.epochs[-1] = epoch
        row = epoch.first
        for ids, start, count, position, is_own in epoch.pieces:
            if not position and not is_own:
                epoch.has_ids = True
                if isinstance(ids, str):
                    self.runs[ids] = range(row - start, row + count)
                else:
                    self._take(ids, row)
                epoch.ids.append(ids)
            row += count

    def describe(self) -> LedgerMetadata:
        return LedgerMetadata(self.epochs[0].number)

    def restore(self, kept: list[Epoch], following: Epoch) -> None:
        """Take the ids of these epochs, whose replies are kept, and open the one that follows."""
        for epoch in kept:
            if epoch.has_ids:
                self.adopt(epoch)
                self.keep(Epoch(epoch.number + 1, epoch.first + len(epoch), epoch.closed_us))
        self.epochs[-1] = following

    def keep(self, epoch: Epoch) -> None:
        """Add the next open epoch. The previous one is closed; if it holds only source batches, it has no ids to find
        and is not kept."""
        if self.epochs:
            self.kept += len(self.epochs[-1])
            if not self.epochs[-1].has_ids:
                self.kept -= len(self.epochs.pop())
        self.epochs.append(epoch)

    def forget(self, now_us: int) -> None:
        """Drop the oldest epochs whose retention is over, many at a time."""
        if self.kept * 8 <= self.rows_max * 9 and (now_us - self.epochs[0].closed_us) * 8 <= self.retention_us * 9:
            return
        dropped = 0
        for epoch in self.epochs:
            if epoch.phase != FINAL or (self.kept <= self.rows_max and now_us - epoch.closed_us <= self.retention_us):
                break
            self.kept -= len(epoch)
            dropped += 1
        gone, self.epochs = self.epochs[:dropped], self.epochs[dropped:]
        for epoch in gone:
            for ids in epoch.ids:
                self._drop(ids)

    def _drop(self, ids: RequestIds) -> None:
        """Forget ids, except those used again after their first row was forgotten."""
        floor = self.epochs[0].first
        if isinstance(ids, str):
            if ids in self.runs and self.runs[ids].stop <= floor:
                del self.runs[ids]
            return
        for request_id in ids:
            if self.singles.get(request_id, floor) < floor:
                del self.singles[request_id]
                if "/" in request_id:
                    stem = request_id.rpartition("/")[0]
                    self.stems[stem] -= 1
                    if not self.stems[stem]:
                        del self.stems[stem]


def reuse(request_id: str, epoch: Epoch, row: int) -> Failure:
    """The refusal of a request id that was used for another call."""
    call = f"{epoch.entries[row].name} of {shown(epoch.keys[row])}"
    return failure_of(RequestIdReused(f"request id {shown(request_id)} was used for another call: {call}"))
