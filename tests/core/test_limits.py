"""A transaction that reaches a limit aborts, also if its function catches that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import App, Config, Context, Runtime
from headrace.errors import HeadraceError, TooLarge
from tests.core.shop import act_async, add, app, descend, failure_of, ignore, perform, relay, set_to
from tests.driver import Driver


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


def test_calls_nested_deeper_than_the_limit_abort_even_if_caught() -> None:
    driver = Driver(app, Config(depth_max=10))
    assert driver.call_at(0, "fits", descend, "k", 10).unwrap() == 0
    before = driver.state()
    failure = driver.call_at(1, "too deep", descend, "k", 11).failure
    assert failure is not None
    assert failure.code == "limit_reached"
    assert (failure.function, failure.key) == ("item.descend", "level 2")
    assert driver.state() == before


def test_calls_may_nest_deeper_than_the_python_stack() -> None:
    driver = Driver(app, Config(depth_max=5_000))
    assert driver.call_at(0, "deep", descend, "k", 5_000).unwrap() == 0


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
        assert driver.call_at(number, f"{number}", set_to, "k", ["x" * 300]).ok


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


# --- what it costs ----------------------------------------------------------------------------------------------------

large = App("limits")

bag = large.operator("bag")


@bag.register
def fill(ctx: Context, count: int) -> None:
    ctx.put([[0] * 100_000] * count)


@bag.register
def fill_badly(ctx: Context, count: int) -> None:
    ctx.put([[0] * 1_000] * count + [{1}])


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(large) as made:
        yield made


@pytest.mark.parametrize("function", [fill, fill_badly])
def test_naming_the_culprit_in_a_huge_value_takes_no_longer_than_the_limit(runtime: Runtime, function: Any) -> None:
    began = time.perf_counter()
    assert runtime.client.batch([(function, "a", 10_000)])[0].status == "aborted"
    assert time.perf_counter() - began < 20  # it took minutes
