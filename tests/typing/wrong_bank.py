"""Mistakes that the type checker must report, each on its line. Never run."""

from __future__ import annotations

from decimal import Decimal

from headrace import App, Client, Context, Runtime
from tests.typing.typed_bank import Account, account, add_fee, app, count, deposit, name, tag, total, transfer


def of_the_client(client: Client) -> None:
    client.call(deposit, "alice", 100)  # wrong: an int, not a Decimal
    client.call(deposit, "alice")  # wrong: the amount is missing
    client.call(transfer, "alice", "bob", Decimal(1), "rent")  # wrong: one too many
    client.call(transfer, "alice", "bob", amout=Decimal(1))  # wrong: no such parameter
    client.call(deposit, "alice", Decimal(1), "rent", Decimal(5))  # wrong: `limit` is given by name only
    client.call(deposit, "alice", Decimal(1), request_id="rent")  # wrong: that is an option
    told: int = client.call(transfer, "alice", "bob", Decimal(1))  # wrong: the result is a str
    client.call(transfer, "alice", "bob", Decimal(1)).normalize()  # wrong: so it has no such method
    client.options(requestid="rent").call(deposit, "alice", Decimal(1))  # wrong: no such option
    client.options(request_id=7).call(deposit, "alice", Decimal(1))  # wrong: an id is a str
    client.call(len, "alice")  # wrong: it is not registered
    print(told)


async def of_acall(client: Client) -> None:
    await client.acall(transfer, "alice", to=5, amount=Decimal(1))  # wrong: a key of the other type
    number: int = await client.acall(name, "alice", "x")  # wrong: it returns str | None
    print(number)


def of_the_runtime(runtime: Runtime) -> None:
    runtime.get(account, "alice").balance  # wrong: there may be none  # noqa: B018
    balance: int = runtime.get(account, "alice", 0)  # wrong: an Account, or 0
    amounts: dict[str, int] = runtime.state(account)  # wrong: the values are Accounts
    print(balance, amounts)


@account.register
async def of_the_context(ctx: Context[Account], to: str) -> Decimal:
    ctx.put(5)  # wrong: not an Account
    ctx.put(Account("5"))  # wrong: its balance is a Decimal
    ctx.get().balance  # wrong: there may be none  # noqa: B018
    mine: Account = ctx.get(0)  # wrong: it may be 0
    ctx.merge(Decimal(1))  # wrong: a delta is an Account too
    ctx.call_async(count, "deposits", "one")  # wrong: an int
    ctx.call_later(60, transfer, to)  # wrong: the amount is missing
    text: str = await ctx.call(deposit, to, Decimal(1))  # wrong: a Decimal
    deposit(ctx, "1")  # wrong: also as a plain function
    ctx.call(deposit, to, Decimal(1)).normalize()  # wrong: it was not awaited
    print(mine, text)
    return len(to)  # wrong: not what it says


@account.register  # wrong: the state of an account is no int
def of_another(ctx: Context[int]) -> None: ...


@tag.register  # wrong: a function has a context
def without() -> None: ...


def of_the_app() -> None:
    other: App = app.operator("other", state=int)  # wrong: an operator
    app.operator("sums", state=str, combine=max_of)  # wrong: it combines ints
    app.every(60, add_fee, "all")  # wrong: the fee is missing
    app.every(60, count, "all", name="counting")  # wrong: that is an option
    print(other, total)


def max_of(one: int, other: int) -> int:
    return max(one, other)
