"""Who brings the faults that are not the network's own: crashes, pauses, partitions, silences, false alarms; and who
rescales and looks at state while all that goes on.
"""

from __future__ import annotations

import random

from headrace.sim.world import Node, World

CRASHES_MAX = 8  # a run is to come to an end


class Nemesis:
    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng, self.parameters = world, rng, world.parameters
        world.on_start = self.start

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
        ):
            for _ in range(count):
                self.world.after(self.rng.randrange(self.parameters.chaos_us), action)

    def heal(self) -> None:
        """No more faults; what was paused wakes up, and zombies are stopped in a while."""
        world = self.world
        world.is_chaos = False
        for node in [world.coordinator, *world.workers.values(), *world.zombies]:
            node.lives = None
            node.cut_off_until_us = 0
            world.after(self.rng.randrange(1, 5_000), world.wake, node)
        world.after(20_000, world.bury_zombies)

    # --- faults ---

    def start(self, node: Node) -> None:
        """A worker starts, in a recovery perhaps: it, or another one, may crash before that is over."""
        world, faults = self.world, self.parameters.faults
        if node.incarnation == 1 and world.now_us == 1_000_000:
            return
        if world.is_chaos and self.rng.random() < faults.crash_again and world.faults["crashes"] < CRASHES_MAX:
            victim = self.rng.choice([node, *world.workers.values()])
            victim.lives = self.rng.randrange(12)
            world.fault("crashes armed in a recovery")

    def _worker(self) -> Node | None:
        alive = [node for node in self.world.workers.values() if node.is_alive]
        return self.rng.choice(alive) if alive and self.world.is_chaos else None

    def _until_us(self, least: int = 5_000, most: int = 400_000) -> int:
        return self.world.now_us + int(least * (most / least) ** self.rng.random())

    def crash(self) -> None:
        node = self._worker()
        if node is not None:
            node.lives = self.rng.randrange(8)

    def pause(self) -> None:
        node = self._worker()
        if node is not None:
            self.world.pause(node if self.rng.random() < 0.85 else self.world.coordinator, self._until_us())

    def alarm(self) -> None:
        node = self._worker()
        if node is not None:
            self.world.fault("false alarms")
            self.world.report_lost(node)

    def split(self) -> None:
        """Some of the nodes cannot reach the others, in one direction or in both; or one link is cut."""
        world = self.world
        numbers = [0, *world.workers]
        if len(numbers) < 2 or not world.is_chaos:
            return
        self.rng.shuffle(numbers)
        at = self.rng.randrange(1, len(numbers))
        here, there = (numbers[:at], numbers[at:]) if self.rng.random() < 0.7 else (numbers[:1], numbers[1:2])
        links = [(a, b) for a in here for b in there]
        until_us = self._until_us()
        is_one_way = self.rng.random() < 0.4
        world.fault("partitions one-way" if is_one_way else "partitions two-way")
        if not is_one_way:
            links += [(b, a) for a, b in links]
        world.network.split(links, until_us)
        for number in sorted({n for a, b in links for n in (a, b) if 0 in (a, b)} - {0}):
            node = world.workers.get(number)
            if node is not None:
                world.cut_off(node, until_us)

    def silence(self) -> None:
        numbers = [0, *self.world.workers]
        if len(numbers) > 1 and self.world.is_chaos:
            self.world.fault("silent links")
            first, second = self.rng.sample(numbers, 2)
            self.world.network.silence((first, second), self._until_us())

    # --- operators ---

    def rescale(self) -> None:
        if self.world.is_chaos:
            self.world.rescale(self.rng.randint(1, 5))

    def look(self) -> None:
        world = self.world
        operators = list(world.workload.app.operators)
        rows = [row for row in world.history.rows.values() if not row.is_bad]
        operator, key = None, None
        if self.rng.random() < 0.6:
            operator = self.rng.choice(operators)
            if rows and self.rng.random() < 0.5:
                key = self.rng.choice(rows).call[1]
        world.probe("state read while others run")
        world.read(operator, key)
