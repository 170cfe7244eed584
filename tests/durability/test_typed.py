"""States as typed columns, against the values they were sealed from."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App
from headrace.durability.columns import split
from headrace.durability.reading.column_types import (
    JSON,
    DeclaredColumns,
    TableShape,
    declared,
    split_outside_brackets,
)
from headrace.durability.reading.scan import non_empty
from headrace.durability.reading.shape_guess import ShapeGuess
from headrace.durability.reading.typed import Misfits, arrays
from headrace.errors import BadValue
from headrace.model.fingerprint import fingerprint
from headrace.wire.values import Values, wrap

UTC = datetime.UTC


@dataclasses.dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str


@dataclasses.dataclass
class Account:
    owner: str
    balance: int
    rate: float
    is_open: bool
    picture: bytes
    limit: int | None
    last: Money | None
    tags: list[str]
    stock: dict[str, int]
    pair: tuple[int, str]
    day: datetime.date
    at: datetime.datetime
    token: uuid.UUID
    kind: Literal["a", "b"]
    size: Annotated[int, msgspec.Meta(ge=0)]
    anything: Any
    either: int | str


class Point(msgspec.Struct):
    x: int
    y: float


@dataclasses.dataclass
class Tree:
    name: str
    children: list[Tree]


VALUES = Values([Account, Money, Point, Tree])


def shape_of(state: Any) -> TableShape:
    app = App("shop")
    app.operator("thing", state=state)
    shape = declared(fingerprint(app), "thing")
    assert shape is not None
    return shape


def table(values: list[Any], shape: TableShape, is_wrapped: bool = False) -> list[dict[str, Any]]:
    sealed = [wrap(VALUES.seal(value), 5) if is_wrapped else VALUES.seal(value) for value in values]
    columns = arrays(non_empty(split(sealed)), shape, Misfits(lambda row: f"entity {row}"))
    names = [column.name for column in shape.columns]
    for column, made in zip(shape.columns, columns, strict=True):
        assert made.type == column.type
    return pa.table(columns, names=names).to_pylist()


def account(number: int) -> Account:
    return Account(
        owner=f"o{number}" * (number % 40),
        balance=number * 10**12,
        rate=number / 3,
        is_open=number % 2 == 0,
        picture=bytes(range(number % 7)),
        limit=None if number % 3 else number,
        last=Money(Decimal(number) / 4, "€") if number % 4 else None,
        tags=["x"] * (number % 3),
        stock={f"s{at}": at for at in range(number % 3)},
        pair=(number, "p"),
        day=datetime.date(2026, 1, 1) + datetime.timedelta(number),
        at=datetime.datetime(2026, 1, 1, 12, tzinfo=UTC) + datetime.timedelta(seconds=number),
        token=uuid.UUID(int=number),
        kind="a",
        size=number,
        anything={"n": [number]},
        either=number if number % 2 else "text",
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_record_is_one_column_per_field(is_wrapped: bool) -> None:
    accounts = [account(number) for number in range(300)]
    found = table(accounts, shape_of(Account), is_wrapped)
    for row, each in zip(found, accounts, strict=True):
        plain = {name: getattr(each, name) for name in Account.__dataclass_fields__}
        plain["last"] = None if each.last is None else dataclasses.asdict(each.last)
        plain["stock"] = list(each.stock.items())
        plain["pair"] = {"_1": each.pair[0], "_2": each.pair[1]}
        plain["token"] = str(each.token)
        plain["anything"] = msgspec.json.encode(each.anything).decode()
        plain["either"] = msgspec.json.encode(each.either).decode()
        assert row == plain


def test_structs_are_records_too() -> None:
    points = [Point(number, number / 2) for number in range(-50, 50)]
    assert table(points, shape_of(Point)) == [{"x": each.x, "y": each.y} for each in points]


def test_an_entity_without_a_record_has_nulls_and_ints_do_for_floats() -> None:
    assert table([Point(1, 2), None], shape_of(Point | None)) == [{"x": 1, "y": 2.0}, {"x": None, "y": None}]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.none(), max_size=20))
def test_ints_and_none(values: list[int | None]) -> None:
    assert table(values, shape_of(int | None)) == [{"value": value} for value in values]


@given(st.lists(st.floats(allow_nan=False) | st.integers(-(1 << 50), 1 << 50), max_size=20))
def test_ints_do_for_floats(values: list[float]) -> None:
    assert table(values, shape_of(float)) == [{"value": float(value)} for value in values]


@pytest.mark.parametrize(
    ("hint", "values"),
    [
        (str, ["", "ü", "x" * 100]),
        (bool, [True, False]),
        (bytes, [b"", b"\xc1", b"abc"]),
        (list[int], [[], [1, 2]]),
        (datetime.date, [datetime.date(2026, 2, 3)]),
        (Decimal, [Decimal("1.5"), Decimal(-3)]),
    ],
)
def test_anything_else_is_one_column(hint: Any, values: list[Any]) -> None:
    assert table(values, shape_of(hint)) == [{"value": value} for value in values]


def test_a_record_inside_itself_is_json() -> None:
    shape = shape_of(Tree)
    assert [column.is_json for column in shape.columns] == [False, True]
    assert table([Tree("a", [Tree("b", [])])], shape) == [
        {"name": "a", "children": '[{"name":"b","children":[]}]'},
    ]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Point("far", 1.0), "x of entity 1: 'far' is not of type int64"),  # type: ignore[arg-type]
        (Point(1 << 63, 1.0), "x of entity 1: "),
        (7, "the state of entity 1: 7 is not a record"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, says: str) -> None:
    with pytest.raises(BadValue, match=says) as caught:
        table([Point(1, 1.0), value], shape_of(Point))
    assert 'option("as", "json")' in str(caught.value)


def test_json_of_anything() -> None:
    values = [5, "ü", 1.5, None, True, [1, (2, 3)], Point(1, 2.0), {"a": b"bytes"}]
    found = [msgspec.json.decode(row["value"]) for row in table(values, JSON)]
    assert found == [5, "ü", 1.5, None, True, [1, [2, 3]], {"x": 1, "y": 2.0}, {"a": "Ynl0ZXM="}]


# --- where nothing is declared ----------------------------------------------------------------------------------------


def guessed(*batches: list[Any]) -> TableShape | None:
    guess = ShapeGuess("thing")
    for values in batches:
        guess.add(non_empty(split([VALUES.seal(value) for value in values])), lambda row: f"entity {row}")
    return guess.shape()


@pytest.mark.parametrize(
    ("batches", "columns"),
    [
        (([1, 2], [3]), {"value": pa.int64()}),
        (([1, 2.5],), {"value": pa.float64()}),
        (([1], [2.5]), {"value": pa.float64()}),
        ((["a"], [None]), {"value": pa.string()}),
        (([True],), {"value": pa.bool_()}),
        (([[1], []], [[2, 3]]), {"value": pa.list_(pa.int64())}),
        (([(1, 2)],), {"value": pa.list_(pa.int64())}),
        (([Point(1, 2.0)], [Point(3, 4.0)]), {"x": pa.int64(), "y": pa.float64()}),
        (([{"a": 1, "b": "x"}], [{"a": 2, "b": None}]), {"a": pa.int64(), "b": pa.string()}),
        (([{"a": 1}], [{"b": 2}, {}]), {"value": pa.map_(pa.string(), pa.int64())}),
        (([{1: "a"}], [{1: "b"}]), {"value": pa.map_(pa.int64(), pa.string())}),
        (([{}],), {"value": pa.map_(pa.string(), pa.string())}),
    ],
)
def test_states_that_agree_say_what_they_are(batches: tuple[list[Any], ...], columns: dict[str, pa.DataType]) -> None:
    shape = guessed(*batches)
    assert shape is not None
    assert {column.name: column.type for column in shape.columns} == columns
    values = [value for batch in batches for value in batch]
    assert len(table(values, shape)) == len(values)


def test_nothing_says_nothing() -> None:
    assert guessed([], [None]) is None


@pytest.mark.parametrize(
    "batches",
    [([1, "a"],), ([1], ["a"]), ([Point(1, 1.0)], [5]), ([5], [Point(1, 1.0)]), ([{"a": 1}], [Point(1, 1.0)]),
     ([[1], ["a"]],), ([{"a": 1}, {"b": "x"}],),
     ([{"a": 1}], [{"b": "x"}], [{"c": 2}])],
)  # fmt: skip
def test_states_that_differ_are_an_error_that_says_what_to_do(batches: tuple[list[Any], ...]) -> None:
    with pytest.raises(BadValue, match=r"do not have one type.*state=.*option\(\"as\", \"json\"\)"):
        guessed(*batches)


def test_types_are_read_as_they_are_written() -> None:
    assert split_outside_brackets("dict[str, int] | None | Literal['a | b']", " | ") == [
        "dict[str, int]",
        "None",
        "Literal['a | b']",
    ]
    type_of = DeclaredColumns({}).of
    assert type_of("dict[str, list[tuple[int, ...]]]") == pa.map_(pa.string(), pa.list_(pa.list_(pa.int64())))
    assert type_of("int | str") is None
    assert type_of("frozenset[int]") is None
    assert type_of("Literal[1, 2]") == pa.int64()
