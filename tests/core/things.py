"""Functions that several tests share, small ones on entities that hold any value, and logs of their calls."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import uuid
from typing import Any

import msgspec

from headrace import App, Context
from tests.cluster import on

app = App("things")
thing = app.operator("thing")


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
def send_put(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(put, to, value)


@thing.register
def send_add(ctx: Context, to: str, amount: int) -> None:
    ctx.call_async(add, to, amount)


@thing.register
async def both(ctx: Context, a: str, c: str) -> Any:
    ctx.put((await ctx.call(read, a), await ctx.call(read, c)))
    return ctx.get()


A, B, C = on(1, "a"), on(2, "b"), on(3, "c")
SKEW: list[Any] = [(put, A, 0), (put, C, 0), (send_put, B, A, 1), (both, B, A, C), (send_put, B, C, 1), (read, B)]

LOSABLE: list[Any] = [(send_add, on(1 + at % 3, f"r{at}"), on(1 + at % 2, "hot"), 1) for at in range(8)] + SKEW


@thing.register
def note_tid(ctx: Context, to: str) -> int:
    ctx.call_async(put_tid, to)
    return ctx.tid


@thing.register
def put_tid(ctx: Context) -> None:
    ctx.put([*ctx.get([]), ctx.tid])


@app.record
@dataclasses.dataclass
class Point:
    x: Any
    y: tuple[int, ...]


@app.record
class Name(msgspec.Struct):
    text: str


VALUES: list[Any] = [
    *((), (1, (2, [3, (4,)])), [(1,), [1]], {"k": (1,), 7: b"7", b"b": {}}, b"", b"\xc1", "é", "1", 1, True, 1.0, None),
    *(0.0, -0.0, float("nan"), (1 << 64) - 1, -(1 << 63), decimal.Decimal("1.10"), uuid.UUID(int=5)),
    *(datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)),
    *(Point((1, 2), (3,)), Name("n"), [Point(Name("in"), ()), (True, 1, 1.0)]),
]


@thing.register
async def pass_on(ctx: Context, to: str, value: Any) -> Any:
    """Carried as an argument, as state, as an answer and as a result; awaited and one-way."""
    ctx.call_async(put, ctx.key, value)
    await ctx.call(put, to, value)
    return await ctx.call(read, to)
