"""Streams into transactions: every row of a DataFrame is a call.

Rules:
1. A micro-batch is known by (query id, batch id) and runs once, even if Spark repeats it: after a failure, a restart, a
   crash of either side, and also if the repeat has other partitions.
2. Rows keep their order within a partition, and partitions keep theirs.
3. A row that is not a valid call (no key, a wrong type) goes to the dead letters (`format("headrace.dead")`), with the
   reason; the stream goes on.
4. For Spark a batch is done when it is closed in the store and the one before it has run. So the engine works while
   Spark prepares the next one, and is never more than two batches behind.

It uses the Spark sink `headrace.calls` (calls.py), and since it knows the app it reports errors before the stream
starts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 the usual name
from pyspark.sql.streaming import StreamingQuery

from headrace.core.signature import Signature
from headrace.durability.inbox.arrow_rows import CARRIED, NAMED
from headrace.durability.inbox.sign_of_life import Watch
from headrace.durability.store import check_name, open_store
from headrace.errors import BadArguments, StreamError
from headrace.model.operator import Function
from headrace.runtime.driver import Driver
from headrace.spark.sources.calls import CallColumns, check_columns
from headrace.spark.sources.registry import register


def transact(
    df: DataFrame,
    function: Function | str | None = None,
    *,
    key: str,
    args: Sequence[str] | Mapping[str, str] = (),
    args_json: str | None = None,
    request_id: str | None = None,
    carry: Sequence[str] = (),
    runtime: Driver | None = None,
    store: str | None = None,
    name: str | None = None,
    checkpoint: str | None = None,
    trigger: dict[str, Any] | None = None,
) -> StreamingQuery | None:
    """Run each row of a DataFrame as the call `function(key, *args)`; `key` and `args` name columns. `args` is a list,
    or `{parameter: column}`; a parameter without a column takes its default.

    Without a `function` the rows name theirs, in a column `function` ("account.transfer") or in `operator` and
    `function`. `request_id` is a column with ids for the replies; the default is "<query>/<batch>/<row>". `carry` names
    columns that the replies show again, as JSON in their column `carried`. The engine is `runtime`, or the app that
    runs on the `store`. For a stream, Spark's own StreamingQuery is returned; `trigger` is Spark's, as in
    `{"availableNow": True}`; its checkpoint is kept in the store, under its `name`, unless you give a place. The rows
    of a table have all run when this returns; with a `name` they run once, however often it is called.
    """
    for what, given in (("args", args), ("carry", carry)):
        if isinstance(given, str):
            raise StreamError(f"{what} must be a list of column names: {what}=[{given!r}]")
    names = tuple(args) if isinstance(args, Mapping) else ()
    columns = tuple(args.values() if isinstance(args, Mapping) else args)
    wanted = CallColumns(name_of(function), key, columns, args_json or "", request_id or "", names=names)
    wanted.check(df.columns)
    check_columns(carry, df.columns)
    where = store_for(runtime, store)
    if runtime is not None and function is not None and not args_json:
        check_args(runtime.engine.program.find(function).signature, columns, names)
    register(df.sparkSession)
    options = {
        "path": where,
        "function": wanted.function,
        "key": "key",
        "args": json.dumps({name: NAMED + name for name in names} if names else list(wanted.arg_columns())),
        "argsJson": "args" if args_json else "",
        "requestId": "id" if request_id else "",
        "carry": CARRIED if carry else "",
    }
    rows = df.select(*columns_of(df, wanted), *carried(carry))
    if not df.isStreaming:
        if checkpoint is not None or trigger is not None:
            raise StreamError("this DataFrame is not a stream: checkpoint and trigger are for spark.readStream...")
        if name is not None:
            options["name"] = name
        rows.write.format("headrace.calls").mode("append").options(**options).save()
        return None
    options["checkpointLocation"] = checkpoint or checkpoint_in(where, name)
    writer = rows.writeStream.format("headrace.calls").options(**options)
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    query = writer.start()
    if runtime is None:
        threading.Thread(target=Watch(open_store(where)).wait, name="headrace-watch", daemon=True).start()
    return query


def check_args(signature: Signature, columns: Sequence[str], names: Sequence[str]) -> None:
    """StreamError if the function cannot be called with these columns."""
    if not names and not signature.takes(len(columns)):
        raise StreamError(f"{signature} cannot be called with the {len(columns)} columns {list(columns)}")
    try:
        signature.bind((), dict.fromkeys(names)) if names else ()
    except BadArguments as error:
        raise StreamError(str(error)) from None


def name_of(function: Function | str | None) -> str:
    if function is None:
        return ""
    return function.full_name if isinstance(function, Function) else str(function)


def store_for(runtime: Driver | None, store: str | None) -> str:
    if runtime is not None and store is not None:
        raise StreamError("pass either runtime=, or store= of a runtime that runs elsewhere, not both")
    where = store if runtime is None else runtime.store_url
    if where is None:
        raise StreamError(
            'transact needs a store: give the runtime one, as in Runtime(app, store="bank-store")'
            if runtime is not None
            else "pass runtime=, or store= (the path of the running app's store)"
        )
    return where


def checkpoint_in(where: str, name: str | None) -> str:
    """In the store, beside the state that it belongs to: neither is of use without the other."""
    if name is None or "://" in where:
        raise StreamError(
            'a stream needs a checkpoint, to continue after a restart: give it a name, as in name="transfers", and '
            "the checkpoint is kept in the store"
            if name is None
            else f"{where} is a bucket: give a folder for the stream's checkpoint, as in checkpoint=..."
        )
    return str(Path(where) / "checkpoints" / check_name(name))


def columns_of(df: DataFrame, wanted: CallColumns) -> list[Any]:
    """The columns that are used, under the names that a segment has."""
    columns = [F.col(quoted(wanted.key)).alias("key")]
    columns += [F.col(quoted(each)).alias(alias) for alias, each in wanted.arg_columns().items()]
    for given, alias in ((wanted.args_json, "args"), (wanted.request_id, "id")):
        if given:
            columns.append(F.col(quoted(given)).alias(alias))
    if not wanted.function:
        columns += [F.col(each) for each in ("operator", "function") if each in df.columns]
    return columns


def carried(columns: Sequence[str]) -> list[Any]:
    """The column of what is carried along: an object in JSON, as `from_json` reads it."""
    each = [F.col(quoted(column)).alias(column) for column in columns]
    return [F.to_json(F.struct(*each), {"ignoreNullFields": "false"}).alias(CARRIED)] if each else []


def quoted(column: str) -> str:
    """The quoted name of a column: Spark would take a.b for a field of a struct."""
    return f"`{column.replace('`', '``')}`"
