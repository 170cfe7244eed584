"""Examples of declared types, in JSON: for people who try a function."""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

from headrace.wire.from_json import Converters, NotConverted, RecordConverter
from headrace.wire.types import (
    ConstrainedType,
    DatetimeType,
    DeclaredRecord,
    DeclaredType,
    DictType,
    ListType,
    LiteralType,
    Room,
    ScalarType,
    TextType,
    TupleType,
    UnionType,
)

SIZE_MAX, DEPTH_MAX = 1_000, 8
SCALARS: dict[type, tuple[Any, ...]] = {
    int: (1, 0, 10, 100, 1_000, -1),
    float: (1.5, 0.5, 1, 10, 100, -1),
    str: ("text", "a", "", "a longer text", "A", "1"),
    bool: (True,),
    bytes: ("AQID", "AQ==", ""),
    type(None): (None,),
}
TEXTS: dict[type, tuple[str, ...]] = {
    decimal.Decimal: ("1.50", "1", "0", "0.5", "100", "-1"),
    datetime.date: ("2026-01-31",),
    uuid.UUID: ("00000000-0000-0000-0000-000000000001",),
}
TIMES = ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00")


def example_of(of: DeclaredType) -> Any:
    """A value that is taken for the type, if one is found."""
    candidates = candidates_of(of, 0)
    return next((each for each in candidates if is_taken(each, of)), candidates[0])


def is_taken(value: Any, of: DeclaredType) -> bool:
    convert = Converters(has_texts=False).of(of)
    try:
        return of.fault(value if convert is None else convert(value), Room(SIZE_MAX, DEPTH_MAX)) is None
    except NotConverted:
        return False


def candidates_of(of: DeclaredType, depth: int) -> tuple[Any, ...]:
    """The first ones are the nicest."""
    if isinstance(of, ScalarType):
        return SCALARS[of.kind]
    if isinstance(of, TextType):
        return TEXTS[of.kind]
    if isinstance(of, DatetimeType):
        return TIMES
    if isinstance(of, LiteralType):
        return of.values
    if isinstance(of, ConstrainedType):
        return candidates_of(of.base, depth)
    if depth >= DEPTH_MAX:
        return (None,)
    if isinstance(of, UnionType):
        return tuple(each for member in of.members for each in candidates_of(member, depth + 1))
    if isinstance(of, ListType):
        return tuple([each] * count for count in (1, 0, 2, 3) for each in candidates_of(of.item, depth + 1)[:1])
    if isinstance(of, TupleType):
        return ([first(each, depth) for each in of.items],)
    if isinstance(of, DictType):
        keys = candidates_of(of.key, depth + 1)
        return ({str(keys[0]): first(of.item, depth)}, {})
    if isinstance(of, DeclaredRecord):
        return (record_example(of, depth),)
    return ("text",)


def first(of: DeclaredType, depth: int) -> Any:
    """The first candidate that is taken."""
    candidates = candidates_of(of, depth + 1)
    return next((each for each in candidates if is_taken(each, of)), candidates[0])


def record_example(of: DeclaredRecord, depth: int) -> Any:
    """With the fields that must be given."""
    shape = RecordConverter(of)
    fields = {} if shape.tag is None else {shape.tag[0]: shape.tag[1]}
    fields |= {name: first(of.fields[field], depth) for name, field in shape.names.items() if name in shape.needed}
    return list(fields.values()) if shape.is_array else fields
