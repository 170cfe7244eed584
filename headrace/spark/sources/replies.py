"""`headrace.replies`: the replies, one row per request, as a stream or a table.

    spark.readStream.format("headrace.replies").load("bank-store")

Rules:
1. There is a row for each request that ran, in the order of the TIDs: it has a result, or it aborted and says why.
   Transactions without a request from outside (timers, schedules, sweeps) have no row.
2. Results are JSON, made without the app: see `plain` in wire/values.py. With a `function` there are only the replies
   of its calls; with the app, `option("as", "columns")` gives the results in the function's declared type.
3. Rows become columns many epochs at a time, in Arrow's own loops. Only values that are not numbers are handled one by
   one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.core.epoch import Piece
from headrace.durability.columns import join as cells_of
from headrace.durability.columns import kind_of, kinds_of, split
from headrace.durability.identity import CURRENT, read_checked, read_fingerprint
from headrace.durability.log.changelog import spread_array
from headrace.durability.log.records import RepliesHeader, unpack_results
from headrace.durability.reading.column_types import TableShape, records_of, shape_of
from headrace.durability.reading.typed import Misfits, one_array
from headrace.durability.store import Store
from headrace.errors import BadValue, StreamError
from headrace.model.app import App, hints_of
from headrace.model.fingerprint import fingerprint, type_text
from headrace.runtime.loading import load
from headrace.spark.sources.epoch_streams import Epochs, EpochSource
from headrace.spark.sources.key_column import key_column, key_type_of_store
from headrace.spark.sources.options import bad_rows_are_null, one_of, plain_places
from headrace.spark.sources.reply_calls import Requests, requests_of
from headrace.wire.messages import Failure
from headrace.wire.values import opened


def raised_in(key: pa.DataType) -> pa.DataType:
    """Where it failed: the function that raised, the key of its entity, and the file and line (of a bug only)."""
    return pa.struct([("function", pa.string()), ("key", key), ("where", pa.string())])


def schema_of(key: pa.DataType, result: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            pa.field("request_id", pa.string()),
            pa.field("tid", pa.int64()),
            pa.field("epoch", pa.int64()),
            pa.field("function", pa.string()),  # that was called
            pa.field("key", key),
            pa.field("status", pa.string()),  # ok, aborted
            pa.field("result", result),  # null if it aborted
            pa.field("error", pa.string()),
            pa.field("error_type", pa.string()),
            pa.field("raised_in", raised_in(key)),
            pa.field("carried", pa.string()),  # the columns that the stream carries along, in JSON
            pa.field("time", pa.timestamp("us", "UTC")),  # the log's time at which the epoch was closed
        ]
    )


ROWS_MAX, BYTES_MAX = 50_000, 16 << 20  # of one record batch; more if a single result is larger
FEW = 16  # fewer rows are not worth a call of Arrow

_to_lines = msgspec.json.Encoder().encode_lines


class ReplyLog(Epochs):
    """The log of replies."""

    folder, what = "replies", "the replies"
    option_names = ("function", "app", "as", "decimals", "badRows")

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.function, self.app = options.get("function"), options.get("app")
        self.is_typed = one_of(options, "as", ("json", "columns")) == "columns"
        self.plain, self.nulls_bad_rows = plain_places(options), bad_rows_are_null(options)
        self.shape: TableShape | None = None  # of results; None: as JSON
        if self.is_typed and (self.function is None or self.app is None):
            raise StreamError(
                'typed results need one function and its app: name them with .option("function", "account.deposit") '
                'and .option("app", "module:attribute")'
            )

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.key_type or pa.string(), pa.string() if self.shape is None else self.shape.whole)

    def look(self, store: Store) -> None:
        if self.key_type is None:
            self.key_type = key_type_of_store(store)
        if self.app is not None and self.function is not None:
            self.shape = self._declared(load(self.app), self.function)
        elif self.function is not None:
            current = read_fingerprint(store, read_checked(store, CURRENT)["fingerprint"])
            if self.function not in current.functions:
                raise unknown_function(self.function, current.functions)

    def _declared(self, app: App, function: str) -> TableShape | None:
        """The shape of the function's results, if they are to be typed."""
        named = {each.full_name: each for each in app.functions}
        if function not in named:
            raise unknown_function(function, named)
        if not self.is_typed:
            return None
        hints = hints_of(named[function])
        if "return" not in hints:
            raise StreamError(
                f'{function} does not declare its result: declare it, as in "-> int", or leave out option("as", '
                '"columns")'
            )
        return shape_of(type_text(hints["return"]), records_of(fingerprint(app)), self.plain)

    def batches(self, records: Iterator[tuple[int, bytes]], mark: Any = None) -> Iterator[pa.RecordBatch]:
        gathered = self._gathered()
        for epoch, data in records:
            header, results = unpack_results(data)
            pieces = header.epoch.pieces
            requests = requests_of(data, pieces, self.key_type or pa.string())
            wanted = None if self.function is None else requests.calls_of(self.function, pieces, epoch)
            step = rows_at_once(results)
            for start in range(0, len(results), step):
                gathered.add(header, requests, results[start : start + step], start, wanted)
                if gathered.rows >= ROWS_MAX or gathered.bytes >= BYTES_MAX:
                    yield gathered.batch()
                    gathered = self._gathered()
        if gathered.rows:
            yield gathered.batch()

    def _gathered(self) -> ReplyRows:
        results = None if self.shape is None else TypedResults(self.shape, self.nulls_bad_rows, str(self.function))
        return ReplyRows(self.schema, results)


def unknown_function(name: str, known: Iterable[str]) -> StreamError:
    return StreamError(f"no function {name!r}; there are: {', '.join(known) or 'none'}")


class RepliesSource(EpochSource):
    epochs = ReplyLog

    @classmethod
    def name(cls) -> str:
        return "headrace.replies"


class ReplyRows:
    """Rows of epochs that are collected for one record batch."""

    def __init__(self, schema: pa.Schema, results: TypedResults | None = None) -> None:
        self.rows = self.bytes = 0
        self.schema = schema
        self._ids, self._results = Ids(), ResultTexts() if results is None else results
        self._requests: list[Requests] = []
        self._tids: list[Any] = []
        self._epochs: list[tuple[int, int]] = []  # their numbers and times
        self._counts: list[int] = []
        self._failures: dict[int, Failure] = {}  # by row
        self._wanted: list[Any] = []  # which rows are, if not all

    def add(self, header: RepliesHeader, requests: Requests, results: Any, start: int, wanted: Any = None) -> None:
        """Add the epoch's rows from `start` on, which have these results; skip those without a request from outside.
        `requests` has all rows of the epoch, and `wanted` says which of them are, if not all."""
        stop, at, begin = start + len(results), 0, start  # rows from `begin` up to `at` are to be added
        for piece in header.epoch.pieces:
            first, last = max(at, start), min(at + piece.size, stop)
            if first < last and piece.is_own:
                self._add(header, requests, results[begin - start : first - start], begin, wanted)
                begin = last
            elif first < last:
                self._ids.add(piece, first - at, last - at)
            at += piece.size
        self._add(header, requests, results[begin - start :], begin, wanted)

    def _add(self, header: RepliesHeader, requests: Requests, results: Any, first: int, wanted: Any) -> None:
        count = len(results)
        if not count:
            return
        low, _, step = header.epoch.tids
        tids = np.arange(low + first * step, low + (first + count) * step, step)
        failed = {row - first: why for row, why in header.failures.items() if first <= row < first + count}
        if wanted is not None:
            self._wanted.append(wanted[first : first + count])
        if isinstance(self._results, TypedResults):
            is_there = np.ones(count, np.bool_) if wanted is None else wanted[first : first + count].copy()
            is_there[list(failed)] = False
            self._results.add(results, is_there, tids)
        else:
            self._results.add(results)
        self._requests.append(Requests(*(column[first : first + count] for column in requests)))
        self._tids.append(tids)
        self._epochs.append((header.epoch.number, header.epoch.closed_us))
        self._counts.append(count)
        self._failures |= {self.rows + row: why for row, why in failed.items()}
        self.rows += count
        self.bytes += size_of(results)

    def batch(self) -> pa.RecordBatch:
        count, failures = self.rows, self._failures
        results, status = self._results.array(), pa.repeat("ok", count)
        errors: list[pa.Array] = [
            *[pa.nulls(count, pa.string())] * 2,
            pa.nulls(count, self.schema.field("raised_in").type),
        ]
        if failures:
            at = np.fromiter(failures, np.int64, len(failures))
            has_failed = np.zeros(count, np.bool_)
            has_failed[at] = True
            status = pc.if_else(has_failed, "aborted", "ok")
            if not isinstance(self._results, TypedResults):
                results = pc.if_else(has_failed, pa.scalar(None, pa.string()), results)
            which = np.zeros(count, np.int64)
            which[at] = np.arange(len(failures))
            places = pa.array(which, mask=~has_failed)
            errors = [column.take(places) for column in self._errors()]
        tids, (epochs, times) = np.concatenate(self._tids), np.repeat(self._epochs, self._counts, axis=0).T
        time = pa.array(times).cast(pa.timestamp("us", "UTC"))
        functions, keys, carried = map(pa.concat_arrays, zip(*self._requests, strict=True))
        cells = [self._ids.array(), pa.array(tids), pa.array(epochs), functions, keys, status, results, *errors]
        made = pa.RecordBatch.from_arrays([*cells, carried, time], schema=self.schema)
        return made.filter(pa.array(np.concatenate(self._wanted))) if self._wanted else made

    def _errors(self) -> list[pa.Array]:
        """The failures: message, type, and where they were raised."""
        failures = self._failures.values()
        key_type = self.schema.field("key").type
        where = [
            pa.array([why.function for why in failures], pa.string()),
            key_column([why.key for why in failures], key_type, "a request that was aborted"),
            pa.array([why.where for why in failures], pa.string()),
        ]
        raised = pa.StructArray.from_arrays(where, fields=list(raised_in(key_type)))
        return [
            pa.array([why.message for why in failures], pa.string()),
            pa.array([why.type for why in failures], pa.string()),
            raised,
        ]


class TypedResults:
    """Sealed results of one function, in its declared type."""

    def __init__(self, shape: TableShape, nulls_bad_rows: bool, function: str) -> None:
        self.shape, self.nulls_bad_rows, self.function = shape, nulls_bad_rows, function
        self._parts: list[pa.Array] = []

    def add(self, results: Any, is_there: Any, tids: Any) -> None:
        """`is_there` says which rows have a result."""
        where = np.flatnonzero(is_there)
        if not len(where):
            self._parts.append(pa.nulls(len(is_there), self.shape.whole))
            return
        kept = [results[row] for row in where.tolist()] if isinstance(results, list) else results.take(pa.array(where))
        columns = split(kept) if isinstance(kept, list) else kinds_of(kept)

        def named(row: int) -> str:
            return f"the result of {self.function} with TID {tids[where[row]]}"

        try:
            made = one_array(columns, self.shape, Misfits(named, self.nulls_bad_rows))
        except BadValue as error:
            raise StreamError(str(error)) from None
        self._parts.append(spread_array(made, is_there))

    def array(self) -> pa.Array:
        return pa.concat_arrays(self._parts)


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


def rows_at_once(results: Any) -> int:
    """How many of these rows fit into one record batch."""
    size = size_of(results)
    return max(1, len(results) if size <= BYTES_MAX else len(results) * BYTES_MAX // size)


def size_of(results: Any) -> int:
    if isinstance(results, list):
        return sum(len(each) for each in results if type(each) in (str, bytes))
    return int(results.nbytes)
