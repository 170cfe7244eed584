"""What a snapshot must hold: for other code to start from it, and after one that failed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace import App, Config, Context
from headrace.core.events import Lost
from headrace.core.journal import Journal
from headrace.core.snapshot_metadata import INITIAL
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.errors import AppChanged, StoreError
from headrace.sim.disk import SimStore
from tests.durability.hand import Hand, NoSnapshots, add, app, drop, exhaust, exhausted, memory, put

# --- other code -------------------------------------------------------------------------------------------------------


def version(number: int) -> App:
    """The first adds; the second adds twice as much, has one function less and one more."""
    made = App("versions")
    counter = made.operator("counter")
    if number == 1:

        @counter.register
        def add(ctx: Context, amount: int) -> int:
            ctx.put(ctx.get(0) + amount)
            return int(ctx.get())

        @counter.register
        def only_then(ctx: Context) -> str:
            return "then"

    else:

        @counter.register
        def add(ctx: Context, amount: int) -> int:
            ctx.put(ctx.get(0) + 2 * amount)
            return int(ctx.get())

        @counter.register
        def only_now(ctx: Context) -> str:
            return "now"

    return made


OLD, NEW = version(1), version(2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_changed_code_does_not_start_while_epochs_of_the_old_wait_to_be_replayed(
    with_snapshot: bool, workers: int
) -> None:
    store = memory()
    hand = Hand(store, OLD, workers)
    hand.run("a", [("counter.add", "a", 1)])
    if with_snapshot:
        hand.take_snapshot()
    hand.run("b", [("counter.add", "a", 1)])
    with pytest.raises(AppChanged) as refusal:
        Hand(store, NEW, workers)
    words = str(refusal.value)
    for word in (
        "epoch 2" if with_snapshot else "epoch 1",
        "versions",
        "counter.add",
        "no snapshot",
        "headrace upgrade",
        "old code",
    ):
        assert word in words, words
    hand = Hand(store, OLD, workers)
    assert hand.state() == {("counter", "a"): 2}, "the old code still starts"


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_code_starts_from_a_snapshot_at_the_logs_end_and_request_ids_stay(workers: int) -> None:
    store = memory()
    hand = Hand(store, OLD, workers)
    replies = hand.run("a", [("counter.add", "a", 1), ("counter.only_then", "a")])
    hand.take_snapshot()
    for _ in range(2):
        hand = Hand(store, NEW, workers)
        assert hand.run(["a/0"], [("counter.add", "a", 1)]) == replies[:1]
        assert hand.run("b", [("counter.add", "a", 1), ("counter.only_now", "a")])[0].result == 3
        assert hand.state() == {("counter", "a"): 3}
    with pytest.raises(AppChanged, match="headrace upgrade"):
        Hand(store, OLD, workers)
    hand = Hand(store, NEW, workers)
    assert hand.take_snapshot() == 2
    hand = Hand(store, OLD, workers)
    assert hand.state() == {("counter", "a"): 3}, "back again, from a snapshot of the new code"
    assert hand.run("c", [("counter.add", "a", 1)])[0].result == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_snapshot_of_changed_code_holds_everything(workers: int) -> None:
    """Also if it fails once, and something is deleted before the next."""
    store = memory()
    hand = Hand(store, app, workers)
    hand.run("a", [(put, key, 1) for key in "abc"])
    hand.take_snapshot()
    hand = Hand(store, app, workers)
    hand.core.journal.is_full_next = True
    hand.run("b", [(put, "b", 2)])
    store.disk.is_full = True
    assert hand.take_snapshot() is None
    store.disk.is_full = False
    hand.run("c", [(drop, "a")])
    assert hand.take_snapshot() == 3
    assert Hand(store, app, workers).state() == {("item", "b"): 2, ("item", "c"): 1}


def test_a_batch_of_a_source_that_the_old_code_did_not_finish_is_no_reason_to_lose_it() -> None:
    store = memory()
    hand = Hand(store, OLD, epoch_transactions_max=2)
    hand.send_source("q", 0, "counter.add", [("a", 1)] * 5)
    hand.sync(1)  # the batch is closed, and none of its epochs durable
    try:
        hand = Hand(store, NEW)
    except AppChanged:
        hand = Hand(store, OLD)
    token = hand.send_source("q", 0, "counter.add", [])
    hand.settle()
    assert len(hand.replies[token]) == 5
    assert hand.state()["counter", "a"] in (5, 10)


@dataclasses.dataclass
class Old:
    name: str
    amount: int


@dataclasses.dataclass
class New:
    name: str
    cents: int
    tags: tuple[str, ...] = ()


def typed(state: type, migrate: Any = None) -> App:
    made = App("typed")
    purse = made.operator("purse", state=state, migrate=migrate)
    if state is Old:

        @purse.register
        def pay_in(ctx: Context, amount: int) -> int:
            ctx.put(Old(str(ctx.key), ctx.get(Old("", 0)).amount + amount))
            return int(ctx.get().amount)

    else:

        @purse.register
        def pay_in(ctx: Context, amount: int) -> int:
            ctx.put(New(str(ctx.key), ctx.get(New("", 0)).cents + 100 * amount, ("new",)))
            return int(ctx.get().cents)

    return made


def in_cents(key: Any, old: dict[str, Any]) -> New | None:
    return New(old["name"], 100 * old["amount"], ("old",)) if old["amount"] else None


def broke(key: Any, old: dict[str, Any]) -> New:
    return New(old["name"], 100 // old["amount"])


def cannot_save(*_: Any) -> None:
    raise StoreError("no room")


def test_a_snapshot_of_the_migrated_state_is_taken_at_once() -> None:
    for workers in (0, 2):
        store = memory()
        old_purses(store, workers)
        Hand(store, typed(New, in_cents), workers).settle()
        again = Hand(store, typed(New), workers)  # the migration is not needed any more
        assert again.state() == {("purse", "a"): New("a", 100, ("old",)), ("purse", "b"): New("b", 200, ("old",))}


def old_purses(store: SimStore, workers: int = 0) -> list[Any]:
    hand = Hand(store, typed(Old), workers)
    replies = hand.run("a", [("purse.pay_in", key, amount) for key, amount in [("a", 1), ("b", 2), ("zero", 0)]])
    hand.take_snapshot()
    return replies


def test_state_of_another_type_needs_a_migration_and_the_refusal_says_how() -> None:
    store = memory()
    old_purses(store)
    with pytest.raises(AppChanged, match=r"3 entities of operator 'purse'.*migrate=function"):
        Hand(store, typed(New))
    with pytest.raises(AppChanged, match=r"migration of operator 'purse' fails for 'zero'.*ZeroDivisionError"):
        Hand(store, typed(New, broke))
    assert Hand(store, typed(Old)).state()["purse", "a"] == Old("a", 1), "the old code still starts"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ends", ["at once", "after an epoch", "after a snapshot", "after a failed snapshot"])
def test_a_migration_makes_all_states_anew_also_if_the_process_ends_before_the_next_snapshot(
    ends: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory()
    replies = old_purses(store, workers)
    if "snapshot" not in ends:  # the one that is taken at once comes to nothing
        monkeypatch.setattr(Snapshots, "save", cannot_save)
    state = {("purse", "a"): New("a", 100, ("old",)), ("purse", "b"): New("b", 200, ("old",))}
    hand = Hand(store, typed(New, in_cents), workers)
    assert hand.run("a", [("purse.pay_in", "a", 1)])[0] == replies[0], "request ids stay"
    assert hand.state() == state
    if ends != "at once":
        assert hand.run("b", [("purse.pay_in", "a", 1)])[0].result == 200
        state["purse", "a"] = New("a", 200, ("new",))
    if ends == "after a failed snapshot":
        store.disk.is_full = True
        assert hand.take_snapshot() is None
        store.disk.is_full = False
        hand.run("c", [("purse.pay_in", "c", 1)])
        state["purse", "c"] = New("c", 100, ("new",))
    if "snapshot" in ends:
        assert hand.take_snapshot() is not None
        loaded = hand.opened_store.snapshots.load()
        assert loaded is not None
        assert set(loaded.tables["purse"]) == {key for _, key in state}, "whoever was removed is gone"
        again = Hand(store, typed(New), workers)  # the migration is not needed any more
    else:
        again = Hand(store, typed(New, in_cents), workers)
    assert again.state() == state


# --- snapshots that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_failed_snapshot_held_is_in_the_next_one(workers: int) -> None:
    store = NoSnapshots(memory().disk, "memory")
    hand = Hand(store, app, workers)
    hand.run("a", [(add, "a", 1), (add, "b", 1), (add, "c", 1)])
    assert hand.take_snapshot() == 1
    for number in range(3):
        hand.run(f"b{number}", [(add, "a", 1), (drop, "b"), (put, f"n{number}", number)])
        store.refuses = True
        assert hand.take_snapshot() is None
        store.refuses = False
    hand.run("c", [(drop, "n0"), (add, "d", 1)])
    for lost in range(1, workers + 1):
        hand.submit(Lost(lost))
    assert hand.take_snapshot() == 5
    state = hand.state()
    hand = Hand(store, app)
    assert hand.core.journal.last == hand.opened_store.log.last
    assert not hand.core.backlog, "nothing is replayed"
    assert (
        hand.state() == state == {("item", key): n for key, n in [("a", 4), ("c", 1), ("n1", 1), ("n2", 2), ("d", 1)]}
    )


def test_a_snapshot_that_fails_while_workers_come_and_go_loses_no_change() -> None:
    store = NoSnapshots(memory().disk, "memory")
    hand = Hand(store, app, 3)
    hand.run("a", [(add, "a", 1)])
    hand.core.journal.wanted.append("early")
    hand.send("b", [(add, "b", 1)])
    save = hand.hold_save()
    hand.run("c", [(add, "c", 1)])
    for workers in (2, 4):
        hand.rescale(workers)
        hand.run(f"with{workers}", [(add, f"w{workers}", 1)])
    store.refuses = True
    hand.rest.append(save)
    hand.settle()
    store.refuses = False
    assert hand.take_snapshot() is not None
    state = hand.state()
    assert len(state) == 5
    assert Hand(store, app, 2).state() == state


def test_the_state_in_a_snapshot_is_that_of_its_epoch_though_later_ones_ran_before_it_was_written() -> None:
    store = memory()
    hand = Hand(store, app)
    hand.run("a", [(put, "a", [1])])
    hand.core.journal.wanted.append("token")
    hand.send("b", [(put, "a", [1, 2])])
    save = hand.hold_save()
    hand.run("c", [(put, "a", [1, 2, 3]), (put, "b", 1)])
    assert save.snapshot.epoch < 3
    hand.rest.append(save)
    while hand.work():
        pass
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    assert loaded.manifest.epoch == save.snapshot.epoch
    assert hand.core.program.values.unseal(loaded.tables["item"]["a"]) == [1, 2][: save.snapshot.epoch]
    assert Hand(store, app).state() == {("item", "a"): [1, 2, 3], ("item", "b"): 1}


def test_a_decree_made_in_a_replay_of_other_limits_has_its_place_in_the_log() -> None:
    store = memory()
    with exhausted():
        hand = Hand(store, app)
        hand.send("all", [(exhaust, "a", "memory")])
        hand.sync()
        hand.compute()  # the decree is not durable
        hand = Hand(store, app, calls_max=9)
        replies = hand.run("all", [(exhaust, "a", "memory")])
    assert Hand(store, app).run("all", [(exhaust, "a", "memory")]) == replies


def test_a_full_snapshot_holds_nothing_that_was_deleted_meanwhile() -> None:
    """After a migration the first snapshot is full. It fails, workers are added, an entity is deleted."""
    journal = Journal(Config(), is_durable=True)
    journal.restore(5, 10, True)
    journal.take(0, [("item", "gone", 1), ("item", "kept", 2)], 6, 11, INITIAL)
    assert journal.saving is not None
    assert journal.saving.is_full
    journal.failed()
    journal.carry([("item", "gone", 1)])
    journal.take(0, [("item", "kept", 2)], 7, 12, INITIAL)
    assert journal.saving is not None
    assert journal.saving.is_full
    assert journal.saving.delta == [("item", "kept", 2)]
