"""Number records: records whose fields are all numbers, bools or None, as columns without a Python object per field.

In the native form a record is a head and a map, and msgpack writes the names of the fields of all records with the same
bytes. What differs between two records of one type are the values: a tag each, and for larger ones up to 8 bytes. So
all records are parsed side by side, in NumPy.

Rules:
1. Every byte is checked: a record with other fields, another order, or a value of another type than its column is not
   parsed here, nor are all others with it.

Never here: what to do with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from headrace.durability.columns import offsets_and_data
from headrace.durability.reading.column_types import Column

NONE, BOOL, INT, FLOAT, OTHER = range(5)
KIND_BY_TYPE = {pa.int64(): INT, pa.float64(): FLOAT, pa.bool_(): BOOL}
SHORT_MAP_FIELDS = 15  # the head of a map with more fields has three bytes
PADDING = 32

# By the first byte of a value: its kind, and how many bytes follow it.
KINDS = np.full(256, OTHER, np.uint8)
WIDTHS = np.zeros(256, np.int64)
KINDS[0xC0], KINDS[0xC2:0xC4], KINDS[0xCB], KINDS[:0x80], KINDS[0xE0:] = NONE, BOOL, FLOAT, INT, INT
KINDS[0xCC:0xD4] = INT
WIDTHS[0xCB], WIDTHS[0xCC:0xD0], WIDTHS[0xD0:0xD4] = 8, [1, 2, 4, 8], [1, 2, 4, 8]
UNSIGNED_64 = 0xCF
IS_SIGNED = np.zeros(256, np.bool_)
IS_SIGNED[0xD0:0xD4] = True
IMMEDIATE = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int64)  # of an int that is its own tag


def number_columns(cells: pa.Array, head: bytes, columns: Sequence[Column]) -> list[pa.Array] | None:
    """The columns, or None if the records have to be decoded in another way. The cells have no nulls."""
    if any(column.type not in KIND_BY_TYPE or column.is_json for column in columns):
        return None
    first = cells[0].as_py()
    names = list(msgspec.msgpack.decode(first[len(head) :], type=dict[str, Any]))
    if not {column.name for column in columns} <= {*names}:
        return None
    begin = first[: len(head) + (1 if len(names) <= SHORT_MAP_FIELDS else 3)]
    if not pc.all(pc.starts_with(cells, pattern=begin)).as_py():
        return None
    parsed = parse(cells, len(begin), [msgspec.msgpack.encode(name) for name in names])
    if parsed is None:
        return None
    values = dict(zip(names, parsed, strict=True))
    made = [array_of(*values[column.name], column.type) for column in columns]
    return None if any(array is None for array in made) else made


def parse(cells: pa.Array, begin: int, names: list[bytes]) -> list[tuple[Any, Any]] | None:
    """Of each field, the tags and the 8 bytes behind them."""
    offsets, data = offsets_and_data(cells)
    size = int(offsets[-1] - offsets[0])
    buffer = np.zeros(size + PADDING, np.uint8)
    buffer[:size] = data[offsets[0] : offsets[-1]]
    words = np.ndarray((size + PADDING - 7,), ">u8", buffer, strides=(1,))  # the 8 bytes from each byte on
    at = offsets[:-1] - offsets[0] + begin
    parsed = []
    for name in names:
        if at.max() + len(name) + 9 > len(buffer) or not are(words, at, name):
            return None
        at = at + len(name)
        tags = buffer[at]
        parsed.append((tags, words[at + 1].astype(np.uint64)))
        at = at + 1 + WIDTHS[tags]
    return parsed if (at == offsets[1:] - offsets[0]).all() else None


def are(words: Any, at: Any, text: bytes) -> bool:
    """Whether these bytes are at all of these places."""
    for begin in range(0, len(text), 8):
        some = text[begin : begin + 8]
        found = words[at + begin] >> np.uint64(64 - 8 * len(some))
        if (found != int.from_bytes(some, "big")).any():
            return False
    return True


def array_of(tags: Any, words: Any, type: pa.DataType) -> pa.Array | None:
    kinds = KINDS[tags]
    is_none = kinds == NONE
    if not ((kinds == KIND_BY_TYPE[type]) | is_none).all():
        return None
    if type == pa.bool_():
        values = tags == 0xC3
    elif type == pa.float64():
        values = words.view(np.float64)
    else:
        values = ints_of(tags, words)
        if (values[tags == UNSIGNED_64] < 0).any():
            return None
    return pa.array(values, type, mask=is_none if is_none.any() else None)


def ints_of(tags: Any, words: Any) -> Any:
    widths = WIDTHS[tags]
    shifts = np.minimum(64 - 8 * widths, 63)
    numbers = np.where(
        IS_SIGNED[tags], words.view(np.int64) >> shifts, (words >> shifts.view(np.uint64)).view(np.int64)
    )
    return np.where(widths == 0, IMMEDIATE[tags], numbers)
