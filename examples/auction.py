"""An auction house with escrow: bids hold money, an outbid returns it, a timer closes the auction and pays the seller.

Shows transactions over two kinds of entities, a timer that ends something (`call_later`), one that is cancelled, a mail
that leaves once its transaction is final (`send_external`), and an invariant for the simulator:

    python examples/auction.py
    headrace sim --app examples.auction:app --invariant examples.auction:money_is_conserved

`tests/test_auction.py` tests it with the test kit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from headrace import Abort, App, Context, Runtime

OPEN, SOLD, UNSOLD, CALLED_OFF = "open", "sold", "unsold", "called off"
SECONDS_MAX = 30 * 24 * 3600.0


@dataclass
class Account:
    balance: int = 0  # without what is held for a bid
    won: list[str] = field(default_factory=list)  # the auctions


@dataclass
class Auction:
    seller: str
    closes: datetime
    timer: str  # that closes it
    status: str = OPEN
    bidder: str | None = None  # the highest
    escrow: int = 0  # the highest bid, which is held here until the auction ends


app = App("auction_house")
account = app.operator("account", state=Account)
auction = app.operator("auction", state=Auction)
books = app.operator("books", state=int, combine=lambda total, change: total + change)  # money paid in, less money out


# --- accounts ---------------------------------------------------------------------------------------------------------


@account.register
def deposit(ctx: Context[Account], amount: int) -> int:
    """Pay in; returns the new balance."""
    if amount <= 0:
        raise Abort(f"cannot deposit {amount}")
    ctx.call_async(_book, "paid in", amount)
    return add(ctx, amount)


@account.register
def withdraw(ctx: Context[Account], amount: int) -> int:
    """Pay out; returns the new balance."""
    if amount <= 0:
        raise Abort(f"cannot withdraw {amount}")
    ctx.call_async(_book, "paid in", -amount)
    return add(ctx, -amount)


@account.register
def _credit(ctx: Context[Account], amount: int) -> None:
    """Money comes back from escrow, or from a sale."""
    add(ctx, amount)


@account.register
def _hold(ctx: Context[Account], amount: int) -> None:
    """Money goes into escrow. If it is not there, the bid aborts."""
    add(ctx, -amount)


@account.register
def _has_won(ctx: Context[Account], lot: str) -> None:
    mine = ctx.get(Account())
    mine.won.append(lot)
    ctx.put(mine)


def add(ctx: Context[Account], amount: int) -> int:
    """A plain helper: part of the function that uses it."""
    mine = ctx.get(Account())
    if mine.balance + amount < 0:
        raise Abort(f"{ctx.key} has {mine.balance}, needs {-amount}")
    mine.balance += amount
    ctx.put(mine)
    return mine.balance


@books.register
def _book(ctx: Context[int], change: int) -> None:
    ctx.merge(change)


# --- auctions ---------------------------------------------------------------------------------------------------------


@auction.register
def begin(ctx: Context[Auction], seller: str, seconds: float) -> datetime:
    """Offer a lot, whose name is the key, for so many seconds. Returns the time when the auction closes."""
    known = ctx.get()
    if known is not None and known.status in (OPEN, SOLD):
        raise Abort(f"{ctx.key} is {known.status} already")
    if not 0 < seconds <= SECONDS_MAX:
        raise Abort(f"an auction cannot take {seconds} seconds")
    closes = ctx.now + timedelta(seconds=seconds)
    timer = ctx.call_later(seconds, close, ctx.key)
    ctx.put(Auction(seller, closes, timer))
    return closes


@auction.register
def bid(ctx: Context[Auction], bidder: str, amount: int) -> int:
    """Bid on a lot. The money is held until somebody bids more, or the auction closes. Returns the bid before."""
    mine = ctx.get()
    if mine is None or mine.status != OPEN:
        raise Abort(f"{ctx.key} is not open")
    if bidder == mine.seller:
        raise Abort(f"{bidder} sells {ctx.key}, and cannot bid")
    if amount <= mine.escrow:
        raise Abort(f"{amount} is not more than {mine.escrow}")
    before = mine.escrow
    if mine.bidder is not None:
        ctx.call_async(_credit, mine.bidder, before)  # first: who bids twice needs only the difference
    ctx.call_async(_hold, bidder, amount)
    mine.bidder, mine.escrow = bidder, amount
    ctx.put(mine)
    return before


@auction.register
def close(ctx: Context[Auction]) -> str:
    """The time is over: the seller is paid, and the highest bidder has won. Called by the timer."""
    mine = ctx.get()
    if mine is None or mine.status != OPEN:
        raise Abort(f"{ctx.key} is not open")
    if ctx.now < mine.closes:
        raise Abort(f"{ctx.key} closes at {mine.closes}")
    mine.status = UNSOLD
    if mine.bidder is not None:
        mine.status = SOLD
        ctx.call_async(_credit, mine.seller, mine.escrow)
        ctx.call_async(_has_won, mine.bidder, ctx.key)
        ctx.send_external("mail", mine.bidder, f"you have won {ctx.key} for {mine.escrow}")
        mine.escrow = 0
    ctx.put(mine)
    return mine.status


@auction.register
def call_off(ctx: Context[Auction], seller: str) -> None:
    """The seller takes the lot back: a bid that was made is returned."""
    mine = ctx.get()
    if mine is None or mine.status != OPEN or mine.seller != seller:
        raise Abort(f"{seller} has no open auction of {ctx.key}")
    ctx.cancel(mine.timer)
    if mine.bidder is not None:
        ctx.call_async(_credit, mine.bidder, mine.escrow)
    mine.status, mine.bidder, mine.escrow = CALLED_OFF, None, 0
    ctx.put(mine)


# --- the outside world ------------------------------------------------------------------------------------------------

mails: dict[str, tuple[str, str]] = {}


def mail(key: str, to: str, text: str) -> str:
    """Stands for a mail server, which knows each mail by its idempotency key."""
    mails.setdefault(key, (to, text))
    return f"mail to {to}"


app.external("mail", mail, timeout=5, tries=3)


# --- what must always hold --------------------------------------------------------------------------------------------


def money_is_conserved(state: dict[str, dict[Any, Any]]) -> None:
    """For the simulator, and for tests: `state` is {operator: {key: state}}."""
    balances = {name: each.balance for name, each in state["account"].items()}
    held = {lot: each.escrow for lot, each in state["auction"].items()}
    paid_in = state["books"].get("paid in", 0)
    assert sum(balances.values()) + sum(held.values()) == paid_in, f"{balances} and {held} are not {paid_in}"
    assert all(balance >= 0 for balance in balances.values()), balances
    for lot, each in state["auction"].items():
        assert (each.escrow > 0) == (each.status == OPEN and each.bidder is not None), f"{lot}: {each}"
        winners = [name for name, owner in state["account"].items() for won in owner.won if won == lot]
        assert winners == ([each.bidder] if each.status == SOLD else []), f"{lot}: {winners} have won it"


# --- the story --------------------------------------------------------------------------------------------------------


def main() -> None:
    mails.clear()
    with Runtime(app) as runtime:
        client = runtime.client
        client.batch([(deposit, "ann", 100), (deposit, "bo", 80)])
        client.call(begin, "lamp", "sam", 1.0)
        for bidder, amount in (("ann", 30), ("bo", 50), ("bo", 60), ("ann", 55), ("bo", 90), ("ann", 70)):
            reply = client.batch([(bid, "lamp", bidder, amount)])[0]
            print(f"{bidder} bids {amount}: {reply.error or 'the highest bid'}")
        print("held for ann's bid:", runtime.state(auction)["lamp"].escrow)
        while runtime.state(auction)["lamp"].status == OPEN or not mails:
            time.sleep(0.01)
        for name, each in sorted(runtime.state(account).items()):
            print(f"  {name}: {each.balance}, won: {', '.join(each.won) or 'nothing'}")
        print("mails:", *(f"{to}: {text}" for to, text in mails.values()))
        money_is_conserved({name: runtime.state(name) for name in app.operators})
        print("balances and escrow are what was paid in:", runtime.get(books, "paid in"))


if __name__ == "__main__":
    main()
