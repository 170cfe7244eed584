"""State as tables: how fast Spark loads many entities, and how fast it scans them.

Accounts whose state is an int, in a new store each time: `load` of a DataFrame that Spark makes itself, then one SQL
aggregate over `headrace.state`, from the call to the result, including all planning. Then a lookup of one key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.stores import file_system, folder_on_disk

WARM_UPS = 2  # the JVM compiles code that it has run a few times
WANTED_STATE_PER_S, WANTED_LOAD_PER_S = 1_000_000, 500_000


def measure(entities: int, repeats: int, where: Path | None, progress: Callable[[int], None]) -> dict[str, Any]:
    from headrace.spark import load, session

    spark = session("headrace-bench-tables", spark_driver_memory="1g")
    loads_s, scans_s, lookups_s = [], [], []
    is_exact = True
    with folder_on_disk(where) as folder:
        kind = file_system(folder)
        for number in range(WARM_UPS + repeats):
            store = str(folder / f"store{number}")
            rows = spark.range(0, entities, 1, 2).selectExpr("id", "id * 3 AS balance")
            began = time.perf_counter()
            found = load(rows, ycsb.account, key="id", state="balance", app=ycsb.app, store=store)
            loads_s.append(time.perf_counter() - began)
            is_exact &= found["entities"] == entities
            progress(entities)

            reader = spark.read.format("headrace.state").option("operator", ycsb.account.name)
            began = time.perf_counter()
            (row,) = reader.load(store).selectExpr("count(*)", "sum(key)", "sum(value)").collect()
            scans_s.append(time.perf_counter() - began)
            total = entities * (entities - 1) // 2
            is_exact &= tuple(row) == (entities, total, total * 3)
            progress(entities)

            began = time.perf_counter()
            (one,) = reader.option("keys", f"[{entities // 2}]").load(store).collect()
            lookups_s.append(time.perf_counter() - began)
            is_exact &= one.value == entities // 2 * 3
    return {
        "workload": "tables",
        "entities": entities,
        "repeats": repeats,
        "file_system": kind,
        "load_per_s": round(entities / median(loads_s[WARM_UPS:])),
        "state_per_s": round(entities / median(scans_s[WARM_UPS:])),
        "first_load_s": round(loads_s[0], 2),
        "first_scan_s": round(scans_s[0], 2),
        "lookup_ms": round(median(lookups_s[WARM_UPS:]) * 1e3),
        "exact": is_exact,
    }


def total(entities: int, repeats: int) -> int:
    """What `progress` counts up to."""
    return 2 * entities * (WARM_UPS + repeats)


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['entities']:,} entities, Spark local[2], a store on {result['file_system']}")
    for column in ("", "", "wanted"):
        table.add_column(column, justify="right" if table.columns else "left")
    table.add_row("loaded per second", f"{result['load_per_s']:,}", f"{WANTED_LOAD_PER_S:,}")
    table.add_row("scanned per second", f"{result['state_per_s']:,}", f"{WANTED_STATE_PER_S:,}")
    table.add_row("one key, ms", f"{result['lookup_ms']:,}", "")
    table.add_row("the first load, s", f"{result['first_load_s']:.2f}", "")
    table.add_row("the first scan, s", f"{result['first_scan_s']:.2f}", "")
    table.add_row("exact", "yes" if result["exact"] else "NO", "yes")
    return table
