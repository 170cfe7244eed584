"""YCSB-T over several workers: processes connected by ZeroMQ; with two workers, half of the transfers involve both.

Every run is compared with the serial engine: the same replies, the same state. Figures are medians of repeats. The
figures of one repeat are taken one after the other, so that their ratios are meaningful on a noisy machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import ycsb
from headrace.bench.senders import BATCH, Parts, Stopwatch, cut, send
from headrace.bench.ycsb import BALANCE, EngineInThread, transfers
from headrace.model.operator import Function
from headrace.runtime.cluster import Cluster

COSTLY_US = 100
COSTLY_TRANSFERS = 3_000
COSTLY_BATCH = 1_000


class Form(NamedTuple):
    """One way to write the functions."""

    name: str
    function: Function
    title: str


FORMS = (
    Form("one_way", ycsb.transfer, "one-way calls"),
    Form("awaited", ycsb.transfer_awaited, "awaited calls"),
    Form("merged", ycsb.transfer_counted, "merges at the creditor"),
)
RATES = ("committed_per_s", "serial_per_s")


class ScalingFigures(NamedTuple):
    committed_per_s: float
    serial_per_s: float
    of_serial: float
    p50_ms: float
    p99_ms: float
    messages_per_epoch: float
    bytes_per_epoch: float
    ran_again: float  # the share of all calls
    aborted: int
    same_as_serial: bool


def run(cluster: Cluster, form: Form, parts: Parts, keys: int, number: int) -> ScalingFigures:
    """One form on a warm cluster, and then on the serial engine in this process."""
    everybody, opening = list(range(keys)), [(BALANCE,)] * keys
    driver = EngineInThread()
    driver.map("open", ycsb.open_account, everybody, opening)
    cluster.client.map(ycsb.open_account, everybody, opening)
    counted = cluster.state(ycsb.counter)
    before = cluster.metrics()
    answers, spread, batches = send(cluster, form.function, parts)
    after = cluster.metrics()
    serial, expected = Stopwatch(), []
    for at, (debtors, args) in enumerate(parts):
        with serial:
            expected.append(driver.map(f"{number}-{at}", form.function, debtors, args))
    same = all(one.results == other.results for one, other in zip(answers, expected, strict=True))
    same &= cluster.state(ycsb.account) == driver.tables["account"]
    counts = {key: value - counted.get(key, 0) for key, value in cluster.state(ycsb.counter).items()}
    same &= {key: value for key, value in counts.items() if value} == driver.tables["counter"]
    epochs = after["epochs"] - before["epochs"]
    aborted = sum(len(answer.failures) for answer in answers)
    committed = sum(len(debtors) for debtors, _ in parts) - aborted
    return ScalingFigures(
        committed_per_s=committed / spread,
        serial_per_s=committed / sum(serial.laps_s),
        of_serial=sum(serial.laps_s) / spread,
        p50_ms=batches.percentile_ms(50),
        p99_ms=batches.percentile_ms(99),
        messages_per_epoch=(after["messages_sent"] - before["messages_sent"]) / epochs,
        bytes_per_epoch=(after["bytes_sent"] - before["bytes_sent"]) / epochs,
        ran_again=(after["repairs"] - before["repairs"]) / max(1, after["ran"] - before["ran"]),
        aborted=aborted,
        same_as_serial=same,
    )


def costly(clusters: list[Cluster], pairs: list[tuple[int, int]], keys: int) -> dict[str, float]:
    """Functions that cost 100 us each, on one serial worker and on several."""
    spins = spins_for(COSTLY_US)
    parts = cut(pairs, COSTLY_BATCH, spins)
    rates, states = [], []
    for cluster in clusters:
        cluster.client.map(ycsb.open_account, list(range(keys)), [(BALANCE,)] * keys)
        send(cluster, ycsb.transfer_costly, [(debtors[:100], args[:100]) for debtors, args in parts[:1]])  # to learn
        _, elapsed, _ = send(cluster, ycsb.transfer_costly, parts)
        rates.append(len(pairs) / elapsed)
        states.append(cluster.state(ycsb.account))
    assert states[0] == states[1]
    machine = machine_speedup(spins)
    speedup = rates[1] / rates[0]
    return {
        "one_worker_per_s": rates[0],
        "per_s": rates[1],
        "speedup": speedup,
        "machine_speedup": machine,
        "of_machine": speedup / machine,
    }


def machine_speedup(spins: int) -> float:
    """How much two processes that only spin get done compared with one, on this machine right now: an upper limit."""
    code = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        f"for _ in range({COSTLY_TRANSFERS}):\n"
        f"    for _ in range({spins}): pass\n"
        "print(time.perf_counter() - began)"
    )

    def spin(count: int) -> float:
        spinning = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        return max(float(process.communicate()[0]) for process in spinning)

    return 2 * spin(1) / spin(2)


def spins_for(wanted_us: int) -> int:
    """How often to spin to take this long, on this machine right now."""
    laps = []
    for _ in range(20):
        began = time.perf_counter()
        ycsb.spin(10_000)
        laps.append(time.perf_counter() - began)
    return int(10_000 * wanted_us / (min(laps) * 1e6))


def over_workers(
    workers: int, keys: int, theta: float, transactions: int, repeats: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """The whole benchmark: each form several times, the median of each figure."""
    result: dict[str, Any] = {"workload": "ycsb-t", "keys": keys, "zipf": theta, "transactions": transactions}
    result |= {"repeats": repeats, "workers": workers, "durable": False, "latency_of": f"a batch of {BATCH}"}
    runs: dict[str, list[ScalingFigures]] = {form.name: [] for form in FORMS}
    costs: list[dict[str, float]] = []
    name = "headrace.bench.ycsb:app"
    with Cluster(name, workers, mode="ordered") as cluster, Cluster(name, 1) as one_worker:
        result["mode"] = cluster.metrics()["mode"]
        for form in FORMS:  # so that functions are known and predicted
            run(cluster, form, cut(transfers(keys, theta, BATCH, 0), BATCH), keys, 0)
        for number in range(1, repeats + 1):
            parts = cut(transfers(keys, theta, transactions, number), BATCH)
            for form in FORMS:
                runs[form.name].append(run(cluster, form, parts, keys, number))
                progress(transactions)
            costs.append(costly([one_worker, cluster], transfers(keys, theta, COSTLY_TRANSFERS, number), keys))
            progress(COSTLY_TRANSFERS)
    for form in FORMS:
        result[form.name] = figures(runs[form.name])
    result["costly"] = {name: round(median(one[name] for one in costs), 3) for name in costs[0]}
    result["costly"]["function_us"] = COSTLY_US
    result["committed_per_s"] = result["one_way"]["committed_per_s"]
    return result


def figures(runs: list[ScalingFigures]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ScalingFigures._fields:
        values = [getattr(one, name) for one in runs]
        if name == "same_as_serial":
            found[name] = all(values)
        elif name == "aborted":
            found[name] = sum(values)
        else:
            digits = 0 if name in RATES or name.startswith("bytes") else 4
            found[name] = round(median(values), digits) if digits else round(median(values))
    return found


def summary(result: dict[str, Any]) -> Table:
    title = (
        f"YCSB-T, {result['keys']:,} accounts, zipf {result['zipf']}, {result['workers']} workers, ordered, in memory"
    )
    table = Table(title=title)
    for column in ("", *(form.title for form in FORMS)):
        table.add_column(column, justify="right" if column else "left")
    for label, name, shape in (
        ("committed per second", "committed_per_s", ",.0f"),
        ("one serial engine", "serial_per_s", ",.0f"),
        ("of the serial engine", "of_serial", ".0%"),
        (f"batches of {BATCH:,}: p50 ms", "p50_ms", ".1f"),
        ("p99 ms", "p99_ms", ".1f"),
        ("messages per epoch", "messages_per_epoch", ".1f"),
        ("bytes per epoch", "bytes_per_epoch", ",.0f"),
        ("calls that ran again", "ran_again", ".2%"),
    ):
        table.add_row(label, *(format(result[form.name][name], shape) for form in FORMS))
    table.add_row("same as serial", *("yes" if result[form.name]["same_as_serial"] else "NO" for form in FORMS))
    costs = result["costly"]
    table.caption = (
        f"functions of {COSTLY_US} us: {costs['per_s']:,.0f} per second, {costs['speedup']:.2f} times one worker; two "
        f"processes that only spin do {costs['machine_speedup']:.2f} times the work of one"
    )
    return table
