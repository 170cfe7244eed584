"""What a reply shows in JSON can be sent back: it becomes the value that it was, for random declared types."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import typing
from typing import Any

import pytest

from headrace.gateway.answers import json_encode
from headrace.wire.from_json import Converters, NotConverted, NumberText
from headrace.wire.hints import Hints, Unsupported
from headrace.wire.types import Room
from tests.core.carried import shape
from tests.core.declared import NAMED, DrawnTypes, fields_of, has_type, parts_of


def is_told_by_json(hint: Any) -> bool:
    """Not of Any, and not of a text that may be bytes: JSON does not say which it was."""
    parts = list(typing.get_args(hint))
    if hint is Any or {str, bytes} <= set(parts):
        return False
    if typing.get_origin(hint) in (typing.Literal, typing.Annotated):
        return True
    if isinstance(hint, type) and not parts and hasattr(hint, "__annotations__"):
        parts = list(fields_of(hint).values())
    return all(is_told_by_json(part) for part in parts if part is not ...)


def can_be_written(value: Any) -> bool:
    """JSON has no NaN and no infinity, and no time has a fold or a zone's name."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, decimal.Decimal):
        return value.is_finite()
    if isinstance(value, datetime.datetime):
        return not value.fold and value.tzinfo is not NAMED
    if isinstance(value, dict):
        return all(map(can_be_written, value.values()))
    if isinstance(value, list | tuple):
        return all(map(can_be_written, value))
    return all(can_be_written(getattr(value, name)) for name in parts_of(value))


def as_floats(value: Any, hint: Any) -> Any:
    """An int passes for a float in Python; from JSON it becomes one."""
    return float(value) if hint is float and type(value) is int else value


@pytest.mark.parametrize("seed", range(8))
def test_what_was_answered_in_json_can_be_sent_back(seed: int) -> None:
    types, compared = DrawnTypes(100 + seed), 0
    for _ in range(150):
        hint = types.draw()
        try:
            declared = Hints().type_of(hint)
        except Unsupported:  # a union that msgspec cannot tell apart
            continue
        if not is_told_by_json(hint):
            continue
        value = as_floats(types.value(hint), hint)
        if not can_be_written(value):
            continue
        for has_texts in (False, True):
            text = json_encode(value)
            read = json.loads(text, parse_float=NumberText if has_texts else None)
            convert = Converters(has_texts).of(declared)
            made = read if convert is None else convert(read)
            assert has_type(made, hint)
            if not has_int_for_float(value, hint):
                assert shape(made) == shape(value), text
                compared += 1
    assert compared > 50


def has_int_for_float(value: Any, hint: Any) -> bool:
    """Somewhere inside: it comes back as a float."""
    return not has_exactly(value, hint)


def has_exactly(value: Any, hint: Any) -> bool:
    if type(value) is int and hint is float:
        return False
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return all(has_exactly(each, parts[1]) for each in value.values())
    if origin in (list, tuple) and (origin is list or parts[-1:] == (...,)):
        return all(has_exactly(each, parts[0]) for each in value)
    if origin is tuple:
        return all(map(has_exactly, value, parts))
    if origin in (typing.Literal, typing.Annotated):
        return True
    if parts:  # a union
        return any(has_type(value, part) and has_exactly(value, part) for part in parts)
    names = parts_of(value) if isinstance(hint, type) and type(value) is hint else []
    return all(has_exactly(getattr(value, name), fields_of(hint)[name]) for name in names)


@pytest.mark.parametrize("seed", range(4))
def test_json_that_is_spoiled_is_refused_or_has_the_type(seed: int) -> None:
    """A conversion never gives a wrong value: the check after it takes exactly what has the type."""
    types, refused = DrawnTypes(200 + seed), 0
    for _ in range(150):
        hint = types.draw()
        try:
            declared = Hints().type_of(hint)
            text = json_encode(types.spoiled(types.value(hint)))
        except (Unsupported, TypeError, ValueError, AttributeError, OverflowError, UnicodeError):  # cannot be written
            continue
        convert = Converters(True).of(declared)
        read = json.loads(text, parse_float=NumberText)
        try:
            made = read if convert is None else convert(read)
        except NotConverted:
            refused += 1
            continue
        taken = declared.fault(made, Room(1 << 30, 64)) is None
        assert taken == has_type(made, hint)
        assert NumberText not in kinds_in(made), "the text of a number is left"
        refused += not taken
    assert refused > 10


def kinds_in(value: Any) -> set[type]:
    if isinstance(value, dict):
        return {kind for each in value.values() for kind in kinds_in(each)}
    if isinstance(value, list | tuple):
        return {kind for each in value for kind in kinds_in(each)}
    return {type(value)}.union(*(kinds_in(getattr(value, name)) for name in parts_of(value)))
