"""Values drawn from declared types: small, so that calls meet.

A str is one of the keys, since arguments often are keys; numbers are small, with some at the edges. Everything follows
from the generator that is given.
"""

from __future__ import annotations

import datetime
import decimal
import random
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.wire.types import (
    AnyType,
    ConstrainedType,
    DatetimeType,
    DeclaredRecord,
    DeclaredType,
    DictType,
    ListType,
    LiteralType,
    ScalarType,
    TextType,
    TupleType,
    UnionType,
)

KEYS = ("a", "b", "c")
INTS = (0, 1, 1, 2, 3, 5, 10, 10, 20, 50, 100, -1)
FLOATS = (0.0, 0.5, 1.0, 2.0, 10.0, 60.0, 3600.0, -1.0)
ITEMS_MAX = 3
TRIES_MAX = 1_000  # until a value meets its conditions
START = datetime.datetime(2026, 1, 1, 12)

SCALARS: dict[type, Callable[[random.Random], Any]] = {
    int: lambda rng: rng.choice(INTS),
    str: lambda rng: rng.choice(KEYS),
    float: lambda rng: rng.choice(FLOATS),
    bool: lambda rng: rng.random() < 0.5,
    bytes: lambda rng: rng.choice(KEYS).encode(),
    type(None): lambda rng: None,
    decimal.Decimal: lambda rng: decimal.Decimal(rng.choice(INTS)) / rng.choice((1, 10, 100)),
    uuid.UUID: lambda rng: uuid.UUID(int=rng.randrange(3)),
    datetime.date: lambda rng: START.date() + datetime.timedelta(days=rng.randrange(3)),
}


def draw_value(of: DeclaredType, rng: random.Random, depth: int = 0) -> Any:
    """A value of this type."""
    match of:
        case AnyType():
            return SCALARS[rng.choice((int, str))](rng)
        case ScalarType() | TextType():
            return draw_scalar(of.kind, of.text, rng)
        case DatetimeType():
            return START.replace(tzinfo=datetime.UTC) + datetime.timedelta(minutes=rng.randrange(-60, 60))
        case LiteralType():
            return rng.choice(of.values)
        case UnionType():
            return draw_value(rng.choice(of.members), rng, depth)
        case ListType():
            return of.kind(draw_value(of.item, rng, depth + 1) for _ in range(length(rng, depth)))
        case TupleType():
            return tuple(draw_value(each, rng, depth + 1) for each in of.items)
        case DictType():
            return {
                draw_value(of.key, rng, depth + 1): draw_value(of.item, rng, depth + 1)
                for _ in range(length(rng, depth))
            }
        case DeclaredRecord():
            return draw_record(of, rng, depth)
        case ConstrainedType():
            return draw_constrained(of, rng, depth)
    raise cannot(of.text)


def draw_scalar(kind: type, text: str, rng: random.Random) -> Any:
    if kind not in SCALARS:
        raise cannot(text)
    return SCALARS[kind](rng)


def draw_record(of: DeclaredRecord, rng: random.Random, depth: int) -> Any:
    fields = {name: draw_value(each, rng, depth + 1) for name, each in of.fields.items()}
    return msgspec.convert(fields, of.cls) if issubclass(of.cls, msgspec.Struct) else of.cls(**fields)


def draw_constrained(of: ConstrainedType, rng: random.Random, depth: int) -> Any:
    for attempt in range(TRIES_MAX):
        value = draw_value(of.base, rng, depth)
        if type(value) is int and attempt > TRIES_MAX // 10:
            value = rng.randrange(-(10 ** (attempt % 10)), 10 ** (attempt % 10))
        if of.accepts(value):
            return value
    raise cannot(of.text)


def length(rng: random.Random, depth: int) -> int:
    return rng.randint(0, max(0, ITEMS_MAX - depth))


def cannot(text: str) -> ModelError:
    return ModelError(f"the simulator cannot draw a value of type {text}: give the calls with --calls module:strategy")
