"""Recovery: opens a store, and restores an engine from it.

A store has `headrace.json` (its identity), `log/`, `replies/`, `changes/` (if an operator logs them), `snapshots/`,
`state/` and `apps/` (fingerprints of its code). Opening it takes it over: the log has a new term from then on, and the
previous coordinator can add nothing more. (To read only, use store_reader.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.core.engine import Engine
from headrace.core.epoch import Batch, Epoch
from headrace.core.later.builtin import BUILT_IN
from headrace.core.placement import shards_of
from headrace.core.restore import LoggedRecord, Restored, restore
from headrace.core.snapshot_metadata import INITIAL, SourcesMetadata
from headrace.durability.added_fields import check_defaults
from headrace.durability.identity import (
    CURRENT,
    callable_functions,
    check_identity,
    create_identity,
    identity_of,
    read_fingerprint,
    with_checksum,
)
from headrace.durability.inbox.inbox import SegmentRetention
from headrace.durability.log.changelog import ChangeWriter
from headrace.durability.log.log import Log
from headrace.durability.log.records import Records, writer_of
from headrace.durability.migration import migrate
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.durability.store import DirectoryStore, Store, open_store
from headrace.errors import AppChanged, Fenced, LogBroken
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, added_fields, fingerprint, remade


class OpenedStore:
    """A store that was taken over, or created, for one engine."""

    def __init__(
        self, where: str | Path | Store, app: App, config: Config, app_fingerprint: Fingerprint | None = None
    ) -> None:
        self.is_mine = isinstance(where, str | Path)  # opened here, and closed with this
        self.store = open_store(where) if isinstance(where, str | Path) else where
        self.app, self.config = app, config
        self.app_fingerprint = app_fingerprint or fingerprint(app)
        self.fingerprint = self.app_fingerprint.digest
        self._fitting = {self.fingerprint}  # digests of code whose epochs this code can replay
        self.marks: list[tuple[int, int]] = []  # a record number of the replies, and the time up to which they reach
        self.loads: dict[str, int] = {}  # how often the state of an operator was loaded or migrated
        self.records: Records
        try:
            self._take_over()
        except BaseException:
            self.close_store()
            raise

    def _take_over(self) -> None:
        self.identity = identity_of(self.store) or create_identity(self.store, self.app, self.config)
        check_identity(self.store, self.identity, self.app, self.config)
        self.snapshots = snapshots_of(self.store, self.identity, self.app)
        self.store.create(f"apps/{self.fingerprint}.json", with_checksum(self.app_fingerprint.plain()))
        size = self.config.segment_bytes_max
        self.log = Log.take_over(self.store, "log", segment_bytes=size)
        self.replies = self._take_replies(size)
        self.watched = [name for name, operator in self.app.operators.items() if operator.changes]
        self.changes = ChangeWriter(self.store, self.log.term, size) if self.watched else None

    def _take_replies(self, segment_bytes: int) -> Log:
        try:
            return Log.take_over(self.store, "replies", segment_bytes=segment_bytes, term=self.log.term)
        except Fenced as error:
            self.log.check()
            raise LogBroken(
                f"{self.store.url}: replies were written in a later term than any in log/ ({error}): log/ was removed "
                "or replaced. Restore it from a backup"
            ) from None

    @property
    def seed(self) -> int:
        return int(self.identity["seed"])

    @property
    def epoch0(self) -> int:
        """How many epochs came before this store: replies have one record per epoch."""
        return int(self.identity["epoch0"])

    @property
    def kept_epoch(self) -> int:
        """The last epoch whose replies are in the store."""
        return self.replies.last + self.epoch0

    def restore(self, engine: Engine) -> None:
        """Call this once, before the engine's first step."""
        self.records = Records(engine.program, self.app_fingerprint, self.store)
        try:
            restore(engine, self.load_state())
            self.store.put(
                CURRENT, with_checksum({"fingerprint": self.fingerprint, "functions": callable_functions(self.app)})
            )
        except BaseException as error:
            try:
                if isinstance(error, LogBroken | AppChanged):
                    self.log.check()  # a successor, perhaps a newer version, may have retired or written it
            finally:
                self.close_store()
            raise

    def load_state(self) -> Restored:
        loaded = self.snapshots.load()
        self.log.check()  # a successor's snapshot does not fit the log as we read it
        epoch, position = (loaded.manifest.epoch, loaded.manifest.position) if loaded is not None else (0, 1)
        metadata = loaded.manifest.metadata if loaded is not None else INITIAL
        closed_us = metadata.sequencing.closed_us
        tables = loaded.tables if loaded is not None else {}
        self.segments = SegmentRetention(self.store, position)
        records = self._records(position, epoch)
        last = max([epoch, *(logged.record.number for logged in records if isinstance(logged.record, Epoch))])
        if self.kept_epoch > last:
            raise LogBroken(
                f"{self.store.url}: epoch {self.kept_epoch} was answered, but the log ends with epoch {last}: records "
                "were lost. Restore the log from a backup; `headrace log show` shows what is left"
            )
        self.loads = dict(metadata.store.loads)
        is_migrated = loaded is not None and loaded.manifest.fingerprint != self.fingerprint
        if loaded is not None and is_migrated:
            written = read_fingerprint(self.store, loaded.manifest.fingerprint)
            values = self.records.program.values
            tables = migrate(loaded.tables, written, self.app_fingerprint, self.app, closed_us, values)
            for name in remade(written, self.app_fingerprint):
                self.loads[name] = self.loads.get(name, 0) + bool(loaded.tables.get(name))
        self._start_changes(epoch, last, closed_us)
        self.marks = list(metadata.store.marks)
        replies = self._replies(min(metadata.ledger.oldest, epoch + 1), epoch, metadata.sources)
        kept = [each for each in replies if each.number <= epoch]
        recorded = {each.number: each for each in replies if each.number > epoch}
        return Restored(
            epoch, tables, metadata, kept, records, self.log.last, recorded, is_migrated, code=self.fingerprint
        )

    def _start_changes(self, epoch: int, last: int, closed_us: int) -> None:
        if self.changes is None:
            return
        if self.changes.kept > last:
            raise LogBroken(
                f"{self.store.url}: the changes of epoch {self.changes.kept} are kept, but the log ends with epoch "
                f"{last}: records were lost. Restore the log from a backup, or run `headrace log repair`"
            )
        self.changes.values, self.changes.fingerprint = self.records.program.values, self.fingerprint
        self.changes.start(epoch, closed_us, self.watched, self.loads)

    def _records(self, position: int, epoch: int) -> list[LoggedRecord]:
        """The log's records from this one on. Epochs after the snapshot's must have been logged by the current code, or
        by an older version to which it only adds: other code cannot replay them."""
        batches: dict[int, Batch] = {}
        found = []
        for record in self.log.read(position):
            logged = self.records.decode(record.number, record.data, batches)
            is_later = isinstance(logged.record, Epoch) and logged.record.number > epoch
            if is_later:
                assert isinstance(logged.record, Epoch)
                self._check_code(f"epoch {logged.record.number}", logged.fingerprint or "")
            if isinstance(logged.record, Batch):
                self.segments.note(logged.number, logged.record)
            found.append(logged)
        return found

    def _check_code(self, what: str, digest: str) -> None:
        """Raises if the code with this digest, which has written this, could do something that the current code does
        not do in the same way."""
        if digest in self._fitting:
            return
        written = read_fingerprint(self.store, digest)
        obstacles = written.obstacles(self.app_fingerprint)
        if obstacles:
            raise AppChanged(
                f"{what} in {self.store.url} was logged by other code of app {self.app.name!r} "
                f"({'; '.join(obstacles[:5])}), and no snapshot covers it. Run `headrace upgrade` with the old code, "
                "which makes a snapshot at the log's end; then start the new code"
            )
        check_defaults(added_fields(written, self.app_fingerprint), self.records.program.values)
        self._fitting.add(digest)

    def _replies(self, oldest: int, epoch: int, sources: SourcesMetadata) -> list[Epoch]:
        """The replies that may be asked for again, in order: of the oldest epoch whose ids are known and later ones,
        and of the last batch of each source. Those after this epoch are compared with what this code gives."""
        first, last = self.replies.first, self.replies.last
        found = []
        for number in sorted({number for each in sources.last.values() for number, _, _ in each.stretches}):
            if first <= number - self.epoch0 and number < oldest:
                record = next(iter(self.replies.read(number - self.epoch0)))
                found.append(self.records.decode_replies(record.data))
        if first > oldest - self.epoch0:
            raise LogBroken(
                f"{self.store.url}: replies of epochs {oldest} to {first + self.epoch0 - 1} are missing, so requests "
                "that they answered could run again. Restore replies/ from a backup"
            )
        if oldest - self.epoch0 <= last:
            for record in self.replies.read(oldest - self.epoch0):
                if record.number + self.epoch0 > epoch:
                    self._check_code(f"epoch {record.number + self.epoch0}, with its replies,", writer_of(record.data))
                found.append(self.records.decode_replies(record.data))
        return found

    def retire(self, epoch: int) -> None:
        """Deletes what only snapshots before this epoch need. The log has a record that says so."""
        manifests = [each for each in self.snapshots.manifests() if each.epoch == epoch and each.is_complete]
        if not manifests:  # a successor has taken over: there is nothing left to delete here
            self.log.check()
            return
        keep = manifests[-1]
        for name in self.snapshots.retire(keep):
            self.store.delete(name)
        self.log.retire(keep.position)
        self.segments.retire(keep.position, keep.metadata.sources)
        until_us = self.marks[-1][1] - self.config.reply_retention_us
        below = max([number for number, at_us in self.marks if at_us <= until_us], default=0)
        self.replies.retire(min(below, keep.metadata.ledger.oldest - self.epoch0))
        if self.changes is not None:
            self.changes.retire(min(below + self.epoch0, epoch + 1))

    def close(self) -> None:
        """Closes the logs: nothing more is written."""
        self.log.close()
        self.replies.close()
        if self.changes is not None:
            self.changes.close()
        self.close_store()

    def close_store(self) -> None:
        if self.is_mine and isinstance(self.store, DirectoryStore):
            self.store.close()


def snapshots_of(store: Store, identity: dict[str, Any], app: App) -> Snapshots:
    named = {name: identity[name] for name in ("cluster", "app", "format")}
    count = int(identity["shards"])

    def shards(operator: str, keys: list[Any]) -> Any:
        known = BUILT_IN if operator == BUILT_IN.name else app.operators[operator]
        return shards_of(known, keys, count)

    return Snapshots(store, named, shards, count)
