"""Values come back exactly as they went in, and what cannot be carried is refused by name."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import enum
import math
import uuid
import zoneinfo
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace import App, Config, Runtime
from headrace.errors import BadMessage, BadRequest, BadValue, HeadraceError, ModelError, TooLarge
from headrace.wire.values import Values
from tests.core.carried import ALLOWED, RECORDS, VALUES, Checked, Money, Point, shape
from tests.programs import MANY

# --- what is carried --------------------------------------------------------------------------------------------------


@given(ALLOWED)
@settings(max_examples=4 * MANY)
def test_a_value_comes_back_exactly_as_it_went_in(value: Any) -> None:
    before = shape(value)
    sealed = VALUES.seal(value)
    assert type(sealed) in (bytes, str, int, float, bool, type(None))
    assert shape(VALUES.unseal(sealed)) == before
    assert shape(VALUES.decode(VALUES.encode(value))) == before
    assert shape(value) == before
    assert VALUES.encode(VALUES.decode(VALUES.encode(value))) == VALUES.encode(value)


echoing = App("echo")
echoes = echoing.operator("echo")
for record in RECORDS:
    echoing.record(record)


@echoes.register
def keep(ctx: Any, value: Any) -> Any:
    ctx.put(value)
    return ctx.get()


@echoes.register
async def pass_on(ctx: Any, value: Any) -> Any:
    return await ctx.call(keep, f"{ctx.key}'s", value)


@given(st.lists(ALLOWED, min_size=1, max_size=4))
@settings(max_examples=MANY // 2)
def test_arguments_state_and_results_are_carried_exactly(values: list[Any]) -> None:
    with Runtime(echoing) as runtime:
        replies = runtime.client.batch([(pass_on, f"k{i}", value) for i, value in enumerate(values)])
        assert [shape(reply.unwrap()) for reply in replies] == [shape(value) for value in values]
        assert [shape(result) for result in replies.results] == [shape(value) for value in values]
        for i, value in enumerate(values):
            assert shape(runtime.get(echoes, f"k{i}'s")) == shape(value)


def test_a_dataclass_is_put_back_without_its_init() -> None:
    assert VALUES.unseal(VALUES.seal(Checked(1))) == Checked(1)


class Counting(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        self.n += 1


def test_a_struct_with_post_init_comes_back_as_it_was_or_is_refused() -> None:
    made = Counting(1)
    try:
        values = Values([Counting])
        back = values.unseal(values.seal(made))
    except (BadValue, ModelError):
        return
    assert back.n == made.n


class Picky(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise RuntimeError("negative")


def test_a_value_that_was_sealed_can_always_be_unsealed() -> None:
    made = Picky(1)
    made.n = -1
    try:
        values = Values([Picky])
        sealed = values.seal(made)
    except (BadValue, ModelError):
        return
    assert values.unseal(sealed).n == -1


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(datetime.datetime(2024, 10, 27, 2, 30, fold=1), id="fold"),
        pytest.param(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Zurich")), id="zone"),
        pytest.param(datetime.datetime(2024, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "Z")), id="name"),
    ],
)
def test_a_datetime_is_carried_with_its_zone_and_fold_or_refused(value: datetime.datetime) -> None:
    try:
        back = VALUES.unseal(VALUES.seal(value))
    except BadValue:
        return
    assert (back, back.fold, back.tzinfo, back.tzname()) == (value, value.fold, value.tzinfo, value.tzname())


# --- what is refused --------------------------------------------------------------------------------------------------


class MyInt(int):
    pass


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Stranger(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Unknown:
    x: int


@dataclasses.dataclass
class SubPoint(Point):
    pass


Pair = namedtuple("Pair", "a b")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


BAD = {
    "a set": ({1}, "set"),
    "a frozenset": (frozenset({1}), "frozenset"),
    "a numpy int": (np.int64(1), "numpy"),
    "a numpy float": (np.float64(1), "float64"),
    "a numpy bool": (np.bool_(True), "numpy"),
    "a numpy array": (np.array([1]), "numpy"),
    "a subclass of int": (MyInt(1), "MyInt"),
    "an enum": (Colour.RED, "Colour"),
    "an int enum": (Number.ONE, "Number"),
    "a named tuple": (Pair(1, 2), "Pair"),
    "an ordered dict": (OrderedDict(a=1), "OrderedDict"),
    "a bytearray": (bytearray(b"x"), "bytearray"),
    "a function": (nested, "function"),
    "an object": (object(), "object"),
    "a class": (int, "type"),
    "a complex": (1j, "complex"),
    "a time": (datetime.time(1), "time"),
    "a timedelta": (datetime.timedelta(1), "timedelta"),
    "an unknown struct": (Stranger(1), "app.record(Stranger)"),
    "an unknown dataclass": (Unknown(1), "app.record(Unknown)"),
    "a subclass of a known dataclass": (SubPoint(1), "app.record(SubPoint)"),
    "an int over 64 bits": (1 << 64, "64 bits"),
    "an int under 64 bits": (-(1 << 63) - 1, "64 bits"),
    "an int too long to print": (10**5000, "64 bits"),
    "a lone surrogate": ("\ud800", "Unicode"),
    "a float as a dict key": ({1.0: 1}, "key"),
    "a bool as a dict key": ({True: 1}, "key"),
    "None as a dict key": ({None: 1}, "key"),
    "a tuple as a dict key": ({(1,): 1}, "key"),
    "a surrogate as a dict key": ({"\udfff": 1}, "Unicode"),
    "a big int as a dict key": ({1 << 64: 1}, "64 bits"),
    "a list nested too deep": (nested(65), "64"),
    "a list in itself": (endless(), "64"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_carried_is_refused_and_named(name: str) -> None:
    value, named = BAD[name]
    for refuse in (VALUES.seal, VALUES.encode):
        with pytest.raises(BadValue) as caught:
            refuse(value)
        assert named in str(caught.value)
        assert caught.value.code == "bad_value"


@pytest.mark.parametrize("name", BAD)
def test_the_path_to_the_culprit_is_named(name: str) -> None:
    value, named = BAD[name]
    with pytest.raises(BadValue) as caught:
        VALUES.seal({"fine": [1], "items": [0, Point(1, (2, Money(value)))]})
    assert "dict['items'][1].y[1].amount" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_carried_is_refused_at_the_gate_and_the_batch_goes_on(name: str) -> None:
    value, _ = BAD[name]
    with Runtime(echoing) as runtime:
        refused, fine = runtime.client.batch([(keep, "k", value), (keep, "k", 1)])
        assert (refused.status, refused.failure.code) == ("refused", "bad_value")
        assert fine.unwrap() == 1


def test_nesting_up_to_the_limit_is_carried() -> None:
    assert VALUES.unseal(VALUES.seal(nested(64))) == nested(64)


@dataclasses.dataclass
class Unset:
    x: int = dataclasses.field(init=False)


def test_a_dataclass_with_a_field_that_was_never_set_is_refused() -> None:
    with pytest.raises(BadValue):
        Values([Unset]).seal([Unset()])


@pytest.mark.parametrize("value", ["x" * 101, "é" * 51, b"x" * 101, ["x" * 60, "y" * 60], {"k": "x" * 101}, [0] * 101])
def test_a_value_over_the_limit_is_too_large(value: Any) -> None:
    small = Values(bytes_max=100)
    for refuse in (small.seal, small.encode):
        with pytest.raises(TooLarge, match="100") as caught:
            refuse(value)
        assert caught.value.code == "too_large"
    with pytest.raises(TooLarge):
        small.decode(VALUES.encode(value))


@pytest.mark.parametrize("value", ["x" * 100, "é" * 50, [0] * 97])
def test_a_value_at_the_limit_is_carried(value: Any) -> None:
    small = Values(bytes_max=100)
    assert small.unseal(small.seal(value)) == value


reads = 0


@dataclasses.dataclass
class Watched:
    x: int

    def __getattribute__(self, name: str) -> Any:
        global reads
        reads += name == "x"
        return object.__getattribute__(self, name)


def test_a_value_is_not_looked_at_far_beyond_the_limit() -> None:
    """Lists that hold one list twice, and so on: small in memory, endless when written out."""
    global reads
    value: Any = Watched(1)
    for _ in range(14):
        value = [value, value]
    reads = 0
    with pytest.raises(TooLarge):
        Values([Watched], bytes_max=100).seal(value)
    assert reads < 5_000


# --- no pickle --------------------------------------------------------------------------------------------------------


def test_no_module_imports_pickle() -> None:
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
    for path in Path(headrace.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {part for name in names for part in name.split(".")} & banned
            assert not found, f"{path} imports {found}"


def test_every_refusal_of_a_value_is_a_bad_request() -> None:
    assert issubclass(BadValue, BadRequest)
    assert issubclass(TooLarge, BadRequest)
    assert issubclass(BadMessage, BadRequest)
    assert all(issubclass(error, HeadraceError) for error in (BadValue, TooLarge, BadMessage))


def test_a_nan_in_an_annotated_list_is_carried() -> None:
    app = App("nan")
    numbers = app.operator("numbers")

    @numbers.register
    def total(ctx: Any, values: list[float]) -> float:
        return sum(values)

    with Runtime(app, Config()) as runtime:
        assert math.isnan(runtime.client.call(total, "k", [math.nan, 1]))


def test_a_uuid_and_a_decimal_in_an_annotation_are_not_converted() -> None:
    app = App("exact")
    things = app.operator("things")

    @things.register
    def take(ctx: Any, amounts: list[decimal.Decimal], ids: list[uuid.UUID]) -> Any:
        return [type(amount).__name__ for amount in amounts]

    with Runtime(app) as runtime:
        fine = runtime.client.batch([(take, "k", [decimal.Decimal(1)], [uuid.UUID(int=1)])])[0]
        assert fine.unwrap() == ["Decimal"]
        for wrong in ([1], [1.5], ["1"]):
            reply = runtime.client.batch([(take, "k", wrong, [])])[0]
            assert reply.status == "refused", wrong
            assert reply.failure is not None
            assert reply.failure.code == "bad_arguments"
