"""States as typed columns, against the values they were sealed from."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App, Places
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
from headrace.model.fingerprint import fingerprint, type_text
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


ODD = [
    ([5, "far"], "value of entity {at}: 'far' is not of type int64", [5, None]),
    ([{"n": 1}, {"n": "far"}], "n of entity {at}: 'far' is not of type int64", [1, None]),
    ([Point(1, 1.0), Point("far", 1.0)], "x of entity {at}: 'far' is not of type int64", [1, None]),  # type: ignore[arg-type]
    ([Point(1, 1.0), 5], "the state of entity {at}: 5 is not a record", [1, None]),
    ([[1], [1, "a"]], r"value\[1\] of entity {at}: 'a' is not of type int64", [[1], None]),
    ([[1], {1: 2, "a": [3]}], "value of entity {at}: a dict is not of type list<item: int64>", [[1], None]),
]


@pytest.mark.parametrize(("pair", "says", "shown"), ODD)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_one_bad_state_is_named_or_null_and_the_others_are_read(
    pair: list[Any], says: str, shown: list[Any], at: int
) -> None:
    """Wherever it is: what most states are is taken for the type of all."""
    good, bad = pair
    states = [VALUES.seal(good)] * 7
    states.insert(at, VALUES.seal(bad))
    columns = non_empty(split(states))
    strict, lenient = ShapeGuess("thing"), ShapeGuess("thing", are_null=True)
    for guess in (strict, lenient):
        guess.add(columns, lambda row: f"entity {row}")
    with pytest.raises(BadValue, match=f"operator 'thing' do not have one type: {says.format(at=at)}. Declare it"):
        strict.shape()
    shape = lenient.shape()
    assert shape is not None
    misfits = Misfits(lambda row: f"entity {row}", are_null=True)
    found = arrays(columns, shape, misfits)
    assert misfits.rows == {at}
    expected = [shown[0]] * 7
    expected.insert(at, shown[1])
    assert found[0].to_pylist() == expected
    assert all(array[at].as_py() is None for array in found)
    with pytest.raises(BadValue, match=says.format(at=at)):
        arrays(columns, shape, Misfits(lambda row: f"entity {row}"))


def test_many_kinds_of_states_have_a_shape_all_the_same() -> None:
    guess = ShapeGuess("thing", are_null=True)
    odd = [{f"f{number}": [number, "x"]} for number in range(30)]
    values = [*odd, *range(50), *[Point(1, 1.0)] * 5]
    guess.add(non_empty(split([VALUES.seal(value) for value in values])), str)
    shape = guess.shape()
    assert shape is not None
    assert shape.columns[0].type == pa.int64()


PLACED = Annotated[Decimal, Places(18, 2)]
LOCAL = Annotated[datetime.datetime, msgspec.Meta(tz=False)]


@pytest.mark.parametrize(
    ("hint", "type"),
    [
        (PLACED, pa.decimal128(18, 2)),
        (PLACED | None, pa.decimal128(18, 2)),
        (Annotated[Decimal | None, Places(18, 2)], pa.decimal128(18, 2)),
        (Annotated[Decimal, "in | euros", Places(18, 2)], pa.decimal128(18, 2)),
        (list[PLACED], pa.list_(pa.decimal128(18, 2))),
        (dict[str, PLACED | None], pa.map_(pa.string(), pa.decimal128(18, 2))),
        (Decimal, pa.decimal128(30, 4)),
        (dict[str, list[Decimal]], pa.map_(pa.string(), pa.list_(pa.decimal128(30, 4)))),
        (datetime.datetime, pa.timestamp("us", "UTC")),
        (LOCAL, pa.timestamp("us")),
        (tuple[LOCAL, ...] | None, pa.list_(pa.timestamp("us"))),
        (Annotated[datetime.datetime, msgspec.Meta(tz=True)], pa.timestamp("us", "UTC")),
        (Annotated[int, msgspec.Meta(ge=0)] | None, pa.int64()),
        (dict[str, Annotated[int, msgspec.Meta(ge=0)]], pa.map_(pa.string(), pa.int64())),
        (Sequence[int], pa.list_(pa.int64())),
        (Mapping[str, int], pa.map_(pa.string(), pa.int64())),
        (Literal["a", None], pa.string()),
        (Annotated[int, msgspec.Meta(ge=0)] | str, None),
        (Any, None),
    ],
)
def test_what_is_annotated_decides_the_type(hint: Any, type: pa.DataType | None) -> None:
    assert DeclaredColumns({}, Places(30, 4)).of(type_text(hint)) == type


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
