"""When a schedule is due: five fields in UTC (minute hour day month weekday), or an interval."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from headrace.errors import ModelError

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
SECOND_US = 1_000_000
MINUTE_US, DAY_US = 60 * SECOND_US, 86_400 * SECOND_US
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
DAYS_MAX = 8 * 366  # the next 29th of February is at most this far away


class Cron:
    """`*/5 9-17 * * 1,3`: lists, ranges and steps; Sunday is 0 or 7. As in every cron, if both the day and the weekday
    are given, either one matches."""

    def __init__(self, text: str) -> None:
        self.text = text
        fields = text.split()
        if len(fields) != len(FIELDS):
            raise ModelError(
                f"the schedule {text!r} has {len(fields)} fields; it must have five: minute hour day month weekday"
            )
        sets = [frozenset(self._field(field, *limits)) for field, limits in zip(fields, FIELDS, strict=True)]
        self.minutes, self.hours, self.days, self.months, weekdays = sets
        self.weekdays = frozenset(day % 7 for day in weekdays)
        self.is_either = not fields[2].startswith("*") and not fields[4].startswith("*")
        if not self.days & frozenset(range(1, 32)) or self._next_day(0) is None:
            raise ModelError(f"the schedule {text!r} is never due")

    def _field(self, field: str, name: str, low: int, high: int) -> Iterator[int]:
        for part in field.split(","):
            span, slash, step = part.partition("/")
            first, dash, last = span.partition("-")
            try:
                start, stop = (low, high) if span == "*" else (int(first), int(last) if dash else int(first))
                if slash and not dash and span != "*":
                    stop = high
                stride = int(step) if slash else 1
            except ValueError:
                raise ModelError(f"the schedule {self.text!r}: {part!r} is not a valid {name}") from None
            if not low <= start <= stop <= high or stride < 1:
                raise ModelError(
                    f"the schedule {self.text!r}: {part!r} is not a valid {name}; it must be {low} to {high}"
                )
            yield from range(start, stop + 1, stride)

    def _is_day(self, day: datetime.datetime) -> bool:
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (by_day or by_weekday if self.is_either else by_day and by_weekday)

    def _next_day(self, day: int) -> int | None:
        """The first day from this one on, counted from 1970."""
        for each in range(day, day + DAYS_MAX):
            if self._is_day(EPOCH + datetime.timedelta(days=each)):
                return each
        return None

    def after(self, at_us: int) -> int:
        """The first time it is due after this one."""
        minute = at_us // MINUTE_US + 1
        day, of_day = divmod(minute, 24 * 60)
        while True:
            found = self._next_day(day)
            assert found is not None
            if found > day:
                day, of_day = found, 0
            for each in range(of_day, 24 * 60):
                if each // 60 in self.hours and each % 60 in self.minutes:
                    return (day * 24 * 60 + each) * MINUTE_US
            day, of_day = day + 1, 0

    def before(self, at_us: int, since_us: int) -> int | None:
        """The last time it was due, up to this one and after `since_us`."""
        last, due_us = None, self.after(since_us)
        if at_us - due_us > 2 * DAY_US:  # long ago: check only the last days, if they have any
            recent = self.after(at_us - 2 * DAY_US)
            due_us = recent if recent <= at_us else due_us
        while due_us <= at_us:
            last, due_us = due_us, self.after(due_us)
        return last


class Interval:
    """Every this many microseconds, counted from 1970."""

    def __init__(self, every_us: int) -> None:
        if every_us < SECOND_US // 1_000:
            raise ModelError("a schedule cannot be due more often than every millisecond")
        self.every_us, self.text = every_us, f"every {every_us} us"

    def after(self, at_us: int) -> int:
        return (at_us // self.every_us + 1) * self.every_us

    def before(self, at_us: int, since_us: int) -> int | None:
        last = at_us // self.every_us * self.every_us
        return last if last > since_us else None


def parse(when: str | int | float | datetime.timedelta) -> Cron | Interval:
    """Cron's five fields, or an interval: a timedelta, or seconds."""
    if isinstance(when, str):
        return Cron(when)
    return Interval(duration_us(when, "a schedule"))


def duration_us(given: object, what: str) -> int:
    """A timedelta, or seconds, in microseconds."""
    if type(given) is datetime.timedelta:
        us = given // datetime.timedelta(microseconds=1)
    elif type(given) in (int, float) and -1e12 < given < 1e12:  # type: ignore[operator]
        us = int(given * SECOND_US)  # type: ignore[operator]
    else:
        raise ModelError(f"{what} takes a timedelta or seconds, not {shown(given)}")
    if us >= 10**18:
        raise ModelError(f"{what} takes at most {10**12} seconds, not {shown(given)}")
    if us < 0:
        raise ModelError(f"{what} takes no negative time, but got {shown(given)}")
    return us


def shown(given: object) -> str:
    kind = type(given)
    return repr(given) if kind in (int, float, str, datetime.timedelta) else f"a {kind.__name__}"
