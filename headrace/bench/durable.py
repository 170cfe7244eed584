"""YCSB-T with a log: the durable engine against one in memory, in one run.

Both get the same batches through the same client, in laps that alternate, so that both see the same machine. Several
batches are in flight at a time: epochs run while the log syncs. A lap ends with its last answer. The replies that are
kept for repeated requests may reach the store a little later; the delay is reported.

Latency is measured with an open loop: calls are sent one by one when they are due, whether or not earlier ones have
returned. At the end the store is copied as it is, as if power had failed, and an engine starts with the copy.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.senders import AT_ONCE_DURABLE, BATCH, Parts, Stopwatch, cut, send, send_calls_on_time
from headrace.bench.stores import WatchedStore, file_system, folder_on_disk, wait_until_kept
from headrace.runtime.cluster import Cluster
from headrace.runtime.driver import Driver
from headrace.runtime.inprocess import Runtime

LAP = 100_000  # transfers, on each of the two engines
RATE_PER_S = 1_000
WANTED_RATIO = 0.85
WANTED_P99_MS = 50


class DurableLap(NamedTuple):
    committed: int
    elapsed_s: float
    lag_s: float  # until the replies were in the store, too


def begin(workers: int, store: Any = None) -> Driver:
    if workers == 1:
        return Runtime(ycsb.app, store=store)
    return Cluster("headrace.bench.ycsb:app", workers, mode="ordered", store=store)


def lap(runtime: Driver, parts: Parts) -> DurableLap:
    answers, elapsed, _ = send(runtime, ycsb.transfer, parts, AT_ONCE_DURABLE)
    lag = Stopwatch()
    with lag:
        wait_until_kept(runtime)
    return DurableLap(sum(len(answer.tids) - len(answer.failures) for answer in answers), elapsed, lag.laps_s[0])


@contextlib.contextmanager
def accounts_log_changes(is_on: bool) -> Iterator[None]:
    was, ycsb.account.changes = ycsb.account.changes, is_on
    try:
        yield
    finally:
        ycsb.account.changes = was


def durable(
    workers: int,
    keys: int,
    theta: float,
    transactions: int,
    repeats: int,
    seconds: float,
    where: Path | None,
    progress: Callable[[int], None],
    changes: bool = False,
) -> dict[str, Any]:
    """The whole benchmark. `transactions` is the number per repeat on each side; with `changes` the accounts log
    theirs."""
    laps: list[tuple[DurableLap, DurableLap]] = []
    with accounts_log_changes(changes), folder_on_disk(where) as folder:
        store = WatchedStore(folder / "store")
        with begin(workers) as plain, begin(workers, store) as kept:
            sides = (plain, kept)
            everybody = list(range(keys))
            for runtime in sides:
                runtime.client.map(ycsb.open_account, everybody, [(ycsb.BALANCE,)] * keys)
                send(runtime, ycsb.transfer, cut(ycsb.transfers(keys, theta, BATCH, 0), BATCH))
            wait_until_kept(kept)
            store.forget()
            for number in range(1, repeats + 1):
                pairs = ycsb.transfers(keys, theta, transactions, number)
                for at in range(0, transactions, LAP):
                    parts = cut(pairs[at : at + LAP], BATCH)
                    first, second = sides if len(laps) % 2 == 0 else (kept, plain)
                    both = {first: lap(first, parts), second: lap(second, parts)}
                    laps.append((both[plain], both[kept]))
                    progress(2 * len(pairs[at : at + LAP]))
            written, syncs = dict(store.bytes), len(store.syncs_s)
            rows = transactions * repeats
            store.forget()
            latencies = [latency(runtime, keys, theta, seconds) for runtime in sides]
            syncs_s = list(store.syncs_s)
            progress(2 * round(RATE_PER_S * seconds))
            kept.snapshot()  # so that none is in progress when the store is copied, and the log continues after it
            for runtime in sides:
                lap(runtime, cut(ycsb.transfers(keys, theta, BATCH, -1), BATCH))
            shutil.copytree(store.root, folder / "copy")
            state, expected = kept.state(ycsb.account), plain.state(ycsb.account)
            mode = kept.metrics()["mode"]
        with begin(workers, folder / "copy") as again, begin(workers, store.root) as after_close:
            states = [state, again.state(ycsb.account), after_close.state(ycsb.account)]
        kind = file_system(folder)
    return {
        "workload": "ycsb-t",
        "keys": keys,
        "zipf": theta,
        "transactions": transactions,
        "repeats": repeats,
        "workers": workers,
        "mode": mode,
        "durable": True,
        "changes": ycsb.account.changes,
        "fsync": True,
        "file_system": kind,
        "committed_per_s": round(median(one.committed / one.elapsed_s for _, one in laps)),
        "non_durable_per_s": round(median(one.committed / one.elapsed_s for one, _ in laps)),
        "ratio": round(median(plain.elapsed_s / kept.elapsed_s for plain, kept in laps), 3),
        "latency_of": f"a call, {RATE_PER_S} per second",
        "p50_ms": round(latencies[1].percentile_ms(50), 3),
        "p99_ms": round(latencies[1].percentile_ms(99), 3),
        "non_durable_p50_ms": round(latencies[0].percentile_ms(50), 3),
        "non_durable_p99_ms": round(latencies[0].percentile_ms(99), 3),
        "fsync_ms_median": round(1e3 * median(syncs_s), 3),
        "transactions_per_fsync": round(rows / syncs),
        "replies_lag_ms": round(1e3 * median(one.lag_s for _, one in laps), 3),
        "log_bytes_per_transaction": round(written["log"] / rows, 1),
        "replies_bytes_per_transaction": round(written["replies"] / rows, 1),
        "changes_bytes_per_transaction": round(written.get("changes", 0) / rows, 1),
        "conserved": all(sum(each.values()) == keys * ycsb.BALANCE for each in states),
        "same_after_restart": all(each == expected for each in states),
    }


def latency(runtime: Driver, keys: int, theta: float, seconds: float) -> Stopwatch:
    pairs = ycsb.transfers(keys, theta, max(1, round(RATE_PER_S * seconds)), 7)
    return send_calls_on_time(runtime, ycsb.transfer, pairs, RATE_PER_S)


def total(transactions: int, repeats: int, seconds: float) -> int:
    """What `progress` counts up to."""
    return 2 * (transactions * repeats + round(RATE_PER_S * seconds))


def summary(result: dict[str, Any]) -> Table:
    who = "one worker, serial" if result["workers"] == 1 else f"{result['workers']} workers, {result['mode']}"
    table = Table(
        title=f"YCSB-T, {result['keys']:,} accounts, zipf {result['zipf']}, {who}, log on {result['file_system']}"
        f"{', changes logged' if result['changes'] else ''}"
    )
    for column in ("", "with a log", "in memory", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    per_s, other_per_s = f"{result['committed_per_s']:,.0f}", f"{result['non_durable_per_s']:,.0f}"
    table.add_row("committed per second", per_s, other_per_s, "")
    table.add_row("of that in memory", f"{result['ratio']:.0%}", "", f"at least {WANTED_RATIO:.0%}")
    for percent, wanted in ((50, ""), (99, f"under {WANTED_P99_MS}")):
        mine, other = result[f"p{percent}_ms"], result[f"non_durable_p{percent}_ms"]
        table.add_row(f"{result['latency_of']}: p{percent} ms", f"{mine:.2f}", f"{other:.2f}", wanted)
    table.add_row("a sync of the log, ms", f"{result['fsync_ms_median']:.2f}", "", "")
    table.add_row("log, bytes per transaction", f"{result['log_bytes_per_transaction']}", "", "")
    table.add_row("replies, bytes per transaction", f"{result['replies_bytes_per_transaction']}", "", "")
    if result["changes"]:
        table.add_row("changes, bytes per transaction", f"{result['changes_bytes_per_transaction']}", "", "")
    for title, name in (("conserved", "conserved"), ("the same after a restart", "same_after_restart")):
        table.add_row(title, "yes" if result[name] else "NO", "", "yes")
    return table
