"""Typed columns: the columns of a table of an operator's states, and how sealed states are converted to them.

Rules:
1. If the state's type is declared, it decides the columns: a dataclass or struct has one per field, anything else has
   one column, `value`. A part that no column can hold (a union, Any) is JSON text.
2. If it is not declared, the columns are inferred from the states, if they agree; if not, the error says what to do.
3. A value becomes a cell only if nothing is lost; else the error names the entity. An int is accepted as a float.
4. Numbers and texts are never converted one by one; records are decoded by msgspec, many at a time.

Never here: which entities, stores, Spark.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.durability.columns import Columns, join, offsets_and_data
from headrace.durability.migration import LooseValues
from headrace.errors import BadValue
from headrace.model.fingerprint import Fingerprint
from headrace.wire.native_form import lifted, native_parts
from headrace.wire.values import RECORD, WRAP_BYTES, as_json, is_wrapped, shown

VALUE = "value"
DECIMAL, TIMESTAMP = pa.decimal128(38, 18), pa.timestamp("us", "UTC")
SCALARS: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "Decimal": DECIMAL,
    "date": pa.date32(),
    "datetime": TIMESTAMP,
    "UUID": pa.string(),
}
GENERIC = re.compile(r"(\w+)\[(.*)\]\Z", re.DOTALL)
IN_PYTHON = ((pa.types.is_integer, int), (pa.types.is_floating, float), (pa.types.is_boolean, bool))
AS_JSON = 'option("as", "json") gives each state as one JSON text'


class Column(NamedTuple):
    name: str
    type: pa.DataType
    is_json: bool = False  # any value, as JSON text


class TableShape(NamedTuple):
    """The columns of a table of states, besides the keys."""

    columns: tuple[Column, ...]
    is_record: bool  # one column per field; else one for the whole state


JSON = TableShape((Column(VALUE, pa.string(), True),), False)


# --- from declared types ----------------------------------------------------------------------------------------------


def declared(app_fingerprint: Fingerprint, operator: str) -> TableShape | None:
    """The declared shape; None if the app does not declare the operator's state."""
    state = app_fingerprint.operators[operator].state
    if not state:
        return None
    records = {name: type.fields for name, type in app_fingerprint.types.items()}
    kinds = [part for part in split_outside_brackets(state.partition(" with ")[0], " | ") if part != "None"]
    if len(kinds) == 1 and kinds[0] in records:
        return TableShape(tuple(column(name, type_of(text, records)) for name, text in records[kinds[0]]), True)
    return TableShape((column(VALUE, type_of(state, records)),), False)


def column(name: str, type: pa.DataType | None) -> Column:
    return Column(name, pa.string(), True) if type is None else Column(name, type)


def type_of(text: str, records: dict[str, list[tuple[str, str]]], inside: tuple[str, ...] = ()) -> pa.DataType | None:
    """The Arrow type of a type written in a fingerprint. None if only JSON can hold it, as for a recursive record."""
    parts = [part for part in split_outside_brackets(text.partition(" with ")[0].strip(), " | ") if part != "None"]
    if set(parts) == {"int", "float"}:
        return pa.float64()
    if len(parts) != 1:
        return None
    (only,) = parts
    if only in SCALARS:
        return SCALARS[only]
    if only in records:
        if only in inside:
            return None
        fields = [(name, type_of(field, records, (*inside, only))) for name, field in records[only]]
        return None if not fields or any(type is None for _, type in fields) else pa.struct(fields)
    generic = GENERIC.match(only)
    if generic is None:
        return None
    origin, given = generic[1], split_outside_brackets(generic[2], ", ")
    if origin == "Literal":
        kinds = {"str" if each[0] in "'\"" else "int" if each.lstrip("-").isdecimal() else "" for each in given}
        return SCALARS.get(kinds.pop()) if len(kinds) == 1 else None
    types = [type_of(each, records, inside) for each in given if each != "..."]
    if any(type is None for type in types):
        return None
    if origin == "list" or (origin == "tuple" and given[-1] == "..."):
        return pa.list_(types[0])
    if origin == "tuple":
        return pa.struct([(f"_{at}", type) for at, type in enumerate(types, 1)])
    return pa.map_(*types) if origin == "dict" and len(types) == 2 else None


def split_outside_brackets(text: str, mark: str) -> list[str]:
    """Splits the text at the marks that are outside of brackets and quotes."""
    parts, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif not depth and at >= begin and text.startswith(mark, at):
            parts.append(text[begin:at])
            begin = at + len(mark)
    return [*parts, text[begin:]]


# --- inferred from the states -----------------------------------------------------------------------------------------


class RecordFields(dict[str, Any]):
    """The fields of a record."""


class ShapeGuess:
    """Infers the shape of a table from states."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.type: pa.DataType = pa.null()  # of the values; a struct for records and dicts
        self.records: bool | None = None  # True: records; False: dicts; None: neither
        self.names: set[frozenset[Any]] = set()  # keys of dicts; if all have the same str keys, they are like records
        self.items: pa.DataType | None = pa.null()  # of dicts as maps; None if they cannot be maps

    def add(self, states: Columns) -> None:
        for kind, array in states.items():
            if kind != "packed":
                self._unite(array.type)
                continue
            values = [value for value in loose(array.drop_null()) if value is not None]
            kinds: set[type] = set(map(type, values))
            if not values:
                continue
            if all(issubclass(kind, dict) for kind in kinds):
                self._see(kinds == {RecordFields})
                if not self.records:
                    self.names.update(map(frozenset, values))
                    self._see_items([item for value in values for item in value.items()])
                if self.records or self._is_like_records():
                    self._unite(self._inferred(values))
            else:
                self._unite(self._inferred(values))

    def shape(self) -> TableShape | None:
        """The shape; None if there were no states."""
        if self.records is not None:
            if not self.records and not self._is_like_records():
                if self.items is None:
                    raise self._differ("dicts of several types")
                items = pa.map_(pa.string(), pa.string()) if self.items == pa.null() else self.items
                return TableShape((Column(VALUE, items),), False)
            return TableShape(tuple(Column(field.name, tidy(field.type)) for field in self.type), True)
        return None if self.type == pa.null() else TableShape((Column(VALUE, tidy(self.type)),), False)

    def _see(self, is_record: bool) -> None:
        if self.records not in (None, is_record) or (self.records is None and self.type != pa.null()):
            raise self._differ("records and other values")
        self.records = is_record

    def _unite(self, type: pa.DataType) -> None:
        if self.records is not None and not pa.types.is_struct(type):
            raise self._differ("records and other values")
        self.type = self._united(self.type, type)

    def _united(self, one: pa.DataType, other: pa.DataType) -> pa.DataType:
        one, other = tidy(one, pa.null()), tidy(other, pa.null())
        if pa.null() in (one, other) or one == other:
            return other if one == pa.null() else one
        try:
            schemas = [pa.schema([(VALUE, type)]) for type in (one, other)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(VALUE).type
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise self._differ(f"{one} and {other}") from None

    def _inferred(self, values: list[Any]) -> pa.DataType:
        try:
            return pa.array(values).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise self._differ(str(error).partition("\n")[0]) from None

    def _is_like_records(self) -> bool:
        return len(self.names) == 1 and all(names and set(map(type, names)) == {str} for names in self.names)

    def _see_items(self, items: list[tuple[Any, Any]]) -> None:
        if not items or self.items is None:
            return
        try:
            keys, values = (tidy(pa.array(list(each)).type) for each in zip(*items, strict=True))
            found = pa.map_(keys, values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            found = None
        self.items = found if self.items in (pa.null(), found) else None

    def _differ(self, what: str) -> BadValue:
        return BadValue(
            f"the states of operator {self.operator!r} do not have one type: {what}. Declare it, as in "
            f"app.operator({self.operator!r}, state=...); or {AS_JSON}"
        )


def tidy(type: pa.DataType, nothing: pa.DataType | None = None) -> pa.DataType:
    """Converts an inferred type to one that a table has. A column that is always null is text."""
    if pa.types.is_null(type):
        return nothing or pa.string()
    if pa.types.is_large_string(type):
        return pa.string()
    if pa.types.is_large_binary(type):
        return pa.binary()
    if pa.types.is_timestamp(type):
        return TIMESTAMP
    if pa.types.is_decimal(type):
        return DECIMAL
    if pa.types.is_list(type):
        return pa.list_(tidy(type.value_type, nothing))
    if pa.types.is_struct(type):
        return pa.struct([(field.name, tidy(field.type, nothing)) for field in type])
    return type


# --- from states to columns -------------------------------------------------------------------------------------------


def arrays(states: Columns, shape: TableShape, named: Callable[[int], str]) -> list[pa.Array]:
    """The columns of these states. `named` names the entity of a row, for errors."""
    if shape.is_record:
        return fields_of(states, shape.columns, named)
    (whole,) = shape.columns
    if whole.is_json:
        return [texts_of(states)]
    quick = at_once(states, whole.type)
    if quick is not None:
        return [quick]
    values = [unsealed(state) for state in join(states)]
    return [fitted(values, whole, named)]


def at_once(states: Columns, type: pa.DataType) -> pa.Array | None:
    """The column if all states are numbers or texts of the right kind; else None."""
    if len(states) != 1:
        return None
    ((kind, array),) = states.items()
    same = {"int": pa.types.is_integer, "float": pa.types.is_floating, "text": pa.types.is_string}
    if kind not in same or array.null_count or not same[kind](type):
        return None
    try:
        return array.cast(type)
    except pa.ArrowInvalid:
        return None  # converting one by one finds the value at fault


def texts_of(states: Columns) -> pa.Array:
    if list(states) == ["int"]:
        return states["int"].cast(pa.string())
    return pa.array([as_json(state).decode() for state in join(states)], pa.string())


def fields_of(states: Columns, columns: Sequence[Column], named: Callable[[int], str]) -> list[pa.Array]:
    """One column per field of a record, or of a dict."""
    rows = decode_records(states["packed"], columns) if list(states) == ["packed"] else None
    if rows is not None:
        found = []
        for at, each in enumerate(columns):
            values = [row[at] for row in rows]
            found.append(fitted(values, each, named) if hint_of(each) is Any else checked_by_arrow(values, each, named))
        return found
    dicts = [unsealed(state) for state in join(states)]
    for at, value in enumerate(dicts):
        if value is not None and not isinstance(value, dict):
            raise BadValue(f"the state of {named(at)} is {shown(value)}, which is not a record: {AS_JSON}")
    return [fitted([None if row is None else row.get(each.name) for row in dicts], each, named) for each in columns]


def checked_by_arrow(values: list[Any], column: Column, named: Callable[[int], str]) -> pa.Array:
    """The values have the right kind already; only an int may be too large."""
    try:
        return pa.array(values, column.type)
    except (pa.ArrowInvalid, OverflowError):
        return fitted(values, column, named)


def decode_records(cells: pa.Array, columns: Sequence[Column]) -> list[tuple[Any, ...]] | None:
    """Decodes records of one type at once to rows. None if they have several types, or a field has the wrong type."""
    starts, ends, data = pieces(cells)
    first = data[starts[0] : ends[0]].tobytes()
    head, name = head_of(first)
    if name is None:
        return None
    heads = EXTENSION_HEAD_BYTES[data[starts]]
    like = np.frombuffer(first[head : head + len(name)], np.uint8)
    inner = starts + heads
    if (heads == 0).any() or (ends - inner < len(like)).any() or (data[inner - 1] != RECORD).any():
        return None
    if (data[inner[:, None] + np.arange(len(like))] != like).any():
        return None
    hints = [(f"f{at}", hint_of(each), None) for at, each in enumerate(columns)]
    names = {f"f{at}": each.name for at, each in enumerate(columns)}
    row = msgspec.defstruct("Row", hints, rename=names)
    try:
        rows = msgspec.msgpack.Decoder(list[row], ext_hook=RECORD_VALUES._from_ext).decode(  # type: ignore[valid-type]
            as_encoded_list(data, inner + len(like), ends)
        )
    except (msgspec.DecodeError, ValueError):
        return None
    return [msgspec.structs.astuple(each) for each in rows]


def head_of(cell: bytes) -> tuple[int, bytes | None]:
    """Of a record: the length of the extension's head, and the bytes before its fields (a list of two and its name)."""
    head = int(EXTENSION_HEAD_BYTES[cell[0]])
    if not head or cell[head - 1] != RECORD:
        return 0, None
    name = msgspec.msgpack.decode(cell[head:], type=tuple[str, Any])[0]
    return head, b"\x92" + msgspec.msgpack.encode(name)


def pieces(cells: pa.Array) -> tuple[Any, Any, Any]:
    """Where each cell begins and ends, without the timestamp of a state with a time to live."""
    offsets, data = offsets_and_data(cells)
    starts, ends = offsets[:-1], offsets[1:]
    if len(cells) and is_wrapped(data[starts[0] : ends[0]].tobytes()):
        starts = starts + WRAP_BYTES
    return starts, ends, data


def as_encoded_list(data: Any, starts: Any, ends: Any) -> bytes:
    """Joins encoded values into one encoded list."""
    sizes = ends - starts
    before = np.cumsum(sizes) - sizes
    where = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
    return b"\xdd" + len(starts).to_bytes(4, "big") + bytes(data[where])


def fitted(values: list[Any], column: Column, named: Callable[[int], str]) -> pa.Array:
    """Converts the values one by one."""
    cells = []
    for at, value in enumerate(values):
        try:
            cells.append(json_of(value) if column.is_json else fit(value, column.type))
        except BadValue as error:
            raise BadValue(f"{column.name} of {named(at)}: {error}; {AS_JSON}") from None
    try:
        return pa.array(cells, column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        for at, cell in enumerate(cells):
            try:
                pa.array([cell], column.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as trouble:
                raise BadValue(f"{column.name} of {named(at)}: {trouble}; {AS_JSON}") from None
        raise BadValue(f"{column.name}: {error}; {AS_JSON}") from None


def fit(value: Any, type: pa.DataType) -> Any:
    """The value as Arrow accepts it for this type."""
    if value is None:
        return None
    kind = value.__class__
    for is_type, wanted in IN_PYTHON:
        if is_type(type):
            return float(value) if wanted is float and kind is int else checked(value, kind is wanted, type)
    if pa.types.is_string(type):
        return value if kind is str else str(value) if kind is uuid.UUID else json_of(value)
    if pa.types.is_binary(type):
        return checked(value, kind is bytes, type)
    if pa.types.is_timestamp(type):
        checked(value, kind is datetime.datetime, type)
        return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None and type.tz else value
    if pa.types.is_date(type):
        return checked(value, kind is datetime.date, type)
    if pa.types.is_decimal(type):
        return checked(value, kind in (decimal.Decimal, int), type)
    if pa.types.is_list(type):
        checked(value, kind in (list, tuple), type)
        return [fit(each, type.value_type) for each in value]
    if pa.types.is_map(type):
        checked(value, isinstance(value, dict), type)
        return [(fit(key, type.key_type), fit(item, type.item_type)) for key, item in value.items()]
    if pa.types.is_struct(type):
        if kind is tuple:
            value = {f"_{at}": each for at, each in enumerate(value, 1)}
        checked(value, isinstance(value, dict), type)
        return {field.name: fit(value.get(field.name), field.type) for field in type}
    raise BadValue(f"no value becomes {type}")


def checked(value: Any, is_right: bool, type: pa.DataType) -> Any:
    if not is_right:
        raise BadValue(f"{shown(value)} is not of type {type}")
    return value


def json_of(value: Any) -> str | None:
    """A value, decoded without its types, as JSON text."""
    return None if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def hint_of(column: Column) -> Any:
    """The type that msgspec checks, if checking the value's type is enough; Any for the rest."""
    if column.is_json:
        return Any
    for is_type, kind in (*IN_PYTHON, (pa.types.is_string, str), (pa.types.is_binary, bytes)):
        if is_type(column.type):
            return kind | None
    return Any


class RecordValues(LooseValues):
    """Decodes values without their types: a record becomes `RecordFields`."""

    def _from_ext(self, code: int, data: memoryview) -> Any:
        found = super()._from_ext(code, data)
        return RecordFields(found) if code == RECORD else found

    def _from_native(self, data: bytes) -> Any:
        _, lift, fields = native_parts(data)
        return lifted(lift, fields, RecordFields)


RECORD_VALUES = RecordValues()


def unsealed(state: Any) -> Any:
    return RECORD_VALUES.unseal(state)


def loose(cells: pa.Array) -> Iterable[Any]:
    """The values for `ShapeGuess`: UUIDs become texts."""
    for state in join({"packed": cells}):
        value = RECORD_VALUES.unseal(state)
        yield str(value) if type(value) is uuid.UUID else value


EXTENSION_HEAD_BYTES = np.zeros(256, np.int64)  # the length of an extension's head, by its first byte
EXTENSION_HEAD_BYTES[[0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8]] = [3, 4, 6, 2, 2, 2, 2, 2]
