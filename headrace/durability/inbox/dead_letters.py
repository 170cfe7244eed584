"""Dead letters: the rows of a batch that were refused, as a table for people to read and to repair.

dead/<source>@<number>   the refused rows of one batch, as an Arrow file
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import Batch
from headrace.durability.inbox.arrow_rows import NAMED, read_table, to_python
from headrace.durability.inbox.inbox import ClosedBatch, stem_of, waiting
from headrace.durability.store import Store
from headrace.wire.messages import id_of

DEAD = "dead"
DEAD_SCHEMA = pa.schema(
    [
        pa.field("query", pa.string()),
        pa.field("batch", pa.int64()),
        pa.field("row", pa.int64()),
        pa.field("request_id", pa.string()),
        pa.field("function", pa.string()),
        pa.field("key", pa.string()),  # key and arguments as JSON
        pa.field("args", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("error", pa.string()),
    ]
)


def write_dead_letters(store: Store, closed: ClosedBatch, batch: Batch, is_again: bool = False) -> None:
    """Writes the refused rows, for people, before the batch is logged. An engine that ended before that may have
    written others, under other limits. With `is_again` they are replaced: what the engine that logs it wrote counts."""
    name = f"{DEAD}/{stem_of(closed.batch_id)}"
    if not batch.refused and not (is_again and store.exists(name)):
        return
    found = dead_letters_of(store, closed, batch) if batch.refused else []  # not deleted: a crash could undo that
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, DEAD_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(found, DEAD_SCHEMA))
    if is_again:
        store.put(name, sink.getvalue().to_pybytes())
    else:
        store.create(name, sink.getvalue().to_pybytes())


def dead_letters_of(store: Store, closed: ClosedBatch, batch: Batch) -> list[dict[str, Any]]:
    at = sorted(batch.refused)
    whole = read_table(store, closed)
    assert whole is not None, "a batch without rows refuses none"
    table = whole.take(pa.array(at))
    columns = {column: to_python(table.column(column)) for column in table.column_names}
    rows = [{column: cells[number] for column, cells in columns.items()} for number in range(len(at))]
    return [
        {
            "query": closed.source,
            "batch": closed.number,
            "row": row,
            "request_id": id_of(batch.origin.ids, row),
            "function": closed.function or function_name(cells),
            "key": to_json(cells.get("key")),
            "args": json_args_of(cells) or to_json(args_of(cells)),
            "error_type": batch.refused[row].type,
            "error": batch.refused[row].message,
        }
        for row, cells in zip(at, rows, strict=True)
    ]


def to_json(value: Any) -> str:
    """The value as JSON, or its `repr` if JSON cannot hold it."""
    try:
        return msgspec.json.encode(value, enc_hook=repr).decode()
    except (ValueError, TypeError, OverflowError):
        return msgspec.json.encode(repr(value)).decode()


def function_name(cells: dict[str, Any]) -> str | None:
    """The function's name, as the row gives it."""
    name = cells.get("function")
    return name if name is None or type(name) is str else to_json(name)


def json_args_of(cells: dict[str, Any]) -> str | None:
    """Arguments that came as JSON. Of a message, its whole text, as its parts cannot be told apart."""
    message, args = cells.get("call"), cells.get("args")
    if message is None:
        return args if type(args) is str else None
    return message.decode(errors="replace") if type(message) is bytes else None


def args_of(cells: dict[str, Any]) -> list[Any] | dict[str, Any]:
    named = {name.removeprefix(NAMED): cell for name, cell in cells.items() if name.startswith(NAMED)}
    if named:
        return named
    names = [name for name in cells if name.startswith("arg") and name != "args"]
    return [cells[f"arg{at}"] for at in range(len(names))]


def dead_letter_names(store: Store, is_final: bool = True) -> list[str]:
    """Leaves out batches that are not final: an engine that takes one over may refuse other rows. A caller that knows
    that they are final passes `is_final=False` to get all."""
    names = store.list(f"{DEAD}/")
    if not is_final:
        return names
    hidden = {f"{DEAD}/{stem_of(batch)}" for batch in waiting(store)}  # listed second: what is gone is final
    return [name for name in names if name not in hidden]


def read_dead_letters(store: Store, name: str) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(store.get(name))).read_all()
