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

import msgspec

from headrace.config import Config
from headrace.core.egress import Submission
from headrace.core.epoch import FINAL, Batch, Epoch
from headrace.core.program import Entry, Program
from headrace.core.signature import Args
from headrace.errors import (
    BadArguments,
    BadRequest,
    HeadraceError,
    ReplyExpired,
    RequestIdReused,
    StreamError,
    TooLarge,
    UnknownFunction,
)
from headrace.model.operator import RESERVED
from headrace.wire.messages import Failure, RequestIds
from headrace.wire.values import Key, shown, size_of


class Admission:
    """Checks calls against the app: does the function exist, is the key a key, do the arguments fit?"""

    def __init__(self, program: Program) -> None:
        self.program = program

    def admit(self, ids: RequestIds, calls: Sequence[Any]) -> Batch:
        """Calls are `(function, key, *args)`. Those that may not run are refused in the batch."""
        if not isinstance(ids, str):
            ids = list(ids)
            if len(ids) != len(calls):
                raise BadRequest(f"{len(ids)} request ids for {len(calls)} calls")
        try:
            functions = {call[0] for call in calls}
            if len(functions) == 1 and set(map(type, calls)) == {tuple}:
                keys, args = [call[1] for call in calls], [call[2:] for call in calls]
                return self.admit_columns(ids, functions.pop(), keys, args)
        except (TypeError, LookupError):
            pass
        return self.admit_rows(ids, [take_apart(call) for call in calls])

    def admit_columns(
        self,
        ids: RequestIds,
        function: Any,
        keys: list[Any],
        args: list[Args],
        source: tuple[str, int] | None = None,
    ) -> Batch:
        """One function for many keys: checked in columns, and one by one only if something does not fit."""
        try:
            entry = self._find(function)
            is_plain = entry.operator.partition_by is None
            if is_plain and keys and self.program.check_keys(keys) and entry.signature.fits_all(args):
                return Batch(ids, [entry] * len(keys), keys, args, source=source)
        except UnknownFunction:
            pass
        return self.admit_rows(ids, [(function, key, row) for key, row in zip(keys, args, strict=True)], source)

    def admit_rows(
        self,
        ids: RequestIds,
        calls: list[tuple[Any, Any, Any] | BadRequest],
        source: tuple[str, int] | None = None,
    ) -> Batch:
        """Calls are `(function, key, args)`, or the reason why there is none."""
        entries: list[Entry] = []
        keys: list[Key] = []
        arguments: list[Args] = []
        refused: dict[int, Failure] = {}
        sizes: list[int] = []
        for position, call in enumerate(calls):
            try:
                if isinstance(call, BadRequest):
                    raise call
                function, key, args = call
                entry = self._find(function)
                self.program.check_key(key, entry)
                if type(args) is not tuple:
                    raise BadArguments(f"the arguments of {entry.signature} must be a tuple, not {shown(args)}")
                if not entry.fits(args):
                    entry, args = entry.admit(args)
            except BadRequest as error:
                refused[position] = failure_of(error)
            else:
                entries.append(entry)
                keys.append(key)
                arguments.append(args)
                sizes.append(sum(map(size_of, args)))
        return Batch(ids, entries, keys, arguments, refused, source, sizes if any(sizes) else None)

    def _find(self, function: Any) -> Entry:
        entry = self.program.find(function)
        if entry.operator.name == RESERVED:
            raise UnknownFunction(f"{entry.name} is internal to Headrace and cannot be called")
        return entry

    def check_id(self, request_id: Any) -> None:
        limit = self.program.config.request_id_bytes_max
        if type(request_id) is not str or not request_id:
            raise BadRequest(f"a request id must be a non-empty str, not {shown(request_id)}")
        try:
            size = len(request_id.encode())
        except UnicodeEncodeError:
            raise BadRequest(f"the request id {shown(request_id)} is not valid Unicode") from None
        if size > limit:
            raise TooLarge(f"a request id of {size} bytes is over the limit of {limit}")


ONCE = "write-"  # so begins a query of one batch that nobody repeats once it has run


class SourceBatches:
    """The last batch of each streaming query: a batch is taken once, whatever its source repeats."""

    def __init__(self, config: Config) -> None:
        self.queries_max = config.queries_max
        self.last: dict[str, tuple[int, Submission]] = {}  # the query that was quiet for longest comes first
        self.has_forgotten = False  # some query, ever

    def last_of(self, query: str) -> int:
        """The number of its last batch; -1 if there was none, or the query is forgotten."""
        known = self.last.get(query)  # asked by other threads, too
        return -1 if known is None else known[0]

    def take(self, source: tuple[str, int], submission: Submission, rows: int, after: int = -1) -> Submission | None:
        """None if the batch of so many rows is new, and from now on it is not; else the submission that ran. `after` is
        the last one that ran, as its source knows it: it counts if this query may have been forgotten. A source that
        knows that the batch ran has not brought its rows, so it is never new."""
        query, batch = source
        forgotten = after if self.has_forgotten else -1
        last, ran = self.last.get(query, (forgotten, None))
        if batch == last and ran is not None:
            return ran
        if batch <= last:  # its name was still in the inbox, or a query goes back further than to its last batch
            past = Submission(None, submission.ids, submission.refused)
            past.refuse(EXPIRED, rows)
            return past
        if batch != last + 1 or batch <= after:
            raise gap(query, batch, last)
        self.last.pop(query, None)
        self._keep(query, batch, submission)
        return None

    def again(self, batch: Batch) -> Submission:
        """A batch that is in the log: where its rows went, as far as that is known by now."""
        assert batch.source is not None
        query, number = batch.source
        known, submission = self.last.pop(query, (-1, None))  # the query that was quiet for longest comes first
        if submission is None or known != number:
            submission = Submission.of(None, batch)
        self._keep(query, number, submission)
        return submission

    def _keep(self, query: str, batch: int, submission: Submission) -> None:
        self.last[query] = (batch, submission)
        if len(self.last) > self.queries_max:
            self.has_forgotten = True
            final = [each for each, (_, ran) in self.last.items() if ran.is_final()]
            del self.last[next((each for each in final if each.startswith(ONCE)), (final or list(self.last))[0])]

    def describe(self, first: int) -> dict[str, Any]:
        """What a snapshot keeps: per query its last batch, and where those of its rows are that came before the epoch
        with the number `first`. What came later is found in the log again."""
        return {
            query: [
                batch,
                submission.ids,
                {row: msgspec.structs.astuple(failure) for row, failure in submission.refused.items()},
                [
                    [epoch.number if isinstance(epoch, Epoch) else 0, *rows]
                    for epoch, *rows in submission.stretches
                    if isinstance(epoch, Failure) or epoch.number < first
                ],
            ]
            for query, (batch, submission) in self.last.items()
        }

    def restore(self, described: dict[str, Any], epochs: dict[int, Epoch], has_forgotten: bool) -> None:
        """`epochs` are those whose replies are still kept; rows of others are answered by a failure."""
        self.has_forgotten = has_forgotten
        for query, (batch, ids, refused, stretches) in described.items():
            submission = Submission(None, ids, {row: Failure(*failure) for row, failure in refused.items()})
            for number, start, stop in stretches:
                if number in epochs:
                    submission.add(epochs[number], start, stop)
                else:
                    submission.refuse(EXPIRED, stop - start)
            self.last[query] = (batch, submission)


def gap(query: str, batch: int, last: int) -> StreamError:
    return StreamError(
        f"query {query} sent batch {batch}, but {last + 1} was expected: its checkpoint belongs to another run of this "
        "app, whose state is gone. Start the query with a new checkpoint location"
    )


EXPIRED = Failure(
    ReplyExpired.code, ReplyExpired.__name__, "the batch ran, but its replies are no longer kept (reply_retention_us)"
)


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
        self._take(ids, first)
        return True

    def _take(self, ids: list[str], first: int) -> None:
        for row, request_id in enumerate(ids, start=first):
            if "/" in request_id and request_id not in self.singles:
                stem = request_id.rpartition("/")[0]
                self.stems[stem] = self.stems.get(stem, 0) + 1
            self.singles[request_id] = row

    def find(self, request_id: str) -> tuple[Epoch, int] | None:
        row = self.singles.get(request_id)
        if row is None and "/" in request_id:
            stem, _, number = request_id.rpartition("/")
            run = self.runs.get(stem, range(0))
            if number.isdecimal() and len(number) < 19 and number == str(int(number)) and int(number) < len(run):
                row = run[int(number)]
        if row is None or row < self.epochs[0].first:
            return None
        epoch = self.epochs[bisect_right(self.epochs, row, key=lambda epoch: epoch.first) - 1]
        return epoch, row - epoch.first

    def adopt(self, epoch: Epoch) -> None:
        """An epoch of an earlier run, instead of the open one: its ids are taken again. If one was forgotten there and
        came again, the later use counts."""
        self.epochs[-1] = epoch
        row = epoch.first
        for ids, start, count, source, is_own in epoch.pieces:
            if not source and not is_own:
                epoch.has_ids = True
                if isinstance(ids, str):
                    self.runs[ids] = range(row - start, row + count)
                else:
                    self._take(ids, row)
                epoch.ids.append(ids)
            row += count

    def keep(self, epoch: Epoch) -> None:
        """The next open epoch. The one before is closed; if only source batches filled it, there are no ids to look up
        in it and it is not kept."""
        if self.epochs:
            self.kept += len(self.epochs[-1])
            if not self.epochs[-1].has_ids:
                self.kept -= len(self.epochs.pop())
        self.epochs.append(epoch)

    def forget(self, now_us: int) -> None:
        """Drop the oldest epochs that are no longer kept, a good part of them at a time."""
        if self.kept * 8 <= self.rows_max * 9 and (now_us - self.epochs[0].closed_us) * 8 <= self.retention_us * 9:
            return
        dropped = 0
        for epoch in self.epochs:
            if epoch.phase != FINAL or (self.kept <= self.rows_max and now_us - epoch.closed_us <= self.retention_us):
                break
            self.kept -= len(epoch)
            dropped += 1
        gone, self.epochs = self.epochs[:dropped], self.epochs[dropped:]
        for epoch in gone:
            for ids in epoch.ids:
                self._drop(ids)

    def _drop(self, ids: RequestIds) -> None:
        """Forget ids, except those that came again when their first row had been forgotten already."""
        floor = self.epochs[0].first
        if isinstance(ids, str):
            if ids in self.runs and self.runs[ids].stop <= floor:
                del self.runs[ids]
            return
        for request_id in ids:
            if self.singles.get(request_id, floor) < floor:
                del self.singles[request_id]
                if "/" in request_id:
                    stem = request_id.rpartition("/")[0]
                    self.stems[stem] -= 1
                    if not self.stems[stem]:
                        del self.stems[stem]


def take_apart(call: Any) -> tuple[Any, Any, Any] | BadRequest:
    if isinstance(call, tuple | list) and len(call) >= 2:
        return call[0], call[1], tuple(call[2:])
    return BadRequest(f"a call must be (function, key, *args), not {shown(call)}")


def failure_of(error: HeadraceError) -> Failure:
    return Failure(error.code, type(error).__name__, str(error))


def reuse(request_id: str, epoch: Epoch, row: int) -> Failure:
    """The refusal of a request id that came with another call than before."""
    call = f"{epoch.entries[row].name} of {shown(epoch.keys[row])}"
    return failure_of(RequestIdReused(f"request id {shown(request_id)} was used for another call: {call}"))
