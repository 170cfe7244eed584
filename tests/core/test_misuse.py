"""A function that misuses its context, or its runtime, aborts and harms nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from typing import Any

import pytest

from headrace import Abort, Runtime
from tests.core import shop
from tests.core.shop import act, act_async, add, app, failure_of, item, perform, relay_async
from tests.driver import Driver


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

    driver = Driver(app)
    shop.deed = forget
    assert driver.call_at(0, "a", act_async, "k").failure.message == "first"  # type: ignore[union-attr]
    shop.deed = remember
    assert driver.call_at(1, "b", act_async, "k").unwrap() == 1


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

    def fail(ctx: Any) -> None:
        raise Abort("no")

    shop.deed = fail

    @item.register
    async def guarding(ctx: Any) -> str:
        return await guard(ctx)

    try:
        driver = Driver(app)
        failure = driver.call_at(0, "deed", guarding, "root").failure
        assert failure is not None
        assert (failure.message, failure.function, failure.key) == ("no", "plain.act", "actor")
        assert driver.state() == {}
        gc.collect()
        driver.call_at(1, "after", add, "kept", 1)
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

    shop.deed = fail
    try:
        driver = Driver(app)
        driver.call_at(0, "a", stubborn, "root")
        gc.collect()
        driver.call_at(1, "b", add, "kept", 1)
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

    shop.deed = masquerade
    driver = Driver(app)
    driver.core.state.tables["plain"].load({"other": 5})
    driver.call_at(1, "deed", act_async, "own")
    assert driver.state()["plain", "other"] == 5


def test_a_function_cannot_use_a_client_of_its_runtime() -> None:
    with Runtime(app) as runtime:
        for misuse in (
            lambda ctx: runtime.client.call(add, "k", 1),
            lambda ctx: runtime.client.batch([(add, "k", 1)]),
            lambda ctx: runtime.get(item, "k"),
            lambda ctx: runtime.state(item),
        ):
            shop.deed = misuse
            reply = runtime.client.batch([(act, "k")])[0]
            assert reply.failure is not None
            assert reply.failure.code == "bad_call"
            assert "ctx.call" in reply.failure.message
        assert runtime.client.call(add, "k", 1) == 1
