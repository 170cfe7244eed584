"""Many writers of one log, and nothing else: they take over from each other, and what each was promised is checked.

The simulated world (world.py) has one coordinator at a time and a few faults per run. Here there are only the log and
its disk: writers take over, append, pause before any store operation while others run, die, lose power. So thousands
of conflicts between writers are tried per second.

What must hold:
1. What `append` reported as durable stays in the log, under its number; so does what `take_over` has read.
2. No two writers have the same term, and in the log no term comes after a newer one.
3. The log is never reported as broken: no durable data is ever lost here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.durability.log.log import Log, LogRecord, read_log
from headrace.errors import Fenced, LogBroken, StoreError
from headrace.sim.disk import AFTER, BEFORE, MIDDLE, Crashed, Disk, DiskFaults, SimStore

NESTED_MAX, ACTIONS_MAX = 3, 120


class LogWriter:
    def __init__(self, number: int, store: SimStore) -> None:
        self.number, self.store = number, store
        self.log: Log | None = None
        self.is_busy = False  # paused in the middle of a call

    @property
    def can_write(self) -> bool:
        return self.log is not None and self.store.is_alive and not self.is_busy


class Writers:
    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        rng = self.rng = random.Random(f"headrace {seed} writers")
        self.trace = trace

        def maybe(strength: float) -> float:
            return strength if rng.random() < 0.6 else 0.0

        faults = DiskFaults(
            maybe(rng.uniform(0, 0.02)), maybe(rng.uniform(0, 0.1)), maybe(rng.uniform(0, 0.1)), maybe(0.3)
        )
        self.faults: Counter[str] = Counter()
        self.disk = Disk(rng, faults, rng.random() < 0.7, self.later, self.fault)
        self.pauses = maybe(rng.choice((0.02, 0.1, 0.3)))
        self.segment_bytes = rng.choice((1, 200, 1_000, 1 << 20))
        self.writers: list[LogWriter] = []
        self.waiting: list[Callable[[], None]] = []  # what the store does later
        self.promised: dict[int, bytes] = {}
        self.terms: Counter[int] = Counter()
        self.retired = 1  # records below this number need not be there
        self.payloads = 0
        self.nested = self.actions = 0
        self.violations: list[str] = []

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def later(self, action: Callable[[], None]) -> None:
        self.waiting.append(action)

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace("  " * self.nested + text)

    def run(self) -> list[str]:
        while self.actions < ACTIONS_MAX:
            self.act()
        self.disk.is_calm, self.disk.is_full = True, False
        for _ in range(2):
            self.lose_power()
            for action in self.waiting:
                action()
            self.waiting.clear()
            last = self.take_over()
            self.append(last)
            if last.log is None:
                self.violations.append("at the end, without faults, no writer can take over")
                break
        self.look(is_calm=True)
        return self.violations

    def act(self) -> None:
        self.actions += 1
        rng = self.rng
        if self.disk.is_full and rng.random() < 0.2:
            self.disk.is_full = False
        able = [writer for writer in self.writers if writer.can_write]
        kind = rng.random()
        if kind < 0.15 or not able:
            self.take_over()
        elif kind < 0.75:
            self.append(able[-1] if rng.random() < 0.7 else rng.choice(able))
        elif kind < 0.8:
            rng.choice(able).log.roll()  # type: ignore[union-attr]
        elif kind < 0.85:
            self.retire(rng.choice(able))
        elif kind < 0.9:
            self.look(is_calm=False)
        elif kind < 0.93:
            rng.choice(self.writers).store.is_alive = False
        elif kind < 0.95:
            self.lose_power()
        elif kind < 0.98:
            rng.choice(able).store.dies_at = (
                able[-1].store.operations + rng.randrange(1, 12),
                rng.choice((BEFORE, MIDDLE, AFTER)),
            )
        else:
            self.disk.is_full = True
        if self.waiting and rng.random() < 0.3:
            self.waiting.pop(rng.randrange(len(self.waiting)))()

    def before(self, store: SimStore, op: str, name: str) -> None:
        self.note(f"{store.who} {op} {name}")
        if self.nested < NESTED_MAX and not self.disk.is_calm and self.rng.random() < self.pauses:
            self.nested += 1
            until = min(self.actions + self.rng.randint(1, 6), ACTIONS_MAX)
            while self.actions < until:
                self.act()
            self.nested -= 1

    def lose_power(self) -> None:
        self.note("power is lost")
        self.disk.lose_power()
        for writer in self.writers:
            writer.store.is_alive = False

    # --- what writers do ---

    def call(self, writer: LogWriter, what: str, action: Callable[[], Any]) -> Any:
        """Returns None if the action did not finish: then the writer does nothing more."""
        writer.is_busy = True
        retired = self.retired
        self.note(f"{writer.store.who} {what}")
        try:
            result = action()
        except Crashed:
            self.note(f"{writer.store.who} is gone")
            result = None
        except LogBroken as error:
            if retired == self.retired:  # else it may have read what was retired meanwhile
                self.violations.append(f"{writer.store.who} {what}: {error!r}")
            result = None
        except (StoreError, Fenced) as error:
            self.note(f"{writer.store.who} {what}: {error!r}")
            self.fault(f"{what}: {type(error).__name__}")
            result = None
        writer.is_busy = False
        if result is None:
            writer.log = None
        else:
            self.note(f"{writer.store.who} {what}: done")
        return result

    def take_over(self) -> LogWriter:
        writer = LogWriter(len(self.writers), SimStore(self.disk, f"writer {len(self.writers)}", self.before))
        self.writers.append(writer)
        promised = dict(self.promised)

        def action() -> tuple[Log, list[LogRecord]]:
            log = Log.take_over(writer.store, "log", self.segment_bytes)
            return log, list(log.read(self.retired))

        found = self.call(writer, "takes over", action)
        if found is not None:
            writer.log, records = found
            self.terms[writer.log.term] += 1
            if self.terms[writer.log.term] > 1:
                self.violations.append(f"two writers have term {writer.log.term}")
            self.check(f"{writer.store.who} of term {writer.log.term}", records, promised)
            self.promise({record.number: record.data for record in records}, writer)
        return writer

    def append(self, writer: LogWriter) -> None:
        log = writer.log
        if log is not None:
            self.payloads += 1
            payloads = [
                b"%d of %d by %d " % (at, self.payloads, writer.number) + bytes(self.rng.choice((0, 0, 30, 300)))
                for at in range(self.rng.randint(1, 3))
            ]
            first = log.last + 1
            last = self.call(writer, "appends", lambda: log.append(payloads))
            if last is not None:
                if last != first + len(payloads) - 1:
                    self.violations.append(f"appended {len(payloads)} records from {first} on, the last is {last}")
                self.promise(dict(enumerate(payloads, start=first)), writer)

    def retire(self, writer: LogWriter) -> None:
        """As after a snapshot: records below a number are no longer needed."""
        log = writer.log
        if log is not None:
            below = self.rng.randint(1, max(self.promised, default=0) + 1)
            self.retired = max(below, self.retired)
            self.call(writer, "retires", lambda: log.retire(below))

    def look(self, is_calm: bool) -> None:
        """Reads the log without taking over. Others may write while it is read."""
        onlooker = LogWriter(-1, SimStore(self.disk, "onlooker", None if is_calm else self.before))
        promised = dict(self.promised)
        records = self.call(onlooker, "looks on", lambda: list(read_log(onlooker.store, "log", self.retired)))
        if records is not None:
            self.check("an onlooker", records, promised)

    # --- what must hold ---

    def promise(self, records: dict[int, bytes], writer: LogWriter) -> None:
        for number, data in records.items():
            if self.promised.setdefault(number, data) != data:
                self.violations.append(
                    f"record {number} was promised as {self.promised[number][:24]!r}, "
                    f"and to {writer.store.who} as {data[:24]!r}"
                )

    def check(self, who: str, records: list[LogRecord], promised: dict[int, bytes]) -> None:
        found = {record.number: record.data for record in records}
        numbers = [record.number for record in records]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            self.violations.append(f"{who} read records {numbers}")
        terms = [record.term for record in records]
        if terms != sorted(terms):
            self.violations.append(f"{who} read terms {terms}")
        for number, data in promised.items():
            if number >= self.retired and found.get(number) != data:
                self.violations.append(
                    f"{who} did not read record {number}, which was promised: {found.get(number, b'nothing')[:24]!r}"
                )


def simulate_writers(seed: int) -> list[str]:
    return Writers(seed).run()
