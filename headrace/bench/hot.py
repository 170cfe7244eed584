"""Hot entities: orders that take from a counter; a third of them abort because of what they saw there.

Any shop does this. Spread over workers, whether an order commits is known only when all earlier orders on its counter
are known, and each order that turns out differently changes what later ones see. Only the protocol keeps repairs from
causing more repairs. All orders take from one counter, or each from one of a hundred.

Every run is compared with the serial engine, in this process and right after it: the same replies, the same state. The
first run, in which nothing is known about the functions yet, is reported separately: `cold`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace import Abort
from headrace.bench.senders import Stopwatch, send
from headrace.bench.ycsb import EngineInThread
from headrace.core.events import Send
from headrace.model.app import App
from headrace.model.context import Context
from headrace.runtime.cluster import Cluster
from headrace.runtime.worker_process import HEARTBEAT_S_MAX
from headrace.wire.messages import Final, Run

EPOCH = 1_000
CALLS_OF_ORDER = 2  # including its own
CASES = {"one": 1, "hundred": 100}
TIMES_SERIAL, BESIDES_MS = 20, 20  # an epoch should take at most this many times its serial time, plus this

app = App("hot")
order = app.operator("order")
counter = app.operator("counter")


@counter.register
def take(ctx: Context, x: int) -> int:
    seen: int = ctx.get(1)
    ctx.put((seen * 31 + x) % 1009)
    return seen


@order.register
async def place(ctx: Context, counter: str, x: int) -> int:
    seen: int = await ctx.call(take, counter, x)
    if (seen + x) % 3 == 0:
        raise Abort(f"{seen}")
    return seen


class WatchedCluster(Cluster):
    """Notes when epochs are sent to the workers, and when they are final."""

    def __init__(self, workers: int) -> None:
        self.began_s: dict[int, float] = {}  # by epoch
        self.final_s: dict[int, float] = {}
        super().__init__("headrace.bench.hot:app", workers, mode="ordered")

    def _send(self, effect: Send) -> None:
        if isinstance(effect.frame.body, Run | Final):
            times_s = self.began_s if isinstance(effect.frame.body, Run) else self.final_s
            times_s.setdefault(effect.frame.body.epoch, time.perf_counter())
        super()._send(effect)

    def counts(self) -> dict[str, Any]:
        """The metrics, once the workers' heartbeats have reported what they sent."""
        time.sleep(2 * HEARTBEAT_S_MAX)
        return self.metrics()


class HotFigures(NamedTuple):
    committed_per_s: float
    serial_per_s: float
    of_serial: float
    runs_per_call: float
    messages_per_epoch: float
    gathered: int  # transactions
    longest_epoch_ms: float  # from when it was sent until it was final
    its_serial_ms: float
    same_as_serial: bool


def run(cluster: WatchedCluster, serial: EngineInThread, counters: int, calls: int, number: int) -> HotFigures:
    rng = random.Random(number)
    keys = [number * calls + at for at in range(calls)]
    args = [(f"hot-{rng.randrange(counters)}", at % 7) for at in range(calls)]
    before = cluster.counts()
    (answers,), spread_s, _ = send(cluster, place, [(keys, args)])
    after = cluster.counts()
    laps, results, failures = Stopwatch(), [], {}
    for at in range(0, calls, EPOCH):
        with laps:
            part = serial.map(f"{number}-{at}", place, keys[at : at + EPOCH], args[at : at + EPOCH])
        results += part.results
        failures.update({at + row: failure for row, failure in part.failures.items()})
    did = {name: after[name] - before.get(name, 0) for name in ("epochs", "ran", "messages_sent", "gathered")}
    first, count = before["epochs"] + 1, len(laps.laps_s)
    assert did["epochs"] == count, "epochs are full"
    epochs_s = [cluster.final_s[each] - cluster.began_s[each] for each in range(first, first + count)]
    longest = max(range(count), key=epochs_s.__getitem__)
    committed, serial_s = calls - len(failures), sum(laps.laps_s)
    return HotFigures(
        committed_per_s=committed / spread_s,
        serial_per_s=committed / serial_s,
        of_serial=serial_s / spread_s,
        runs_per_call=did["ran"] / (CALLS_OF_ORDER * calls),
        messages_per_epoch=did["messages_sent"] / count,
        gathered=did["gathered"],
        longest_epoch_ms=epochs_s[longest] * 1e3,
        its_serial_ms=laps.laps_s[longest] * 1e3,
        same_as_serial=(answers.results, answers.failures) == (results, failures)
        and cluster.state(counter) == serial.tables["counter"],
    )


def hot(workers: int, calls: int, repeats: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """The whole benchmark: each case on its own cluster, once cold and then several times."""
    result: dict[str, Any] = {"workload": "hot", "calls": calls, "workers": workers, "repeats": repeats}
    for name, counters in CASES.items():
        serial, runs = EngineInThread(app), []
        with WatchedCluster(workers) as cluster:
            for number in range(repeats + 1):
                runs.append(run(cluster, serial, counters, calls, number))
                progress(calls)
        result[name] = figures(runs[1:]) | {"cold": figures(runs[:1])}
    return result


def figures(runs: list[HotFigures]) -> dict[str, Any]:
    """Medians; for epochs the longest of all."""
    found: dict[str, Any] = {
        name: round(median(getattr(one, name) for one in runs), 3)
        for name in ("committed_per_s", "serial_per_s", "of_serial", "runs_per_call", "messages_per_epoch", "gathered")
    }
    for name in ("committed_per_s", "serial_per_s"):
        found[name] = round(found[name])
    longest = max(runs, key=lambda one: one.longest_epoch_ms)
    found |= {name: round(getattr(longest, name), 1) for name in ("longest_epoch_ms", "its_serial_ms")}
    found["allowed_ms"] = round(TIMES_SERIAL * longest.its_serial_ms + BESIDES_MS, 1)
    return found | {"same_as_serial": all(one.same_as_serial for one in runs)}


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['calls']:,} orders that take from hot counters, {result['workers']} workers, ordered")
    for column in ("", "one counter", "at first", "a hundred", "at first"):
        table.add_column(column, justify="right" if column else "left")
    shown = [each for name in CASES for each in (result[name], result[name]["cold"])]
    for label, name, shape in (
        ("committed per second", "committed_per_s", ",.0f"),
        ("one serial engine", "serial_per_s", ",.0f"),
        ("of the serial engine", "of_serial", ".0%"),
        ("runs per call", "runs_per_call", ".2f"),
        ("messages per epoch", "messages_per_epoch", ".1f"),
        ("gathered", "gathered", ",.0f"),
        ("the longest epoch, ms", "longest_epoch_ms", ".1f"),
        ("serially, ms", "its_serial_ms", ".1f"),
        ("allowed, ms", "allowed_ms", ".1f"),
    ):
        table.add_row(label, *(format(each[name], shape) for each in shown))
    table.add_row("same as serial", *("yes" if each["same_as_serial"] else "NO" for each in shown))
    return table
