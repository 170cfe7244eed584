"""The network between the nodes: it loses, doubles, delays and reorders frames, holds links back, and is cut apart."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from headrace.wire.codec import decode_frame, encode
from headrace.wire.messages import Frame

if TYPE_CHECKING:
    from headrace.sim.coordinator_process import CoordinatorProcess
    from headrace.sim.node import SimNode
    from headrace.sim.world import World

Link = tuple[int, int, int]  # coordinator process, from, to
KEPT_MAX = 200  # old frames


class SimNetwork:
    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.faults, self.delay_us = world.parameters.faults, world.parameters.delay_us
        self.last_arrival_us: dict[Link, int] = {}
        self.cut: dict[Link, int] = {}  # how many partitions cut this link now
        self.silent_until_us: dict[Link, int] = {}
        self.kept: list[bytes] = []

    def send(self, source: SimNode, frame: Frame) -> bytes:
        data = encode(frame)
        world, rng, faults = self.world, self.rng, self.faults
        link = (source.process.number, source.number, frame.to)
        if len(self.kept) < KEPT_MAX:
            self.kept.append(data)
        else:
            self.kept[rng.randrange(KEPT_MAX)] = data
        target = source.process.find(frame.to)
        if target is None or not world.is_chaos:
            if target is not None:
                self._travel(link, data, target)
        elif self.cut.get(link):
            world.fault("cut off")
        elif rng.random() < faults.loss:
            world.fault("lost")
        else:
            self._travel(link, data, target)
            while rng.random() < faults.duplication:
                world.fault("duplicated")
                self._travel(link, data, target)
        return data

    def _travel(self, link: Link, data: bytes, target: SimNode) -> None:
        world, rng = self.world, self.rng
        at_us = world.now_us + rng.randint(self.delay_us // 2, 2 * self.delay_us)
        if world.is_chaos:
            if rng.random() < self.faults.tail:
                world.fault("delayed")
                at_us += int(rng.expovariate(1 / 20_000))
            if at_us < self.silent_until_us.get(link, 0):
                world.fault("held back")
                at_us = self.silent_until_us[link] + rng.randrange(100)
        if at_us <= self.last_arrival_us.get(link, 0):
            if self.faults.reordering and world.is_chaos:
                world.fault("reordered")
            else:
                at_us = self.last_arrival_us[link] + 1
        self.last_arrival_us[link] = max(at_us, self.last_arrival_us.get(link, 0))
        world.at(at_us, self._arrive, data, target)

    def _arrive(self, data: bytes, target: SimNode) -> None:
        frame = decode_frame(data)
        if not target.is_alive:  # a connection that is restored may deliver a pending frame to the node's successor
            process = target.process if target.process.is_alive else self.world.process
            successor = process.find(target.number) if process is not None and can_hear(process, frame) else None
            if successor is None or self.rng.random() < 0.5:
                return
            self.world.fault("reached a successor")
            target = successor
        self.world.receive(target, frame)

    def echo(self) -> None:
        """Delivers an old frame again, to the node that has the number now."""
        if self.kept and self.world.is_chaos:
            frame, process = decode_frame(self.rng.choice(self.kept)), self.world.process
            target = process.find(frame.to) if process is not None and can_hear(process, frame) else None
            if process is not None and target is not None:
                is_old_term = frame.term < process.core.backend.term
                self.world.fault("frames of old terms again" if is_old_term else "frames again")
                self.world.receive(target, frame)

    def split(self, links: list[Link], until_us: int) -> None:
        for link in links:
            self.cut[link] = self.cut.get(link, 0) + 1
        self.world.at(until_us, self._join, links)

    def _join(self, links: list[Link]) -> None:
        for link in links:
            self.cut[link] -= 1

    def silence(self, link: Link, until_us: int) -> None:
        self.silent_until_us[link] = max(until_us, self.silent_until_us.get(link, 0))


def can_hear(process: CoordinatorProcess, frame: Frame) -> bool:
    """Whether the frame can reach this process: none goes from a newer coordinator to an older one."""
    return bool(process.wanted_workers) and frame.term <= process.core.backend.term
