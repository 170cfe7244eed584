"""The nemesis: causes the faults that are not the network's own (crashes, pauses, partitions, silences, false alarms),
and rescales and reads state during them.
"""

from __future__ import annotations

import random

from headrace.sim.coordinator_process import CoordinatorProcess
from headrace.sim.disk import AFTER, BEFORE, MIDDLE
from headrace.sim.node import SimNode
from headrace.sim.world import World

CRASHES_MAX = 8  # a run must end


class Nemesis:
    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng, self.parameters = world, rng, world.parameters
        world.on_start, world.on_open, world.on_pause = self.start, self.open, self.pause_process
        world.on_saved, self.snapshot_crashes = self.crash_after_snapshot, self.parameters.faults.snapshot_crashes

    def begin(self) -> None:
        faults = self.parameters.faults
        for count, action in (
            (faults.crashes, self.crash),
            (faults.pauses, self.pause),
            (faults.partitions, self.split),
            (faults.silences, self.silence),
            (faults.false_alarms, self.alarm),
            (faults.rescales, self.rescale),
            (faults.reads, self.look),
            (faults.echoes, self.world.network.echo),
            (faults.coordinator_crashes, self.crash_coordinator),
            (faults.coordinator_pauses, self.pause_coordinator),
            (faults.false_takeovers, self.take_over),
            (faults.power_losses, self.lose_power),
            (faults.full_times, self.fill),
        ):
            for _ in range(count):
                self.world.after(self.rng.randrange(self.parameters.chaos_us), action)

    def heal(self) -> None:
        """Ends all faults; paused nodes wake up, and zombies are stopped after a while."""
        world = self.world
        world.is_chaos = False
        world.disk.is_calm, world.disk.is_full = True, False
        for process in world.processes:
            process.pause_in = process.power_in = None
            if process.store is not None:
                process.store.dies_at = process.dies_in = None
        nodes = [node for process in world.processes for node in (process.node, *process.workers.values())]
        for node in [*nodes, *world.zombies]:
            node.crash_in = None
            node.cut_off_until_us = 0
            world.after(self.rng.randrange(1, 5_000), world.wake, node)
        world.after(20_000, world.bury_zombies)

    # --- faults ---

    def start(self, node: SimNode) -> None:
        """A worker starts, perhaps in a recovery: it, or another one, may crash before the recovery ends."""
        world, faults = self.world, self.parameters.faults
        if node.incarnation == 1 and node.process.number == 1:
            return
        if world.is_chaos and self.rng.random() < faults.crash_again and world.faults["crashes"] < CRASHES_MAX:
            victim = self.rng.choice([node, *node.process.workers.values()])
            victim.crash_in = self.rng.randrange(12)
            world.fault("crashes armed in a recovery")

    def _worker(self) -> SimNode | None:
        alive = [node for node in self.world.workers.values() if node.is_alive]
        return self.rng.choice(alive) if alive and self.world.is_chaos else None

    def _until_us(self, least: int = 5_000, most: int = 400_000) -> int:
        return self.world.now_us + int(least * (most / least) ** self.rng.random())

    def crash(self) -> None:
        node = self._worker()
        if node is not None:
            node.crash_in = self.rng.randrange(8)

    def pause(self) -> None:
        node = self._worker()
        if node is not None:
            self.world.pause(node if self.rng.random() < 0.85 else node.process.node, self._until_us())

    def alarm(self) -> None:
        node = self._worker()
        if node is not None:
            self.world.fault("false alarms")
            self.world.report_lost(node)

    def split(self) -> None:
        """Some nodes cannot reach the others, in one direction or in both; or one link is cut."""
        world = self.world
        numbers = [0, *world.workers]
        if len(numbers) < 2 or not world.is_chaos:
            return
        self.rng.shuffle(numbers)
        at = self.rng.randrange(1, len(numbers))
        here, there = (numbers[:at], numbers[at:]) if self.rng.random() < 0.7 else (numbers[:1], numbers[1:2])
        process_number = world.process.number if world.process is not None else 0
        links = [(process_number, a, b) for a in here for b in there]
        until_us = self._until_us()
        is_one_way = self.rng.random() < 0.4
        world.fault("partitions one-way" if is_one_way else "partitions two-way")
        if not is_one_way:
            links += [(process_number, b, a) for _, a, b in links]
        world.network.split(links, until_us)
        for number in sorted({n for _, a, b in links for n in (a, b) if 0 in (a, b)} - {0}):
            node = world.workers.get(number)
            if node is not None:
                world.cut_off(node, until_us)

    def silence(self) -> None:
        process, numbers = self.world.process, [0, *self.world.workers]
        if process is not None and len(numbers) > 1 and self.world.is_chaos:
            self.world.fault("silent links")
            first, second = self.rng.sample(numbers, 2)
            self.world.network.silence((process.number, first, second), self._until_us())

    # --- coordinators and their disk ---

    def open(self, process: CoordinatorProcess) -> None:
        """A coordinator starts, perhaps in a recovery: it may crash before the recovery ends."""
        world, faults = self.world, self.parameters.faults
        if world.is_chaos and faults.coordinator_crashes and self.rng.random() < faults.crash_again:
            world.fault("crashes armed in a coordinator's recovery")
            self._arm(process, 60)
        if world.is_chaos and faults.coordinator_pauses and self.rng.random() < 0.2:
            process.pause_in = self.rng.randrange(40)

    def _arm(self, process: CoordinatorProcess, most: int) -> None:
        where = self.rng.choice((BEFORE, MIDDLE, AFTER))
        process.dies_in = (self.rng.randrange(1, most), where)

    def crash_coordinator(self) -> None:
        process = self.world.processes[-1]
        if self.world.is_chaos and process.is_alive:
            if self.rng.random() < 0.5:
                process.node.crash_in = self.rng.randrange(12)
            else:
                self._arm(process, 12)

    def crash_after_snapshot(self, process: CoordinatorProcess) -> None:
        """More likely while a firing has aborted and is not dropped yet: then only the snapshot knows of it."""
        if not self.world.is_chaos or not self.snapshot_crashes:
            return
        if self.rng.random() < (0.8 if process.core.deferred.spent else 0.1):
            self.snapshot_crashes -= 1
            self.world.fault("coordinator crashes after a snapshot")
            self.world.after(self.rng.randrange(1, 1_000), self.world.crash, process.node)

    def pause_coordinator(self) -> None:
        """Pauses it between two steps, or before one of its next store operations."""
        process = self.world.processes[-1]
        if self.world.is_chaos and process.is_alive:
            if self.rng.random() < 0.3:
                self.pause_process(process)
            else:
                process.pause_in = self.rng.randrange(10)

    def pause_process(self, process: CoordinatorProcess) -> None:
        """Pauses it; in most cases another coordinator takes over meanwhile."""
        world = self.world
        until_us = self._until_us(1_000, 200_000)
        world.pause(process.node, until_us)
        if self.rng.random() < 0.8:
            world.at(self.rng.randint(world.now_us, until_us), world.replace, process)

    def take_over(self) -> None:
        """Starts a second coordinator, though the first one works."""
        if self.world.is_chaos and self.world.processes[-1].is_serving:
            self.world.fault("false takeovers")
            self.world.replace(self.world.processes[-1])

    def lose_power(self) -> None:
        """Loses power at once, or between a write and its sync."""
        if self.world.is_chaos:
            process = self.world.processes[-1]
            if process.is_alive and self.rng.random() < 0.7:
                process.power_in = self.rng.randrange(4)
            else:
                self.world.lose_power()

    def fill(self) -> None:
        if self.world.is_chaos:
            self.world.disk.is_full = True
            self.world.after(self.rng.randint(100, 40_000), self._free)

    def _free(self) -> None:
        self.world.disk.is_full = False

    # --- operators ---

    def rescale(self) -> None:
        if self.world.is_chaos:
            self.world.rescale(self.rng.randint(1, 5))

    def look(self) -> None:
        world = self.world
        operators = list(world.workload.apps[0].operators)
        rows = [row for row in world.history.rows.values() if not row.is_bad]
        operator, key = None, None
        if self.rng.random() < 0.6:
            operator = self.rng.choice(operators)
            if rows and self.rng.random() < 0.5:
                key = self.rng.choice(rows).call[1]
        world.probe("state read while others run")
        serving = [process for process in world.processes if process.is_serving]
        if serving:  # perhaps one that was superseded and does not know it
            world.read(operator, key, self.rng.choice(serving))
