"""Conversion: what a migration returns, as a value of the declared type.

Old states reach a migration without their types: a record is a dict of its fields. So what it returns may hold dicts,
lists and texts where records, tuples and dates are declared. They are converted if nothing is lost, else refused: the
message names the part, the type wanted and the value found.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.signature import conforms
from headrace.durability.added_fields import is_known, set_field
from headrace.errors import BadValue
from headrace.model.app import is_record
from headrace.wire.defaults import NOTHING, described
from headrace.wire.hints import name_of
from headrace.wire.values import shown


def checked(value: Any, hint: Any, path: str = "") -> Any:
    """The value as this type wants it; raises BadValue if it cannot be that. Values that are right stay as they are."""
    if hint is Any or hint is None:
        return value
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return leaf(checked(value, parts[0], path), hint, path)
    if origin is typing.Union or origin is types.UnionType:
        return one_of(value, hint, parts, path)
    if is_record(hint):
        return record(value, hint, path)
    if origin in CONTAINERS and parts and isinstance(value, ACCEPTED[origin]):
        return CONTAINERS[origin](value, parts, path)
    return leaf(value, hint, path)


def misfit(value: Any, hint: Any, path: str) -> BadValue:
    found = f"{shown(value)} ({type(value).__name__})"
    return BadValue(f"{path.lstrip('.') or 'the state'} must be {name_of(hint)}, but is {found}")


def leaf(value: Any, hint: Any, path: str) -> Any:
    if conforms(value, hint) or not is_known(hint):
        return value
    try:
        return msgspec.convert(value, hint, strict=True)
    except Exception:  # a conversion may run the __post_init__ of a user's class
        raise misfit(value, hint, path) from None


def one_of(value: Any, hint: Any, choices: tuple[Any, ...], path: str) -> Any:
    """What it is already counts first; then it must be convertible to exactly one of the types."""
    found = []
    for choice in choices:
        try:
            made = leaf(value, type(None), path) if choice is type(None) else checked(value, choice, path)
        except BadValue:
            continue
        if made is value:
            return value
        found.append(made)
    if len(found) != 1:
        raise misfit(value, hint, path)
    return found[0]


def record(value: Any, hint: type, path: str) -> Any:
    hints = typing.get_type_hints(hint, include_extras=True)
    if type(value) is dict:
        return made_of(value, hint, hints, path)
    if type(value) is not hint:
        raise misfit(value, hint, path)
    made: Any = value
    for name, _, _ in described(hint):
        part = getattr(value, name, None)
        right = checked(part, hints.get(name, Any), f"{path}.{name}")
        if right is not part:
            made = copy.copy(value) if made is value else made
            set_field(made, name, right)
    return made


def made_of(value: dict[Any, Any], hint: type, hints: dict[str, Any], path: str) -> Any:
    """A record of the fields in a dict. Its constructor runs, since the record is new."""
    where, fields = path.lstrip(".") or "the state", described(hint)
    names = [name for name, _, _ in fields]
    for name in value:
        if name not in names:
            raise BadValue(f"{where} has the field {shown(name)}, which {hint.__name__} does not have")
    for name, default, factory in fields:
        if default is NOTHING and factory is None and name not in value:
            raise BadValue(f"{where} lacks the field {name!r} of {hint.__name__}")
    given = {name: checked(part, hints.get(name, Any), f"{path}.{name}") for name, part in value.items()}
    late = [] if issubclass(hint, msgspec.Struct) else [each.name for each in dataclasses.fields(hint) if not each.init]  # type: ignore[arg-type]
    made = hint(**{name: part for name, part in given.items() if name not in late})
    for name in late:
        if name in given:
            set_field(made, name, given[name])
    return made


def listed(value: Any, parts: tuple[Any, ...], path: str) -> Any:
    right = [checked(part, parts[0], f"{path}[{at}]") for at, part in enumerate(value)]
    return value if type(value) is list and unchanged(value, right) else right


def tupled(value: Any, parts: tuple[Any, ...], path: str) -> Any:
    hints = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
    if len(hints) != len(value):
        raise BadValue(f"{path.lstrip('.') or 'the state'} must have {len(hints)} parts, but has {len(value)}")
    right = tuple(
        checked(part, hint, f"{path}[{at}]") for at, (part, hint) in enumerate(zip(value, hints, strict=True))
    )
    return value if type(value) is tuple and unchanged(value, right) else right


def mapped(value: Any, parts: tuple[Any, ...], path: str) -> Any:
    right = {
        checked(key, parts[0], f"{path}[{shown(key)}]"): checked(part, parts[1], f"{path}[{shown(key)}]")
        for key, part in value.items()
    }
    is_same = type(value) is dict and unchanged([*value, *value.values()], [*right, *right.values()])
    return value if is_same else right


def unchanged(parts: Any, right: Any) -> bool:
    return len(parts) == len(right) and all(one is other for one, other in zip(parts, right, strict=True))


ACCEPTED: dict[Any, tuple[type, ...]] = {list: (list, tuple), tuple: (list, tuple), dict: (dict,)}
CONTAINERS: dict[Any, Callable[[Any, tuple[Any, ...], str], Any]] = {list: listed, tuple: tupled, dict: mapped}
