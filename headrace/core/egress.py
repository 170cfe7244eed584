"""Egress: which replies belong to which request.

A submission is answered once: when all its rows are final and the log record of its last epoch is durable.
`Engine._answer` (`core/engine.py`) waits for both.
"""

from __future__ import annotations

from typing import Any

from headrace.core.epoch import FINAL, Batch, Epoch
from headrace.wire.messages import Answers, Failure, RequestIds, with_refused


class Submission:
    """Where the rows of one submitted batch went: ranges of epochs, in the batch's order."""

    __slots__ = ("floor", "ids", "last", "ranges", "refused", "token")

    def __init__(self, token: Any, ids: RequestIds, refused: dict[int, Failure]) -> None:
        self.token = token  # the driver's; returned with the answers
        self.ids, self.refused = ids, refused  # refused: at admission, by place in the whole batch
        self.ranges: list[tuple[Epoch | Failure, int, int]] = []
        self.last: Epoch | None = None  # the one to wait for
        self.floor = 0  # of a source's batch: its record

    @classmethod
    def of(cls, token: Any, batch: Batch) -> Submission:
        """Batches that came through the store get no answers here: they are read there."""
        return cls(token, batch.origin.ids, batch.refused) if batch.origin.stored is None else cls(token, "", {})

    def add(self, epoch: Epoch, start: int, stop: int) -> None:
        self.ranges.append((epoch, start, stop))
        if self.last is None or epoch.number > self.last.number:
            self.last = epoch

    def refuse(self, failure: Failure, rows: int = 1) -> None:
        self.ranges += [(failure, 0, 1)] * rows

    def again(self, token: Any) -> Submission:
        """The same rows, for a repeated request."""
        repeat = Submission(token, self.ids, self.refused)
        repeat.ranges, repeat.last, repeat.floor = self.ranges, self.last, self.floor
        return repeat

    def is_final(self) -> bool:
        if self.last is None or self.last.phase == FINAL:  # epochs become final in order
            return True
        return all(stop <= epoch.final_rows for epoch, _, stop in self.ranges if epoch is self.last)

    def position(self) -> int:
        """The log record that it waits for: the last one, since records are in epoch order."""
        return self.last.position if self.last is not None else self.floor

    def answers(self) -> Answers:
        tids: list[int | None] | range = range(0)  # a range while there are no gaps
        epochs: list[int | None] = []
        results: list[Any] = []
        failures: dict[int, Failure] = {}
        for epoch, start, stop in self.ranges:
            if isinstance(epoch, Failure):
                failures[len(tids)] = epoch
                tids = list(tids) if isinstance(tids, range) else tids
                tids.append(None)
                epochs.append(None)
                results.append(None)
                continue
            if epoch.failures:
                at, found = len(tids) - start, epoch.failures
                if stop - start == len(epoch):
                    failures.update(zip(map(at.__add__, found), found.values(), strict=True))
                elif stop - start < len(found):
                    failures.update({at + row: found[row] for row in range(start, stop) if row in found})
                else:
                    failures.update({at + row: why for row, why in found.items() if start <= row < stop})
            tids = join(tids, epoch.tids[start:stop])
            epochs += [epoch.number] * (stop - start)
            results += epoch.results[start:stop]
        return with_refused(Answers(self.ids, tids, epochs, results, failures), self.ids, self.refused)


def join(tids: list[int | None] | range, more: range) -> list[int | None] | range:
    """Both, concatenated; a range if there is no gap."""
    if isinstance(tids, list):
        tids += more
        return tids
    if not tids:
        return more
    if not more or (tids.step == more.step and tids[-1] + tids.step == more[0]):
        return range(tids.start, tids.start + (len(tids) + len(more)) * tids.step, tids.step)
    return [*tids, *more]
