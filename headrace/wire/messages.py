"""The messages, as frozen structs. Columns, not rows: a message carries a batch and its cost is paid once per batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

RequestIds = str | list[str]
"""The ids of a batch's rows: each its own, or a stem, and then row 7 of stem "x" has the id "x/7"."""


def id_of(ids: RequestIds, row: int) -> str:
    return f"{ids}/{row}" if isinstance(ids, str) else ids[row]


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why there is no result. `code` is for programs, `type` and `message` are the exception's, `function` and `key`
    say where it was raised (None where nothing ran)."""

    code: str
    type: str
    message: str
    function: str | None = None
    key: Any = None


class Calls(msgspec.Struct, frozen=True, tag="calls", forbid_unknown_fields=True):
    """A client's batch: column i of each list is one call. `args` are encoded tuples."""

    ids: RequestIds
    functions: list[str]
    keys: list[Any]
    args: list[bytes]


class Answers(msgspec.Struct, frozen=True, tag="answers", forbid_unknown_fields=True):
    """The replies to one `Calls`, in its order. A result is a sealed value; a failure stands under its row's number.
    A row without a TID was refused: it was never logged and changed nothing."""

    ids: RequestIds
    tids: Sequence[int | None]
    epochs: list[int | None]
    results: list[Any]
    failures: dict[int, Failure]


def with_refused(answers: Answers, ids: RequestIds, refused: dict[int, Failure]) -> Answers:
    """The answers with the rows back in their places that were refused before the others were sent."""
    if not refused:
        return answers
    places = range(len(answers.tids) + len(refused))
    rows = [at for at in places if at not in refused]
    failures = {rows[at]: failure for at, failure in answers.failures.items()} | refused

    def spread(column: Sequence[Any]) -> list[Any]:
        values = iter(column)
        return [None if at in refused else next(values) for at in places]

    return Answers(ids, spread(answers.tids), spread(answers.epochs), spread(answers.results), failures)


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The whole message was refused."""

    failure: Failure


Message = Calls | Answers | Refusal
