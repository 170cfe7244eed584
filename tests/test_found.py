"""Bugs that were found once, each as the sentence that must hold."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Abort, App, Config, Context, HeadraceError, Runtime
from headrace.errors import BadCall, BadRequest, TooLarge

app = App("found")
item = app.operator("item")
bag = app.operator("bag")


@item.register
def add(ctx: Context, amount: int) -> int:
    total: int = ctx.get(0) + amount
    ctx.put(total)
    return total


def late_call(ctx: Context) -> Iterator[int]:
    try:
        yield 1
    finally:
        ctx.call_async(add, "ghost", 7)
        ctx.put(666)


@item.register
def leave_a_generator(ctx: Context) -> None:
    kept = late_call(ctx)
    next(kept)
    raise Abort("no")


@item.register
async def leave_a_generator_async(ctx: Context) -> None:
    kept = late_call(ctx)
    next(kept)
    raise Abort("no")


@item.register
def leave_a_cycle(ctx: Context, leave: bool) -> int:
    if not leave:
        gc.collect()
        return int(ctx.get(0))
    error, kept = Abort("no"), late_call(ctx)
    next(kept)
    raise error


class BadText(str):
    def encode(self, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("no bytes")


class SaysBadText(Exception):
    def __str__(self) -> str:
        return BadText("text")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class HasNoName(Exception, metaclass=Nameless):
    pass


class HasNoCode(HeadraceError):
    @property
    def code(self) -> str:  # type: ignore[override]
        raise RuntimeError("no code")


class HasNoClass(Exception):
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


STRANGE = {kind.__qualname__: kind for kind in (SaysBadText, HasNoName, HasNoCode, HasNoClass)}


@item.register
def raise_strange(ctx: Context, name: str) -> None:
    raise STRANGE[name]("strange")


@bag.register
def fill(ctx: Context, count: int) -> None:
    ctx.put([[0] * 100_000] * count)


@bag.register
def fill_badly(ctx: Context, count: int) -> None:
    ctx.put([[0] * 1_000] * count + [{1}])


@item.register
def close_it(ctx: Context) -> None:
    running[0].close()


running: list[Runtime] = []


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(app) as made:
        running[:] = [made]
        yield made


@pytest.mark.parametrize("function", [leave_a_generator, leave_a_generator_async])
def test_what_an_aborted_function_leaves_behind_reaches_no_later_transaction(runtime: Runtime, function: Any) -> None:
    replies = runtime.client.batch([(function, "a"), (add, "b", 1), (function, "a"), (add, "b", 1)])
    assert [reply.status for reply in replies] == ["aborted", "ok", "aborted", "ok"]
    assert runtime.state(item) == {"b": 2}


def test_what_an_aborted_function_leaves_to_the_garbage_collector_writes_nowhere(runtime: Runtime) -> None:
    replies = runtime.client.batch([(add, "w", 5), (leave_a_cycle, "a", True), (leave_a_cycle, "w", False)])
    assert [reply.status for reply in replies] == ["ok", "aborted", "ok"]
    assert replies[2].result == 5
    assert runtime.state(item) == {"w": 5}


@pytest.mark.parametrize("name", STRANGE)
def test_an_exception_that_cannot_be_looked_at_aborts_and_the_runtime_goes_on(runtime: Runtime, name: str) -> None:
    assert runtime.client.batch([(raise_strange, "a", name)])[0].status == "aborted"
    assert runtime.client.call(add, "a", 1) == 1


def test_more_request_ids_than_calls_are_refused(runtime: Runtime) -> None:
    with pytest.raises(BadRequest, match="2 request ids for 1 calls"):
        runtime.client.submit(["p", "q"], [(add, "a", 1)], wait=True)
    assert runtime.client.call(add, "b", 5, request_id="q") == 5


def test_a_batch_larger_than_the_ids_that_are_kept_is_refused_rather_than_half_forgotten() -> None:
    with Runtime(app, Config(request_ids_max=100)) as runtime:
        with pytest.raises(TooLarge, match="only 100 request ids are kept"):
            runtime.client.batch([(add, "a", 1)] * 101, request_id="x")
        for _ in range(2):
            runtime.client.batch([(add, "a", 1)] * 100, request_id="x")
        assert runtime.state(item) == {"a": 100}


@pytest.mark.parametrize("function", [fill, fill_badly])
def test_naming_the_culprit_in_a_huge_value_takes_no_longer_than_the_limit(runtime: Runtime, function: Any) -> None:
    began = time.perf_counter()
    assert runtime.client.batch([(function, "a", 10_000)])[0].status == "aborted"
    assert time.perf_counter() - began < 20  # it took minutes


def test_a_callback_of_a_client_cannot_stop_the_runtime(runtime: Runtime) -> None:
    submitted = runtime.client.submit(["x"], [(add, "a", 1)], wait=True)
    submitted.add_done_callback(lambda _: sys.exit())
    again = runtime.client.submit(["y"], [(add, "a", 1)], wait=True)
    again.add_done_callback(lambda _: sys.exit())
    assert runtime.client.call(add, "a", 1) == 3


def test_a_function_cannot_close_its_runtime(runtime: Runtime) -> None:
    failure = runtime.client.batch([(close_it, "a")])[0].failure
    assert failure is not None
    assert failure.code == BadCall.code
    assert runtime.client.call(add, "a", 1) == 1


def test_a_clock_that_is_set_back_does_not_hold_up_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(app, Config(epoch_interval_us=50_000)) as runtime:
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now - 3_600_000_000_000)
        assert runtime.client.submit(["x"], [(add, "a", 1)], wait=True).result(30).results == [1]


def test_many_refused_rows_cost_no_more_than_their_number(runtime: Runtime) -> None:
    calls: list[Any] = [(add, "a", "no") if row % 2 else (add, "a", 1) for row in range(60_000)]
    began = time.perf_counter()
    replies = runtime.client.batch(calls, request_id="many")
    again = runtime.client.batch([(add, "a", 2)] * 60_000, request_id="many")
    assert time.perf_counter() - began < 30  # it took minutes
    assert (replies.committed, replies[59_998].result, replies[59_999].status) == (30_000, 30_000, "refused")
    assert [reply.status for reply in again[:3]] == ["refused", "ok", "refused"]
