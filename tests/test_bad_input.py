"""Bad input from outside is refused: typed, before anything is logged. From inside, it aborts and is undone."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import types
from typing import Any

import pytest

from headrace import Abort, Aborted, App, Config, Reply, Runtime
from headrace.errors import (
    BadArguments,
    BadCall,
    BadKey,
    BadRequest,
    BadValue,
    ConfigError,
    HeadraceError,
    ModelError,
    RequestIdReused,
    TooLarge,
    UnknownFunction,
)
from headrace.wire import codec
from headrace.wire.messages import Refusal
from tests.driver import Driver

app = App("shop")
item = app.operator("item")
plain = app.operator("plain")
summed = app.operator("summed", combine=lambda state, delta: state + delta)
deed: Any = None  # what `act` does, in the example that runs


@item.register
def add(ctx: Any, amount: int, note: str = "") -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get()


@item.register
def bump(ctx: Any, amount: int) -> int:
    return add(ctx, amount)


@item.register
def set_to(ctx: Any, value: Any) -> None:
    ctx.put(value)


@item.register
def two_texts(ctx: Any, first: str, second: str) -> int:
    return len(first) + len(second)


@item.register
def ignore(ctx: Any, value: Any) -> None: ...


@plain.register
def act(ctx: Any) -> Any:
    return deed(ctx)


@plain.register
async def act_async(ctx: Any) -> Any:
    return await deed(ctx)


@summed.register
def merge(ctx: Any, delta: int) -> None:
    ctx.merge(delta)


@item.register
async def relay(ctx: Any) -> Any:
    """Writes here and there, then has `act` do its deed."""
    ctx.put("written")
    await ctx.call(add, "there", 1)
    return await ctx.call(act, "actor")


@item.register
async def relay_async(ctx: Any) -> Any:
    ctx.put("written")
    await ctx.call(add, "there", 1)
    return await ctx.call(act_async, "actor")


@item.register
def relay_one_way(ctx: Any) -> None:
    ctx.put("written")
    ctx.call_async(add, "there", 1)
    ctx.call_async(act, "actor")
    ctx.call_async(add, "there", 1)


def perform(what: Any, function: Any = act, config: Config | None = None, key: Any = "actor") -> Reply:
    """Run the deed as a root; afterwards nothing may be left of it if it failed, and the engine still serves."""
    global deed
    deed = what
    driver = Driver(app, config)
    driver.call(0, "before", add, "kept", 1)
    before = driver.state()
    reply = driver.call(1, "deed", function, key)
    if reply.failure is not None:
        assert driver.state() == before
    assert driver.call(2, "after", add, "kept", 1).unwrap() == 2
    return reply


def failure_of(reply: Reply) -> Any:
    assert reply.status == "aborted"
    assert reply.tid == 2
    return reply.failure


# --- from outside: refused --------------------------------------------------------------------------------------------

other_app = App("other")


@other_app.operator("item").register
def foreign(ctx: Any) -> None: ...


LONG = "x" * 513
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
REFUSED: dict[str, tuple[tuple[Any, ...], type[HeadraceError], str]] = {
    "an unknown operator": (("nobody.add", "k", 1), UnknownFunction, "nobody"),
    "an unknown function": (("item.nothing", "k", 1), UnknownFunction, "nothing"),
    "a name without a function": (("item", "k"), UnknownFunction, "item"),
    "an empty name": (("", "k"), UnknownFunction, ""),
    "a function of another app": ((foreign, "k"), UnknownFunction, "foreign"),
    "a plain function": ((len, "k"), UnknownFunction, "len"),
    "None for a function": ((None, "k"), UnknownFunction, "None"),
    "a list for a function": (([], "k"), UnknownFunction, ""),
    "too few arguments": ((add, "k"), BadArguments, "got 0"),
    "too many arguments": ((add, "k", 1, "a", 2), BadArguments, "got 3"),
    "a str for an int": ((add, "k", "1"), BadArguments, "amount"),
    "a float for an int": ((add, "k", 1.0), BadArguments, "amount"),
    "a bool for an int": ((add, "k", True), BadArguments, "amount"),
    "None for an int": ((add, "k", None), BadArguments, "amount"),
    "an int for a str": ((add, "k", 1, 1), BadArguments, "note"),
    "an object for an int": ((add, "k", object()), BadArguments, "amount"),
    "a deep list for an int": ((add, "k", DEEP), BadArguments, "amount"),
    "a deep list": ((set_to, "k", DEEP), BadValue, "64"),
    "a set": ((set_to, "k", {1}), BadValue, "set"),
    "an int over 64 bits": ((add, "k", 1 << 64), BadValue, "64 bits"),
    "a lone surrogate": ((add, "k", 1, "\ud800"), BadValue, "Unicode"),
    "a payload too large": ((set_to, "k", "x" * (1 << 20) + "x"), TooLarge, str(1 << 20)),
    "a list too large": ((set_to, "k", ["x" * (1 << 20)]), TooLarge, str(1 << 20)),
    "a float as a key": ((bump, 1.0, 1), BadKey, "float"),
    "a bool as a key": ((bump, True, 1), BadKey, "bool"),
    "None as a key": ((bump, None, 1), BadKey, "NoneType"),
    "a tuple as a key": ((bump, ("k",), 1), BadKey, "tuple"),
    "a list as a key": ((bump, ["k"], 1), BadKey, "list"),
    "a key too long": ((bump, LONG, 1), BadKey, "513"),
    "bytes too long as a key": ((bump, LONG.encode(), 1), BadKey, "513"),
    "a key too long in bytes": ((bump, "é" * 257, 1), BadKey, "514"),
    "a key with a lone surrogate": ((bump, "\udc00", 1), BadKey, "Unicode"),
    "an int key over 64 bits": ((bump, 1 << 64, 1), BadKey, "64 bits"),
    "an int key too long to print": ((bump, 10**5000, 1), BadKey, "64 bits"),
    "an int too long to print": ((add, "k", 10**5000), BadValue, "64 bits"),
    "an int too long to print for a str": ((add, "k", 1, 10**5000), BadArguments, "note"),
    "a call without a key": ((add,), BadRequest, "call"),
    "an empty call": ((), BadRequest, "call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_and_the_rest_of_its_batch_goes_on(name: str) -> None:
    call, error, named = REFUSED[name]
    with Runtime(app) as runtime:
        replies = runtime.client.batch([(add, "k", 1), call, (add, "k", 1)], request_id="b")
        assert [reply.tid for reply in replies] == [1, None, 2]
        assert [reply.request_id for reply in replies] == ["b/0", "b/1", "b/2"]
        assert replies[2].unwrap() == 2
        refused = replies[1]
        assert (refused.status, refused.epoch, refused.result) == ("refused", None, None)
        assert refused.failure is not None
        assert refused.failure.code == error.code
        assert refused.failure.type == error.__name__
        assert named in refused.failure.message
        with pytest.raises(error):
            refused.unwrap()
        assert runtime.state(item) == {"k": 2}


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
def test_a_bad_call_raises_its_refusal_and_uses_no_tid(name: str) -> None:
    call, error, named = REFUSED[name]
    with Runtime(app) as runtime:
        with pytest.raises(error) as caught:
            runtime.client.call(*call)
        assert type(caught.value) is error
        assert caught.value.code == error.code
        assert named in str(caught.value)
        assert runtime.metrics()["epochs"] == 0
        assert runtime.client.batch([(add, "k", 1)])[0].tid == 1


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
def test_a_bad_row_of_a_map_is_refused_as_in_a_batch(name: str) -> None:
    (function, key, *args), error, _ = REFUSED[name]
    with Runtime(app) as runtime:
        replies = runtime.client.map(function, [key, key], [tuple(args), tuple(args)])
        assert [reply.status for reply in replies] == ["refused", "refused"]
        assert {reply.failure.code for reply in replies if reply.failure} == {error.code}


def test_a_map_refuses_arguments_that_are_no_tuples() -> None:
    with Runtime(app) as runtime, pytest.raises(BadRequest):
        runtime.client.map(add, ["k"], [5])  # type: ignore[list-item]


def test_a_map_refuses_columns_of_different_length() -> None:
    with Runtime(app) as runtime, pytest.raises(BadRequest, match="2 keys"):
        runtime.client.map(add, ["k", "l"], [(1,)])


@pytest.mark.parametrize("call", ["text", 5, None, {}, object(), b"bytes"])
def test_what_is_no_call_is_refused_and_the_rest_goes_on(call: Any) -> None:
    with Runtime(app) as runtime:
        refused, fine = runtime.client.batch([call, (add, "k", 1)])
        assert refused.status == "refused"
        assert fine.unwrap() == 1


@pytest.mark.parametrize("request_id", ["", 5, b"x", "\ud800", "x" * 257, "é" * 129, ["x"]])
def test_a_bad_request_id_is_refused(request_id: Any) -> None:
    with Runtime(app) as runtime:
        for ask in (
            lambda: runtime.client.call(add, "k", 1, request_id=request_id),
            lambda: runtime.client.batch([(add, "k", 1)], request_id=request_id),
            lambda: runtime.client.map(add, ["k"], [(1,)], request_id=request_id),
        ):
            with pytest.raises(BadRequest):
                ask()
        assert runtime.state(item) == {}


def test_a_request_id_that_looks_like_a_huge_row_number_is_only_an_id() -> None:
    with Runtime(app, Config(request_id_bytes_max=10_000)) as runtime:
        assert runtime.client.call(add, "k", 1, request_id="x/" + "1" * 5_000) == 1
        assert runtime.client.call(add, "k", 1, request_id="x/" + "1" * 5_000) == 1


def test_a_reused_request_id_raises_and_changes_nothing() -> None:
    with Runtime(app) as runtime:
        runtime.client.call(add, "k", 1, request_id="x")
        with pytest.raises(RequestIdReused, match="x"):
            runtime.client.call(add, "k", 2, request_id="x")
        assert runtime.state(item) == {"k": 1}


def test_a_refused_request_id_can_be_used_again() -> None:
    with Runtime(app) as runtime:
        with pytest.raises(BadArguments):
            runtime.client.call(add, "k", "one", request_id="x")
        assert runtime.client.call(add, "k", 1, request_id="x") == 1


def test_all_arguments_of_a_call_together_are_limited() -> None:
    config = Config(value_bytes_max=100)
    with Runtime(app, config) as runtime:
        assert runtime.client.call(two_texts, "k", "x" * 40, "y" * 40) == 80
        with pytest.raises(TooLarge):
            runtime.client.call(two_texts, "k", "x" * 90, "y" * 90)


def test_many_small_arguments_together_are_limited() -> None:
    fresh = App("fresh")

    @fresh.operator("one").register
    def count(ctx: Any, *values: Any) -> int:
        return len(values)

    with Runtime(fresh, Config(value_bytes_max=100)) as runtime:
        assert runtime.client.call(count, "k", *range(50)) == 50
        with pytest.raises(TooLarge):
            runtime.client.call(count, "k", *range(1_000))


@dataclasses.dataclass
class Fussy:
    x: int

    def __post_init__(self) -> None:
        raise LookupError(self.x)


def test_arguments_that_break_the_conversion_they_are_compared_with_are_refused() -> None:
    fresh = App("fresh")

    @fresh.operator("one").register
    def take(ctx: Any, value: Fussy) -> None: ...

    with Runtime(fresh) as runtime:
        reply = runtime.client.batch([(take, "k", {"x": 1})])[0]
        assert reply.failure is not None
        assert (reply.status, reply.failure.code) == ("refused", "bad_arguments")


def test_a_large_call_can_be_repeated_with_its_request_id() -> None:
    """As large as is taken at all: the largest text that the limit lets in."""
    config = Config(value_bytes_max=100)
    for size in range(80, 101):
        with Runtime(app, config) as runtime:
            first = runtime.client.batch([(two_texts, "k", "x" * size, "")], request_id="same")[0]
            again = runtime.client.batch([(two_texts, "k", "x" * size, "")], request_id="same")[0]
            assert again == first


# --- from inside: aborted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
@pytest.mark.parametrize("form", ["call", "call_async"])
def test_a_bad_call_from_inside_aborts_where_it_was_made(name: str, form: str) -> None:
    call, error, named = REFUSED[name]

    async def make_call(ctx: Any) -> None:
        ctx.put("written")
        ctx.call_async(add, "there", 1)
        made = getattr(ctx, form)(*call)
        if made is not None:
            await made

    for function, key in ((act_async, "actor"), (relay_async, "root")):
        failure = failure_of(perform(make_call, function, key=key))
        assert (failure.code, failure.type) == (error.code, error.__name__)
        assert named in failure.message
        assert (failure.function, failure.key) == ("plain.act_async", "actor")


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
def test_a_bad_call_from_inside_can_be_caught_by_who_made_it_unless_it_reached_a_limit(name: str) -> None:
    call, error, _ = REFUSED[name]

    def make_call(ctx: Any) -> str:
        try:
            ctx.call_async(*call)
        except error:
            return "caught"
        return "nothing raised"

    reply = perform(make_call)
    if error is TooLarge:
        assert failure_of(reply).code == "too_large"
    else:
        assert reply.unwrap() == "caught"


BAD_VALUES: dict[str, Any] = {
    "a set": {1},
    "an object": object(),
    "an int over 64 bits": 1 << 64,
    "an int too long to print": 10**5000,
    "a lone surrogate": "\ud800",
    "a generator": (x for x in ()),
    "a module": types,
}


@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("use", ["put", "return", "merge"])
def test_a_bad_value_from_inside_aborts_where_it_was_used(name: str, use: str) -> None:
    value = BAD_VALUES[name]
    merging = App("merging")
    operator = merging.operator("sum", combine=lambda state, delta: state)

    @operator.register
    def do(ctx: Any) -> Any:
        if use == "put":
            ctx.put(value)
        if use == "merge":
            ctx.merge(value)
        return value if use == "return" else None

    @operator.register
    async def outer(ctx: Any) -> Any:
        ctx.put(1)
        return await ctx.call(do, "inner")

    driver = Driver(merging)
    for number, function in enumerate((do, outer)):
        failure = driver.call(number, f"{number}", function, "inner").failure
        assert failure is not None
        assert (failure.code, failure.function, failure.key) == ("bad_value", "sum.do", "inner")
        assert driver.state() == {}


@pytest.mark.parametrize("relay_by", [relay, relay_one_way])
def test_an_exception_is_placed_in_the_function_and_entity_that_raised_it(relay_by: Any) -> None:
    def fail(ctx: Any) -> None:
        ctx.put("written")
        raise Abort("no")

    failure = failure_of(perform(fail, relay_by, key="root"))
    assert (failure.code, failure.type, failure.message) == ("aborted", "Abort", "no")
    assert (failure.function, failure.key) == ("plain.act", "actor")


def test_an_aborted_call_raises_aborted_with_all_of_it() -> None:
    global deed

    def fail(ctx: Any) -> None:
        raise ValueError("no")

    deed = fail
    with Runtime(app) as runtime:
        with pytest.raises(Aborted) as caught:
            runtime.client.call(relay, "root")
        error = caught.value
        assert (error.type, error.message, error.function, error.key) == ("ValueError", "no", "plain.act", "actor")
        assert (error.tid, error.code, error.cause_code) == (1, "aborted", "aborted")


def test_an_aborted_error_can_be_copied() -> None:
    """As is done with it on the way from a worker process."""
    error = Aborted("Abort", "no", "item.add", "k", 7, "aborted")
    again = copy.copy(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_merge_without_combine_aborts() -> None:
    failure = failure_of(perform(lambda ctx: ctx.merge(1)))
    assert failure.code == "bad_call"
    assert "combine" in failure.message


# --- limits -----------------------------------------------------------------------------------------------------------


def test_more_asynchronous_calls_than_the_limit_abort_even_if_caught() -> None:
    def flood(ctx: Any) -> str:
        try:
            for _ in range(20):
                ctx.call_async(add, "there", 1)
        except HeadraceError:
            pass
        return "caught"

    failure = failure_of(perform(flood, config=Config(calls_max=10)))
    assert (failure.code, failure.function, failure.key) == ("limit_reached", "plain.act", "actor")
    assert perform(flood, config=Config(calls_max=20)).unwrap() == "caught"


def test_more_awaited_calls_than_the_limit_abort_even_if_caught() -> None:
    async def flood(ctx: Any) -> str:
        try:
            for _ in range(20):
                await ctx.call(add, "there", 1)
        except HeadraceError:
            pass
        return "caught"

    failure = failure_of(perform(flood, act_async, Config(calls_max=10)))
    assert (failure.code, failure.function, failure.key) == ("limit_reached", "plain.act_async", "actor")
    assert perform(flood, act_async, Config(calls_max=20)).unwrap() == "caught"


@pytest.mark.parametrize("awaited_first", [True, False])
def test_awaited_and_asynchronous_calls_are_limited_together(awaited_first: bool) -> None:
    async def both(ctx: Any) -> None:
        for awaits in (awaited_first, not awaited_first):
            for _ in range(6):
                if awaits:
                    await ctx.call(add, "there", 1)
                else:
                    ctx.call_async(add, "there", 1)

    assert failure_of(perform(both, act_async, Config(calls_max=11))).code == "limit_reached"
    assert perform(both, act_async, Config(calls_max=12)).ok


def test_a_limit_reached_in_a_nested_call_is_placed_there() -> None:
    def flood(ctx: Any) -> None:
        try:
            for _ in range(20):
                ctx.call_async(add, "there", 1)
        except HeadraceError:
            pass

    failure = failure_of(perform(flood, relay, Config(calls_max=10), key="root"))
    assert (failure.code, failure.function, failure.key) == ("limit_reached", "plain.act", "actor")


@item.register
async def descend(ctx: Any, levels: int) -> int:
    ctx.put(levels)
    try:
        return await ctx.call(descend, f"level {levels}", levels - 1) if levels else 0
    except HeadraceError:
        return -1


def test_calls_nested_deeper_than_the_limit_abort_even_if_caught() -> None:
    driver = Driver(app, Config(depth_max=10))
    assert driver.call(0, "fits", descend, "k", 10).unwrap() == 0
    before = driver.state()
    failure = driver.call(1, "too deep", descend, "k", 11).failure
    assert failure is not None
    assert failure.code == "limit_reached"
    assert (failure.function, failure.key) == ("item.descend", "level 2")
    assert driver.state() == before


def test_calls_may_nest_deeper_than_the_python_stack() -> None:
    driver = Driver(app, Config(depth_max=5_000))
    assert driver.call(0, "deep", descend, "k", 5_000).unwrap() == 0


def test_values_over_the_limit_of_the_transaction_abort_even_if_caught() -> None:
    def write(ctx: Any) -> str:
        try:
            for _ in range(20):
                ctx.put(["x" * 100])
        except HeadraceError:
            pass
        return "caught"

    failure = failure_of(perform(write, config=Config(transaction_bytes_max=1_000)))
    assert (failure.code, failure.function, failure.key) == ("limit_reached", "plain.act", "actor")
    assert perform(write, config=Config(transaction_bytes_max=4_000)).unwrap() == "caught"


@pytest.mark.parametrize("value", ["x" * 100, "é" * 50, ["x" * 100], b"x" * 100])
def test_arguments_count_towards_the_limit_of_the_transaction(value: Any) -> None:
    def send(ctx: Any) -> None:
        for _ in range(20):
            ctx.call_async(ignore, "there", value)

    assert failure_of(perform(send, config=Config(transaction_bytes_max=1_000))).code == "limit_reached"


def test_the_bytes_of_one_transaction_do_not_count_for_the_next() -> None:
    driver = Driver(app, Config(transaction_bytes_max=1_000))
    for number in range(20):
        assert driver.call(number, f"{number}", set_to, "k", ["x" * 300]).ok


def test_a_value_over_the_limit_aborts_even_if_caught() -> None:
    def write(ctx: Any) -> str:
        with contextlib.suppress(TooLarge):
            ctx.put("x" * 200)
        return "caught"

    assert failure_of(perform(write, config=Config(value_bytes_max=100))).code in ("too_large", "limit_reached")


def test_a_value_over_the_limit_aborts() -> None:
    for value in ("x" * 101, ["x" * 101], b"x" * 101, {"x" * 101: 1}):
        failure = failure_of(perform(lambda ctx, value=value: ctx.put(value), config=Config(value_bytes_max=100)))
        assert (failure.code, failure.type) == ("too_large", "TooLarge")
        failure = failure_of(perform(lambda ctx, value=value: value, config=Config(value_bytes_max=100)))
        assert failure.code == "too_large"


# --- whatever a function raises ---------------------------------------------------------------------------------------


def overflow(ctx: Any) -> Any:
    return overflow(ctx)


def exhaust(ctx: Any) -> Any:
    raise MemoryError("no more")


@pytest.mark.parametrize(("what", "named"), [(overflow, "RecursionError"), (exhaust, "MemoryError")])
@pytest.mark.parametrize("by", [act, relay, relay_one_way])
def test_a_function_that_exhausts_the_process_is_poisoned(what: Any, named: str, by: Any) -> None:
    failure = failure_of(perform(what, by, key="root" if by is not act else "actor"))
    assert (failure.code, failure.type, failure.function) == ("poisoned", "Poisoned", "plain.act")
    assert named in failure.message


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


class Rude(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class Wrong(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


RAISED = {
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit("out"),
    "StopIteration": StopIteration("stop"),
    "StopAsyncIteration": StopAsyncIteration("stop"),
    "CancelledError": asyncio.CancelledError("cancelled"),
    "a BaseException": BaseException("base"),
    "an interrupt": KeyboardInterrupt("by the function"),
    "a group": ExceptionGroup("many", [ValueError("one")]),
    "a broken message": Silent(),
    "a message that exits": Rude(),
    "a message that is no text": Wrong(),
    "an endless message": Endless(),
    "a huge message": Abort("x" * 10_000_000),
    "an invalid message": Abort("\ud800 and more"),
    "no message": Abort(),
    "a HeadraceError": BadCall("made by the function"),
}


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("by", [act, relay, relay_one_way])
def test_whatever_a_function_raises_aborts_and_is_undone(name: str, by: Any) -> None:
    error = RAISED[name]

    def fail(ctx: Any) -> None:
        ctx.put("written")
        raise error

    failure = failure_of(perform(fail, by, key="root" if by is not act else "actor"))
    assert failure.type == type(error).__name__
    assert (failure.function, failure.key) == ("plain.act", "actor")
    assert len(failure.message) < 2_100
    failure.message.encode()


@pytest.mark.parametrize("name", RAISED)
def test_whatever_an_async_function_raises_aborts_and_is_undone(name: str) -> None:
    error = RAISED[name]

    async def fail(ctx: Any) -> None:
        ctx.put("written")
        await ctx.call(add, "there", 1)
        raise error

    for by, key in ((act_async, "actor"), (relay_async, "root")):
        failure = failure_of(perform(fail, by, key=key))
        python_says = "RuntimeError" if isinstance(error, StopIteration) else type(error).__name__
        assert failure.type == python_says
        assert (failure.function, failure.key) == ("plain.act_async", "actor")


def test_a_failure_can_always_be_put_on_the_wire() -> None:
    def to_a_bad_key(ctx: Any) -> None:
        ctx.call_async(bump, "\ud800", 1)

    def to_a_long_key(ctx: Any) -> None:
        ctx.call_async(bump, "x" * 1_000_000, 1)

    def fail(ctx: Any) -> None:
        raise type("X" * 1_000_000, (Exception,), {})

    for what in (to_a_bad_key, to_a_long_key, fail):
        failure = failure_of(perform(what))
        assert len(codec.encode(Refusal(failure))) < 10_000


# --- misuse of the context --------------------------------------------------------------------------------------------


@types.coroutine
def give(value: Any) -> Any:
    return (yield value)


@pytest.mark.parametrize(
    "awaited", [give(None), give(1), give("x"), give(object())], ids=["None", "int", "str", "object"]
)
def test_awaiting_something_else_aborts(awaited: Any) -> None:
    async def wait(ctx: Any) -> None:
        ctx.put("written")
        await awaited

    failure = failure_of(perform(wait, act_async))
    assert (failure.code, failure.function) == ("bad_call", "plain.act_async")


def test_sleeping_in_a_function_aborts() -> None:
    async def wait(ctx: Any) -> None:
        await asyncio.sleep(0)

    assert failure_of(perform(wait, act_async)).code == "bad_call"


def test_awaiting_the_call_of_another_context_aborts() -> None:
    async def lend(ctx: Any) -> None:
        lent.append(ctx.call(add, "there", 1))
        await ctx.call(borrow, "borrower")

    @item.register
    async def borrow(ctx: Any) -> None:
        await lent[0]

    lent: list[Any] = []
    try:
        failure = failure_of(perform(lend, act_async))
        assert (failure.code, failure.function, failure.key) == ("bad_call", "item.borrow", "borrower")
    finally:
        del item.functions["borrow"]


def test_a_call_that_is_not_awaited_aborts() -> None:
    async def forget(ctx: Any) -> None:
        ctx.put("written")
        ctx.call(add, "there", 1)

    for by, key in ((act_async, "actor"), (relay_async, "root")):
        failure = failure_of(perform(forget, by, key=key))
        assert failure.code == "bad_call"
        assert "plain.act_async" in failure.message
        assert (failure.function, failure.key) == ("plain.act_async", "actor")


def test_a_call_that_is_not_awaited_aborts_though_another_is_awaited_twice() -> None:
    async def confuse(ctx: Any) -> None:
        first = ctx.call(add, "there", 1)
        ctx.call(add, "elsewhere", 1)
        await first
        await first

    assert failure_of(perform(confuse, act_async)).code == "bad_call"


def test_a_call_is_awaited_only_once() -> None:
    async def twice(ctx: Any) -> None:
        call = ctx.call(add, "there", 1)
        await call
        await call

    assert failure_of(perform(twice, act_async)).code == "bad_call"


def test_a_call_that_is_not_awaited_in_one_transaction_is_not_held_against_the_next() -> None:
    async def forget(ctx: Any) -> None:
        ctx.call(add, "there", 1)
        raise Abort("first")

    async def remember(ctx: Any) -> int:
        return await ctx.call(add, "there", 1)

    global deed
    driver = Driver(app)
    deed = forget
    assert driver.call(0, "a", act_async, "k").failure.message == "first"  # type: ignore[union-attr]
    deed = remember
    assert driver.call(1, "b", act_async, "k").unwrap() == 1


def test_a_plain_function_cannot_call_and_wait() -> None:
    failure = failure_of(perform(lambda ctx: ctx.call(add, "there", 1)))
    assert (failure.code, failure.function) == ("bad_call", "plain.act")
    assert "async def" in failure.message


@pytest.mark.parametrize("how", ["except", "finally", "return in finally", "swallow and await"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_around_a_call_that_aborts_can_neither_catch_it_nor_write(how: str) -> None:
    async def guard(ctx: Any) -> str:
        ctx.put("before")
        if how == "except":
            try:
                await ctx.call(add, "there", 1)
                await ctx.call(act, "actor")
            except BaseException:
                ctx.put("caught")
                ctx.call_async(add, "thief", 1)
        elif how == "finally":
            try:
                await ctx.call(act, "actor")
            finally:
                ctx.put("at last")
                ctx.call_async(add, "thief", 1)
        elif how == "return in finally":
            try:
                await ctx.call(act, "actor")
            finally:
                return "returned"  # noqa: B012
        else:
            try:
                await ctx.call(act, "actor")
            except BaseException:
                await ctx.call(add, "thief", 1)
        return "caught"

    global deed

    def fail(ctx: Any) -> None:
        raise Abort("no")

    deed = fail

    @item.register
    async def guarding(ctx: Any) -> str:
        return await guard(ctx)

    try:
        driver = Driver(app)
        failure = driver.call(0, "deed", guarding, "root").failure
        assert failure is not None
        assert (failure.message, failure.function, failure.key) == ("no", "plain.act", "actor")
        assert driver.state() == {}
        gc.collect()
        driver.call(1, "after", add, "kept", 1)
        assert driver.state() == {("item", "kept"): 1}
    finally:
        del item.functions["guarding"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_refuses_to_end_makes_no_calls_in_later_transactions() -> None:
    def fail(ctx: Any) -> None:
        raise Abort("no")

    @item.register
    async def stubborn(ctx: Any) -> None:
        try:
            await ctx.call(act, "actor")
        finally:
            try:
                await ctx.call(act, "again")
            finally:
                ctx.put("written")
                ctx.call_async(add, "thief", 1)

    global deed
    deed = fail
    try:
        driver = Driver(app)
        driver.call(0, "a", stubborn, "root")
        gc.collect()
        driver.call(1, "b", add, "kept", 1)
        assert driver.state() == {("item", "kept"): 1}
    finally:
        del item.functions["stubborn"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_function_touches_only_its_own_entity_whatever_it_does_to_its_context(fails: bool) -> None:
    async def masquerade(ctx: Any) -> None:
        with contextlib.suppress(AttributeError):
            ctx.key = "other"
        ctx.put("written")
        await ctx.call(add, "there", 1)
        if fails:
            raise Abort("no")

    global deed
    deed = masquerade
    driver = Driver(app)
    driver.engine.program.tables["plain"]["other"] = 5
    driver.call(1, "deed", act_async, "own")
    assert driver.state()["plain", "other"] == 5


def test_a_function_cannot_use_a_client_of_its_runtime() -> None:
    global deed
    with Runtime(app) as runtime:
        for misuse in (
            lambda ctx: runtime.client.call(add, "k", 1),
            lambda ctx: runtime.client.batch([(add, "k", 1)]),
            lambda ctx: runtime.get(item, "k"),
            lambda ctx: runtime.state(item),
        ):
            deed = misuse
            reply = runtime.client.batch([(act, "k")])[0]
            assert reply.failure is not None
            assert reply.failure.code == "bad_call"
            assert "ctx.call" in reply.failure.message
        assert runtime.client.call(add, "k", 1) == 1


# --- config and model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch_transactions_max": 0},
        {"calls_max": -1},
        {"depth_max": 1.5},
        {"value_bytes_max": True},
        {"key_bytes_max": "10"},
        {"request_ids_max": -1},
        {"epoch_interval_us": -1},
        {"pending_transactions_max": 1 << 62},
        {"value_depth_max": 201},
        {"transaction_bytes_max": None},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name) as caught:
        Config(**wrong)
    assert caught.value.code == "bad_config"


def test_the_least_settings_are_allowed() -> None:
    zero = {"epoch_interval_us", "request_id_retention_us", "request_ids_max"}
    Config(**{field.name: 0 if field.name in zero else 1 for field in dataclasses.fields(Config)})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().calls_max = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "1a", "a b", "a.b", "é", 5, None, "a\n"])
def test_a_bad_name_of_an_app_or_operator_is_a_model_error(name: Any) -> None:
    with pytest.raises(ModelError):
        App(name)
    with pytest.raises(ModelError):
        App("fine").operator(name)


def test_a_name_is_given_only_once() -> None:
    fresh = App("fresh")
    operator = fresh.operator("one")
    with pytest.raises(ModelError, match="one"):
        fresh.operator("one")

    def twice(ctx: Any) -> None: ...

    operator.register(twice)
    with pytest.raises(ModelError, match="twice"):
        operator.register(twice)


def no_context() -> None: ...
def starred(*ctx: Any) -> None: ...
def keyword(ctx: Any, *, needed: int) -> None: ...
def keywords(ctx: Any, **more: Any) -> None: ...
def generates(ctx: Any) -> Any:
    yield 1


async def generates_async(ctx: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    "body",
    [no_context, starred, keyword, keywords, generates, generates_async, lambda ctx: 1, len, 5, None, int],
    ids=lambda body: getattr(body, "__name__", str(body)),
)
def test_what_cannot_be_a_function_is_a_model_error(body: Any) -> None:
    with pytest.raises(ModelError):
        App("fresh").operator("one").register(body)


@pytest.mark.parametrize("setting", ["combine", "partition_by"])
def test_a_combine_or_partition_by_that_cannot_be_called_is_a_model_error(setting: str) -> None:
    with pytest.raises(ModelError, match=setting):
        App("fresh").operator("one", **{setting: 5})


@pytest.mark.parametrize("annotation", ["Nowhere", "types.Nothing", "list[", "5 +", "int.nothing"])
def test_an_annotation_that_cannot_be_resolved_is_a_model_error(annotation: str) -> None:
    fresh = App("fresh")

    def take(ctx: Any, value: Any) -> None: ...

    take.__annotations__["value"] = annotation
    fresh.operator("one").register(take)
    with pytest.raises(ModelError, match="take"):
        Runtime(fresh)


@dataclasses.dataclass
class Dangling:
    other: Nowhere  # type: ignore[name-defined]  # noqa: F821


def test_a_record_whose_annotation_cannot_be_resolved_is_a_model_error() -> None:
    fresh = App("fresh")
    fresh.operator("one", state=Dangling)
    with pytest.raises(ModelError, match="Dangling"):
        Runtime(fresh)


def test_two_records_of_one_name_are_a_model_error() -> None:
    fresh = App("fresh")
    for _ in range(2):
        fresh.record(dataclasses.make_dataclass("Same", [("x", int)]))
    with pytest.raises(ModelError, match="Same"):
        Runtime(fresh)


@pytest.mark.parametrize("what", [int, 5, object, "Point"])
def test_what_is_no_record_is_a_model_error(what: Any) -> None:
    with pytest.raises(ModelError):
        App("fresh").record(what)


def test_a_runtime_takes_an_app() -> None:
    with pytest.raises(ModelError):
        Runtime("bank")  # type: ignore[arg-type]


def test_asking_for_the_state_of_nobody_is_typed() -> None:
    with Runtime(app) as runtime:
        with pytest.raises(UnknownFunction, match="nobody"):
            runtime.state("nobody")
        with pytest.raises(BadKey):
            runtime.get(item, 1.5)
        assert runtime.get(item, "nothing", "default") == "default"
