"""A worker, as a pure state machine: it owns shards and runs its part of every epoch.

    Run ──► roots in TID order, calls as they come, repair ──► Idle ──► (Gather ──► Idle)* ──► Final

Rules:
1. An idle report says how much it sent and received for the epoch on each channel. A worker reports only when it has no
   work left for that epoch and all earlier ones are final, so only a message can change the report.
2. Messages that come early (calls of an epoch that it has not been given yet) wait. Messages from older terms never get
   here.
3. A term begins with the state of its shards and nothing else.

Never here: clocks, sockets, which nodes are alive.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, ClassVar

from headrace.config import Config
from headrace.core import order
from headrace.core.backend import MakeExecutor
from headrace.core.channel import Channels
from headrace.core.decrees import DECREE, decree
from headrace.core.digests import net_sum
from headrace.core.epoch import Epoch
from headrace.core.events import Received, SetTimer, WorkerEffect, WorkerEvent
from headrace.core.later.deferred import later_of
from headrace.core.ordered.exchange import Caps, EpochPart
from headrace.core.ordered.executor import OrderedExecutor
from headrace.core.ordered.gathering import COORDINATOR, Gathering
from headrace.core.ordered.prediction import Template, owners_of_predicted, read_templates
from headrace.core.ordered.progress import Progress
from headrace.core.placement import ShardMap
from headrace.core.program import Program
from headrace.core.raised import with_few_traces
from headrace.core.serial import SerialExecutor
from headrace.core.shares import add_share, split_share
from headrace.core.state import State, entities_of
from headrace.errors import BadMessage
from headrace.model.app import App
from headrace.wire.messages import (
    PART_BYTES_MAX,
    AnsweredAll,
    Begin,
    Body,
    Changed,
    Failure,
    Final,
    Gather,
    Idle,
    Installed,
    LendRequest,
    Lent,
    Made,
    Respond,
    Results,
    Run,
    Show,
    Shown,
    StretchRows,
    Traffic,
    changes_in_parts,
    has_large,
    in_parts,
    in_pieces,
)
from headrace.wire.values import size_of

STRETCH_ROWS = frozenset((LendRequest, Installed, Lent))


class Worker(Gathering):
    # The method for each message of the coordinator.
    MESSAGES: ClassVar[dict[type, str]] = {
        Begin: "_begin",
        Run: "_take_run",
        Respond: "_take_respond",
        Gather: "_take_gather",
        Final: "_finish",
        Show: "_show",
    }
    # Every step does these, in this order, after the messages of its event.
    WORK: ClassVar[tuple[str, ...]] = ("_run_slice", "_run_stretch", "_flush", "_resend")

    def __init__(
        self,
        app: App,
        config: Config,
        number: int,
        program: Program | None = None,
        term: int = 1,
        caps: Caps = Caps(),
        executor: MakeExecutor = SerialExecutor,
    ) -> None:
        """`program` is the app, if it is compiled already. `executor` runs epochs that run here alone."""
        super().__init__()
        self.caps, self.config, self.me, self.make = caps, config, number, executor
        self.compiled = Program(app, config) if program is None else program.under(config)
        self.limits: dict[str, int] | None = None  # of the running epochs, if they differ from `config`
        self.channels = Channels(number, config)
        self.channels.term = term - 1  # the `Begin` of `term` is the first message
        self.first_term = term
        self._start_over()
        self.mode = "serial"
        self.workers = 1
        self.predicted = self.rows_told = 0
        self.final_epoch = 0  # of this term
        self.is_ready = False
        self.progress: dict[int, Progress] = {}
        self.runs_waiting: deque[Run] = deque()  # blocked by one that waits for an external call
        self.early: dict[int, list[tuple[int, Traffic]]] = {}

    @property
    def running(self) -> int:
        """The TID that runs now, 0 if none."""
        gathered = 0 if self.stretch is None else self.stretch.running
        return self.ordered.running or gathered or self.serial.running

    def step(self, now_us: int, event: WorkerEvent) -> list[WorkerEffect]:
        effects: list[WorkerEffect] = []
        if isinstance(event, Received) and event.frame.term >= self.first_term:  # older: for one that this replaces
            frame = event.frame
            begins = frame.term > self.channels.term and frame.source == COORDINATOR and isinstance(frame.body, Begin)
            if begins:
                self._void(frame.term)
            for each in (frame, *self.channels.take_ahead()) if begins else (frame,):
                for body in self.channels.receive(now_us, each):
                    self._take(now_us, each.source, body, effects)
        for name in self.WORK:
            getattr(self, name)(now_us, effects)
        due_us = now_us if self.has_work() else self.channels.next_due_us()
        for progress in self.progress.values():
            if progress.report_at_us is not None:
                due_us = progress.report_at_us if due_us is None else min(due_us, progress.report_at_us)
        if due_us is not None:
            effects.append(SetTimer(due_us))
        return effects

    def _run_slice(self, now_us: int, effects: list[WorkerEffect]) -> None:
        self.ordered.work(self.config.slice_calls_max)

    def _resend(self, now_us: int, effects: list[WorkerEffect]) -> None:
        effects += self.channels.upkeep(now_us)

    def has_work(self) -> bool:
        """Is there work to do without a message?"""
        return self.ordered.has_work() or self._gatherer() is not None

    def _void(self, term: int) -> None:
        """A new term: forget everything."""
        self.channels.begin(term)
        self.ordered.let_all_go()
        self.limits = None
        self._start_over()
        self.mode, self.is_ready, self.final_epoch = "serial", False, 0
        self.progress, self.early, self.runs_waiting = {}, {}, deque()
        self.stretch, self.predicted, self.rows_told = None, 0, 0

    def _start_over(self) -> None:
        """Start without any state."""
        self.state = State(self.compiled)
        self.state.keep_deltas()
        self.state.watch(self.compiled.deferring)
        self.logged: list[str] = []  # operators whose changes are logged
        self.has_digests = False  # whether digests of what epochs write are reported
        self._run_by(self.compiled)

    def _run_by(self, program: Program) -> None:
        self.program = program
        self.serial = self.make(program, self.state)
        self.ordered = OrderedExecutor(program, self.state, self.me)

    def _run_under(self, limits: dict[str, int] | None) -> None:
        """Use the limits that the next epoch was logged with. No epoch is under way."""
        assert not self.ordered.parts, "the limits changed within an epoch"
        self.limits, before = limits, self.ordered
        compiled = self.compiled
        self._run_by(compiled if limits is None else compiled.under(dataclasses.replace(self.config, **limits)))
        self.ordered.workers = self.workers
        self.ordered.ran, self.ordered.repairs, self.ordered.waits = before.ran, before.repairs, before.waits
        self.ordered.place(before.shards)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _take(self, now_us: int, source: int, body: Body, effects: list[WorkerEffect]) -> None:
        if isinstance(body, Traffic):
            self._take_traffic(source, body)
        elif source != COORDINATOR:
            raise BadMessage(f"worker {self.me} got a {type(body).__name__} from worker {source}")
        elif type(body) not in self.MESSAGES:
            raise BadMessage(f"worker {self.me} got a {type(body).__name__}")
        else:
            getattr(self, self.MESSAGES[type(body)])(now_us, body, effects)

    def _begin(self, now_us: int, begin: Begin, effects: list[WorkerEffect]) -> None:
        for operator, key, state in begin.entities:
            self.state.tables[operator].states[key] = state
        self.workers = begin.workers
        self.ordered.workers = begin.workers
        self.ordered.place(ShardMap(begin.owners, begin.version))
        self.state.seed, self.logged, self.has_digests = begin.seed, begin.watched, begin.has_digests
        self.state.watch(begin.watched)
        self.is_ready = begin.is_last
        if self.is_ready:
            for epoch in [epoch for epoch, stash in self.early.items() if stash[0][1].lone is not None]:
                for source, traffic in self.early.pop(epoch):
                    self._take_traffic(source, traffic)

    def _take_run(self, now_us: int, run: Run, effects: list[WorkerEffect]) -> None:
        if self.runs_waiting or any(progress.epoch is not None for progress in self.progress.values()):
            self.runs_waiting.append(run)
        else:
            self._run_epoch(run)

    def _run_epoch(self, run: Run) -> None:
        if run.limits != self.limits:
            self._run_under(run.limits)
        if run.mode != self.mode:
            assert not self.ordered.parts, "the mode changed within an epoch"
            self.mode = run.mode
        progress = self.progress[run.epoch] = Progress(run, self.workers)
        progress.received[COORDINATOR] = 1
        if run.mode == "serial":
            if self.has_digests and not self.state.has_digests:
                self.state.keep_digests()
            self._run_serially(self._epoch_of(run), progress)
            return
        if run.predicted is not None:
            self.ordered.predictions = read_templates(run.predicted, self.ordered.bindings.by_number)
        self.ordered.begin(self._pick(run, progress))
        if run.is_lone:
            progress.shares = {0}
        for source, traffic in self.early.pop(run.epoch, ()):
            self._take_traffic(source, traffic)

    def _epoch_of(self, run: Run) -> Epoch:
        epoch = Epoch(run.epoch, 0, 0)
        entries = self.program.entries
        count = len(run.keys)
        epoch.entries = (
            [entries[run.functions]] * count
            if isinstance(run.functions, int)
            else [entries[number] for number in run.functions]
        )
        epoch.keys, epoch.args, epoch.tids, epoch.closed_us = run.keys, run.args, range(*run.tids), run.time_us
        epoch.decreed = {row: decree(epoch, row) for row in map(epoch.tids.index, run.poisoned)}
        return epoch

    def _take_respond(self, now_us: int, respond: Respond, effects: list[WorkerEffect]) -> None:
        """Take the response to an external call that a transaction waits for."""
        progress = self.progress.get(respond.epoch)
        if progress is None or not progress.needs or progress.needs[0].tid != respond.tid:
            raise BadMessage(f"TID {respond.tid} of epoch {respond.epoch} is not waiting for a response on this worker")
        if progress.epoch is None:
            self._respond_to_stretch(progress, respond)
            return
        progress.received[COORDINATOR] += 1
        progress.is_reported = False
        epoch = progress.epoch
        epoch.responses.update({(respond.tid, response.call): response for response in respond.responses})
        self._run_serially(epoch, progress)
        waiting, self.runs_waiting = self.runs_waiting, deque()
        for run in waiting:
            self._take_run(now_us, run, effects)

    def _run_serially(self, epoch: Epoch, progress: Progress) -> None:
        """Run from where it stopped to the end, or to an external call without a response."""
        need = self.serial.run(epoch, len(epoch.results))
        progress.epoch, progress.needs = (None, []) if need is None else (epoch, [need])
        missing = len(epoch) - len(epoch.results)
        failures = {epoch.tids[at]: failure for at, failure in epoch.failures.items()}
        progress.result = ([*epoch.results, *[None] * missing] if missing else epoch.results, failures)
        progress.digest = self.state.take_digest() if need is None else None
        changes = self.state.take_changes() if need is None else {}
        progress.later = later_of(changes, self.program)
        progress.changes = {name: changes[name] for name in self.logged if name in changes}

    def _pick(self, run: Run, progress: Progress) -> EpochPart:
        """Find what starts here in an epoch: own roots, and predicted calls of other workers' roots."""
        numbered, me, owner_of = self.ordered.bindings.by_number, self.me, self.ordered.shards.owner
        tids = range(*run.tids)
        functions = run.functions
        bindings = (
            [numbered[functions]] * len(tids)
            if isinstance(functions, int)
            else [numbered[number] for number in functions]
        )
        owners: list[Any] = [None]
        if isinstance(functions, int):  # most are known
            owners = list(map(numbered[functions].owners.get, run.keys))
        if None in owners:
            owners = [
                binding.owners.get(key) or owner_of(binding.operator, key)
                for binding, key in zip(bindings, run.keys, strict=True)
            ]
        predictions = {} if run.is_lone else self.ordered.predictions
        part = EpochPart(run.epoch, tids, owners, predictions, run.time_us, self.caps)
        poisoned, suspects = set(run.poisoned), set(run.suspects)
        part.suspects |= suspects
        special = poisoned | suspects
        rows, mine, root = part.rows, progress.mine, order.ROOT  # mine: TIDs of own roots
        wheres: Iterable[int | None] = repeat(None if predictions else 0)  # the worker of a root's predicted call
        simple: Template | None = None
        if isinstance(functions, int) and bindings[0] in predictions:
            simple = predictions[bindings[0]][0]
            wheres = owners_of_predicted(predictions[bindings[0]], run.args) or wheres
        columns = zip(tids, bindings, run.keys, run.args, owners, wheres, strict=False)
        for tid, binding, key, args, owner, where in columns:
            if owner == me:
                mine.append(tid)
                if where == me:
                    part.unpredicted.add(tid)
                if not special or tid not in special:
                    rows.append((tid, root, binding, key, args))
                elif tid in poisoned:
                    rows.append((tid, root, self.ordered.decreed(binding, DECREE), key, args))
            elif where == me and (not special or tid not in special):
                rows.append((tid, *simple.at(owner, args)))  # type: ignore[union-attr]
                self.predicted += 1
            elif where is None and (not special or tid not in special):
                for template in predictions.get(binding, ()):
                    call = template.fill(key, args)
                    if call is not None:
                        _, called, target, given = call
                        if (called.owners.get(target) or owner_of(called.operator, target)) == me:
                            rows.append((tid, template.place(owner), called, target, given))
                            self.predicted += 1
        return part

    def _check_epoch(self, epoch: int, source: int) -> None:
        """Check that the epoch may be under way."""
        if epoch <= self.final_epoch:
            raise BadMessage(
                f"node {source} sent a message for epoch {epoch}, but all epochs up to {self.final_epoch} are final"
            )

    def _check_rows(self, source: int, traffic: Traffic, tids: range) -> None:
        for row in traffic.rows:
            if row.tid not in tids:
                raise BadMessage(
                    f"worker {source} sent TID {row.tid} for epoch {traffic.epoch}, which does not contain it"
                )
            if isinstance(row, Made) and not 0 <= row.function < len(self.program.entries):
                raise BadMessage(f"worker {source} called function number {row.function}, which does not exist")
            if isinstance(row, AnsweredAll) and not (
                len(row.tids) == len(row.results) and all(map(tids.__contains__, row.tids))
            ):
                raise BadMessage(
                    f"worker {source} sent answers for TIDs outside epoch {traffic.epoch}, or not one result per TID"
                )

    def _take_traffic(self, source: int, traffic: Traffic) -> None:
        self._check_epoch(traffic.epoch, source)
        progress = self.progress.get(traffic.epoch)
        if progress is None and traffic.lone is not None and self.is_ready:
            tid, owner, time_us = traffic.lone
            part = EpochPart(traffic.epoch, range(tid, tid + 1), [owner], {}, time_us, self.caps)
            progress = self.progress[traffic.epoch] = Progress(None, self.workers)
            progress.shares = set()
            if self.mode != "ordered":
                self.mode = "ordered"
            self.ordered.begin(part)
        if progress is None:
            self.early.setdefault(traffic.epoch, []).append((source, traffic))
            return
        self._check_rows(source, traffic, self.ordered.parts[traffic.epoch].tids)
        progress.received[source] += 1
        progress.is_reported = False
        if traffic.share is not None:
            assert progress.shares is not None
            add_share(progress.shares, traffic.share)
        part = self.ordered.parts[traffic.epoch]
        rows = traffic.rows
        if STRETCH_ROWS.isdisjoint(map(type, rows)):
            self.ordered.hear(part, source, rows)
        else:
            self.ordered.hear(part, source, [row for row in rows if type(row) not in STRETCH_ROWS])
            self._take_stretch_rows(part, progress, source, [row for row in rows if isinstance(row, StretchRows)])

    def _finish(self, now_us: int, final: Final, effects: list[WorkerEffect]) -> None:
        epoch = final.epoch
        if epoch not in self.progress:
            raise BadMessage(f"epoch {epoch} is final, but worker {self.me} has not run it")
        self.final_epoch = epoch
        changes = self.progress.pop(epoch).changes
        part = self.ordered.parts.get(epoch)
        if part is not None:
            changes = self.ordered.changes_of(part, self.logged)
            self.ordered.finish(part)
        if self.logged:
            columns = [(name, *changed) for name, changed in changes.items()]
            for each, is_last in changes_in_parts(columns, self.config.entities_per_frame_max):
                effects.append(self.channels.send(now_us, COORDINATOR, Changed(epoch, each, is_last)))

    def _show(self, now_us: int, show: Show, effects: list[WorkerEffect]) -> None:
        state = self.state
        if show.is_delta:
            wanted = entities_of(state.take_delta())
        else:
            wanted = state.select(show.operator, show.key, show.places)
        for entities, is_last in in_parts(wanted, self.config.entities_per_frame_max):
            effects.append(self.channels.send(now_us, COORDINATOR, Shown(show.token, entities, is_last)))

    # --- work ---------------------------------------------------------------------------------------------------------

    def _flush(self, now_us: int, effects: list[WorkerEffect]) -> None:
        """Send what has accumulated, and report the first epoch if no work is left for it."""
        for number, progress in self.progress.items():
            part = self.ordered.parts.get(number)
            if part is None or not self.ordered.is_idle(part):
                continue  # waiting makes for fewer messages
            for worker, all_rows in part.outbox.items():
                for rows in in_pieces(all_rows, sum(part.bytes.values()) + part.answered_bytes):
                    progress.sent[worker] += 1
                    self.rows_told += len(rows)
                    progress.is_reported = False
                    effects.append(self.channels.send(now_us, worker, self._traffic(part, progress, rows)))
            self.rows_told += sum(len(column.tids) - 1 for column in part.answers.values())
            part.outbox.clear()
            part.answers.clear()
        for number, progress in self.progress.items():
            if progress.result is None:
                is_gathered = progress.gather is not None or progress.lent_early  # its own `Gather` is under way
                if is_gathered or not self.ordered.is_idle(self.ordered.parts[number]):
                    return
                if not progress.is_reported and self._is_time(now_us, self.ordered.parts[number], progress):
                    self._report(now_us, number, progress, effects)
                return  # the next epoch only once this one is final
            if not progress.is_reported:
                self._report(now_us, number, progress, effects)

    def _is_time(self, now_us: int, part: EpochPart, progress: Progress) -> bool:
        """If calls wait for answers, the worker would soon report again: delay the report a little."""
        if progress.report_at_us is None:
            aborted, suspects = self.ordered.aborted, part.suspects
            if all((tid := call.order[0]) in aborted or tid in suspects for call in part.waiting):
                return True  # no answer matters
            progress.report_at_us = now_us + self.config.report_delay_us
        if now_us >= progress.report_at_us or not part.waiting:
            progress.report_at_us = None
            return True
        return False

    def _traffic(self, part: EpochPart, progress: Progress, rows: list[Any]) -> Traffic:
        if progress.shares is None:
            return Traffic(part.number, rows)
        share = split_share(progress.shares)
        tid = part.tids[0]
        return Traffic(part.number, rows, share, (tid, part.owner(tid), part.time_us))

    def _report(self, now_us: int, number: int, progress: Progress, effects: list[WorkerEffect]) -> None:
        progress.is_reported = True
        results: list[Any] = []
        failures: dict[int, Failure] = {}
        suspects: list[int] = []
        digest: bytes | int | None = progress.digest
        held: list[int] = []
        if progress.result is not None:
            results, failures = progress.result
        else:
            part = self.ordered.parts[number]
            suspects, held = sorted(part.suspects), sorted(part.held)
            results = list(map(self.ordered.result_of, repeat(part), progress.mine))
            if part.failures or suspects:
                for at, tid in enumerate(progress.mine):
                    if tid in part.failures:
                        failures[tid] = part.failures[tid][min(part.failures[tid])]
                    if tid in part.failures or tid in part.suspects:
                        results[at] = None
            changed = self.ordered.changes_of(part, self.state.tables if self.has_digests else self.program.deferring)
            failures = with_few_traces(failures)
            progress.later = later_of(changed, self.program)
            digest = net_sum(changed) if self.has_digests else None
        ordered = self.ordered
        stats = {
            "ran": ordered.ran + (0 if self.stretch is None else self.stretch.executor.ran),
            "repairs": ordered.repairs,
            "waits": ordered.waits,
            "predicted": self.predicted,
            "rows_told": self.rows_told,
        }
        shares = None
        if progress.shares is not None and not progress.needs:
            shares = sorted(progress.shares)
            progress.shares.clear()
        learned, self.ordered.learned = self.ordered.learned, []
        size, at = 0, 0
        for end, result in enumerate(results if has_large(results) else ()):
            size += size_of(result)
            if size > PART_BYTES_MAX:
                effects.append(self.channels.send(now_us, COORDINATOR, Results(number, results[at : end + 1])))
                size, at = 0, end + 1
        idle = Idle(
            number,
            list(progress.sent),
            list(progress.received),
            results[at:],
            failures,
            suspects,
            stats,
            learned,
            shares,
            progress.needs,
            progress.later,
            held,
            progress.late,
            digest,
        )
        effects.append(self.channels.send(now_us, COORDINATOR, idle))
