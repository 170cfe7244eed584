"""What snapshots cost: YCSB-T over many entities, with a snapshot every second and with none, in one run.

Two durable engines hold the same entities; laps of the same transfers alternate. Throughput is measured with batches, a
few in flight at a time; latency with small batches at their due times, at a rate below the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.senders import AT_ONCE_DURABLE, BATCH, Stopwatch, cut, send, send_batches_on_time
from headrace.bench.stores import NEVER_US, WatchedStore, file_system, folder_on_disk, load, wait_until_kept
from headrace.config import Config
from headrace.runtime.inprocess import Runtime

INTERVAL_US = 1_000_000
RATE_PER_S = 50_000
SMALL_BATCH = 250  # 200 of them per second
WANTED_LOSS = 0.10


class SnapshotLap(NamedTuple):
    per_s: float
    snapshots: int  # that were finished during the lap


class Side:
    """One of the two engines."""

    def __init__(self, folder: Path, interval_us: int, entities: int) -> None:
        self.store = WatchedStore(folder)
        config = Config(snapshot_interval_us=interval_us, replay_transactions_max=NEVER_US)
        self.runtime = Runtime(ycsb.app, config, store=self.store)
        self.laps: list[SnapshotLap] = []
        self.latencies = Stopwatch()
        load(self.runtime, entities)
        self.settle()
        self.store.forget()

    def settle(self) -> None:
        """Finish the work of one lap before the next one begins."""
        wait_until_kept(self.runtime)
        self.runtime.snapshot()

    def run(self, pairs: list[tuple[int, int]]) -> None:
        before = len(self.store.snapshots)
        _, elapsed, _ = send(self.runtime, ycsb.transfer, cut(pairs, BATCH), AT_ONCE_DURABLE)
        self.laps.append(SnapshotLap(len(pairs) / elapsed, len(self.store.snapshots) - before))
        self.settle()

    def run_on_time(self, pairs: list[tuple[int, int]]) -> None:
        timed = send_batches_on_time(self.runtime, ycsb.transfer, cut(pairs, SMALL_BATCH), RATE_PER_S / SMALL_BATCH)
        self.latencies.laps_s += timed.laps_s
        self.settle()


def measure(
    entities: int,
    theta: float,
    transactions: int,
    repeats: int,
    seconds: float,
    where: Path | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """The whole benchmark. `transactions` is the number per lap; `seconds` is how long latency is measured, on each
    side."""
    with folder_on_disk(where) as folder:
        sides = [Side(folder / "with", INTERVAL_US, entities), Side(folder / "without", NEVER_US, entities)]
        try:
            progress(2 * entities)
            for number in range(1, repeats + 1):
                pairs = ycsb.transfers(entities, theta, transactions, number)
                for side in sides if number % 2 else reversed(sides):
                    side.run(pairs)
                    progress(transactions)
            for number in range(1, repeats + 1):
                pairs = ycsb.transfers(entities, theta, round(RATE_PER_S * seconds / repeats), -number)
                for side in sides if number % 2 else reversed(sides):
                    side.run_on_time(pairs)
                    progress(len(pairs))
            states = [side.runtime.state(ycsb.account) for side in sides]
        finally:
            for side in sides:
                side.runtime.close()
        kind = file_system(folder)
    taken, without = sides
    pairs_of_laps = list(zip(taken.laps, without.laps, strict=True))
    return {
        "workload": "ycsb-t",
        "entities": entities,
        "zipf": theta,
        "transactions": transactions,
        "repeats": repeats,
        "snapshot_interval_s": INTERVAL_US / 1e6,
        "file_system": kind,
        "committed_per_s": round(median(lap.per_s for lap in taken.laps)),
        "without_snapshots_per_s": round(median(lap.per_s for lap in without.laps)),
        "loss": round(1 - median(one.per_s / other.per_s for one, other in pairs_of_laps), 3),
        "latency_of": f"a batch of {SMALL_BATCH}, {RATE_PER_S} transactions per second",
        "p50_ms": round(taken.latencies.percentile_ms(50), 3),
        "p99_ms": round(taken.latencies.percentile_ms(99), 3),
        "without_snapshots_p50_ms": round(without.latencies.percentile_ms(50), 3),
        "without_snapshots_p99_ms": round(without.latencies.percentile_ms(99), 3),
        "snapshots": sum(lap.snapshots for lap in taken.laps),
        "bytes_per_snapshot": round(median(taken.store.state_bytes or [0])),
        "conserved": all(sum(state.values()) == entities * ycsb.BALANCE for state in states) and states[0] == states[1],
    }


def total(entities: int, transactions: int, repeats: int, seconds: float) -> int:
    """What `progress` counts up to."""
    return 2 * (entities + transactions * repeats + round(RATE_PER_S * seconds / repeats) * repeats)


def summary(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"YCSB-T, {result['entities']:,} accounts, zipf {result['zipf']}, with a log on {result['file_system']}"
    )
    every = f"a snapshot every {result['snapshot_interval_s']:g} s"
    for column in ("", every, "none", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    per_s, other = f"{result['committed_per_s']:,.0f}", f"{result['without_snapshots_per_s']:,.0f}"
    table.add_row("committed per second", per_s, other, "")
    table.add_row("lost to snapshots", f"{result['loss']:.1%}", "", f"under {WANTED_LOSS:.0%}")
    for percent in (50, 99):
        mine, theirs = result[f"p{percent}_ms"], result[f"without_snapshots_p{percent}_ms"]
        table.add_row(f"{result['latency_of']}: p{percent} ms", f"{mine:.2f}", f"{theirs:.2f}", "")
    table.add_row("snapshots", str(result["snapshots"]), "0", "")
    table.add_row("bytes per snapshot", f"{result['bytes_per_snapshot']:,}", "", "")
    table.add_row("conserved", "yes" if result["conserved"] else "NO", "", "yes")
    return table
