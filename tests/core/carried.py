"""Every kind of value that is carried, for tests: records, and what Hypothesis draws."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from typing import Any

import msgspec
from hypothesis import strategies as st

from headrace.wire.values import Values


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    name: Any
    inner: Any = None


@dataclasses.dataclass
class Checked:
    """Its __init__ computes: put back by calling it again, it would come back changed."""

    n: int
    made: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.n += 1
        self.made = 1


class Money(msgspec.Struct):
    amount: Any
    currency: Any = "CHF"


class Frozen(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    some_field: Any


RECORDS = (Point, Fixed, Checked, Money, Frozen)
VALUES = Values(RECORDS)

OFFSETS = st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone)
TEXTUAL = st.one_of(
    st.decimals(),
    st.sampled_from(
        [decimal.Decimal("-0"), decimal.Decimal("1E+5"), decimal.Decimal("sNaN12"), decimal.Decimal("1.50")]
    ),
    st.datetimes(timezones=st.none() | OFFSETS | st.just(datetime.UTC)).map(lambda value: value.replace(fold=0)),
    st.dates(),
    st.uuids(),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([-(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 1 << 30, -(1 << 30), (1 << 30) - 1]),
    st.floats(),
    st.text(),
    st.binary(),
)
KEYS = st.text(max_size=5) | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=5)
ALLOWED = st.recursive(
    SCALARS | TEXTUAL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Fixed, inner, inner),
        st.builds(Checked, st.integers(0, 9)),
        st.builds(Money, inner, inner),
        st.builds(Frozen, some_field=inner),
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """Something that is equal only for values that are the same in every type, all the way down."""
    kind = type(value)
    if kind in (list, tuple):
        return kind, [shape(item) for item in value]
    if kind is dict:
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(kind):
        return kind, [(field.name, shape(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if issubclass(kind, msgspec.Struct):
        return kind, [(name, shape(getattr(value, name))) for name in kind.__struct_fields__]
    if kind is datetime.datetime:
        return kind, value.replace(tzinfo=None), value.utcoffset(), type(value.tzinfo), value.fold
    return kind, repr(value)
