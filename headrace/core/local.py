"""The local backend: one executor in this process runs every epoch.

With a log, an epoch runs in a later step than the one that closes it: by then its record has been sent, and is synced
while the epoch runs.

Never here: what is admitted, logged or answered, and when.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace.core.backend import Executor, MakeExecutor
from headrace.core.digests import NET, net_digest, net_sum
from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.events import Read, TakeSnapshot
from headrace.core.later.deferred import ChangedLater, later_of
from headrace.core.outcome import Outcome, check, compare_writes, differences
from headrace.core.serial import SerialExecutor
from headrace.core.snapshot_metadata import PlacementMetadata

if TYPE_CHECKING:
    from headrace.core.engine import Engine


class Running(NamedTuple):
    """A transaction that runs."""

    tid: int
    epoch: Epoch
    row: int
    executor: Executor


class LocalBackend:
    HANDLERS: ClassVar[dict[type, str]] = {}  # no events of its own

    def __init__(self, engine: Engine, executor: MakeExecutor = SerialExecutor) -> None:
        self.engine, self.make = engine, executor
        self.executor = executor(engine.program, engine.state)
        self.former: tuple[dict[str, int], Executor] | None = None  # for epochs that were logged with these limits
        self.busy: tuple[Epoch, Executor] | None = None  # the epoch that runs, and what runs it
        self.answered: Outcome | None = None  # of the running epoch: its outcome before a recovery
        self.changes: Changes = {}  # of the newest final epoch
        self.watched = (*engine.program.deferring, *engine.logged)
        self.is_net = False  # whether the digest of the running epoch is one of net changes
        engine.state.watch(self.watched)
        if engine.journal.is_durable:
            engine.state.keep_deltas()
        if engine.has_digests:
            engine.state.keep_digests()

    def start(self, now_us: int, effects: list[Any]) -> None:
        self._snapshot_due(now_us)

    def schedule(self, epoch: Epoch) -> None:
        """Nothing: it waits in the backlog."""

    def work(self, now_us: int, effects: list[Any]) -> None:
        engine = self.engine
        if engine.sequencing.is_due(now_us):
            engine.close(now_us)
        self.run(min(engine.ready, 1) if engine.journal.is_durable else len(engine.backlog))
        self._snapshot_due(now_us)

    def resume(self, now_us: int, epoch: Epoch, effects: list[Any]) -> None:
        """Nothing: the epoch is first in the backlog, so `work` continues it."""

    def resend(self, now_us: int, effects: list[Any]) -> None:
        """Nothing is sent."""

    def next_due_us(self, now_us: int) -> list[int | None]:
        engine = self.engine
        due: list[int | None] = []
        if self.answered is None:  # no epoch has begun and waits for an external call
            due.append(engine.journal.next_due_us(engine.last_number()))
        if engine.backlog and engine.asking is None:
            due.append(now_us)
        if len(engine.sequencing.open):
            due.append(engine.sequencing.open.opened_us + engine.config.epoch_interval_us)
        return due

    def take_changes(self) -> Changes | None:
        logged = self.engine.logged
        return {name: self.changes[name] for name in logged if name in self.changes} if logged else None

    def take_later(self) -> ChangedLater:
        return later_of(self.changes, self.engine.program)

    def describe(self) -> PlacementMetadata | None:
        return None

    def restore(self, metadata: PlacementMetadata) -> None:
        """Every shard is here."""

    def _snapshot_due(self, now_us: int) -> None:
        engine = self.engine
        if self.answered is None and engine.journal.wants_snapshot(now_us, engine.last_number()):
            engine.take_snapshot(now_us, engine.state.take_delta())

    def run(self, count: int) -> None:
        """Do the first `count` items of the backlog. An epoch that waits for an external call blocks later ones."""
        engine = self.engine
        for _ in range(count):
            if engine.asking is not None:
                return
            first = engine.backlog[0]
            if isinstance(first, Epoch) and not self._execute(first):
                return
            engine.backlog.popleft()
            if isinstance(first, Read):
                engine.has_read(first.token, engine.state.select(first.operator, first.key, first.places))
            elif isinstance(first, TakeSnapshot):
                engine.journal.wanted.append(first.token)
            else:
                engine.settle(first)
                engine.finished(first)

    def _execute(self, epoch: Epoch) -> bool:
        """Run an epoch from where it stopped. False if it must wait for the response to an external call."""
        if self.answered is None:
            self.answered = Outcome(epoch.results, epoch.failures, epoch.digest)
            epoch.results, epoch.failures, epoch.digest = [], {}, None
            self._prepare_digest(self.answered.digest)
        executor = self._executor(epoch.limits)
        self.busy = (epoch, executor)
        need = executor.run(epoch, len(epoch.results))
        self.busy = None
        if need is not None:
            self.engine.ask(epoch, need)
            return False
        digest = self.engine.state.take_digest()
        self.changes = self.engine.state.take_changes()
        epoch.digest = net_digest([net_sum(self.changes)]) if self.is_net else digest
        self._compare(epoch, self.answered)
        self.answered = None
        return True

    def _prepare_digest(self, before: bytes | None) -> None:
        """Take a digest of the kind that the epoch had before."""
        is_net = before is not None and before.startswith(NET)
        if is_net != self.is_net:
            state, self.is_net = self.engine.state, is_net
            state.watch_only(tuple(state.tables) if is_net else self.watched)

    def _compare(self, epoch: Epoch, before: Outcome) -> None:
        """Compare with the outcome before a recovery, and keep that one: error messages may differ."""
        if epoch.final_rows:
            now, values = Outcome(epoch.results, epoch.failures), self.engine.program.values
            found = differences(epoch, before, now, range(epoch.final_rows), values)
            self.engine.accept(
                epoch, check(epoch, found, compare_writes(epoch, before.digest, epoch.digest), self.engine.accepts)
            )
            epoch.results, epoch.failures = before.results, before.failures

    def running(self) -> Running | None:
        """The transaction that runs now. Other threads may call this."""
        if self.busy is None:
            return None
        epoch, executor = self.busy
        tid = executor.running
        if tid not in epoch.tids:  # nothing runs, or the next epoch has begun meanwhile
            return None
        return Running(tid, epoch, epoch.tids.index(tid), executor)

    def _executor(self, limits: dict[str, int] | None) -> Executor:
        """The executor for epochs that were logged with these limits, which can change results."""
        if limits is None:
            return self.executor
        if self.former is None or self.former[0] != limits:
            program = self.engine.program
            former = program.under(dataclasses.replace(program.config, **limits))
            self.former = (limits, self.make(former, self.engine.state))
        return self.former[1]


def run_backlog(engine: Engine) -> None:
    """Run the epochs that a restored engine must rerun, and nothing else."""
    assert isinstance(engine.backend, LocalBackend)
    engine.backend.run(len(engine.backlog))
