"""The engine: one worker that owns everything, as a pure state machine.

    ingress ──► sequencing ──► journal ──► execution ──► egress

`step(now_us, event)` takes one event and returns the effects, in the order in which they are to happen. The driver
(`runtime/inprocess.py`, a test, a simulator) owns time, threads, files and clients.

With a log, an epoch runs in a later step than the one that closes it: its record is on its way by then, and is synced
while the epoch runs. What leaves (answers, state that was asked for) waits in `journal` until it is durable.

Never here: clocks, threads, sockets, files, pyspark.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from typing import Any, NamedTuple

from headrace.config import Config
from headrace.core import journal
from headrace.core.channel import SetTimer, Tick
from headrace.core.egress import Submission
from headrace.core.epoch import Batch, Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.ingress import Ledger, SourceBatches, reuse
from headrace.core.journal import (
    Appended,
    Checked,
    Decree,
    Delta,
    Intent,
    Journal,
    Saved,
    SaveFailed,
    TakeSnapshot,
)
from headrace.core.later.deferred import Deferred, Perform, Responded
from headrace.core.outcome import Outcome, first_difference
from headrace.core.program import MISSING, Program
from headrace.core.sequencing import Sequencing
from headrace.core.serial import SerialExecutor
from headrace.errors import HeadraceError, NotDeterministic, Poisoned
from headrace.model.app import App
from headrace.wire.messages import Answers, Entities, Need, Response, id_of

# --- events -----------------------------------------------------------------------------------------------------------


class Submit(NamedTuple):
    """Clients and sources hand over batches of admitted calls; each token comes back with its batch's answers."""

    batches: list[tuple[Any, Batch]]


class Read(NamedTuple):
    """State, as it is between two epochs: of all operators or one, of all keys or one."""

    token: Any
    operator: str | None = None
    key: Any = None


# --- effects ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Every row of a submission is final: its answers may leave."""

    token: Any
    answers: Answers


class Refuse(NamedTuple):
    """A submission cannot be taken as a whole; nothing of it was logged."""

    token: Any
    error: HeadraceError


class ReadResult(NamedTuple):
    """The answer to `Read`."""

    token: Any
    entities: Entities


Event = Submit | Tick | Read | TakeSnapshot | Responded | journal.Event
Effect = Answer | Refuse | ReadResult | Perform | SetTimer | journal.Effect


class PendingExternal(NamedTuple):
    """An external call that a transaction waits for."""

    position: int  # of the record that says so
    epoch: Epoch
    need: Need
    is_made: bool = False


class Engine:
    def __init__(
        self,
        app: App,
        config: Config | None = None,
        *,
        is_durable: bool = False,
        seed: int = 0,
        like: Program | None = None,
    ) -> None:
        self.config = config or Config()
        self.program = Program(app, self.config, like)
        self.program.seed = seed
        self.ledger = Ledger(self.config)
        self.sources = SourceBatches(self.config)
        self.sequencing = Sequencing(self.config)
        self.journal = Journal(self.config, is_durable)
        if is_durable:
            self.program.watch(name for name, operator in app.operators.items() if operator.changes)
        self.journal.logs_changes = bool(self.program.watched)
        self.executor = SerialExecutor(self.program)
        self.former: SerialExecutor | None = None  # for epochs of a log with other limits
        self.deferred = Deferred(self.program)
        self.waiting: list[Submission] = []
        self.found: list[tuple[int, int, ReadResult]] = []  # what was read: the record it follows from, and a ticket
        self.backlog: deque[Any] = deque()  # closed epochs that have not run, and what happens between them
        self.last: Epoch | None = None  # the last one that ran
        self.unfinished: list[tuple[Submission, Batch, int]] = []  # batches of sources that a recovery found in the log
        self.asking: PendingExternal | None = None  # the external call that a transaction waits for
        self.answered: Outcome | None = None  # of the epoch that runs: what is known from before a recovery
        self.committed = self.aborted = 0
        self.ledger.keep(self.sequencing.open)

    def start(self, now_us: int) -> list[Any]:
        """The first effects: what a recovery left to do."""
        self.journal.saved_us = now_us
        self._go_on(now_us)
        return self._after(now_us, [])

    def step(self, now_us: int, event: Event) -> list[Effect]:
        effects: list[Any] = []
        closed_before = len(self.backlog)
        if isinstance(event, Submit):
            self._submit(now_us, event, effects)
        elif isinstance(event, Read):
            self.backlog.append(event)
        elif isinstance(event, TakeSnapshot):
            self._put_between(now_us, event)
        else:
            self._note(now_us, event, effects)
        self._defer(now_us)
        if self.sequencing.is_due(now_us):
            self._run(self._close(now_us))
        self._work(now_us, min(closed_before, 1) if self.journal.is_durable else len(self.backlog))
        return self._after(now_us, effects)

    def _note(self, now_us: int, event: Any, effects: list[Any]) -> None:
        """News of the journal."""
        if isinstance(event, Appended):
            self.journal.appended(event.number)
        elif isinstance(event, Checked):
            self.journal.checked = event.ticket
        elif isinstance(event, Saved):
            self.journal.saved(event.oldest)
        elif isinstance(event, Responded):
            self._responded(now_us, event, effects)
        elif isinstance(event, SaveFailed):
            effects += [Refuse(token, event.error) for token in self.journal.failed()]

    def _defer(self, now_us: int) -> None:
        """Rows that nobody outside asked for: timers, schedules, and what answers to messages bring about."""
        batch = self.deferred.due(max(now_us, self.sequencing.last_us))
        if batch is not None:
            self._sequence(now_us, Submission(None, batch.ids, {}), batch)

    def _put_between(self, now_us: int, event: Any) -> None:
        """Something that is not an epoch: what came before it comes before it."""
        if len(self.sequencing.open):
            self._run(self._close(now_us))
        self.backlog.append(event)

    def _after(self, now_us: int, effects: list[Any]) -> list[Any]:
        is_between = self.answered is None  # no epoch has begun and waits for the outside world
        if is_between and self.journal.wants_snapshot(now_us, self._last_number()):
            self._take_snapshot(now_us, self.program.take_tables())
        self._answer(effects)
        self.ledger.forget(now_us)
        effects += self._performs()
        due = [self.deferred.next_due_us(now_us)]
        if is_between:
            due.append(self.journal.next_due_us(self._last_number()))
        if self.backlog and self.asking is None:
            due.append(now_us)
        if len(self.sequencing.open):
            due.append(self.sequencing.open.opened_us + self.config.epoch_interval_us)
        return [*self.journal.drain(), *effects, *timer(due)]

    # --- ingress and sequencing ---

    def _submit(self, now_us: int, event: Submit, effects: list[Any]) -> None:
        for token, batch in event.batches:
            try:
                self._take(now_us, token, batch)
            except HeadraceError as error:
                effects.append(Refuse(token, error))

    def _take(self, now_us: int, token: Any, batch: Batch) -> None:
        submission = Submission.of(token, batch)
        ran = self.sources.take(batch.source, submission, len(batch), batch.after) if batch.source is not None else None
        if ran is not None:
            submission = ran.again(token)
        elif batch.source is not None:
            batch.position = submission.floor = self.journal.append(batch)
            self._sequence(now_us, submission, batch)
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
        """The slow way in, for batches in which some request id was seen before."""
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
        encode = self.program.values.encode_plain  # compared as encoded: 1, 1.0 and True differ, NaN equals itself
        return (
            epoch.entries[at] is row.entries[0]
            and type(epoch.keys[at]) is type(row.keys[0])
            and epoch.keys[at] == row.keys[0]
            and encode(epoch.args[at]) == encode(row.args[0])
        )

    def _sequence(self, now_us: int, submission: Submission, batch: Batch, done: int = 0) -> None:
        while done < len(batch):
            epoch = self.sequencing.open
            start = len(epoch)
            done += self.sequencing.add(batch, done, now_us)
            submission.add(epoch, start, len(epoch))
            if done == len(batch) and batch.source is None and not batch.is_own:
                epoch.ids.append(batch.ids)
            if self.sequencing.is_full():
                self._run(self._close(now_us))

    def _go_on(self, now_us: int) -> None:
        """With batches of sources that were closed and not wholly sequenced when an earlier engine ended."""
        unfinished, self.unfinished = self.unfinished, []
        for submission, batch, done in unfinished:
            self._sequence(now_us, submission, batch, done)

    def _close(self, now_us: int) -> Epoch:
        epoch = self.sequencing.close(now_us)
        self.ledger.keep(self.sequencing.open)
        epoch.position = self.journal.append(epoch)
        return epoch

    # --- execution ---

    def _run(self, epoch: Epoch) -> None:
        """The epoch is closed: it has its place in the log."""
        self.backlog.append(epoch)

    def _work(self, now_us: int, count: int) -> None:
        """The first so many of what is to be done. An epoch that waits for the outside world holds up all behind it."""
        for _ in range(count):
            if self.asking is not None:
                return
            first = self.backlog[0]
            if isinstance(first, Epoch) and not self._execute(first):
                return
            self.backlog.popleft()
            if isinstance(first, Read):
                found = ReadResult(first.token, self._visible(self._select(first.operator, first.key)))
                self.found.append((self._position(), self.journal.check(), found))
            elif isinstance(first, TakeSnapshot):
                self.journal.wanted.append(first.token)
            else:
                self._finished(first)

    def _execute(self, epoch: Epoch) -> bool:
        """Run an epoch, from where it stopped. False if it has to wait for the response to an external call."""
        if self.answered is None:
            self.answered = (epoch.results, epoch.failures)
            epoch.results, epoch.failures = [], {}
        entries, executor = epoch.entries, self._executor(epoch.limits)
        if epoch.decreed or epoch.limits is not None:
            epoch.entries = [executor.program.numbered[entry.number] for entry in entries]
            for row, failure in epoch.decreed.items():
                epoch.entries[row] = executor.decreed(epoch.entries[row], failure.message)
        need = executor.run(epoch, len(epoch.results))
        epoch.entries = entries
        if need is not None:
            self._ask(epoch, need)
            return False
        compare(epoch, self.answered)
        self.answered = None
        return True

    def _executor(self, limits: dict[str, int] | None) -> SerialExecutor:
        """For epochs that were logged under these limits: they are part of what decides a result."""
        if limits is None:
            return self.executor
        if self.former is None or self.former.program.config.limits() != limits:
            config = dataclasses.replace(self.config, **limits)
            self.former = SerialExecutor(Program(self.program.app, config, over=self.program))
        return self.former

    def _ask(self, epoch: Epoch, need: Need) -> None:
        """The outside world, for a transaction below which all is final. That it is asked is logged before."""
        digest = hashlib.blake2b(need.args, digest_size=16).hexdigest()
        self.journal.append(Intent(need.tid, need.call, need.name, digest))
        self.asking = PendingExternal(self.journal.last, epoch, need)

    def _responded(self, now_us: int, event: Responded, effects: list[Any]) -> None:
        """To a transaction that waits, or to a message that was sent."""
        if self.asking is None or self.asking.need.call != event.call:
            self.deferred.respond(event)
            return
        epoch, need = self.asking.epoch, self.asking.need
        result = None if event.failure is not None else self.program.values.seal(event.result)
        response = Response(need.tid, need.call, result, event.failure)
        epoch.responses[need.tid, need.call] = response
        self.journal.note(response)
        self.asking = None
        self._go_on_with(now_us, epoch, effects)

    def _go_on_with(self, now_us: int, epoch: Epoch, effects: list[Any]) -> None:
        """The response is there: the epoch is first in the backlog, and will be run on."""

    def _performs(self) -> list[Perform]:
        """External calls that may be made now: what wants them is durable."""
        performs = self.deferred.performs(self.journal.covers)
        asking = self.asking
        if asking is not None and not asking.is_made and self.journal.covers(asking.position):
            self.asking = asking._replace(is_made=True)
            need = asking.need
            performs.append(Perform(need.call, need.name, self.program.values.decode(need.args)))
        return performs

    def _visible(self, entities: Entities) -> Entities:
        return self.program.visible(entities, self.sequencing.last_us)

    def _select(self, operator: str | None, key: Any) -> Entities:
        found: Entities = []
        for name in self.program.tables:
            if operator is None or name == operator:
                if key is None:
                    found += [(name, each, state) for each, state in self.program.items(name)]
                elif (state := self.program.state(name, key)) is not MISSING:
                    found.append((name, key, state))
        return found

    def _finished(self, epoch: Epoch) -> None:
        """All its rows are final."""
        self.last = epoch
        epoch.failures.update(epoch.decreed)
        self.deferred.note(self._changed_later(epoch), epoch.position)
        self.deferred.final(epoch)
        self._decree(epoch)
        self.aborted += len(epoch.failures)
        self.committed += len(epoch) - len(epoch.failures)
        self.journal.keep(epoch, self._take_changes())

    def _take_changes(self) -> Changes | None:
        """Of the epoch that has just become final, if they are logged and known already."""
        return self.program.take_changes() if self.journal.logs_changes else None

    def _changed_later(self, epoch: Epoch) -> list[tuple[Any, Any]]:
        """What this epoch changed of what is to happen later."""
        return self.program.take_later()

    def _decree(self, epoch: Epoch) -> None:
        """What exhausted memory or the stack may not do so when it is run again: that it did is noted."""
        poisoned = {row: why for row, why in epoch.failures.items() if why.code == Poisoned.code}
        if poisoned.keys() - epoch.decreed.keys():
            epoch.decreed.update(poisoned)
            self.journal.note(Decree({epoch.tids[row]: failure for row, failure in poisoned.items()}))

    # --- egress ---

    def _answer(self, effects: list[Any]) -> None:
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

    def place(self, owners: list[int], version: int) -> None:
        """The shard map of an earlier engine: here all is in one place."""

    def _last_number(self) -> int:
        """Of the last epoch that ran."""
        return self.last.number if self.last is not None else self.journal.saved_epoch

    def _position(self) -> int:
        """The record that the state follows from."""
        return self.last.position if self.last is not None else 0

    def _take_snapshot(self, now_us: int, changed: Delta) -> None:
        """The state is that at the end of an epoch, and nothing later has run."""
        if self.journal.is_full_next:
            changed = self._select(None, None)
        self.journal.take(now_us, changed, *self._meta())

    def _meta(self) -> tuple[int, int, dict[str, Any]]:
        """Up to which epoch, the first record that a recovery has to read, and what the next epoch depends on."""
        last, later = self.last, [item for item in self.backlog if isinstance(item, Epoch)]
        open_epoch = self.sequencing.open
        first = later[0] if later else open_epoch
        position = later[0].position if later else self.journal.last + 1
        for epoch in [*later, open_epoch]:
            for piece in epoch.pieces:
                if piece.source:
                    position = min(position, piece.source)
        meta = {
            "row": first.first,
            "lc": self.sequencing.sequencer.count_at(first.tids.start) if later else self.sequencing.sequencer.lc,
            "closed_us": last.closed_us if last is not None else self.sequencing.last_us,
            "committed": self.committed,
            "aborted": self.aborted,
            "sources": self.sources.describe(first.number),
            "has_forgotten": self.sources.has_forgotten,
            "oldest": self.ledger.epochs[0].number,
            "deferred": self.deferred.describe(),
        }
        return first.number - 1, position, meta


def compare(epoch: Epoch, before: Outcome) -> None:
    """With what was answered before a recovery, and that is what remains: messages may differ in what they show."""
    if epoch.final_rows:
        difference = first_difference(epoch, before, (epoch.results, epoch.failures), range(epoch.final_rows))
        if difference is not None:
            raise NotDeterministic(
                f"{difference}: its functions depend on something other than their arguments and state"
            )
        epoch.results, epoch.failures = before


def timer(due: list[int | None]) -> list[SetTimer]:
    times = [at_us for at_us in due if at_us is not None]
    return [SetTimer(min(times))] if times else []
