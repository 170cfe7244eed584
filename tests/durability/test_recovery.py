"""Snapshots and recovery: what was acknowledged is there once, in its types, and only replies wait for the disk."""

from __future__ import annotations

import decimal
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import Config
from headrace.durability.reading.store_reader import StoreReader
from headrace.runtime.inprocess import Runtime
from tests.core.things import add, app, put
from tests.durability.hand import Hand, after_power_loss, memory
from tests.waiting import eventually

COUNT: list[Any] = [(add, "n", 1)] * 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ran", range(4))
def test_b5_a_snapshot_loses_no_transaction_that_has_not_run(ran: int, workers: int) -> None:
    """Epochs of two: some have run when it is taken, others wait, and the last row is not even in a closed one. Only
    those that ran are in it; it says that the others are still to be read."""
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2, epoch_interval_us=1_000, epochs_in_flight_max=1)
    hand.send("five", COUNT)
    hand.sync()
    for _ in range(40):
        if hand.core.last is not None and hand.core.last.number >= ran:
            break
        hand.deliver()
    hand.core.journal.wanted.append("token")
    while (hand.deliver() or hand.sync() or hand.work()) and "token" not in hand.snapshots:
        pass
    hand = Hand(store, app, workers)
    assert [reply.result for reply in hand.run("five", COUNT)] == [1, 2, 3, 4, 5]
    assert hand.state() == {("thing", "n"): 5}


def test_b6_snapshots_go_on_after_an_idle_hour(tmp_path: Path) -> None:
    """The thread that writes them waits for work, however long that takes."""
    now_us = [0]
    with Runtime(app, clock=lambda: now_us[0], store=tmp_path) as runtime:
        for number in range(1, 8):
            now_us[0] += 3_600_000_000
            runtime.client.call(add, "n", 1)
            assert runtime.snapshot() == {"epoch": number}
    manifests = StoreReader(tmp_path, app).snapshots.manifests()
    assert {manifest.epoch for manifest in manifests} >= {5, 6, 7}


@pytest.mark.parametrize("workers", [0, 2])
def test_b7_a_second_failure_before_the_next_snapshot_restores_what_the_first_did(workers: int) -> None:
    store = memory()
    hand = Hand(store, app, workers)
    replies = hand.run("five", COUNT)
    hand.take_snapshot()
    hand.run("more", COUNT)
    for _ in range(3):
        hand = Hand(store, app, workers)
        hand.compute()
    assert hand.state() == {("thing", "n"): 10}
    assert hand.run("five", COUNT) == replies
    assert hand.run("again", COUNT)[0].tid == 11


def test_b8_compaction_goes_by_epoch_and_not_by_name() -> None:
    """Nine, ten, eleven: as text, "9" comes after "11"."""
    store = memory()
    hand = Hand(store, app)
    for epoch in range(1, 25):
        hand.run(f"batch{epoch}", [(put, "a", epoch), (put, f"b{epoch % 3}", epoch)])
        hand.take_snapshot()
        assert hand.opened_store.snapshots.compact(hand.opened_store.log.term, hand.opened_store.fingerprint) is None, (
            "done by now"
        )
        again = Hand(after_power_loss(store), app)
        assert not again.core.backlog, "nothing is replayed"
        assert again.state()["thing", "a"] == epoch
        assert again.state()["thing", f"b{epoch % 3}"] == epoch
    assert hand.opened_store.snapshots.manifests()[-1].layers[0].epoch > 1, "some were folded"


@pytest.mark.parametrize("workers", [0, 2])
def test_b10_a_recovery_before_the_first_record_ends(workers: int) -> None:
    store = memory()
    for _ in range(3):
        hand = Hand(store, app, workers)
        hand.settle()
    assert hand.state() == {}
    assert hand.run("five", COUNT)[4].result == 5


class Slow:
    """A store whose syncs, or snapshots, wait until they are let go."""

    def __init__(self, store: Any, operation: str, prefix: str) -> None:
        self.store, self.url, self.can_append = store, store.url, store.can_append
        self.operation, self.prefix = operation, prefix
        self.go, self.reached = threading.Event(), threading.Event()

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self.store, operation)
        if operation != self.operation:
            return method

        def wait(name: str, *rest: Any) -> Any:
            if name.startswith(self.prefix):
                self.reached.set()
                assert self.go.wait(30)
            return method(name, *rest)

        return wait


def test_b11_nothing_is_acknowledged_before_it_is_synced_and_b12_nobody_waits_for_the_disk_but_replies() -> None:
    """The engine takes in and runs what comes while the log is synced. Whoever asks for state gets it after that."""
    store = Slow(memory(), "sync", "log/")
    with Runtime(app, store=store) as runtime:  # type: ignore[arg-type]
        first = runtime.client.submit("first", [(add, "n", 1)], wait=False)
        assert store.reached.wait(30)
        second = runtime.client.submit("second", [(add, "n", 1)], wait=False)
        eventually(lambda: runtime.metrics()["committed"] >= 2, pause_s=0.001)
        assert not first.done()
        assert not second.done()
        assert store.store.disk.after_worst_power_loss().files.keys() == store.store.disk.files.keys()
        store.go.set()
        assert [future.result(30).results for future in (first, second)] == [[1], [2]]
        assert runtime.state("thing") == {"n": 2}


def test_b12_calls_are_answered_while_a_snapshot_is_written() -> None:
    store = Slow(memory(), "create", "snapshots/")
    with Runtime(app, Config(snapshot_interval_us=1), store=store) as runtime:  # type: ignore[arg-type]
        assert runtime.client.call(add, "n", 1) == 1
        assert store.reached.wait(30)
        assert [runtime.client.call(add, "n", 1) for _ in range(20)] == list(range(2, 22))
        assert runtime.state("thing") == {"n": 21}
        store.go.set()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("folds", [False, True], ids=["one snapshot", "folded"])
def test_b13_types_survive_a_snapshot(workers: int, folds: bool) -> None:
    odd: list[Any] = [(1, 2), [(), {"a": (b"x",)}], b"\xc1", -0.0, 1 << 63, None, decimal.Decimal("1.0"), True]
    store = memory(can_append=False)
    hand = Hand(store, app, workers)
    hand.run("values", [(put, f"k{at}", value) for at, value in enumerate(odd)])
    for number in range(9 if folds else 1):
        hand.run(f"other{number}", [(put, "other", number)])
        hand.take_snapshot()
    hand = Hand(store, app, workers)
    state = hand.state()
    assert [repr(state["thing", f"k{at}"]) for at in range(len(odd))] == list(map(repr, odd))
