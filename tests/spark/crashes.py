"""A bank whose transfers come from files, for tests that kill it: as one process with Spark and the engine in it, or
as an engine alone. What is wrong with a row cannot be hidden: the order decides who lacks money, and each is written
down."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace import Abort, App, Config, Context, Runtime

app = App("crashes")
account = app.operator("account")
diary = app.operator("diary")
ACCOUNTS = 20
FUNDS = 30
EMPTY = 4  # the number of a file without a row: of a batch, then, too
SCHEMA = "uid long, src string, dst string, amount long"
CONFIG = Config(epoch_transactions_max=64, snapshot_interval_us=300_000, snapshots_kept=1)


@account.register
def transfer(ctx: Context, uid: int, to: str, amount: int) -> int:
    balance: int = ctx.get(FUNDS) - amount
    if balance < 0:
        raise Abort(f"{uid} lacks {-balance}")
    ctx.put(balance)
    ctx.call_async(receive, to, amount)
    ctx.call_async(write_down, str(ctx.key), uid)
    return uid


@account.register
def receive(ctx: Context, amount: int) -> None:
    ctx.put(ctx.get(FUNDS) + amount)


@diary.register
def write_down(ctx: Context, uid: int) -> None:
    ctx.put([*ctx.get([]), uid][-10:])


Row = tuple[int, str, str, int]


def loop(rows: list[Row]) -> tuple[dict[int, bool], dict[tuple[str, str], Any]]:
    """One after the other: which go through, and the state."""
    state: dict[tuple[str, str], Any] = {}
    went: dict[int, bool] = {}
    for uid, src, dst, amount in rows:
        balance = state.get(("account", src), FUNDS) - amount
        went[uid] = balance >= 0
        if went[uid]:
            state["account", src] = balance
            state["account", dst] = state.get(("account", dst), FUNDS) + amount
            state["diary", src] = [*state.get(("diary", src), []), uid][-10:]
    return went, state


def write_files(folder: Path, files: int, rows: int, seed: int) -> dict[int, Row | None]:
    """The rows by uid; None where a row can be no call. One file after the other, by their times."""
    rng = random.Random(seed)
    folder.mkdir()
    written: dict[int, Row | None] = {}
    for file in range(files):
        lines = []
        for at in range(0 if file == EMPTY else rows):
            uid = file * rows + at
            src, dst = (f"a{number}" for number in rng.sample(range(ACCOUNTS), 2))
            row = (uid, src, dst, rng.randint(1, 20))
            is_bad = rng.random() < 0.01
            written[uid] = None if is_bad else row
            named = dict(zip(("uid", "src", "dst", "amount"), row, strict=True))
            lines.append(json.dumps(named | ({"src": None} if is_bad else {})))
        path = folder / f"{file:04}.json"
        path.write_text("".join(f"{line}\n" for line in lines))
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))
    return written


def stream(spark: Any, folder: Path) -> Any:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder / "in"))


def start_query(spark: Any, folder: Path, store: Path) -> Any:
    from headrace.spark import transact

    return transact(
        stream(spark, folder),
        "account.transfer",
        key="src",
        args=["uid", "dst", "amount"],
        store=str(store),
        checkpoint=str(store.with_name(f"{store.name}-checkpoint")),
        trigger={"availableNow": True},
    )


def copy_replies(spark: Any, store: Path) -> Any:
    """Into files, by a sink that takes each batch once."""
    replies = spark.readStream.format("headrace.replies").load(str(store)).select("request_id", "tid", "status")
    checkpoint = str(store.with_name(f"{store.name}-replies-checkpoint"))
    return replies.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(replies_of(store))


def replies_of(store: Path) -> str:
    return str(store.with_name(f"{store.name}-replies"))


def run_all(folder: Path, store: Path) -> None:
    """Spark and the engine in one process, until all files are done and all replies are copied."""
    from headrace.spark import session

    spark = session(spark_driver_memory="512m")
    with Runtime(app, CONFIG, store=store) as runtime:
        copying = copy_replies(spark, store)
        start_query(spark, folder, store).awaitTermination()
        runtime.drain()
    copying.processAllAvailable()  # the runtime has written all replies when it is closed
    copying.stop()
    spark.stop()


def run_engine(folder: Path, store: Path) -> None:
    """The engine alone, until it is killed."""
    with Runtime(app, CONFIG, store=store):
        threading.Event().wait()


def end_with(parent: int) -> None:
    """A test that is killed leaves nothing behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(what: str, folder: str, store: str) -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    {"all": run_all, "engine": run_engine}[what](Path(folder), Path(store))


if __name__ == "__main__":
    from tests.spark import crashes  # the app of this module by its name, as the tests have it

    crashes.main(*sys.argv[1:])
