"""How an engine starts from the data of an earlier one: a snapshot, the kept replies, the log's records.

Rules:
1. The state, the counters, the request ids and the last batch of each source are those at the snapshot's epoch.
2. Later epochs enter like new ones: they are closed, have their records, and wait to run. They keep the limits that
   they were logged with.
3. A logged source batch whose rows are not all in epochs continues where it stopped: its source does not resend it.
4. Epochs that an older version of the app logged are replayed, and compared with their replies, before this version
   logs or saves anything. If it gives other replies, the older version can still start.

Never here: files, formats, the store.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.egress import Submission
from headrace.core.engine import Engine, UnfinishedBatch
from headrace.core.epoch import CLOSED, Batch, Epoch
from headrace.core.later.builtin import BUILT_IN
from headrace.core.log_records import Accepted, Decree, Note
from headrace.core.snapshot_metadata import SnapshotMetadata
from headrace.core.state import States
from headrace.wire.messages import Response


class LoggedRecord(NamedTuple):
    """A record as it was read: an epoch without results, with the limits it ran with."""

    number: int
    record: Epoch | Batch | Note
    limits: dict[str, int] | None = None
    fingerprint: str | None = None  # of the code that logged it


class Restored(NamedTuple):
    """What an earlier engine left."""

    epoch: int  # of the snapshot; 0 if there is none
    tables: dict[str, States]
    metadata: SnapshotMetadata
    kept: list[Epoch]  # final epochs up to the snapshot's with kept replies, in order
    records: list[LoggedRecord]  # from the snapshot's position on
    last: int  # the number of the log's last record
    recorded: dict[int, Epoch] = {}  # noqa: RUF012 final epochs after the snapshot's, by number: a replay must give the same
    is_migrated: bool = False  # the tables differ from the snapshot's: a full one is taken at once
    code: str | None = None  # the fingerprint of this version of the app


def restore(engine: Engine, left: Restored) -> None:
    """Call this once, before the engine's first step."""
    for name, table in left.tables.items():
        engine.state.tables[name].load(table)
    engine.restore(left.epoch, left.metadata, left.kept)
    engine.journal.restore(left.epoch, left.last, left.is_migrated)
    replay(engine, left)
    engine.inherit()


def replay(engine: Engine, left: Restored) -> None:
    """Take the log's records after the snapshot: epochs wait to run, batches and notes go to their epochs."""
    epochs: list[Epoch] = []
    batches: dict[int, tuple[Batch, Submission]] = {}
    done: dict[int, int] = {}  # per batch: its rows that are in epochs
    for number, record, limits, code in left.records:
        if isinstance(record, Batch):
            batches[number], done[number] = (record, engine.sources.again(record)), 0
        elif isinstance(record, Epoch):
            for piece, start in zip(record.pieces, record.starts(), strict=True):
                if piece.position:
                    done[piece.position] = piece.start + piece.size
                    if record.number > left.epoch:
                        batches[piece.position][1].add(record, start, start + piece.size)
                elif piece.is_own and record.number > left.epoch:
                    rows = range(start, start + piece.size)
                    own = (str(record.keys[row]) for row in rows if record.entries[row].function.operator is BUILT_IN)
                    engine.deferred.fired.update(own)
            if record.number > left.epoch:
                record.limits = None if limits == engine.config.limits() else limits
                record.is_inherited = left.code is not None and code != left.code
                epochs.append(record)
        elif isinstance(record, Decree):
            for tid, failure in record.failures.items():
                epoch = find(epochs, tid)
                if epoch is not None:
                    epoch.decreed[epoch.tids.index(tid)] = failure
        elif isinstance(record, Accepted):
            for tid, text in record.differences.items():
                epoch = find(epochs, tid)
                if epoch is not None:
                    epoch.accepted[epoch.tids.index(tid)] = text
        elif isinstance(record, Response):
            epoch = find(epochs, record.tid)
            if epoch is not None:
                epoch.responses[record.tid, record.call] = record
    for epoch in epochs:
        epoch.enter(CLOSED)
        epoch.is_replayed = True
        answered = left.recorded.get(epoch.number)
        if answered is not None:
            epoch.results, epoch.failures, epoch.final_rows = answered.results, answered.failures, len(epoch)
            epoch.digest = answered.digest
        engine.sequencing.follow(epoch)
        engine.ledger.adopt(epoch)
        engine.ledger.keep(engine.sequencing.open)
        engine.schedule(epoch)
    engine.unfinished = [
        UnfinishedBatch(submission, batch, number, done[number])
        for number, (batch, submission) in batches.items()
        if done[number] < len(batch)
    ]


def find(epochs: list[Epoch], tid: int) -> Epoch | None:
    """The epoch of a transaction: notes come soon after their epoch."""
    return next((epoch for epoch in reversed(epochs) if tid in epoch.tids), None)
