"""Outcomes: did two runs of a transaction end in the same way?"""

from __future__ import annotations

from typing import Any

from headrace.core.epoch import Epoch
from headrace.errors import Aborted, AppChanged, FunctionFailed, HeadraceError, NotDeterministic
from headrace.wire.messages import Failure
from headrace.wire.renewal import same_renewed
from headrace.wire.values import Values, shown

Outcome = tuple[list[Any], dict[int, Failure]]  # results and failures of an epoch's rows


def same_outcome(one: Failure | None, other: Failure | None) -> bool:
    """Messages may differ: they may show an object's address."""
    if one is None or other is None:
        return one is other
    return (code_of(one), one.type, one.function, one.key) == (code_of(other), other.type, other.function, other.key)


def code_of(failure: Failure) -> str:
    """In replies of older versions of Headrace, exceptions other than `Abort` have its code."""
    return Aborted.code if failure.code == FunctionFailed.code else failure.code


def first_difference(epoch: Epoch, before: Outcome, now: Outcome, rows: range, values: Values) -> str | None:
    """A text about the first row where two runs differ. Rows that abort by decree are skipped. A field that the app's
    older version did not have counts as equal if it is at its default."""
    for row in rows:
        old, new = before[1].get(row), now[1].get(row)
        if row in epoch.decreed or (same_outcome(new, old) and same_renewed(before[0][row], now[0][row], values)):
            continue
        entry = epoch.entries[row]
        was = f"aborted ({old.type}: {old.message})" if old is not None else f"answered {shown(before[0][row])}"
        gives = f"aborts ({new.type}: {new.message})" if new is not None else f"gives {shown(now[0][row])}"
        return f"TID {epoch.tids[row]} ({entry.name} of {shown(epoch.keys[row])}) {was}, but a second run {gives}"
    return None


def refusal(epoch: Epoch, difference: str) -> HeadraceError:
    """What to raise about a difference."""
    if epoch.is_inherited:
        return AppChanged(
            f"{difference}: an older version of the app logged epoch {epoch.number}, and this one gives another "
            "result. Nothing is lost: run `headrace upgrade` with the old code, which makes a snapshot at the log's "
            "end; then start the new code"
        )
    return NotDeterministic(f"{difference}: its functions depend on something other than their arguments and state")
