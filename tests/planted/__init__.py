"""Mistakes to plant: one module for each section of `docs/guarantees.md`, one mistake for each of its promises.

A mistake is small, and it is one that somebody could make. It breaks what its promise says, and as little else as
possible: the test has to fail because the promise is broken, not because nothing works.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    promise: str
    file: str
    old: str  # stands in the file once
    new: str
    besides: tuple[tuple[str, ...], ...] = ()  # where a promise is kept twice: (old, new), or (file, old, new)

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """The file of each change, its old text and its new text."""
        found = [(self.file, self.old, self.new)]
        for *file, old, new in self.besides:
            found.append((file[0] if file else self.file, old, new))
        return found
