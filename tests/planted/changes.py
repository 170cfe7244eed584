"""Mistakes that break the promises of the section "Changes"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Each epoch logs what differs between its start and its end, whichever mode runs it, and after any recovery.",
        "headrace/durability/log/changelog.py",
        "rows = [row for row in zip(*changed, strict=True) if not same(row[1], row[2])]",
        "rows = list(zip(*changed, strict=True))",
    ),
    Mistake(
        "The records are the same bytes in both modes.",
        "headrace/durability/log/changelog.py",
        "    rows.sort(key=itemgetter(0) if len(kinds) == 1 else lambda row: (RANKS[type(row[0])], row[0]))\n",
        "",
    ),
    Mistake(
        "Changes that were lost are made again.",
        "headrace/core/journal.py",
        "            if changes is not None:\n",
        "            if changes is not None and not epoch.is_replayed:\n",
    ),
    Mistake(
        "A replay that makes different changes stops.",
        "headrace/durability/log/changelog.py",
        "if states is None or now is None or not all(map(same_renewed, states, now, repeat(values))):",
        "if states is None or now is None:",
    ),
    Mistake(
        "A snapshot is saved after the changes that it covers.",
        "headrace/core/journal.py",
        "        if not self.unkept or self.unkept[0].number > self.unsaved.epoch:\n            self.saving",
        "        if True:\n            self.saving",
    ),
    Mistake(
        "A stream of changes that began before a bulk load stops there by name.",
        "headrace/spark/sources/changes.py",
        "if self._watched(changes.header.breaks) != mark:",
        "if mark and self._watched(changes.header.breaks) != mark:",
    ),
    Mistake(
        "The same holds if no epoch ran between its beginning and the load.",
        "headrace/durability/log/changelog.py",
        "(max(fresh, 1) if has_broken else 0)",
        "(1 if has_broken else 0)",
    ),
    Mistake(
        "A stream of all changes gets an error for an operator that was off for a while.",
        "headrace/durability/log/changelog.py",
        "has_broken = not goes_on and (name in known or name in self.breaks)",
        "has_broken = not goes_on and name in known",
    ),
    Mistake(
        "After a migration, the table of the state is the migrated one.",
        "headrace/core/engine.py",
        "        if self.journal.is_full_next:\n            changed = self.state.select()\n",
        "",
    ),
    Mistake(
        "A changelog that begins late says so.",
        "headrace/durability/log/changelog.py",
        "self.kept, self.begin = epoch, epoch + 1",
        "self.kept, self.begin = epoch, 1",
    ),
    Mistake(
        "Rows of `headrace.changes`, folded, are the state.",
        "headrace/spark/sources/changes.py",
        "for name in changes.operators if self.operator is None else [self.operator]:",
        "for name in changes.operators[:1] if self.operator is None else [self.operator]:",
    ),
    Mistake(
        "A stream gives each row once, whatever is restarted.",
        "headrace/spark/sources/epoch_streams.py",
        'first, last = start["epoch"] + 1 - self._origin, end["epoch"] - self._origin',
        'first, last = max(start["epoch"], 1) - self._origin, end["epoch"] - self._origin',
    ),
    Mistake(
        "A stream that continues after changes were off for a while gets an error.",
        "headrace/spark/sources/changes.py",
        "if changes.epoch != epoch or epoch < changes.begin:",
        "if changes.epoch != epoch and epoch < changes.begin:",
        (
            (
                "if self._watched(changes.header.breaks) != mark:",
                "if mark and self._watched(changes.header.breaks) != mark:",
            ),
        ),
    ),
)
