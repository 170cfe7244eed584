"""The archive: every record that the log has ever promised, kept outside of the world, even after the log retired it.

A record is promised when a coordinator learns that it is durable, or reads it at a take-over: in both cases answers may
depend on it. Whatever happens to disks and coordinators, it must be in the log from then on.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.core.epoch import Batch, Epoch
from headrace.core.log_records import Decree, Intent
from headrace.core.program import Program
from headrace.durability.log.changelog import FOLDER, EpochChanges
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.records import EpochHeader, Records, unpack
from headrace.durability.recovery import OpenedStore
from headrace.errors import Poisoned, StoreError
from headrace.sim.disk import SimStore
from headrace.wire.messages import Answers, Failure, Response, id_of

if TYPE_CHECKING:
    from headrace.sim.coordinator_process import CoordinatorProcess
    from headrace.sim.world import World


class Promised(NamedTuple):
    data: bytes
    term: int  # of the first coordinator it was promised to


class LogRow(NamedTuple):
    """One transaction of the log."""

    request_id: str
    tid: int
    epoch: Epoch
    row: int
    limits: dict[str, int]
    is_own: bool  # made by Headrace itself, not requested from outside


class Logbook(NamedTuple):
    rows: list[LogRow]
    decrees: dict[int, Failure]  # by TID
    responses: dict[str, Response]  # by the id of the external call


class Archive:
    def __init__(self, world: World) -> None:
        self.world = world
        self.records: dict[int, Promised] = {}
        self.epochs: dict[int, int] = {}  # number -> that of its record
        self.terms: Counter[int] = Counter()
        self.intents: dict[str, int] = {}  # of external calls: the TID
        self.responses: set[str] = set()
        self.decrees: set[int] = set()
        self.last_tid = 0
        self.snapshots: dict[int, dict[str, dict[Any, Any]]] = {}  # epoch -> tables, as they were loaded again
        self.changes: dict[int, EpochChanges] = {}  # by epoch
        self.changes_seen = 0  # the number of the changelog's last record
        self.digests: dict[tuple[int, int, bytes], bytes] = {}  # of epochs, by the version of the app, and by kind

    # --- during the run ---

    def promise(self, process: CoordinatorProcess, number: int, data: bytes) -> None:
        known = self.records.get(number)
        if known is None:
            self.records[number] = Promised(data, process.opened_store.log.term)
            self._note(process, number, unpack(data)[0])
        elif known.data != data:
            self.world.violate(f"record {number} was promised, and {process.node.name} has another one")

    def _note(self, process: CoordinatorProcess, number: int, header: Any) -> None:
        if isinstance(header, EpochHeader):
            if self.epochs.setdefault(header.number, number) != number:
                known = self.epochs[header.number]
                self.world.violate(f"epoch {header.number} is in record {known}, and again in record {number}")
            self.last_tid = max(self.last_tid, range(*header.tids)[-1])
        elif isinstance(header, Intent):
            self.intents[header.call] = header.tid
        elif isinstance(header, Response):
            self.responses.add(header.call)
        elif isinstance(header, Decree):
            self.decrees.update(header.failures)

    def wrote(self, process: CoordinatorProcess, epoch: Epoch) -> None:
        """An epoch's replies are kept: whoever ran it, and however often, has written the same."""
        assert epoch.digest is not None, f"epoch {epoch.number} has no digest"
        place = epoch.number, process.version, epoch.digest[:1]
        if self.digests.setdefault(place, epoch.digest) != epoch.digest:
            self.world.violate(f"epoch {epoch.number} has written something else when it ran again")

    def take_over(self, process: CoordinatorProcess, opened_store: OpenedStore) -> None:
        """A coordinator has read the log. It must have read everything that was promised in earlier terms."""
        term = opened_store.log.term
        self.terms[term] += 1
        if self.terms[term] > 1:
            self.world.violate(f"two coordinators have term {term}")
        try:
            with self.world.disk.without_faults():
                found = {record.number: record for record in opened_store.log.read(opened_store.log.first)}
        except StoreError:
            if not any(each.term > term for each in self.records.values()):
                raise  # else a newer coordinator has retired what this one found
            return
        self._compare(f"{process.node.name} of term {term}", found, opened_store.log.first, term)
        terms = [record.term for record in found.values()]
        if terms != sorted(terms):
            self.world.violate(f"the log has terms {terms}")
        for number, record in found.items():
            self.promise(process, number, record.data)

    def _compare(self, who: str, found: dict[int, Any], first: int, term: int) -> None:
        for number, (data, of_term) in self.records.items():
            if number >= first and of_term < term and (number not in found or found[number].data != data):
                self.world.violate(f"{who} does not find record {number}, which was promised in term {of_term}")

    def answer(self, process: CoordinatorProcess, answers: Answers) -> None:
        """Answers are sent: everything that decides them must be durable."""
        who = process.node.name
        for epoch in dict.fromkeys(answers.epochs):
            if epoch is not None and epoch not in self.epochs:
                self.world.violate(f"{who} answers from epoch {epoch}, which is not in the durable log")
        last = max((tid for tid in answers.tids if tid is not None), default=0)
        for call, tid in self.intents.items():
            if tid <= last and call not in self.responses:
                self.world.violate(f"{who} answers TID {last}, and the response to {call} is not in the durable log")
        for at, failure in answers.failures.items():
            if failure.trace is not None:
                self.world.violate(f"{who} answers TID {answers.tids[at]} with the frames of a traceback")
            if failure.code == Poisoned.code and answers.tids[at] not in self.decrees:
                self.world.violate(f"{who} answers TID {answers.tids[at]}, of which the durable log has no decree")

    def perform(self, process: CoordinatorProcess, call: str) -> None:
        """An external call is made: it must be durable before, as an intent or as a message of an epoch."""
        if call not in self.intents and int(call.partition("-")[0]) > self.last_tid:
            self.world.violate(f"{process.node.name} makes external call {call}, which is not in the durable log")

    def check_worst_power_loss(self) -> None:
        """Checks that every promised record would survive if power were lost now, with all that can be lost."""
        self.world.probe("worst loss of power imagined")
        store = SimStore(self.world.disk.after_worst_power_loss(), "what is left")
        try:
            found = {record.number: record for record in read_log(store, "log", None)}
        except StoreError as error:
            self.world.violate(f"if power were lost now: {error!r}")
            return
        self._compare("after a loss of power, who takes over", found, min(found, default=1 << 62), 1 << 62)
        if self.records and not found:
            self.world.violate("if power were lost now, nothing would be left of the log")

    def saved(self, process: CoordinatorProcess, epoch: int) -> None:
        """A snapshot was saved: it is loaded again, to compare it with the reference after the run."""
        if epoch in self.snapshots or self.world.disk_times.random() > 0.5:
            return
        with self.world.disk.without_faults():
            loaded = process.opened_store.snapshots.load()
        if loaded is not None and loaded.manifest.epoch == epoch:
            self.snapshots[epoch] = loaded.tables

    def changed(self, process: CoordinatorProcess) -> None:
        """Changes were written: they are read again, by a reader."""
        try:
            with self.world.disk.without_faults():
                store = SimStore(self.world.disk, "onlooker")
                first, last = bounds(store, FOLDER)
                number = max(first, self.changes_seen + 1)
                found = [EpochChanges(each.data) for each in read_log(store, FOLDER, number)] if number <= last else []
        except StoreError as error:
            self.world.violate(f"{process.node.name} has kept changes, and they cannot be read: {error!r}")
            return
        self.changes_seen = last
        for each in found:
            if each.epoch in self.changes and each.since.keys() == self.changes[each.epoch].since.keys():
                self.world.violate(f"{process.node.name} has written changes of epoch {each.epoch} for the second time")
            self.changes[each.epoch] = each
            self.world.probe("changes kept" if each.epoch >= each.begin else "changelogs begun")

    # --- after the run ---

    def read(self, program: Program) -> Logbook:
        """Everything that decides results, in the order of the log."""
        records, batches, book = Records(program), dict[int, Batch](), Logbook([], {}, {})
        numbers = sorted(self.records)
        if numbers != list(range(1, len(numbers) + 1)):
            self.world.violate(f"the log has records {numbers}")
            return book
        for number in numbers:
            record, limits = records.decode(number, self.records[number].data, batches)[1:3]
            if isinstance(record, Epoch):
                book.rows.extend(self._rows_of(record, limits or {}, batches))
            elif isinstance(record, Decree):
                book.decrees.update(record.failures)
            elif isinstance(record, Response):
                book.responses.setdefault(record.call, record)
        return book

    def _rows_of(self, epoch: Epoch, limits: dict[str, int], batches: dict[int, Batch]) -> list[LogRow]:
        rows = []
        for piece, start in zip(epoch.pieces, epoch.starts(), strict=True):
            ids = batches[piece.position].ids if piece.position else piece.ids
            for at in range(piece.size):
                request_id, row = id_of(ids, piece.start + at), start + at
                rows.append(LogRow(request_id, epoch.tids[row], epoch, row, limits, piece.is_own))
        return rows
