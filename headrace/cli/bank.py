"""The app that `headrace demo` runs."""

from headrace import Abort, App, Context

app = App("bank")
account = app.operator("account")


@account.register
def deposit(ctx: Context, amount: int) -> int:
    balance: int = ctx.get(0) + amount
    ctx.put(balance)
    return balance


@account.register
def transfer(ctx: Context, to: str, amount: int) -> int:
    balance: int = ctx.get(0)
    if balance < amount:
        raise Abort(f"{ctx.key} has {balance}, needs {amount}")
    ctx.put(balance - amount)
    ctx.call_async(deposit, to, amount)  # one-way, in the same transaction
    return balance - amount
