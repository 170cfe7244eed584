"""The benchmark through Spark: the stream it is made of, and what it checks while it measures, on little data."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench import cores
from headrace.bench.pace import DueRows, PaceFile, rows_due, transfers
from headrace.bench.through import NEAR, Durations, search, summary, through
from headrace.spark.sources.paced import Stream
from headrace.spark.tasks import freeze_gc


def test_a_row_is_the_same_transfer_whoever_makes_it() -> None:
    src, dst = transfers(0, 10_000, 7)
    again = [transfers(at, at + 1, 7) for at in range(0, 10_000, 997)]
    assert [(int(one[0]), int(other[0])) for one, other in again] == [
        (int(src[at]), int(dst[at])) for at in range(0, 10_000, 997)
    ]
    assert not (src == dst).any()
    assert set(src.tolist()) == set(dst.tolist()) == set(range(7))
    counts = Counter(zip(src.tolist(), dst.tolist(), strict=True))
    assert len(counts) == 7 * 6
    assert max(counts.values()) < 2 * 10_000 / 42  # each as likely as any other


def test_two_accounts_pay_each_other() -> None:
    src, dst = transfers(5, 105, 2)
    assert (src + dst == 1).all()


def test_a_row_is_due_when_the_schedule_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("time.time", lambda: now)
    pace = PaceFile(tmp_path / "schedule")
    assert pace.set_rate(100.0) == 0
    now += 2.0
    assert pace.set_rate(10.0) == 200  # rows 0 to 199 were due
    now += 1.0
    assert pace.rows() == 210
    pace.add_rows(5)
    assert pace.rows() == 215
    now += 50.0
    assert pace.rows() == 215
    due = pace.due_s(0, 215)
    assert np.allclose(due[:200], 1_000 + np.arange(1, 201) / 100)
    assert np.allclose(due[200:210], 1_002 + np.arange(1, 11) / 10)
    assert np.allclose(due[210:], 1_003)


def test_the_stream_gives_what_is_due_and_no_more_than_it_may(tmp_path: Path) -> None:
    pace = PaceFile(tmp_path / "schedule")
    pace.add_rows(1_000)
    stream = Stream({"path": str(pace.path), "keys": "10", "partitions": "3", "maxRowsPerBatch": "300"})
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert end == {"row": 300}
    parts = stream.partitions(start, end)
    assert len(parts) == 3
    rows = [row for part in parts for batch in stream.read(part) for row in batch.to_pylist()]
    src, dst = transfers(0, 300, 10)
    assert rows == [{"src": int(one), "dst": int(other)} for one, other in zip(src, dst, strict=True)]
    assert stream.latestOffset({"row": 900}, stream.getDefaultReadLimit()) == {"row": 1_000}
    assert rows_due(DueRows(10.0, 5.0, 7), 9.0) == 7  # a clock that went back takes nothing away


@pytest.mark.parametrize("limit", [900.0, 41_234.0, 99_999.0, 100_000.0, 161_000.0, 390_000.0])
def test_the_search_comes_near_the_highest_rate(limit: float) -> None:
    tried: list[float] = []

    def attempt(per_s: float) -> bool:
        tried.append(per_s)
        return per_s <= limit

    found = search(attempt, 100_000, 40)
    assert found == max(rate for rate in tried if rate <= limit)
    assert found <= limit < found * (1 + NEAR)
    assert len(tried) < 25


def test_the_search_ends_when_nothing_is_good_enough() -> None:
    tried: list[float] = []
    assert search(lambda per_s: bool(tried.append(per_s)), 100_000, 5) == 0.0
    assert len(tried) == 5
    assert tried == sorted(tried, reverse=True)
    assert not math.isinf(tried[0])


def test_processor_time_is_told_by_what_it_is_for() -> None:
    before = cores.used("nobody")
    sum(range(3_000_000))
    after = cores.used("nobody")
    used = cores.between(before, after, 1.0)
    if before:
        assert after["driver"] > before["driver"] or used["driver"] >= 0
        assert set(used) >= {"driver"}


def test_a_process_of_the_user_is_left_alone() -> None:
    import gc

    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    freeze_gc()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (threshold, frozen)


def test_every_row_comes_back_and_all_adds_up(spark: Any, tmp_path: Path) -> None:
    told: list[int] = []
    plan = Durations(seconds=1.0, warm_up_s=1.0, tiny_s=1.0, first_per_s=1_000, steps_max=1, naive_rows=500)
    result = through(100, plan, tmp_path, told.append, spark)
    assert sum(told) == plan.total()
    assert result["conserved"]
    assert result["same_as_sums"]
    assert result["all_delivered"]
    assert [rate for rate, _ in result["tried"]] == [1_000]
    assert result["naive_per_s"] > 0
    assert result["fixed_ms"] > 0
    assert result["replies_fixed_ms"] > 0
    if result["committed_per_s"]:  # not on a machine that is busy with other things
        stages = result["stages_ms"]
        assert list(stages) == ["wait", "plan", "write", "close", "intake", "engine", "keep", "see", "deliver"]
        assert 0 < result["p50_ms"] <= result["p99_ms"]
        assert min(stages.values()) > -100  # times of files and of Spark are rounded; on a busy machine they differ
    assert summary(result).row_count
    assert not list(tmp_path.iterdir())
