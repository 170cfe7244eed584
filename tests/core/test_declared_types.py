"""Declared types are enforced where values enter, and what goes in comes out, for random types and values."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
from collections import Counter
from typing import Annotated, Any, Literal, Never, NewType, Tuple  # noqa: UP035

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Config, Context, Places, Runtime
from headrace.core.program import Program
from headrace.durability.migration import LooseValues
from headrace.errors import BadValue, HeadraceError, ModelError, TooLarge
from headrace.wire.hints import Unsupported
from headrace.wire.native_form import is_native
from headrace.wire.typed_values import Codec, codec_for
from headrace.wire.values import Values, as_json, opened, same
from tests.cluster import Cluster
from tests.core.carried import shape
from tests.core.declared import DrawnTypes, has_type
from tests.programs import MANY

SEEDS = st.integers(0, 1 << 40)
LOOSE = LooseValues()


class Typed:
    """A drawn type, its codec, and the walk over values that is the codec's oracle."""

    def __init__(self, seed: int) -> None:
        self.types = DrawnTypes(seed)
        while True:
            self.hint = self.types.draw()
            self.values = Values(self.types.records)
            try:
                self.codec = Codec(self.values.hints.type_of(self.hint), self.values)
                break
            except Unsupported:  # a union that msgspec cannot tell apart
                self.types.records.clear()

    def value(self) -> Any:
        return self.types.value(self.hint)

    def walked(self, value: Any) -> Any:
        """Sealed by the walk, or the type of the error."""
        try:
            return self.values.seal(value)
        except HeadraceError as error:
            return type(error)


# --- what goes in comes out -------------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=6 * MANY)
def test_a_value_of_a_declared_type_comes_back_with_the_same_types_all_the_way_down(seed: int) -> None:
    typed = Typed(seed)
    for _ in range(4):
        value = typed.value()
        before = shape(value)
        if isinstance(typed.walked(value), type):  # what the walk cannot carry: see below
            continue
        sealed = typed.codec.seal(value)
        assert shape(typed.values.unseal(sealed)) == before
        assert shape(value) == before
        assert same(typed.codec.seal(typed.values.unseal(sealed)), sealed), "equal values have equal bytes"
        if type(sealed) is bytes:
            try:
                read = typed.codec.decode(sealed)
            except msgspec.DecodeError:
                assert not is_native(sealed)
            else:
                assert shape(read) == before


@given(SEEDS)
@settings(max_examples=3 * MANY)
def test_readers_without_the_classes_see_the_same_in_both_forms(seed: int) -> None:
    typed = Typed(seed)
    value = typed.value()
    walked = typed.walked(value)
    if type(walked) is bytes:
        sealed = typed.codec.seal(value)
        assert shape(LOOSE.unseal(sealed)) == shape(LOOSE.unseal(walked))
        assert shape(opened(sealed)) == shape(opened(walked))
        assert as_json(sealed) == as_json(walked)


def test_most_records_that_are_drawn_are_written_natively() -> None:
    drawn: Counter[bool] = Counter()
    for seed in range(400):
        typed = Typed(seed)
        value = typed.value()
        if type(value) in typed.types.records and not isinstance(typed.walked(value), type):
            drawn[is_native(typed.codec.seal(value))] += 1
    assert min(drawn[True], drawn[False]) > 30, drawn


# --- what does not have the type is refused ---------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=6 * MANY)
def test_a_value_is_refused_exactly_if_it_does_not_have_the_type(seed: int) -> None:
    typed = Typed(seed)
    for _ in range(6):
        value = typed.types.spoiled(typed.value())
        fits = has_type(value, typed.hint)
        assert (typed.codec.fault(value) is None) == fits
        assert fits or not typed.codec.exactly(value)
        walked = typed.walked(value)
        if fits and not isinstance(walked, type):
            assert shape(typed.values.unseal(typed.codec.seal(value))) == shape(value)
        else:
            with pytest.raises(BadValue if not fits else walked):
                typed.codec.seal(value)


def test_enough_of_what_is_drawn_is_wrong_and_enough_is_right() -> None:
    drawn: Counter[bool] = Counter()
    for seed in range(300):
        typed = Typed(seed)
        drawn[has_type(typed.types.spoiled(typed.value()), typed.hint)] += 1
    assert min(drawn[True], drawn[False]) > 40, drawn


# --- in an app --------------------------------------------------------------------------------------------------------


def app_of(typed: Typed, values: list[Any]) -> App:
    """Functions that put, merge, return and pass on these values, by their index."""
    app = App("typed")
    for record in typed.types.records:
        app.record(record)
    box = app.operator("box", state=typed.hint, combine=lambda state, delta: delta)

    @box.register
    def put(ctx: Context, n: int) -> None:
        ctx.put(values[n])

    @box.register
    def merge(ctx: Context, n: int) -> None:
        ctx.merge(values[n])

    def give(ctx: Context, n: int) -> Any:
        return values[n]

    give.__annotations__["return"] = typed.hint
    box.register(give)

    def take(ctx: Context, value: Any) -> None:
        ctx.put(value)

    take.__annotations__["value"] = typed.hint
    taken = box.register(take)

    @box.register
    async def ask(ctx: Context, n: int) -> None:
        await ctx.call("box.give", f"{ctx.key}'s", n)

    @box.register
    def send(ctx: Context, n: int) -> None:
        ctx.call_async(taken, f"{ctx.key}'s", values[n])

    return app


@given(SEEDS)
@settings(max_examples=MANY)
def test_every_wrong_value_is_refused_at_the_same_place_with_the_same_message_in_both_modes(seed: int) -> None:
    typed = Typed(seed)
    values = [typed.types.spoiled(typed.value()) if n % 2 else typed.value() for n in range(6)]
    app = app_of(typed, values)
    calls = [
        (f"box.{name}", f"k{n % 3}", n)
        for n in range(len(values))
        for name in ("put", "merge", "give", "ask", "send", "put")
    ]
    alone, spread = Cluster(app, 1, seed=seed), Cluster(app, 3, mode="ordered", seed=seed)
    replies = [cluster.run(calls) for cluster in (alone, spread)]
    for call, one, other in zip(calls, *replies, strict=True):
        assert one.failure == other.failure, call
        assert shape(one.result) == shape(other.result), call
        fits = has_type(values[call[2]], typed.hint) and not isinstance(typed.walked(values[call[2]]), type)
        assert one.ok == fits, call
    states = [{at: shape(state) for at, state in cluster.state().items()} for cluster in (alone, spread)]
    assert states[0] == states[1]


@given(seed=SEEDS)
@settings(max_examples=max(5, MANY // 10), deadline=None)
def test_state_of_any_declared_type_survives_a_restart_from_the_log_and_from_a_snapshot(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    typed = Typed(seed)
    values = [value for value in (typed.value() for _ in range(8)) if not isinstance(typed.walked(value), type)]
    app, store = app_of(typed, values), tmp_path_factory.mktemp("typed")
    for _ in range(2):  # the second starts from the snapshot of the first
        with Runtime(app, store=store) as runtime:
            runtime.client.batch([("box.put", f"k{n}", n) for n in range(len(values))])
            assert {key: shape(state) for key, state in runtime.state("box").items()} == {
                f"k{n}": shape(value) for n, value in enumerate(values)
            }


# --- what messages say ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    item: str
    price: decimal.Decimal


@dataclasses.dataclass
class Order:
    number: int
    lines: list[Line]
    paid: datetime.datetime | None = None


orders = App("orders")
order = orders.operator("order", state=Order, combine=lambda state, delta: delta)


@order.register
def spoil(ctx: Context, how: str) -> Any:
    whole = Order(1, [Line("pen", decimal.Decimal("1.50")), Line("ink", decimal.Decimal("2"))])
    if how == "put a str":
        ctx.put("not an order")
    elif how == "put a dict":
        ctx.put({"number": 1, "lines": []})
    elif how == "a field":
        ctx.put(dataclasses.replace(whole, number="1"))
    elif how == "deep":
        whole.lines[1].price = 2.0  # type: ignore[assignment]
        ctx.put(whole)
    elif how == "a bool":
        ctx.put(dataclasses.replace(whole, number=True))
    elif how == "a tuple":
        ctx.put(dataclasses.replace(whole, lines=()))
    elif how == "no field":
        del whole.number
        ctx.put(whole)
    elif how == "merge":
        ctx.merge(5)


WRONG = {
    "put a str": "wanted Order, found 'not an order' (str)",
    "put a dict": "wanted Order, found a dict (dict)",
    "a field": "Order.number: wanted int, found '1' (str)",
    "deep": "Order.lines[1].price: wanted Decimal, found 2.0 (float)",
    "a bool": "Order.number: wanted int, found True (bool)",
    "a tuple": "Order.lines: wanted list[Line], found a tuple (tuple)",
    "no field": "Order.number is missing, wanted int",
    "merge": "wanted Order, found 5 (int)",
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("how", WRONG)
def test_an_abort_names_the_field_the_type_wanted_and_the_value_found(how: str, workers: int) -> None:
    cluster = Cluster(orders, workers)
    (reply,) = cluster.run([(spoil, "o", how)])
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.message) == ("bad_value", WRONG[how])
    assert cluster.state() == {}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrong_value_can_be_caught_and_the_transaction_goes_on(workers: int) -> None:
    app = App("caught")
    box = app.operator("box", state=int)

    @box.register
    def try_it(ctx: Context) -> str:
        ctx.put(1)
        try:
            ctx.put("one")
        except BadValue as error:
            return str(error)
        raise Abort("not refused")

    cluster = Cluster(app, workers)
    assert cluster.results([(try_it, "k")]) == ["wanted int, found 'one' (str)"]
    assert cluster.state() == {("box", "k"): 1}


def test_an_operator_without_a_declared_state_takes_what_it_took() -> None:
    app = App("free")
    box = app.operator("box")

    @box.register
    def put(ctx: Context, value: Any) -> Any:
        ctx.put(value)
        return ctx.get()

    with Runtime(app) as runtime:
        for value in (1, "a", [1, (2,)], {"\0": 1}, {"\0": b"x", "a": 1}, None, 1.0):
            assert shape(runtime.client.call(put, "k", value)) == shape(value)
            assert shape(runtime.get(box, "k")) == shape(value)


# --- bad types --------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Arbitrary:
    pass


@dataclasses.dataclass
class Holder:
    colours: list[Colour]


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (set[int], "use a list or a tuple"),
        (Arbitrary, "use plain values, a dataclass, or a msgspec struct"),
        (Colour, "use plain values"),
        (Holder, "Holder.colours"),
        (decimal.Decimal | str, "not supported for values"),
        (dict[float, int], "the keys of a dict are str, int or bytes"),
        (datetime.timedelta, "use plain values"),
        (Literal[1.5], "a Literal is made of"),
        (Annotated[list[decimal.Decimal], Places(6, 2)], "Places(6, 2) is for values of type Decimal"),
    ],
)
def test_a_type_without_a_codec_is_refused_when_the_app_starts(hint: Any, says: str) -> None:
    as_state = App("as_state")
    as_state.operator("box", state=hint)
    as_result, as_argument = App("as_result"), App("as_argument")

    def give(ctx: Context) -> Any: ...
    def take(ctx: Context, value: Any) -> None: ...

    give.__annotations__["return"] = take.__annotations__["value"] = hint
    as_result.operator("box").register(give)
    as_argument.operator("box").register(take)
    for app, where in ((as_state, "operator box: state"), (as_result, "box.give: result"), (as_argument, "'value'")):
        with pytest.raises(ModelError) as caught:
            Program(app, Config())
        assert says in str(caught.value)
        assert where in str(caught.value)


def test_a_default_of_another_type_is_refused_when_the_app_starts() -> None:
    app = App("defaults")

    def take(ctx: Context, text: Any = None) -> None: ...

    take.__annotations__["text"] = str
    app.operator("box").register(take)
    with pytest.raises(ModelError, match=r"box.take: the default of parameter 'text': wanted str, found None"):
        Program(app, Config())


def test_a_record_that_grows_past_the_limit_aborts_and_leaves_the_state() -> None:
    app = App("grown")
    box = app.operator("box", state=Order)

    @box.register
    def grow(ctx: Context, lines: int) -> int:
        ctx.put(Order(1, [Line("x" * 10, decimal.Decimal(1))] * lines))
        return lines

    with Runtime(app, Config(value_bytes_max=1_000)) as runtime:
        replies = runtime.client.batch([(grow, "k", 3), (grow, "k", 100)])
        assert [reply.status for reply in replies] == ["ok", "aborted"]
        assert [failure.code for failure in replies.failures.values()] == [TooLarge.code]
        assert len(runtime.get(box, "k").lines) == 3


def test_a_value_that_contains_one_part_a_million_times_is_refused_at_once() -> None:
    values = Values([Line, Order])
    codec = Codec(values.hints.type_of(list[list[str]]), values)
    with pytest.raises(TooLarge):
        codec.seal([["x" * 100_000] * 100_000] * 100_000)
    with pytest.raises(TooLarge):
        Codec(values.hints.type_of(Order), values).seal(
            Order(1, [Line("x" * 100_000, decimal.Decimal(1))] * 10_000_000)
        )


@dataclasses.dataclass
class Part:
    n: int
    more: int = 7


class Whole(msgspec.Struct):
    parts: list[Part]
    one: Part | None = None


def test_a_field_that_was_deleted_and_has_a_default_is_written_with_it() -> None:
    values = Values([Part, Whole])
    codec = Codec(values.hints.type_of(Part), values)
    part = Part(1, 8)
    del part.more
    assert values.unseal(codec.seal(part)) == Part(1, 7)
    whole = Codec(values.hints.type_of(Whole), values)
    older = whole.seal(Whole([Part(1)], Part(2))).replace(b"\x82\xa1n\x01\xa4more\x07", b"\x81\xa1n\x01")
    assert values.unseal(older) == Whole([Part(1)], Part(2))
    assert whole.seal(values.unseal(older)) == whole.seal(Whole([Part(1)], Part(2)))


def test_a_frozen_state_that_is_put_back_is_not_encoded_again() -> None:
    @dataclasses.dataclass(frozen=True)
    class Fixed:
        n: int

    @dataclasses.dataclass(frozen=True)
    class Loose:
        n: list[int]

    values = Values([Fixed, Loose])
    for cls, value, is_kept in ((Fixed, Fixed(5), True), (Loose, Loose([5]), False)):
        codec = Codec(values.hints.type_of(cls), values)
        sealed = codec.seal(value)
        read = codec.decode(sealed)
        assert (codec.seal(read) is sealed) == is_kept
        assert codec.seal(read) == sealed


def test_a_function_that_never_returns_a_value_may_say_so() -> None:
    app = App("never")
    box = app.operator("box")

    @box.register
    def stop(ctx: Context) -> Never:
        raise Abort("stopped")

    with Runtime(app) as runtime:
        assert runtime.client.batch([(stop, "k")])[0].error == "stopped"


# --- partition_by -----------------------------------------------------------------------------------------------------


def test_partition_by_is_asked_once_for_a_key_and_its_errors_are_found_each_time() -> None:
    asked: Counter[Any] = Counter()

    def half(key: Any) -> Any:
        asked[key] += 1
        return key[: len(key) // 2] if key != "bad" else 1 / 0

    app = App("halves")
    box = app.operator("box", partition_by=half)

    @box.register
    def count(ctx: Context) -> int:
        ctx.put(ctx.get(0) + 1)
        return int(ctx.get())

    @box.register
    def pass_on(ctx: Context, to: str) -> None:
        ctx.call_async(count, to)

    with Runtime(app) as runtime:
        keys = [f"key{n % 10}" for n in range(1_000)]
        runtime.client.map(count, keys, [()] * len(keys))
        runtime.client.map(pass_on, keys, [(key,) for key in keys])
        assert max(asked.values()) == 1
        for _ in range(2):
            replies = runtime.client.batch([(count, "bad"), (pass_on, "key1", "bad"), (count, "key1")])
            assert [reply.status for reply in replies] == ["refused", "aborted", "ok"]


# --- found by a review ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Numbers:
    ns: list[int]


@dataclasses.dataclass
class Tree:
    left: Tree | None = None
    right: Tree | None = None


@dataclasses.dataclass
class Chapter(dict):  # type: ignore[type-arg]
    title: str


Parts = NewType("Parts", list[Part])


@dataclasses.dataclass
class Noted:
    """Hints that are written in other ways than the types that they mean."""

    by_id: Annotated[dict[str, Part], "by id"]
    one: Annotated[Part | None, "or none"]
    pair: Annotated[tuple[Part, int], "a pair"]
    parts: Parts
    words: Tuple  # type: ignore[type-arg]  # noqa: UP006
    rest: dict  # type: ignore[type-arg]


@pytest.mark.parametrize("limit", [100, 1 << 20])
@pytest.mark.parametrize("form", ["list", "dict", "record"])
def test_a_wrong_part_at_the_end_of_a_long_value_is_found(form: str, limit: int) -> None:
    count = limit * 3 // 5
    hint, value = {
        "list": (list[int], [*[1] * count, "x"]),
        "dict": (dict[str, int], {**{str(n): 1 for n in range(count // 9)}, "x": "x"}),
        "record": (Numbers, Numbers([*[1] * count, "x"])),  # type: ignore[list-item]
    }[form]
    values = Values([Numbers], bytes_max=limit)
    with pytest.raises(BadValue, match="wanted int, found 'x'"):
        codec_for(hint, values).seal(value)


def test_records_that_contain_themselves_are_checked_in_bounded_time_and_depth() -> None:
    values = Values([Tree])
    codec = codec_for(Tree, values)
    tree, chain = Tree(), Tree()
    for _ in range(60):
        tree = Tree(tree, tree)
    for _ in range(5_000):
        chain = Tree(chain)
    with pytest.raises(TooLarge):
        codec.seal(tree)
    with pytest.raises(BadValue, match="nested deeper than"):
        codec.seal(chain)
    wrong = Tree(Tree("x"))  # type: ignore[arg-type]
    with pytest.raises(BadValue, match=r"Tree.left.left: wanted Tree \| None, found 'x'"):
        codec.seal(wrong)
    assert values.unseal(codec.seal(Tree(Tree(), None))) == Tree(Tree(), None)


def test_hints_may_be_written_in_any_way() -> None:
    app = App("noted")
    box = app.operator("box", state=Noted)

    @box.register
    def put(ctx: Context[Noted], n: int) -> Noted | None:
        ctx.put(Noted({"a": Part(n)}, Part(n), (Part(n), n), Parts([Part(n)]), ("a", n), {n: "a"}))
        return ctx.get()

    for workers in (1, 3):
        cluster = Cluster(app, workers)
        (noted,) = cluster.results([(put, "k", 5)])
        assert shape(noted) == shape(cluster.state()["box", "k"])
        assert noted.parts == [Part(5)]


def test_a_zone_keeps_its_name_in_a_record() -> None:
    values = Values([Order])
    named = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "GMT"))
    back = values.unseal(codec_for(Order, values).seal(Order(1, [], named)))
    assert back.paid.tzname() == "GMT"


def test_what_is_also_a_dict_is_not_written_natively() -> None:
    codec = codec_for(Chapter, Values([Chapter]))
    assert codec.native is None


def test_long_decimals_count_towards_the_limit() -> None:
    values = Values([])
    with pytest.raises(TooLarge):
        codec_for(list[decimal.Decimal], values).seal([decimal.Decimal("1" * 100_000)] * 100_000)


def test_a_key_that_cannot_be_printed_is_not_in_the_message() -> None:
    with pytest.raises(BadValue, match=r"\[\.\.\.\]: wanted int"):
        codec_for(dict[int, int], Values()).seal({10**5000: "x"})


def test_a_field_may_be_called_as_no_name_of_python_is() -> None:
    record = msgspec.defstruct("Odd", [("class", int), ("n", int)])
    values = Values([record])
    value = record(**{"class": 1, "n": 2})
    assert values.unseal(codec_for(record, values).seal(value)) == value
