"""Random declared types with their values, and what the columns of a table show of them."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from headrace import Places

UTC = datetime.UTC
NO_ZONE = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
INTS = st.integers(-(1 << 63), (1 << 63) - 1)
NAIVE = st.datetimes()
ZONES = st.sampled_from([UTC, datetime.timezone(datetime.timedelta(hours=2)), datetime.timezone.min])
AWARE = st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 1, 1), timezones=ZONES)


class DrawnType(NamedTuple):
    """A type, its values, and what a reader of the table gets for one."""

    hint: Any
    values: st.SearchStrategy[Any]
    shown: Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    limit = 10**precision - 1
    return st.builds(lambda number: Decimal(number).scaleb(-scale), st.integers(-limit, limit)) | st.sampled_from(
        [Decimal("0E+9"), Decimal("-0.000")] + ([Decimal("1E+1")] if precision - scale > 1 else [])
    )


@st.composite
def placed_decimals(draw: st.DrawFn) -> DrawnType:
    precision = draw(st.integers(1, 28))  # `scaleb` would round more
    scale = draw(st.integers(0, precision))
    return DrawnType(Annotated[Decimal, Places(precision, scale)], decimals(precision, scale), same)


SCALARS = [
    DrawnType(int, INTS, same),
    DrawnType(bool, st.booleans(), same),
    DrawnType(str, TEXTS, same),
    DrawnType(bytes, st.binary(max_size=5), same),
    DrawnType(float, st.floats(allow_nan=False), same),
    DrawnType(float, st.integers(-(1 << 53), 1 << 53), float),  # an int passes for a float
    DrawnType(datetime.date, st.dates(), same),
    DrawnType(datetime.datetime, AWARE, lambda value: value.astimezone(UTC)),
    DrawnType(NO_ZONE, NAIVE, same),
    DrawnType(uuid.UUID, st.uuids(), str),
    DrawnType(Decimal, decimals(28, 18), same),
]


def optional(inner: DrawnType) -> DrawnType:
    return DrawnType(
        inner.hint | None, st.none() | inner.values, lambda value: None if value is None else inner.shown(value)
    )


def list_of(inner: DrawnType) -> DrawnType:
    return DrawnType(
        list[inner.hint], st.lists(inner.values, max_size=3), lambda value: [inner.shown(each) for each in value]
    )


def tuple_of(inner: DrawnType) -> DrawnType:
    return DrawnType(
        tuple[inner.hint, ...],
        st.lists(inner.values, max_size=3).map(tuple),
        lambda value: [inner.shown(each) for each in value],
    )


def pair_of(one: DrawnType, other: DrawnType) -> DrawnType:
    return DrawnType(
        tuple[one.hint, other.hint],
        st.tuples(one.values, other.values),
        lambda value: {"_1": one.shown(value[0]), "_2": other.shown(value[1])},
    )


def dict_of(inner: DrawnType) -> DrawnType:
    return DrawnType(
        dict[str, inner.hint],
        st.dictionaries(TEXTS, inner.values, max_size=3),
        lambda value: [(key, inner.shown(item)) for key, item in value.items()],
    )


RECORDS_MADE = iter(range(1 << 30))


def record_of(fields: list[DrawnType], is_struct: bool) -> DrawnType:
    name = f"Drawn{next(RECORDS_MADE)}"
    named = {f"f{at}": field for at, field in enumerate(fields)}
    hints = [(field, drawn.hint) for field, drawn in named.items()]
    cls: Any = msgspec.defstruct(name, hints) if is_struct else dataclasses.make_dataclass(name, hints)
    return DrawnType(
        cls,
        st.builds(cls, **{field: drawn.values for field, drawn in named.items()}),
        lambda value: {field: drawn.shown(getattr(value, field)) for field, drawn in named.items()},
    )


def records(inner: st.SearchStrategy[DrawnType]) -> st.SearchStrategy[DrawnType]:
    return st.builds(record_of, st.lists(inner, min_size=1, max_size=4), st.booleans())


scalars = st.sampled_from(SCALARS) | placed_decimals()


def larger(inner: st.SearchStrategy[DrawnType]) -> st.SearchStrategy[DrawnType]:
    return st.one_of(
        st.builds(list_of, inner),
        st.builds(tuple_of, inner),
        st.builds(pair_of, inner, inner),
        st.builds(dict_of, inner),
        records(inner),
        st.builds(optional, inner.filter(lambda drawn: type(None) not in getattr(drawn.hint, "__args__", ()))),
    )


drawn_types = st.recursive(scalars, larger, max_leaves=8)
drawn_records = records(drawn_types)
