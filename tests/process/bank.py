"""The app of the process tests: workers import it from here."""

from __future__ import annotations

import os
import time
from typing import Any

from headrace import Abort, App

app = App("bank")
account = app.operator("account")


@account.register
def deposit(ctx: Any, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get()


@account.register
def transfer(ctx: Any, to: str, amount: int) -> int:
    if ctx.get(0) < amount:
        raise Abort("not enough")
    ctx.put(ctx.get(0) - amount)
    ctx.call_async(deposit, to, amount)
    return ctx.get()


@account.register
async def move(ctx: Any, to: str, amount: int) -> list[int]:
    """The same with a call that is awaited: on the way the function waits for another worker."""
    there = await ctx.call(deposit, to, amount)
    if ctx.get(0) < amount:
        raise Abort("not enough")
    ctx.put(ctx.get(0) - amount)
    return [ctx.get(), there]


@account.register
def spin(ctx: Any) -> None:
    while True:
        pass


@account.register
def doze(ctx: Any, for_s: float) -> int:
    time.sleep(for_s)
    return ctx.get(0)


@account.register
def process_id(ctx: Any) -> int:
    return os.getpid()


@account.register
def crash(ctx: Any) -> None:
    os.kill(os.getpid(), 9)


@account.register
def compute_for_ever(ctx: Any) -> int:
    return sum(range(1 << 60))  # in C, and nobody else gets a turn
