"""Backends: where epochs run. In this process (`core/local.py`), or on workers (`core/coordinator.py`).

The engine (`core/engine.py`) is the front: it admits, sequences, logs and answers. It puts closed epochs into its
`backlog`, and between them what has to happen between two epochs. The backend takes them from there, in order, and
tells the engine what came of them:

    engine.finished(epoch)          every row of the epoch has its result or failure
    engine.ask(epoch, need)         a transaction waits for the response to an external call
    engine.has_read(token, found)   the state that a `Read` asked for
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.later.deferred import ChangedLater


class Backend(Protocol):
    HANDLERS: ClassVar[dict[type, str]]
    """Which of its methods handles an event, instead of the engine's."""

    def start(self, now_us: int, effects: list[Any]) -> None:
        """Before the first step: what a recovery found is in the backlog."""

    def schedule(self, epoch: Epoch) -> None:
        """An epoch was closed, and is the last of the backlog now."""

    def work(self, now_us: int, effects: list[Any]) -> None:
        """Do what can be done now: close the open epoch if it is due, and take from the backlog."""

    def resume(self, now_us: int, epoch: Epoch, effects: list[Any]) -> None:
        """The response that a transaction of this epoch waited for is there."""

    def resend(self, now_us: int, effects: list[Any]) -> None:
        """Send what is due to be sent, or sent again."""

    def next_due_us(self, now_us: int) -> list[int | None]:
        """The times at which there is something to do without an event."""

    def take_changes(self) -> Changes | None:
        """What the epoch that has just become final changed, if that is logged and known already."""

    def take_later(self) -> ChangedLater:
        """What the epoch that has just become final changed of timers, schedules, messages and expiring state."""

    def shard_map(self) -> list[Any] | None:
        """Owners and version, for a snapshot; None if there is one place only."""

    def place(self, owners: list[int], version: int) -> None:
        """Begin with the shard map of a snapshot."""
