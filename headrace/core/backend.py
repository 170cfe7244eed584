"""Backends: where epochs run. In this process (`core/local.py`), or on workers (`core/coordinator.py`).

The engine (`core/engine.py`) is the front: it admits, sequences, logs and answers. It puts closed epochs into its
`backlog`, in order with whatever must happen between two epochs. The backend takes items from there, in order, and
tells the engine the outcome:

    engine.finished(epoch)          every row of the epoch has its result or failure
    engine.ask(epoch, need)         a transaction waits for the response to an external call
    engine.has_read(token, found)   the state that a `Read` asked for
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.later.deferred import ChangedLater
from headrace.core.snapshot_metadata import PlacementMetadata


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
