"""An app for tests of what goes wrong: `perform` has a function do a deed, and checks that nothing is left of
one that failed. `REFUSED` are calls that are refused."""

from __future__ import annotations

from typing import Any

from headrace import App, Config, Reply
from headrace.errors import BadArguments, BadKey, BadRequest, BadValue, HeadraceError, TooLarge, UnknownFunction
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
    driver.call_at(0, "before", add, "kept", 1)
    before = driver.state()
    reply = driver.call_at(1, "deed", function, key)
    if reply.failure is not None:
        assert driver.state() == before
    assert driver.call_at(2, "after", add, "kept", 1).unwrap() == 2
    return reply


def failure_of(reply: Reply) -> Any:
    assert reply.status == "aborted"
    assert reply.tid == 2
    return reply.failure


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


@item.register
async def descend(ctx: Any, levels: int) -> int:
    ctx.put(levels)
    try:
        return await ctx.call(descend, f"level {levels}", levels - 1) if levels else 0
    except HeadraceError:
        return -1
