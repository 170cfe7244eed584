"""An app as the type checker should see it: correct, with no cast, no `Any` and no ignored line."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated

from headrace import Abort, App, Client, Context, Function, Operator, Runtime

LIMIT = Decimal(1_000_000)
Cents = Annotated[int, "of an euro"]


@dataclass
class Account:
    balance: Decimal = Decimal(0)
    notes: list[str] = field(default_factory=list)


def together(one: int, other: int) -> int:
    return one + other


app = App("typed_bank")
account = app.operator("account", state=Account)
total = app.operator("total", state=int, combine=together)
tag = app.operator("tag", state=str | None)
fees = app.operator("fees", state=list[Cents])
anything = app.operator("anything")


@account.register
def deposit(ctx: Context[Account], amount: Decimal, note: str = "", *, limit: Decimal = LIMIT) -> Decimal:
    mine = ctx.get(Account())
    if mine.balance + amount > limit:
        raise Abort(f"{ctx.key} may hold at most {limit}")
    mine.balance += amount
    mine.notes.append(note)
    ctx.put(mine)
    ctx.call_async(count, "deposits")
    return mine.balance


@account.register
async def transfer(ctx: Context[Account], to: str, amount: Decimal) -> str:
    mine = ctx.get()
    if mine is None or mine.balance < amount:
        raise Abort(f"{ctx.key} has too little")
    mine.balance -= amount
    ctx.put(mine)
    theirs = await ctx.call(deposit, to, amount, note=f"from {ctx.key}")
    ctx.call_later(datetime.timedelta(days=1), deposit, to, Decimal("0.01"), limit=LIMIT * 2)
    return f"{to} has {theirs.quantize(Decimal(1))}"


@account.register
def twice(ctx: Context[Account], amount: Decimal) -> Decimal:
    return deposit(ctx, amount) + deposit(ctx, amount, "again")


@account.register
async def slowly(ctx: Context[Account], to: str) -> int:
    return len(await transfer(ctx, to, Decimal(1)))


@total.register
def count(ctx: Context[int], by: int = 1) -> None:
    ctx.merge(by)


@tag.register
def name(ctx: Context[str | None], text: str | None) -> str | None:
    before = ctx.get()
    ctx.put(text)
    return before


@fees.register
def add_fee(ctx: Context[list[int]], cents: int) -> int:
    ctx.put([*ctx.get([]), cents])
    return sum(ctx.get([]))


@anything.register
def keep(ctx: Context, value: object) -> None:
    ctx.put(value)


app.every(3600, count, "hours", by=1)
app.options(name="bonus").every("0 3 * * *", deposit, "alice", Decimal(1), limit=Decimal(10))


def bare(function: Function, operator: Operator, ctx: Context) -> str:
    """Without brackets all three are legal, and nothing is known."""
    return f"{function.full_name} of {operator.name}: {ctx.key}"


def described(function: Function[[str, Decimal], str], client: Client) -> str:
    return client.call(function, "alice", "bob", Decimal(1)).upper()


async def ask(client: Client) -> int:
    told = await client.acall(transfer, "alice", to="bob", amount=Decimal(5))
    return len(told)


def story(runtime: Runtime) -> list[str]:
    client = runtime.client
    paid = client.call(deposit, "alice", Decimal(100), limit=Decimal(200))
    once = client.options(request_id="rent").call(transfer, "alice", "bob", Decimal(30))
    client.options(request_id="many").batch([(deposit, "alice", Decimal(1)), (count, "calls", 2)])
    by_name = client.call("account.deposit", "alice", Decimal(9), note="by name")
    before = client.call(name, "bob", "the second")
    states = {key: state.balance for key, state in runtime.state(account).items()}
    alice, nobody = runtime.get(account, "alice"), runtime.get(account, "nobody", 0)
    left = alice.balance if alice is not None else Decimal(0)
    none = nobody if isinstance(nobody, int) else nobody.notes
    return [str(paid.to_integral_value()), once, str(by_name), str(before), str(states["bob"]), str(left), str(none)]
