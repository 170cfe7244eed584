"""The app under test: a bank whose total stays the same, and lists for the history checker.

Every request has its own number. A transfer leaves it in the receipts of its client, a list transaction appends it: so
in the end one can see what was lost and what ran twice, without reading the log.
"""

from __future__ import annotations

from headrace.errors import Abort
from headrace.model.app import App
from headrace.model.context import Context

START = 100  # first balance of an account
RECEIPTS_PER_PAGE = 100
APPEND, READ = "append", "read"

app = App("chaos")
account = app.operator("account")
receipts = app.operator("receipts")
lists = app.operator("list")


@receipts.register
def note(ctx: Context, number: int) -> None:
    ctx.put([*ctx.get([]), number])


@receipts.register
def page(ctx: Context) -> list[int]:
    return ctx.get([])


@account.register
def deposit(ctx: Context, amount: int) -> int:
    balance: int = ctx.get(START) + amount
    ctx.put(balance)
    return balance


@account.register
def balance(ctx: Context) -> int:
    return ctx.get(START)


@account.register
def transfer(ctx: Context, to: str, amount: int, client: str, number: int) -> int:
    """One-way."""
    left = take(ctx, amount)
    ctx.call_async(deposit, to, amount)
    ctx.call_async(note, page_of(client, number), number)
    return left


@account.register
async def transfer_awaited(ctx: Context, to: str, amount: int, client: str, number: int) -> list[int]:
    """Waits for calls to two other entities."""
    there: int = await ctx.call(deposit, to, amount)
    await ctx.call(note, page_of(client, number), number)
    return [take(ctx, amount), there]


@account.register
async def audit(ctx: Context, accounts: list[str]) -> int:
    """The sum of all balances."""
    total = 0
    for name in accounts:
        total += await ctx.call(balance, name)
    return total


def take(ctx: Context, amount: int) -> int:
    left: int = ctx.get(START) - amount
    if left < 0:
        raise Abort(f"{ctx.key} lacks {-left}")
    ctx.put(left)
    return left


def page_of(client: str, number: int) -> str:
    return f"{client}/{number // RECEIPTS_PER_PAGE}"


@lists.register
def push(ctx: Context, value: int) -> None:
    ctx.put([*ctx.get([]), value])


@lists.register
def look(ctx: Context) -> list[int]:
    return ctx.get([])


@lists.register
async def run_all(ctx: Context, ops: list[list]) -> list[list[int]]:  # type: ignore[type-arg]
    """Appends and reads, one after the other; returns what was read."""
    seen = []
    for kind, key, value in ops:
        if kind == APPEND:
            await ctx.call(push, key, value)
        else:
            seen.append(await ctx.call(look, key))
    return seen


@lists.register
def send_all(ctx: Context, ops: list[list]) -> list[list[int]]:  # type: ignore[type-arg]
    """Appends only, one-way."""
    for _, key, value in ops:
        ctx.call_async(push, key, value)
    return []
