"""The benchmarks: what they check while they measure, on little data."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from headrace.bench import durable, hot, recovery_time, snapshot_cost
from headrace.bench import http as over_http
from headrace.bench.senders import cut, send_on_time
from headrace.bench.stores import WatchedStore, file_system, folder_on_disk


def ignore(count: int) -> None:
    """No progress bar."""


def test_the_durable_engine_keeps_what_the_one_in_memory_has(tmp_path: Path) -> None:
    told: list[int] = []
    result = durable.durable(1, 500, 0.0, 5_000, 2, 0.2, tmp_path, told.append)
    assert sum(told) == durable.total(5_000, 2, 0.2)
    assert result["conserved"]
    assert result["same_after_restart"]
    assert result["fsync"]
    assert result["transactions_per_fsync"] > 0
    assert result["fsync_ms_median"] > 0
    assert min(result["committed_per_s"], result["non_durable_per_s"], result["p50_ms"]) > 0
    assert result["p50_ms"] <= result["p99_ms"]
    assert 0 < result["log_bytes_per_transaction"] < 100
    assert durable.summary(result).row_count
    assert not list(tmp_path.iterdir())


def test_the_durable_engine_is_measured_over_workers_too(tmp_path: Path) -> None:
    result = durable.durable(2, 500, 0.0, 2_000, 1, 0.1, tmp_path, ignore)
    assert (result["workers"], result["mode"]) == (2, "ordered")
    assert result["conserved"]
    assert result["same_after_restart"]


def test_snapshots_change_the_speed_only(tmp_path: Path) -> None:
    told: list[int] = []
    result = snapshot_cost.measure(2_000, 0.0, 5_000, 2, 1.2, tmp_path, told.append)
    assert sum(told) == snapshot_cost.total(2_000, 5_000, 2, 1.2)
    assert result["conserved"]
    assert result["bytes_per_snapshot"] > 0
    assert snapshot_cost.summary(result).row_count


def test_a_killed_app_is_back_with_all_that_was_answered(tmp_path: Path) -> None:
    result = recovery_time.measure(2_000, 3_000, 1, tmp_path, ignore)
    assert result["conserved"]
    assert result["total_ms"] >= result["load_ms"] > 0
    assert recovery_time.summary(result).row_count


def test_calls_over_http_are_all_there_and_counted(tmp_path: Path) -> None:
    told: list[int] = []
    result = over_http.measure(500, 0.3, 1, tmp_path, told.append)
    assert told == [1]
    assert result["conserved"]
    assert result["all_there"]
    assert (result["clients"], result["batch"], result["durable"]) == (32, 100, True)
    assert min(result[name] for name in over_http.FIGURES) > 0
    assert result["p50_ms"] <= result["p99_ms"]
    assert result["batched_per_s"] > result["calls_per_s"]
    assert over_http.summary(result).row_count
    assert not list(tmp_path.iterdir())


def test_hot_counters_are_gathered_and_give_what_the_serial_engine_gives() -> None:
    told: list[int] = []
    result = hot.hot(2, 3_000, 1, told.append)
    assert sum(told) == 2 * 2 * 3_000
    for case in (result[name] for name in hot.CASES):
        for each in (case, case["cold"]):
            assert each["same_as_serial"]
            assert each["gathered"]
            assert 1 <= each["runs_per_call"] <= 4
            assert each["longest_epoch_ms"] > 0 < each["its_serial_ms"]
    assert hot.summary(result).row_count


def test_the_time_of_a_request_runs_from_when_it_was_due() -> None:
    """A gate that is slow makes all later ones late, though each of them is answered at once."""

    def submit(number: int) -> Future[Any]:
        if number == 0:
            time.sleep(0.1)
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    laps_s = send_on_time(5, 1_000, submit).laps_s
    assert len(laps_s) == 5
    assert laps_s[0] >= 0.1
    assert all(lap_s > 0.09 for lap_s in laps_s)


def test_batches_hold_all_pairs_in_their_order() -> None:
    parts = cut([(1, 2), (3, 4), (5, 6)], 2)
    assert parts == [([1, 3], [(2,), (4,)]), ([5], [(6,)])]


def test_a_watched_store_counts_what_is_written(tmp_path: Path) -> None:
    store = WatchedStore(tmp_path / "store")
    store.create("log/a", b"123")
    store.append("log/a", b"45")
    store.sync("log/a")
    store.put("state/x", b"1234")
    store.create("snapshots/0000000000000001-00000001-0001.json", b"{}")
    store.create("snapshots/0000000000000001-00000001-0002.json", b"{}")
    assert store.bytes == {"log": 5, "state": 4, "snapshots": 4}
    assert (len(store.syncs_s), store.state_bytes, len(store.snapshots)) == (1, [4], 1)
    store.forget()
    assert (store.bytes, store.syncs_s, store.state_bytes, store.snapshots) == ({}, [], [], set())


def test_the_store_of_a_benchmark_is_gone_afterwards(tmp_path: Path) -> None:
    with folder_on_disk(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert file_system(folder)
        (folder / "file").write_text("x")
    assert not folder.exists()
