"""The coordinator: the backend that runs epochs on workers.

    ledger ──► sequencing ──► Run to all workers ──► Idle from all ──► Final ──► egress

Rules:
1. An epoch has settled when every worker has reported idle and every channel has received as much as was sent: no
   worker can then get more work for it. Epochs settle in order.
2. A lone transaction goes only to its root's worker, with a whole share; every message about it carries half of what
   its sender holds. It has settled when the returned shares add up to exactly one: 2^-k travels as k.
3. If workers report suspects, everything below the lowest suspect is final. One worker runs the suspects and everything
   between them (`core/ordered/stretch.py`); then the others settle again. A second stretch runs to the epoch's end.
4. When a worker is lost, a new term begins: all workers start from the coordinator's copy of the state and rerun the
   epochs since then. The results are the same, because the log is the order; only unanswered requests are answered.
5. Everything else (reading state, copying it, rescaling) happens between two epochs.

Never here: clocks, sockets, processes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from headrace.config import Config
from headrace.core.channel import Channels
from headrace.core.decrees import REPLAY_CHANCES, decree
from headrace.core.digests import net_digest
from headrace.core.engine import Engine
from headrace.core.epoch import FINAL, Epoch
from headrace.core.events import Lost, Overran, Received, Rescale, Start
from headrace.core.later.deferred import ChangedLater
from headrace.core.log_records import Decree
from headrace.core.maintenance import CopyState, Maintenance
from headrace.core.ordered.storms import Storms
from headrace.core.outcome import UNKNOWN, Outcome, check, compare_writes, differences
from headrace.core.placement import ShardMap
from headrace.core.program import Program
from headrace.core.shares import add_share, is_whole
from headrace.core.snapshot_metadata import PlacementMetadata
from headrace.core.submit_queue import Policy, first_come
from headrace.errors import ConfigError
from headrace.model.app import App
from headrace.wire.messages import (
    Begin,
    Changed,
    Entities,
    Failure,
    Final,
    Gather,
    Gathered,
    Idle,
    Respond,
    Response,
    Results,
    Run,
    Shown,
    in_parts,
)

MODES = ("auto", "serial", "ordered")

WORKER_STATS = ("ran", "repairs", "waits", "predicted", "rows_told")
TERM_BITS = 20  # of a term: its count for one coordinator; higher bits come from the log


class Flight:
    """An epoch that is under way."""

    __slots__ = (
        "differing",
        "epoch",
        "failures",
        "first",
        "gathered",
        "gatherer",
        "held",
        "idle",
        "is_lone",
        "mode",
        "results",
        "rows",
        "sent",
        "shares",
        "untried",
        "was_known",
    )

    def __init__(self, epoch: Epoch, mode: str, is_lone: bool, rows: dict[int, list[int]]) -> None:
        self.epoch, self.mode, self.is_lone, self.rows = epoch, mode, is_lone, rows  # rows: by their root's worker
        self.was_known = bool(epoch.final_rows) and epoch.final_rows == len(epoch)  # all its outcomes, before it ran
        self.idle: dict[int, Idle] = {}  # the latest report of each worker
        self.results: dict[int, list[Any]] = {}  # the results of its roots, with that report
        self.first: dict[int, list[Any]] = {}  # results that came ahead of the next report
        self.sent: dict[int, int] = {}  # messages about it to each worker
        self.shares: set[int] = set()  # returned so far
        self.untried: list[int] = []  # rows gathered without a try
        self.held: set[int] = set()  # rows whose repairs did not end
        self.gatherer = 0  # the last worker that gathered
        self.gathered: dict[int, Any] = {}  # by row: results,
        self.failures: dict[int, Failure] = {}  # and failures
        self.differing: dict[int, str] = {}  # rows with another outcome than before a recovery


def responses_to(epoch: Epoch, tid: int) -> list[Response]:
    """The known responses to a transaction's external calls."""
    return [response for (of, _), response in epoch.responses.items() if of == tid]


class Coordinator(Maintenance):
    HANDLERS: ClassVar[dict[type, str]] = {
        Received: "_receive",
        Lost: "_lost",
        Overran: "_overran",
        Rescale: "_enqueue",
    }
    MESSAGES: ClassVar[dict[type, str]] = {  # from workers
        Idle: "_take_idle",
        Results: "_take_results",
        Gathered: "_take_gathered",
        Changed: "_take_changed",
        Shown: "_take_shown",
    }

    def __init__(self, engine: Engine, workers: int = 1, mode: str = "auto", term: int = 0) -> None:
        """`term` is the log's: messages from workers of earlier coordinators are dropped."""
        super().__init__(engine)
        self.forced = mode
        self.check(workers)
        self.workers = workers
        self.shards = ShardMap.even(self.config.shards, workers)
        self.channels = Channels(0, self.config)
        self.channels.term = term << TERM_BITS
        self.known_owners: list[dict[Any, int]] = []  # of keys, by the number of a function
        self.flights: dict[int, Flight] = {}
        self.later: ChangedLater = []  # of the newest final epoch
        self.gathered: set[int] = set()  # TIDs that run, or ran, only on final state
        self.storms = Storms()
        self.predictions: dict[int, list[Any]] = {}  # by the function's number
        self.predictions_told = 0
        self.names_rows = False  # whether workers read stored rows from the store: then they are not sent
        self.limits_told: dict[str, int] | None = None  # that the workers run with
        self.stats = {"rounds": 0, "gathers": 0, "gathered": 0, "recoveries": 0, "lone": 0}
        self.worker_stats: dict[int, dict[str, int]] = {}  # of this term, by worker
        self.past_stats = dict.fromkeys(WORKER_STATS, 0)  # of all earlier terms

    def check(self, workers: int) -> None:
        if self.forced not in MODES:
            raise ConfigError(f"mode is {self.forced!r}; it must be one of {', '.join(MODES)}")
        if type(workers) is not int or not 1 <= workers <= self.config.shards:
            raise ConfigError(
                f"{workers!r} workers for {self.config.shards} shards: there must be at least 1, and at most one per "
                "shard"
            )
        if self.forced == "serial" and workers > 1:
            raise ConfigError(f"the serial mode needs one worker that owns everything, not {workers}")

    @property
    def term(self) -> int:
        return self.channels.term

    @property
    def mode_now(self) -> str:
        if self.forced != "auto":
            return self.forced
        return "serial" if self.workers == 1 else "ordered"

    def start(self, now_us: int, effects: list[Any]) -> None:
        effects += [Start(worker, self.term + 1) for worker in range(1, self.workers + 1)]
        self._begin_term(now_us, effects)
        self.work(now_us, effects)

    def next_due_us(self, now_us: int) -> list[int | None]:
        due, open_epoch = [self.channels.next_due_us()], self.engine.sequencing.open
        if len(open_epoch) and self._has_room():
            due.append(open_epoch.opened_us + self.config.epoch_interval_us)
        if self.gathering is None and not self.flights:
            due.append(self.journal.next_due_us(self.engine.last_number()))
        return due

    # --- events -------------------------------------------------------------------------------------------------------

    def _receive(self, now_us: int, event: Received, effects: list[Any]) -> None:
        for body in self.channels.receive(now_us, event.frame):
            handler = self.MESSAGES.get(type(body))
            if handler is not None:
                getattr(self, handler)(now_us, event.frame.source, body, effects)

    def _lost(self, now_us: int, event: Lost, effects: list[Any]) -> None:
        self._recover(now_us, event.worker, effects)

    def _overran(self, now_us: int, event: Overran, effects: list[Any]) -> None:
        self._suspect(event.tid)
        self._recover(now_us, event.worker, effects)

    def _enqueue(self, now_us: int, event: Rescale, effects: list[Any]) -> None:
        self.engine.enqueue(now_us, event, effects)

    def resend(self, now_us: int, effects: list[Any]) -> None:
        effects += self.channels.upkeep(now_us)

    # --- epochs -------------------------------------------------------------------------------------------------------

    def schedule(self, epoch: Epoch) -> None:
        self.log.append(epoch)
        self.logged += len(epoch)
        self.poisoned |= {epoch.tids[row] for row in epoch.decreed}

    def _has_room(self) -> bool:
        """May the open epoch be closed? Reads that wait do not prevent it: there may always be another one."""
        is_behind = any(isinstance(item, Epoch) for item in self.backlog)
        return not is_behind and len(self.flights) < self.config.epochs_in_flight_max and self.gathering is None

    def work(self, now_us: int, effects: list[Any]) -> None:
        """Give the workers as much as they can take."""
        while self.gathering is None:
            if self.engine.sequencing.is_due(now_us) and self._has_room():
                self.engine.close(now_us)
            if self._wants_copy(now_us):
                self.backlog.appendleft(CopyState())
            if not self.backlog:
                return
            first = self.backlog[0]
            if isinstance(first, Epoch):
                if len(self.flights) >= self.config.epochs_in_flight_max or not self._fly(now_us, first, effects):
                    return
                self.backlog.popleft()
            elif self.flights:
                return
            else:
                self.backlog.popleft()
                self._do_between(now_us, first, effects)

    def _wants_copy(self, now_us: int) -> bool:
        """Is a copy of the state due, and has a recovery's replay ended? With a log, each copy is a snapshot."""
        first = self.backlog[0] if self.backlog else self.engine.sequencing.open
        if not isinstance(first, Epoch) or first.phase == FINAL:
            return False
        if self.journal.is_durable:
            return self.journal.wants_snapshot(now_us, first.number - 1)
        is_long = self.logged >= self.config.replay_transactions_max
        return is_long and bool(self.backlog) and first is not self.log[0]

    def _fly(self, now_us: int, epoch: Epoch, effects: list[Any]) -> bool:
        mode = self.mode_now
        if any(
            flight.mode != mode or flight.is_lone or flight.epoch.limits != epoch.limits
            for flight in self.flights.values()
        ):
            return False
        is_other = epoch.limits != self.limits_told
        if is_other:  # workers start new executors, so all of them must be told
            self.limits_told, self.predictions_told = epoch.limits, 0
        known, owner = self.known_owners, self.shards.owner
        rows: dict[int, list[int]] = {worker: [] for worker in range(1, self.workers + 1)}
        for row, (entry, key) in enumerate(zip(epoch.entries, epoch.keys, strict=True)):
            rows[known[entry.number].get(key) or owner(entry.operator, key)].append(row)
        is_lone = mode == "ordered" and len(epoch) == 1 and not self.flights and not is_other
        flight = self.flights[epoch.number] = Flight(epoch, mode, is_lone, rows)
        tids = epoch.tids
        numbers = [entry.number for entry in epoch.entries]
        run = Run(
            epoch.number,
            mode,
            (tids.start, tids.stop, tids.step),
            numbers[0] if len(set(numbers)) == 1 else numbers,
            epoch.keys,
            epoch.args,
            None if is_lone else self._news(),
            sorted(tid for tid in self.poisoned if tid in tids),
            self._suspects(flight, epoch),
            is_lone,
            epoch.closed_us,
            epoch.limits,
        )
        if self.names_rows and not is_lone and epoch.stored and None not in epoch.stored:
            named = zip(epoch.stored, epoch.pieces, strict=True)
            stored = [(where, piece.start, piece.size) for where, piece in named if where is not None]
            run = msgspec.structs.replace(run, functions=0, keys=[], args=[], stored=stored)
        to = [worker for worker in rows if rows[worker]] if is_lone else list(rows)
        self.stats["lone"] += is_lone
        for worker in to:
            self._tell(now_us, flight, worker, run, effects)
        return True

    def _suspects(self, flight: Flight, epoch: Epoch) -> list[int]:
        """TIDs that are not tried: they overran, or their functions cause storms."""
        tids = {tid for tid in self.overran if tid in epoch.tids and tid not in self.poisoned}
        if flight.mode == "ordered" and not flight.is_lone:
            flight.untried = self.storms.rows(epoch.entries)
            tids.update(epoch.tids[row] for row in flight.untried)
        return sorted(tids)

    def _news(self) -> list[Any] | None:
        """The call graphs learned so far, if the workers do not have them yet."""
        if self.predictions_told == len(self.predictions):
            return None
        self.predictions_told = len(self.predictions)
        return [template for templates in self.predictions.values() for template in templates]

    def _tell(self, now_us: int, flight: Flight, worker: int, body: Any, effects: list[Any]) -> None:
        flight.sent[worker] = flight.sent.get(worker, 0) + 1
        effects.append(self.channels.send(now_us, worker, body))

    def _take_idle(self, now_us: int, worker: int, idle: Idle, effects: list[Any]) -> None:
        flight = self.flights.get(idle.epoch)
        if flight is None:
            return
        flight.idle[worker] = idle
        flight.results[worker] = flight.first.pop(worker, []) + idle.results
        flight.held.update(idle.held)
        self.storms.asked(flight.epoch.entries, idle.late)
        self.worker_stats[worker] = idle.stats
        learned: dict[int, list[Any]] = {}
        for template in idle.learned:
            learned.setdefault(template[0], []).append(template)
        self.predictions = learned | self.predictions  # the first report holds all of a function's calls
        for share in idle.shares or ():
            add_share(flight.shares, share)
        if idle.needs:
            self._meet(now_us, flight, worker, effects)
            return
        if not self._has_settled(flight):
            return
        self.stats["rounds"] += 1
        suspects = [tid for report in flight.idle.values() for tid in report.suspects]
        if suspects:
            self._gather_stretch(now_us, flight, min(suspects), max(suspects), effects)
        else:
            self._finish(now_us, flight, effects)

    def _has_settled(self, flight: Flight) -> bool:
        if flight.is_lone:
            return is_whole(flight.shares)
        reports = flight.idle
        if len(reports) < self.workers:
            return False
        for worker, report in reports.items():
            if report.received[0] != flight.sent[worker]:
                return False
            for other, reported in reports.items():
                if report.sent[other] != reported.received[worker]:
                    return False
        return True

    def _gather_stretch(self, now_us: int, flight: Flight, first: int, last: int, effects: list[Any]) -> None:
        """All below `first`, the lowest suspect, is final. One worker runs the stretch up to the highest suspect. A
        second stretch of an epoch runs to its end."""
        epoch, tids = flight.epoch, flight.epoch.tids
        start, stop = tids.index(first), tids.index(last) + 1 if not flight.gatherer else len(tids)
        self._note_results(flight, start)
        rows = range(start, stop)
        self.gathered.update(tids[start:stop])
        self.stats["gathers"] += 1
        self.stats["gathered"] += len(rows)
        counts = {worker: sum(row in rows for row in own) for worker, own in flight.rows.items()}
        flight.gatherer = max(counts, key=lambda worker: (counts[worker], -worker))
        workers = list(flight.idle) if flight.is_lone else list(flight.rows)
        flight.shares.clear()
        for at, worker in enumerate(workers, start=1):
            share = min(at, len(workers) - 1) if flight.is_lone else None  # they add up to one
            gather = Gather(epoch.number, tids[start], tids[stop - 1], flight.gatherer, workers, share)
            self._tell(now_us, flight, worker, gather, effects)

    def _take_results(self, now_us: int, worker: int, body: Results, effects: list[Any]) -> None:
        flight = self.flights.get(body.epoch)
        if flight is not None:
            flight.first.setdefault(worker, []).extend(body.results)

    def _take_gathered(self, now_us: int, worker: int, gathered: Gathered, effects: list[Any]) -> None:
        flight = self.flights.get(gathered.epoch)
        if flight is None:
            return
        tids = flight.epoch.tids
        first = tids.index(gathered.first)
        flight.gathered.update(enumerate(gathered.results, start=first))
        flight.failures.update({tids.index(tid): failure for tid, failure in gathered.failures.items()})

    def _meet(self, now_us: int, flight: Flight, worker: int, effects: list[Any]) -> None:
        """A transaction waits for an external call, with all below it final. It continues with the response."""
        epoch, need = flight.epoch, flight.idle[worker].needs[0]
        self._note_results(flight, epoch.tids.index(need.tid))
        if (need.tid, need.call) in epoch.responses:
            respond = Respond(epoch.number, need.tid, responses_to(epoch, need.tid))
            self._tell(now_us, flight, worker, respond, effects)
        elif self.engine.asking is None or self.engine.asking.need.call != need.call:
            self.engine.ask(epoch, need)

    def resume(self, now_us: int, epoch: Epoch, effects: list[Any]) -> None:
        flight = self.flights.get(epoch.number)  # None while a recovery reruns earlier epochs
        if flight is not None:
            for worker, report in flight.idle.items():
                if report.needs and report.received[0] == flight.sent[worker]:
                    self._meet(now_us, flight, worker, effects)

    def _finish(self, now_us: int, flight: Flight, effects: list[Any]) -> None:
        epoch = flight.epoch
        was_final = epoch.phase == FINAL
        self._note_results(flight, len(epoch))
        self._note_digest(flight)
        for worker in flight.idle:
            effects.append(self.channels.send(now_us, worker, Final(epoch.number)))
        self._expect_changes(epoch.number, flight.idle)
        del self.flights[epoch.number]
        self.gathered.difference_update(epoch.tids)
        self.storms.note(epoch.entries, flight.untried, [epoch.tids.index(tid) for tid in flight.held])
        if not was_final:
            self.later = [entity for report in flight.idle.values() for entity in report.later]
            self.engine.finished(epoch)

    def take_later(self) -> ChangedLater:
        return self.later

    def _note_results(self, flight: Flight, stop: int) -> None:
        """The rows below `stop` are final. Those already final before a recovery must give the same again."""
        epoch = flight.epoch
        results: list[Any] = [None] * len(epoch)
        failures: dict[int, Failure] = {}
        for worker, rows in flight.rows.items():
            report = flight.idle.get(worker)
            if report is None:
                continue
            for row, result in zip(rows, flight.results[worker], strict=True):
                results[row] = result
            for tid, failure in report.failures.items():
                failures[epoch.tids.index(tid)] = failure
        for row, result in flight.gathered.items():
            results[row] = result
            failures.pop(row, None)  # of a try
        failures.update(flight.failures)
        known = epoch.final_rows
        before, now = Outcome(epoch.results, epoch.failures), Outcome(results, failures)
        flight.differing |= differences(epoch, before, now, range(min(known, stop)), self.engine.program.values)
        if flight.differing and known < len(epoch):  # otherwise its digest decides, at its end
            check(epoch, flight.differing, UNKNOWN, False)
        if stop > known:
            epoch.results[known:] = results[known:stop]
            epoch.failures.update({row: failure for row, failure in sorted(failures.items()) if known <= row < stop})
            epoch.failures.update({row: failure for row, failure in epoch.decreed.items() if known <= row < stop})
            epoch.final_rows = stop
            self.engine.settle(epoch, known)
            self.poisoned |= {epoch.tids[row] for row in epoch.decreed}

    def _note_digest(self, flight: Flight) -> None:
        """The epoch has settled. If it was final before, it must have written the same."""
        epoch, reported = flight.epoch, [report.digest for report in flight.idle.values()]
        sums = [each for each in reported if isinstance(each, int)]
        now = net_digest(sums) if sums else next((each for each in reported if isinstance(each, bytes)), None)
        if flight.was_known:
            writes = compare_writes(epoch, epoch.digest, now)
            self.engine.accept(epoch, check(epoch, flight.differing, writes, self.engine.accepts))
        if epoch.digest is None:
            epoch.digest = now

    # --- the shard map ------------------------------------------------------------------------------------------------

    def describe(self) -> PlacementMetadata | None:
        return PlacementMetadata(self.shards.owners, self.shards.version)

    def restore(self, metadata: PlacementMetadata) -> None:
        """Start with an earlier coordinator's shard map; its number of workers may differ."""
        before = ShardMap(metadata.owners, metadata.version)
        self.shards = before if max(before.owners) == self.workers else before.rescaled(self.workers)

    # --- terms --------------------------------------------------------------------------------------------------------

    def _begin_term(self, now_us: int, effects: list[Any]) -> None:
        self.channels.begin(self.term + 1)
        self.flights.clear()
        self.telling.clear()
        self.predictions_told, self.limits_told = 0, None
        self.past_stats = self._summed_stats()
        self.worker_stats.clear()
        self.gathered.clear()
        self.known_owners = [self.shards.cache_of(entry.operator) for entry in self.program.entries]
        ahead = sum(isinstance(item, Epoch) for item in self.backlog)
        self.backlog.extendleft(reversed(self.log[: len(self.log) - ahead]))
        owned: dict[int, Entities] = {worker: [] for worker in range(1, self.workers + 1)}
        for name, table in self.engine.state.tables.items():
            for shard, key, state in table.by_shard(len(self.shards.owners)):
                owned[self.shards.owners[shard]].append((name, key, state))
        for worker, all_entities in owned.items():
            for entities, is_last in in_parts(all_entities, self.config.entities_per_frame_max):
                begin = Begin(
                    self.shards.owners,
                    self.shards.version,
                    self.workers,
                    entities,
                    is_last,
                    self.engine.state.seed,
                    self.engine.logged,
                    self.engine.has_digests,
                )
                effects.append(self.channels.send(now_us, worker, begin))

    def _recover(self, now_us: int, worker: int, effects: list[Any]) -> None:
        if worker > self.workers:
            return
        self.stats["recoveries"] += 1
        effects.append(Start(worker, self.term + 1))
        if self.gathering is not None:  # asked again in the new term, after the replay
            self.backlog.appendleft(self.asked_for)
            self.gathering = None
        self._begin_term(now_us, effects)

    def _suspect(self, tid: int) -> None:
        """A function of this transaction did not return. If its reads were not final, that may be why: it gets another
        chance, gathered. Otherwise the transaction aborts by decree."""
        epoch = next((epoch for epoch in self.log if tid in epoch.tids), None)
        if epoch is None:
            return
        self.overran.add(tid)
        if epoch.tids.index(tid) < epoch.final_rows:
            return  # its outcome is known: this time it was only slow
        if epoch.is_replayed:  # an earlier coordinator may have answered it, so try more often first
            self.chances[tid] = self.chances.get(tid, REPLAY_CHANCES) - 1
            if self.chances[tid] > 0:
                return
        if tid in self.gathered or self.mode_now == "serial":
            row = epoch.tids.index(tid)
            failure = epoch.decreed[row] = decree(epoch, row)
            self.poisoned.add(tid)
            self.journal.note(Decree({tid: failure}))

    def metrics(self) -> dict[str, Any]:
        return {
            "mode": self.mode_now,
            "workers": self.workers,
            "term": self.term,
            **self.engine.metrics(),
            "shard_map": self.shards.version,
            **self.stats,
            **self._summed_stats(),
            "predicted_functions": len(self.predictions),
        }

    def _summed_stats(self) -> dict[str, int]:
        """The workers' counters, over all terms."""
        now = list(self.worker_stats.values())
        return {name: before + sum(stats[name] for stats in now) for name, before in self.past_stats.items()}


def on_workers(
    app: App,
    config: Config | None = None,
    workers: int = 1,
    mode: str = "auto",
    *,
    is_durable: bool = False,
    seed: int = 0,
    term: int = 0,
    program: Program | None = None,
    policy: Policy = first_come,
) -> Engine:
    """An engine whose epochs run on workers: its backend is a `Coordinator`."""

    def backend(engine: Engine) -> Coordinator:
        return Coordinator(engine, workers, mode, term=term)

    return Engine(app, config, is_durable=is_durable, seed=seed, program=program, backend=backend, policy=policy)
