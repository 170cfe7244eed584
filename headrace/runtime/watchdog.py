"""The watchdog: stops a function that does not return, in the process that runs the engine.

A thread looks several times a second which transaction runs. One that runs for longer than `wall_limit_us` is dealt
with in two steps:

1. The function is interrupted: an `Interrupt` is raised in it, and its transaction aborts by decree.
2. If it does not end by that (C code that waits, a function that catches everything), the runtime is given up: see
   `Runtime._give_up`.

An exception that one thread raises in another must never hit the engine's own code. So the watchdog raises it only
while it holds the interpreter lock and sees that the engine's thread stands in the app's own code, at an instruction
that looks for such exceptions before it goes on. Nor must it hit a library, which may just have taken a lock that the
whole process needs. From Python 3.13 on the interpreter may look too late, after the function has returned: there every
function that does not return is left behind.

Never here: what becomes of the transaction, the log.
"""

from __future__ import annotations

import ctypes
import dis
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from headrace.core.decrees import Interrupt, chances, is_engine
from headrace.core.local import Running
from headrace.core.program import Program
from headrace.core.raised import innermost, is_library

LOOK_S_MAX = 0.2  # between two looks
GRACE_S = 2.0  # for the function to end once it is interrupted
STRIKE_S = 0.05  # between two interruptions
HOLD_S = 0.05  # how long this thread may keep the interpreter lock while it looks and interrupts
CAN_INTERRUPT = sys.version_info < (3, 13)
DEBUGGERS = frozenset(("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"))
# Instructions after which the interpreter looks for exceptions of other threads, in the same frame.
STOPS = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
STRIKING = threading.Lock()  # one watchdog at a time: they change a setting of the interpreter

LOG = logging.getLogger("headrace.runtime")


class Watchdog(threading.Thread):
    def __init__(
        self,
        program: Program,
        running: Callable[[], Running | None],
        give_up: Callable[[int], bool],
        wall_limit_us: int,
        engine: threading.Thread,
    ) -> None:
        """`running` gives the transaction that runs now. `give_up` gives up the runtime while that TID runs; it returns
        False if that TID has ended after all."""
        super().__init__(name="headrace-watchdog", daemon=True)
        self._running, self._give_up, self._engine = running, give_up, engine
        self.limit_s = wall_limit_us / 1e6
        self._look_s = min(LOOK_S_MAX, self.limit_s / 4)
        self._bodies = codes_of(program)
        self._closed = threading.Event()
        self._tid = 0
        self.ran_s = 0.0  # how long the TID that runs now has been running

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        seen_s = time.monotonic()
        while not self._closed.wait(self._look_s):
            now_s = time.monotonic()
            try:
                # If this whole process was stopped for a while, no function is to blame.
                self._look(min(now_s - seen_s, 4 * self._look_s))
            except Exception:  # this thread must go on: nobody else looks
                LOG.exception("the watchdog failed; it goes on")
            seen_s = time.monotonic()

    def _look(self, passed_s: float) -> None:
        running = self._running()
        tid = 0 if running is None else running.tid
        self.ran_s = self.ran_s + passed_s if tid and tid == self._tid else 0.0
        self._tid = tid
        if running is None or self.ran_s <= self.limit_s:
            return
        if self.ran_s <= self.limit_s * chances(running.epoch) or self._is_debugged():
            return
        if not self._interrupt(running.tid):
            self._give_up(running.tid)

    def _is_debugged(self) -> bool:
        """Whether somebody stands in the function with a debugger: they may take their time."""
        frame = sys._current_frames().get(self._engine.ident or 0)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
                return True
            frame = frame.f_back
        return False

    def _interrupt(self, tid: int) -> bool:
        """Interrupt the function until it ends. False if it does not."""
        until_s = time.monotonic() + (GRACE_S if CAN_INTERRUPT else 0.0)
        while time.monotonic() < until_s and not self._closed.is_set():
            if not self._strike(tid):
                return True
            time.sleep(STRIKE_S)
        running = self._running()
        return running is None or running.tid != tid

    def _strike(self, tid: int) -> bool:
        """Raise `Interrupt` in the function, if it can be done now. False if the transaction has ended."""
        with STRIKING:
            switch_s = sys.getswitchinterval()
            sys.setswitchinterval(HOLD_S)
            try:
                time.sleep(STRIKE_S / 50)  # after it, this thread has the interpreter lock, for HOLD_S
                running, ident = self._running(), self._engine.ident
                if running is None or running.tid != tid or ident is None:
                    return False
                frame = sys._current_frames().get(ident)
                if frame is not None and self._stands_in_function(frame) and running.executor.doom_running(tid):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupt))
                return True
            finally:
                sys.setswitchinterval(switch_s)

    def _stands_in_function(self, frame: FrameType) -> bool:
        """Whether the engine's thread runs the app's own code, called by a function; not the engine's code, a library,
        or what the engine calls for itself."""
        if is_engine(frame) or is_library(frame.f_code.co_filename):
            return False
        if not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(STOPS):
            return False
        entered = frame
        while entered.f_back is not None and not is_engine(entered.f_back):
            entered = entered.f_back
        return entered.f_code in self._bodies


def codes_of(program: Program) -> frozenset[CodeType]:
    """The code of everything that the engine calls and the app wrote."""
    called: list[Any] = [entry.function.body for entry in program.entries]
    called += [each for operator in program.operators.values() for each in (operator.combine, operator.partition_by)]
    codes = [getattr(each, "__code__", None) for one in called if one is not None for each in (one, innermost(one))]
    return frozenset(code for code in codes if code is not None)
