"""Checks timers and schedules by the log: a timer fires once, a schedule once for each time at which it was due.

This holds also if the firing aborts, and across coordinators: what is in the log is not tried again. Of several missed
times only the last one fires, and that one always does.

What is due runs before calls with a later time, if they were sent after the epoch that set it was final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.core.later.builtin import BUILT_IN, TIMER, fire, skip, tick
from headrace.model.app import Schedule
from headrace.model.cron import Interval
from headrace.model.operator import Function
from headrace.sim.history import HistoryRow
from headrace.sim.oracle import Entity

NEVER_US = 1 << 60


class Ending(Interval):
    """An interval that ends at some time: with a schedule that never ends the world would never come to rest."""

    def __init__(self, every_us: int, last_us: int) -> None:
        super().__init__(every_us)
        self.last_us = last_us

    def after(self, at_us: int) -> int:
        due_us = super().after(at_us)
        return due_us if due_us <= self.last_us else NEVER_US

    def before(self, at_us: int, since_us: int) -> int | None:
        return super().before(min(at_us, self.last_us), since_us)


class Fired(NamedTuple):
    """The last logged row of a timer or a schedule."""

    tid: int
    function: Function
    has_aborted: bool
    due_us: int


class PendingTimer(NamedTuple):
    """A timer that is set and has not fired; or a schedule, and when it is due again."""

    due_us: int
    epoch: int  # that has set it


class TimerCheck:
    """Checks each transaction, in the order of the log."""

    def __init__(self, schedules: Iterable[Schedule], kept: Mapping[int, int] | None = None) -> None:
        """`kept`: the instant at which each epoch was known to be final."""
        self.schedules = {schedule.key: schedule for schedule in schedules}
        self.kept = kept or {}
        self.pending: dict[str, PendingTimer] = {}
        self.fired: dict[str, Fired] = {}
        self.epoch = self.since_us = self.now_us = 0  # since_us: when the epoch before this one was closed
        self.wrong: list[str] = []
        self.probes: Counter[str] = Counter()

    def hear(
        self, row: HistoryRow, now_us: int, before: dict[Entity, Any], after: dict[Entity, Any], has_aborted: bool
    ) -> None:
        """`before` and `after` are the state around the transaction."""
        epoch, tid = row.epoch or 0, row.tid or 0
        if epoch > self.epoch:
            self.epoch, self.since_us, self.now_us = epoch, self.now_us, now_us
        function, key, *args = row.call
        if function in (fire, tick, skip):
            self._hear_own(tid, function, key, args, before, has_aborted)
        elif row.sent:
            self._hear_call(row)
        self._note_set(before, after)

    def _hear_call(self, row: HistoryRow) -> None:
        """Nothing that was due earlier, and was known when the call was sent, may still wait."""
        for key, (due_us, epoch) in self.pending.items():
            if due_us < self.now_us and self.kept.get(epoch, row.sent) < row.sent:
                known = f"epoch {epoch}, which has set it, was final when the call was sent"
                self.wrong.append(
                    f"TID {row.tid} runs at {self.now_us}, before {key}, which is due at {due_us}; {known}"
                )
            elif due_us < self.now_us:
                self.probes["calls before timers that were not known"] += 1

    def _note_set(self, before: dict[Entity, Any], after: dict[Entity, Any]) -> None:
        for (name, key), found in after.items():
            if name == BUILT_IN.name and before.get((name, key)) is not found:
                if key in self.schedules:
                    self.pending[key] = PendingTimer(self.schedules[key].when.after(found), self.epoch)
                elif found[0] == TIMER:
                    self.pending[key] = PendingTimer(found[1], self.epoch)
        for name, key in before.keys() - after.keys():
            if name == BUILT_IN.name:
                self.pending.pop(key, None)

    def _hear_own(
        self, tid: int, function: Function, key: str, args: list[Any], before: dict[Entity, Any], has_aborted: bool
    ) -> None:
        self.pending.pop(key, None)
        last = self.fired.get(key)
        found: Any = before.get((BUILT_IN.name, key))
        fired = self.fired[key] = Fired(tid, function, has_aborted, args[0] if function is not fire else 0)
        why = self._fires(found, last) if function is fire else self._ticks(self.schedules[key], fired, last)
        if why is not None:
            self.wrong.append(f"TID {tid} calls {function.name} of {key}: {why}")
        if function is tick or (function is fire and found is not None):
            what = "schedules" if function is tick else "timers" if found[0] == TIMER else "messages"
            self.probes[f"{what} whose firing aborted" if has_aborted else f"{what} fired"] += 1

    def _fires(self, found: Any, last: Fired | None) -> str | None:
        if last is not None:
            return f"TID {last.tid} did, and {'aborted' if last.has_aborted else 'committed'}"
        if found is not None and found[0] == TIMER and found[1] > self.now_us:
            return f"it is {self.now_us}, and it is due at {found[1]}"
        return None

    def _ticks(self, schedule: Schedule, fired: Fired, last: Fired | None) -> str | None:
        when, due_us = schedule.when, fired.due_us
        if fired.function is skip:
            if last is None or (last.has_aborted and last.due_us == due_us):
                return None
            return f"it had begun, and TID {last.tid} was for {last.due_us}"
        if last is None:
            return "it has not begun"
        if due_us <= last.due_us:
            return f"it is for {due_us}, and TID {last.tid} was for {last.due_us}"
        if when.before(due_us, due_us - 1) is None or due_us > self.now_us:
            return f"it is not due at {due_us}, and it is {self.now_us}"
        if when.after(due_us) <= self.since_us:
            return f"it is for {due_us}; at {self.since_us} it had been due again"
        return None

    def end(self, state: dict[Entity, Any], until_us: int = NEVER_US - 1) -> list[str]:
        """All that is wrong, at the end of the run: nothing that was due until then may wait, or have been left out."""
        for (name, key), found in state.items():
            if name == BUILT_IN.name and key not in self.schedules and (found[0] != TIMER or found[1] <= until_us):
                self.wrong.append(f"{key} was never due: {found!r}")
        for key, schedule in self.schedules.items():
            last_us = state.get((BUILT_IN.name, key))
            if last_us is None or schedule.when.after(last_us) <= until_us:
                self.wrong.append(f"{key} was last due at {last_us}, and should have been again")
        return self.wrong
