"""What an aborted function leaves behind reaches no later transaction, and no exception stops the runtime."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Abort, App, Context, HeadraceError, Runtime

# What is left behind gets an error when it uses its context, wherever Python's garbage collector runs it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

app = App("after_an_abort")
item = app.operator("item")


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


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(app) as made:
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
