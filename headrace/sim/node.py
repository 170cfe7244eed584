"""A node: one incarnation of a coordinator or of a worker, with its own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.sim.coordinator_process import CoordinatorProcess


class SimClock:
    """A node's clock: off by a constant, and running a little fast or slow."""

    def __init__(self, offset_us: int = 0, drift_ppm: int = 0) -> None:
        self.offset_us, self.drift_ppm = offset_us, drift_ppm

    def read(self, now_us: int) -> int:
        return now_us + now_us * self.drift_ppm // 1_000_000 + self.offset_us

    def when(self, reads_us: int) -> int:
        """The world's time at which this clock first reads at least `reads_us`."""
        at_us = (reads_us - self.offset_us) * 1_000_000 // (1_000_000 + self.drift_ppm)
        while self.read(at_us) < reads_us:
            at_us += 1
        return at_us


class SimNode:
    def __init__(self, process: CoordinatorProcess, number: int, incarnation: int, core: Any, clock: SimClock) -> None:
        self.process, self.number, self.incarnation, self.core, self.clock = process, number, incarnation, core, clock
        self.name = f"{process.number}:{number}.{incarnation}"
        self.is_alive = True
        self.is_paused = False
        self.is_stuck = False  # it is in a function that does not return
        self.backlog: list[Any] = []  # what came while it was paused
        self.timer = 0  # the number of the timer that counts
        self.crash_in: int | None = None  # effects until it crashes
        self.cut_off_until_us = 0  # the driver cannot reach it
