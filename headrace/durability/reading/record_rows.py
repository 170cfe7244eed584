"""Record rows: many sealed records of one type as columns, by one call of msgspec.

A record is sealed in one of two forms (wire/typed_values.py):

    native     a head that is the same for all records of a type, and then a map of the fields as msgspec writes them:
               of a declared type, all fields are decoded to it at once
    tagged     an extension type around the name and the map: what is not a scalar in it is tagged with its own type

Rules:
1. Only records of the same type and form are decoded together, and only to the types that they were declared with:
   without these a text may stand for a date or a Decimal. Who calls decides what to do with the others.
2. If a field has another type than its column, nothing is returned: the caller then finds out which one.

Never here: which entities they are.
"""

from __future__ import annotations

import datetime
import decimal
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from headrace.durability.columns import offsets_and_data
from headrace.durability.migration import LooseValues
from headrace.durability.reading.column_types import Column
from headrace.durability.reading.fitting import DoesNotFit, fit, json_of, nested_types
from headrace.durability.reading.number_records import number_columns
from headrace.wire.native_form import NATIVE_MARK, is_native, lifted, map_head, native_parts
from headrace.wire.values import RECORD, WRAP_BYTES, is_wrapped

END = 1 << 31  # behind the last byte of any cell
NATIVE_BYTES_MIN, LONG_MAP = 6, 0xDE
EXTENSION_HEAD_BYTES = np.zeros(256, np.int64)  # the length of an extension's head, by its first byte
EXTENSION_HEAD_BYTES[[0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8]] = [3, 4, 6, 2, 2, 2, 2, 2]
DOES_NOT_FIT = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, DoesNotFit)
SCALAR_HINTS: tuple[tuple[Callable[[pa.DataType], bool], Any], ...] = (
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_boolean, bool),
    (pa.types.is_string, str),
    (pa.types.is_binary, bytes),
)
ZONELESS = Annotated[datetime.datetime, msgspec.Meta(tz=False)]


class LooseRecord(dict[str, Any]):
    """The fields of a record."""


class RecordValues(LooseValues):
    """Decodes values without their types: a record becomes a `LooseRecord`."""

    def _from_ext(self, code: int, data: memoryview) -> Any:
        found = super()._from_ext(code, data)
        return LooseRecord(found) if code == RECORD else found

    def _from_native(self, data: bytes) -> Any:
        _, lift, fields = native_parts(data)
        return LooseRecord(lifted(lift, fields))


RECORD_VALUES = RecordValues()


def unwrapped(cells: pa.Array) -> pa.Array:
    """Without the times of states with a time to live: all of them have one, or none."""
    return pc.binary_slice(cells, WRAP_BYTES, END) if len(cells) and is_wrapped(cells[0].as_py()) else cells


def columns_at_once(cells: pa.Array, columns: Sequence[Column]) -> list[pa.Array] | None:
    """The columns of these records, which have no nulls. None if they have to be looked at one by one."""
    first = cells[0].as_py()
    head = native_head(first)
    if head is not None and (numbers := number_columns(cells, head, columns)) is not None:
        return numbers
    rows = tagged_rows(cells, columns) if head is None else native_rows(cells, head, columns)
    if rows is None:
        return None
    try:
        return [to_array(list(map(attrgetter(f"f{at}"), rows)), each, head) for at, each in enumerate(columns)]
    except DOES_NOT_FIT:
        return None


def to_array(values: list[Any], column: Column, head: bytes | None) -> pa.Array:
    if column.is_json:
        return pa.array(list(map(json_of, values)), column.type)
    if head is None:
        is_done = tagged_hint(column) is not Any
    else:
        is_done = column.type == (column.declared or column.type) and is_as_arrow_wants(column.type)
    return pa.array(values if is_done else [fit(value, column.type) for value in values], column.type)


# --- native -----------------------------------------------------------------------------------------------------------


def native_head(cell: bytes) -> bytes | None:
    """What is before the map of the fields: all records of a type have the same."""
    if len(cell) < NATIVE_BYTES_MIN or not is_native(cell):
        return None
    begin = 3 if cell[0] == LONG_MAP else 1
    entries = int.from_bytes(cell[1:3], "big") if cell[0] == LONG_MAP else cell[0] - 0x80
    told = begin + len(NATIVE_MARK) + 3  # where the byte string begins, whose end is the head of the map
    return cell[: told + int.from_bytes(cell[told - 2 : told], "big") - len(map_head(entries - 1))]


def native_cells(cells: pa.Array) -> Any:
    """For each cell, in NumPy, whether it is of the type and form of the first native one."""
    offsets, data = offsets_and_data(cells)
    is_long = offsets[1:] - offsets[:-1] >= NATIVE_BYTES_MIN
    starts = offsets[:-1][is_long]
    marks = starts + np.where(data[starts] == LONG_MAP, 3, 1)
    (found,) = np.nonzero((data[marks] == NATIVE_MARK[0]) & (data[marks + 1] == NATIVE_MARK[1]))
    for at in found.tolist():
        row = int(np.flatnonzero(is_long)[at])
        head = native_head(cells[row].as_py())
        if head is not None:
            return pc.starts_with(cells, pattern=head).to_numpy(zero_copy_only=False)
    return np.zeros(len(cells), np.bool_)


def native_rows(cells: pa.Array, head: bytes, columns: Sequence[Column]) -> list[Any] | None:
    if not pc.all(pc.starts_with(cells, pattern=head)).as_py():
        return None
    hints = [Any if column.is_json else native_hint(column) for column in columns]
    if None in hints:
        return None
    offsets, data = offsets_and_data(pc.binary_slice(cells, len(head), END))
    return decoded(bytes(data[offsets[0] : offsets[-1]]), len(cells), hints, columns)


def native_hint(column: Column) -> Any:
    """What msgspec decodes a field to. None if the bytes do not say enough: of a field without a declared type only
    numbers are certain."""
    if column.declared is not None:
        return hint_of(column.declared) | None
    if pa.types.is_integer(column.type):
        return int | None
    return bool | None if pa.types.is_boolean(column.type) else None


def hint_of(type: pa.DataType) -> Any:
    """The Python type whose values msgspec writes natively as cells of this type."""
    for is_type, hint in SCALAR_HINTS:
        if is_type(type):
            return hint
    if pa.types.is_decimal(type):
        return decimal.Decimal
    if pa.types.is_date(type):
        return datetime.date
    if pa.types.is_timestamp(type):
        return ZONELESS if type.tz is None else datetime.datetime
    if pa.types.is_list(type):
        return list[hint_of(type.value_type) | None]  # type: ignore[misc]
    if pa.types.is_map(type):
        return dict[hint_of(type.key_type), hint_of(type.item_type) | None]  # type: ignore[misc]
    if is_tuple(type):
        return tuple[*(hint_of(field.type) | None for field in type)]  # type: ignore[misc]
    return TypedDict("Fields", {field.name: hint_of(field.type) | None for field in type}, total=False)  # type: ignore[operator]


def is_tuple(type: pa.DataType) -> bool:
    """Whether a struct stands for a tuple."""
    return [field.name for field in type] == [f"_{at}" for at in range(1, type.num_fields + 1)]


@functools.cache
def is_as_arrow_wants(type: pa.DataType) -> bool:
    """Whether Arrow takes the decoded values as they are."""
    return not any(pa.types.is_struct(each) and is_tuple(each) for each in nested_types(type))


# --- tagged -----------------------------------------------------------------------------------------------------------


def tagged_rows(cells: pa.Array, columns: Sequence[Column]) -> list[Any] | None:
    offsets, data = offsets_and_data(cells)
    starts, ends = offsets[:-1], offsets[1:]
    first = data[starts[0] : ends[0]].tobytes()
    head, name = tagged_head(first)
    if name is None:
        return None
    heads = EXTENSION_HEAD_BYTES[data[starts]]
    like = np.frombuffer(first[head : head + len(name)], np.uint8)
    inner = starts + heads
    if (heads == 0).any() or (ends - inner < len(like)).any() or (data[inner - 1] != RECORD).any():
        return None
    if (data[inner[:, None] + np.arange(len(like))] != like).any():
        return None
    return decoded(joined(data, inner + len(like), ends), len(cells), list(map(tagged_hint, columns)), columns)


def tagged_head(cell: bytes) -> tuple[int, bytes | None]:
    """The length of the extension's head, and the bytes before its fields (a list of two and its name)."""
    head = int(EXTENSION_HEAD_BYTES[cell[0]]) if cell else 0
    if not head or cell[head - 1] != RECORD:
        return 0, None
    name = msgspec.msgpack.decode(cell[head:], type=tuple[str, Any])[0]
    return head, b"\x92" + msgspec.msgpack.encode(name)


def tagged_hint(column: Column) -> Any:
    """What msgspec decodes a field to, if that checks it; Any for the rest. A float may be an int, which is checked."""
    if not column.is_json and not pa.types.is_floating(column.type):
        for is_type, kind in SCALAR_HINTS:
            if is_type(column.type):
                return kind | None
    return Any


def joined(data: Any, starts: Any, ends: Any) -> bytes:
    """Pieces of the data, one after the other."""
    sizes = ends - starts
    before = np.cumsum(sizes) - sizes
    return bytes(data[np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))])


def decoded(maps: bytes, count: int, hints: list[Any], columns: Sequence[Column]) -> list[Any] | None:
    """Encoded maps as rows, whose fields are f0, f1 and so on."""
    names = {f"f{at}": each.name for at, each in enumerate(columns)}
    fields = [(name, hint, None) for name, hint in zip(names, hints, strict=True)]
    row = msgspec.defstruct("Row", fields, rename=names, gc=False)
    decoder = msgspec.msgpack.Decoder(list[row], ext_hook=RECORD_VALUES._from_ext)  # type: ignore[valid-type]
    try:
        rows: list[Any] = decoder.decode(b"\xdd" + count.to_bytes(4, "big") + maps)
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, ArithmeticError):
        return None
    return rows
