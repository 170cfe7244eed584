"""JSON means the same whichever way it comes: over HTTP, alone or in a batch, as a message of Kafka, and as `callJson`
or `argsJson` of Spark. What the values must become is written down here, or computed by Python's own json module."""

from __future__ import annotations

import dataclasses
import datetime
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import App, Config, Context, Places
from headrace.core.admission import Admission
from headrace.core.json_calls import read_call
from headrace.core.program import Program
from headrace.durability.inbox.batch_calls import read_calls
from headrace.durability.inbox.inbox import ClosedBatch, write_segment
from headrace.durability.store import DirectoryStore
from headrace.errors import BadArguments
from headrace.runtime.remote import connect
from headrace.spark.sources.calls import CallColumns
from tests.gateway.served import Address, ask, served_app


@dataclasses.dataclass
class Item:
    sku: str
    price: Decimal
    count: int = 1


@dataclasses.dataclass
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")


class Renamed(msgspec.Struct, rename="camel"):
    unit_price: Decimal
    is_new: bool = False


class Cat(msgspec.Struct, tag=True):
    name: str


class Dog(msgspec.Struct, tag=True):
    name: str
    weight: Decimal = Decimal(0)


@dataclasses.dataclass
class Tree:
    weight: float
    branches: list[Tree] = dataclasses.field(default_factory=list)


HINTS: dict[str, Any] = {
    "decimal": Decimal,
    "cents": Annotated[Decimal, Places(10, 2)],
    "maybe_decimal": Decimal | None,
    "number": float,
    "maybe_number": float | None,
    "whole": int,
    "text": str,
    "truth": bool,
    "anything": Any,
    "data": bytes,
    "day": datetime.date,
    "time": datetime.datetime,
    "name": uuid.UUID,
    "item": Item,
    "items": list[Item],
    "even": Even,
    "renamed": Renamed,
    "pet": Cat | Dog,
    "tree": Tree,
    "pair": tuple[int, Decimal],
    "row": tuple[str, ...],
    "by_number": dict[int, Decimal],
    "by_data": dict[bytes, int],
    "by_text": dict[str, tuple[int, int]],
    "colour": Literal["red", "green"],
    "few": Annotated[int, msgspec.Meta(ge=0, le=3)],
    "mixed": int | Decimal | None,
}

app = App("ways")
box = app.operator("box")
for shape, hint in HINTS.items():

    def echo(ctx: Context, value: Any, also: Any = None) -> str:
        return repr(value)

    echo.__name__ = shape
    echo.__annotations__["value"] = hint
    box.register(echo)

PROGRAM = Program(app, Config())

SAME: tuple[tuple[str, str, Any], ...] = (  # function, the argument in JSON, what the function gets
    ("decimal", "0.1", Decimal("0.1")),
    ("decimal", "0.1234567890123456789012345678901234567890", Decimal("0.1234567890123456789012345678901234567890")),
    ("decimal", "1.10", Decimal("1.10")),
    ("decimal", "12345678901234567890123", Decimal("12345678901234567890123")),
    ("decimal", "-1e400", Decimal("-1e400")),
    ("decimal", "5", Decimal(5)),
    ("decimal", '"2.50"', Decimal("2.50")),
    ("cents", "1.25", Decimal("1.25")),
    ("maybe_decimal", "0.10000000000000000001", Decimal("0.10000000000000000001")),
    ("maybe_decimal", "null", None),
    ("number", "1", 1.0),
    ("number", "1.5", 1.5),
    ("number", "9007199254740993", 9007199254740993),  # between two floats: an int passes for a float
    ("maybe_number", "1", 1.0),
    ("whole", "9223372036854775807", 9223372036854775807),
    ("anything", '{"a": [1, 1.5, "x", null, true]}', {"a": [1, 1.5, "x", None, True]}),
    ("data", '"aGk="', b"hi"),
    ("day", '"2026-02-28"', datetime.date(2026, 2, 28)),
    ("time", '"2026-02-28T12:00:00.123456Z"', datetime.datetime(2026, 2, 28, 12, 0, 0, 123456, datetime.UTC)),
    ("time", '"2026-02-28T12:00:00.1234560"', datetime.datetime(2026, 2, 28, 12, 0, 0, 123456)),
    ("name", '"00000000-0000-0000-0000-000000000007"', uuid.UUID(int=7)),
    ("item", '{"sku": "pen", "price": 1.50}', Item("pen", Decimal("1.50"))),
    ("items", '[{"sku": "pen", "price": 1, "count": 2}]', [Item("pen", Decimal(1), 2)]),
    ("even", '{"number": 4}', Even(4)),
    ("renamed", '{"unitPrice": 0.30, "isNew": true}', Renamed(Decimal("0.30"), True)),
    ("pet", '{"type": "Cat", "name": "Mia"}', Cat("Mia")),
    ("pet", '{"type": "Dog", "name": "Rex", "weight": 9.10}', Dog("Rex", Decimal("9.10"))),
    ("tree", '{"weight": 1, "branches": [{"weight": 2.5}]}', Tree(1.0, [Tree(2.5)])),
    ("pair", "[1, 2.20]", (1, Decimal("2.20"))),
    ("row", '["a", "b"]', ("a", "b")),
    ("by_number", '{"7": 0.10, "-1": 1}', {7: Decimal("0.10"), -1: Decimal(1)}),
    ("by_data", '{"AQ==": 1}', {b"\x01": 1}),
    ("by_text", '{"a": [1, 2]}', {"a": (1, 2)}),
    ("colour", '"red"', "red"),
    ("few", "3", 3),
    ("mixed", "5", 5),
    ("mixed", "5.50", Decimal("5.50")),
)
REFUSED = (  # function, the argument in JSON, the code, part of the reason
    ("cents", "1.255", "bad_arguments", "wanted Decimal of Places(10, 2), found a Decimal"),
    ("decimal", '"a lot"', "bad_arguments", "wanted Decimal, found 'a lot' (str)"),
    ("decimal", '"NaN"', "bad_arguments", "wanted Decimal, found 'NaN' (str)"),
    ("decimal", '"1_000"', "bad_arguments", "wanted Decimal, found '1_000' (str)"),
    ("decimal", "1e9999999999999999999", "bad_arguments", "out of the range of a Decimal"),
    ("decimal", "true", "bad_arguments", "wanted Decimal, found True (bool)"),
    ("number", '"1"', "bad_arguments", "wanted float, found '1' (str)"),
    ("number", "1e400", "bad_arguments", "1e400 is too large for a float"),
    ("anything", '{"deep": [1e400]}', "bad_arguments", "1e400 is too large for a float"),
    ("number", "true", "bad_arguments", "wanted float, found True (bool)"),
    ("whole", "5.0", "bad_arguments", "wanted int, found 5.0 (float)"),
    ("whole", '"5"', "bad_arguments", "wanted int, found '5' (str)"),
    ("text", "5", "bad_arguments", "wanted str, found 5 (int)"),
    ("truth", "1", "bad_arguments", "wanted bool, found 1 (int)"),
    ("time", '"2026-02-28T12:00:00.1234567"', "bad_arguments", "more digits than microseconds"),
    ("day", '"2026-02-30"', "bad_arguments", "wanted date, found '2026-02-30' (str)"),
    ("item", '{"sku": "pen", "price": 1, "colour": "red"}', "bad_arguments", "Item has no field 'colour'"),
    ("items", '[{"sku": "a", "price": 1}, {"price": 1}]', "bad_arguments", "list[Item][1]: Item needs 'sku'"),
    ("item", '{"sku": 5, "price": 1}', "bad_arguments", "Item.sku: wanted str, found 5 (int)"),
    ("item", '{"sku": "a", "price": "cheap"}', "bad_arguments", "Item.price: wanted Decimal, found 'cheap' (str)"),
    ("item", "5", "bad_arguments", "wanted Item, found 5 (int)"),
    ("even", '{"number": 3}', "bad_arguments", "Even: ValueError: 3 is odd"),
    ("renamed", '{"unit_price": 1}', "bad_arguments", "Renamed has no field 'unit_price'"),
    ("pet", '{"type": "Cat", "name": "Mia", "weight": 1}', "bad_arguments", "Cat has no field 'weight'"),
    ("tree", '{"weight": 1, "branches": [{"wait": 1}]}', "bad_arguments", "Tree.branches[0]: Tree has no field 'wait'"),
    ("pair", "[1]", "bad_arguments", "wanted tuple[int, Decimal], found a list (list)"),
    ("by_number", '{"07": 1}', "bad_arguments", "dict[int, Decimal]['07']: wanted int, found '07' (str)"),
    ("by_data", '{"AQ==": 1, "AR==": 2}', "bad_arguments", "dict[bytes, int]['AR==']: wanted bytes"),
    ("few", "4", "bad_arguments", "found 4 (int)"),
    ("mixed", "true", "bad_arguments", "found True (bool)"),
    ("whole", "[5], null", "bad_message", "not a"),
)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with served_app(app) as found:
        yield found.address


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission(PROGRAM)


def call_of(function: str, argument: str, is_named: bool) -> bytes:
    args = f'{{"value": {argument}}}' if is_named else f"[{argument}]"
    return f'{{"function": "box.{function}", "key": "k", "args": {args}}}'.encode()


Outcome = tuple[str, str]  # "ok" and what the function got, or the code and the reason


def over_http(address: Address, data: bytes) -> Outcome:
    _, answer = ask(address, "POST", "/v1/call", data)
    return seen(answer)


def in_a_batch(address: Address, data: bytes) -> Outcome:
    """Between others: of a function with Decimals, and of some without."""
    others = [call_of("decimal", "0.10", False), call_of("anything", "[1.5]", True), call_of("number", "2.5", False)]
    body = b'{"calls": [' + b",".join((others[0], data, *others[1:])) + b"]}"
    _, answer = ask(address, "POST", "/v1/batch", body)
    first, mine, *last = answer["replies"]
    assert [each["result"] for each in (first, *last)] == ["Decimal('0.10')", "[1.5]", "2.5"]
    return seen(mine)


def seen(answer: dict[str, Any]) -> Outcome:
    return ("ok", answer["result"]) if answer["status"] == "ok" else (answer["code"], answer["error"])


def as_message(data: bytes, admission: Admission, folder: Path) -> Outcome:
    return from_segment(pa.table({"call": pa.array([data], pa.binary())}), admission, folder)


def as_call_json(data: bytes, admission: Admission, folder: Path) -> Outcome:
    """From a column of texts, by the sink's own code."""
    columns = CallColumns.of({"callJson": "value"})
    return from_segment(columns.columns_of(pa.table({"value": [data.decode()]})), admission, folder)


def as_args_json(data: bytes, admission: Admission, folder: Path) -> Outcome:
    """Only the arguments are JSON; the function is an option, and the key a column."""
    function, text = (data.decode().partition(word)[2] for word in ('"function": "', '"args": '))
    function = function.partition('"')[0]
    columns = CallColumns.of({"function": function, "key": "key", "argsJson": "value"})
    table = columns.columns_of(pa.table({"key": ["k"], "value": [text[:-1]]}))
    return from_segment(table, admission, folder, function)


def from_segment(table: pa.Table, admission: Admission, folder: Path, function: str = "") -> Outcome:
    store = DirectoryStore(folder)
    batch = read_calls(store, ClosedBatch("q", 0, function, [write_segment(store, "q", 0, 0, table)]), admission)
    if batch.refused:
        return batch.refused[0].code, batch.refused[0].message
    [entry], [args] = batch.entries, batch.args
    given = admission.program.values.decode(args[0]) if entry is entry.sealed else args
    return "ok", repr(given[0])


@pytest.mark.parametrize(("function", "argument", "expected"), SAME)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_value_in_json_becomes_the_same_whichever_way_it_comes(
    address: Address, admission: Admission, tmp_path: Path, function: str, argument: str, expected: Any, is_named: bool
) -> None:
    data = call_of(function, argument, is_named)
    wanted = ("ok", repr(expected))
    assert over_http(address, data) == wanted
    assert in_a_batch(address, data) == wanted
    assert as_message(data, admission, tmp_path / "message") == wanted
    assert as_call_json(data, admission, tmp_path / "text") == wanted
    assert as_args_json(data, admission, tmp_path / "args") == wanted


@pytest.mark.parametrize(("function", "argument", "code", "reason"), REFUSED)
def test_json_that_does_not_fit_is_refused_alike_whichever_way_it_comes(
    address: Address, admission: Admission, tmp_path: Path, function: str, argument: str, code: str, reason: str
) -> None:
    data = call_of(function, argument, is_named=code == "bad_message")
    found = over_http(address, data)
    assert found[0] == code
    assert reason in found[1]
    assert as_message(data, admission, tmp_path / "message") == found
    assert as_call_json(data, admission, tmp_path / "text") == found
    if code != "bad_message":  # of a batch that is not JSON, nothing can be told apart
        assert in_a_batch(address, data) == found
        assert as_args_json(data, admission, tmp_path / "args") == found


numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@settings(max_examples=300)
@given(numbers)
@example("0.1")
@example("1e999")
def test_every_number_in_json_is_the_decimal_that_is_written(text: str) -> None:
    expected = Decimal(json.loads(text, parse_float=Decimal))
    for function, argument, wanted in (
        ("decimal", text, expected),
        ("items", f'[{{"sku": "x", "price": {text}}}]', [Item("x", expected)]),
        ("pair", f"[1, {text}]", (1, expected)),
    ):
        _, row = read_call(call_of(function, argument, False), PROGRAM)
        assert isinstance(row, tuple), row
        [got] = row[2]
        assert repr(got) == repr(wanted)


@settings(max_examples=100)
@given(numbers)
def test_where_no_decimal_is_declared_a_number_is_what_json_says(text: str) -> None:
    """Also in the other arguments of a function that has Decimals."""
    expected = json.loads(text)
    data = f'{{"function": "box.decimal", "key": "k", "args": [1, {{"deep": [{text}]}}]}}'.encode()
    _, row = read_call(data, PROGRAM)
    if isinstance(expected, float) and abs(expected) == float("inf"):
        assert "too large for a float" in str(row)
    else:
        assert isinstance(row, tuple)
        assert repr(row[2][1]) == repr({"deep": [expected]})


def test_a_python_client_converts_nothing(address: Address) -> None:
    with connect(f"http://{address[0]}:{address[1]}", app) as remote:
        for function, value in (
            ("box.decimal", "1.5"),
            ("box.decimal", 1.5),
            ("box.decimal", 1),
            ("box.item", {"sku": "a", "price": Decimal(1)}),
            ("box.day", "2026-02-28"),
            ("box.pair", [1, Decimal(2)]),
        ):
            with pytest.raises(BadArguments, match="wanted"):
                remote.call(function, "k", value)
        assert remote.call("box.number", "k", 1) == "1", "an int passes for a float, and stays an int"
        assert remote.call("box.decimal", "k", Decimal("1.50")) == "Decimal('1.50')"


def test_what_is_nested_too_deep_is_refused(address: Address) -> None:
    for depth in (70, 300, 900, 5_000):
        deep = '{"weight": 1, "branches": [' * depth + "]}" * depth
        outcome = over_http(address, call_of("tree", deep, False))
        assert outcome[0] in ("bad_arguments", "bad_message", "bad_value"), depth
    assert over_http(address, call_of("whole", "5", False)) == ("ok", "5")
