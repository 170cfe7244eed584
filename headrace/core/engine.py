"""The engine, as a pure state machine: in which order calls run, and when their answers leave.

    admitted batches ──► queue ──► ledger ──► sequencing ──► journal ──► backend ──► egress

`step(now_us, event)` takes one event and returns the effects, in the order to carry them out. The driver
(`runtime/driver.py`, a test, a simulator) owns time, threads, files and clients.

The backend decides where an epoch runs: in this process (`core/local.py`) or on workers (`core/coordinator.py`).
Output (answers, state that was read) waits until `journal` says that it is durable.

Never here: clocks, threads, sockets, files, pyspark.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from headrace.config import Config
from headrace.core.backend import Backend
from headrace.core.egress import Submission
from headrace.core.epoch import FINAL, Batch, Epoch
from headrace.core.events import (
    Answer,
    Appended,
    Checked,
    Delta,
    FailedRun,
    LogFailures,
    Perform,
    Read,
    ReadResult,
    Refuse,
    Responded,
    Saved,
    SaveFailed,
    SetTimer,
    Submit,
    TakeSnapshot,
    Tick,
)
from headrace.core.journal import Journal
from headrace.core.later.deferred import Deferred
from headrace.core.ledger import Ledger, reuse
from headrace.core.local import LocalBackend
from headrace.core.log_records import Accepted, Decree, Intent
from headrace.core.origin import FromClient, FromSource
from headrace.core.outcome import refusal
from headrace.core.program import Program
from headrace.core.raised import without_trace
from headrace.core.sequencing import Sequencing
from headrace.core.snapshot_metadata import NOTHING_STORED, CountsMetadata, SnapshotMetadata
from headrace.core.source_batches import SourceBatches
from headrace.core.state import State
from headrace.core.submit_queue import Policy, SubmitQueue, first_come
from headrace.errors import Aborted, HeadraceError, NotDeterministic, Poisoned
from headrace.model.app import App
from headrace.wire.messages import Entities, Need, Response, id_of
from headrace.wire.renewal import same_renewed
from headrace.wire.values import shown

DECREED = frozenset((Poisoned.code, NotDeterministic.code))  # codes of failures that are logged


class PendingExternal(NamedTuple):
    """An external call that a transaction waits for."""

    position: int  # of the record of its intent
    epoch: Epoch
    need: Need
    is_made: bool = False


class UnfinishedBatch(NamedTuple):
    """A logged batch of a source, some of whose rows are in no epoch yet."""

    submission: Submission
    batch: Batch
    position: int  # of its record
    done: int  # how many rows are in epochs


class Engine:
    # The method for each event that the backend does not handle.
    HANDLERS: ClassVar[dict[type, str]] = {
        Submit: "_submit",
        Read: "_read",
        TakeSnapshot: "enqueue",
        Responded: "_responded",
        Appended: "_appended",
        Checked: "_checked",
        Saved: "_saved",
        SaveFailed: "_save_failed",
        Tick: "_tick",
    }
    # Every step ends with these, in this order.
    LEAVE: ClassVar[tuple[str, ...]] = ("_answer", "_forget", "_resend", "_perform", "_report")

    def __init__(
        self,
        app: App,
        config: Config | None = None,
        *,
        is_durable: bool = False,
        has_digests: bool | None = None,
        seed: int = 0,
        program: Program | None = None,
        backend: Callable[[Engine], Backend] = LocalBackend,
        policy: Policy = first_come,
    ) -> None:
        """`program` is the app, if it is compiled already. `has_digests` says whether digests of what epochs write are
        taken; by default, if it is durable."""
        self.config = config or Config()
        self.has_digests = is_durable if has_digests is None else has_digests
        self.accepts = False  # may a replay go on with the logged replies, where it gives other ones?
        self.program = Program(app, self.config) if program is None else program.under(self.config)
        self.state = State(self.program, seed)  # on workers: a copy, which lags behind
        self.incoming = SubmitQueue(policy)
        self.ledger = Ledger(self.config)
        self.sources = SourceBatches(self.config)
        self.sequencing = Sequencing(self.config)
        self.journal = Journal(self.config, is_durable)
        changing = [name for name, operator in app.operators.items() if operator.changes]
        self.logged = changing if is_durable else []  # operators whose changes are logged
        self.journal.logs_changes = bool(self.logged)
        self.deferred = Deferred(self.program)
        self.waiting: list[Submission] = []
        self.found: list[tuple[int, int, ReadResult]] = []  # what was read, its record and its ticket
        self.backlog: deque[Any] = deque()  # closed epochs that have not run, and other work between them
        self.ready = 0  # how much of it was there when this step began
        self.last: Epoch | None = None  # the last one that ran
        self.unfinished: list[UnfinishedBatch] = []  # that a recovery found in the log
        self.replayed = 0  # the last epoch that a recovery has to replay
        self.asking: PendingExternal | None = None  # the external call that a transaction waits for
        self.failed: list[FailedRun] = []  # to be written to the log of the process
        self.failed_more: dict[tuple[str, str], int] = {}  # how many more there were, by function and place
        self.committed = self.aborted = 0
        self.ledger.keep(self.sequencing.open)
        self.backend = backend(self)

    def start(self, now_us: int) -> list[Any]:
        """The first effects: the work that a recovery left."""
        effects: list[Any] = []
        self.journal.saved_us = now_us
        if not self.is_replaying():
            self.defer(now_us)
            self._sequence_unfinished(now_us)
        self.backend.start(now_us, effects)
        return self._leave(now_us, effects)

    def step(self, now_us: int, event: Any) -> list[Any]:
        effects: list[Any] = []
        self.ready = len(self.backlog)
        of_backend = self.backend.HANDLERS.get(type(event))
        handler = getattr(self.backend, of_backend) if of_backend else getattr(self, self.HANDLERS[type(event)])
        handler(now_us, event, effects)
        if not self.is_replaying():
            self.defer(now_us)
            self._sequence_unfinished(now_us)
            self._take_waiting(now_us, effects)
        self.backend.work(now_us, effects)
        return self._leave(now_us, effects)

    def _leave(self, now_us: int, effects: list[Any]) -> list[Any]:
        for name in self.LEAVE:
            getattr(self, name)(now_us, effects)
        due = self.backend.next_due_us(now_us)
        if not self.is_replaying():
            due = [self.deferred.next_due_us(now_us), now_us if self.incoming or self.unfinished else None, *due]
        return [*self.journal.drain(), *effects, *timer(due)]

    # --- what a step does besides its event ---

    def defer(self, now_us: int) -> None:
        """Add the rows that no client sent: timers, schedules, and follow-ups of responses to messages. A timer that
        is due comes before every call with a later time: calls that wait in the open epoch get a time that is not
        later, and calls of this step are taken after this."""
        time_us, is_more = max(now_us, self.sequencing.last_us, self.sequencing.least_us), True
        while is_more:
            due = self.deferred.due(time_us)
            if due is None:
                return
            if due.first_us is not None and self.sequencing.open.has_calls():
                self.close(min(now_us, due.first_us))
            self.sequencing.least_us = max(time_us, self.sequencing.least_us)
            self._sequence(now_us, Submission(None, due.batch.ids, {}), due.batch)
            is_more = due.is_more

    def _resend(self, now_us: int, effects: list[Any]) -> None:
        self.backend.resend(now_us, effects)

    def _forget(self, now_us: int, effects: list[Any]) -> None:
        self.ledger.forget(now_us)

    # --- news of the journal, and of time ---

    def _tick(self, now_us: int, event: Tick, effects: list[Any]) -> None:
        """Nothing: every step does what is due."""

    def _appended(self, now_us: int, event: Appended, effects: list[Any]) -> None:
        self.journal.appended(event.number)

    def _checked(self, now_us: int, event: Checked, effects: list[Any]) -> None:
        self.journal.checked = event.ticket

    def _saved(self, now_us: int, event: Saved, effects: list[Any]) -> None:
        self.journal.saved(event.oldest)

    def _save_failed(self, now_us: int, event: SaveFailed, effects: list[Any]) -> None:
        effects += [Refuse(token, event.error) for token in self.journal.failed()]

    # --- taking batches, and sequencing ---

    def inherit(self) -> None:
        """A recovery has found epochs to replay. Until they are done, nothing new is logged, and requests wait: only
        then all timers are known, and those that are due come first. Until epochs of an older version of the app are
        done, there is no snapshot either."""
        epochs = [item for item in self.backlog if isinstance(item, Epoch)]
        self.replayed = max((epoch.number for epoch in epochs), default=0)
        self.journal.earliest = max((epoch.number for epoch in epochs if epoch.is_inherited), default=0)

    def is_replaying(self) -> bool:
        return self.replayed > self.last_number()

    def _submit(self, now_us: int, event: Submit, effects: list[Any]) -> None:
        for token, batch in event.batches:
            self.incoming.put(token, batch)

    def _take_waiting(self, now_us: int, effects: list[Any]) -> None:
        """Take the batches, in the order that the queue's policy gives."""
        while self.incoming:
            waiting = self.incoming.take()
            try:
                self._take(now_us, waiting.token, waiting.batch)
            except HeadraceError as error:
                effects.append(Refuse(waiting.token, error))

    def _take(self, now_us: int, token: Any, batch: Batch) -> None:
        submission = Submission.of(token, batch)
        if isinstance(batch.origin, FromSource):
            ran = self.sources.take(batch.origin, submission, len(batch))
            if ran is None:
                submission.floor = self.journal.append(batch)
                self._sequence(now_us, submission, batch, submission.floor)
            else:
                submission = ran.again(token)
        elif not len(batch) or self._claim(batch):
            self._sequence(now_us, submission, batch)
        else:
            for row in range(len(batch)):
                self._take_row(now_us, submission, batch.row(row))
        self.waiting.append(submission)

    def _claim(self, batch: Batch) -> bool:
        open_epoch = self.sequencing.open
        return self.ledger.claim(batch.ids, open_epoch.first + len(open_epoch), len(batch))

    def _take_row(self, now_us: int, submission: Submission, row: Batch) -> None:
        """The slow path, for batches with a request id that was seen before."""
        request_id = id_of(row.ids, 0)
        known = self.ledger.find(request_id)
        if known is None:
            self._claim(row)
            self._sequence(now_us, submission, row)
        elif self._same_call(*known, row):
            submission.add(known[0], known[1], known[1] + 1)
        else:
            submission.refuse(reuse(request_id, *known))

    def _same_call(self, epoch: Epoch, at: int, row: Batch) -> bool:
        values = self.program.values
        known, now = epoch.args[at], row.args[0]
        return (
            epoch.entries[at] is row.entries[0]
            and type(epoch.keys[at]) is type(row.keys[0])
            and epoch.keys[at] == row.keys[0]
            and len(known) == len(now)
            and all(same_renewed(one, other, values) for one, other in zip(known, now, strict=True))
        )

    def _sequence(self, now_us: int, submission: Submission, batch: Batch, position: int = 0, done: int = 0) -> None:
        """Put the rows from `done` on into epochs. `position` is that of the record of a source's batch."""
        while done < len(batch):
            epoch = self.sequencing.open
            start = len(epoch)
            done += self.sequencing.add(batch, done, now_us, position)
            submission.add(epoch, start, len(epoch))
            if done == len(batch) and isinstance(batch.origin, FromClient):
                epoch.ids.append(batch.ids)
            if self.sequencing.is_full():
                self.close(now_us)

    def _sequence_unfinished(self, now_us: int) -> None:
        """Continue source batches that an earlier engine logged but did not finish sequencing."""
        unfinished, self.unfinished = self.unfinished, []
        for each in unfinished:
            self._sequence(now_us, each.submission, each.batch, each.position, each.done)

    def _read(self, now_us: int, event: Read, effects: list[Any]) -> None:
        """State is read after all closed epochs have run."""
        self.backlog.append(event)

    def enqueue(self, now_us: int, event: Any, effects: list[Any]) -> None:
        """Add something that is not an epoch. Everything that came earlier runs first."""
        if not self.is_replaying():
            self.defer(now_us)
        if len(self.sequencing.open):
            self.close(now_us)
        self.backlog.append(event)

    def close(self, now_us: int) -> None:
        """Close the open epoch: it gets its place in the log."""
        epoch = self.sequencing.close(now_us)
        self.ledger.keep(self.sequencing.open)
        epoch.position = self.journal.append(epoch)
        self.schedule(epoch)

    # --- execution ---

    def schedule(self, epoch: Epoch) -> None:
        """A closed epoch runs after those before it."""
        self.backlog.append(epoch)
        self.backend.schedule(epoch)

    def ask(self, epoch: Epoch, need: Need) -> None:
        """Make an external call for a transaction below which all is final. The intent is logged first."""
        row = epoch.tids.index(need.tid)
        if row < epoch.final_rows:  # it was answered, so all its calls were
            difference = f"TID {need.tid} ({epoch.entries[row].name} of {shown(epoch.keys[row])}) was answered, but a "
            raise refusal(epoch, f"{difference}second run calls {need.name}, which the first one did not")
        digest = hashlib.blake2b(need.args, digest_size=16).hexdigest()
        self.journal.append(Intent(need.tid, need.call, need.name, digest))
        self.asking = PendingExternal(self.journal.last, epoch, need)

    def _responded(self, now_us: int, event: Responded, effects: list[Any]) -> None:
        """A response to a waiting transaction, or to a message that was sent."""
        if self.asking is None or self.asking.need.call != event.call:
            self.deferred.respond(event)
            return
        epoch, need = self.asking.epoch, self.asking.need
        result = None if event.failure is not None else self.program.values.seal(event.result)
        response = Response(need.tid, need.call, result, event.failure)
        epoch.responses[need.tid, need.call] = response
        self.journal.note(response)
        self.asking = None
        self.backend.resume(now_us, epoch, effects)

    def _perform(self, now_us: int, effects: list[Any]) -> None:
        """Make the external calls whose intent, or epoch, is durable."""
        effects += self.deferred.performs(self.journal.covers)
        asking = self.asking
        if asking is not None and not asking.is_made and self.journal.covers(asking.position):
            self.asking = asking._replace(is_made=True)
            need = asking.need
            effects.append(Perform(need.call, need.name, self.program.values.decode(need.args)))

    def has_read(self, token: Any, entities: Entities) -> None:
        """The state that was read leaves once it is certain that this engine still owns the log."""
        found = ReadResult(token, self.visible(entities))
        self.found.append((self._position(), self.journal.check(), found))

    def visible(self, entities: Entities) -> Entities:
        """The entities as functions see them: without expired ones."""
        return self.program.visible(entities, self.sequencing.last_us)

    def finished(self, epoch: Epoch) -> None:
        """All its rows are final."""
        epoch.enter(FINAL)
        self.last = epoch
        epoch.failures.update(epoch.decreed)
        self.deferred.note(self.backend.take_later(), epoch.position)
        self.deferred.final(epoch)
        self.aborted += len(epoch.failures)
        self.committed += len(epoch) - len(epoch.failures)
        self.journal.keep(epoch, self.backend.take_changes())

    def accept(self, epoch: Epoch, differing: dict[int, str]) -> None:
        """The logged replies of these rows stand, though the epoch gave other ones when it ran again."""
        if differing:
            epoch.accepted.update(differing)
            self.journal.note(Accepted(epoch.number, {epoch.tids[row]: text for row, text in differing.items()}))

    def settle(self, epoch: Epoch, first: int = 0) -> None:
        """The rows from this one on that have an outcome are final. Aborts, which the app raises itself, need nothing
        more."""
        aborted = Aborted.code
        failed = [row for row, why in epoch.failures.items() if why.code != aborted and row >= first]
        if failed:
            self._note_failed(epoch, failed)
            self._decree(epoch, failed)

    def _decree(self, epoch: Epoch, failed: list[int]) -> None:
        """Log failures that a second run might not give: those caused by memory, stack or time, or found by a
        check."""
        poisoned = {row: why for row in failed if (why := epoch.failures[row]).code in DECREED}
        if poisoned.keys() - epoch.decreed.keys():
            epoch.decreed.update(poisoned)
            self.journal.note(Decree({epoch.tids[row]: failure for row, failure in poisoned.items()}))

    def _note_failed(self, epoch: Epoch, failed: list[int]) -> None:
        """Take the traces out of these failures. What a replay runs again was reported before."""
        for row in failed:
            failure = epoch.failures[row]
            if failure.where is None:
                continue
            if failure.trace is not None:
                epoch.failures[row] = without_trace(failure)
            if epoch.is_replayed:
                continue
            if failure.trace is not None:
                self.failed.append(FailedRun(epoch.id_at(row), epoch.tids[row], epoch.number, failure))
            else:
                at = (failure.function or "", failure.where)
                self.failed_more[at] = self.failed_more.get(at, 0) + 1

    def _report(self, now_us: int, effects: list[Any]) -> None:
        if self.failed or self.failed_more:
            effects.append(LogFailures(self.failed, self.failed_more))
            self.failed, self.failed_more = [], {}

    # --- egress ---

    def _answer(self, now_us: int, effects: list[Any]) -> None:
        covers = self.journal.covers
        still_waiting = []
        for submission in self.waiting:
            if submission.is_final() and covers(submission.position()):
                effects.append(Answer(submission.token, submission.answers()))
            else:
                still_waiting.append(submission)
        self.waiting = still_waiting
        if self.found:
            may_leave = [covers(position) and self.journal.has_checked(ticket) for position, ticket, _ in self.found]
            effects += [found for (_, _, found), may in zip(self.found, may_leave, strict=True) if may]
            self.found = [item for item, may in zip(self.found, may_leave, strict=True) if not may]

    # --- snapshots ---

    def last_number(self) -> int:
        """The number of the last epoch that ran."""
        return self.last.number if self.last is not None else self.journal.saved_epoch

    def _position(self) -> int:
        """The log record of the last epoch that ran."""
        return self.last.position if self.last is not None else 0

    def take_snapshot(self, now_us: int, changed: Delta) -> None:
        """Call it at the end of an epoch, before anything later has run."""
        if self.journal.is_full_next:
            changed = self.state.select()
        self.journal.take(now_us, changed, *self.describe())

    def describe(self) -> tuple[int, int, SnapshotMetadata]:
        """The last epoch, the first record that a recovery must read, and what the next epoch depends on."""
        later = [item for item in self.backlog if isinstance(item, Epoch)]
        open_epoch = self.sequencing.open
        first = later[0] if later else open_epoch
        position = later[0].position if later else self.journal.last + 1
        for epoch in [*later, open_epoch]:
            for piece in epoch.pieces:
                if piece.position:
                    position = min(position, piece.position)
        position = min([position, *(each.position for each in self.unfinished)])
        metadata = SnapshotMetadata(
            self.sequencing.describe(first, self.last),
            CountsMetadata(self.committed, self.aborted),
            self.sources.describe(first.number),
            self.ledger.describe(),
            self.deferred.describe(),
            self.backend.describe(),
            NOTHING_STORED,
        )
        return first.number - 1, position, metadata

    def restore(self, epoch: int, metadata: SnapshotMetadata, kept: list[Epoch]) -> None:
        """Start from a snapshot of this epoch, whose state is loaded. `kept` are the epochs up to it whose
        replies are kept."""
        self.committed, self.aborted = metadata.counts.committed, metadata.counts.aborted
        self.sequencing.restore(metadata.sequencing, epoch)
        self.ledger.restore(kept, self.sequencing.open)
        self.sources.restore(metadata.sources, {each.number: each for each in kept})
        self.deferred.restore(metadata.deferred, self.state)
        if metadata.placement is not None:
            self.backend.restore(metadata.placement)

    def metrics(self) -> dict[str, Any]:
        return {
            "epochs": self.sequencing.open.number - 1,
            "committed": self.committed,
            "aborted": self.aborted,
        }


def timer(due: list[int | None]) -> list[SetTimer]:
    times = [at_us for at_us in due if at_us is not None]
    return [SetTimer(min(times))] if times else []
