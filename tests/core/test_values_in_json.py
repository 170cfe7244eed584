"""A sealed value can be read without the app: in JSON's own types, and never as something else than it was."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import json
import math
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given

from headrace.errors import BadValue
from headrace.wire.values import Values, as_json, plain, wrap
from tests.core.carried import ALLOWED, VALUES, Fixed, Money, Point


def told(value: Any) -> Any:
    """The oracle: the value as one would tell it, a case at a time."""
    kind = type(value)
    if kind in (list, tuple):
        return [told(item) for item in value]
    if kind is dict:
        return {told(key): told(item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {field.name: told(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if issubclass(kind, msgspec.Struct):
        return {name: told(getattr(value, name)) for name in kind.__struct_fields__}
    if kind is bytes:
        return base64.b64encode(value).decode()
    if kind in (datetime.datetime, datetime.date):
        return value.isoformat()
    if kind in (decimal.Decimal, uuid.UUID):
        return str(value)
    return value


def in_json(value: Any) -> Any:
    """What a reader of the JSON gets: keys are text, and there is no number that is none."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is list:
        return list(map(in_json, value))
    return {str(key): in_json(item) for key, item in value.items()} if type(value) is dict else value


@given(ALLOWED)
def test_a_value_is_told_without_the_app(value: Any) -> None:
    sealed = VALUES.seal(value)
    assert repr(plain(sealed)) == repr(told(value))
    assert json.loads(as_json(sealed)) == in_json(told(value))


@given(ALLOWED)
def test_a_state_with_a_time_to_live_is_told_like_any_other(value: Any) -> None:
    assert repr(plain(wrap(VALUES.seal(value), 1_700_000_000_000_000))) == repr(told(value))


def test_what_it_looks_like() -> None:
    value = {
        "who": Point(Fixed("ann", (1, 2)), Money(decimal.Decimal("1.50"))),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        b"raw": b"\x00\xff",
    }
    assert plain(VALUES.seal(value)) == {
        "who": {"x": {"name": "ann", "inner": [1, 2]}, "y": {"amount": "1.50", "currency": "CHF"}},
        "when": "2026-01-02T03:04:05+00:00",
        "cmF3": "AP8=",
    }


@pytest.mark.parametrize("sealed", [b"", b"\xc1", b"\xd4\x7f\x00", b"\xd4\x02\x01", b"\xd4\x04\x90", b"\x92\x01"])
def test_bytes_that_are_no_value_are_refused(sealed: bytes) -> None:
    with pytest.raises(BadValue, match="not an encoded value"):
        plain(sealed)
    with pytest.raises(BadValue, match="not an encoded value"):
        as_json(sealed)


def test_the_deepest_value_is_told() -> None:
    value: Any = 1
    for _ in range(Values().depth_max):
        value = (value,)
    assert plain(VALUES.seal(value)) == told(value)
