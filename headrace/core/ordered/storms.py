"""Storms: functions whose transactions keep repairing each other. They are gathered at once, without a try.

A function whose transactions were held is not tried for some epochs. Then a few of its transactions are a sample: if
they storm again, the function rests twice as long; if not, four times as many are tried in the next epoch, until all
are. Where a gatherer had to ask for state again and again while it ran, because what the function touches cannot be
foreseen, the next epoch is a sample, too: what it touches is known then.

This decides what a result costs, and never what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.core.program import Entry

EPOCHS_FIRST, EPOCHS_MAX = 8, 256  # without a try, the first time and at most
SAMPLE_FIRST = 64  # transactions of a sample, the first time
HELD_MIN = 4  # in an epoch: fewer are no storm
LATE_PART = 10  # gathering at once does not pay if more than one entity per this many rows was asked for late


class Backoff:
    """Of a function."""

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
        tried: dict[int, int] = {}  # how many more of each function that rests
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
        if rows and len(rows) * 2 >= len(numbers):  # those between them would be run again anyway
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
        """Samples without a storm: more the next time; and if that was all, the function does not storm any more."""
        passed_over = Counter(entries[row].number for row in untried)
        for number, rest in list(self.rests.items()):
            if rows[number] > passed_over[number] and not rest.left and not held[number]:
                rest.sample *= 4
                if not passed_over[number]:
                    del self.rests[number]

    def asked(self, entries: Sequence[Entry], late: int) -> None:
        """The gatherer of an epoch had to ask for so many entities while it ran."""
        if late * LATE_PART > len(entries) and self.rests:
            for number in {entry.number for entry in entries}:
                if number in self.rests:
                    self.rests[number].left = 0
