"""Whatever goes wrong in a function aborts its transaction, is placed where it was raised, and all of it is undone."""

from __future__ import annotations

import asyncio
import copy
import types
from typing import Any

import pytest

from headrace import Abort, Aborted, App, Runtime
from headrace.errors import BadCall, TooLarge
from headrace.wire import codec
from headrace.wire.messages import Refusal
from tests.core import shop
from tests.core.shop import (
    REFUSED,
    act,
    act_async,
    add,
    app,
    bump,
    failure_of,
    perform,
    relay,
    relay_async,
    relay_one_way,
)
from tests.driver import Driver

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
        failure = driver.call_at(number, f"{number}", function, "inner").failure
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
    def fail(ctx: Any) -> None:
        raise ValueError("no")

    shop.deed = fail
    with Runtime(app) as runtime:
        with pytest.raises(Aborted) as caught:
            runtime.client.call(relay, "root")
        error = caught.value
        assert (error.type, error.message, error.function, error.key) == ("ValueError", "no", "plain.act", "actor")
        assert (error.tid, error.code, error.cause_code) == (1, "aborted", "function_failed")


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
