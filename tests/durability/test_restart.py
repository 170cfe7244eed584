"""Whatever happens to the process and whenever: what was answered stays, and nothing runs twice."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace import Reply
from headrace.core.epoch import Epoch
from headrace.core.events import Lost, Overran, Rescale, TakeSnapshot
from headrace.durability.log.log import read_log
from headrace.durability.log.records import Records
from headrace.sim.disk import AFTER, BEFORE, MIDDLE, Crashed, SimStore
from tests.durability.hand import (
    SEVEN,
    Hand,
    NoSnapshots,
    add,
    after_power_loss,
    app,
    ask,
    ask_exhausted,
    check_by_tid,
    drop,
    exhaust,
    exhausted,
    memory,
    move,
    put,
)

KEYS = "abcd"


def some_calls(rng: random.Random, count: int) -> list[Any]:
    return [
        rng.choice(
            [
                (add, rng.choice(KEYS), rng.randint(1, 9)),
                (move, rng.choice(KEYS), rng.choice(KEYS), rng.choice([1, 2, 500])),
                (ask, rng.choice(KEYS), rng.choice(KEYS)),
                (put, rng.choice(KEYS), rng.randint(1, 9)),
                (drop, rng.choice(KEYS)),
            ]
        )
        for _ in range(count)
    ]


class Life:
    """Clients that repeat what was not answered, on a store whose processes die."""

    def __init__(self, seed: int, can_append: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.store = NoSnapshots(memory(can_append).disk, "memory")
        self.batches: list[tuple[Any, list[Any]]] = []  # ids and calls, or a source
        for number in range(rng.randint(3, 8)):
            calls = some_calls(rng, rng.choice([1, 1, 3, 7]))
            ids: Any = rng.choice([f"batch{number}", [f"id{number}-{at}" for at in range(len(calls))]])
            self.batches.append((ids, calls))
        self.sources: dict[str, list[list[Any]]] = {
            query: [
                [(rng.choice(KEYS), rng.randint(1, 9)) for _ in range(rng.choice([0, 1, 5]))]
                for _ in range(rng.randint(0, 4))
            ]
            for query in ("q", "r")
        }
        self.answered: dict[Any, list[Reply]] = {}
        self.sent: dict[str, int] = {}  # the last batch of each source
        self.sync_chance = rng.choice([0.02, 0.2, 1.0])
        self.now_us = 0
        self.deaths = 0
        self.begin()

    def begin(self) -> None:
        rng = self.rng
        self.asked: dict[int, Any] = {}
        self.hand = Hand(
            self.store,
            app,
            rng.choice([0, 0, 1, 2, 3]),
            self.now_us,
            rng.randrange(1 << 30),
            epoch_transactions_max=rng.randint(1, 4),
            epoch_interval_us=rng.choice([0, 0, 1_000]),
            snapshot_interval_us=rng.choice([1, 3_000, 1_000_000]),
            snapshots_kept=rng.randint(1, 3),
            segment_bytes_max=rng.choice([1, 1_000, 1 << 20]),
            calls_max=rng.choice([10_000, 9_000]),
            reply_retention_us=1 << 60,
            request_id_retention_us=1 << 50,
        )

    def send(self) -> None:
        """A batch that was not answered, or one that was."""
        rng, hand = self.rng, self.hand
        ready: list[Any] = list(range(len(self.batches)))
        for query, batches in self.sources.items():
            done = sum((query, number) in self.answered for number in range(len(batches)))
            first = max(0, self.sent.get(query, 0), done - 1)  # a source does not go back behind what it has sent
            ready += [(query, number) for number in range(first, min(done + 1, len(batches)))]
        if not ready:
            return
        what = rng.choice(ready)
        if isinstance(what, int):
            token = hand.send(*self.batches[what])
        else:
            self.sent[what[0]] = what[1]
            rows = list(self.sources[what[0]][what[1]])
            rng.shuffle(rows)  # Spark may partition it differently
            token = hand.send_source(*what, add, self.sources[what[0]][what[1]] if what not in self.answered else rows)
        self.asked[token] = what

    def look(self) -> None:
        """What was answered, is: for good."""
        for token, replies in self.hand.replies.items():
            before = self.answered.setdefault(self.asked[token], replies)
            assert replies == before

    def die(self) -> None:
        self.deaths += 1
        if self.rng.random() < 0.5:
            self.store = after_power_loss(self.store)
        self.now_us = self.hand.now_us + self.rng.choice([-5_000, 0, 5_000])
        self.begin()

    def live(self, steps: int) -> None:
        rng = self.rng
        for _ in range(steps):
            chance = rng.random()
            if chance < 0.10:
                self.send()
            elif chance < 0.12:
                self.hand.submit(TakeSnapshot(object()))
            elif chance < 0.14:
                self.hand.now_us += rng.choice([1, 1_000, 5_000])
            elif chance < 0.15 and self.hand.workers:
                self.hand.submit(Lost(rng.randint(1, self.hand.core.backend.workers)))
            elif chance < 0.155 and self.hand.workers:
                self.hand.submit(Rescale("rescale", rng.randint(1, 3)))
            elif chance < 0.16:
                self.store.refuses = not self.store.refuses
            elif chance < 0.18:
                self.die()
            else:
                self.hand.happen(rng, self.sync_chance)
            self.look()

    def finish(self) -> None:
        """Everything is asked for until it is answered."""
        self.store.refuses = False
        for number, batch in enumerate(self.batches):
            self.asked[self.hand.send(*batch)] = number
        for query, batches in self.sources.items():
            for number, rows in enumerate(batches):
                if (query, number + 1) not in self.answered and number >= self.sent.get(query, 0):
                    self.asked[self.hand.send_source(query, number, add, rows)] = query, number
                    self.hand.settle()
                    self.look()
        self.hand.settle()
        self.look()

    def check(self) -> None:
        called: dict[int, Any] = {}
        replies: dict[int, Reply] = {}
        for what, answered in self.answered.items():
            calls: Sequence[Any]
            if isinstance(what, int):
                calls = self.batches[what][1]
            else:
                calls = [(add, *row) for row in self.sources[what[0]][what[1]]]
            assert len(answered) == len(calls)
            for call, reply in zip(calls, answered, strict=True):
                assert reply.tid is not None
                assert reply.tid not in called, "two calls have one TID"
                called[reply.tid], replies[reply.tid] = call, reply
        wanted = len(self.batches) + sum(map(len, self.sources.values()))
        assert len(self.answered) == wanted
        assert sorted(called) == list(range(1, len(called) + 1)), "something ran that nobody asked for"
        check_by_tid(called, replies, self.hand.state())


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
@pytest.mark.parametrize("seed", range(int(12 * float(os.environ.get("HEADRACE_EXAMPLES", "1")))))
def test_nothing_acknowledged_is_lost_and_nothing_runs_twice_wherever_the_process_dies(
    seed: int, can_append: bool
) -> None:
    """Also with other limits, other epochs, another number of workers after each death."""
    life = Life(seed, can_append)
    life.live(300)
    life.finish()
    life.check()
    life.die()
    life.finish()
    life.check()


# --- every operation of the store may be the last ---------------------------------------------------------------------

SCRIPT: list[tuple[Any, list[Any]]] = [
    ("stem", [(add, "a", 1), (move, "a", "b", 2), (drop, "a"), (move, "a", "b", 500), (add, "b", 3)]),
    (["one"], [(put, "c", 7)]),
    ("again", [(ask, "a", "c"), (drop, "c"), (add, "b", 1)]),
]
ROWS = [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("b", 5)]
SMALL = {
    "epoch_transactions_max": 2,
    "segment_bytes_max": 1,
    "snapshots_kept": 1,
    "reply_retention_us": 1 << 60,
}


def play(hand: Hand, acknowledged: dict[Any, list[Reply]]) -> None:
    """Three batches, a source's batch and a snapshot after each."""
    for ids, calls in SCRIPT:
        acknowledge(acknowledged, str(ids), hand.run(ids, calls))
        assert hand.take_snapshot()
        token = hand.send_source("q", 0, add, ROWS)
        hand.settle()
        acknowledge(acknowledged, "q", hand.replies[token])


def acknowledge(acknowledged: dict[Any, list[Reply]], what: str, replies: list[Reply]) -> None:
    assert acknowledged.setdefault(what, replies) == replies


def check_played(hand: Hand, acknowledged: dict[Any, list[Reply]]) -> None:
    tokens = {str(ids): hand.send(ids, calls) for ids, calls in SCRIPT}
    tokens["q"] = hand.send_source("q", 0, add, ROWS)
    hand.settle()
    for what, token in tokens.items():
        acknowledge(acknowledged, what, hand.replies[token])
    called, replies = {}, {}
    for what, calls in [*((str(ids), calls) for ids, calls in SCRIPT), ("q", [(add, *row) for row in ROWS])]:
        for call, reply in zip(calls, acknowledged[what], strict=True):
            called[reply.tid], replies[reply.tid] = call, reply
    assert len(called) == 14
    check_by_tid(called, replies, hand.state())  # type: ignore[arg-type]


def operations(can_append: bool) -> int:
    store = memory(can_append)
    play(Hand(store, app, **SMALL), {})
    return store.operations


@pytest.mark.parametrize(
    ("can_append", "where"),
    [(True, MIDDLE), (True, AFTER), (False, AFTER)],
    ids=["in an operation on files", "after one", "after one on objects"],
)
def test_a_process_that_dies_at_any_operation_of_the_store_has_lost_and_doubled_nothing(
    can_append: bool, where: str
) -> None:
    for at in range(1, operations(can_append) + 1, 1 if os.environ.get("HEADRACE_EXAMPLES") else 2):
        store, acknowledged = memory(can_append), dict[Any, list[Reply]]()
        store.dies_at = at, where
        with pytest.raises(Crashed):
            play(Hand(store, app, **SMALL), acknowledged)
        check_played(Hand(after_power_loss(store), app, **SMALL), acknowledged)


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
def test_a_process_that_dies_at_any_operation_of_its_recovery_has_lost_and_doubled_nothing(can_append: bool) -> None:
    """Half way through, after a kill. Then the recovery dies too, and the one after it does not."""
    first, acknowledged = memory(can_append), dict[Any, list[Reply]]()
    first.dies_at = operations(can_append) * 2 // 3, BEFORE
    with pytest.raises(Crashed):
        play(Hand(first, app, **SMALL), acknowledged)
    at = 0
    while True:
        at += 1
        second = after_power_loss(first)
        second.dies_at = at, AFTER
        try:
            Hand(second, app, 2, **SMALL)
        except Crashed:
            check_played(Hand(after_power_loss(second), app, **SMALL), dict(acknowledged))
        else:
            break
    assert at > 10


# --- failures upon failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_two_failures_in_a_row_lose_nothing(with_snapshot: bool, workers: int) -> None:
    """The second comes before anything new ran, and before any snapshot of the second run."""
    store = memory()
    hand = Hand(store, app, workers)
    replies = hand.run("all", SEVEN)
    if with_snapshot:
        hand.take_snapshot()
    for _ in range(3):
        hand = Hand(store, app, workers)  # and dies at once
    for _ in range(2):
        hand = Hand(store, app, workers)
        hand.compute()  # and dies after its replay
    assert hand.run("all", SEVEN) == replies
    assert hand.state() == {("item", "a"): 4, ("item", "b"): 3}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_worker_lost_in_the_middle_of_an_epoch_and_then_the_coordinator(lost: int) -> None:
    store = memory()
    hand = Hand(store, app, 2, seed=lost)
    before = hand.run("before", SEVEN)
    token = hand.send("all", [(move, "a", "b", 1), (ask, "b", "a"), (drop, "a"), (move, "b", "a", 500)])
    hand.sync()
    for _ in range(3):
        hand.deliver()
    assert token not in hand.replies
    hand.submit(Lost(lost))
    hand.compute()
    replies, state = hand.replies[token], hand.state()
    again = Hand(store, app, 2)
    again.submit(Lost(lost))  # in the middle of the replay
    assert again.run("all", [(move, "a", "b", 1), (ask, "b", "a"), (drop, "a"), (move, "b", "a", 500)]) == replies
    assert again.run("before", SEVEN) == before
    assert again.state() == state


def test_a_store_without_any_record_starts_as_often_as_you_like() -> None:
    store = memory()
    for workers in (0, 2, 0, 1):
        hand = Hand(store, app, workers)
        hand.settle()
        assert hand.take_snapshot() is not None
        assert hand.state() == {}
    assert Hand(store, app).run("a", [(add, "a", 1)])[0].tid == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_system_that_was_idle_for_minutes_goes_on_and_takes_snapshots(workers: int) -> None:
    store = memory()
    hand = Hand(store, app, workers, snapshot_interval_us=10_000_000)
    for minutes in range(1, 4):
        hand.run(f"minute{minutes}", [(add, "a", 1)])
        hand.now_us += 600_000_000
        hand.settle()
        epochs = {int(name.split("/")[1][:16]) for name in store.list("snapshots/")}
        assert max(epochs) == minutes, "the snapshot came when it was due, and one only"
    hand.now_us += 1 << 40
    hand = Hand(store, app, workers, now_us=hand.now_us)
    hand.now_us += 1 << 40
    assert hand.run("late", [(add, "a", 1)])[0].result == 4


def times(store: SimStore) -> list[int]:
    program = Hand(after_power_loss(store), app).core.program
    records = Records(program)
    batches: dict[int, Any] = {}
    found = [records.decode(record.number, record.data, batches).record for record in read_log(store, first=None)]
    return [record.closed_us for record in found if isinstance(record, Epoch)]


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_the_time_of_epochs_never_goes_back_also_when_the_clock_does(with_snapshot: bool) -> None:
    store = memory()
    for number, now_us in enumerate([5_000, 1_000, 7_000, -3]):
        hand = Hand(store, app, number % 2 * 2, now_us=now_us)
        hand.run(f"at{number}", [(add, "a", 1)])
        assert times(store)[-1] == [5_000, 5_000, 7_000, 7_000][number]
        if with_snapshot:
            hand.take_snapshot()


# --- decrees ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("calls_max", [10_000, 9_000], ids=["same limits", "other limits"])
def test_what_exhausted_the_stack_once_stays_aborted_whatever_it_would_do_now(workers: int, calls_max: int) -> None:
    store = memory()
    calls: list[Any] = [(exhaust, "a", "stack"), (ask_exhausted, "b", "c"), (exhaust, "d", "memory"), (add, "e", 1)]
    with exhausted():
        hand = Hand(store, app, workers)
        replies = hand.run("all", calls)
    assert [reply.status for reply in replies] == ["aborted"] * 3 + ["ok"]
    assert hand.state() == {("item", "e"): 1}
    for other in (0, 2, 1):
        hand = Hand(store, app, other, calls_max=calls_max)
        assert hand.run("all", calls) == replies
        assert hand.state() == {("item", "e"): 1}
        for lost in range(1, other + 1):
            hand.submit(Lost(lost))
            assert hand.run("all", calls) == replies
            assert hand.state() == {("item", "e"): 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_decree_holds_when_a_worker_is_lost(workers: int) -> None:
    calls: list[Any] = [(exhaust, "a", "stack"), (ask_exhausted, "b", "c"), (add, "e", 1)]
    with exhausted():
        hand = Hand(memory(), app, workers)
        replies = hand.run("all", calls)
    for lost in range(1, workers + 1):
        hand.submit(Lost(lost))
        hand.settle()
    assert hand.run("all", calls) == replies
    assert hand.state() == {("item", "e"): 1}


@pytest.mark.parametrize("calls_max", [10_000, 9_000], ids=["same limits", "other limits"])
def test_a_transaction_whose_decree_was_lost_is_answered_by_what_it_does_the_next_time(calls_max: int) -> None:
    """Nobody has heard of the first one: its reply waits for the decree."""
    store = memory()
    with exhausted():
        hand = Hand(store, app)
        hand.send("all", [(exhaust, "a", "stack"), (add, "a", 1)])
        hand.sync()
        hand.compute()
        assert not hand.replies
        while hand.work():
            pass
        assert not hand.replies
        again = Hand(store, app, calls_max=calls_max)
        replies = again.run("all", [(exhaust, "a", "stack"), (add, "a", 1)])
        assert [reply.status for reply in replies] == ["aborted", "ok"]
    hand = Hand(store, app, calls_max=calls_max)
    assert hand.run("all", [(exhaust, "a", "stack"), (add, "a", 1)]) == replies


def test_a_lost_decree_may_turn_into_a_success() -> None:
    store = memory()
    with exhausted():
        hand = Hand(store, app)
        hand.send("all", [(exhaust, "a", "stack")])
        hand.sync()
        hand.compute()
        while hand.work():
            pass
    for _ in range(2):
        assert Hand(store, app).run("all", [(exhaust, "a", "stack")])[0].result == "ran"


# --- what nobody can repeat -------------------------------------------------------------------------------------------


def test_a_snapshot_begins_behind_no_record_that_may_be_lost() -> None:
    """The record that says what is retired comes between two epochs of which the second is in the next snapshot."""
    store = memory()
    hand = Hand(store, app, snapshots_kept=1, snapshot_interval_us=1, now_us=1)
    for number in range(2):
        hand.now_us += 10
        hand.send(f"batch{number}", [(add, "a", 1)])
        hand.compute()
        hand.sync()
        hand.compute()
    while hand.work():  # snapshots, and never the log again
        hand.compute()
    hand = Hand(store, app)
    assert hand.state() == {("item", "a"): 2}
    assert hand.run("batch1", [(add, "a", 1)])[0].result == 2


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_function_that_never_returned_stays_aborted_on_any_number_of_workers(workers: int) -> None:
    """The worker was killed for it: the decree is all that is known, and it is in the log before the reply is out."""
    store = memory()
    calls: list[Any] = [(add, "a", 1), (ask, "b", "a"), (add, "a", 1)]
    hand = Hand(store, app, 1)
    token = hand.send("all", calls)
    hand.sync()
    hand.submit(Overran(1, 2))
    hand.compute()
    assert token not in hand.replies
    hand.settle()
    replies = hand.replies[token]
    assert [reply.status for reply in replies] == ["ok", "aborted", "ok"]
    hand = Hand(store, app, workers)
    assert hand.run("all", calls) == replies
    assert hand.state() == {("item", "a"): 2}
