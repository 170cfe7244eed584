"""The log of failed functions: their tracebacks, by Python's `logging`, as the logger "headrace.functions".

Of each place in a function, a few tracebacks a minute are written in full. The others are counted, and at the end of
that minute a line says how many there were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from traceback import FrameSummary, format_list

from headrace.core.events import FailedRun, LogFailures
from headrace.wire.messages import TracedError
from headrace.wire.values import shown

LOG = logging.getLogger("headrace.functions")
FULL_MAX = 3  # tracebacks of one place in one interval
INTERVAL_S = 60.0
PLACES_MAX = 10_000

Place = tuple[str, str]  # function, file and line


class FailureLog:
    """Writes what `LogFailures` names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._began_s = clock()
        self._written: dict[Place, int] = {}  # in this interval
        self._left_out: dict[Place, int] = {}
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None  # ends the interval, if something is left out

    def write(self, effect: LogFailures) -> None:
        with self._lock:
            self._write(effect)
            if self._left_out and self._timer is None:
                self._timer = threading.Timer(max(0.0, self._began_s + self._interval_s - self._clock()), self.sum_up)
                self._timer.daemon = True
                self._timer.start()

    def _write(self, effect: LogFailures) -> None:
        if self._clock() - self._began_s >= self._interval_s or len(self._left_out) > PLACES_MAX:
            self.sum_up()
        for run in effect.runs:
            place = (run.failure.function or "", run.failure.where or "")
            count = self._written[place] = self._written.get(place, 0) + 1
            if count <= FULL_MAX:
                LOG.error("%s", text_of(run))
            else:
                self._left_out[place] = self._left_out.get(place, 0) + 1
        for place, count in effect.more.items():
            self._left_out[place] = self._left_out.get(place, 0) + count

    def sum_up(self) -> None:
        """End the interval: say how many were left out."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            left_out, self._timer = self._left_out, None
            self._began_s, self._written, self._left_out = self._clock(), {}, {}
            for (function, where), count in left_out.items():
                LOG.error("%s failed %s more times at %s", function, f"{count:,}", where)


def text_of(run: FailedRun) -> str:
    """The failure in one line, and its traceback."""
    failure = run.failure
    first = (
        f"{failure.function} of {shown(failure.key)} failed at {failure.where}: {failure.type}: {failure.message} "
        f"(request id {run.request_id}, TID {run.tid}, epoch {run.epoch})"
    )
    return "\n".join([first, *map(traceback_of, failure.trace or [])])


def traceback_of(error: TracedError) -> str:
    """As Python prints it."""
    lines = ["Traceback (most recent call last):"]
    for file, line, name in error.frames:
        if file:
            lines += format_list([FrameSummary(file, line, name)])[0].rstrip().split("\n")
        else:
            lines.append(f"  ... {line} more ...")
    return "\n".join([*lines, f"{error.type}: {error.message}" if error.message else error.type])
