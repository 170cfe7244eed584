"""Where an epoch's time and messages go: workers in one thread, with a stopwatch around each of their steps.

There are no rounds to break down, since conflicts are repaired. Instead of validation and rollback, an epoch is run,
late results are received and repaired, and it is reported and settled. Counts are exact and repeatable. Times are those
of this machine, of all workers together, and without the cost of a network.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.scaling import FORMS, Form
from headrace.config import Config
from headrace.core.admission import Admission
from headrace.core.events import Submit
from headrace.core.origin import FromClient
from headrace.sim.fleet import Fleet

# The timed methods: of a worker, of its executor, of the coordinator.
STEPS = (
    ("worker", "_pick", "pick"),
    ("executor", "_run_rows", "run"),
    ("executor", "hear", "hear"),
    ("executor", "repair", "repair"),
    ("worker", "_report", "report"),
    ("executor", "finish", "finish"),
    ("coordinator", "_fly", "send"),
    ("coordinator", "_note_results", "settle"),
)


class WatchedFleet:
    """A fleet with stopwatches."""

    def __init__(self, workers: int, keys: int, size: int, predicts: bool) -> None:
        config = Config(epoch_transactions_max=size, predict_after_runs=16 if predicts else 1 << 40)
        self.fleet = Fleet(ycsb.app, config, workers, "ordered")
        self.admission = Admission(self.fleet.coordinator.program)
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.sent = 0
        self.submit(ycsb.open_account, list(range(keys)), [(ycsb.BALANCE,)] * keys)

    def watch(self) -> None:
        """Start now: the workers have begun their term."""
        owners: list[tuple[str, Any]] = [("coordinator", self.fleet.coordinator)]
        for worker in self.fleet.workers.values():
            owners += [("worker", worker), ("executor", worker.ordered)]
        for kind, owner in owners:
            for of, method, title in STEPS:
                if of == kind:
                    setattr(owner, method, self._timed(getattr(owner, method), title))

    def _timed(self, method: Callable[..., Any], title: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.spent_s[title] += time.perf_counter() - began

        return timed

    def submit(self, function: Any, keys: list[Any], args: list[Any]) -> None:
        self.sent += 1
        batch = self.admission.admit_columns(FromClient(f"batch-{self.sent}"), function, keys, args)
        self.fleet.submit(Submit([(self.sent, batch)]))
        self.fleet.settle()


def run(form: Form, workers: int, keys: int, theta: float, size: int, epochs: int, predicts: bool) -> dict[str, Any]:
    watched = WatchedFleet(workers, keys, size, predicts)
    fleet = watched.fleet
    pairs = ycsb.transfers(keys, theta, size * epochs, 1)
    warm = ycsb.transfers(keys, theta, 2 * size, 0)
    watched.submit(form.function, [debtor for debtor, _ in warm], [(creditor,) for _, creditor in warm])
    watched.watch()
    before, messages, size_before = fleet.coordinator.metrics(), fleet.messages, fleet.bytes
    began = time.perf_counter()
    watched.submit(form.function, [debtor for debtor, _ in pairs], [(creditor,) for _, creditor in pairs])
    elapsed = time.perf_counter() - began
    after = fleet.coordinator.metrics()
    ran = after["ran"] - before["ran"]
    return {
        "form": form.name,
        "workers": workers,
        "zipf": theta,
        "epoch": size,
        "predicted": predicts,
        "calls": round(ran / epochs, 1),
        "ran_again": round((after["repairs"] - before["repairs"]) / epochs, 1),
        "told": round((after["rows_told"] - before["rows_told"]) / epochs, 1),
        "settles": round((after["rounds"] - before["rounds"]) / epochs, 2),
        "messages": round((fleet.messages - messages) / epochs, 1),
        "bytes": round((fleet.bytes - size_before) / epochs),
        "us_per_transaction": round(elapsed / (size * epochs) * 1e6, 2),
        "us": {title: round(watched.spent_s[title] / (size * epochs) * 1e6, 2) for _, _, title in STEPS},
    }


def breakdown(keys: int, epochs: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Vary one parameter at a time: the form, the skew, prediction, the epoch's size, the number of workers."""
    plain, awaited, _ = FORMS
    cases = [
        *((form, 2, theta, 1_000, True) for form in FORMS for theta in (0.0, 0.99, 0.999)),
        *((form, 2, theta, 1_000, False) for form in (plain, awaited) for theta in (0.0, 0.999)),
        *((plain, 2, 0.0, size, False) for size in (100, 10_000)),
        *((plain, workers, 0.0, 1_000, True) for workers in (3, 4, 5)),
    ]
    rows = []
    for form, workers, theta, size, predicts in cases:
        rows.append(run(form, workers, keys, theta, size, max(2, epochs * 1_000 // size), predicts))
        progress(1)
    return {"workload": "ycsb-t", "keys": keys, "epochs": epochs, "rows": rows}


CASES = 18


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"An epoch of YCSB-T, {result['keys']:,} accounts: counts per epoch, us per transaction")
    counts = ("calls", "ran_again", "told", "settles", "messages", "bytes")
    for column in (
        "form",
        "workers",
        "zipf",
        "epoch",
        "predicted",
        *counts,
        *(title for _, _, title in STEPS),
        "all us",
    ):
        table.add_column(column.replace("_", " "), justify="left" if column == "form" else "right")
    for row in result["rows"]:
        cells = [row["form"], row["workers"], row["zipf"], row["epoch"], "yes" if row["predicted"] else "no"]
        cells += [row[name] for name in counts]
        cells += [row["us"][title] for _, _, title in STEPS]
        table.add_row(*map(str, [*cells, row["us_per_transaction"]]))
    return table
