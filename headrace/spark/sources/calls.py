"""`format("headrace.calls")`: each row of a DataFrame is a call, from a stream or from a table.

    df.writeStream.format("headrace.calls").option("function", "account.transfer")
      .option("key", "src").option("args", "dst,amount").option("checkpointLocation", ...).start("bank-store")

Options: `function`, or a column `function` ("operator.function"), or columns `operator` and `function`, if rows call
different functions; `key`, the column of the keys; `args`, the columns of the arguments in order, or a JSON object of
them by the names of the parameters; or `argsJson`, one column with a JSON list or object; `requestId`, a column with
request ids; `carry`, a column with text that is found again in the column `carried` of `headrace.replies`; `name`, for
a table: see `TableWriter`; `patience`, how many seconds to wait until the batch has run (for a stream: the batch before
it). The default is 300. Or `callJson`, one column with whole calls in JSON, as POST /v1/call takes them: then the
columns `key` and `requestId` are used for calls that have none.

Each task writes its rows as segments into the store. The commit closes the batch in the inbox, by query and number,
where the engine takes it (durability/inbox/inbox.py). Rows of one partition keep their order; no row passes through the
driver.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.core.origin import BatchId
from headrace.core.source_batches import ONCE
from headrace.durability.identity import CURRENT, read_checked
from headrace.durability.inbox.arrow_rows import CARRIED, NAMED
from headrace.durability.inbox.inbox import (
    ClosedBatch,
    InboxSegment,
    await_finished,
    close_batch,
    discard,
    discard_repeat,
    segment_name,
    write_segment,
)
from headrace.durability.store import Store, check_name
from headrace.errors import ObjectMissing, StoreError, StreamError, UnknownFunction
from headrace.spark.sources.options import check_names, located, names, store_of, whole
from headrace.spark.tasks import freeze_gc, gathered

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # what Spark tells the tasks of a micro-batch
OPTIONS = ("function", "key", "args", "argsJson", "requestId", "callJson", "carry", "name", "patience")
SEGMENT_BYTES = 64 << 20
PATIENCE_S = 300


@dataclasses.dataclass(frozen=True)
class CallColumns:
    """The roles of the columns."""

    function: str
    key: str
    args: tuple[str, ...]
    args_json: str
    request_id: str
    call_json: str = ""
    names: tuple[str, ...] = ()  # of the parameters that the columns of `args` are for; by position if empty
    carry: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> CallColumns:
        args = names(options, "args")
        wanted = cls(
            options.get("function", ""),
            options.get("key", "" if options.get("callJson") else "key"),
            tuple(args.values() if isinstance(args, dict) else args),
            options.get("argsJson", ""),
            options.get("requestId", ""),
            options.get("callJson", ""),
            tuple(args) if isinstance(args, dict) else (),
            options.get("carry", ""),
        )
        if wanted.args and wanted.args_json:
            raise StreamError("give either args, the columns, or argsJson, one column with JSON, not both")
        if wanted.call_json and (wanted.function or wanted.args or wanted.args_json):
            raise StreamError("callJson holds the whole call: leave out function, args and argsJson")
        return wanted

    def columns(self) -> list[str]:
        wanted = (self.key, *self.args, self.args_json, self.request_id, self.call_json, self.carry)
        return [name for name in wanted if name]

    def check(self, columns: list[str]) -> None:
        check_columns(self.columns(), columns)
        if not self.function and not self.call_json and "function" not in columns:
            raise StreamError(
                "no function to call: name it, as in option function = account.transfer, or add a column function; "
                f"the columns are: {', '.join(columns)}"
            )

    def check_function(self, store: Store) -> None:
        """Check the function against what the store says about the app that runs on it."""
        if not self.function:
            return
        try:
            current = read_checked(store, CURRENT)
        except (ObjectMissing, ValueError):
            raise StreamError(
                f"{store.url} has not been opened by an app yet: start the app with this store first"
            ) from None
        known = current["functions"].get(self.function)
        if known is None:
            raise UnknownFunction(
                f"no function {self.function} in the app that runs on {store.url}; it has: "
                f"{', '.join(current['functions'])}"
            )
        least, most, parameters, *needed = known
        count = len(self.args)
        if self.names:
            self._check_names(f"{self.function}({parameters})", *needed)
            return
        if not self.args_json and not (least <= count and (most is None or count <= most)):
            raise StreamError(
                f"{self.function}({parameters}) cannot be called with the {count} columns {list(self.args)}"
            )

    def _check_names(self, signature: str, needed: dict[str, bool] | None = None) -> None:
        """`needed` has the parameters, and whether they must be given; an app of an older version did not tell."""
        if needed is None:
            return
        for name in self.names:
            if name not in needed:
                raise StreamError(f"{signature} has no parameter {name!r}")
        missing = [name for name, is_needed in needed.items() if is_needed and name not in self.names]
        if missing:
            raise StreamError(f"{signature} needs {', '.join(map(repr, missing))}: give it a column")

    def arg_columns(self) -> dict[str, str]:
        """The columns of the arguments, by their names in a segment."""
        if self.names:
            return {NAMED + name: column for name, column in zip(self.names, self.args, strict=True)}
        return {f"arg{at}": column for at, column in enumerate(self.args)}

    def columns_of(self, table: pa.Table) -> pa.Table:
        """The columns, as a segment has them."""
        columns: dict[str, Any] = {"key": table.column(self.key)} if self.key else {}
        columns |= {alias: table.column(name) for alias, name in self.arg_columns().items()}
        if self.args_json:
            columns["args"] = as_text(table.column(self.args_json))
        if self.request_id:
            columns["id"] = as_text(table.column(self.request_id))
        if self.carry:
            columns[CARRIED] = as_text(table.column(self.carry))
        if self.call_json:
            columns["call"] = table.column(self.call_json).cast(pa.binary())
            if self.key:
                columns["key"] = columns["key"].cast(pa.binary())
        elif not self.function:
            columns["function"] = full_names(table)
        return pa.table(columns)


def check_columns(wanted: Iterable[str], columns: list[str]) -> None:
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise StreamError(f"the stream has no column {', '.join(missing)}; it has: {', '.join(columns)}")


def as_text(column: Any) -> Any:
    """Bytes that are not valid Unicode stay bytes: then the row is refused, not the batch."""
    return column.cast(pa.string(), safe=False)


def full_names(table: pa.Table) -> Any:
    import pyarrow.compute as pc

    function = table.column("function")
    if "operator" not in table.column_names:
        return function
    return pc.binary_join_element_wise(table.column("operator"), function, ".")


@dataclasses.dataclass
class TaskCommit(WriterCommitMessage):
    """What one task has written."""

    query: str
    batch: int
    partition: int
    segments: list[InboxSegment]


class CallsSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace.calls"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise StreamError('calls cannot overwrite anything: write them with .mode("append")')
        return TableWriter(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamWriter(self.options, schema)


class CallsWriter:
    """What both kinds have in common. It is made in the driver and sent to the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        check_names(options, OPTIONS)
        self.options = located(options)
        self.wanted = CallColumns.of(options)
        self.wanted.check(schema.fieldNames())
        self.patience_s = whole(options, "patience", PATIENCE_S, 1)
        self.wanted.check_function(store_of(options))
        freeze_gc()

    def _write(self, iterator: Iterator[pa.RecordBatch], query: str, batch: int, partition: int) -> TaskCommit:
        store = store_of(self.options)
        segments = [
            write_segment(store, query, batch, partition, self.wanted.columns_of(rows))
            for rows in gathered(iterator, SEGMENT_BYTES)
        ]
        freeze_gc()
        return TaskCommit(query, batch, partition, segments)

    def _close(self, messages: list[WriterCommitMessage | None], batch: int) -> ClosedBatch:
        written = sorted(
            (message for message in messages if isinstance(message, TaskCommit)), key=lambda each: each.partition
        )
        assert written, "Spark makes a task also for a batch without any partition"
        segments = [segment for each in written for segment in each.segments]
        closed = ClosedBatch(written[0].query, batch, self.wanted.function, segments)
        store = store_of(self.options)
        if not close_batch(store, closed):
            discard_repeat(store, closed)  # it was closed before, by an attempt that Spark does not know of
        return closed


class StreamWriter(CallsWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommit:
        task = TaskContext.get()
        assert task is not None
        query, batch = task.getLocalProperty(QUERY), task.getLocalProperty(BATCH)
        if query is None or batch is None:
            raise StreamError("Spark did not pass the query's id: headrace.calls needs Spark 4.1 or later")
        return self._write(iterator, query, int(batch), task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        closed = self._close(messages, batchId)
        await_finished(store_of(self.options), BatchId(closed.source, batchId - 1), self.patience_s)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Also called when a commit fails, which may have closed the batch or may still do so (a bucket can carry out a
        request after it has reported a failure): then the segments stay and are deleted with the batch. If a task
        failed, there was no commit."""
        if all(isinstance(message, TaskCommit) for message in messages):
            return
        store = store_of(self.options)
        for message in messages:
            if isinstance(message, TaskCommit):
                discard(store, message.segments)


class TableWriter(CallsWriter, DataSourceArrowWriter):
    """A DataFrame that is not a stream is one batch of its own query. With the option `name` it is known by that name,
    and runs once however often it is written."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        name = options.get("name", "")
        if name.startswith(ONCE):
            raise StreamError(
                f"the name {name!r} starts with {ONCE!r}, which is reserved for generated names: give another name"
            )
        self.query = name or f"{ONCE}{uuid.uuid4()}"
        try:
            check_name(segment_name(BatchId(self.query, 0), 0))
        except StoreError:
            raise StreamError(
                f"{name!r} is not a valid name for a table of calls: use letters, digits and _.=+@-, and not too many "
                "of them"
            ) from None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommit:
        task = TaskContext.get()
        assert task is not None
        return self._write(iterator, self.query, 0, task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Returns when all rows are final."""
        await_finished(store_of(self.options), self._close(messages, 0).batch_id, self.patience_s)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """If all tasks have written their rows, the commit failed: whether the batch was closed, and has run since, is
        unknown, so the segments stay."""
        written = [message for message in messages if isinstance(message, TaskCommit)]
        if len(written) < len(messages):
            for message in written:
                discard(store_of(self.options), message.segments)
