"""Which HTTP status an outcome has. One table: the gateway answers by it, the OpenAPI file shows it, docs/http.md is
tested against it.

The status of a refusal is the `http_status` of its error (`headrace/errors.py`). A call that ran and was undone has its
status from `ABORTED`: an app's own abort and a limit are the caller's business; whatever else a function raised is a
bug.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import (
    REFUSALS,
    Aborted,
    ExternalFailed,
    FunctionFailed,
    HeadraceError,
    LimitReached,
    Poisoned,
    TooLarge,
)

OK, BUG = 200, 500


class StatusRow(NamedTuple):
    """A row of the table."""

    http_status: int
    status: str  # in the answer
    code: str  # in the answer; "" if it has none
    meaning: str


ABORTED = (
    StatusRow(409, "aborted", Aborted.code, "the function raised `Abort`, or an exception derived from it"),
    StatusRow(BUG, "aborted", FunctionFailed.code, "the function raised another exception: a bug"),
    StatusRow(422, "aborted", LimitReached.code, "too many calls or writes, or calls too deep"),
    StatusRow(422, "aborted", TooLarge.code, "a state, a result, or all writes together are too large"),
    StatusRow(422, "aborted", Poisoned.code, "no memory or stack left, not returned in time, or a worker crashed"),
    StatusRow(424, "aborted", ExternalFailed.code, "an external call failed, and the function did not catch that"),
)
_aborted = {outcome.code: outcome.http_status for outcome in ABORTED}


def status_of_abort(code: str) -> int:
    return _aborted.get(code, BUG)


def table() -> list[StatusRow]:
    """All outcomes of a request."""
    return [
        StatusRow(OK, "ok", "", "the call ran, and its writes are kept"),
        *ABORTED,
        StatusRow(BUG, "aborted", "any other", "the function used its context, or a value, incorrectly: a bug"),
        *(StatusRow(each.http_status, "refused", each.code, first_sentence(each)) for each in REFUSALS.values()),
    ]


def first_sentence(error: type[HeadraceError]) -> str:
    text = " ".join((error.__doc__ or "").split()).partition(". ")[0].rstrip(".")
    return text[:1].lower() + text[1:]
