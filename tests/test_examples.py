"""The examples run, and keep what they promise."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import auction, bank, faulty_auction, hotel_flight, shopping_cart, subscriptions
from headrace import Aborted, Runtime
from headrace.errors import RequestIdReused

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "auction": auction,  # its own tests are in test_auction.py
    "bank": bank,
    "faulty_auction": faulty_auction,
    "shopping_cart": shopping_cart,
    "hotel_flight": hotel_flight,
    "subscriptions": subscriptions,
}


def snapshot(runtime: Runtime) -> dict[str, dict[Any, Any]]:
    return {name: runtime.state(name) for name in runtime.app.operators}


def test_every_example_is_tested_here() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert found == {*EXAMPLES, "auction_stream"}  # which needs Spark: see tests/spark/test_auction_stream.py


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_path_and_by_name_and_tells_the_same(name: str) -> None:
    def run(*how: str) -> str:
        done = subprocess.run([sys.executable, *how], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(f"examples/{name}.py") == run("-m", f"examples.{name}")


def test_the_bank_tells_of_aborts_and_of_an_unchanged_total(capsys: pytest.CaptureFixture[str]) -> None:
    bank.main()
    told = capsys.readouterr().out
    assert "alice pays bob 500: aborted, alice has 40, needs 500" in told
    assert "total unchanged: True" in told


def test_the_auction_house_tells_of_bids_and_of_the_winner(capsys: pytest.CaptureFixture[str]) -> None:
    auction.main()
    told = capsys.readouterr().out
    assert "bo bids 90: bo has 80, needs 90" in told
    assert "  ann: 30, won: lamp\n  bo: 80, won: nothing\n  sam: 70, won: nothing\n" in told
    assert "mails: ann: you have won lamp for 70" in told
    assert "balances and escrow are what was paid in: 180" in told


def test_the_faulty_auction_tells_nothing_of_its_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    faulty_auction.main()
    assert "money is conserved: True" in capsys.readouterr().out


def test_the_shop_tells_of_an_abort_in_each_operator(capsys: pytest.CaptureFixture[str]) -> None:
    shopping_cart.main()
    told = capsys.readouterr().out
    assert told.count(": aborted,") == 4
    assert "order-1 for ann: ok, paid 520" in told


def test_the_travel_agency_tells_who_got_a_trip(capsys: pytest.CaptureFixture[str]) -> None:
    hotel_flight.main()
    told = capsys.readouterr().out
    assert "guest-4 wants Inn and HR2: aborted: HR2 is full" in told
    assert "guest-4 tries again: ('Inn', 'HR2')" in told


def test_the_subscriptions_tell_what_is_there_after_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    subscriptions.main()
    told = capsys.readouterr().out
    assert "asked again, the answer is the same: True" in told
    assert told.count("ann: pro, active, payment of 1500, mail to ann") == 2
    assert "cookie-1 is the session of ann" in told
    assert "cookie-1 is the session of None" in told
    assert "the provider was asked 3 times, because an answer got lost; payments: 1" in told


# --- bank -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bank_runtime() -> Iterator[Runtime]:
    with Runtime(bank.app) as runtime:
        runtime.client.batch([(bank.deposit, "alice", 100), (bank.deposit, "rich", bank.BALANCE_MAX)])
        yield runtime


@pytest.mark.parametrize("function", [bank.transfer, bank.withdraw_and_ask])
@pytest.mark.parametrize(
    ("to", "amount", "raised_in", "key"),
    [
        ("bob", 101, None, "alice"),  # in the root: too little money
        ("rich", 1, "account.deposit", "rich"),  # in the call: the receiver may not have more
        ("bob", 0, "account.deposit", "bob"),
    ],
)
def test_an_abort_on_either_side_of_a_transfer_undoes_both(
    bank_runtime: Runtime, function: Any, to: str, amount: int, raised_in: str | None, key: str
) -> None:
    before = snapshot(bank_runtime)
    with pytest.raises(Aborted) as aborted:
        bank_runtime.client.call(function, "alice", to, amount)
    assert (aborted.value.function, aborted.value.key) == (raised_in or function.full_name, key)
    assert snapshot(bank_runtime) == before


def test_withdraw_and_ask_answers_with_the_balance_of_the_other(bank_runtime: Runtime) -> None:
    assert bank_runtime.client.call(bank.withdraw_and_ask, "alice", "bob", 40) == 40
    assert bank_runtime.client.call(bank.withdraw_and_ask, "alice", "bob", 40) == 80


def test_a_transfer_sent_twice_with_one_request_id_is_paid_once(bank_runtime: Runtime) -> None:
    client = bank_runtime.client
    assert client.options(request_id="rent").call(bank.transfer, "alice", "bob", 10) == 90
    assert client.options(request_id="rent").call(bank.transfer, "alice", "bob", 10) == 90
    assert bank_runtime.get(bank.account, "bob") == 10
    with pytest.raises(RequestIdReused):
        client.options(request_id="rent").call(bank.transfer, "alice", "bob", 11)


names = st.sampled_from(["a", "b", "c", "d"])
transfers = st.tuples(
    st.sampled_from([bank.transfer, bank.withdraw_and_ask]), names, names, st.integers(-20, bank.BALANCE_MAX)
)


@settings(deadline=None)
@given(st.lists(transfers, max_size=40))
def test_no_sequence_of_transfers_changes_the_total(calls: list[tuple[Any, ...]]) -> None:
    with Runtime(bank.app) as runtime:
        runtime.client.batch([(bank.deposit, name, 600_000) for name in "abcd"])
        runtime.client.batch(calls)
        balances = runtime.state(bank.account)
    assert sum(balances.values()) == 4 * 600_000
    assert all(0 <= balance <= bank.BALANCE_MAX for balance in balances.values())


# --- shopping cart ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shop_runtime() -> Iterator[Runtime]:
    with Runtime(shopping_cart.app) as runtime:
        runtime.client.batch(
            [
                (shopping_cart.supply, "apple", 10, 5),
                (shopping_cart.supply, "bread", 50, 1),
                (shopping_cart.pay_in, "ann", 100),
                (shopping_cart.add, "small", "apple", 2),
                (shopping_cart.add, "small", "bread", 1),
                (shopping_cart.add, "large", "apple", 2),
                (shopping_cart.add, "large", "bread", 2),
            ]
        )
        yield runtime


@pytest.mark.parametrize(
    ("order", "buyer", "total_max", "raised_in", "key"),
    [
        ("large", "ann", 1_000, "stock.take", "bread"),  # after the apples were taken
        ("small", "poor", 1_000, "payment.charge", "poor"),  # after all goods were taken
        ("small", "ann", 69, "order.checkout", "small"),  # after the goods were taken and the buyer was charged
        ("nothing", "ann", 1_000, "order.checkout", "nothing"),
    ],
)
def test_an_abort_in_order_stock_or_payment_undoes_all_three(
    shop_runtime: Runtime, order: str, buyer: str, total_max: int, raised_in: str, key: str
) -> None:
    before = snapshot(shop_runtime)
    with pytest.raises(Aborted) as aborted:
        shop_runtime.client.call(shopping_cart.checkout, order, buyer, total_max)
    assert (aborted.value.function, aborted.value.key) == (raised_in, key)
    assert snapshot(shop_runtime) == before


def test_a_checkout_takes_goods_and_money_and_marks_the_order_once(shop_runtime: Runtime) -> None:
    client = shop_runtime.client
    for _ in range(2):
        assert client.options(request_id="checkout-small").call(shopping_cart.checkout, "small", "ann", 70) == 70
    assert shop_runtime.state("stock") == {
        "apple": shopping_cart.Article(10, 3),
        "bread": shopping_cart.Article(50, 0),
    }
    assert shop_runtime.get("payment", "ann") == shopping_cart.Wallet(30, 70)
    assert shop_runtime.get("order", "small").total == 70
    with pytest.raises(Aborted, match="order small is paid"):
        client.call(shopping_cart.checkout, "small", "ann", 70)


lines = st.lists(st.tuples(st.sampled_from(["apple", "bread"]), st.integers(1, 4)), min_size=1, max_size=3)
orders = st.lists(st.tuples(lines, st.sampled_from(["ann", "bo"]), st.integers(0, 300)), max_size=12)


@settings(deadline=None)
@given(orders)
def test_goods_and_money_are_spent_exactly_by_the_paid_orders(wanted: list[tuple[Any, ...]]) -> None:
    prices = {"apple": 10, "bread": 50}
    with Runtime(shopping_cart.app) as runtime:
        client = runtime.client
        client.batch([(shopping_cart.supply, article, price, 8) for article, price in prices.items()])
        client.batch([(shopping_cart.pay_in, buyer, 250) for buyer in ("ann", "bo")])
        for number, (articles, buyer, total_max) in enumerate(wanted):
            client.batch([(shopping_cart.add, number, article, count) for article, count in articles])
            client.batch([(shopping_cart.checkout, number, buyer, total_max)])
        paid = [order for order in runtime.state("order").values() if order.total is not None]
        stock, wallets = runtime.state("stock"), runtime.state("payment").values()
    for article in prices:
        assert stock[article].count == 8 - sum(order.lines.get(article, 0) for order in paid) >= 0
    assert sum(wallet.spent for wallet in wallets) == sum(order.total for order in paid)
    assert all(wallet.balance == 250 - wallet.spent >= 0 for wallet in wallets)


# --- hotel and flight -------------------------------------------------------------------------------------------------


@pytest.fixture
def travel_runtime() -> Iterator[Runtime]:
    with Runtime(hotel_flight.app) as runtime:
        runtime.client.batch([(hotel_flight.open_rooms, "inn", 2), (hotel_flight.open_seats, "HR1", 2)])
        yield runtime


@pytest.mark.parametrize(
    ("hotel", "flight", "raised_in", "key"),
    [
        ("full", "HR1", "hotel.take_room", "full"),
        ("inn", "full", "flight.take_seat", "full"),  # after the room was taken
        ("full", "full", "hotel.take_room", "full"),  # both would abort: the first in the order made is the reply
    ],
)
def test_without_a_room_or_without_a_seat_neither_is_taken(
    travel_runtime: Runtime, hotel: str, flight: str, raised_in: str, key: str
) -> None:
    before = snapshot(travel_runtime)
    with pytest.raises(Aborted) as aborted:
        travel_runtime.client.call(hotel_flight.reserve, "guest", hotel, flight)
    assert (aborted.value.function, aborted.value.key) == (raised_in, key)
    assert snapshot(travel_runtime) == before


def test_a_trip_is_a_tuple_and_stays_one(travel_runtime: Runtime) -> None:
    assert travel_runtime.client.call(hotel_flight.reserve, "guest", "inn", "HR1") == ("inn", "HR1")
    assert travel_runtime.get("trip", "guest") == ("inn", "HR1")


def test_a_cancelled_trip_gives_both_places_back(travel_runtime: Runtime) -> None:
    before = snapshot(travel_runtime)
    travel_runtime.client.call(hotel_flight.reserve, "guest", "inn", "HR1")
    travel_runtime.client.call(hotel_flight.cancel, "guest")
    assert snapshot(travel_runtime) == before
    with pytest.raises(Aborted, match="guest has no trip"):
        travel_runtime.client.call(hotel_flight.cancel, "guest")


def test_a_batch_sent_again_with_its_request_id_books_nothing_more(travel_runtime: Runtime) -> None:
    wishes = [(hotel_flight.reserve, f"guest-{i}", "inn", "HR1") for i in range(4)]
    first = travel_runtime.client.options(request_id="morning").batch(wishes)
    after = snapshot(travel_runtime)
    again = travel_runtime.client.options(request_id="morning").batch(wishes)
    assert [reply.status for reply in first] == ["ok", "ok", "aborted", "aborted"]
    assert list(again) == list(first)
    assert snapshot(travel_runtime) == after


guests, hotels, flights = st.integers(0, 5), st.sampled_from(["inn", "ritz"]), st.sampled_from(["HR1", "HR2"])
trips = st.one_of(
    st.tuples(st.just(hotel_flight.reserve), guests, hotels, flights),
    st.tuples(st.just(hotel_flight.cancel), guests),
)


@settings(deadline=None)
@given(st.lists(trips, max_size=40))
def test_places_left_and_trips_always_add_up_to_the_capacity(calls: list[tuple[Any, ...]]) -> None:
    with Runtime(hotel_flight.app) as runtime:
        runtime.client.batch([(hotel_flight.open_rooms, name, 2) for name in ("inn", "ritz")])
        runtime.client.batch([(hotel_flight.open_seats, name, 3) for name in ("HR1", "HR2")])
        runtime.client.batch(calls)
        booked = runtime.state("trip").values()
        rooms, seats = runtime.state("hotel"), runtime.state("flight")
    by_hotel, by_flight = Counter(name for name, _ in booked), Counter(name for _, name in booked)
    assert all(left >= 0 and left + by_hotel[name] == 2 for name, left in rooms.items())
    assert all(left >= 0 and left + by_flight[name] == 3 for name, left in seats.items())


# --- subscriptions ----------------------------------------------------------------------------------------------------

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Subscriptions:
    """The app with a store, and a clock that stands still until it is told."""

    def __init__(self, store: Path) -> None:
        self.store, self.now = store, NOON
        self.outside = subscriptions.outside
        self.outside.forget()
        self.runtime = self.start()

    def start(self) -> Runtime:
        return Runtime(subscriptions.app, clock=lambda: int(self.now.timestamp() * 1e6), store=self.store)

    def restart(self, later: timedelta = timedelta(0)) -> None:
        self.runtime.close()
        self.now += later
        self.runtime = self.start()

    def call(self, *call: Any) -> Any:
        return self.runtime.client.call(*call)

    def of(self, name: str) -> subscriptions.Subscription:
        found = self.runtime.get("subscription", name)
        assert isinstance(found, subscriptions.Subscription)
        return found

    def wait_for(self, name: str, **fields: Any) -> None:
        """Until the subscription has these fields. (Asking lets the runtime look at its clock.)"""
        subscriptions.wait_until(lambda: all(getattr(self.of(name), field) == fields[field] for field in fields))


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Subscriptions]:
    trials = Subscriptions(tmp_path)
    yield trials
    trials.runtime.close()


def test_a_trial_ends_with_one_payment_and_one_receipt_also_over_restarts(trials: Subscriptions) -> None:
    assert trials.call(subscriptions.begin, "ann", "pro", "good") == "2026-01-15"
    trials.restart(subscriptions.TRIAL - timedelta(seconds=1))
    assert trials.of("ann").status == "trial"
    assert not trials.outside.asked
    trials.now += timedelta(seconds=1)
    trials.wait_for("ann", status="active", receipt="mail to ann", timer=None)
    trials.restart(timedelta(days=30))
    assert trials.of("ann").receipt == "mail to ann"
    assert list(trials.outside.payments.values()) == ["payment of 1500"]
    assert list(trials.outside.mails.values()) == [("ann", "payment of 1500: thank you for pro")]


def test_a_trial_that_was_cancelled_is_never_paid(trials: Subscriptions) -> None:
    for name in ("ann", "bo"):
        trials.call(subscriptions.begin, name, "basic", "good")
    trials.call(subscriptions.cancel, "bo")
    trials.restart(timedelta(days=15))
    trials.wait_for("ann", status="active")
    assert trials.of("bo").status == "cancelled"
    assert len(trials.outside.payments) == 1


def test_who_pays_early_does_not_pay_again_when_the_trial_ends(trials: Subscriptions) -> None:
    for name in ("ann", "bo"):
        trials.call(subscriptions.begin, name, "basic", "good")
    assert trials.call(subscriptions.pay, "bo") == "active"
    trials.restart(timedelta(days=15))
    trials.wait_for("ann", status="active")
    assert len(trials.outside.payments) == 2
    with pytest.raises(Aborted, match="bo has nothing to pay"):
        trials.call(subscriptions.pay, "bo")


def test_a_payment_whose_answer_got_lost_is_made_once(trials: Subscriptions) -> None:
    trials.call(subscriptions.begin, "ann", "pro", "good")
    trials.outside.bad_calls = 2
    trials.now += timedelta(days=15)
    trials.wait_for("ann", status="active")
    assert list(trials.outside.asked.values()) == [3]
    assert len(trials.outside.payments) == 1


def test_a_provider_that_is_not_there_is_asked_again_hours_later(trials: Subscriptions) -> None:
    trials.call(subscriptions.begin, "ann", "pro", "good")
    first = trials.of("ann").timer
    trials.outside.bad_calls = 3
    trials.now += timedelta(days=15)
    subscriptions.wait_until(lambda: trials.of("ann").timer != first)
    assert trials.of("ann").status == "trial"
    trials.restart(subscriptions.TRY_AGAIN)
    trials.wait_for("ann", status="active")


def test_a_declined_card_leaves_it_unpaid_and_sends_no_mail(trials: Subscriptions) -> None:
    trials.call(subscriptions.begin, "cleo", "basic", "stolen")
    trials.now += timedelta(days=15)
    trials.wait_for("cleo", status="unpaid", payment=None)
    assert not trials.outside.mails
    assert trials.runtime.get("books", "all", subscriptions.Books()).active == 0


def test_the_books_are_closed_once_a_night_and_once_for_all_nights_that_were_missed(trials: Subscriptions) -> None:
    trials.call(subscriptions.count, "all", 1)

    def nights() -> list[tuple[date, int]]:
        found: list[tuple[date, int]] = trials.runtime.get("books", "all").nights
        return found

    for day in (1, 2, 9):
        trials.restart(NOON + timedelta(days=day) - trials.now)
        subscriptions.wait_until(lambda day=day: nights()[-1:] == [((NOON + timedelta(days=day)).date(), 1)])  # type: ignore[misc]
    assert [night.day for night, _ in nights()] == [2, 3, 10]


def test_a_session_ends_half_an_hour_after_the_last_visit(trials: Subscriptions) -> None:
    trials.call(subscriptions.log_in, "cookie", "ann")
    for _ in range(3):
        trials.now += timedelta(minutes=29)
        assert trials.call(subscriptions.visit, "cookie") == "ann"
    trials.restart(timedelta(minutes=30))
    assert trials.call(subscriptions.visit, "cookie") is None
    subscriptions.wait_until(lambda: not trials.runtime.state("session"))
