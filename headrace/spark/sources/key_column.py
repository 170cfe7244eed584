"""The column of the keys: a long, a string or binary.

Rules:
1. The option `keyType` decides. Without it, the keys that are there when the table or stream is loaded do: ints are
   longs, texts strings, bytes binary. If there are several kinds, or an operator has no keys yet, the column is a
   string: what may still come does not stop a stream.
2. In a string an int is its digits, and bytes are hexadecimal. A key that does not fit another type is an error that
   names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from headrace.durability.columns import Columns, join
from headrace.durability.identity import read_fingerprint
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.snapshots.manifests import read_object
from headrace.durability.store import Store
from headrace.errors import StreamError
from headrace.spark.sources.footers import file_columns, operators_in
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
    """The type for keys of any operator, by the newest snapshot. It is a string, unless every operator has entities
    there, and the keys of all of them have the same type."""
    manifest = StoreReader(store).snapshots.newest()
    if manifest is None:
        return pa.string()
    found = common_type({OF_FILES[name] for name in file_columns(store, manifest.layers) if name in OF_FILES})
    if found == pa.string():
        return found
    missing = {*read_fingerprint(store, manifest.fingerprint).operators}
    for stored in (stored for layer in manifest.layers for stored in layer.objects):
        if missing:
            missing -= operators_in(read_object(store, manifest.snapshot_id, stored))
    return pa.string() if missing else found


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
