"""The column of the keys: a long, a string or binary.

Rules:
1. The option `keyType` decides. Without it, the keys that are there when the table or stream is loaded do: ints are
   longs, texts strings, bytes binary, and if there are several kinds, or no keys yet, the column is a string.
2. In a string an int is its digits, and bytes are hexadecimal. A key that does not fit another type is an error that
   names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from headrace.durability.columns import Columns, join
from headrace.durability.log.changelog import KEY_TYPE_NAMES
from headrace.durability.log.column_bytes import from_column
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.records import unpack
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.store import Store
from headrace.errors import LogBroken, StreamError
from headrace.spark.sources.footers import file_columns
from headrace.spark.sources.options import one_of
from headrace.wire.values import shown

TYPES = {"long": pa.int64(), "string": pa.string(), "binary": pa.binary()}
OF_FILES = {"key_int": "long", "key_text": "string", "key_packed": "other"}  # by the columns of a snapshot


def asked_key_type(options: Mapping[str, str]) -> pa.DataType | None:
    """The type by the option; None if the keys decide."""
    return TYPES.get(one_of(options, "keyType", ("auto", *TYPES)))


def common_type(names: Collection[str]) -> pa.DataType:
    """The type for keys of these types."""
    (name,) = names if len(names) == 1 else ("",)
    return TYPES.get(name, pa.string())


def key_type_of_store(store: Store) -> pa.DataType:
    """The type for keys of all operators: by the newest snapshot, or by the newest replies."""
    manifest = StoreReader(store).snapshots.newest()
    if manifest is not None:
        return common_type({OF_FILES[name] for name in file_columns(store, manifest.layers) if name in OF_FILES})
    first, last = bounds(store, "replies")
    if first > last:
        return pa.string()
    try:
        _, columns = unpack(next(read_log(store, "replies", last)).data)
    except (LogBroken, StopIteration):  # the machine went down meanwhile
        return pa.string()
    return common_type({KEY_TYPE_NAMES[type(key)] for key in from_column(columns.get("key", []))})


def text_of(key: Any) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def keys_as(keys: Columns, type: pa.DataType, whose: str) -> pa.Array:
    """The column of these keys. `whose` they are is for the error."""
    if list(keys) == ["int"] and pa.types.is_integer(type):
        return keys["int"].cast(type)
    if list(keys) in (["text"], ["int"]) and pa.types.is_string(type):
        return next(iter(keys.values())).cast(type)
    return key_column(join(keys), type, whose)


def key_column(keys: list[Any], type: pa.DataType, whose: str) -> pa.Array:
    """The same for a list, in which a key may be None."""
    if pa.types.is_string(type):
        return pa.array([None if key is None else text_of(key) for key in keys], type)
    fits = is_bytes if pa.types.is_binary(type) else is_long
    for key in keys:
        if key is not None and not fits(key):
            raise StreamError(
                f'{whose} has the key {shown(key)}, but the column is {type}: take .option("keyType", "string")'
            )
    return pa.array(keys, type)


def is_bytes(key: Any) -> bool:
    return isinstance(key, bytes)


def is_long(key: Any) -> bool:
    return isinstance(key, int) and -(1 << 63) <= key < 1 << 63
