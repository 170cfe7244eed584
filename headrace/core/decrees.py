"""Decrees: transactions that abort whatever their functions do, since these did not return in time.

How long a function takes cannot be repeated in a replay, so the decision is a record of the log. Whoever stops a
function (`runtime/watchdog.py`, `runtime/cluster.py`) decides when; the outcome is the same everywhere.
"""

from __future__ import annotations

from types import FrameType

from headrace.core.epoch import Epoch
from headrace.errors import Poisoned
from headrace.wire.messages import Failure

DECREE = "the function did not return in time (wall_limit_us): it was stopped, and the transaction aborts by decree"
REPLAY_CHANCES = 7  # to return in time, if the transaction may have been answered before a recovery


ENGINE = tuple(f"headrace.{part}." for part in ("core", "model", "wire", "durability", "runtime"))


class Interrupt(BaseException):
    """Raised in the middle of a function that does not return, by another thread."""


def is_engine(frame: FrameType) -> bool:
    """Whether this is the engine's own code."""
    return str(frame.f_globals.get("__name__")).startswith(ENGINE)


def check_place(raised: BaseException) -> None:
    """An interruption must only ever be raised in a function. If one is raised in the engine, nothing can be trusted
    any more: what it was doing is half done."""
    trace = raised.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and is_engine(trace.tb_frame):
        raise AssertionError("an interruption was raised in the engine, not in the function") from raised


def decree(epoch: Epoch, row: int) -> Failure:
    """The failure of a transaction that aborts by decree."""
    return Failure(Poisoned.code, Poisoned.__name__, DECREE, epoch.entries[row].name, epoch.keys[row])


def is_late(failure: Failure | None) -> bool:
    """Whether the function was stopped."""
    return failure is not None and failure.code == Poisoned.code and failure.message == DECREE


def chances(epoch: Epoch) -> int:
    """How often the limit its transactions may take."""
    return REPLAY_CHANCES if epoch.is_replayed else 1


def is_known(epoch: Epoch, row: int) -> bool:
    """Whether this transaction has an outcome already, from before a recovery: then no decree can change it."""
    return row < epoch.final_rows
