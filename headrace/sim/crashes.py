"""Exhaustive crash points: small scenarios without other faults, in which a worker crashes before each of its effects.

Random crashes find likely bugs; these find bugs that only one instant shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from headrace.config import Config
from headrace.sim.node import SimNode
from headrace.sim.parameters import Parameters
from headrace.sim.run import Batches, RunReport, Simulation
from headrace.sim.workload import Workload
from headrace.sim.world import World


@dataclasses.dataclass(frozen=True)
class Scenario:
    name: str
    script: Callable[[Any], list[Batches]]
    workload: str = "bank"
    workers: int = 2
    mode: str = "auto"
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    besides: Callable[[World], None] = lambda world: None  # what else happens
    crash_first: int | None = None  # an effect before which a worker crashes anyway

    def parameters(self) -> Parameters:
        config = Config(resend_us=20_000, wall_limit_us=30_000, silence_us_max=50_000, **self.limits)
        return Parameters(
            0,
            self.workload,
            workers=self.workers,
            mode=self.mode,
            config=config,
            chaos_us=60_000,
            delay_us=100,
            store="none",
        )

    def run(self, crash_at: int | None = None) -> tuple[RunReport, int]:
        """Runs it, with a crash before the effect of this number. Also returns how many effects the run has."""
        run = Simulation(self.parameters(), script=self.script)
        world = run.world
        at = {number for number in (self.crash_first, crash_at) if number is not None}
        count = 0

        def before_effect(node: SimNode, name: str) -> None:
            nonlocal count
            if name == "Send" and node.number:
                count += 1
                if count in at:
                    world.crash(node)

        world.on_effect = before_effect
        self.besides(world)
        return run.report(), count


def crash_everywhere(scenario: Scenario) -> Iterator[tuple[int, RunReport]]:
    """Yields the report of a run for each crash point."""
    report, count = scenario.run()
    yield 0, report
    for crash_at in range(1, count + 1):
        yield crash_at, scenario.run(crash_at)[0]


def bank(workload: Any) -> dict[str, Any]:
    """Three accounts, on different workers."""
    workload.accounts = [0, 17, 20]
    return workload.functions  # type: ignore[no-any-return]


def transfers(workload: Workload) -> list[Batches]:
    """Across workers and back, one that must abort at its far end, and one that audits."""
    f = bank(workload)
    return [
        [[(f["transfer"], 0, 17, 40), (f["transfer"], 17, 0, 30), (f["transfer_awaited"], 0, 17, 70)]],
        [[(f["audit"], 0, [0, 17, 20])], [(f["transfer_over"], 17, 20, 0, 15)]],
    ]


def aborts(workload: Workload) -> list[Batches]:
    """All in one epoch: the second only succeeds because the first aborts."""
    f = bank(workload)
    return [[[(f["transfer"], 0, 17, 90), (f["transfer"], 20, 17, 50), (f["pay_fee"], 17, 60)]]]


def one_by_one(workload: Workload) -> list[Batches]:
    f = bank(workload)
    return [[[(f["transfer_over"], 0, 17, 20, 15)], [(f["transfer_awaited"], 17, 0, 5)]]]


def appends(workload: Any) -> list[Batches]:
    workload.keys = ["list 0", "list 1", "list 2"]
    f = workload.functions
    first = [["append", "list 0", 101], ["read", "list 1", 0], ["append", "list 2", 102]]
    second = [["read", "list 2", 0], ["append", "list 1", 103], ["read", "list 0", 0]]
    third = [["append", "list 1", 104], ["append", "list 0", 105]]
    return [[[(f["run_all"], "list 0", first, 0), (f["run_all"], "list 1", second, 2), (f["send_all"], "x", third)]]]


SCENARIOS = (
    Scenario("transfers over two workers", transfers),
    Scenario("aborts on another worker", aborts, workers=3),
    Scenario("one transaction at a time", one_by_one, limits={"epoch_transactions_max": 1, "epochs_in_flight_max": 1}),
    Scenario("reads and appends in one epoch", appends, workload="append", workers=3),
    Scenario("one worker, serially", transfers, workers=1, mode="serial"),
    Scenario("a crash while it recovers", aborts, crash_first=4),
    Scenario(
        "state that is copied and sent in parts",
        transfers,
        limits={"replay_transactions_max": 1, "entities_per_frame_max": 1, "epoch_transactions_max": 2},
    ),
    Scenario("a limit that only the transaction as a whole meets", transfers, workers=3, limits={"calls_max": 2}),
    Scenario("more workers, then fewer", transfers, besides=lambda world: rescale_twice(world)),
    Scenario(
        "state read on the way", appends, workload="append", besides=lambda world: world.after(21_000, look, world)
    ),
)


def rescale_twice(world: World) -> None:
    world.after(21_000, world.rescale, 3)
    world.after(22_000, world.rescale, 1)


def look(world: World) -> None:
    world.read(None, None)
