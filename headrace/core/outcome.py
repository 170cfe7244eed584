"""Outcomes: did two runs of a transaction end in the same way?"""

from __future__ import annotations

from typing import Any

from headrace.core.epoch import Epoch
from headrace.wire.messages import Failure
from headrace.wire.values import same, shown

Outcome = tuple[list[Any], dict[int, Failure]]  # results and failures of an epoch's rows


def same_outcome(one: Failure | None, other: Failure | None) -> bool:
    """Messages may differ: they may show an object's address."""
    if one is None or other is None:
        return one is other
    return (one.code, one.type, one.function, one.key) == (other.code, other.type, other.function, other.key)


def first_difference(epoch: Epoch, before: Outcome, now: Outcome, rows: range) -> str | None:
    """A text about the first row where two runs differ. Rows that abort by decree are skipped."""
    for row in rows:
        old, new = before[1].get(row), now[1].get(row)
        if row in epoch.decreed or (same_outcome(new, old) and same(now[0][row], before[0][row])):
            continue
        entry = epoch.entries[row]
        was = f"aborted ({old.type}: {old.message})" if old is not None else f"answered {shown(before[0][row])}"
        gives = f"aborts ({new.type}: {new.message})" if new is not None else f"gives {shown(now[0][row])}"
        return f"TID {epoch.tids[row]} ({entry.name} of {shown(epoch.keys[row])}) {was}, but a second run {gives}"
    return None
