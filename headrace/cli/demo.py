"""`headrace demo`: transfers and bookings stream through Spark; money and rooms add up.

    a generated stream ──► transact ──► the engine, in this process ──► headrace.changes ──► a running SQL aggregate
                                                                   └──► headrace.state ──► the final tables

At the end a plain loop over the same rows, in the log's order, must give the same accounts and hotels.
"""

from __future__ import annotations

import datetime
import inspect
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from headrace.cli import travel
from headrace.runtime.inprocess import Runtime

ACCOUNTS, OPENING, HOTELS, ROOMS = 1_000, 500, 40, travel.Rooms().free
CALLS = f"""
    SELECT value AS number,
           IF(value % 50 = 0, 'hotel.book', 'account.transfer') AS function,
           IF(value % 50 = 0, format_string('hotel-%02d', pmod(xxhash64(value, 'h'), {HOTELS})),
                              format_string('account-%03d', pmod(xxhash64(value, 'a'), {ACCOUNTS}))) AS key,
           format_string('account-%03d', pmod(xxhash64(value, 'b'), {ACCOUNTS})) AS other,
           1 + pmod(xxhash64(value, 'c'), 300) AS amount
    FROM {{}}
"""
TAKINGS = """
    SELECT key AS hotel, max_by(INT(get_json_object(after, '$.free')), epoch) AS free,
           max_by(INT(get_json_object(after, '$.takings')), epoch) AS takings
    FROM changes GROUP BY key
"""
Balances = dict[str, int]
Hotels = dict[str, tuple[int, int, int]]  # free, sold, takings


def run_demo(calls: int) -> None:
    out = Console(highlight=False)
    out.print(Panel(Syntax(inspect.getsource(travel), "python"), title="an app: headrace/cli/travel.py", expand=False))
    with out.status("Starting Spark ..."):
        from headrace.spark import session

        began = time.perf_counter()
        spark = session("headrace-demo", master="local[2]")
    out.print(f"Spark {spark.version} is up after {time.perf_counter() - began:.1f} s.")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder,
            Runtime(travel.app, store=Path(folder) / "store") as runtime,
        ):
            names = [f"account-{number:03}" for number in range(ACCOUNTS)]
            runtime.client.map(travel.deposit, names, [(OPENING,)] * ACCOUNTS)
            out.print(f"{ACCOUNTS:,} accounts with {OPENING} each, {HOTELS} hotels with {ROOMS} rooms each.")
            out.print(
                "Spark generates transfers and bookings; every row is a transaction. Some abort because a guest has "
                "too little money or a hotel is full. Then neither the room nor the money moves.\n"
            )
            done = stream(out, spark, runtime, calls)
            conclude(out, spark, runtime, done)
    finally:
        spark.stop()


def stream(out: Console, spark: Any, runtime: Runtime, calls: int) -> int:
    """Run the stream until this many rows are through. Returns the number of rows."""
    from headrace.spark import transact

    per_batch = max(1_000, min(20_000, calls // 5))
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", per_batch).option("numPartitions", 1)
    source.load().createOrReplaceTempView("made_up")
    rows = spark.sql(CALLS.format("made_up"))
    changes = spark.readStream.format("headrace.changes").load(runtime.store_url)
    changes.createOrReplaceTempView("changes")
    display, pace = Display(out, calls), Pace(runtime)
    began = time.perf_counter()
    running = spark.sql(TAKINGS).writeStream.format("memory").queryName("takings").outputMode("complete").start()
    query = transact(rows, key="key", args=["other", "amount"], runtime=runtime, name="travel")
    assert query is not None, "rows is a stream"
    with pace, Live(display, console=out, refresh_per_second=8, transient=False):
        while display.done < calls:
            for each in (query, running):
                if not each.isActive:
                    each.awaitTermination()  # raises the error that stopped it
            top = spark.sql("SELECT * FROM takings ORDER BY takings DESC LIMIT 5").collect()
            display.show(runtime.metrics(), top, pace.text(query.recentProgress))
            time.sleep(0.2)
        query.stop()
        runtime.drain()
        last_seconds = pace.text(query.recentProgress)
        done = int(runtime.metrics()["source_rows"])
        display.show(runtime.metrics(), [], last_seconds)
        elapsed = time.perf_counter() - began
        running.processAllAvailable()
        top = spark.sql("SELECT * FROM takings ORDER BY takings DESC LIMIT 5").collect()
        display.show(runtime.metrics(), top, last_seconds)
        running.stop()
    out.print(f"\n{done:,} transactions in {elapsed:.1f} s, including Spark's warm-up; at the end {last_seconds}.")
    return done


class Pace:
    """How fast rows get through, by the last seconds, once Spark is warm."""

    WARM_BATCHES, SECONDS, LOOK_S = 3, 5.0, 0.005

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._is_over = runtime, threading.Event()
        self._seen: list[tuple[float, int]] = []  # when how many rows were final
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self.LOOK_S):
            metrics = self._runtime.metrics()
            final = metrics["committed"] + metrics["aborted"] - ACCOUNTS
            if not self._seen or final > self._seen[-1][1]:
                self._seen.append((time.time(), final))

    def text(self, batches: list[Any]) -> str:
        """`batches` is what Spark tells about the micro-batches. Their rows are final when the engine has run them."""
        took, rows = [], 0
        for batch in batches:
            rows += batch["numInputRows"]
            began = datetime.datetime.fromisoformat(batch["timestamp"]).timestamp()
            ended = next((when for when, final in self._seen if final >= rows), None)
            if batch["batchId"] >= self.WARM_BATCHES and batch["numInputRows"] and ended is not None:
                took.append((began, ended, batch["numInputRows"]))
        took = [each for each in took if each[1] > took[-1][1] - self.SECONDS]
        if not took:
            return "Spark is warming up"
        rate = sum(count for *_, count in took) / (took[-1][1] - took[0][0])
        latency = median(ended - began for began, ended, _ in took)
        return f"{rate:,.0f} per second, and {latency:.2f} s from the start of a micro-batch to its last row"


class Display:
    """The display while the stream runs."""

    def __init__(self, out: Console, calls: int) -> None:
        self.done = 0
        self.bar = Progress(
            TextColumn("transactions"),
            BarColumn(bar_width=24),
            TextColumn("[green]{task.fields[committed]:,} committed[/]  [yellow]{task.fields[aborted]:,} aborted[/]"),
            TimeElapsedColumn(),
            console=out,
        )
        self.task = self.bar.add_task("", total=calls, committed=0, aborted=0)
        self.hotels: list[Any] = []
        self.last_seconds = ""

    def show(self, metrics: dict[str, Any], hotels: list[Any], last_seconds: str) -> None:
        committed, aborted = metrics["committed"] - ACCOUNTS, metrics["aborted"]
        self.done = committed + aborted
        self.bar.update(self.task, completed=self.done, committed=committed, aborted=aborted)
        self.hotels, self.last_seconds = hotels or self.hotels, last_seconds

    def __rich__(self) -> Any:
        table = Table("hotel", "free rooms", "takings", title="a running SQL aggregate over headrace.changes")
        for row in self.hotels:
            table.add_row(row.hotel, str(row.free), f"{row.takings:,}")
        pace = Text(f"the last seconds: {self.last_seconds}", style="cyan")
        return Group(self.bar, pace, table) if self.hotels else Group(self.bar, pace)


def conclude(out: Console, spark: Any, runtime: Runtime, done: int) -> None:
    runtime.snapshot()
    tables = spark.read.format("headrace.state")
    tables.option("operator", "account").load(runtime.store_url).createOrReplaceTempView("account")
    tables.option("operator", "hotel").load(runtime.store_url).createOrReplaceTempView("hotel")
    out.print("\nThe final state, as Spark tables:")
    money = spark.sql("SELECT sum(value) FROM account").first()[0]
    free, sold, takings, hotels = spark.sql("SELECT sum(free), sum(sold), sum(takings), count(*) FROM hotel").first()
    all_money, all_rooms = ACCOUNTS * OPENING, hotels * ROOMS
    adds_up = verdict(money + takings == all_money)
    out.print(f"Money: {money:,} in accounts + {takings:,} paid to hotels = {all_money:,}  {adds_up}")
    out.print(f"Rooms: {free:,} free + {sold:,} sold = {all_rooms:,}  {verdict(free + sold == all_rooms)}")
    rows = spark.sql(CALLS.format(f"(SELECT id AS value FROM range(0, {done}, 1, 1))")).orderBy("number").collect()
    balances, rooms = by_hand(rows)
    accounts = {row.key: row.value for row in spark.table("account").collect()}
    found = {row.key: (row.free, row.sold, row.takings) for row in spark.table("hotel").collect()}
    same = accounts == balances and found == rooms
    out.print(f"A plain loop over the same {done:,} rows gives the same accounts and hotels: {verdict(same)}\n")
    command = "headrace" if shutil.which("headrace") else os.path.relpath(sys.argv[0])
    next_steps = {
        f"{command} run headrace.cli.travel:app": "serve this app over HTTP",
        f"{command} call account.deposit alice 100": "and call it from another window",
        f"{command} bench ycsb --through spark": "measure the speed, compared with a loop in foreachBatch",
        "examples/pipeline.ipynb": "the same, step by step",
        "docs/tutorial.md": "write your own",
    }
    width = max(map(len, next_steps))
    lines = "\n".join(f"{what:{width}}  {why}" for what, why in next_steps.items())
    out.print(Panel(lines, title="what to try next", expand=False), markup=False)


def by_hand(rows: list[Any]) -> tuple[Balances, Hotels]:
    """The oracle: what the calls give, one after the other."""
    balances = {f"account-{number:03}": OPENING for number in range(ACCOUNTS)}
    hotels: Hotels = {}
    for row in rows:
        if row.function == "hotel.book":
            free, sold, takings = hotels.get(row.key, (ROOMS, 0, 0))
            if free and balances[row.other] >= row.amount:
                balances[row.other] -= row.amount
                hotels[row.key] = free - 1, sold + 1, takings + row.amount
        elif balances[row.key] >= row.amount:
            balances[row.key] -= row.amount
            balances[row.other] += row.amount
    return balances, hotels


def verdict(holds: bool) -> str:
    return "[green]✓[/]" if holds else "[red]✗[/]"
