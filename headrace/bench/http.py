"""What a call over HTTP costs, and how long it takes: `headrace run` with a store, in a process of its own, and 32
clients in another one, with kept-alive connections.

The workload is YCSB-T's transfers (`bench/ycsb.py`) in JSON, one per request, and in batches of 100. At the end the
store is opened again: no money may be missing, and every call that was answered must be there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.stores import file_system, folder_on_disk
from headrace.chaos.servers import SCRIPT
from headrace.errors import HeadraceError
from headrace.runtime.inprocess import Runtime

CONNECTIONS = 32
BATCH = 100
RATE_PER_S = 100
ADDRESS = re.compile(r"http://([\d.]+):(\d+)")
STOP_S_MAX = 30
FIGURES = {  # name -> digits behind the point
    "calls_per_s": 0,
    "batched_per_s": 0,
    "p50_ms": 3,
    "p99_ms": 3,
    "server_us_per_call": 1,
    "server_us_per_batched_call": 1,
}
WANTED = {
    "calls_per_s": "at least 2,500",
    "batched_per_s": "at least 20,000",
    "p50_ms": "under 3",
    "p99_ms": "under 15",
    "server_us_per_call": "",
    "server_us_per_batched_call": "",
}


class Served(NamedTuple):
    """A server that is up."""

    process: int
    host: str
    port: str


def measure(
    keys: int, seconds: float, repeats: int, where: Path | None, progress: Callable[[int], None]
) -> dict[str, Any]:
    """The whole benchmark. `seconds` is how long each of the three steps of a repeat takes."""
    with folder_on_disk(where) as folder:
        store = folder / "store"
        with served(store) as server:
            laps = run_clients(server, keys, seconds, repeats, progress)
        with Runtime(ycsb.app, store=store) as runtime:
            balances = runtime.state(ycsb.account)
            committed = runtime.metrics()["committed"]
        kind = file_system(folder)
    result: dict[str, Any] = {"workload": "ycsb-t", "keys": keys, "clients": CONNECTIONS, "batch": BATCH}
    result |= {"durable": True, "file_system": kind, "latency_at_per_s": RATE_PER_S}
    result |= {"seconds": seconds, "repeats": repeats}
    for name, digits in FIGURES.items():
        result[name] = round(median(lap[name] for lap in laps), digits or None)
    result["conserved"] = sum(balances.values()) == keys * ycsb.BALANCE
    result["all_there"] = committed == laps[-1]["answered"]
    return result


def run_clients(
    server: Served, keys: int, seconds: float, repeats: int, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    numbers = (server.port, server.process, CONNECTIONS, keys, BATCH, RATE_PER_S, repeats, seconds)
    command = [sys.executable, "-m", "headrace.bench.http_clients", server.host, *map(str, numbers)]
    laps = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        for line in clients.stdout:
            laps.append(json.loads(line))
            progress(1)
    if clients.returncode or len(laps) < repeats:
        raise HeadraceError(f"the clients ended with {clients.returncode}: see their output above")
    return laps


@contextlib.contextmanager
def served(store: Path) -> Iterator[Served]:
    """`headrace run` as a user starts it, until the end."""
    command = [sys.executable, "-u", "-c", SCRIPT, "run", "headrace.bench.ycsb:app", "--port", "0"]
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # else the command would restart itself to set it
    process = subprocess.Popen(
        [*command, "--store", str(store)], stdout=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    try:
        yield Served(process.pid, *address_of(process))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise HeadraceError("the server did not stop") from None


def address_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    for line in process.stdout:
        found = ADDRESS.search(line)
        if found:
            return found[1], found[2]
    raise HeadraceError(f"the server ended with {process.wait()}: see its output above")


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"HTTP, {CONNECTIONS} clients, JSON, log on {result['file_system']}")
    for column in ("", "measured", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    titles = {
        "calls_per_s": "calls per second, one per request",
        "batched_per_s": f"calls per second, in batches of {BATCH}",
        "p50_ms": f"a call, {RATE_PER_S} per second: p50 ms",
        "p99_ms": f"a call, {RATE_PER_S} per second: p99 ms",
        "server_us_per_call": "the server's CPU time per call, µs",
        "server_us_per_batched_call": "the same in batches, µs",
    }
    for name, title in titles.items():
        table.add_row(title, f"{result[name]:,}", WANTED[name])
    for title, name in (("conserved", "conserved"), ("all answered calls are in the store", "all_there")):
        table.add_row(title, "yes" if result[name] else "NO", "yes")
    return table
