"""The simulated disk: what it keeps, what it loses, and where a process can be stopped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from headrace.errors import ObjectMissing, StoreError, StoreFull
from headrace.sim.disk import AFTER, BEFORE, MIDDLE, Crashed, Disk, DiskFaults, SimStore


def disk(seed: int = 0, can_append: bool = True, **faults: float) -> Disk:
    return Disk(random.Random(seed), DiskFaults(**faults), can_append)


def test_what_is_put_is_there_for_everybody_and_survives() -> None:
    shared = disk()
    store, other = SimStore(shared, "a"), SimStore(shared, "b")
    store.put("x/1", b"one")
    assert store.create("x/2", b"two")
    assert not other.create("x/2", b"three")
    shared.lose_power()
    assert [other.get(name) for name in other.list("x/")] == [b"one", b"two"]
    assert other.exists("x/1")
    assert not other.exists("x/3")
    other.delete("x/1")
    other.delete("x/1")
    assert store.list("") == ["x/2"]
    with pytest.raises(ObjectMissing, match="x/1"):
        store.get("x/1")


def test_synced_bytes_survive_a_loss_of_power_and_of_the_others_anything_may_be_left() -> None:
    lengths, holes = set(), 0
    for seed in range(300):
        shared = disk(seed)
        store = SimStore(shared)
        store.create("log", b"")
        store.append("log", b"s" * 10)
        store.sync("log")
        store.append("log", b"u" * 10)
        assert store.get("log") == b"s" * 10 + b"u" * 10
        shared.lose_power()
        left = store.get("log")
        assert left.startswith(b"s" * 10)
        lengths.add(len(left))
        holes += left[10:].strip(b"u") != b""
        shared.lose_power()
        assert store.get("log") == left  # what is left is durable
    assert lengths == set(range(10, 21))
    assert holes > 10


def test_the_worst_that_power_leaves_is_what_was_synced() -> None:
    shared = disk()
    store = SimStore(shared)
    store.create("a", b"1")
    store.append("a", b"2")
    store.sync("a")
    store.append("a", b"34")
    worst = SimStore(shared.after_worst_power_loss())
    assert worst.get("a") == b"12"
    assert store.get("a") == b"1234"


def test_a_loss_of_power_may_undo_a_deletion() -> None:
    seen = Counter[tuple[str, ...]]()
    for seed in range(50):
        shared = disk(seed)
        store = SimStore(shared)
        store.put("old", b"x")
        store.delete("old")
        shared.lose_power()
        seen[tuple(store.list(""))] += 1
    assert set(seen) == {(), ("old",)}


def test_what_was_deleted_does_not_rise_again_by_an_append() -> None:
    store = SimStore(disk())
    for late in (lambda: store.append("log", b"x"), lambda: store.sync("log")):
        with pytest.raises(ObjectMissing):
            late()


def test_a_sync_that_failed_may_be_hidden_by_the_next_one() -> None:
    lost = kept = 0
    for seed in range(200):
        shared = disk(seed, sync_errors=1.0)
        store = SimStore(shared)
        store.create("log", b"")
        store.append("log", b"abcdefgh")
        with pytest.raises(StoreError, match="durable"):
            store.sync("log")
        shared.is_calm = True
        store.sync("log")
        shared.lose_power()
        lost += store.get("log") != b"abcdefgh"
        kept += store.get("log") == b"abcdefgh"
    assert lost > 20
    assert kept > 100


def test_a_full_store_takes_nothing_and_may_have_written_a_part() -> None:
    shared = disk()
    store = SimStore(shared)
    lengths = set()
    for number in range(40):
        shared.is_full = False
        store.create(f"log {number}", b"")
        shared.is_full = True
        with pytest.raises(StoreFull):
            store.append(f"log {number}", b"abc")
        lengths.add(len(shared.files[f"log {number}"].data))
    assert lengths == {0, 1, 2}
    for refused in (store.put, store.create):
        with pytest.raises(StoreFull):
            refused("x", b"")
    store.delete("log 0")
    shared.is_full = False
    assert store.create("x", b"")


def test_a_bit_is_flipped_on_the_way_and_who_reads_again_reads_right() -> None:
    shared = disk(flips=1.0)
    store = SimStore(shared)
    store.put("x", b"\0" * 8)
    for _ in range(10):
        wrong = store.get("x")
        assert sum(byte.bit_count() for byte in wrong) == 1
        assert store.get("x") == b"\0" * 8
        assert store.get_part("x", 2, 3) == b"\0" * 3
        assert store.get_part("x", 7, 3) == b"\0"


def test_a_store_of_objects_may_do_later_what_it_said_had_failed() -> None:
    outcomes = Counter[str]()
    for seed in range(100):
        waiting: list[Callable[[], None]] = []
        shared = Disk(random.Random(seed), DiskFaults(errors=1.0), False, waiting.append)
        with pytest.raises(StoreError):
            SimStore(shared).create("x", b"data")
        was_there = "x" in shared.files
        for action in waiting:
            action()
        outcomes["done" if was_there else "later" if "x" in shared.files else "nothing"] += 1
    assert set(outcomes) == {"done", "later", "nothing"}


def test_a_store_of_objects_may_say_that_a_new_object_was_there() -> None:
    def create(seed: int) -> bool | None:
        try:
            return SimStore(disk(seed, can_append=False, errors=0.5)).create("x", b"data")
        except StoreError:
            return None

    assert {create(seed) for seed in range(50)} == {True, False, None}


def test_a_store_of_objects_cannot_append() -> None:
    with pytest.raises(AssertionError):
        SimStore(disk(can_append=False)).append("x", b"")


@pytest.mark.parametrize(("where", "left"), [(BEFORE, {0}), (MIDDLE, {0, 1, 2}), (AFTER, {3})])
def test_a_process_dies_in_any_operation_and_nothing_of_it_goes_on(where: str, left: set[int]) -> None:
    found = set()
    for seed in range(30):
        shared = disk(seed)
        store = SimStore(shared, "a")
        store.create("log", b"")
        store.dies_at = (2, where)
        with pytest.raises(Crashed):
            store.append("log", b"abc")
        for again in (store.sync, store.get, store.list, store.delete):
            with pytest.raises(Crashed):
                again("log")
        found.add(len(SimStore(shared, "b").get("log")))
    assert found == left


def test_others_go_on_before_any_operation() -> None:
    shared = disk()
    seen = []

    def meanwhile(store: SimStore, op: str, name: str) -> None:
        if op == "create":
            seen.append(SimStore(shared, "b").create(name, b"theirs"))

    store = SimStore(shared, "a", meanwhile)
    assert not store.create("term", b"mine")
    assert seen == [True]
    assert store.get("term") == b"theirs"


def test_a_write_may_be_seen_half_done() -> None:
    shared = disk(splits=1.0)
    lengths = []
    store = SimStore(shared, "a", lambda store, op, name: lengths.append(len(shared.files[name].data)))
    shared.put("log", b"")
    store.append("log", b"abcdefgh")
    assert lengths[0] == 0
    assert 0 < lengths[1] < 8
    assert bytes(shared.files["log"].data) == b"abcdefgh"
