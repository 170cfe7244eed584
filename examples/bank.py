"""A bank: accounts that pay each other.

Shows a one-way call (`transfer`), an awaited one (`withdraw_and_ask`), and aborts on either side that undo both.

    python examples/bank.py
"""

from __future__ import annotations

from headrace import Abort, App, Context, Runtime

BALANCE_MAX = 1_000_000

app = App("bank")
account = app.operator("account", state=int)


@account.register
def deposit(ctx: Context[int], amount: int) -> int:
    """Pay in; returns the new balance."""
    if amount <= 0:
        raise Abort(f"cannot deposit {amount}")
    balance = ctx.get(0) + amount
    if balance > BALANCE_MAX:
        raise Abort(f"{ctx.key} may hold at most {BALANCE_MAX}")
    ctx.put(balance)
    return balance


@account.register
def transfer(ctx: Context[int], to: str, amount: int) -> int:
    """Pay another account; returns the balance left here. If the deposit aborts, so does the withdrawal."""
    left = withdraw(ctx, amount)
    ctx.call_async(deposit, to, amount)  # one-way: runs after this function has returned, in the same transaction
    return left


@account.register
async def withdraw_and_ask(ctx: Context[int], to: str, amount: int) -> int:
    """Pay another account; returns its new balance. A function that needs an answer is async."""
    withdraw(ctx, amount)
    return await ctx.call(deposit, to, amount)


def withdraw(ctx: Context[int], amount: int) -> int:
    """A plain helper: part of the function that uses it."""
    balance = ctx.get(0)
    if balance < amount:
        raise Abort(f"{ctx.key} has {balance}, needs {amount}")
    ctx.put(balance - amount)
    return balance - amount


def main() -> None:
    with Runtime(app) as runtime:
        client = runtime.client
        for name, amount in (("alice", 100), ("bob", 20), ("carol", BALANCE_MAX)):
            client.call(deposit, name, amount)
        total = sum(runtime.state(account).values())

        print("alice pays bob 30; alice has left:", client.call(transfer, "alice", "bob", 30))
        print("alice pays bob 30; bob then has:  ", client.call(withdraw_and_ask, "alice", "bob", 30))
        for to, amount in (("bob", 500), ("carol", 10), ("bob", -10)):
            reply = client.batch([(transfer, "alice", to, amount)])[0]
            why = reply.failure.message if reply.failure else "no reason"
            print(f"alice pays {to} {amount}: {reply.status}, {why}")

        # A request id stands for one call: sent twice, paid once.
        for _ in range(2):
            client.options(request_id="rent-may").call(transfer, "bob", "alice", 5)

        for name, balance in sorted(runtime.state(account).items()):
            print(f"{name:>8} {balance:>9,}")
        print("total unchanged:", sum(runtime.state(account).values()) == total)


if __name__ == "__main__":
    main()
