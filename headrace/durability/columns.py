"""Columns: converts lists of keys and of sealed values to Arrow arrays and back, exact in value and type.

Rules:
1. Each kind of value has a kind of column: `int` (64 bits), `text`, `float`, and `packed` for the rest. A list of one
   kind becomes a plain array; a mixed list becomes a struct with one field per kind, where each value is in exactly one
   field and the others are null.
2. In `packed`, bytes are stored as they are, and None, bools and larger ints as msgpack. Bytes that could be mistaken
   for one of these (or are empty) get the prefix 0xC1, which msgpack never uses.
3. Equal keys have equal cells and unequal keys do not, so Arrow's own kernels can compare and group them.

Never here: files, stores, what the bytes mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.errors import BadKey, BadValue
from headrace.wire.values import Key, shown

KINDS: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "text": pa.large_utf8(),
    "float": pa.float64(),
    "packed": pa.large_binary(),
}
KIND_OF = {int: "int", str: "text", float: "float", bool: "packed", type(None): "packed", bytes: "packed"}
KEY_TYPES = frozenset((int, str, bytes))
CODES = {type: list(KINDS).index(kind) for type, kind in KIND_OF.items()}
INT64_MAX = (1 << 63) - 1

INTS_AT_ONCE = 4096

ESCAPE = b"\xc1"
FIRST_BYTES = (0xC0, 0xC1, 0xC2, 0xC3, 0xCF)  # None, the escape, False, True, and an int above 63 bits

Columns = dict[str, pa.Array]  # kind -> array; all of the same length


def keys_to_arrow(keys: list[Key]) -> pa.Array:
    return to_one_array(split_keys(keys))


def sealed_to_arrow(values: list[Any]) -> pa.Array:
    return to_one_array(split(values))


def keys_from_arrow(array: pa.Array) -> list[Key]:
    return sealed_from_arrow(array)


def sealed_from_arrow(array: pa.Array) -> list[Any]:
    if pa.types.is_struct(array.type):
        return join({field.name: array.field(i) for i, field in enumerate(array.type)})
    for kind, type in KINDS.items():
        if array.type == type:
            return join({kind: array})
    raise BadValue(f"a column of type {array.type} holds neither keys nor sealed values")


def kind_of(column: pa.Array) -> str:
    return next(kind for kind, type in KINDS.items() if type == column.type)


def kinds_of(column: pa.Array) -> Columns:
    """The columns by kind, as they were split."""
    if pa.types.is_struct(column.type):
        parts = zip([field.name for field in column.type], column.flatten(), strict=True)
        return {kind: part for kind, part in parts if part.null_count < len(part)}
    column = column.cast(KINDS["int"]) if pa.types.is_integer(column.type) else column
    return {kind_of(column): column}


def to_one_array(columns: Columns) -> pa.Array:
    """One array that holds all the columns of a list."""
    if not columns:
        return pa.array([], pa.int64())
    if len(columns) == 1:
        return next(iter(columns.values()))
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def split_keys(keys: Collection[Key]) -> Columns:
    """`split` for keys. A key's bytes are the user's and not a sealed value, which makes no difference here."""
    ints = _ints(keys)
    if ints is not None:
        return {"int": ints}
    keys = list(keys)
    kinds = set(map(type, keys))
    if not kinds <= KEY_TYPES:
        culprit = next(key for key in keys if type(key) not in KEY_TYPES)
        raise BadKey(f"a key must be a str, an int or bytes, not {shown(culprit)}")
    return _split(keys, kinds)


def split(values: Collection[Any]) -> Columns:
    """The columns of a list of sealed values: only of the kinds that occur."""
    ints = _ints(values)
    if ints is not None:
        return {"int": ints}
    values = list(values)
    types = set(map(type, values))
    if not types <= CODES.keys():
        culprit = next(value for value in values if type(value) not in CODES)
        raise BadValue(f"{shown(culprit)} is not sealed")
    return _split(values, types)


def _ints(values: Collection[Any]) -> pa.Array | None:
    """The column, or None if not all are 64-bit ints. Works in blocks, so that checked values are still in the CPU
    cache when they are packed."""
    rest, parts = iter(values), []
    try:
        while some := list(islice(rest, INTS_AT_ONCE)):
            parts.append(struct.pack(f"<{len(some)}q", *msgspec.convert(some, list[int])))  # True is not an int here
    except (msgspec.ValidationError, struct.error):
        return None
    return pa.Array.from_buffers(KINDS["int"], len(values), [None, pa.py_buffer(b"".join(parts))]) if parts else None


def _split(values: list[Any], types: set[type]) -> Columns:
    if len(types) == 1:
        (kind,) = map(KIND_OF.__getitem__, types)
        try:
            return {kind: _column(kind, values)}
        except OverflowError:
            pass  # unsigned 64-bit ints: they are packed
    codes = np.frombuffer(bytearray(map(CODES.__getitem__, map(type, values))), np.uint8)
    if int in types:
        ints = np.flatnonzero(codes == CODES[int]).tolist()
        codes[[i for i in ints if values[i] > INT64_MAX]] = CODES[bytes]
    whole = np.fromiter(values, object, len(values))
    columns = {}
    for code, kind in enumerate(KINDS):
        mine = codes == code
        if mine.any():
            at = pa.array(np.cumsum(mine) - 1, mask=~mine)
            columns[kind] = _column(kind, whole[mine].tolist()).take(at)
    return columns


def _column(kind: str, values: list[Any]) -> pa.Array:
    """A column of values of one kind, without nulls."""
    if kind == "int":
        return pa.array(np.fromiter(values, np.int64, len(values)))
    if kind != "packed":
        return pa.array(values, KINDS[kind])
    if set(map(type, values)) == {bytes}:
        array = pa.array(values, KINDS[kind])
        if not _special(array).size:
            return array
    return pa.array(list(map(packed, values)), KINDS[kind])


def packed(value: Any) -> bytes:
    if type(value) is not bytes:
        return msgspec.msgpack.encode(value)
    return value if value and value[0] not in FIRST_BYTES else ESCAPE + value


def unpacked(cell: bytes) -> Any:
    if cell[0] not in FIRST_BYTES:
        return cell
    return cell[1:] if cell[0] == ESCAPE[0] else msgspec.msgpack.decode(cell)


def join(columns: Mapping[str, pa.Array]) -> list[Any]:
    """Reverses `split`: for each row, takes the one column that has a value."""
    if not columns:
        return []
    if len(columns) == 1:
        ((kind, array),) = columns.items()
        return CELLS[kind](array)
    values = np.empty(len(next(iter(columns.values()))), object)
    for kind, array in columns.items():
        if array.null_count == len(array):
            continue
        if not array.null_count:
            return CELLS[kind](array)
        cells = CELLS[kind](array.drop_null())
        is_here = array.is_valid().to_numpy(zero_copy_only=False)
        values[is_here] = np.fromiter(cells, object, len(cells))
    return values.tolist()


def _numbers(array: pa.Array) -> list[Any]:
    return array.to_numpy(zero_copy_only=True).tolist()  # type: ignore[no-any-return]


def _texts(array: pa.Array) -> list[Any]:
    return array.to_pylist()  # type: ignore[no-any-return]


def _unpacked(array: pa.Array) -> list[Any]:
    cells: list[Any] = array.to_pylist()
    for i in _special(array).tolist():
        cells[i] = unpacked(cells[i])
    return cells


CELLS: dict[str, Callable[[pa.Array], list[Any]]] = {
    "int": _numbers,
    "text": _texts,
    "float": _numbers,
    "packed": _unpacked,
}


def _special(array: pa.Array) -> Any:
    """The rows of a bytes column without nulls whose cell is empty, or begins like a scalar or with the escape."""
    offsets, data = offsets_and_data(array)
    if not len(data):
        return np.arange(len(array))
    first = data[np.minimum(offsets[:-1], len(data) - 1)]
    return np.flatnonzero(SPECIAL[first] | (offsets[1:] == offsets[:-1]))


def offsets_and_data(array: pa.Array) -> tuple[Any, Any]:
    """The buffers of a large bytes or text column: len + 1 offsets, and the bytes they point into."""
    _, offsets, data = array.buffers()
    at = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8) if len(array) else np.zeros(1, np.int64)
    return at, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


SPECIAL = np.zeros(256, np.bool_)
SPECIAL[list(FIRST_BYTES)] = True
