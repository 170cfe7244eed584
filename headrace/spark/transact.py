"""Streams into transactions: every row of a streaming DataFrame is a call.

Rules:
1. A micro-batch is known by (query id, batch id) and runs once: if Spark repeats it, after a sink that failed or a
   query that was restarted, the repeat gets the replies of the first run and nothing runs again.
2. The rows of a partition keep their order.
3. A row that cannot be a call (no key, a wrong type) is refused, with the reason among the replies; the stream goes on.

The engine runs in the driver. Its state lives as long as the runtime; a checkpoint of an earlier one is refused.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from headrace.core.epoch import Batch
from headrace.core.program import Entry
from headrace.errors import HeadraceError, StreamError
from headrace.model.operator import Function
from headrace.runtime.inprocess import Runtime
from headrace.wire.messages import Answers, id_of

LOG = logging.getLogger("headrace.spark")

Sink = Callable[[DataFrame, int], None]

REPLIES = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("tid", pa.int64()),  # null: refused, never logged
        pa.field("epoch", pa.int64()),
        pa.field("status", pa.string(), nullable=False),  # ok, aborted, refused
        pa.field("result", pa.string()),  # as JSON
        pa.field("error", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("function", pa.string()),  # where it was raised
        pa.field("key", pa.string()),
    ]
)


def transact(
    df: DataFrame,
    function: Function | str,
    *,
    key: str,
    args: Sequence[str] = (),
    runtime: Runtime,
    replies: Sink | None = None,
    name: str | None = None,
    checkpoint: str | None = None,
    trigger: dict[str, Any] | None = None,
) -> StreamingQuery:
    """Run each row of a streaming DataFrame as the call `function(key, *args)`, columns named by `key` and `args`.

    `replies(df, batch_id)` gets the replies of each micro-batch, in the order of its rows. `trigger` is Spark's, as in
    `{"availableNow": True}` or `{"processingTime": "1 second"}`. Returns Spark's own StreamingQuery.
    """
    entry = runtime.engine.program.find(function)
    check_stream(df, entry, key, args)
    started = threading.Event()
    query_id = ""

    def run_batch(rows: DataFrame, batch_id: int) -> None:
        started.wait()
        try:
            batch = admit(runtime, entry, rows.select(*map(quoted, (key, *args))).toArrow(), query_id, batch_id)
            answers = runtime.submit(batch).result()
            if replies is not None:
                replies(rows.sparkSession.createDataFrame(reply_table(answers, runtime)), batch_id)
        except HeadraceError:
            raise
        except Exception as error:
            # Spark matches the text of what is raised here against a pattern, and a long one (a Java stack trace inside
            # a Python one) overflows its stack: hand it the gist, and the whole to the log.
            LOG.debug("batch %s of query %s failed", batch_id, query_id, exc_info=True)
            gist = str(error).partition("\n")[0][:500]
            raise StreamError(f"batch {batch_id} failed: {type(error).__name__}: {gist}") from None

    writer = df.writeStream.foreachBatch(run_batch)
    for option, value in (("checkpointLocation", checkpoint), ("queryName", name)):
        if value is not None:
            writer = writer.option(option, value)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    try:
        query = writer.start()
        query_id = query.id
    finally:
        started.set()
    return query


def quoted(column: str) -> str:
    """The name of a column, whatever is in it: Spark would take a.b for a field of a struct."""
    return f"`{column.replace('`', '``')}`"


def check_stream(df: DataFrame, entry: Entry, key: str, args: Sequence[str]) -> None:
    if not df.isStreaming:
        raise StreamError("transact runs on a streaming DataFrame (spark.readStream...), and this one is not")
    if isinstance(args, str):
        raise StreamError(f"args is a list of column names: args=[{args!r}]")
    missing = [column for column in (key, *args) if column not in df.columns]
    if missing:
        raise StreamError(f"the stream has no column {', '.join(missing)}; it has: {', '.join(df.columns)}")
    if not entry.signature.takes(len(args)):
        raise StreamError(f"{entry.signature} cannot be called with the {len(args)} columns {list(args)}")


def admit(runtime: Runtime, entry: Entry, table: pa.Table, query_id: str, batch_id: int) -> Batch:
    """One micro-batch as a batch of calls."""
    keys, *columns = (in_python(column) for column in table.columns)
    rows: list[tuple[Any, ...]] = list(zip(*columns, strict=True)) if columns else [()] * len(keys)
    if not entry.signature.is_scalar:
        rows = list(map(entry.signature.convert, rows))
    source = (query_id, batch_id)
    return runtime.admission.admit_columns(f"{query_id}/{batch_id}", entry.function, keys, rows, source)


def in_python(column: pa.ChunkedArray) -> list[Any]:
    values = column.to_pylist(maps_as_pydicts="strict")
    return list(map(in_utc, values)) if "timestamp" in str(column.type) else values


def in_utc(value: Any) -> Any:
    """Arrow hands out timestamps in a named zone; a value has a fixed offset."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is None else value.astimezone(datetime.UTC)
    if isinstance(value, list):
        return list(map(in_utc, value))
    if isinstance(value, dict):
        return {in_utc(key): in_utc(item) for key, item in value.items()}
    return value


def reply_table(answers: Answers, runtime: Runtime) -> pa.Table:
    failures, count = answers.failures, len(answers.tids)
    unseal, encode = runtime.engine.program.values.unseal, msgspec.json.Encoder(enc_hook=repr).encode
    status, error, kind, function, at_key = ["ok"] * count, *([None] * count for _ in range(4))
    results: list[str | None] = [encode(unseal(result)).decode() for result in answers.results]
    for at, failure in failures.items():
        status[at] = "refused" if answers.tids[at] is None else "aborted"
        results[at] = None
        error[at], kind[at], function[at] = failure.message, failure.type, failure.function
        if failure.key is not None:
            at_key[at] = failure.key.hex() if isinstance(failure.key, bytes) else str(failure.key)
    ids = [id_of(answers.ids, at) for at in range(count)]
    columns = [ids, answers.tids, answers.epochs, status, results, error, kind, function, at_key]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, REPLIES, strict=True)], schema=REPLIES
    )
