"""Fitting: one value as the cell of a column, if nothing is lost.

Rules:
1. An int fits a float or a decimal column if that holds it exactly; a datetime without a zone counts as UTC in a column
   of timestamps with one. Apart from that a value has the column's own type.
2. Numbers are never rounded and times never shifted: such a value does not fit.
3. Who does not fit is told by the path to the part, the part, and the type wanted.

Never here: many values at once, which entity has them.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.model.places import Places
from headrace.wire.values import shown


class DoesNotFit(Exception):
    """A value that a column cannot hold."""

    def __init__(self, value: Any, type: pa.DataType, path: str = "") -> None:
        self.value, self.type, self.path = value, type, path

    def within(self, step: str) -> DoesNotFit:
        return DoesNotFit(self.value, self.type, step + self.path)

    def __str__(self) -> str:
        found = f"Decimal('{self.value}')" if type(self.value) is decimal.Decimal else shown(self.value)
        return f"{found} is not of type {self.type}"


def fit(value: Any, type: pa.DataType) -> Any:
    """The value as Arrow accepts it for this type."""
    if value is None:
        return None
    for is_type, convert in CONVERSIONS:
        if is_type(type):
            return convert(value, type)
    raise DoesNotFit(value, type)


def of_int(value: Any, type: pa.DataType) -> Any:
    return checked(value, value.__class__ is int and holds(type, value), type)


def holds(type: pa.DataType, value: int) -> bool:
    bits: int = type.bit_width - 1
    return -(1 << bits) <= value < 1 << bits


def of_float(value: Any, type: pa.DataType) -> Any:
    if value.__class__ is not int:
        return checked(value, value.__class__ is float, type)
    try:
        made = float(value)
    except OverflowError:
        raise DoesNotFit(value, type) from None
    checked(value, made == value, type)
    return made


def of_bool(value: Any, type: pa.DataType) -> Any:
    return checked(value, value.__class__ is bool, type)


def of_text(value: Any, type: pa.DataType) -> Any:
    return str(value) if value.__class__ is uuid.UUID else checked(value, value.__class__ is str, type)


def of_bytes(value: Any, type: pa.DataType) -> Any:
    return checked(value, value.__class__ is bytes, type)


def of_time(value: Any, type: pa.DataType) -> Any:
    checked(value, value.__class__ is datetime.datetime, type)
    if type.tz is None:
        return checked(value, value.tzinfo is None, type)
    return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value


def of_date(value: Any, type: pa.DataType) -> Any:
    return checked(value, value.__class__ is datetime.date, type)


def of_decimal(value: Any, type: pa.DataType) -> Any:
    if value.__class__ is int:
        value = decimal.Decimal(value)
    is_one = value.__class__ is decimal.Decimal and Places(type.precision, type.scale).accepts(value)
    return checked(value, is_one, type) or decimal.Decimal(0)  # zeros have exponents that Arrow refuses


def of_list(value: Any, type: pa.DataType) -> Any:
    checked(value, value.__class__ in (list, tuple), type)
    return [part(each, type.value_type, f"[{at}]") for at, each in enumerate(value)]


def of_dict(value: Any, type: pa.DataType) -> Any:
    checked(value, isinstance(value, dict), type)
    return [
        (part(key, type.key_type, f"[{shown(key)}]"), part(item, type.item_type, f"[{shown(key)}]"))
        for key, item in value.items()
    ]


def of_record(value: Any, type: pa.DataType) -> Any:
    if value.__class__ is tuple:
        checked(value, len(value) == type.num_fields, type)
        value = {f"_{at}": each for at, each in enumerate(value, 1)}
    checked(value, isinstance(value, dict), type)
    return {field.name: part(value.get(field.name), field.type, f".{field.name}") for field in type}


def part(value: Any, type: pa.DataType, step: str) -> Any:
    try:
        return fit(value, type)
    except DoesNotFit as error:
        raise error.within(step) from None


def checked(value: Any, is_right: bool, type: pa.DataType) -> Any:
    if not is_right:
        raise DoesNotFit(value, type)
    return value


CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]], ...] = (
    (pa.types.is_integer, of_int),
    (pa.types.is_floating, of_float),
    (pa.types.is_boolean, of_bool),
    (pa.types.is_string, of_text),
    (pa.types.is_binary, of_bytes),
    (pa.types.is_timestamp, of_time),
    (pa.types.is_date, of_date),
    (pa.types.is_decimal, of_decimal),
    (pa.types.is_list, of_list),
    (pa.types.is_map, of_dict),
    (pa.types.is_struct, of_record),
)


def json_of(value: Any) -> str | None:
    """A value, decoded without its types, as JSON text."""
    return None if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def nested_types(type: pa.DataType) -> Iterator[pa.DataType]:
    """The type, and all types inside it."""
    yield type
    for at in range(type.num_fields):
        yield from nested_types(type.field(at).type)
