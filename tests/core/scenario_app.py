"""The functions that scenarios call."""

from __future__ import annotations

from typing import Any

from headrace import Abort, App, Context

app = App("scenarios")
thing = app.operator("thing")
noted: list[str] = []  # what functions saw while they ran, also in runs that came to nothing


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@thing.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


@thing.register
def read(ctx: Context) -> Any:
    return ctx.get()


@thing.register
def send_add(ctx: Context, to: str, amount: int) -> None:
    ctx.call_async(add, to, amount)


@thing.register
def send_put(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(put, to, value)


@thing.register
def bounce(ctx: Context, keys: list[str], last: str, left: int) -> None:
    """To and fro; one of the two calls of each level ends at once, and the last one lies elsewhere."""
    ctx.call_async(add, ctx.key, 1)
    if left:
        ctx.call_async(bounce, keys[left % 2], keys, last, left - 1)
    else:
        ctx.call_async(add, last, 1)


@thing.register
def fail(ctx: Context) -> None:
    raise Abort("no")


@thing.register
def fail_and_write(ctx: Context, failing: str, written: str) -> None:
    ctx.call_async(fail, failing)
    ctx.call_async(put, written, "never")


@thing.register
def go(ctx: Context, pointer: str) -> None:
    ctx.call_async(follow, pointer)


@thing.register
def follow(ctx: Context) -> None:
    """Adds to the entity whose key is here."""
    ctx.call_async(add, ctx.get(), 1)


@thing.register
async def rewrite(ctx: Context, other: str) -> list[Any]:
    """Reads what it wrote: at once, after an await, and after a call that came back to the same entity."""
    trace = [ctx.get(0)]
    noted.append(f"rewrite sees {trace[0]}")
    ctx.put(trace[0] * 10)
    trace.append(ctx.get())
    trace.append(await ctx.call(call_back, other, ctx.key))
    trace.append(ctx.get())
    ctx.put(ctx.get() + 2)
    trace.append(ctx.get())
    return trace


@thing.register
async def call_back(ctx: Context, to: str) -> int:
    return int(await ctx.call(add, to, 1))


@thing.register
def demand(ctx: Context, least: int) -> None:
    if ctx.get(0) < least:
        raise Abort("not enough")


@thing.register
def buy(ctx: Context, purse: str, goods: str) -> str:
    ctx.call_async(add, goods, 1)
    ctx.call_async(demand, purse, 5)
    return "bought"


@thing.register
def give(ctx: Context, value: int) -> int:
    return value


@thing.register
async def ask(ctx: Context, first: str, second: str) -> int:
    """What its own state is decides whom it asks: the first, nobody, or the second."""
    seen = ctx.get(0)
    noted.append(f"ask sees {seen}")
    return -1 if seen == 1 else await ctx.call(give, first if seen == 0 else second, seen)


@thing.register
async def twice(ctx: Context, key: str) -> int:
    return await ctx.call(count, key) + await ctx.call(count, key)  # type: ignore[no-any-return]


@thing.register
def count(ctx: Context) -> int:
    ctx.put(ctx.get(0) + 1)
    return 1


functions = {function.name: function for function in thing.functions.values()}
