"""Values come back exactly as they went in, are never shared, and what cannot be carried is refused by name."""

from __future__ import annotations

import ast
import contextlib
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
from hypothesis import example, given, settings
from hypothesis import strategies as st

import headrace
from headrace import App, Config, Runtime
from headrace.errors import BadMessage, BadRequest, BadValue, HeadraceError, ModelError, TooLarge
from headrace.wire import codec
from headrace.wire.messages import Answers, Calls, Failure, Refusal
from headrace.wire.values import Values

MANY = settings.default.max_examples  # type: ignore[union-attr]


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

# --- what is carried --------------------------------------------------------------------------------------------------

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


# --- nothing is shared ------------------------------------------------------------------------------------------------

sharing = App("sharing")
shared = sharing.operator("shared", combine=lambda state, delta: state.append(delta) or state)
kept: list[Any] = []


@shared.register
def store(ctx: Any, value: Any) -> Any:
    ctx.put(value)
    value.append("changed after put")
    return ctx.get()


@shared.register
def change_what_get_returned(ctx: Any) -> Any:
    ctx.get([]).append("changed after get")
    return ctx.get([])


@shared.register
def read(ctx: Any) -> Any:
    return ctx.get()


@shared.register
def merge(ctx: Any, delta: Any) -> None:
    ctx.merge(delta)
    delta.append("changed after merge")


@shared.register
def return_and_change(ctx: Any) -> Any:
    kept[:] = [[1]]
    ctx.call_async(change_what_was_kept, "other")
    return kept[0]


@shared.register
def change_what_was_kept(ctx: Any) -> None:
    kept[0].append("changed after the return")


@shared.register
async def change_arguments(ctx: Any, to: Any) -> Any:
    value: list[Any] = [1]
    call = ctx.call(store, to, value)
    value.append("changed after call")
    answer = await call
    answer.append("changed in the caller")
    ctx.call_async(store, f"{to}, async", value)
    value.append("changed after call_async")
    return [value, await ctx.call(read, to)]


@shared.register
async def give_away(ctx: Any) -> Any:
    value: list[Any] = [1]
    first = await ctx.call(lend, "lender")
    first.append("changed by the borrower")
    return [value, first, await ctx.call(lend, "lender")]


@shared.register
def lend(ctx: Any) -> Any:
    if not kept:
        kept.append([])
    return kept[0]


@pytest.fixture(name="share")
def sharing_runtime() -> Any:
    kept.clear()
    with Runtime(sharing) as runtime:
        yield runtime


def test_changing_what_get_returned_changes_nothing(share: Runtime) -> None:
    share.client.call(store, "k", [1])
    assert share.client.call(change_what_get_returned, "k") == [1]
    assert share.get(shared, "k") == [1]


def test_changing_a_value_after_put_or_merge_changes_nothing(share: Runtime) -> None:
    assert share.client.call(store, "k", [1]) == [1]
    share.client.call(merge, "k", [2])
    share.client.call(merge, "new", [3])
    assert share.state(shared) == {"k": [1, [2]], "new": [3]}


def test_changing_an_argument_after_a_call_changes_nothing(share: Runtime) -> None:
    value = [1]
    replies = share.client.submit("x", [(store, "k", value)], wait=True)
    value.append(2)
    assert replies.result(timeout=10)[0].unwrap() == [1]
    rows = [(store, "row", value)]
    batch = share.client.submit("y", rows, wait=True)
    rows.clear()
    value.append(3)
    assert batch.result(timeout=10).results == [[1, 2]]
    assert share.client.call(change_arguments, "caller", "to")[1] == [1]
    assert share.get(shared, "to, async") == [1, "changed after call"]


def test_changing_a_result_changes_nothing(share: Runtime) -> None:
    first = share.client.call(store, "k", [1], request_id="same")
    first.append("changed by the client")
    assert share.client.call(store, "k", [1], request_id="same") == [1]
    replies = share.client.batch([(read, "k")])
    replies[0].result.append("changed by the client")
    replies.results[0].append("changed by the client")
    assert (replies[0].result, replies.results) == ([1], [[1]])
    share.state(shared)["k"].append("changed by the client")
    assert share.get(shared, "k") == [1]


def test_a_caller_and_whom_it_called_share_no_result(share: Runtime) -> None:
    assert share.client.call(give_away, "k") == [[1], ["changed by the borrower"], []]


def test_a_result_is_taken_when_the_root_returns(share: Runtime) -> None:
    assert share.client.call(return_and_change, "k") == [1]


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


# --- what comes in from outside ---------------------------------------------------------------------------------------

HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 100_000,
    b"\x81\x01" * 50_000,
    b"\xa2\xff\xff",
    b"\x81\x81\x01\x02\x02",
    b"\x81\x91\x91\x01\x02",
    b"\xc7\x00\x01",
    b"\xc7\x01\x03x",
    b"\xc7\x02\x04\xff\xff",
    b"\xc7\x01\x05x",
    b"\xc7\x01\x06x",
    b"\xd4\x63x",
    b"\xd6\xff\x00\x00\x00\x01",
    b"\xc7\x0c\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff",
]


def extension(code: int, inner: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, inner))


def extensions_within(depth: int) -> bytes:
    data = b"\x01"
    for _ in range(depth):
        data = extension(1, b"\x91" + data)
    return data


HOSTILE += [
    extensions_within(3_000),
    extension(1, b"\xc0"),
    extension(2, b"\xc0"),
    extension(2, msgspec.msgpack.encode(["Nobody", {}])),
    extension(2, msgspec.msgpack.encode([["Point"], {}])),
    extension(2, msgspec.msgpack.encode(["Point", {}])),
    extension(2, msgspec.msgpack.encode(["Point", []])),
    extension(2, msgspec.msgpack.encode(["Point", None])),
    extension(2, msgspec.msgpack.encode(["Money", {"nothing": 1}])),
    extension(2, msgspec.msgpack.encode(["Money", {1: 1}])),
    extension(2, msgspec.msgpack.encode(["Money", 1])),
    extension(3, b"1E+99999999999999999999999"),
    extension(4, b"2024-13-01"),
    extension(5, b"0000-00-00"),
    extension(6, b"{}"),
]


def decode_or_refuse(data: bytes) -> None:
    with contextlib.suppress(BadValue, TooLarge):
        VALUES.decode(data)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:12].hex())
def test_hostile_bytes_are_refused_or_decoded_and_nothing_else(data: bytes) -> None:
    decode_or_refuse(data)


@given(st.binary(max_size=200))
@settings(max_examples=3 * MANY)
def test_arbitrary_bytes_are_refused_or_decoded_and_nothing_else(data: bytes) -> None:
    decode_or_refuse(data)


@given(ALLOWED, st.data())
@settings(max_examples=3 * MANY)
def test_bytes_cut_short_or_changed_are_refused_or_decoded_and_nothing_else(value: Any, data: Any) -> None:
    encoded = VALUES.encode(value)
    at = data.draw(st.integers(0, len(encoded) - 1))
    decode_or_refuse(encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :])
    with pytest.raises(BadValue):
        VALUES.decode(encoded[:at])
    with pytest.raises(BadValue):
        VALUES.decode(encoded + b"\x00")


# --- the codec --------------------------------------------------------------------------------------------------------

WIRE_KEYS = st.text(max_size=5) | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=5)
TEXTS = st.text(max_size=5)
FAILURES = st.builds(Failure, TEXTS, TEXTS, TEXTS, st.none() | TEXTS, st.none() | WIRE_KEYS)
IDS = TEXTS | st.lists(TEXTS, max_size=3)
MESSAGES = st.one_of(
    st.builds(
        Calls,
        IDS,
        st.lists(TEXTS, max_size=3),
        st.lists(WIRE_KEYS, max_size=3),
        st.lists(st.binary(max_size=9), max_size=3),
    ),
    st.builds(
        Answers,
        IDS,
        st.lists(st.none() | st.integers(1, (1 << 63) - 1), max_size=3),
        st.lists(st.none() | st.integers(1, 1 << 60), max_size=3),
        st.lists(ALLOWED.map(VALUES.seal), max_size=3),
        st.dictionaries(st.integers(0, 9), FAILURES, max_size=2),
    ),
    st.builds(Refusal, FAILURES),
)


@given(MESSAGES)
@settings(max_examples=2 * MANY)
def test_a_message_comes_back_exactly(message: Any) -> None:
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    assert repr(back) == repr(message)


@given(MESSAGES, st.data())
@settings(max_examples=2 * MANY)
def test_a_message_cut_short_or_changed_is_refused_or_decoded_and_nothing_else(message: Any, data: Any) -> None:
    encoded = codec.encode(message)
    at = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(BadMessage):
        codec.decode(encoded[:at])
    with contextlib.suppress(BadMessage):
        codec.decode(encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :])


@given(st.binary(max_size=100))
@example(b"\x85\xa4type\xa5calls\xa3ids\xa1x\xa9functions\xdd\xff\xff\xff\xff")
@example(b"\x82\xa4type\xa5calls\xa3ids" + b"\x91" * 100_000)
@example(b"\x81\xa4type\xa6nobody")
@example(msgspec.msgpack.encode({"type": "refusal", "failure": ["x"], "more": 1}))
@settings(max_examples=2 * MANY)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        codec.decode(data)


def test_a_message_over_the_limit_is_too_large() -> None:
    message = Refusal(Failure("bad_request", "BadRequest", "x" * 100))
    size = len(codec.encode(message))
    assert codec.decode(codec.encode(message, bytes_max=size), bytes_max=size) == message
    with pytest.raises(TooLarge):
        codec.encode(message, bytes_max=size - 1)
    with pytest.raises(TooLarge):
        codec.decode(codec.encode(message), bytes_max=size - 1)


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
