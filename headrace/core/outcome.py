"""Outcomes: did two runs of an epoch end in the same way? If not, may its logged replies stand?

Rules:
1. An epoch that runs again must give the replies that were logged, and write what it wrote the first time. The digest
   of the writes is logged beside the replies.
2. If only replies differ, the state is the same, and all that came later: the logged replies may stand, if the user
   says so. That is noted in the log (`Accepted`), so later replays do not ask again.
3. If the writes differ, or it is not known whether they do, the logged replies do not stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from headrace.core.digests import is_comparable
from headrace.core.epoch import Epoch
from headrace.errors import Aborted, AppChanged, FunctionFailed, HeadraceError, NotDeterministic
from headrace.wire.messages import Failure
from headrace.wire.renewal import same_renewed
from headrace.wire.values import Values, shown


class Outcome(NamedTuple):
    """What a run of an epoch gave."""

    results: list[Any]
    failures: dict[int, Failure]
    digest: bytes | None = None


SAME, OTHER, UNKNOWN = "same", "other", "unknown"  # what a second run wrote

CAUSE = "its functions depend on something other than their arguments and state"
CHECK = "`headrace run --check` (Runtime(app, check=True)) finds such functions while you test"
ADVICE = {
    SAME: (
        "What epoch {0} wrote is the same, so its logged replies can stand: start with --accept-logged "
        "(accept_logged=True), which notes it in the log. Or run `headrace restore --epoch {1}`, which makes a store "
        "without this epoch and all later ones. "
    ),
    OTHER: (
        "What epoch {0} wrote differs, too, so its replies cannot stand, with --accept-logged either. "
        "`headrace restore --epoch {1}` makes a store without this epoch and all later ones. "
    ),
    UNKNOWN: (
        "It is not known whether epoch {0} wrote the same, so its replies cannot stand, with --accept-logged either: "
        "there is no digest of it, or one that only a start in one process, without --workers, can compare. "
        "`headrace restore --epoch {1}` makes a store without this epoch and all later ones. "
    ),
}


def same_outcome(one: Failure | None, other: Failure | None) -> bool:
    """Messages may differ: they may show an object's address."""
    if one is None or other is None:
        return one is other
    return (code_of(one), one.type, one.function, one.key) == (code_of(other), other.type, other.function, other.key)


def code_of(failure: Failure) -> str:
    """In replies of older versions of Headrace, exceptions other than `Abort` have its code."""
    return Aborted.code if failure.code == FunctionFailed.code else failure.code


def differences(epoch: Epoch, before: Outcome, now: Outcome, rows: Iterable[int], values: Values) -> dict[int, str]:
    """A text about each row where two runs differ. Rows that abort by decree are skipped. A field that the app's older
    version did not have counts as equal if it is at its default."""
    found = {}
    for row in rows:
        old, new = before.failures.get(row), now.failures.get(row)
        is_same = same_outcome(new, old) and same_renewed(before.results[row], now.results[row], values)
        if is_same or row in epoch.decreed:
            continue
        entry = epoch.entries[row]
        was = f"aborted ({old.type}: {old.message})" if old is not None else f"answered {shown(before.results[row])}"
        gives = f"aborts ({new.type}: {new.message})" if new is not None else f"gives {shown(now.results[row])}"
        found[row] = f"TID {epoch.tids[row]} ({entry.name} of {shown(epoch.keys[row])}) {was}, but a second run {gives}"
    return found


def compare_writes(epoch: Epoch, before: bytes | None, now: bytes | None) -> str:
    """Older versions of the app may have written states in another form."""
    if not is_comparable(before, now) or epoch.is_inherited:
        return UNKNOWN
    return SAME if before == now else OTHER


def check(epoch: Epoch, found: dict[int, str], writes: str, accepts: bool) -> dict[int, str]:
    """May an epoch that ran again go on with its logged replies? `found` are the rows where they differ. Returns those
    that must be noted in the log; raises if it may not."""
    fresh = {row: text for row, text in found.items() if row not in epoch.accepted}
    if writes == OTHER:
        called = ", ".join(sorted({entry.name for entry in epoch.entries})[:5])
        wrote = f"epoch {epoch.number}, which called {called}, gave the same replies again, but wrote something else"
        raise refusal(epoch, next(iter(found.values()), wrote), writes)
    if fresh and not (accepts and writes == SAME):
        raise refusal(epoch, next(iter(fresh.values())), writes)
    return fresh


def refusal(epoch: Epoch, difference: str, writes: str = UNKNOWN) -> HeadraceError:
    """What to raise about a difference."""
    if epoch.is_inherited:
        return AppChanged(
            f"{difference}: an older version of the app logged epoch {epoch.number}, and this one gives another "
            "result. Nothing is lost: run `headrace upgrade` with the old code, which makes a snapshot at the log's "
            "end; then start the new code"
        )
    advice = ADVICE[writes].format(epoch.number, epoch.number - 1) if epoch.is_replayed else ""
    return NotDeterministic(f"{difference}: {CAUSE}. {advice}{CHECK}")
