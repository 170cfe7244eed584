"""Storms: functions whose transactions keep repairing each other. They are gathered at once, without a try.

A function whose transactions were held is not tried for some epochs. Then a sample of its transactions is tried: if
they storm again, the function rests twice as long; if not, the next epoch tries four times as many, until all are
tried. If a gatherer had to ask for state again and again while it ran, because what the function touches is not
predictable, the next epoch is also a sample: trying shows what it touches.

This decides what a result costs, never what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.core.program import Entry

EPOCHS_FIRST, EPOCHS_MAX = 8, 256  # without a try: at first, and at most
SAMPLE_FIRST = 64  # transactions in the first sample
HELD_MIN = 4  # in an epoch: fewer do not count as a storm
LATE_PART = 10  # gathering at once does not pay if more than one entity per this many rows came late


class Backoff:
    """The rest of one function."""

    __slots__ = ("epochs", "left", "sample")

    def __init__(self) -> None:
        self.epochs, self.left, self.sample = EPOCHS_FIRST, EPOCHS_FIRST, SAMPLE_FIRST

    def again(self) -> None:
        self.epochs = self.left = min(2 * self.epochs, EPOCHS_MAX)
        self.sample = SAMPLE_FIRST


class Storms:
    def __init__(self) -> None:
        self.rests: dict[int, Backoff] = {}  # by the function's number

    def rows(self, entries: Sequence[Entry]) -> list[int]:
        """The rows of an epoch that are not tried."""
        if not self.rests:
            return []
        numbers = [entry.number for entry in entries]
        tried: dict[int, int] = {}  # how many more, for each resting function
        for number in set(numbers) & self.rests.keys():
            rest = self.rests[number]
            tried[number] = 0 if rest.left else rest.sample
            rest.left -= rest.left > 0
        rows = []
        for row, number in enumerate(numbers):
            if tried.get(number, 1):
                if number in tried:
                    tried[number] -= 1
            else:
                rows.append(row)
        if rows and len(rows) * 2 >= len(numbers):  # the rows between them would rerun anyway
            return list(range(rows[0], rows[-1] + 1))
        return rows

    def note(self, entries: Sequence[Entry], untried: list[int], held: list[int]) -> None:
        """An epoch is over: these rows were not tried, those in `held` were, and were held."""
        counts = Counter(entries[row].number for row in held)
        for number, count in counts.items():
            rest = self.rests.get(number)
            if count >= HELD_MIN and rest is None:
                self.rests[number] = Backoff()
            elif count >= HELD_MIN and rest is not None and not rest.left:
                rest.again()
        if self.rests:
            self._judge_samples(Counter(entry.number for entry in entries), entries, untried, counts)

    def _judge_samples(
        self, rows: Counter[int], entries: Sequence[Entry], untried: list[int], held: Counter[int]
    ) -> None:
        """Samples without a storm: try more next time. If all rows were tried, the function no longer rests."""
        passed_over = Counter(entries[row].number for row in untried)
        for number, rest in list(self.rests.items()):
            if rows[number] > passed_over[number] and not rest.left and not held[number]:
                rest.sample *= 4
                if not passed_over[number]:
                    del self.rests[number]

    def asked(self, entries: Sequence[Entry], late: int) -> None:
        """The gatherer of an epoch had to request this many entities while it ran."""
        if late * LATE_PART > len(entries) and self.rests:
            for number in {entry.number for entry in entries}:
                if number in self.rests:
                    self.rests[number].left = 0
