"""The native form of a record: what msgspec writes, with a head that says what it is.

    map of n + 1 entries, "\\0": (name, lift, head of the map), field: value, ...

msgspec encodes the record as a map of n entries. The head in front of it opens a map of n + 1, whose first value is a
byte string that ends with the old head of the map: so the head and the record are joined without a copy of a part. When
msgspec decodes the map as the record, it skips the first entry. Readers without the class learn from it how to *lift*
the fields: which texts and lists stand for other types.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace.wire.types import (
    DATETIME_CODE,
    FROM_TEXT,
    DeclaredRecord,
    DeclaredType,
    ScalarType,
    Source,
    UnionType,
    compile_function,
)

NATIVE_KEY = "\0"
NATIVE_MARK = msgspec.msgpack.encode(NATIVE_KEY)
FIXMAP_MAX = 15  # entries of a map whose head is one byte; that of a larger one has three


def record_name(cls: type) -> str:
    """Without the module: an app is the same whether it is run or imported."""
    return cls.__qualname__


class NativeForm:
    """How one record is written (`head + encode(record)`) and read."""

    def __init__(self, record: DeclaredRecord) -> None:
        self.record, self.cls, self.name = record, record.cls, record_name(record.cls)
        self.head = native_head(self.name, record.lift(), len(record.fields))
        self.encode = msgspec.msgpack.Encoder().encode
        self._typed = msgspec.msgpack.Decoder(twin_of(record) if is_open(record.cls) else record.cls).decode
        self.decode: Callable[[bytes], Any] = self._typed
        if is_open(record.cls):
            self.decode = self.compile_reading(["def decode(sealed):", "    v = typed(sealed)"], "decode")

    def compile_reading(self, lines: list[str], name: str, **names: Any) -> Any:
        """A function that begins with these lines, which set `v` by a call of `typed`, and then makes the record."""
        source = Source(0)
        source.names |= {"typed": self._typed, "new": object.__new__, **names}
        made = [f"    {line}" for line in (making(self.record, source) if is_open(self.cls) else ["return v"])]
        return compile_function(source, [*lines, *made], name)


def native_head(name: str, lift: Any, fields: int) -> bytes:
    told = msgspec.msgpack.encode([name, lift])
    size = len(told) + len(map_head(fields))  # the record's own head is the end of it
    return map_head(fields + 1) + NATIVE_MARK + b"\xc5" + size.to_bytes(2, "big") + told


def map_head(count: int) -> bytes:
    return bytes((0x80 + count,)) if count <= FIXMAP_MAX else b"\xde" + count.to_bytes(2, "big")


def is_native(sealed: bytes) -> bool:
    first = sealed[0]
    return (0x80 < first < 0x90 and sealed[1:3] == NATIVE_MARK) or (first == 0xDE and sealed[3:5] == NATIVE_MARK)


def native_parts(sealed: bytes) -> tuple[str, Any, dict[str, Any]]:
    """The name of a record in its native form, how its fields are lifted, and the fields as msgspec wrote them."""
    fields = msgspec.msgpack.decode(sealed)
    told: bytes = fields.pop(NATIVE_KEY)
    name, lift = msgspec.msgpack.decode(told[: -len(map_head(len(fields)))])
    return name, lift, fields


# --- reading dataclasses ----------------------------------------------------------------------------------------------
#
# A dataclass that msgspec makes has its attributes in a separate dict, and each access to one costs several times as
# much as usual. So msgspec makes a struct with the same fields, and these are set on a new dataclass, as an __init__
# does it.


def is_open(cls: type) -> bool:
    """Whether its fields are plain attributes, which can be set."""
    return (
        not issubclass(cls, msgspec.Struct)
        and cls.__setattr__ is object.__setattr__
        and "__slots__" not in cls.__dict__
    )


def making(record: DeclaredRecord, source: Source) -> Iterable[str]:
    """The lines that make a record of its twin `v`."""
    yield f"o = new({source.name(record.cls)})"
    for name, each in record.fields.items():
        inner = part_of(each)
        if inner is None:
            yield f"o.{name} = v.{name}"
        else:
            function = source.function(inner, False, functools.partial(making, inner, source))
            yield f"w = v.{name}"
            yield f"o.{name} = w if w is None else {function}(w)"
    yield "return o"


def part_of(of: DeclaredType) -> DeclaredRecord | None:
    """The record that a field holds itself, or None. (Those in lists and dicts are left to msgspec.)"""
    if isinstance(of, UnionType):
        others = [each for each in of.members if not (isinstance(each, ScalarType) and each.kind is type(None))]
        of = others[0] if len(others) == 1 else of
    return of if isinstance(of, DeclaredRecord) and is_open(of.cls) else None


def twin_of(record: DeclaredRecord) -> Any:
    """A struct with the same fields, types and defaults."""
    hints = typing.get_type_hints(record.cls, include_extras=True)
    fields: list[Any] = []
    for field in dataclasses.fields(record.cls):
        inner = part_of(record.fields[field.name])
        hint = hints[field.name]
        if inner is not None:
            hint = twin_of(inner) | None if isinstance(record.fields[field.name], UnionType) else twin_of(inner)
        if field.default is not dataclasses.MISSING:
            fields.append((field.name, hint, field.default))
        elif field.default_factory is not dataclasses.MISSING:
            fields.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, hint))
    return msgspec.defstruct(record.cls.__name__, fields, kw_only=True)


# --- reading without the class ----------------------------------------------------------------------------------------


def lifted(lift: Any, value: Any, record: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """A value that was decoded without its type, with the types that `lift` notes; `record` makes one of its fields."""
    if lift is None or value is None:
        return value
    if type(lift) is int:
        return FROM_TEXT[lift](value) if lift in FROM_TEXT and type(value) is str else lifted_datetime(lift, value)
    if type(lift) is dict:
        if type(value) is not dict:
            return value
        return record({name: lifted(lift.get(name), item, record) for name, item in value.items()})
    form, inner = lift
    if form == "dict" and type(value) is dict:
        return {key: lifted(inner, item, record) for key, item in value.items()}
    if type(value) is not list:
        return value
    if form == "items":
        return tuple(lifted(each, item, record) for each, item in zip(inner, value, strict=True))
    items = [lifted(inner, item, record) for item in value]
    return tuple(items) if form == "tuple" else items


def mentions(lift: Any, code: int) -> bool:
    parts = lift.values() if type(lift) is dict else lift if type(lift) is list else ()
    return lift == code or any(mentions(part, code) for part in parts)


def in_iso(value: Any) -> Any:
    """The same with datetimes as texts."""
    if type(value) is dict:
        return {key: in_iso(item) for key, item in value.items()}
    if type(value) is list:
        return [in_iso(item) for item in value]
    return value.isoformat() if type(value) is datetime.datetime else value


def lifted_datetime(lift: int, value: Any) -> Any:
    is_text = lift == DATETIME_CODE and type(value) is str
    return datetime.datetime.fromisoformat(value) if is_text else value
