"""One run from one seed: a time of faults, then recovery with all answers in bounded virtual time, then checks."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.program import Program
from headrace.sim.changelog_check import check_changelog, check_changes
from headrace.sim.check import Reference, check_history, check_rest
from headrace.sim.clients import SimClient
from headrace.sim.history import StateRead
from headrace.sim.nemesis import Nemesis
from headrace.sim.parameters import Parameters, draw
from headrace.sim.replay_check import check_replay
from headrace.sim.workload import Call, Workload
from headrace.sim.workloads import WORKLOADS
from headrace.sim.world import CoreFailed, World

PROBES = (  # what some runs must have seen, else the runs prove little
    "aborted",
    "gathered",
    "asked a coordinator that was superseded",
    "asked again after the answer",
    "changelogs begun",
    "changes kept",
    "compared an older version's replies",
    "copies of the state",
    "external calls",
    "failure aborted",
    "failure bad_call",
    "failure bad_value",
    "failure external_failed",
    "failure limit_reached",
    "failure poisoned",
    "lone transactions",
    "ok",
    "predicted",
    "recoveries",
    "refused",
    "repaired",
    "repeated answers",
    "request id used for another call",
    "rescaled",
    "schedules fired",
    "schedules whose firing aborted",
    "snapshots",
    "started a newer version that had to replay an older one's epochs",
    "started with firings that had aborted",
    "state read while others run",
    "timers fired",
    "timers whose firing aborted",
    "worst loss of power imagined",
    "zombies spoke",
)
METRICS = {  # probes that the coordinator counts
    "gathered": "gathered",
    "lone transactions": "lone",
    "predicted": "predicted",
    "recoveries": "recoveries",
    "repaired": "repairs",
}
PATIENCE_US = 60_000_000  # of virtual time, once there are no more faults
JUMPS_MAX = 8  # of the clocks, to what is due next: during the faults, and after them
REST_US = 300_000  # after a jump


Batches = list[list[Call]]


class RunReport(msgspec.Struct):
    """The result of a run."""

    seed: int
    parameters: dict[str, Any]
    violations: list[str]
    faults: dict[str, int]
    probes: dict[str, int]
    digest: str
    events: int
    effects: int
    transactions: int
    virtual_us: int

    @property
    def is_clean(self) -> bool:
        return not self.violations


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> RunReport:
    return run(draw(seed), trace)


def run(parameters: Parameters, trace: Callable[[str], None] | None = None) -> RunReport:
    return Simulation(parameters, trace).report()


class Simulation:
    """One world, with its clients and its nemesis."""

    def __init__(
        self,
        parameters: Parameters,
        trace: Callable[[str], None] | None = None,
        script: Callable[[Workload], list[Batches]] | None = None,
        is_source: bool | None = None,
        workload: Workload | None = None,
    ) -> None:
        """`script` gives each client's requests, `is_source` whether it is a streaming query; by default both are
        drawn. `workload` is one that has no name."""
        rng = parameters.rng("workload")
        self.parameters = parameters
        self.workload = workload or WORKLOADS[parameters.workload](rng, parameters.faults.misbehaviour)
        self.log = Reference()
        self.workload.hooks.chance = parameters.rng("overruns")
        self.world = World(parameters, self.workload, trace)
        self.nemesis = Nemesis(self.world, parameters.rng("nemesis"))
        batches = self._batches(rng) if script is None else script(self.workload)
        self.clients = [
            SimClient(self.world, number, calls, parameters.rng(f"client {number}"), is_source)
            for number, calls in enumerate(batches)
        ]

    def _batches(self, rng: random.Random) -> list[Batches]:
        batches: list[Batches] = [[] for _ in range(self.parameters.clients)]
        left, only = self.parameters.transactions, self.parameters.only
        while left > 0:
            size = min(left, rng.choice((1, 1, 2, 3, 6, 12) if self.parameters.transactions < 100 else (12, 60, 300)))
            calls = [self.workload.call(rng) for _ in range(size)]
            if only is not None:
                first = self.parameters.transactions - left
                calls = [call for at, call in enumerate(calls, start=first) if at in only]
            rng.choice(batches).append(calls)
            left -= size
        return [[calls for calls in of_client if calls] for of_client in batches]

    def report(self) -> RunReport:
        try:
            self.go()
        except CoreFailed as error:
            why = error.__cause__
            where = "".join(traceback.format_exception(why)[-2:]).strip() if why is not None else ""
            self.world.violate(f"broken: {error} {where}")
        return self.described()

    def go(self) -> None:
        world = self.world
        world.begin()
        self.nemesis.begin()
        for client in self.clients:
            client.begin()
        if self.workload.is_timeless:
            self._plan_jumps()
        end_us = world.now_us + self.parameters.chaos_us
        world.run(lambda: False, end_us)
        world.now_us = max(world.now_us, end_us)
        self.nemesis.heal()
        if not self._wait_for_all():
            return
        if self.workload.is_timeless:
            self._reach_timers()
        last = self.workload.last_calls()
        if last:
            self.clients.append(SimClient(world, len(self.clients), [last], self.parameters.rng("last client")))
            self.clients[-1].begin()
            if not self._wait_for_all():
                return
        self._read_state_and_rest()
        if world.is_durable and not world.violations:
            self._restart()
            self._read_state_and_rest()
        if not world.violations:
            self.check()

    def _plan_jumps(self) -> None:
        rng = self.parameters.rng("jumps")
        for _ in range(rng.randint(0, JUMPS_MAX)):
            self.world.after(rng.randrange(self.parameters.chaos_us), self._jump, rng)

    def _jump(self, rng: random.Random) -> None:
        self.world.jump(rng)

    def _reach_timers(self) -> None:
        """Go on to what is due next, several times. What is due later than that never is."""
        world, rng = self.world, self.parameters.rng("last jumps")
        for _ in range(JUMPS_MAX):
            if not world.violations and world.jump(rng):
                world.run(lambda: False, world.now_us + REST_US)

    def _read_state_and_rest(self) -> None:
        """Reads all state, and waits until nothing happens any more."""
        world = self.world
        state_read: StateRead | None = None
        while not world.violations and (
            state_read is None or not state_read.found
        ):  # the coordinator that is asked may still be superseded
            self._within_patience(
                lambda: world.process is not None and world.process.is_alive, "no coordinator is running"
            )
            state_read = world.read(None, None)
            if state_read is not None:
                self._within_patience(state_read.is_over, "the state was not found")
        self._within_patience(lambda: not world.heap, "it does not come to rest")
        if not world.violations and world.process is not None and world.process.wanted_workers:
            workers = {number: node.core for number, node in world.workers.items()}
            world.violations += check_rest(world.coordinator.core.backend, workers)

    def _restart(self) -> None:
        """Loses power. The next coordinator must know all answers, and give the same ones again."""
        world = self.world
        last = world.processes[-1]
        world.lose_power()
        self._within_patience(
            lambda: world.process is not last and world.coordinator.is_alive, "no coordinator took over"
        )
        for client in self.clients:
            client.ask_all_again()
        self._wait_for_all()

    def _wait_for_all(self) -> bool:
        world = self.world
        self._within_patience(lambda: all(client.is_done for client in self.clients), "requests were not answered")
        self._within_patience(
            lambda: world.process is not None and world.process.is_alive and not world.process.tokens,
            "questions were not answered",
        )
        return not world.violations

    def _within_patience(self, until: Callable[[], bool], what: str) -> None:
        world = self.world
        if not world.violations and not world.run(until, world.now_us + PATIENCE_US):
            world.violate(f"not live: {what} in {PATIENCE_US // 1_000_000} seconds after the faults ended")

    def check(self) -> None:
        world, app, config = self.world, self.workload.app, self.parameters.config
        program = world.coordinator.core.program
        if program.app is not app:  # an older version was the last to run
            program = Program(app, config)
        oracle = self.workload.oracle(program.under(config), self.parameters.seed)
        log = Reference.of_history(world.history)
        if world.is_durable:
            log = Reference.of_log(world.history, world.archive.read(program), program)
        self.log = log
        world.violations += log.wrong
        world.violations += check_history(world.history, log, self.workload, oracle, world.archive.snapshots)
        world.probes.update(log.probes)
        if world.is_durable and not world.violations:
            world.violations += check_changes(world.archive.changes, log, program.values)
            world.violations += check_changelog(
                world.disk, world.archive.changes, world.processes[-1].opened_store, log
            )
            self.workload.hooks.watch(None)
            last = log.moments[-1]
            is_one = len(self.workload.apps) == 1  # versions may write a state in different forms
            digests = [(key[0], digest) for key, digest in world.archive.digests.items() if is_one]
            world.violations += check_replay(app, config, self.parameters.seed, world.archive.records, last, digests)

    def described(self) -> RunReport:
        world = self.world
        return RunReport(
            seed=self.parameters.seed,
            parameters=self.parameters.described(),
            violations=world.violations,
            faults=dict(sorted(world.faults.items())),
            probes=dict(sorted(self.probes().items())),
            digest=world.digest.hexdigest(),
            events=world.events,
            effects=world.effects,
            transactions=sum(row.tid is not None for row in world.history.rows.values()),
            virtual_us=world.now_us,
        )

    def probes(self) -> Counter[str]:
        """What the run has seen of the protocol."""
        world = self.world
        probes = Counter(world.probes)
        for row in world.history.rows.values():
            probes[row.status] += 1
            if row.status == "aborted" and row.failure is not None:
                probes[f"failure {row.failure.code}"] += 1
        probes["repeated answers"] = world.history.repeats
        probes["functions interrupted in an engine"] = self.workload.hooks.interrupted
        for process in world.processes:
            if process.core is not None and process.wanted_workers:
                seen = process.core.backend.metrics()
                for probe, metric in METRICS.items():
                    probes[probe] += seen.get(metric, 0)
                probes["copies of the state"] += int(process.core.backend.copied_tid > 0)
        return +probes
