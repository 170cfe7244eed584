"""Defaults of a record's fields: what stands for a field that a stored record lacks, since it was added later.

Rules:
1. A factory is called for each record, so no two records share what it makes.
2. A default that is no factory's is shared by all records. So one that can be changed is refused when the app starts.

Never here: which fields are new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import BadValue

Make = Callable[[], Any]
MUTABLE = (list, dict, set, bytearray)


def defaults_of(cls: type) -> dict[str, Make]:
    """How to make the default of each field that has one."""
    found: dict[str, Make] = {}
    for name, default, factory in described(cls):
        if factory is not None:
            found[name] = factory
        elif default is not NOTHING:
            check_shared(f"{cls.__qualname__}.{name}", default)
            found[name] = constant(default)
    return found


NOTHING = object()


def described(cls: type) -> list[tuple[str, Any, Make | None]]:
    """Each field, its default or NOTHING, and its factory."""
    if issubclass(cls, msgspec.Struct):
        return [
            (
                each.name,
                NOTHING if each.default is msgspec.NODEFAULT else each.default,
                None if each.default_factory is msgspec.NODEFAULT else each.default_factory,
            )
            for each in msgspec.structs.fields(cls)
        ]
    return [
        (
            each.name,
            NOTHING if each.default is dataclasses.MISSING else each.default,
            None if each.default_factory is dataclasses.MISSING else each.default_factory,
        )
        for each in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


def constant(value: Any) -> Make:
    return lambda: value


def check_shared(where: str, default: Any) -> None:
    """Refuse a default that can be changed, or holds something that can be."""
    if is_mutable(default):
        raise BadValue(
            f"the default of {where} is one {type(default).__name__} for all records, and it can be changed: make one "
            "for each, as in field(default_factory=...), or use a frozen type"
        )
    for part in parts_of(default):
        check_shared(where, part)


def is_mutable(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        return not kind.__struct_config__.frozen
    if is_dataclass(value):
        return not kind.__dataclass_params__.frozen
    return isinstance(value, MUTABLE)


def parts_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    is_record = isinstance(value, msgspec.Struct) or is_dataclass(value)
    return tuple(getattr(value, name, None) for name, _, _ in described(type(value))) if is_record else ()


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def complete(name: str, fields: dict[str, Any], names: tuple[str, ...], defaults: dict[str, Make]) -> dict[str, Any]:
    """The fields of a stored record, with the defaults of those that it lacks."""
    if type(fields) is not dict:
        raise TypeError(f"the fields of a stored {name} are not a map")
    unknown = [each for each in fields if each not in names]
    if unknown:
        raise ValueError(f"a stored {name} has the field {unknown[0]!r}, which {name} does not have now")
    lacking = [each for each in names if each not in fields and each not in defaults]
    if lacking:
        raise ValueError(f"a stored {name} lacks the field {lacking[0]!r}, which has no default")
    return {each: fields[each] if each in fields else defaults[each]() for each in names}
