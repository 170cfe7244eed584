"""State as tables: how fast Spark loads many entities, and how fast it scans them.

Accounts whose state is an int, and then such whose state is a dataclass of two ints, in a new store each time: `load`
of a DataFrame that Spark makes itself, then one SQL aggregate over `headrace.state`, from the call to the result,
including all planning. Then a lookup of one key. The figures of dataclasses are in proportion to those of ints.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.stores import file_system, folder_on_disk
from headrace.model.app import App
from headrace.model.operator import Operator

WARM_UPS = 2  # the JVM compiles code that it has run a few times
WANTED_STATE_PER_S, WANTED_LOAD_PER_S = 1_000_000, 500_000
WANTED_OF_INT = 0.5


@dataclasses.dataclass
class Savings:
    balance: int
    credit: int


app = App("tables")
savings = app.operator("savings", state=Savings)


class TableTimes:
    """Loads and scans entities whose state has these columns, and remembers how long it took."""

    def __init__(self, spark: Any, app: App, operator: Operator, entities: int, columns: dict[str, int]) -> None:
        self.spark, self.app, self.operator, self.entities = spark, app, operator, entities
        self.columns = columns  # name -> the factor by which the key is multiplied
        self.loads_s: list[float] = []
        self.scans_s: list[float] = []
        self.lookups_s: list[float] = []
        self.is_exact = True

    def load(self, store: str, state: str | None) -> None:
        from headrace.spark import load

        made = [f"id * {factor} AS {name}" for name, factor in self.columns.items()]
        rows = self.spark.range(0, self.entities, 1, 2).selectExpr("id", *made)
        began = time.perf_counter()
        found = load(rows, self.operator, key="id", state=state, app=self.app, store=store)
        self.loads_s.append(time.perf_counter() - began)
        self.is_exact &= found["entities"] == self.entities

    def scan(self, store: str) -> None:
        reader = self.spark.read.format("headrace.state").option("operator", self.operator.name)
        factors = list(self.columns.values())
        began = time.perf_counter()
        table = reader.load(store)
        sums = [f"sum({name})" for name in table.columns]
        (row,) = table.selectExpr("count(*)", *sums).collect()
        self.scans_s.append(time.perf_counter() - began)
        total = self.entities * (self.entities - 1) // 2
        self.is_exact &= tuple(row) == (self.entities, total, *(total * factor for factor in factors))

        key = self.entities // 2
        began = time.perf_counter()
        (one,) = reader.option("keys", f"[{key}]").load(store).collect()
        self.lookups_s.append(time.perf_counter() - began)
        self.is_exact &= tuple(one) == (key, *(key * factor for factor in factors))

    def per_s(self, times_s: list[float]) -> float:
        return self.entities / median(times_s[WARM_UPS:])


def measure(entities: int, repeats: int, where: Path | None, progress: Callable[[int], None]) -> dict[str, Any]:
    from headrace.spark import session

    spark = session("headrace-bench-tables", spark_driver_memory="1g")
    ints = TableTimes(spark, ycsb.app, ycsb.account, entities, {"balance": 3})
    records = TableTimes(spark, app, savings, entities, {"balance": 3, "credit": 5})
    with folder_on_disk(where) as folder:
        kind = file_system(folder)
        for number in range(WARM_UPS + repeats):
            for times, name, state in ((ints, "ints", "balance"), (records, "records", None)):
                store = str(folder / f"{name}{number}")
                times.load(store, state)
                progress(entities)
                times.scan(store)
                progress(entities)
    load_per_s, state_per_s = ints.per_s(ints.loads_s), ints.per_s(ints.scans_s)
    return {
        "workload": "tables",
        "entities": entities,
        "repeats": repeats,
        "file_system": kind,
        "load_per_s": round(load_per_s),
        "state_per_s": round(state_per_s),
        "record_load_of_int": round(records.per_s(records.loads_s) / load_per_s, 3),
        "record_state_of_int": round(records.per_s(records.scans_s) / state_per_s, 3),
        "first_load_s": round(ints.loads_s[0], 2),
        "first_scan_s": round(ints.scans_s[0], 2),
        "lookup_ms": round(median(ints.lookups_s[WARM_UPS:]) * 1e3),
        "exact": ints.is_exact and records.is_exact,
    }


def total(entities: int, repeats: int) -> int:
    """What `progress` counts up to."""
    return 4 * entities * (WARM_UPS + repeats)


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['entities']:,} entities, Spark local[2], a store on {result['file_system']}")
    for column in ("", "", "wanted"):
        table.add_column(column, justify="right" if table.columns else "left")
    table.add_row("loaded per second", f"{result['load_per_s']:,}", f"{WANTED_LOAD_PER_S:,}")
    table.add_row("scanned per second", f"{result['state_per_s']:,}", f"{WANTED_STATE_PER_S:,}")
    for what in ("load", "state"):
        table.add_row(f"{what} of dataclasses, of ints", f"{result[f'record_{what}_of_int']:.2f}", f"{WANTED_OF_INT}")
    table.add_row("one key, ms", f"{result['lookup_ms']:,}", "")
    table.add_row("the first load, s", f"{result['first_load_s']:.2f}", "")
    table.add_row("the first scan, s", f"{result['first_scan_s']:.2f}", "")
    table.add_row("exact", "yes" if result["exact"] else "NO", "yes")
    return table
