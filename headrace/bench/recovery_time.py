"""How soon a killed app is back: many entities in a snapshot, and transactions in the log after it.

A separate process makes the store and is killed. Then, a few times, a new process starts with a copy of what is left.
Its time runs from `Runtime(app, store=...)` to the reply to a first call, which comes after everything is replayed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.senders import BATCH, cut, send
from headrace.bench.stores import NEVER_US, file_system, folder_on_disk, load, wait_until_kept
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.runtime.inprocess import Runtime

WANTED_S = 10
CONFIG = Config(snapshot_interval_us=NEVER_US, replay_transactions_max=NEVER_US)


def measure(
    entities: int, transactions: int, repeats: int, where: Path | None, progress: Callable[[int], None]
) -> dict[str, Any]:
    """The whole benchmark."""
    runs = []
    with folder_on_disk(where) as folder:
        was = killed(folder / "store", entities, transactions)
        progress(1)
        for number in range(repeats):
            shutil.copytree(folder / "store", folder / "copy")
            runs.append(child("recover", folder / "copy", entities, transactions))
            shutil.rmtree(folder / "copy")
            progress(1)
            assert runs[-1]["state"] == was["state"], f"run {number + 1} recovered a different state"
        kind = file_system(folder)
    parts = ("load_ms", "replay_ms", "total_ms")
    result: dict[str, Any] = {"workload": "ycsb-t", "entities": entities, "transactions": transactions}
    result |= {"repeats": repeats, "file_system": kind}
    result |= {name: round(median(one[name] for one in runs), 1) for name in parts}
    result["entities_per_s"] = round(median(entities / one["load_ms"] * 1e3 for one in runs))
    result["replayed_per_s"] = round(median(transactions / one["replay_ms"] * 1e3 for one in runs))
    result["conserved"] = all(one["conserved"] for one in runs)
    return result


def killed(store: Path, entities: int, transactions: int) -> dict[str, Any]:
    """Run a process that works in the store until it is killed. Returns what it reported of its state."""
    process = start("work", store, entities, transactions, stdin=subprocess.PIPE)
    try:
        return told(process)
    finally:
        process.kill()
        process.communicate()


def child(what: str, store: Path, entities: int, transactions: int) -> dict[str, Any]:
    process = start(what, store, entities, transactions)
    try:
        return told(process)
    finally:
        process.communicate()


def start(what: str, store: Path, *numbers: int, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.bench.recovery_time", what, str(store), *map(str, numbers)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise HeadraceError(f"a process of the benchmark ended with {process.wait()}: see its output above")
    said: dict[str, Any] = json.loads(line)
    return said


# --- in those processes -----------------------------------------------------------------------------------------------


def work(store: Path, entities: int, transactions: int) -> dict[str, Any]:
    runtime = Runtime(ycsb.app, CONFIG, store=store)
    load(runtime, entities)
    runtime.snapshot()
    send(runtime, ycsb.transfer, cut(ycsb.transfers(entities, 0.0, transactions, 1), BATCH))
    wait_until_kept(runtime)
    return {"state": digest(runtime)}


def recover(store: Path, entities: int, transactions: int) -> dict[str, Any]:
    began = time.perf_counter()
    runtime = Runtime(ycsb.app, CONFIG, store=store)
    loaded = time.perf_counter()
    runtime.client.call(ycsb.open_account, entities, 0)
    back = time.perf_counter()
    state = runtime.state(ycsb.account)
    del state[entities]
    found = {"load_ms": 1e3 * (loaded - began), "replay_ms": 1e3 * (back - loaded), "total_ms": 1e3 * (back - began)}
    return found | {"state": digest(runtime, state), "conserved": sum(state.values()) == entities * ycsb.BALANCE}


def digest(runtime: Runtime, state: dict[Any, Any] | None = None) -> int:
    """A digest that differs if the state does."""
    state = runtime.state(ycsb.account) if state is None else state
    return sum(key * value % 1_000_003 for key, value in state.items())


def main(what: str, store: str, *numbers: str) -> None:
    steps: dict[str, Callable[..., dict[str, Any]]] = {"work": work, "recover": recover}
    print(json.dumps(steps[what](Path(store), *map(int, numbers))), flush=True)
    sys.stdin.read()  # until it is killed, or the parent ends


def summary(result: dict[str, Any]) -> Table:
    entities, transactions = f"{result['entities']:,} entities", f"{result['transactions']:,} transactions"
    table = Table(title=f"Recovery of {entities}, and {transactions} to replay, from {result['file_system']}")
    for column in ("", "ms", "per second", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("opened, and loaded", f"{result['load_ms']:,.0f}", f"{result['entities_per_s']:,}", "")
    table.add_row("replayed, to the first reply", f"{result['replay_ms']:,.0f}", f"{result['replayed_per_s']:,}", "")
    table.add_row("back in service", f"{result['total_ms']:,.0f}", "", f"under {WANTED_S:,} s")
    table.add_row("conserved", "", "yes" if result["conserved"] else "NO", "yes")
    return table


if __name__ == "__main__":
    main(*sys.argv[1:])
