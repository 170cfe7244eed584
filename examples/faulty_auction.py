"""An auction house that loses money: a mistake for the simulator to find. `examples/auction.py` is the right one.

The tests that come to mind pass: a bid holds money, an outbid returns it, a bid that is too low aborts. The mistake
shows only when some bidder raises a bid of their own.

    python examples/faulty_auction.py
    headrace sim --app examples.faulty_auction:app --invariant examples.faulty_auction:money_is_conserved
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace import Abort, App, Context
from headrace.testing import TestRuntime


@dataclass
class Lot:
    bidder: str | None = None
    escrow: int = 0


app = App("faulty_auction")
account = app.operator("account", state=int)
lot = app.operator("lot", state=Lot)
books = app.operator("books", state=int, combine=lambda total, change: total + change)


@account.register
def deposit(ctx: Context[int], amount: int) -> None:
    if amount <= 0:
        raise Abort(f"cannot deposit {amount}")
    ctx.put(ctx.get(0) + amount)
    ctx.call_async(_book, "paid in", amount)


@books.register
def _book(ctx: Context[int], change: int) -> None:
    ctx.merge(change)


@account.register
def _move(ctx: Context[int], amount: int) -> None:
    """Out of escrow, or into it if the amount is negative."""
    if ctx.get(0) + amount < 0:
        raise Abort(f"{ctx.key} has {ctx.get(0)}, needs {-amount}")
    ctx.put(ctx.get(0) + amount)


@lot.register
def bid(ctx: Context[Lot], bidder: str, amount: int) -> None:
    mine = ctx.get(Lot())
    if amount <= mine.escrow:
        raise Abort(f"{amount} is not more than {mine.escrow}")
    if mine.bidder is not None and mine.bidder != bidder:  # the mistake: it is also held for the same bidder
        ctx.call_async(_move, mine.bidder, mine.escrow)
    ctx.call_async(_move, bidder, -amount)
    ctx.put(Lot(bidder, amount))


def money_is_conserved(state: dict[str, dict[Any, Any]]) -> bool:
    held: int = sum(each.escrow for each in state["lot"].values())
    accounts: int = sum(state["account"].values())
    deposited: int = sum(state["books"].values())
    return accounts + held == deposited


def main() -> None:
    with TestRuntime(app) as runtime:
        client = runtime.client
        client.batch([(deposit, "ann", 100), (deposit, "bo", 100)])
        for bidder, amount in (("ann", 30), ("bo", 50), ("ann", 40), ("ann", 500), ("ann", 60)):
            print(f"{bidder} bids {amount}: {client.batch([(bid, 'lamp', bidder, amount)])[0].status}")
        print("balances:", runtime.state(account), "held:", runtime.state(lot)["lamp"].escrow)
        print("money is conserved:", money_is_conserved(runtime.states()))


if __name__ == "__main__":
    main()
