"""The auction house, tested with the test kit: a bid is held, an outbid returned, the highest one paid, whatever
crashes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import auction, faulty_auction
from examples.auction import Account, account, begin, bid, call_off, close, deposit, money_is_conserved, withdraw
from headrace import Aborted
from headrace.errors import Stopped
from headrace.testing import TestRuntime, fixture

house = fixture(auction.app, externals={"mail": "sent"})


@pytest.fixture
def lamp(house: TestRuntime) -> TestRuntime:
    """Ann and Bo have 100 each, and Sam sells a lamp for an hour."""
    house.client.batch([(deposit, "ann", 100), (deposit, "bo", 100), (begin, "lamp", "sam", 3600.0)])
    return house


def balances(runtime: TestRuntime) -> dict[str, int]:
    return {name: each.balance for name, each in runtime.state(account).items()}


def lot(runtime: TestRuntime, name: str = "lamp") -> Any:
    return runtime.get(auction.auction, name)


def test_a_bid_is_held_and_an_outbid_returns_it(lamp: TestRuntime) -> None:
    assert lamp.client.call(bid, "lamp", "ann", 30) == 0
    assert (balances(lamp), lot(lamp).escrow) == ({"ann": 70, "bo": 100}, 30)
    assert lamp.client.call(bid, "lamp", "bo", 40) == 30
    assert (balances(lamp), lot(lamp).escrow) == ({"ann": 100, "bo": 60}, 40)
    money_is_conserved(lamp.states())


def test_who_raises_an_own_bid_needs_only_the_difference(lamp: TestRuntime) -> None:
    lamp.client.call(bid, "lamp", "ann", 80)
    lamp.client.call(bid, "lamp", "ann", 100)
    assert (balances(lamp)["ann"], lot(lamp).escrow) == (0, 100)
    money_is_conserved(lamp.states())


@pytest.mark.parametrize(
    ("key", "bidder", "amount", "why"),
    [
        ("lamp", "bo", 30, "30 is not more than 30"),
        ("lamp", "bo", 101, "bo has 100, needs 101"),
        ("lamp", "sam", 50, "sam sells lamp, and cannot bid"),
        ("vase", "bo", 50, "vase is not open"),
    ],
)
def test_a_bid_that_is_refused_changes_nothing(lamp: TestRuntime, key: str, bidder: str, amount: int, why: str) -> None:
    lamp.client.call(bid, "lamp", "ann", 30)
    before = lamp.states()
    with pytest.raises(Aborted, match=why):
        lamp.client.call(bid, key, bidder, amount)
    assert lamp.states() == before


def test_the_auction_closes_at_its_time_pays_the_seller_and_tells_the_winner(lamp: TestRuntime) -> None:
    lamp.client.call(bid, "lamp", "ann", 30)
    lamp.advance(minutes=59)
    assert lot(lamp).status == auction.OPEN
    lamp.advance(minutes=1)
    assert (lot(lamp).status, lot(lamp).bidder, lot(lamp).escrow) == (auction.SOLD, "ann", 0)
    assert lamp.state(account) == {"ann": Account(70, ["lamp"]), "bo": Account(100), "sam": Account(30)}
    assert lamp.external("mail").args == [("ann", "you have won lamp for 30")]
    with pytest.raises(Aborted, match="lamp is not open"):
        lamp.client.call(bid, "lamp", "bo", 50)
    money_is_conserved(lamp.states())


def test_nobody_bids_after_the_time_is_over_not_even_in_the_same_moment(lamp: TestRuntime) -> None:
    lamp.advance(hours=1)
    assert lamp.client.batch([(bid, "lamp", "bo", 50)])[0].error == "lamp is not open"
    assert lot(lamp).status == auction.UNSOLD


def test_nobody_closes_an_auction_early(lamp: TestRuntime) -> None:
    with pytest.raises(Aborted, match="lamp closes at"):
        lamp.client.call(close, "lamp")


def test_a_lot_that_was_not_sold_is_offered_again_and_one_that_was_is_not(lamp: TestRuntime) -> None:
    with pytest.raises(Aborted, match="lamp is open already"):
        lamp.client.call(begin, "lamp", "sam", 60.0)
    lamp.advance(hours=1)
    assert lamp.client.call(begin, "lamp", "sam", 60.0) == lamp.now + timedelta(minutes=1)
    lamp.client.call(bid, "lamp", "bo", 10)
    lamp.advance(minutes=1)
    with pytest.raises(Aborted, match="lamp is sold already"):
        lamp.client.call(begin, "lamp", "sam", 60.0)


def test_an_auction_that_is_called_off_returns_the_bid_and_does_not_close(lamp: TestRuntime) -> None:
    lamp.client.call(bid, "lamp", "ann", 30)
    with pytest.raises(Aborted, match="bo has no open auction"):
        lamp.client.call(call_off, "lamp", "bo")
    lamp.client.call(call_off, "lamp", "sam")
    assert lamp.next_due is None
    lamp.advance(days=1)
    assert (balances(lamp), lot(lamp).status) == ({"ann": 100, "bo": 100}, auction.CALLED_OFF)
    assert lamp.external("mail").calls == []


def test_money_that_is_held_cannot_be_withdrawn(lamp: TestRuntime) -> None:
    lamp.client.call(bid, "lamp", "ann", 80)
    with pytest.raises(Aborted, match="ann has 20, needs 21"):
        lamp.client.call(withdraw, "ann", 21)
    assert lamp.client.call(withdraw, "ann", 20) == 0
    money_is_conserved(lamp.states())


@pytest.mark.parametrize("moment", ["before_log", "after_log"])
def test_a_bid_whose_answer_is_lost_is_asked_for_again_and_made_once(lamp: TestRuntime, moment: Any) -> None:
    lamp.crash_next(moment)
    with pytest.raises(Stopped):
        lamp.client.options(request_id="bid-1").call(bid, "lamp", "ann", 30)
    assert lamp.client.options(request_id="bid-1").call(bid, "lamp", "ann", 30) == 0
    assert (balances(lamp)["ann"], lot(lamp).escrow) == (70, 30)


@pytest.mark.parametrize("moment", ["before_log", "after_log", "after_external"])
def test_a_crash_while_it_closes_pays_once_and_mails_under_one_key(lamp: TestRuntime, moment: Any) -> None:
    lamp.client.call(bid, "lamp", "ann", 30)
    lamp.crash_next(moment)
    lamp.advance(hours=2)
    assert lamp.crashes == 1
    assert (balances(lamp), lot(lamp).status) == ({"ann": 70, "bo": 100, "sam": 30}, auction.SOLD)
    assert len({call.key for call in lamp.external("mail").calls}) == 1
    money_is_conserved(lamp.states())


names, lots = st.sampled_from(["ann", "bo", "sam"]), st.sampled_from(["lamp", "vase"])
steps = st.one_of(
    st.tuples(st.just(deposit), names, st.integers(1, 50)),
    st.tuples(st.just(withdraw), names, st.integers(1, 50)),
    st.tuples(st.just(begin), lots, names, st.sampled_from([10.0, 60.0])),
    st.tuples(st.just(bid), lots, names, st.integers(1, 60)),
    st.tuples(st.just(call_off), lots, names),
    st.tuples(st.just("advance"), st.sampled_from([5, 30, 60])),
    st.tuples(st.just("crash")),
)


@given(st.lists(steps, max_size=25))
def test_no_sequence_of_calls_times_and_crashes_loses_money_or_sells_twice(given_steps: list[Any]) -> None:
    with TestRuntime(auction.app, externals={"mail": "sent"}) as runtime:
        for step in given_steps:
            if step[0] == "advance":
                runtime.advance(seconds=step[1])
            elif step[0] == "crash":
                runtime.crash()
            else:
                runtime.client.batch([step])
            money_is_conserved(runtime.states())


def test_the_tests_that_come_to_mind_do_not_find_the_mistake_of_the_faulty_one() -> None:
    with TestRuntime(faulty_auction.app) as runtime:
        client = runtime.client
        client.batch([(faulty_auction.deposit, name, 100) for name in ("ann", "bo")])
        calls = [(faulty_auction.bid, "lamp", *each) for each in (("ann", 30), ("bo", 50), ("ann", 40), ("bo", 500))]
        assert [reply.status for reply in client.batch(calls)] == ["ok", "ok", "aborted", "aborted"]
        assert runtime.state(faulty_auction.account) == {"ann": 100, "bo": 50}
        assert faulty_auction.money_is_conserved(runtime.states())
