"""The app of these tests: functions with every kind of outcome."""

from __future__ import annotations

import threading
from typing import Any

from headrace import Abort, App, Context

app = App("shop")
account = app.operator("account", state=int)
thing = app.operator("thing")


class TooPoor(Abort):
    """An app's own abort."""


@account.register
def deposit(ctx: Context[int], amount: int) -> int:
    """Add to an account.

    A negative amount takes from it.
    """
    balance = ctx.get(0) + amount
    if balance < 0:
        raise TooPoor(f"{ctx.key} lacks {-balance}")
    ctx.put(balance)
    return balance


@account.register
def give_up(ctx: Context[int]) -> None:
    raise Abort("no")


@thing.register
def fail(ctx: Context, kind: str) -> Any:
    if kind == "bug":
        return {}["missing"]
    if kind == "bad value":
        ctx.put({1, 2})
    if kind == "no memory":
        raise MemoryError
    if kind == "large":
        ctx.put("x" * (2 << 20))
    if kind == "endless":
        for number in range(1 << 40):
            ctx.call_async(keep, str(number), number)
    return None


@thing.register
def keep(ctx: Context, value: Any) -> Any:
    ctx.put(value)
    return value


@thing.register
async def not_awaited(ctx: Context) -> None:
    ctx.call(keep, "other", 1)


def pay(idempotency_key: str, amount: int) -> int:
    raise OSError("the bank is closed")


app.external("pay", pay, tries=1)


@thing.register
async def buy(ctx: Context, amount: int) -> Any:
    return await ctx.call_external("pay", amount)


GATE = threading.Event()
GATE.set()


@thing.register
def wait_at_the_gate(ctx: Context) -> None:
    GATE.wait(60)
