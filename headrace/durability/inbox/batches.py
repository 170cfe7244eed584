"""A closed batch of calls, from its segments: columns of Arrow become keys and arguments, row by row the same as from a
client. What cannot be a call is refused, with the reason, and the rest goes on.

    dead/<query>@<batch>   the rows that were refused, as an Arrow file: a table to look at and to mend

The same batch gives the same calls whenever it is read: with the code and the limits that it was closed under.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.config import Config
from headrace.core.epoch import Batch
from headrace.core.ingress import Admission
from headrace.core.program import Program
from headrace.durability.inbox.inbox import Closed, read_segment, stem_of, waiting
from headrace.durability.store import Store
from headrace.errors import AppChanged, BadArguments, BadMessage, BadRequest
from headrace.wire.messages import Run, id_of
from headrace.wire.values import shown

DEAD = "dead"
SHELF_BATCHES = 4
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
Row = tuple[Any, ...]


def read_calls(store: Store, closed: Closed, admission: Admission) -> Batch:
    """The batch, admitted. The rows that were refused are in its `refused`."""
    tables = [read_segment(store, segment) for segment in closed.segments if segment.rows]
    batch = admit(closed, pa.concat_tables(tables, promote_options="default") if tables else None, admission)
    batch.closed = closed
    batch.stored = msgspec.msgpack.encode((closed, judged_by(admission.program.config), sorted(batch.refused)))
    return batch


def read_again(
    store: Store, closed: Closed, program: Program, limits: dict[str, int], refused: Collection[int]
) -> Batch:
    """A batch that is in the log: the same rows are refused as then, whatever the configuration is now."""
    judge = program
    if limits != judged_by(program.config):
        judge = Program(program.app, dataclasses.replace(program.config, **limits))
    batch = read_calls(store, closed, Admission(judge))
    if batch.refused.keys() != set(refused):
        raise AppChanged(
            f"batch {closed.batch} of query {closed.query} in {store.url} was logged by other code, which refused "
            f"{len(refused)} of its rows; this code refuses {len(batch.refused)}. Start it with the code that logged it"
        )
    if judge is not program:
        batch.entries = [program.numbered[entry.number] for entry in batch.entries]
    return batch


class BatchCache:
    """For a worker, which is told where the rows of an epoch are: it reads them itself, and keeps the last batches, as
    many epochs take from each."""

    def __init__(self, store: Store, program: Program) -> None:
        self.store, self.program = store, program
        self._batches: dict[bytes, Batch] = {}

    def fill(self, run: Run) -> Run:
        """The same with its rows."""
        functions: list[int] = []
        keys: list[Any] = []
        args: list[Row] = []
        for stored, start, size in run.stored or ():
            batch = self._find(stored)
            functions += [entry.number for entry in batch.entries[start : start + size]]
            keys += batch.keys[start : start + size]
            args += batch.args[start : start + size]
        number = functions[0] if len(set(functions)) == 1 else functions
        return msgspec.structs.replace(run, functions=number, keys=keys, args=args, stored=None)

    def _find(self, stored: bytes) -> Batch:
        batch = self._batches.pop(stored, None)
        if batch is None:
            closed, limits, refused = msgspec.msgpack.decode(stored, type=tuple[Closed, dict[str, int], set[int]])
            batch = read_again(self.store, closed, self.program, limits, refused)
            if len(self._batches) >= SHELF_BATCHES:
                del self._batches[next(iter(self._batches))]
        self._batches[stored] = batch  # the last one that was asked for comes last
        return batch


def judged_by(config: Config) -> dict[str, int]:
    """What decides which rows are refused."""
    return config.limits() | {"request_id_bytes_max": config.request_id_bytes_max}


def admit(closed: Closed, table: pa.Table | None, admission: Admission) -> Batch:
    stem = f"{closed.query}/{closed.batch}"
    if table is None:
        return Batch(stem, [], [], [], source=closed.source)
    if "call" in table.column_names:
        return admit_messages(closed, table, admission)
    keys = in_python(table.column("key"))
    if "id" in table.column_names or "args" in table.column_names or not closed.function:
        return admit_mixed(closed, table, keys, admission)
    rows = rows_of(table)
    try:
        signature = admission.program.find(closed.function).signature
    except BadRequest:
        return admission.admit_columns(stem, closed.function, keys, rows, closed.source)  # refuses them all
    if not signature.is_scalar:
        rows = list(map(signature.convert, rows))
    return admission.admit_columns(stem, closed.function, keys, rows, closed.source)


def admit_mixed(closed: Closed, table: pa.Table, keys: list[Any], admission: Admission) -> Batch:
    """Rows that call different functions, have ids of their own, or arguments in JSON: one by one."""
    count, stem = table.num_rows, f"{closed.query}/{closed.batch}"
    functions = in_python(table.column("function")) if not closed.function else [closed.function] * count
    given = in_python(table.column("args")) if "args" in table.column_names else rows_of(table)
    ids = in_python(table.column("id")) if "id" in table.column_names else None
    calls: list[Any] = []
    for at, (function, key, args) in enumerate(zip(functions, keys, given, strict=True)):
        try:
            if ids is not None and ids[at] is not None:
                admission.check_id(ids[at])
            calls.append((function, key, arguments(function, args, admission)))
        except BadRequest as error:
            calls.append(error)
    named = (
        stem
        if ids is None
        else [id_of(stem, at) if given_id is None else str(given_id) for at, given_id in enumerate(ids)]
    )
    return admission.admit_rows(named, calls, closed.source)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A whole call in JSON, as the HTTP gateway takes it. The row may have an id and a key for those without."""

    function: str
    key: str | int | None = None
    args: list[Any] = []
    request_id: str | None = None


class UnparsedMessage(msgspec.Struct):
    """What can be known of a message that is no call."""

    request_id: str | None = None


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_message, _only_id = msgspec.json.Decoder(Message), msgspec.json.Decoder(UnparsedMessage)


def admit_messages(closed: Closed, table: pa.Table, admission: Admission) -> Batch:
    """Rows that are messages: whatever is in one that is no call, it is refused alone."""
    stem, nothing = f"{closed.query}/{closed.batch}", [None] * table.num_rows
    named = in_python(table.column("id")) if "id" in table.column_names else nothing
    keyed = in_python(table.column("key")) if "key" in table.column_names else nothing
    ids, calls = [], []
    for at, data in enumerate(in_python(table.column("call"))):
        given, call = read_message(data, keyed[at], admission)
        ids.append(given or named[at] or id_of(stem, at))
        calls.append(call)
    return admission.admit_rows(ids, calls, closed.source)


def read_message(data: bytes | None, key: bytes | None, admission: Admission) -> tuple[str | None, Any]:
    """Its request id, if it has one, and the call, or the reason why there is none."""
    given = None
    try:
        message = _message.decode(data or b"")
        if message.request_id:
            admission.check_id(message.request_id)
            given = message.request_id
        named = message.key if message.key is not None or key is None else key.decode()
        return given, (message.function, named, arguments(message.function, tuple(message.args), admission))
    except UNREADABLE as error:
        with suppress(*UNREADABLE, BadRequest):
            claimed = _only_id.decode(data or b"").request_id
            admission.check_id(claimed)
            given = claimed
        return given, BadMessage(f"not a call: {error}" if data else "not a call: the message is empty")
    except BadRequest as error:
        return given, error


def arguments(function: Any, args: Any, admission: Admission) -> Row:
    """As many as the function takes: columns that it has no use for are null."""
    if args is None or type(args) is str:
        try:
            args = msgspec.json.decode(args or "[]")
        except UNREADABLE as error:
            raise BadArguments(f"the arguments {shown(args)} are not valid JSON: {error}") from None
        if type(args) is not list:
            raise BadArguments(f"the arguments {shown(args)} are not a JSON list")
        args = tuple(args)
    if type(args) is not tuple:
        raise BadArguments(f"the arguments must be a JSON list, not {shown(args)}")
    signature = admission.program.find(function).signature
    while len(args) > signature.most and not signature.variadic and args[-1] is None:
        args = args[:-1]
    return args if signature.is_scalar else signature.convert(args)


# --- from Arrow to Python ---------------------------------------------------------------------------------------------


def rows_of(table: pa.Table) -> list[Row]:
    width = sum(name.startswith("arg") for name in table.column_names)
    columns = [in_python(table.column(f"arg{at}")) for at in range(width)]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


class Unreadable:
    """A cell that Python has no value for: a text that is no Unicode, a day after the year 9999, a map with a key
    twice. It fits no function, so its row is refused, and the others are not."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"a value that cannot be read ({self.why})"


def in_python(column: pa.ChunkedArray) -> list[Any]:
    try:
        return all_in_python(column)
    except (ValueError, OverflowError, KeyError, pa.ArrowException):
        return [in_utc(cell) for cell in map(one_in_python, column)]


def one_in_python(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError, pa.ArrowException) as error:
        return Unreadable(f"{cell.type}: {error}")


def all_in_python(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if not column.null_count and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_text(kind)):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return list(map(in_utc, values)) if "timestamp" in str(kind) else values


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def in_utc(value: Any) -> Any:
    """Arrow hands out timestamps in a named zone; a value has a fixed offset."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is None else value.astimezone(datetime.UTC)
    if isinstance(value, list):
        return list(map(in_utc, value))
    if isinstance(value, dict):
        return {in_utc(key): in_utc(item) for key, item in value.items()}
    return value


# --- dead letters -----------------------------------------------------------------------------------------------------


def keep_dead(store: Store, closed: Closed, batch: Batch, is_again: bool = False) -> None:
    """The rows that were refused, for people. Written before the batch is logged. An engine that ended before that may
    have written others, under other limits: if it is done again, the last one counts, which logs it."""
    name = f"{DEAD}/{stem_of(closed.source)}"
    if not batch.refused and not (is_again and store.exists(name)):
        return
    found = letters_of(store, closed, batch) if batch.refused else []  # none: what is deleted might come back
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, DEAD_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(found, DEAD_SCHEMA))
    if is_again:
        store.put(name, sink.getvalue().to_pybytes())
    else:
        store.create(name, sink.getvalue().to_pybytes())


def letters_of(store: Store, closed: Closed, batch: Batch) -> list[dict[str, Any]]:
    tables = [read_segment(store, segment) for segment in closed.segments if segment.rows]
    at = sorted(batch.refused)
    table = pa.concat_tables(tables, promote_options="default").take(pa.array(at))
    columns = {column: in_python(table.column(column)) for column in table.column_names}
    rows = [{column: cells[number] for column, cells in columns.items()} for number in range(len(at))]
    return [
        {
            "query": closed.query,
            "batch": closed.batch,
            "row": row,
            "request_id": id_of(batch.given_ids, row),
            "function": closed.function or name_in(cells),
            "key": for_people(cells.get("key")),
            "args": text_of(cells) or for_people(args_of(cells)),
            "error_type": batch.refused[row].type,
            "error": batch.refused[row].message,
        }
        for row, cells in zip(at, rows, strict=True)
    ]


def for_people(value: Any) -> str:
    """As JSON; what has none, as Python shows it."""
    try:
        return msgspec.json.encode(value, enc_hook=repr).decode()
    except (ValueError, TypeError, OverflowError):
        return msgspec.json.encode(repr(value)).decode()


def name_in(cells: dict[str, Any]) -> str | None:
    """Of the function, as the row has it."""
    name = cells.get("function")
    return name if name is None or type(name) is str else for_people(name)


def text_of(cells: dict[str, Any]) -> str | None:
    """Arguments that came as JSON; of a message all there is, as nobody knows what was meant to be what."""
    message, args = cells.get("call"), cells.get("args")
    if message is None:
        return args if type(args) is str else None
    return message.decode(errors="replace") if type(message) is bytes else None


def args_of(cells: dict[str, Any]) -> list[Any]:
    names = [name for name in cells if name.startswith("arg") and name != "args"]
    return [cells[f"arg{at}"] for at in range(len(names))]


def dead_names(store: Store, is_final: bool = True) -> list[str]:
    """Without those of batches that are under way: an engine that takes one over may judge its rows otherwise. Who has
    seen that they are not any more asks for all."""
    names = store.list(f"{DEAD}/")
    if not is_final:
        return names
    hidden = {f"{DEAD}/{stem_of(source)}" for source in waiting(store)}  # looked at afterwards: what is gone is final
    return [name for name in names if name not in hidden]


def read_dead(store: Store, name: str) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(store.get(name))).read_all()
