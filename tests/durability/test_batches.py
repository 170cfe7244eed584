"""Batches of clients and of sources, and request ids: cut by crashes, repeated, and run once."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from headrace.core.events import Read, TakeSnapshot
from tests.durability.hand import SEVEN, Hand, add, after_power_loss, app, memory, put

# --- batches that a crash cuts ----------------------------------------------------------------------------------------


def crash_after(hand: Hand, records: int) -> None:
    """So many records of what was sent reach the log; what they give may be kept or not."""
    hand.compute()
    for _ in range(records):
        hand.sync(1)
        hand.compute()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ids", ["stem", [f"id{at}" for at in range(7)]], ids=["stem", "ids"])
@pytest.mark.parametrize("durable", range(5))
def test_of_a_batch_that_a_crash_cuts_each_row_runs_once_when_it_is_repeated(
    durable: int, ids: Any, workers: int
) -> None:
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2)
    token = hand.send(ids, SEVEN)
    crash_after(hand, durable)
    assert (token in hand.replies) == (durable == 4)
    for _ in range(2):
        hand = Hand(store, app, workers, epoch_transactions_max=3)
        replies = hand.run(ids, SEVEN)
        assert [reply.tid for reply in replies] == list(range(1, 8))
        assert [reply.result for reply in replies] == [1, 1, 2, 2, 3, 3, 4]
        assert hand.state() == {("item", "a"): 4, ("item", "b"): 3}
        assert hand.run(ids, SEVEN) == replies


@pytest.mark.parametrize("durable", range(5))
def test_a_row_of_a_batch_that_a_crash_cut_may_be_asked_for_by_itself(durable: int) -> None:
    """Also one that was lost: then it runs when it comes, and the rest of the batch finds it."""
    store = memory()
    crash_after(Hand(store, app, epoch_transactions_max=2), 0)
    hand = Hand(store, app, epoch_transactions_max=2)
    hand.send("stem", SEVEN)
    crash_after(hand, durable)
    hand = Hand(store, app)
    (last,) = hand.run(["stem/6"], SEVEN[6:])
    hand = Hand(store, app)
    replies = hand.run("stem", SEVEN)
    assert replies[6] == last
    assert len({reply.tid for reply in replies}) == 7
    assert hand.state() == {("item", "a"): 4, ("item", "b"): 3}


@pytest.mark.parametrize("workers", [0, 3])
def test_a_reply_leaves_when_its_record_is_durable_and_not_before(workers: int) -> None:
    hand = Hand(memory(), app, workers)
    hand.send("a", [(add, "a", 1)])
    hand.submit(Read("state"))
    hand.compute()
    assert hand.core.committed == 1
    assert (hand.replies, hand.found) == ({}, {})
    hand.sync(1)
    hand.compute()
    assert list(hand.replies) == [0]
    assert hand.found == {}, "state leaves when the log is known to be ours"
    hand.sync()
    hand.compute()
    assert list(hand.found) == ["state"]


# --- batches of sources -----------------------------------------------------------------------------------------------

FIVE = [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)]
SUMS = {("item", "a"): 9, ("item", "b"): 2, ("item", "c"): 4}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("durable", range(5))
def test_a_batch_of_a_source_runs_once_wherever_a_crash_cuts_it(durable: int, workers: int) -> None:
    """Nothing durable: Spark repeats it, perhaps in another order. Its record durable: it goes on by itself, in the
    order of the record. All epochs durable, but not answered: the repeat gets the answers."""
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2)
    hand.send_source("q", 0, add, FIVE)
    crash_after(hand, durable)
    assert bool(hand.replies) == (durable == 4)
    for way in (list(reversed(FIVE)), FIVE[2:] + FIVE[:2]):
        hand = Hand(store, app, workers, epoch_transactions_max=2)
        token = hand.send_source("q", 0, add, way)
        hand.settle()
        replies = hand.replies[token]
        assert hand.state() == SUMS
        assert [reply.request_id for reply in replies] == [f"q/0/{at}" for at in range(5)]
        assert [reply.tid for reply in replies] == [1, 2, 3, 4, 5]
        if durable:
            assert [reply.result for reply in replies] == [1, 2, 4, 4, 9]


@pytest.mark.parametrize("durable", range(1, 5))
def test_a_closed_batch_that_nobody_repeats_runs_to_its_end(durable: int) -> None:
    store = memory()
    hand = Hand(store, app, epoch_transactions_max=2)
    hand.send_source("q", 0, add, FIVE)
    crash_after(hand, durable)
    hand = Hand(store, app)
    hand.settle()
    assert hand.state() == SUMS
    token = hand.send_source("q", 1, add, [("a", 1)])
    hand.settle()
    assert hand.replies[token][0].result == 10


@pytest.mark.parametrize("durable", [2, 3])
def test_a_snapshot_at_the_end_of_a_replay_keeps_a_batch_whose_rows_are_not_all_in_epochs(durable: int) -> None:
    store = memory()
    hand = Hand(store, app, epoch_transactions_max=2)
    hand.send_source("q", 0, add, FIVE)
    crash_after(hand, durable)
    hand = Hand(store, app, now_us=10, snapshot_interval_us=1)
    while hand.core.is_replaying():
        hand.tick(hand.now_us + 5)
    assert hand.core.journal.saving is not None, "it is taken before the other rows are logged"
    while hand.work():
        pass
    hand = Hand(after_power_loss(store), app)
    assert hand.core.journal.saved_epoch == 1
    hand.settle()
    assert hand.state() == SUMS


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_the_last_batch_of_a_source_is_answered_again_and_of_the_one_before_is_only_known_that_it_ran(
    with_snapshot: bool,
) -> None:
    store = memory()
    hand = Hand(store, app, epoch_transactions_max=2)
    tokens = [hand.send_source("q", number, add, FIVE) for number in range(3)]
    hand.settle()
    last = hand.replies[tokens[2]]
    for _ in range(3):
        if with_snapshot:
            hand.take_snapshot()
        hand = Hand(store, app)
        again, stale = (hand.send_source("q", number, add, FIVE[:1]) for number in (2, 1))
        hand.settle()
        assert hand.replies[again] == last
        assert [reply.failure and reply.failure.type for reply in hand.replies[stale]] == ["ReplyExpired"]
        assert hand.state()["item", "a"] == 27


@pytest.mark.parametrize("rows", [[], [("a", "no number")]], ids=["empty", "all refused"])
def test_a_batch_without_rows_to_run_is_answered_when_its_record_is_durable(rows: Any) -> None:
    store = memory()
    hand = Hand(store, app)
    token = hand.send_source("q", 0, add, rows)
    hand.compute()
    assert token not in hand.replies
    hand.settle()
    assert [reply.status for reply in hand.replies[token]] == ["refused"] * len(rows)
    hand = Hand(store, app)
    token = hand.send_source("q", 1, add, FIVE)
    hand.settle()
    assert hand.state() == SUMS


@pytest.mark.parametrize("workers", [0, 2])
def test_a_snapshot_holds_no_batch_of_a_source_whose_record_may_be_lost(workers: int) -> None:
    store = memory()
    hand = Hand(store, app, workers, epoch_interval_us=1_000)
    hand.run("first", [(add, "z", 1)])
    hand.submit(TakeSnapshot("now"))
    hand.send_source("q", 0, add, FIVE)
    hand.compute()
    while hand.work():  # all that may be written before the batch's record is durable
        hand.compute()
    hand = Hand(store, app, workers)
    token = hand.send_source("q", 0, add, FIVE)
    hand.settle()
    assert [reply.result for reply in hand.replies[token]] == [1, 2, 4, 4, 9]
    assert hand.state() == SUMS | {("item", "z"): 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_may_hold_rows_of_two_sources_and_of_a_client(workers: int) -> None:
    """The snapshot after it needs the second source's record, not the first's."""
    store = memory()
    limits = {"epoch_transactions_max": 4, "epoch_interval_us": 1_000}
    hand = Hand(store, app, workers, snapshot_interval_us=1, **limits)
    hand.now_us = 10
    tokens = [
        hand.send("client", [(add, "c", 1)]),
        hand.send_source("q", 0, add, [("a", 1)]),
        hand.send_source("r", 0, add, [("b", 1)] * 4),
    ]
    while hand.deliver() or hand.sync() or hand.work():  # no time passes: two rows stay in the open epoch
        pass
    assert list(hand.replies) == tokens[:2]
    assert len(store.list("snapshots/")) == 1
    again = Hand(store, app, workers, **limits)
    tokens = [
        again.send_source("q", 0, add, []),
        again.send_source("r", 0, add, []),
        again.send(["client/0"], [(add, "c", 1)]),
    ]
    again.settle()
    assert again.replies[tokens[0]] == hand.replies[1]
    assert again.replies[tokens[2]] == hand.replies[0]
    assert [reply.result for reply in again.replies[tokens[1]]] == [1, 2, 3, 4]
    assert again.state() == {("item", "a"): 1, ("item", "b"): 4, ("item", "c"): 1}


def test_the_query_that_was_quiet_for_longest_is_forgotten_first_also_after_a_restart() -> None:
    store = memory()
    hand = Hand(store, app, sources_max=2)
    for query, number in [("q", 0), ("r", 0), ("q", 1)]:
        hand.send_source(query, number, add, [("a", 1)])
        hand.settle()
    hand = Hand(store, app, sources_max=2)
    hand.send_source("s", 0, add, [("a", 1)])
    hand.settle()
    again = [hand.send_source(query, number, add, [("a", 1)]) for query, number in [("q", 1), ("s", 0), ("q", 2)]]
    hand.settle()
    assert set(again) <= set(hand.replies)
    assert hand.state() == {("item", "a"): 5}


# --- request ids are the same with and without restarts ---------------------------------------------------------------

NAMES = ("x", "y", "x/1", "x/0/1")


def some_ids(rng: random.Random, count: int) -> Any:
    """A stem, or ids that may look like rows of one."""
    rows = [f"{name}/{at}" for name in NAMES for at in range(4)]
    return rng.choice(NAMES) if rng.random() < 0.5 else [rng.choice([*rows, *NAMES]) for _ in range(count)]


@pytest.mark.parametrize("first", range(0, int(100 * float(os.environ.get("HEADRACE_EXAMPLES", "1"))), 25))
def test_request_ids_mean_the_same_with_restarts_as_without(first: int) -> None:
    """Stems, rows of stems asked by themselves, rows that came before their stem, other calls under a known id, and ids
    that were forgotten: whatever an engine that never stops answers, one that stops all the time answers too."""
    for seed in range(first, first + 25):
        rng = random.Random(seed)
        config = {"request_ids_max": rng.choice([4, 1_000]), "epoch_transactions_max": 3}
        store, steady = memory(), Hand(memory(), app, **config)
        hand = Hand(store, app, **config)
        for _ in range(rng.randint(2, 7)):
            calls: list[Any] = [(put, rng.choice("ab"), rng.randint(0, 1)) for _ in range(rng.randint(1, 4))]
            ids = some_ids(rng, len(calls))
            if rng.random() < 0.5:
                if rng.random() < 0.5:
                    hand.take_snapshot()
                hand = Hand(store, app, **config)
                hand.settle()  # until then it remembers more
            assert hand.run(ids, calls) == steady.run(ids, calls), f"seed {seed}"
        assert hand.state() == steady.state(), f"seed {seed}"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_id_that_was_forgotten_and_came_again_is_known_after_a_restart_with_its_whole_batch(workers: int) -> None:
    store = memory()
    config = {"request_ids_max": 4, "epoch_transactions_max": 3}
    hand = Hand(store, app, workers, **config)
    hand.run(["a", "b", "c"], [(add, "n", 1)] * 3)
    hand.run("other", [(add, "n", 1)] * 3)
    replies = hand.run(["new", "a"], [(add, "n", 1)] * 2)
    assert [reply.result for reply in replies] == [7, 8], "it had been forgotten"
    for _ in range(2):
        hand = Hand(store, app, workers, **config)
        hand.settle()
        assert hand.run(["new", "a"], [(add, "n", 1)] * 2) == replies
