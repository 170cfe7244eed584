"""Random declared types: what was put comes back equal through the columns of a table, in either form of a record."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import App, Config
from headrace.core.program import Program
from headrace.durability.columns import split
from headrace.durability.reading import record_rows
from headrace.durability.reading.column_types import TableShape, declared
from headrace.durability.reading.fitting import DoesNotFit, fit
from headrace.durability.reading.scan import non_empty
from headrace.durability.reading.typed import Misfits, arrays
from headrace.errors import BadValue
from headrace.model.fingerprint import fingerprint
from headrace.wire.values import wrap
from tests.durability.declared_types import DrawnType, drawn_records, drawn_types, optional


def program_of(drawn: DrawnType) -> tuple[Program, TableShape]:
    app = App("drawn")
    app.operator("thing", state=drawn.hint)
    shape = declared(fingerprint(app), "thing")
    assert shape is not None
    return Program(app, Config()), shape


def table(sealed: list[Any], shape: TableShape) -> list[dict[str, Any]]:
    made = arrays(non_empty(split(sealed)), shape, Misfits(lambda row: f"entity {row}"))
    for column, array in zip(shape.columns, made, strict=True):
        array.validate(full=True)
        assert array.type == column.type
    return pa.table(made, names=[column.name for column in shape.columns]).to_pylist()


@settings(max_examples=300)
@given(drawn_records, st.data(), st.booleans())
def test_what_was_put_comes_back_equal_from_the_columns(drawn: DrawnType, data: st.DataObject, expires: bool) -> None:
    values = data.draw(st.lists(drawn.values, min_size=1, max_size=5))
    program, shape = program_of(drawn)
    assert not any(column.is_json for column in shape.columns)
    seals = [program.states["thing"].seal, program.values.seal]  # the form for its type, and that for any value
    sealed = [data.draw(st.sampled_from(seals))(value) for value in values]
    found = table([wrap(each, 5) for each in sealed] if expires else sealed, shape)
    assert found == [drawn.shown(value) for value in values]


@given(drawn_types.map(optional) | drawn_types, st.data())
def test_values_of_any_type_come_back_equal(drawn: DrawnType, data: st.DataObject) -> None:
    values = data.draw(st.lists(drawn.values, min_size=1, max_size=5))
    program, shape = program_of(drawn)
    found = table([program.states["thing"].seal(value) for value in values], shape)
    shown = [drawn.shown(value) for value in values]
    if shape.is_record:
        shown = [value or {column.name: None for column in shape.columns} for value in shown]
    else:
        shown = [{"value": value} for value in shown]
    assert found == shown


EDGES = sorted({sign * ((1 << bits) + step) for bits in range(64) for step in (-1, 0, 1) for sign in (1, -1)} | {0})
INTS_OF_ALL_WIDTHS = [each for each in EDGES if -(1 << 63) <= each < 1 << 63]


class Reading(msgspec.Struct):
    a: int
    a_long_name_of_a_field: float
    flag: bool
    maybe: int | None


def test_numbers_of_all_widths_are_parsed_without_decoding_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    program, shape = program_of(DrawnType(Reading, st.nothing(), lambda value: value))
    values = [
        Reading(number, float(number) / 3, number % 2 == 0, None if number % 3 else number)
        for number in INTS_OF_ALL_WIDTHS
    ]
    values += [Reading(0, special, True, None) for special in (math.inf, -math.inf, -0.0, 5e-324)]
    monkeypatch.setattr(record_rows, "decoded", None)
    found = table([program.states["thing"].seal(value) for value in values], shape)
    assert [repr(row) for row in found] == [repr(msgspec.structs.asdict(value)) for value in values]


def test_a_record_among_numbers_that_is_none_or_too_large_is_found() -> None:
    program, shape = program_of(DrawnType(Reading, st.nothing(), lambda value: value))
    seal = program.states["thing"].seal
    good, large, int_in_float = Reading(1, 2.0, True, 3), Reading(1 << 63, 2.0, True, 3), Reading(1, 2, True, 3)
    assert table([seal(good), seal(int_in_float), seal(good)], shape) == [msgspec.structs.asdict(good) | {"a": 1}] * 3
    with pytest.raises(BadValue, match=r"a of entity 1: 9223372036854775808 is not of type int64"):
        table([seal(good), seal(large)], shape)
    for cut in range(1, 30):  # bytes that no codec makes
        with pytest.raises((BadValue, pa.ArrowException)):
            table([seal(good), seal(good)[:-cut]], shape)


UTC_TYPE, LOCAL_TYPE = pa.timestamp("us", "UTC"), pa.timestamp("us")
NOON = datetime.datetime(2026, 1, 1, 12)


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (Decimal("1.005"), pa.decimal128(10, 2)),
        (Decimal("1E+8"), pa.decimal128(10, 2)),
        (Decimal("NaN"), pa.decimal128(10, 2)),
        ((1 << 53) + 1, pa.float64()),
        (1 << 2000, pa.float64()),
        (1 << 63, pa.int64()),
        (1 << 31, pa.int32()),
        (True, pa.int64()),
        (1.0, pa.int64()),
        (1, pa.bool_()),
        (1, pa.string()),
        ("2026-01-01", pa.date32()),
        (NOON, pa.date32()),
        (datetime.date(2026, 1, 1), UTC_TYPE),
        (NOON.replace(tzinfo=datetime.UTC), LOCAL_TYPE),
        ((1, 2, 3), pa.struct([("_1", pa.int64()), ("_2", pa.int64())])),
    ],
)
def test_a_value_that_would_lose_something_does_not_fit(value: Any, type: pa.DataType) -> None:
    for whole, inside, path in (
        (value, type, ""),
        ([None, value], pa.list_(type), "[1]"),
        ({"a": value}, pa.map_(pa.string(), type), "['a']"),
        ({"a": {"b": value}}, pa.struct([("a", pa.struct([("b", type)]))]), ".a.b"),
    ):
        with pytest.raises(DoesNotFit) as caught:
            fit(whole, inside)
        assert caught.value.path == path
        assert str(caught.value).endswith(f"is not of type {type}")


@pytest.mark.parametrize(
    ("value", "type", "cell"),
    [
        (Decimal("1.50"), pa.decimal128(10, 2), Decimal("1.50")),
        (Decimal("0E+99"), pa.decimal128(10, 2), Decimal(0)),
        (7, pa.decimal128(10, 2), Decimal(7)),
        (1 << 53, pa.float64(), float(1 << 53)),
        (NOON, UTC_TYPE, NOON.replace(tzinfo=datetime.UTC)),
        (NOON, LOCAL_TYPE, NOON),
    ],
)
def test_a_value_that_loses_nothing_fits(value: Any, type: pa.DataType, cell: Any) -> None:
    assert pa.array([fit(value, type)], type).to_pylist() == [cell]
