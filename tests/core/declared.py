"""Random declared types, with values that have them and values that nearly have them; and an oracle that says which.

A type is drawn as a hint: scalars, texts, lists, dicts, tuples, unions, literals, constraints, and records (dataclasses
that are plain, frozen, with slots or with a __post_init__; structs that are plain, frozen, renamed or strict), nested.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import random
import types
import typing
import uuid
from typing import Annotated, Any, Literal

import msgspec

from headrace import Places

OFFSET = datetime.timezone(datetime.timedelta(hours=2))
NAMED = datetime.timezone(datetime.timedelta(0), "Zulu")
SCALARS = {
    int: (0, 1, -1, 7, 1 << 30, -(1 << 30), (1 << 64) - 1, -(1 << 63)),
    float: (0.0, -0.0, 1.0, 1.5, float("nan"), float("inf"), 1e300),
    str: ("", "a", "\0", "ä€😀", "2024-01-01", "1.0", "x" * 300),
    bool: (True, False),
    bytes: (b"", b"\x00", b"\xc1", b"abc"),
    type(None): (None,),
    decimal.Decimal: tuple(map(decimal.Decimal, ("0", "-0", "1.50", "1E+5", "NaN", "sNaN12", "-Infinity", "0.01"))),
    datetime.date: (datetime.date.min, datetime.date.max, datetime.date(2024, 2, 29)),
    datetime.datetime: (
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC),
        datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.UTC),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.UTC),
        datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=OFFSET),
        datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=NAMED),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
    ),
    uuid.UUID: (uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1), uuid.UUID(int=1 << 100)),
}
ODD = ({1}, object(), OverflowError, 1 << 64, "\ud800", 1j, range(3), bytearray(b"x"))  # of no type that is carried
STRUCTS = ("struct", "fixed", "renamed", "strict")
SHARED: list[Any] = [1, 1.0, True, "1", b"1", None, [], {}, (), [1], (1,), {"a": 1}, 0, 0.0, False, ""]


class DrawnTypes:
    """Draws types, and values for them. The classes that were made are `records`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed, self.records, self.named = seed, list[type](), 0

    def draw(self, depth: int = 0) -> Any:
        """A type hint."""
        rng = self.rng
        kinds = ["scalar"] * 4 + ["record"] * (5 if depth < 3 else 0) + ["list", "dict", "tuple", "items"] * (depth < 3)
        kind = rng.choice([*kinds, "optional", "union", "literal", "any", "constrained"])
        if kind == "scalar":
            return rng.choice([each for each in SCALARS if each is not type(None)])
        if kind == "record":
            return self._record(depth)
        if kind == "list":
            return list[self.draw(depth + 1)]  # type: ignore[misc]
        if kind == "dict":
            return dict[rng.choice((str, int, bytes)), self.draw(depth + 1)]  # type: ignore[misc]
        if kind == "tuple":
            return tuple[self.draw(depth + 1), ...]
        if kind == "items":
            return tuple[tuple(self.draw(depth + 1) for _ in range(rng.randint(1, 3)))]  # type: ignore[misc]
        if kind == "optional":
            inner = self.draw(depth + 1)
            return inner if inner is Any else typing.Union[inner, None]  # noqa: UP007 some hints have no |
        if kind == "union":
            return rng.choice((int | str, int | float, float | None, str | bytes | None, bool | int, int | list[int]))
        if kind == "literal":
            return rng.choice((Literal["a", "b"], Literal[1, 2, "a"], Literal[None, "x"]))
        if kind == "constrained":
            return rng.choice((Annotated[int, msgspec.Meta(ge=0)], Annotated[decimal.Decimal, Places(6, 2)]))
        return Any

    def _record(self, depth: int) -> type:
        rng = self.rng
        self.named += 1
        name = f"R{self.named}"
        fields = [(f"f{at}", self.draw(depth + 1)) for at in range(rng.choice((0, 1, 2, 2, 3, 5, 17)))]
        fields += [("more", *rng.choice(((int, 7), (str | None, None), (tuple[int, ...], ()))))] * rng.randint(0, 1)
        how = rng.choice(("plain", "plain", "frozen", "slots", "init", *STRUCTS, "struct"))
        cls: type
        if how in STRUCTS:
            cls = msgspec.defstruct(
                name,
                fields,
                frozen=how == "fixed",
                rename="camel" if how == "renamed" else None,
                forbid_unknown_fields=how == "strict",
            )
        else:
            namespace = {"__post_init__": lambda self: None} if how == "init" else {}
            cls = dataclasses.make_dataclass(
                name, fields, frozen=how == "frozen", slots=how == "slots", namespace=namespace
            )
        cls.__module__ = __name__
        self.records.append(cls)
        return cls

    def value(self, hint: Any, size: int = 3) -> Any:
        """A value that has the type."""
        rng = self.rng
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return rng.choice([*SHARED, *(rng.choice(values) for values in SCALARS.values()), [(1, {"a": 2})]])
        if hint is float and rng.random() < 0.1:
            return rng.choice((0, 5, -(1 << 40)))  # an int passes for a float
        if hint in SCALARS:
            return rng.choice(SCALARS[hint])
        if hint is None or hint is type(None):
            return None
        if origin in (typing.Union, types.UnionType):
            return self.value(rng.choice(parts), size)
        if origin is Literal:
            return rng.choice(parts)
        if origin is Annotated:
            return decimal.Decimal("12.30") if parts[0] is decimal.Decimal else rng.randrange(100)
        count = rng.choice((0, 1, 2, size))
        if origin is list:
            return [self.value(parts[0], size - 1) for _ in range(count)]
        if origin is dict:
            return {self.value(parts[0]): self.value(parts[1], size - 1) for _ in range(count)}
        if origin is tuple and parts[-1:] == (...,):
            return tuple(self.value(parts[0], size - 1) for _ in range(count))
        if origin is tuple:
            return tuple(self.value(each, size) for each in parts)
        return hint(**{name: self.value(each, size) for name, each in fields_of(hint).items()})

    def spoiled(self, value: Any) -> Any:
        """The value with a part replaced by another value, which may or may not be of the right type."""
        rng = self.rng
        if rng.random() < 0.4 or not parts_of(value):
            others: list[Any] = [*SHARED, *ODD, *(rng.choice(values) for values in SCALARS.values())]
            others += [object.__new__(each) for each in self.records if dataclasses.is_dataclass(each)]  # no fields
            return rng.choice(others)
        at = rng.choice(parts_of(value))
        if type(value) is dict:
            return {**value, at: self.spoiled(value[at])}
        if type(value) in (list, tuple):
            items = list(value)
            items[at] = self.spoiled(items[at])
            return type(value)(items)
        fields = {name: getattr(value, name) for name in fields_of(type(value))}
        return type(value)(**{**fields, at: self.spoiled(fields[at])})


def fields_of(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def parts_of(value: Any) -> list[Any]:
    if type(value) is dict:
        return list(value)
    if type(value) in (list, tuple):
        return list(range(len(value)))
    is_record = dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct)
    return [name for name in fields_of(type(value)) if hasattr(value, name)] if is_record else []


def has_type(value: Any, hint: Any) -> bool:
    """The oracle: does the value have the type as it is? An int passes for a float."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, each) for each in parts)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in parts)
    if origin is Annotated:
        if not has_type(value, parts[0]):
            return False
        if parts[0] is int:
            return bool(value >= 0)
        return value.is_finite() and value == value.quantize(decimal.Decimal("0.01")) and abs(value) < 10_000
    if origin is None and hint in SCALARS:
        return type(value) is hint or (hint is float and type(value) is int)
    if origin is list:
        return type(value) is list and all(has_type(each, parts[0]) for each in value)
    if origin is dict:
        return type(value) is dict and all(has_type(k, parts[0]) and has_type(v, parts[1]) for k, v in value.items())
    if origin is tuple and parts[-1:] == (...,):
        return type(value) is tuple and all(has_type(each, parts[0]) for each in value)
    if origin is tuple:
        return type(value) is tuple and len(value) == len(parts) and all(map(has_type, value, parts))
    if type(value) is not hint:
        return False
    return all(hasattr(value, name) and has_type(getattr(value, name), each) for name, each in fields_of(hint).items())
