"""YCSB-T through Spark: the highest rate of transfers, each a durable transaction, with replies within a second.

spark_stream.py has the stream and measures its rows. The highest rate is found by search. The naive loop, which a Spark
user would write by hand, gets the same rows in the same run. It stores nothing, sends no replies, and loses all state
when it stops.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import cores, ycsb
from headrace.bench.pace import PaceFile
from headrace.bench.spark_stream import STAGES, StreamProgress, StreamUnderTest, Window
from headrace.bench.stores import file_system, folder_on_disk
from headrace.config import Config

WANTED_PER_S, WANTED_P99_MS, WANTED_RATIO, WANTED_FIXED_MS = 100_000, 1_000, 1 / 6, 250
WARM_UP_PER_S, TINY_PER_S = 100_000, 200
SETTLE_S, AFTER_S = 2.0, 1.0  # at a new rate, before rows count; and after the last one that does
STEP, STEPS_MAX, NEAR = 1.3, 7, 0.06  # of the search: how far apart, how many, and when it is close enough
NAIVE_ROWS, NAIVE_BATCHES, NAIVE_WARM = 200_000, 12, 4
PATIENCE_S = 120.0

SETTINGS = {"spark_driver_memory": "1g", "spark_sql_streaming_numRecentProgressUpdates": "2000"}
# A JVM that lives for minutes on few cores: its second compiler and its second collector cost more than they gain.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Durations(NamedTuple):
    """How long the parts of the benchmark take."""

    seconds: float = 8.0  # at each rate
    warm_up_s: float = 20.0  # a JVM is slow at first
    tiny_s: float = 5.0
    first_per_s: float = WANTED_PER_S
    steps_max: int = STEPS_MAX
    naive_rows: int = NAIVE_ROWS

    def total(self) -> int:
        """What `progress` counts up to."""
        return self.steps_max + 3


class Tried(NamedTuple):
    per_s: float
    window: Window | None  # None: it fell far behind
    cores: dict[str, float]
    batch_rows: float

    @property
    def is_good(self) -> bool:
        """In time, and the output keeps up with the input."""
        return self.window is not None and self.window.p99_ms < WANTED_P99_MS


def through(
    keys: int,
    plan: Durations,
    where: Path | None,
    progress: Callable[[int], None],
    spark: Any = None,
    config: Config | None = None,
) -> dict[str, Any]:
    """The whole benchmark, in its own session unless one is given."""
    from headrace.spark import session

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    made = session("headrace-bench", java_options=JAVA_OPTIONS, **SETTINGS) if spark is None else spark
    try:
        with folder_on_disk(where) as folder:
            return measure(made, folder, keys, plan, progress, config) | {"load_before": round(load, 1)}
    finally:
        if spark is None:
            made.stop()


def measure(
    spark: Any, folder: Path, keys: int, plan: Durations, progress: Callable[[int], None], config: Config | None
) -> dict[str, Any]:
    stream = StreamUnderTest(spark, folder, keys, config=config)
    try:
        stream.run(min(WARM_UP_PER_S, plan.first_per_s), plan.warm_up_s)
        progress(1)
        tiny, fixed_ms, replies_fixed_ms = of_tiny(stream, plan)
        progress(1)
        tried: list[Tried] = []

        def attempt(per_s: float) -> bool:
            tried.append(at_rate(stream, per_s, plan.seconds))
            progress(1)
            return tried[-1].is_good

        search(attempt, plan.first_per_s, plan.steps_max)
        progress(plan.steps_max - len(tried))
        checks = stream.checks()
    finally:
        stream.close()
    naive_per_s = naive(spark, folder / "naive", keys, plan.naive_rows)
    progress(1)
    best = max(tried, key=lambda each: (each.is_good, each.per_s if each.is_good else -each.per_s))
    window = best.window
    return {
        "workload": "ycsb-t",
        "through": "spark",
        "keys": keys,
        "zipf": 0.0,
        "workers": 1,
        "mode": "serial",
        "durable": True,
        "fsync": True,
        "changes": False,
        "file_system": file_system(folder),
        "in_time": best.is_good,  # whether any rate was; if not, the figures are those of the lowest rate
        "rate_per_s": round(best.per_s),
        "committed_per_s": 0 if window is None else round(window.per_s),
        "latency_of": "a row, from when it is due to the end of the micro-batch that delivers its reply",
        "p50_ms": None if window is None else round(window.p50_ms, 1),
        "p99_ms": None if window is None else round(window.p99_ms, 1),
        "naive_per_s": round(naive_per_s),
        "ratio": 0.0 if window is None else round(window.per_s / naive_per_s, 3),
        "fixed_ms": round(fixed_ms, 1),
        "replies_fixed_ms": round(replies_fixed_ms, 1),
        "tiny_p50_ms": None if tiny is None else round(tiny.p50_ms, 1),
        "rows_per_batch": round(best.batch_rows),
        "stages_ms": {} if window is None else window.stages_ms,
        "cores": best.cores,
        "tried": [[round(each.per_s), None if each.window is None else round(each.window.p99_ms, 1)] for each in tried],
        **checks,
    }


def of_tiny(stream: StreamUnderTest, plan: Durations) -> tuple[Window | None, float, float]:
    """Micro-batches with almost no rows: the fixed cost of each, in both queries."""
    before = [len(each.look()) for each in (stream.calls, stream.replies)]
    window = stream.run(TINY_PER_S, plan.tiny_s)
    costs = [
        median(batch.took_ms["triggerExecution"] for batch in each.look()[count:])
        for each, count in zip((stream.calls, stream.replies), before, strict=True)
    ]
    return window, costs[0], costs[1]


def at_rate(stream: StreamUnderTest, per_s: float, seconds: float) -> Tried:
    engine, count = stream.runtime._thread.name, len(stream.calls.look())
    before, began = cores.used(engine), time.perf_counter()
    window = stream.run(per_s, SETTLE_S + seconds + AFTER_S, (SETTLE_S, SETTLE_S + seconds))
    used = cores.between(before, cores.used(engine), time.perf_counter() - began)
    batches = stream.calls.look()[count:]
    return Tried(per_s, window, used, sum(each.rows for each in batches) / max(1, len(batches)))


def search(attempt: Callable[[float], bool], first: float, steps_max: int) -> float:
    """The highest rate that is good, as close as a few attempts get; 0 if there is none."""
    good, bad, rate = 0.0, math.inf, first
    for _ in range(steps_max):
        if attempt(rate):
            good = rate
        else:
            bad = rate
        if bad <= good * (1 + NEAR):
            break
        middle = good * STEP if math.isinf(bad) else bad / STEP if not good else math.sqrt(good * bad)
        rate = float(f"{middle:.3g}")
    return good


# --- by hand ----------------------------------------------------------------------------------------------------------


def naive(spark: Any, folder: Path, keys: int, rows: int) -> float:
    """The rate of the loop over a dict, in rows per second."""
    from headrace.spark.sources.paced import PacedSource

    folder.mkdir()
    spark.dataSource.register(PacedSource)
    pace = PaceFile(folder / "schedule.json")
    pace.add_rows(rows * NAIVE_BATCHES)
    balances = dict.fromkeys(range(keys), ycsb.BALANCE)

    def transfer(frame: Any, _: int) -> None:
        table = frame.toArrow()
        for src, dst in zip(table["src"].to_numpy().tolist(), table["dst"].to_numpy().tolist(), strict=True):
            balance = balances[src]
            if balance >= 1:
                balances[src] = balance - 1
                balances[dst] += 1

    source = spark.readStream.format("headrace.paced").options(keys=keys, maxRowsPerBatch=rows).load(str(pace.path))
    writer = source.writeStream.foreachBatch(transfer).option("checkpointLocation", str(folder / "checkpoint"))
    progress = StreamProgress(writer.start())
    try:
        until = time.time() + PATIENCE_S
        while len(progress.look()) < NAIVE_BATCHES:
            progress.check()
            if time.time() > until:
                raise TimeoutError(f"{len(progress.batches)} of {NAIVE_BATCHES} batches in {PATIENCE_S:.0f} s")
            time.sleep(0.2)
    finally:
        progress.query.stop()
    assert sum(balances.values()) == keys * ycsb.BALANCE
    batches = progress.batches[NAIVE_WARM:NAIVE_BATCHES]
    return sum(each.rows for each in batches) / (batches[-1].ended_s - batches[0].began_s)


# --- for people -------------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"YCSB-T through Spark, {result['keys']:,} accounts, one worker, serial, log on {result['file_system']}"
    )
    for column in ("", "measured", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("committed per second", f"{result['committed_per_s']:,}", f"at least {WANTED_PER_S:,}")
    for percent, wanted in ((50, ""), (99, f"under {WANTED_P99_MS:,}")):
        table.add_row(f"due to delivered: p{percent} ms", told(result[f"p{percent}_ms"]), wanted)
    table.add_row("the hand-written loop, per second", f"{result['naive_per_s']:,}", "")
    table.add_row("of that", f"{result['ratio']:.0%}", f"at least {WANTED_RATIO:.0%}")
    table.add_row("an almost empty micro-batch, ms", told(result["fixed_ms"]), f"under {WANTED_FIXED_MS}")
    table.add_row("one of the replies, ms", told(result["replies_fixed_ms"]), "")
    table.add_row("rows of a micro-batch", f"{result['rows_per_batch']:,}", "")
    for name in ("conserved", "same_as_sums", "all_delivered"):
        table.add_row(name.replace("_", " "), "yes" if result[name] else "NO", "yes")
    table.add_section()
    for name, what in STAGES.items():
        table.add_row(f"{what}, ms", told(result["stages_ms"].get(name)), "")
    table.caption = "cores: " + ", ".join(f"{name} {used}" for name, used in result["cores"].items())
    return table


def told(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}"
