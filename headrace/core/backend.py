"""Backends: where epochs run. In this process (`core/local.py`), or on workers (`core/coordinator.py`).

The engine (`core/engine.py`) is the front: it takes batches, sequences, logs and answers. It puts closed epochs into
its `backlog`, in order with whatever must happen between two epochs. The backend takes items from there, in order, and
tells the engine the outcome:

    engine.finished(epoch)          every row of the epoch has its result or failure
    engine.ask(epoch, need)         a transaction waits for the response to an external call
    engine.has_read(token, found)   the state that a `Read` asked for

An executor runs one epoch as a whole, over a state. `SerialExecutor` (`core/serial.py`) is the one for functions. A
backend or a worker takes another kind as an argument. The ordered mode (`core/ordered/executor.py`) is different: an
epoch runs on several workers, in parts, and overlaps with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.later.deferred import ChangedLater
from headrace.core.program import Program
from headrace.core.snapshot_metadata import PlacementMetadata
from headrace.core.state import State
from headrace.wire.messages import Need


class Backend(Protocol):
    HANDLERS: ClassVar[dict[type, str]]
    """Events that the backend handles instead of the engine, and the method for each."""

    def start(self, now_us: int, effects: list[Any]) -> None:
        """Called before the first step. The backlog holds what a recovery found."""

    def schedule(self, epoch: Epoch) -> None:
        """An epoch was closed and is now the last item of the backlog."""

    def work(self, now_us: int, effects: list[Any]) -> None:
        """Do what can be done now: close the open epoch if it is due, and run items of the backlog."""

    def resume(self, now_us: int, epoch: Epoch, effects: list[Any]) -> None:
        """A transaction of this epoch waited for a response, which is now there."""

    def resend(self, now_us: int, effects: list[Any]) -> None:
        """Send, or resend, what is due."""

    def next_due_us(self, now_us: int) -> list[int | None]:
        """The times at which there is work to do without an event."""

    def take_changes(self) -> Changes | None:
        """What the newest final epoch changed, if changes are logged and already known."""

    def take_later(self) -> ChangedLater:
        """Changes of the newest final epoch to timers, schedules, messages and expiring state."""

    def describe(self) -> PlacementMetadata | None:
        """The shard map, for a snapshot; None without workers."""

    def restore(self, metadata: PlacementMetadata) -> None:
        """Start with the shard map of a snapshot."""


class Executor(Protocol):
    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none. Other threads may read it."""

    def doom_running(self, tid: int) -> bool:
        """This transaction, which runs now, aborts by decree, whatever its functions still do. False if another one
        runs."""

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        """Run the rows from `start` up to `stop`: append to `epoch.results`, and add to `epoch.failures`. Rows in
        `epoch.decreed` fail. Bindings are refreshed first: a delta may have been taken since the last epoch.

        If the response to an external call is needed first, return what is needed. Once it is there, this is called
        again with the row where it stopped."""


MakeExecutor = Callable[[Program, State], Executor]
