"""Whether a cluster that reports it is up is up: many starts, and how soon after each of them the first batch is
answered.

The batch moves money between accounts of all workers, so each worker needs every other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.table import Table

from headrace.bench import ycsb
from headrace.runtime.cluster import Cluster

ACCOUNTS = 60
WANTED_MS = 300


def measure(starts: int, workers: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """The whole benchmark."""
    up_ms, first_ms, strangers = [], [], 0
    for _ in range(starts):
        began = time.perf_counter()
        with Cluster(ycsb.app, workers) as cluster:
            up = time.perf_counter()
            replies = cluster.client.batch([*calls()])
            answered = time.perf_counter()
            assert all(reply.status == "ok" for reply in replies)
            strangers += cluster.metrics()["strangers_refused"]
        up_ms.append(1e3 * (up - began))
        first_ms.append(1e3 * (answered - up))
        progress(1)
    return {
        "workload": "starts",
        "starts": starts,
        "workers": workers,
        "up_ms_p50": round(median(up_ms), 1),
        "up_ms_max": round(max(up_ms), 1),
        "first_reply_ms_p50": round(median(first_ms), 1),
        "first_reply_ms_max": round(max(first_ms), 1),
        "slower_than_300ms": sum(each > WANTED_MS for each in first_ms),
        "strangers_refused": strangers,
    }


def calls() -> list[tuple[Any, ...]]:
    opened = [(ycsb.open_account, key, ycsb.BALANCE) for key in range(ACCOUNTS)]
    return [*opened, *((ycsb.transfer_awaited, key, (key + 1) % ACCOUNTS) for key in range(ACCOUNTS))]


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['starts']:,} starts of {result['workers']} workers")
    for column in ("ms", "median", "longest", "wanted"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    table.add_row("until it is up", f"{result['up_ms_p50']:,}", f"{result['up_ms_max']:,}", "")
    first = f"{result['first_reply_ms_p50']:,}", f"{result['first_reply_ms_max']:,}"
    table.add_row("from there to the first reply", *first, f"under {WANTED_MS}")
    return table
