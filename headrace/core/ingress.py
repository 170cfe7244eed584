"""Ingress: which calls get in, and which have been here before.

`Admission` checks a call by itself (it holds nothing and may run in the caller's thread). `Ledger` remembers.

Rules:
1. What is refused is never logged and changes nothing; the rest of its batch goes on.
2. A request id stands for one call: asked again, it gets the transaction it got the first time, also while that one
   still waits; asked with another function, key or arguments it is refused.
3. Ids are kept for `request_id_retention_us` of logged time and at most `request_ids_max` transactions, whole epochs
   at a time, oldest first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from headrace.config import Config
from headrace.core.egress import Submission
from headrace.core.epoch import FINAL, Batch, Epoch
from headrace.core.program import Args, Entry, Program
from headrace.errors import BadRequest, HeadraceError, RequestIdReused, StreamError, TooLarge
from headrace.wire.messages import Failure, RequestIds
from headrace.wire.values import Key


class Admission:
    """Checks calls against the app: does the function exist, is the key a key, do the arguments fit?"""

    def __init__(self, program: Program) -> None:
        self.program = program

    def admit(self, ids: RequestIds, calls: Sequence[Any]) -> Batch:
        """Calls are `(function, key, *args)`. Those that may not run are refused in the batch."""
        try:
            functions = {call[0] for call in calls}
            if len(functions) == 1 and set(map(type, calls)) == {tuple}:
                return self.admit_columns(
                    ids, functions.pop(), [call[1] for call in calls], [call[2:] for call in calls]
                )
        except (TypeError, LookupError):
            pass
        return self._admit_rows(ids, calls)

    def admit_columns(self, ids: RequestIds, function: Any, keys: list[Any], args: list[Args]) -> Batch:
        """One function for many keys: checked in columns, and one by one only if something does not fit."""
        entry = self.program.functions.get(function)
        if entry is not None and keys and self.program.check_keys(keys) and entry.signature.fits_all(args):
            return Batch(ids, [entry] * len(keys), keys, args)
        return self._admit_rows(ids, [(function, key, *row) for key, row in zip(keys, args, strict=True)])

    def _admit_rows(self, ids: RequestIds, calls: Sequence[Any]) -> Batch:
        entries: list[Entry] = []
        keys: list[Key] = []
        arguments: list[Args] = []
        refused: dict[int, Failure] = {}
        find, check_key = self.program.find, self.program.check_key
        for position, call in enumerate(calls):
            try:
                function, key, args = call[0], call[1], tuple(call[2:])
                entry = find(function)
                check_key(key)
                if not entry.fits(args):
                    entry, args = entry.admit(args)
            except HeadraceError as error:
                refused[position] = failure_of(error)
            except (TypeError, LookupError):
                refused[position] = failure_of(BadRequest(f"a call is (function, key, *args), not {call!r:.100}"))
            else:
                entries.append(entry)
                keys.append(key)
                arguments.append(args)
        return Batch(ids, entries, keys, arguments, refused)

    def check_id(self, request_id: Any) -> None:
        limit = self.program.config.request_id_bytes_max
        if type(request_id) is not str or not request_id:
            raise BadRequest(f"a request id is a str that is not empty, not {request_id!r:.100}")
        try:
            size = len(request_id.encode())
        except UnicodeEncodeError:
            raise BadRequest(f"the request id {request_id!r} is not valid Unicode") from None
        if size > limit:
            raise TooLarge(f"a request id of {size} bytes is over the limit of {limit}")


class SourceBatches:
    """The last batch of each streaming query: a batch is taken once, whatever its source repeats."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, Submission]] = {}

    def take(self, source: tuple[str, int], submission: Submission) -> Submission:
        """The submission to answer: this one if the batch is new, else the one that ran."""
        query, batch = source
        last, ran = self.last.get(query, (-1, submission))
        if batch == last:
            return ran
        if batch != last + 1:
            raise StreamError(
                f"query {query} sent batch {batch} where {last + 1} was due: its checkpoint belongs to another run of "
                "this app, whose state is gone. Start the query with a new checkpoint location"
            )
        self.last[query] = (batch, submission)
        return submission


class Ledger:
    """The epochs that are kept, and where in them each request id stands: rows are counted from the first one ever."""

    def __init__(self, config: Config) -> None:
        self.rows_max, self.retention_us = config.request_ids_max, config.request_id_retention_us
        self.singles: dict[str, int] = {}  # id -> row
        self.runs: dict[str, range] = {}  # stem -> rows
        self.stems: dict[str, int] = {}  # how many singles look like a row of a run with this stem
        self.epochs: list[Epoch] = []
        self.kept = 0  # rows, without those of the open epoch

    def claim(self, ids: RequestIds, first: int, count: int) -> bool:
        """Take the ids for `count` rows from `first` on. False, and nothing taken, if any has been here before."""
        if isinstance(ids, str):
            if ids in self.runs or ids in self.stems:
                return False
            self.runs[ids] = range(first, first + count)
            return True
        if len(set(ids)) < len(ids) or any(map(self.find, ids)):
            return False
        for row, request_id in enumerate(ids, start=first):
            self.singles[request_id] = row
            if "/" in request_id:
                stem = request_id.rpartition("/")[0]
                self.stems[stem] = self.stems.get(stem, 0) + 1
        return True

    def find(self, request_id: str) -> tuple[Epoch, int] | None:
        row = self.singles.get(request_id)
        if row is None and "/" in request_id:
            stem, _, number = request_id.rpartition("/")
            run = self.runs.get(stem, range(0))
            if number.isdecimal() and number == str(int(number)) and int(number) < len(run):
                row = run[int(number)]
        if row is None:
            return None
        epoch = self.epochs[bisect_right(self.epochs, row, key=lambda epoch: epoch.first) - 1]
        return epoch, row - epoch.first

    def keep(self, epoch: Epoch) -> None:
        """The next open epoch. The one before is closed; if only source batches filled it, there are no ids to look up
        in it and it is not kept."""
        if self.epochs:
            self.kept += len(self.epochs[-1])
            if not self.epochs[-1].has_ids:
                self.kept -= len(self.epochs.pop())
        self.epochs.append(epoch)

    def forget(self, now_us: int) -> None:
        """Drop the oldest epochs that are no longer kept: a good part of them at a time, and no batch in part."""
        oldest = self.epochs[0]
        if self.kept * 8 <= self.rows_max * 9 and (now_us - oldest.opened_us) * 8 <= self.retention_us * 9:
            return
        left, dropped = self.kept, 0
        for at, epoch in enumerate(self.epochs):
            if epoch.phase != FINAL or (left <= self.rows_max and now_us - epoch.opened_us <= self.retention_us):
                break
            left -= len(epoch)
            if not epoch.continues:
                self.kept, dropped = left, at + 1
        for epoch in self.epochs[:dropped]:
            for ids in epoch.ids:
                self._drop(ids)
        del self.epochs[:dropped]

    def _drop(self, ids: RequestIds) -> None:
        if isinstance(ids, str):
            del self.runs[ids]
            return
        for request_id in ids:
            del self.singles[request_id]
            if "/" in request_id:
                stem = request_id.rpartition("/")[0]
                self.stems[stem] -= 1
                if not self.stems[stem]:
                    del self.stems[stem]


def failure_of(error: HeadraceError) -> Failure:
    return Failure(error.code, type(error).__name__, str(error))


def reuse(request_id: str, epoch: Epoch, row: int) -> Failure:
    """The refusal of a request id that came with another call than before."""
    call = f"{epoch.entries[row].name} of {epoch.keys[row]!r}"
    return failure_of(RequestIdReused(f"request id {request_id!r} was used for another call: {call}"))
