"""The functions that the papers' tests run: small ones, on entities that are numbers, lists or names."""

from __future__ import annotations

from typing import Any

from headrace import Abort, App, Context

app = App("styx")
item = app.operator("item")
seen: list[Any] = []  # what functions saw while they ran, also in runs that came to nothing


@item.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@item.register
def read(ctx: Context) -> Any:
    return ctx.get(0)


@item.register
def note(ctx: Context, what: Any) -> None:
    ctx.put([*ctx.get([]), what])


@item.register
def note_tid(ctx: Context) -> None:
    ctx.put([*ctx.get([]), ctx.tid])


@item.register
def touch(ctx: Context, first: str, second: str) -> None:
    """Figure 4: a transaction on two keys."""
    ctx.call_async(note_tid, first)
    ctx.call_async(note_tid, second)


@item.register
def point(ctx: Context, to: str) -> None:
    ctx.put(to)


@item.register
def bump(ctx: Context, to: str) -> None:
    ctx.call_async(add, to, 1)


@item.register
def move(ctx: Context, to: str, amount: int) -> int:
    """Fails in the callee, on another worker."""
    ctx.put(ctx.get(0) - amount)
    ctx.call_async(take_in, to, amount)
    return int(ctx.get())


@item.register
def take_in(ctx: Context, amount: int) -> None:
    if amount > 100:
        raise Abort("too much")
    ctx.put(ctx.get(0) + amount)


@item.register
def shift(ctx: Context, pointer: str, by: int) -> None:
    ctx.call_async(add, pointer, by)


@item.register
def follow(ctx: Context, targets: list[str], sums: list[str]) -> int:
    """One-way: who is called, and whom that one calls, depends on what is read."""
    at = ctx.get(0)
    seen.append(at)
    ctx.call_async(bump, targets[at], sums[at])
    return int(at)


@item.register
async def follow_and_wait(ctx: Context, targets: list[str], sums: list[str]) -> int:
    at = ctx.get(0)
    seen.append(at)
    await ctx.call(bump, targets[at], sums[at])
    return int(at + 100 * await ctx.call(read, sums[at]))


@item.register
async def fickle(ctx: Context, target: str, other: str) -> Any:
    """Does as it did before, until its state says otherwise."""
    mood = ctx.get(0)
    if mood == "aborts":
        raise Abort("not today")
    if mood == "other target":
        ctx.call_async(note, other, 1)
    elif mood == "other argument":
        ctx.call_async(note, target, 2)
    elif mood == "one more":
        ctx.call_async(note, target, 1)
        ctx.call_async(note, target, 1)
    elif mood == "awaits":
        await ctx.call(note, target, 1)
    elif mood != "silent":
        ctx.call_async(note, target, 1)
    return mood
