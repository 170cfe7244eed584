"""Executors: what runs a whole epoch over a state.

`SerialExecutor` (`core/serial.py`) is the one for functions. A backend or a worker takes another one as an argument, so
a new kind needs no change here. The ordered mode (`core/ordered/executor.py`) is different: one epoch runs on several
workers, in parts, and overlaps with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.epoch import Epoch
from headrace.core.program import Program
from headrace.core.state import State
from headrace.wire.messages import Need


class Executor(Protocol):
    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none. Other threads may read it."""

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        """Run the rows from `start` up to `stop`: append to `epoch.results`, and add to `epoch.failures`. Rows in
        `epoch.decreed` fail.

        If the response to an external call is needed first, return what is needed. Once it is there, this is called
        again with the row where it stopped."""


MakeExecutor = Callable[[Program, State], Executor]
