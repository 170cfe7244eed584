"""`headrace demo`: a small bank, and a Spark stream of transfers through it.

A folder fills with files of transfers; Spark streams them; every row becomes a transaction. At the end the money is
counted, and a plain loop over the same rows, in the log's order, must have come to the same balances.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax

from headrace.cli import bank
from headrace.runtime.inprocess import Runtime

ACCOUNTS, OPENING, FILES = 1_000, 500, 10


def run_demo(transfers: int) -> None:
    out = Console(highlight=False)
    out.print(Panel(Syntax(inspect.getsource(bank), "python"), title="an app: headrace/cli/bank.py", expand=False))
    with out.status("Starting Spark ..."):
        from headrace.spark import session

        began = time.perf_counter()
        spark = session("headrace-demo", master="local[2]")
    out.print(f"Spark {spark.version} is up after {time.perf_counter() - began:.1f} s.")
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder, Runtime(bank.app) as runtime:
            with out.status(f"Writing {transfers:,} transfers into {FILES} files ..."):
                write_transfers(spark, Path(folder), transfers)
            runtime.client.map(bank.deposit, names(), [(OPENING,)] * ACCOUNTS)
            out.print(f"{ACCOUNTS:,} accounts opened with {OPENING} each: {ACCOUNTS * OPENING:,} in all.\n")
            stream(out, spark, Path(folder), runtime, transfers)
            conclude(out, Path(folder), runtime)
    finally:
        spark.stop()


def names() -> list[str]:
    return [f"account-{number:03}" for number in range(ACCOUNTS)]


def write_transfers(spark: Any, folder: Path, transfers: int) -> None:
    """Some accounts are poorer than what is asked of them, so some transfers abort."""
    account = f"format_string('account-%03d', int(rand({{}}) * {ACCOUNTS}))"
    rows = spark.range(transfers).selectExpr(
        f"{account.format(1)} AS src", f"{account.format(2)} AS dst", "bigint(1 + rand(3) * 300) AS amount"
    )
    rows.repartition(FILES).write.parquet(str(folder / "transfers"))
    for second, file in enumerate(files_of(folder)):
        os.utime(
            file, (second, second)
        )  # Spark takes the oldest first: now the order of the files is that of their names


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "transfers").glob("*.parquet"))


def stream(out: Console, spark: Any, folder: Path, runtime: Runtime, transfers: int) -> None:
    """Run the stream, with a display that lives as long as it does."""
    from headrace.spark import transact

    df = spark.readStream.schema("src string, dst string, amount long").option("maxFilesPerTrigger", 1)
    columns = (
        TextColumn("Spark stream"),
        BarColumn(bar_width=24),
        TextColumn("[green]{task.fields[committed]:,} committed[/]  [yellow]{task.fields[aborted]:,} aborted[/]"),
        TimeElapsedColumn(),
    )
    began = time.perf_counter()
    before = runtime.metrics()["committed"]
    with Progress(*columns, console=out) as bar:
        task = bar.add_task("", total=transfers, committed=0, aborted=0)

        def show(replies: Any, batch: int) -> None:
            counts = Counter({row["status"]: row["count"] for row in replies.groupBy("status").count().collect()})
            if batch < 3:
                for row in replies.where("status = 'aborted'").limit(1).collect():
                    bar.console.print(f"  batch {batch}: TID {row.tid} aborted, nothing changed: {row.error}")
            metrics = runtime.metrics()
            committed, aborted = metrics["committed"] - before, metrics["aborted"]
            bar.update(task, advance=sum(counts.values()), committed=committed, aborted=aborted)

        query = transact(
            df.parquet(str(folder / "transfers")),
            bank.transfer,
            key="src",
            args=["dst", "amount"],
            runtime=runtime,
            replies=show,
            name="transfers",
            trigger={"availableNow": True},
        )
        query.awaitTermination()
    elapsed = time.perf_counter() - began
    rate = transfers / elapsed
    out.print(f"\n{transfers:,} transactions in {elapsed:.1f} s, replies included: {rate:,.0f} per second.")


def conclude(out: Console, folder: Path, runtime: Runtime) -> None:
    balances = runtime.state(bank.account)
    total = sum(balances.values())
    out.print(
        f"Money: {total:,} of {ACCOUNTS * OPENING:,}  {verdict(total == ACCOUNTS * OPENING)}   "
        f"lowest balance: {min(balances.values())}  {verdict(min(balances.values()) >= 0)}"
    )
    rows = [row for file in files_of(folder) for row in pyarrow.parquet.read_table(file).to_pylist()]
    out.print(f"A plain loop over the same rows comes to the same balances: {verdict(by_hand(rows) == balances)}")
    sources, args = [row["src"] for row in rows], [(row["dst"], row["amount"]) for row in rows]
    began = time.perf_counter()
    runtime.client.map(bank.transfer, sources, args)
    alone = len(rows) / (time.perf_counter() - began)
    out.print(f"The engine alone, without Spark: {alone:,.0f} transactions per second.\n")
    command = "headrace" if shutil.which("headrace") else os.path.relpath(sys.argv[0])
    next_steps = {
        f"{command} run headrace.cli.bank:app": "serve this bank over HTTP",
        f"{command} call account.deposit alice 100": "and call it from another window",
        f"{command} bench ycsb": "how fast, against a bare loop",
        "docs/tutorial.md": "write your own",
    }
    width = max(map(len, next_steps))
    lines = "\n".join(f"{what:{width}}  {why}" for what, why in next_steps.items())
    out.print(Panel(lines, title="what to try next", expand=False), markup=False)


def by_hand(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The oracle: what the transfers come to, one after the other."""
    balances = dict.fromkeys(names(), OPENING)
    for row in rows:
        if balances[row["src"]] >= row["amount"]:
            balances[row["src"]] -= row["amount"]
            balances[row["dst"]] += row["amount"]
    return balances


def verdict(holds: bool) -> str:
    return "[green]✓[/]" if holds else "[red]✗[/]"
