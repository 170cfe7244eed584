"""The engine: one worker that owns everything, as a pure state machine.

    ingress ──► sequencing ──► execution ──► egress

`step(now_us, event)` takes one event and returns the effects, in the order in which they are to happen. The driver
(`runtime/inprocess.py`, a test, a simulator) owns time, threads and clients.

Never here: clocks, threads, sockets, files, pyspark.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.config import Config
from headrace.core.channel import SetTimer, Tick
from headrace.core.egress import Submission
from headrace.core.epoch import Batch, Epoch
from headrace.core.execution import SerialExecutor
from headrace.core.ingress import Ledger, SourceBatches, reuse
from headrace.core.program import Program
from headrace.core.sequencing import Sequencing
from headrace.errors import HeadraceError, StreamError
from headrace.model.app import App
from headrace.wire.messages import Answers, id_of

# --- events -----------------------------------------------------------------------------------------------------------


class Submit(NamedTuple):
    """Clients and sources hand over batches of admitted calls; each token comes back with its batch's answers."""

    batches: list[tuple[Any, Batch]]


# --- effects ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Every row of a submission is final: its answers may leave."""

    token: Any
    answers: Answers


class Refuse(NamedTuple):
    """A submission cannot be taken as a whole; nothing of it was logged."""

    token: Any
    error: HeadraceError


Event = Submit | Tick
Effect = Answer | Refuse | SetTimer


class Engine:
    def __init__(self, app: App, config: Config | None = None) -> None:
        self.config = config or Config()
        self.program = Program(app, self.config)
        self.ledger = Ledger(self.config)
        self.sources = SourceBatches(self.config)
        self.sequencing = Sequencing(self.config)
        self.executor = SerialExecutor(self.program)
        self.waiting: list[Submission] = []
        self.committed = self.aborted = 0
        self.ledger.keep(self.sequencing.open)

    def step(self, now_us: int, event: Event) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, Submit):
            for token, batch in event.batches:
                try:
                    self._take(now_us, token, batch)
                except StreamError as error:
                    effects.append(Refuse(token, error))
        if self.sequencing.is_due(now_us):
            self._run(self._close(now_us))
        self._answer(effects)
        self.ledger.forget(now_us)
        if len(self.sequencing.open):
            effects.append(SetTimer(self.sequencing.open.opened_us + self.config.epoch_interval_us))
        return effects

    # --- ingress and sequencing ---

    def _take(self, now_us: int, token: Any, batch: Batch) -> None:
        submission = Submission(token, batch.given_ids, batch.refused)
        ran = self.sources.take(batch.source, submission) if batch.source is not None else None
        if ran is not None:
            submission = ran.again(token)
        elif batch.source is not None or not len(batch) or self._claim(batch):
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

    def _sequence(self, now_us: int, submission: Submission, batch: Batch) -> None:
        done = 0
        while done < len(batch):
            epoch = self.sequencing.open
            start = len(epoch)
            done += self.sequencing.add(batch, done, now_us)
            submission.add(epoch, start, len(epoch))
            if done == len(batch) and batch.source is None:
                epoch.ids.append(batch.ids)
            if self.sequencing.is_full():
                self._run(self._close(now_us))

    def _close(self, now_us: int) -> Epoch:
        epoch = self.sequencing.close(now_us)
        self.ledger.keep(self.sequencing.open)
        return epoch

    # --- execution and egress ---

    def _run(self, epoch: Epoch) -> None:
        self.executor.run(epoch)
        self.aborted += len(epoch.failures)
        self.committed += len(epoch) - len(epoch.failures)

    def _answer(self, effects: list[Effect]) -> None:
        still_waiting = [submission for submission in self.waiting if not submission.is_final()]
        for submission in self.waiting:
            if submission.is_final():
                effects.append(Answer(submission.token, submission.answers()))
        self.waiting = still_waiting
