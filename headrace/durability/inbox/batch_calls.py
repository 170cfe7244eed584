"""Turns the rows of a closed batch into calls, and checks them as a client's calls are checked. A row that cannot be a
call is refused with the reason, and the rest of the batch runs.

A batch that is in the log gives the same calls whenever it is read: the limits that were used are logged with it, what
was refused stays refused, and fields that did not exist then are at their defaults. Code that refuses more is refused
(`AppChanged`).

Never here: Arrow's types (arrow_rows.py), where refused rows go (dead_letters.py).
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.config import Config
from headrace.core.admission import Admission, failure_of
from headrace.core.epoch import Batch
from headrace.core.json_calls import UNREADABLE, converted, read_arguments, read_call
from headrace.core.origin import FromSource
from headrace.core.program import Args, Entry, Program
from headrace.core.signature import Signature
from headrace.durability.added_fields import reset
from headrace.durability.inbox.arrow_rows import CARRIED, Row, named_of, read_table, rows_of, to_python
from headrace.durability.inbox.inbox import ClosedBatch
from headrace.durability.store import Store
from headrace.errors import AppChanged, BadArguments, BadMessage, BadRequest
from headrace.wire.messages import id_of
from headrace.wire.values import shown


class StoredRows(NamedTuple):
    """What a reader needs to get the same calls from a closed batch: the bytes of `FromSource.stored`."""

    closed: ClosedBatch
    limits: dict[str, int]  # the settings that decided which rows are refused
    refused: list[int]
    added: dict[str, list[str]] = {}  # noqa: RUF012 by type: the fields that did not exist then


_stored_decoder = msgspec.msgpack.Decoder(StoredRows)


def decode_stored(stored: bytes) -> StoredRows:
    return _stored_decoder.decode(stored)


def read_calls(store: Store, closed: ClosedBatch, admission: Admission, after: int = -1) -> Batch:
    """Reads the batch and admits its rows. The refused ones are in the batch's `refused`. `after` is the last batch of
    its source that ran, as far as the caller knows."""
    table = read_table(store, closed)
    batch = with_carried(admit(closed, table, admission), table)
    rows = StoredRows(closed, admission_limits(admission.program.config), sorted(batch.refused))
    origin = FromSource(batch.origin.ids, *closed.batch_id, after, msgspec.msgpack.encode(rows))
    return msgspec.structs.replace(batch, origin=origin)


def with_carried(batch: Batch, table: pa.Table | None) -> Batch:
    if table is None or CARRIED not in table.column_names:
        return batch
    carried = table.column(CARRIED).combine_chunks()
    if batch.refused:
        carried = carried.take(pa.array([at for at in range(len(carried)) if at not in batch.refused], pa.int64()))
    return msgspec.structs.replace(batch, carried=carried)


def reread_calls(store: Store, stored: StoredRows, program: Program) -> Batch:
    """Reads a batch that is in the log. It refuses the same rows as then, whatever the configuration is now."""
    closed, limits, refused, added = stored
    checking_program = program
    if limits != admission_limits(program.config):
        checking_program = Program(program.app, dataclasses.replace(program.config, **limits))
    batch = read_calls(store, closed, Admission(checking_program))
    if not batch.refused.keys() <= set(refused):
        raise AppChanged(
            f"batch {closed.number} of query {closed.source} in {store.url} was logged by other code, which refused "
            f"{len(refused)} of its rows; this code refuses {len(batch.refused)}. Start it with the code that logged it"
        )
    if len(batch.refused) < len(refused):
        batch = refuse_again(batch, refused)
    if added:
        batch = msgspec.structs.replace(
            batch, args=[as_then(*row, added, program) for row in zip(batch.entries, batch.args, strict=True)]
        )
    origin = msgspec.structs.replace(batch.origin, stored=msgspec.msgpack.encode(stored))
    entries = batch.entries if checking_program is program else [program.entries[each.number] for each in batch.entries]
    return msgspec.structs.replace(batch, origin=origin, entries=entries)


def refuse_again(batch: Batch, refused: list[int]) -> Batch:
    """Leave out rows that were refused when the batch was logged, and that this code would take."""
    then = dict.fromkeys(refused, failure_of(BadRequest("an older version of the app refused it")))
    taken = [at for at in range(len(batch) + len(batch.refused)) if at not in batch.refused]
    rows = [row for row, at in enumerate(taken) if at not in then]
    return Batch(
        batch.origin,
        [batch.entries[row] for row in rows],
        [batch.keys[row] for row in rows],
        [batch.args[row] for row in rows],
        then | batch.refused,
        None if batch.sizes is None else [batch.sizes[row] for row in rows],
        carried=None if batch.carried is None else batch.carried.take(pa.array(rows, pa.int64())),
    )


def as_then(entry: Entry, args: Args, added: dict[str, list[str]], program: Program) -> Args:
    """The arguments without what older code did not know."""
    if entry is not entry.sealed:
        return args
    given = program.values.decode(args[0])
    reset(given, added)
    return (program.values.encode(given),)


def admission_limits(config: Config) -> dict[str, int]:
    """The settings that decide which rows are refused."""
    return config.limits() | {"request_id_bytes_max": config.request_id_bytes_max}


def admit(closed: ClosedBatch, table: pa.Table | None, admission: Admission) -> Batch:
    origin = FromSource(stem_of_rows(closed), *closed.batch_id)
    if table is None:
        return Batch(origin, [], [], [])
    if "call" in table.column_names:
        return admit_messages(closed, table, admission)
    keys = to_python(table.column("key"))
    if "id" in table.column_names or "args" in table.column_names or not closed.function:
        return admit_mixed(closed, table, keys, admission)
    try:
        signature = admission.program.find(closed.function).signature
        named = named_of(table)
        rows = by_position(named, signature, len(keys)) if named else rows_of(table)
    except BadRequest as error:
        return admission.admit_rows(origin, [error] * len(keys))
    if not signature.is_scalar and not named:
        rows = list(map(signature.convert, rows))
    return admission.admit_columns(origin, closed.function, keys, rows)


def by_position(named: dict[str, list[Any]], signature: Signature, count: int) -> list[Row]:
    """The rows of columns that are arguments by name. A default that is filled in is no list: those can change."""
    if not signature.is_scalar:
        named = {name: signature.convert_column(name, cells) for name, cells in named.items()}
    columns = [each if type(each) is list else [each] * count for each in signature.bind((), named)]
    return list(zip(*columns, strict=True))


def stem_of_rows(closed: ClosedBatch) -> str:
    """The request ids of rows that have none of their own."""
    return f"{closed.source}/{closed.number}"


def admit_mixed(closed: ClosedBatch, table: pa.Table, keys: list[Any], admission: Admission) -> Batch:
    """Admits rows one by one, if they call different functions, have their own ids, or have arguments in JSON."""
    count, stem = table.num_rows, stem_of_rows(closed)
    functions = to_python(table.column("function")) if not closed.function else [closed.function] * count
    given = mixed_args(table)
    ids = to_python(table.column("id")) if "id" in table.column_names else None
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
    return admission.admit_rows(FromSource(named, *closed.batch_id), calls)


def mixed_args(table: pa.Table) -> list[Any]:
    """The arguments of each row: a tuple, a dict of names, or JSON."""
    if "args" in table.column_names:
        return to_python(table.column("args"))
    named = named_of(table)
    if not named:
        return rows_of(table)
    return [dict(zip(named, cells, strict=True)) for cells in zip(*named.values(), strict=True)]


class UnparsedMessage(msgspec.Struct):
    """What can be read from a message that is not a call."""

    request_id: str | None = None


_only_id = msgspec.json.Decoder(UnparsedMessage)


def admit_messages(closed: ClosedBatch, table: pa.Table, admission: Admission) -> Batch:
    """Admits rows that are messages. One that is not a call is refused, whatever it holds, and the others are not."""
    stem, nothing = stem_of_rows(closed), [None] * table.num_rows
    named = to_python(table.column("id")) if "id" in table.column_names else nothing
    keyed = to_python(table.column("key")) if "key" in table.column_names else nothing
    ids, calls = [], []
    for at, data in enumerate(to_python(table.column("call"))):
        given, call = read_message(data, keyed[at], admission)
        ids.append(given or named[at] or id_of(stem, at))
        calls.append(call)
    return admission.admit_rows(FromSource(ids, *closed.batch_id), calls)


def read_message(data: bytes | None, key: bytes | None, admission: Admission) -> tuple[str | None, Any]:
    """Returns the message's request id, if it has one, and the call, or the error that says why it is not one. If it
    has no key, its row's is used."""
    if not data:
        return None, BadMessage("not a call: the message is empty")
    given, call = read_call(data, admission.program)
    if isinstance(call, BadMessage):
        with suppress(*UNREADABLE):
            given = _only_id.decode(data).request_id
    try:
        if given:
            admission.check_id(given)
    except BadRequest as error:
        return None, call if isinstance(call, BadMessage) else error
    if isinstance(call, BadRequest):
        return given, call
    function, named, args = call
    try:
        return given, (function, key.decode() if named is None and key is not None else named, args)
    except UnicodeDecodeError as error:
        return given, BadMessage(f"not a call: its key is not a text: {error}")


def arguments(function: Any, args: Any, admission: Admission) -> Row:
    """Returns as many arguments as the function takes, from columns or from one column of JSON. Null arguments beyond
    that are dropped, and null ones with names that it does not have: they are columns that only other functions use."""
    signature = admission.program.find(function).signature
    if args is None or type(args) is str:
        given, has_texts = read_arguments(args or "[]", signature)
        wanted = without_nulls(list(given) if type(given) is list else given, signature)
        return converted(wanted, signature, has_texts)
    if type(args) is not tuple and type(args) is not dict:
        raise BadArguments(f"the arguments must be a JSON list or object, not {shown(args)}")
    args = without_nulls(args, signature)
    if type(args) is dict:
        return signature.bind((), args if signature.is_scalar else signature.convert_named(args))
    return args if signature.is_scalar else signature.convert(args)


def without_nulls(args: Any, signature: Signature) -> Any:
    if type(args) is dict:
        return {name: arg for name, arg in args.items() if arg is not None or name in signature.keywords.places}
    while len(args) > signature.most and not signature.variadic and args[-1] is None:
        args = args[:-1]
    return args
