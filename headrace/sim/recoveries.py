"""Exhaustive crash points of a coordinator: small scenarios over a store, with a fault at each point of them.

The points are the coordinators' effects and store operations, in all starts and recoveries of the run. The faults:

    effect    the process is killed before this effect
    kill      it is killed before this operation; what it has written is in the page cache
    middle    it is killed in the middle of this write, and power is lost
    power     power is lost before this operation, and with it all that was not synced
    pause     it stops before this operation, a successor takes over and serves, and then it continues
    race      like pause, but the successor stops too, in the middle of its start, and a third one takes over
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from headrace.config import Config
from headrace.sim.coordinator_process import CoordinatorProcess
from headrace.sim.crashes import aborts, appends, one_by_one, rescale_twice, transfers
from headrace.sim.disk import BEFORE, MIDDLE
from headrace.sim.node import SimNode
from headrace.sim.parameters import Faults, Parameters
from headrace.sim.run import Batches, RunReport, Simulation
from headrace.sim.world import World

WAYS = ("effect", "kill", "middle", "power", "pause", "race")


@dataclasses.dataclass(frozen=True)
class RecoveryScenario:
    name: str
    script: Callable[[Any], list[Batches]] = transfers
    workload: str = "bank"
    workers: int = 2
    mode: str = "auto"
    store: str = "files"
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    faults: Faults = dataclasses.field(default_factory=Faults)
    besides: Callable[[World], None] = lambda world: None  # what else happens
    is_source: bool | None = False
    chaos_us: int = 60_000  # for how long points are counted
    pause_us: int = 60_000
    crash_first: int | None = None  # an operation before which it is killed anyway
    ways: tuple[str, ...] = ("effect", "kill", "middle", "power", "pause")
    changes: float = 0.0  # the share of operators that log their changes, drawn at each start

    def parameters(self) -> Parameters:
        limits = {"resend_us": 20_000, "wall_limit_us": 30_000, "silence_us_max": 50_000, **self.limits}
        return Parameters(
            0,
            self.workload,
            workers=self.workers,
            mode=self.mode,
            config=Config(**limits),
            chaos_us=self.chaos_us,
            delay_us=100,
            store=self.store,
            faults=self.faults,
            changes=self.changes,
        )

    def run(self, way: str = "", point: int = 0) -> tuple[RunReport, dict[str, int]]:
        """Runs it, with a fault at one point. Also returns how many points of each kind the run has."""
        run = Simulation(self.parameters(), script=self.script, is_source=self.is_source)
        points = CrashPoints(self, run.world, way, point)
        self.besides(run.world)
        report = run.report()
        return report, points.counts


class CrashPoints:
    """Counts the points of a run, and causes the fault at one of them."""

    def __init__(self, recovery: RecoveryScenario, world: World, way: str, point: int) -> None:
        self.recovery, self.world, self.way, self.point = recovery, world, way, point
        self.counts = {"effects": 0, "operations": 0, "writes": 0}
        self.victim: CoordinatorProcess | None = None
        self.is_racing = False
        world.disk.fate = "lost"
        world.on_open, world.on_pause = self.open, self.pause
        world.on_effect, world.on_operation, world.on_end = self.effect, self.operation, self.end

    def effect(self, node: SimNode, name: str) -> None:
        if node.number == 0 and self.world.is_chaos:
            self.counts["effects"] += 1
            if self.way == "effect" and self.counts["effects"] == self.point:
                self.world.crash(node)

    def operation(self, process: CoordinatorProcess, op: str, name: str) -> None:
        world, store = self.world, process.store
        if store is None or not world.is_chaos:
            return
        self.counts["operations"] += 1
        self.counts["writes"] += op == "append"
        if self.counts["operations"] == self.recovery.crash_first:
            store.dies_at = (store.operations, BEFORE)
        if self.way == "middle":
            if op == "append" and self.counts["writes"] == self.point:
                self.victim = process
                store.dies_at = (store.operations, MIDDLE)
        elif self.counts["operations"] == self.point and self.way != "effect":
            self._strike(process)

    def _strike(self, process: CoordinatorProcess) -> None:
        world, store = self.world, process.store
        assert store is not None
        if self.way == "kill":
            world.fault("coordinator crashes")
            store.dies_at = (store.operations, BEFORE)
        elif self.way == "power":
            world.lose_power()
        elif self.way in ("pause", "race"):
            self.is_racing = self.way == "race"
            world.pause(process.node, world.now_us + self.recovery.pause_us)
            world.after(1, world.replace, process)

    def open(self, process: CoordinatorProcess) -> None:
        if self.is_racing:
            self.is_racing = False
            process.pause_in = self.point % 19

    def pause(self, process: CoordinatorProcess) -> None:
        self.world.pause(process.node, self.world.now_us + self.recovery.pause_us // 2)
        self.world.after(1, self.world.replace, process)

    def end(self, process: CoordinatorProcess) -> None:
        if process is self.victim:
            self.victim = None
            self.world.fault("coordinator crashes")
            self.world.lose_power()


def strike_everywhere(recovery: RecoveryScenario, stride: int = 1) -> Iterator[tuple[str, int, RunReport]]:
    """Yields the report of a run for each kind of fault and each point."""
    report, counts = recovery.run()
    yield "", 0, report
    kinds = {"effect": "effects", "middle": "writes"}
    for way in recovery.ways:
        for point in range(1, counts[kinds.get(way, "operations")] + 1, stride):
            yield way, point, recovery.run(way, point)[0]


def loads(workload: Any) -> list[Batches]:
    """Two queries that send batches, larger than an epoch."""
    f = workload.functions
    workload.accounts = [0, 17, 20]
    return [
        [[(f["transfer"], 0, 17, 5), (f["pay_fee"], 17, 3), (f["transfer"], 20, 0, 5)], [(f["transfer"], 17, 20, 1)]],
        [[(f["audit"], 0, [0, 17, 20])], [(f["transfer_awaited"], 20, 17, 9), (f["transfer"], 0, 20, 95)]],
    ]


def reminders(workload: Any) -> list[Batches]:
    """Timers that fire, abort and are cancelled; state that expires; messages and their responses."""
    f = workload.functions
    workload.keys = ["a", 1]
    return [
        [[(f["remind"], "a", 0.0, 1, 5, False), (f["remind"], 1, 0.001, "a", 6, True), (f["touch"], 1, 3)]],
        [[(f["post"], "a", 1, 4), (f["remind"], "a", 0.02, 1, 8, False)], [(f["forget"], "a")]],
    ]


def purchases(workload: Any) -> list[Batches]:
    """External calls, within others and before an abort."""
    f = workload.functions
    workload.keys = ["a", 1]
    return [[[(f["stamp"], 1), (f["buy_for"], "a", 1, 2), (f["buy"], 1, 4, True)]], [[(f["choose"], "a", 2)]]]


OFTEN = {"snapshot_interval_us": 1, "snapshots_kept": 1}
FEW = ("kill", "power", "pause")
SMALL = {"epoch_transactions_max": 2, "segment_bytes_max": 1}

RECOVERIES = (
    RecoveryScenario("an engine by itself", workers=0, limits=OFTEN),
    RecoveryScenario("an engine by itself, over objects", workers=0, store="objects", limits=OFTEN | SMALL),
    RecoveryScenario("two workers", limits={"epoch_transactions_max": 2}),
    RecoveryScenario(
        "one transaction at a time", one_by_one, limits={"epoch_transactions_max": 1, "epochs_in_flight_max": 1}
    ),
    RecoveryScenario("a snapshot after every epoch, segments of one record", limits=OFTEN | SMALL),
    RecoveryScenario("a snapshot after every epoch, over objects", aborts, store="objects", limits=OFTEN | SMALL),
    RecoveryScenario("batches of queries that span epochs", loads, workers=0, is_source=True, limits=SMALL),
    RecoveryScenario("batches of queries and snapshots", loads, is_source=True, limits=OFTEN | SMALL, ways=FEW),
    RecoveryScenario("aborts under other limits than the next one's", transfers, faults=Faults(new_limits=True)),
    RecoveryScenario(
        "killed while it recovers", aborts, workers=0, limits=OFTEN, crash_first=40, ways=("kill", "power")
    ),
    RecoveryScenario("killed while it begins", aborts, workers=0, crash_first=9, ways=("kill", "power")),
    RecoveryScenario(
        "more workers, then fewer", one_by_one, limits=OFTEN, besides=rescale_twice, ways=("effect", "kill")
    ),
    RecoveryScenario(
        "lists, histories judged from outside", appends, workload="append", limits=OFTEN, ways=("pause", "race")
    ),
    RecoveryScenario("timers and messages", reminders, workload="outside", workers=0, limits=OFTEN, ways=FEW),
    RecoveryScenario("timers and messages, over objects", reminders, workload="outside", store="objects", limits=SMALL),
    RecoveryScenario("external calls", purchases, workload="outside", workers=0, limits=OFTEN, chaos_us=150_000),
    RecoveryScenario(
        "external calls of two workers", purchases, workload="outside", limits=OFTEN, chaos_us=150_000, ways=FEW
    ),
    RecoveryScenario("changes are logged", aborts, limits=OFTEN | SMALL, changes=1.0, ways=FEW),
    RecoveryScenario("changes are logged, now and then", transfers, workers=0, limits=OFTEN, changes=0.6),
    RecoveryScenario("three coordinators at once", aborts, workers=0, limits=OFTEN | SMALL, ways=("race",)),
    RecoveryScenario(
        "three coordinators at once, over objects", aborts, workers=0, store="objects", limits=OFTEN, ways=("race",)
    ),
)
