"""`headrace.replies`: the replies, one row per request, as a stream or a table.

    spark.readStream.format("headrace.replies").load("bank-store")

Rules:
1. There is a row for each request that ran, in the order of the TIDs: it has a result, or it aborted and says why.
   Transactions without a request from outside (timers, schedules, sweeps) have no row.
2. Results are JSON, made without the app: see `plain` in wire/values.py.
3. Rows become columns many epochs at a time, in Arrow's own loops. Only values that are not numbers are handled one by
   one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.core.epoch import Piece
from headrace.durability.columns import KINDS
from headrace.durability.columns import join as cells_of
from headrace.durability.log.records import RepliesHeader, unpack_results
from headrace.spark.sources.epoch_streams import Epochs, EpochSource
from headrace.wire.messages import Failure
from headrace.wire.values import opened

ROWS = (
    "request_id string, tid long, epoch long, status string, result string, "
    "error string, error_type string, function string, key string, time timestamp"
)
SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string()),
        pa.field("tid", pa.int64()),
        pa.field("epoch", pa.int64()),
        pa.field("status", pa.string()),  # ok, aborted
        pa.field("result", pa.string()),  # as JSON; null if it aborted
        pa.field("error", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("function", pa.string()),  # where it was raised
        pa.field("key", pa.string()),
        pa.field("time", pa.timestamp("us", "UTC")),  # the log's time at which the epoch was closed
    ]
)
ROWS_MAX, BYTES_MAX = 50_000, 16 << 20  # of one record batch; more if a single result is larger
FEW = 16  # fewer rows are not worth a call of Arrow

_to_lines = msgspec.json.Encoder().encode_lines


class ReplyLog(Epochs):
    """The log of replies."""

    folder, what = "replies", "the replies"

    def batches(self, records: Iterator[tuple[int, bytes]], mark: Any = None) -> Iterator[pa.RecordBatch]:
        gathered = ReplyRows()
        for _, data in records:
            header, results = unpack_results(data)
            step = rows_at_once(results)
            for start in range(0, len(results), step):
                gathered.add(header, results[start : start + step], start)
                if gathered.rows >= ROWS_MAX or gathered.bytes >= BYTES_MAX:
                    yield gathered.batch()
                    gathered = ReplyRows()
        if gathered.rows:
            yield gathered.batch()


class RepliesSource(EpochSource):
    rows, epochs = ROWS, ReplyLog

    @classmethod
    def name(cls) -> str:
        return "headrace.replies"


class ReplyRows:
    """Rows of epochs that are collected for one record batch."""

    def __init__(self) -> None:
        self.rows = self.bytes = 0
        self._ids, self._results = Ids(), ResultTexts()
        self._tids: list[Any] = []
        self._epochs: list[tuple[int, int]] = []  # their numbers and times
        self._counts: list[int] = []
        self._failures: dict[int, Failure] = {}  # by row

    def add(self, header: RepliesHeader, results: Any, start: int) -> None:
        """Add the epoch's rows from `start` on, which have these results; skip those without a request from outside."""
        stop, at, wanted = start + len(results), 0, start  # rows from `wanted` up to `at` are to be added
        for piece in header.epoch.pieces:
            first, last = max(at, start), min(at + piece.size, stop)
            if first < last and piece.is_own:
                self._add(header, results[wanted - start : first - start], wanted)
                wanted = last
            elif first < last:
                self._ids.add(piece, first - at, last - at)
            at += piece.size
        self._add(header, results[wanted - start :], wanted)

    def _add(self, header: RepliesHeader, results: Any, first: int) -> None:
        count = len(results)
        if not count:
            return
        self._results.add(results)
        low, _, step = header.epoch.tids
        self._tids.append(np.arange(low + first * step, low + (first + count) * step, step))
        self._epochs.append((header.epoch.number, header.epoch.closed_us))
        self._counts.append(count)
        for row, failure in header.failures.items():
            if first <= row < first + count:
                self._failures[self.rows + row - first] = failure
        self.rows += count
        self.bytes += size_of(results)

    def batch(self) -> pa.RecordBatch:
        count, failures = self.rows, self._failures
        results, status = self._results.array(), pa.repeat("ok", count)
        errors: list[pa.Array] = [pa.nulls(count, pa.string())] * 4
        if failures:
            at = np.fromiter(failures, np.int64, len(failures))
            has_failed = np.zeros(count, np.bool_)
            has_failed[at] = True
            status = pc.if_else(has_failed, "aborted", "ok")
            results = pc.if_else(has_failed, pa.scalar(None, pa.string()), results)
            which = np.zeros(count, np.int64)
            which[at] = np.arange(len(failures))
            places = pa.array(which, mask=~has_failed)
            told = [(why.message, why.type, why.function, key_text(why.key)) for why in failures.values()]
            errors = [pa.array(column, pa.string()).take(places) for column in zip(*told, strict=True)]
        tids, (epochs, times) = np.concatenate(self._tids), np.repeat(self._epochs, self._counts, axis=0).T
        time = pa.array(times).cast(pa.timestamp("us", "UTC"))
        columns = [self._ids.array(), pa.array(tids), pa.array(epochs), status, results, *errors, time]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Ids:
    """Request ids: strings, and runs of "stem/7", "stem/8" that continue over many epochs."""

    def __init__(self) -> None:
        self._parts: list[pa.Array] = []
        self._texts: list[str | None] = []
        self._stem, self._run = "", range(0)

    def add(self, piece: Piece, first: int, last: int) -> None:
        """Add the ids of these rows of the piece."""
        ids = piece.ids
        if isinstance(ids, list):
            self._end_run()
            self._texts += ids[first:last]
        elif piece.position and not ids:  # of a stream, written before ids were kept
            self._end_run()
            self._texts += [None] * (last - first)
        elif ids == self._stem and piece.start + first == self._run.stop:
            self._run = range(self._run.start, piece.start + last)
        else:
            self._end_run()
            self._stem, self._run = ids, range(piece.start + first, piece.start + last)

    def array(self) -> pa.Array:
        self._end_run()
        self._end_texts()
        return pa.concat_arrays(self._parts)

    def _end_run(self) -> None:
        if len(self._run) < FEW:
            self._texts += [f"{self._stem}/{row}" for row in self._run]
        else:
            self._end_texts()
            numbers = pa.array(np.arange(self._run.start, self._run.stop)).cast(pa.string())
            self._parts.append(pc.binary_join_element_wise(f"{self._stem}/", numbers, ""))
        self._run = range(0)

    def _end_texts(self) -> None:
        if self._texts:
            self._parts.append(pa.array(self._texts, pa.string()))
            self._texts = []


class ResultTexts:
    """Sealed results as JSON: lists and Arrow columns as they come, values of the same kind together."""

    def __init__(self) -> None:
        self._parts: list[pa.Array] = []
        self._values: list[Any] = []
        self._columns: list[pa.Array] = []

    def add(self, results: Any) -> None:
        if isinstance(results, list):
            self._end_columns()
            self._values += results
            return
        self._end_values()
        if self._columns and self._columns[-1].type != results.type:
            self._end_columns()
        self._columns.append(results)

    def array(self) -> pa.Array:
        self._end_values()
        self._end_columns()
        return pa.concat_arrays(self._parts)

    def _end_values(self) -> None:
        if self._values:
            self._parts.append(texts_of(self._values))
            self._values = []

    def _end_columns(self) -> None:
        if self._columns:
            self._parts.append(column_texts(pa.concat_arrays(self._columns)))
            self._columns = []


def texts_of(values: list[Any]) -> pa.Array:
    """The JSON of sealed values: one line each, in a single call."""
    lines = _to_lines([opened(value) if type(value) is bytes else value for value in values])
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) - np.arange(len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    offsets[1:] = ends
    data = lines.replace(b"\n", b"")  # inside strings it is escaped
    return pa.Array.from_buffers(pa.string(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def column_texts(column: pa.Array) -> pa.Array:
    """The JSON of a column of sealed values, as durability/columns.py makes them."""
    if pa.types.is_struct(column.type):  # of several kinds: each value is in one of them
        return pc.coalesce(*map(column_texts, column.flatten()))
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    is_here = column.drop_null() if column.null_count else column
    if pa.types.is_large_binary(column.type) and pc.max(pc.binary_length(is_here)).as_py() == 1:
        return each_once(column)
    texts = texts_of(cells_of({kind_of(column): is_here}))
    if not column.null_count:
        return texts
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return texts.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def each_once(column: pa.Array) -> pa.Array:
    """For a column with few distinct values: None, True and False are one byte each, and occur often."""
    found = column.dictionary_encode()
    return texts_of(cells_of({"packed": found.dictionary})).take(found.indices)


def kind_of(column: pa.Array) -> str:
    return next(kind for kind, type in KINDS.items() if type == column.type)


def rows_at_once(results: Any) -> int:
    """How many of these rows fit into one record batch."""
    size = size_of(results)
    return max(1, len(results) if size <= BYTES_MAX else len(results) * BYTES_MAX // size)


def size_of(results: Any) -> int:
    if isinstance(results, list):
        return sum(len(each) for each in results if type(each) in (str, bytes))
    return int(results.nbytes)


def key_text(key: Any) -> str | None:
    if key is None:
        return None
    return key.hex() if isinstance(key, bytes) else str(key)
