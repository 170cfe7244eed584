"""Subscriptions: a free trial that ends automatically, a payment, a receipt by mail. All of it survives restarts.

Shows what reaches beyond the state: a timer that can be cancelled (`call_later`), a payment that is part of the
transaction (`call_external`), a mail that leaves once it is final (`send_external`), a nightly schedule (`app.every`),
and sessions that end when they are not used (`ttl`).

    python examples/subscriptions.py
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from headrace import Abort, App, Context, Runtime
from headrace.errors import ExternalFailed

PRICES = {"basic": 500, "pro": 1_500}  # in cents a month
TRIAL = timedelta(days=14)
TRY_AGAIN = timedelta(hours=6)


@dataclass
class Subscription:
    plan: str
    card: str
    status: str = "trial"  # then active, unpaid or cancelled
    timer: str | None = None  # of what comes next
    payment: str | None = None  # the provider's number
    receipt: str | None = None  # the mail server's number


@dataclass
class Books:
    active: int = 0
    nights: list[tuple[date, int]] = field(default_factory=list)  # how many were active


app = App("subscriptions")
subscription = app.operator("subscription", state=Subscription)
books = app.operator("books", state=Books)
session = app.operator("session", state=str, ttl=timedelta(minutes=30))  # state: who it is


# --- a subscription ---------------------------------------------------------------------------------------------------


@subscription.register
def begin(ctx: Context[Subscription], plan: str, card: str) -> str:
    """Start a trial; returns the time when it ends."""
    if ctx.get() is not None:
        raise Abort(f"{ctx.key} has a subscription already")
    if plan not in PRICES:
        raise Abort(f"there is no plan {plan}")
    timer = ctx.call_later(TRIAL, pay, ctx.key)  # a transaction of its own, two weeks from now
    ctx.put(Subscription(plan, card, timer=timer))
    return (ctx.now + TRIAL).date().isoformat()


@subscription.register
async def pay(ctx: Context[Subscription]) -> str:
    """The trial is over, or the customer pays early. The payment is part of this transaction, which continues with
    the provider's response."""
    mine = ctx.get()
    if mine is None or mine.status not in ("trial", "unpaid"):
        raise Abort(f"{ctx.key} has nothing to pay")
    if mine.timer is not None:
        ctx.cancel(mine.timer)  # if it is the timer that calls, it is gone already, and this does nothing
    try:
        payment = await ctx.call_external("charge", mine.card, PRICES[mine.plan])
    except ExternalFailed:  # nobody answers there. An abort would end it here: a timer fires once
        mine.timer = ctx.call_later(TRY_AGAIN, pay, ctx.key)
        ctx.put(mine)
        return mine.status
    mine.status, mine.timer, mine.payment = "active" if payment else "unpaid", None, payment
    ctx.put(mine)
    if payment:
        ctx.send_external("mail", ctx.key, f"{payment}: thank you for {mine.plan}", then=mailed)
        ctx.call_async(count, "all", 1)
    return mine.status


@subscription.register
def mailed(ctx: Context[Subscription], number: str | None, error: str | None) -> None:
    """The outcome of the mail: its number, or the error."""
    mine = ctx.get()
    if mine is None:
        raise Abort(f"{ctx.key} has no subscription")
    mine.receipt = number or f"not sent: {error}"
    ctx.put(mine)


@subscription.register
def cancel(ctx: Context[Subscription]) -> None:
    mine = ctx.get()
    if mine is None or mine.status == "cancelled":
        raise Abort(f"{ctx.key} has no subscription")
    if mine.timer is not None:
        ctx.cancel(mine.timer)
    if mine.status == "active":
        ctx.call_async(count, "all", -1)
    mine.status, mine.timer = "cancelled", None
    ctx.put(mine)


# --- the books, and sessions ------------------------------------------------------------------------------------------


@books.register
def count(ctx: Context[Books], by: int) -> None:
    mine = ctx.get(Books())
    mine.active += by
    ctx.put(mine)


@books.register
def close_day(ctx: Context[Books]) -> None:
    """`ctx.now` is the log's time: it is the same in a replay."""
    mine = ctx.get(Books())
    mine.nights.append((ctx.now.date(), mine.active))
    ctx.put(mine)


app.every("0 3 * * *", close_day, "all")  # at three in the morning, UTC


@session.register
def log_in(ctx: Context[str], customer: str) -> None:
    ctx.put(customer)


@session.register
def visit(ctx: Context[str]) -> str | None:
    """The customer of this session, if it has not ended. Each visit extends it by half an hour."""
    customer = ctx.get()
    if customer is not None:
        ctx.put(customer)
    return customer


# --- the outside world ------------------------------------------------------------------------------------------------


class Outside:
    """Stands for a payment provider and a mail server. Both know each request by its idempotency key."""

    def __init__(self) -> None:
        self.payments: dict[str, str | None] = {}
        self.mails: dict[str, tuple[str, str]] = {}
        self.asked: Counter[str] = Counter()
        self.bad_calls = 0  # so many answers get lost from now on
        self._lock = threading.Lock()

    def charge(self, key: str, card: str, cents: int) -> str | None:
        """The number of the payment; None if the card is declined."""
        with self._lock:
            self.asked[key] += 1
            if key not in self.payments:
                self.payments[key] = f"payment of {cents}" if card != "stolen" else None
            if self.bad_calls:
                self.bad_calls -= 1
                raise ConnectionError("the line went dead")
            return self.payments[key]

    def mail(self, key: str, to: str, text: str) -> str:
        with self._lock:
            self.mails.setdefault(key, (to, text))
            return f"mail to {to}"

    def forget(self) -> None:
        self.payments.clear()
        self.mails.clear()
        self.asked.clear()


outside = Outside()
app.external("charge", outside.charge, timeout=5, tries=3)
app.external("mail", outside.mail, timeout=5, tries=3)


# --- the story --------------------------------------------------------------------------------------------------------


def clock_at(start: datetime) -> Callable[[], int]:
    """A clock that shows this time now, and goes on from there: so that two weeks need not be waited for."""
    ahead_us = int(start.timestamp() * 1e6) - time.monotonic_ns() // 1_000
    return lambda: time.monotonic_ns() // 1_000 + ahead_us


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > give_up:
            raise TimeoutError("it has not come to that")
        time.sleep(0.01)


def show(runtime: Runtime) -> None:
    for name, each in sorted(runtime.state(subscription).items()):
        paid = f", {each.payment}, {each.receipt}" if each.payment else ""
        print(f"  {name}: {each.plan}, {each.status}{paid}")


def main() -> None:
    outside.forget()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    with tempfile.TemporaryDirectory() as store:
        print("1 January: three trials begin, one of them is cancelled")
        with Runtime(app, clock=clock_at(noon), store=store) as runtime:
            client = runtime.client
            ends = client.options(request_id="ann-begins").call(begin, "ann", "pro", "good")
            client.batch([(begin, "bo", "pro", "good"), (begin, "cleo", "basic", "stolen"), (cancel, "bo")])
            client.call(log_in, "cookie-1", "ann")
            print(f"  ann's trial ends on {ends}")

        print("five minutes later, after a restart: everything is there, and so are request ids")
        with Runtime(app, clock=clock_at(noon + timedelta(minutes=5)), store=store) as runtime:
            client = runtime.client
            show(runtime)
            again = client.options(request_id="ann-begins").call(begin, "ann", "pro", "good")
            print(f"  asked again, the answer is the same: {again == ends}")
            print(f"  cookie-1 is the session of {client.call(visit, 'cookie-1')}")

        print("16 January, after another restart: the trials end by themselves")
        outside.bad_calls = 1
        with Runtime(app, clock=clock_at(noon + timedelta(days=15)), store=store) as runtime:
            client = runtime.client
            wait_until(lambda: runtime.state(subscription)["ann"].receipt is not None)
            wait_until(lambda: runtime.state(subscription)["cleo"].status == "unpaid")
            wait_until(lambda: bool(runtime.get(books, "all", Books()).nights))
            show(runtime)
            print(f"  cookie-1 is the session of {client.call(visit, 'cookie-1')}")
            print(f"  nights in the books, though nothing ran for fourteen: {len(runtime.state(books)['all'].nights)}")

        print("and after a last restart")
        with Runtime(app, clock=clock_at(noon + timedelta(days=15, minutes=5)), store=store) as runtime:
            show(runtime)
        asked, paid = sum(outside.asked.values()), sum(number is not None for number in outside.payments.values())
        print(f"the provider was asked {asked} times, because an answer got lost; payments: {paid}")
        print(f"mails sent: {len(outside.mails)}")


if __name__ == "__main__":
    main()
