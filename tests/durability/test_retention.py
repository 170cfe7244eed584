"""How long things are kept: log segments until snapshots cover them, replies and request ids until their time is over,
and nothing for ever."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from headrace import Reply
from headrace.core.events import TakeSnapshot, Tick
from headrace.durability.keeper import PendingRecord
from headrace.durability.reading.store_reader import StoreReader
from headrace.errors import Fenced, StoreError
from headrace.sim.disk import SimStore
from tests.durability.hand import Hand, add, app, drop, memory, move, put

SECOND = 1_000_000
SMALL = {
    "segment_bytes_max": 1,  # one record each
    "snapshots_kept": 1,
    "request_id_retention_us": 100 * SECOND,
    "reply_retention_us": 200 * SECOND,
}


def segments(store: SimStore, log: str) -> list[int]:
    """The first record of each."""
    names = (name.removeprefix(f"{log}/") for name in store.list(f"{log}/"))
    return sorted(int(name[:16]) for name in names if name[:16].isdecimal())


def go_on(hand: Hand, seconds: int, name: str) -> None:
    """Something else happens, with a snapshot at its end; so much time passes."""
    hand.now_us += seconds * SECOND
    hand.run(name, [(add, "other", 1)])
    hand.take_snapshot()


ASKED: list[Any] = [(add, "a", 1), (move, "a", "b", 500), (add, "a", 1), (drop, "b")]


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_request_id_gets_the_same_bytes_after_its_segment_is_gone_until_its_retention_ends_and_not_after(
    workers: int, can_append: bool
) -> None:
    store = memory(can_append)
    hand = Hand(store, app, workers, **SMALL, epoch_transactions_max=2)
    replies = hand.run("asked", ASKED)
    first_segments = segments(store, "log")
    for number in range(4):
        go_on(hand, 10, f"other{number}")
        assert hand.run("asked", ASKED) == replies
        hand = Hand(store, app, workers, now_us=hand.now_us, **SMALL)
        assert hand.run("asked", ASKED) == replies
    assert not set(first_segments) & set(segments(store, "log")), "the log has nothing of it any more"
    assert segments(store, "replies")[0] == 1, "the replies have"
    go_on(hand, 55, "later")
    hand = Hand(store, app, workers, now_us=hand.now_us, **SMALL)
    assert hand.run("asked", ASKED) == replies, "at 95 of 100 seconds"
    hand = Hand(store, app, workers, now_us=hand.now_us + 100 * SECOND, **SMALL)
    again = hand.run("asked", ASKED)
    assert {reply.tid for reply in again}.isdisjoint(reply.tid for reply in replies)
    assert [reply.result for reply in again] == [3, None, 4, None]


def test_a_request_id_is_forgotten_at_the_same_time_with_and_without_restarts() -> None:
    def asked(restart: bool, seconds: int) -> Reply:
        store = memory()
        hand = Hand(store, app, **SMALL)
        hand.run(["id"], [(add, "a", 1)])
        go_on(hand, 1, "other")
        hand.now_us = seconds * SECOND
        if restart:
            hand = Hand(store, app, now_us=hand.now_us, **SMALL)
        hand.submit(Tick())
        return hand.run(["id"], [(add, "a", 1)])[0]

    for seconds in (50, 99, 100, 101, 110, 120, 200):
        assert asked(True, seconds).result == asked(False, seconds).result, seconds
    assert [asked(True, seconds).result for seconds in (100, 120)] == [1, 2]


@pytest.mark.parametrize("restart", [False, True])
def test_as_many_request_ids_are_kept_as_configured_also_after_restarts(restart: bool) -> None:
    store = memory()
    config = {**SMALL, "request_ids_max": 8}
    hand = Hand(store, app, **config)
    for number in range(30):
        if restart:
            hand = Hand(store, app, **config)
        hand.run([f"id{number}"], [(add, "a", 1)])
        if number % 3 == 0:
            hand.take_snapshot()
    hand = Hand(store, app, **config)
    hand.submit(Tick())
    kept = [number for number in range(30) if hand.core.ledger.find(f"id{number}") is not None]
    assert kept == list(range(30 - len(kept), 30))
    assert 8 <= len(kept) <= 10
    for number in kept:
        assert hand.run([f"id{number}"], [(add, "a", 1)])[0].result == number + 1


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_store_does_not_grow_with_time(workers: int, can_append: bool) -> None:
    """Every second a transaction and a snapshot, and now and then a restart."""
    store = memory(can_append)
    sizes = []
    hand = Hand(store, app, workers, **SMALL)
    for number in range(160):
        go_on(hand, 5, f"batch{number}")
        if number % 40 == 39:
            hand = Hand(store, app, workers, now_us=hand.now_us, **SMALL)
            hand.settle()
        sizes.append(len(store.disk.files) - len(store.list("log/terms/")))
    assert max(sizes[110:]) <= 1.2 * max(sizes[60:110])
    assert len(segments(store, "log")) < 10
    assert len(segments(store, "replies")) <= 2 * 200 / 5 + 10
    assert len(store.list("snapshots/")) <= 3
    assert hand.state() == {("item", "other"): 160}


def test_replies_are_kept_for_their_retention_though_their_ids_are_forgotten() -> None:
    store = memory()
    hand = Hand(store, app, **SMALL)
    for number in range(60):
        go_on(hand, 10, f"batch{number}")  # one epoch each
    oldest = segments(store, "replies")[0]
    assert 60 - 20 - 5 <= oldest <= 60 - 20, "200 seconds are 20 epochs"
    assert hand.core.ledger.epochs[0].number > 45, "100 seconds are 10"


def test_every_snapshot_that_is_kept_can_still_be_reached() -> None:
    """Time travel: each of the kept snapshots, and each epoch after the oldest."""
    store = memory()
    hand = Hand(store, app, **{**SMALL, "snapshots_kept": 3})
    for number in range(20):
        hand.now_us += SECOND
        hand.run(f"batch{number}", [(add, "a", 1)])
        if number % 4 == 3:
            hand.take_snapshot()
    past = StoreReader(store, app)
    kept = sorted({manifest.epoch for manifest in past.snapshots.manifests()})
    assert kept == [12, 16, 20]
    for epoch in range(12, 21):
        loaded = past.load(epoch)
        assert loaded is not None
        assert loaded.manifest.epoch <= epoch
        assert loaded.tables["item"]["a"] == loaded.manifest.epoch
    with pytest.raises(StoreError, match="11"):
        past.load(11)


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_batch_of_a_quiet_source_is_answered_though_ids_of_its_time_are_forgotten(workers: int) -> None:
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2, **SMALL)
    token = hand.send_source("q", 0, add, [("a", 1)] * 5)
    hand.settle()
    replies = hand.replies[token]
    for number in range(15):
        go_on(hand, 10, f"other{number}")
    hand = Hand(store, app, workers, now_us=hand.now_us, **SMALL)
    token = hand.send_source("q", 0, add, [("a", 1)] * 5)
    hand.settle()
    assert hand.replies[token] == replies, "at 150 of 200 seconds"
    for number in range(15):
        go_on(hand, 10, f"later{number}")
    hand = Hand(store, app, workers, now_us=hand.now_us, **SMALL)
    again, following = (hand.send_source("q", number, add, [("a", 1)] * 5) for number in (0, 1))
    hand.settle()
    assert {reply.error for reply in hand.replies[again]} == {
        "the batch ran, but its replies are no longer kept (reply_retention_us)"
    }
    assert [reply.result for reply in hand.replies[following]] == [6, 7, 8, 9, 10], "it ran once"


@pytest.mark.parametrize("in_between", [0, 1, 5])
def test_ids_that_shared_an_epoch_with_a_sources_last_batch_do_not_come_back(in_between: int) -> None:
    """The batch's replies are read again after a restart; the ids beside them were forgotten."""
    store = memory()
    config = {**SMALL, "epoch_interval_us": 1_000}
    hand = Hand(store, app, **config)
    token = hand.send_source("q", 0, add, [("a", 1)])
    hand.send(["id"], [(put, "b", 1)])
    hand.settle()
    replies = hand.replies[token]
    assert hand.run(["id"], [(put, "b", 1)])[0].epoch == replies[0].epoch
    for number in range(in_between):
        go_on(hand, 20, f"other{number}")
    hand.now_us = 150 * SECOND
    go_on(hand, 0, "last")
    for _ in range(2):
        hand = Hand(store, app, now_us=hand.now_us, **config)
        hand.submit(Tick())
        assert hand.core.ledger.find("id") is None
        token = hand.send_source("q", 0, add, [])
        hand.settle()
        assert hand.replies[token] == replies
    assert hand.run(["id"], [(put, "b", 1)])[0].epoch != replies[0].epoch


# --- when deleting fails ----------------------------------------------------------------------------------------------


class NoDeletes(SimStore):
    refuses = False

    def delete(self, name: str) -> None:
        if self.refuses:
            raise StoreError(f"{name} stays")
        super().delete(name)


@pytest.mark.parametrize("restart", [False, True])
def test_what_could_not_be_deleted_is_deleted_later(restart: bool) -> None:
    store = NoDeletes(memory().disk, "memory")
    hand = Hand(store, app, **SMALL)
    store.refuses = True
    for number in range(5):
        go_on(hand, 1, f"refused{number}")
    store.refuses = False
    if restart:
        hand = Hand(store, app, now_us=hand.now_us, **SMALL)
    for number in range(3):
        go_on(hand, 1, f"free{number}")
    assert hand.state() == {("item", "other"): 8}
    assert len(store.list("snapshots/")) <= 3
    assert len(store.list("state/")) <= 4
    assert segments(store, "log")[0] > 5
    assert Hand(store, app, now_us=hand.now_us, **SMALL).state() == {("item", "other"): 8}


def test_whoever_was_superseded_deletes_nothing() -> None:
    """A zombie's snapshot is due to be retired: it must say so in the log first, and cannot."""
    store = memory()
    hand = Hand(store, app, **SMALL)
    go_on(hand, 1, "one")
    hand.send("two", [(add, "other", 1)])
    hand.compute()
    hand.sync()
    hand.compute()
    hand.core.journal.wanted.append("token")
    hand.submit(Tick())
    hand.compute()
    files = set(store.disk.files)
    successor = Hand(store, app, **SMALL)
    while hand.rest:  # replies, and the snapshot; the record that something is retired waits for the log
        with suppress(Fenced):
            hand.work()
    with suppress(Fenced):
        hand.sync()
    assert not hand.rest
    assert files <= set(store.disk.files)
    assert successor.state() == {("item", "other"): 2}


def test_a_snapshot_of_a_later_epoch_that_a_zombie_saves_makes_nobody_delete_what_a_start_needs() -> None:
    """A start chooses the snapshot of the newest term. It may be of an earlier epoch, if it was taken in a replay."""
    store = memory()
    zombie = Hand(store, app, snapshots_kept=1, segment_bytes_max=1)
    for number in range(4):
        zombie.run(f"r{number}", [(add, "a", 1)])
    zombie.submit(TakeSnapshot("late"))
    late = zombie.hold_save()
    successor = Hand(store, app, snapshots_kept=1, segment_bytes_max=1, snapshot_interval_us=1)
    successor.now_us += SECOND
    early = successor.hold_save()
    assert early.snapshot.epoch < late.snapshot.epoch
    zombie.rest.append(late)
    zombie.work()
    successor.rest.appendleft(early)
    successor.work()
    while not any(isinstance(item, PendingRecord) for item in successor.rest):
        assert successor.deliver() or successor.sync(), "nothing was retired"
    while successor.rest:
        successor.work()
    for _ in range(2):
        assert Hand(store, app).state() == {("item", "a"): 4}
