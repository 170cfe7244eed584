"""The journal: what must be durable before anything leaves, and when a snapshot is due.

Rules:
1. Everything that decides a result is a record of the log: epochs, source batches, and decrees and responses, which
   are known only once an epoch runs. Records are numbered in the order they are appended.
2. State that was read leaves once it is certain that no newer engine has taken over: it may have changed the state.
   A reply does not need this check: it stays valid.
3. A reply leaves once its epoch's record is durable, and so is every decree and response so far: later transactions
   may depend on them. Until then it waits, while the engine continues.
4. A snapshot depends only on durable records. One is under way at a time; if it fails, the next one includes its
   changes.

Without a log (`is_durable` is False) nothing is appended and everything counts as durable.

Never here: files, formats, which store.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from headrace.config import Config
from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.events import Append, Check, Delta, JournalEffect, Keep, Save, Snapshot, SnapshotTaken
from headrace.core.log_records import Note, Record, Retired
from headrace.core.snapshot_metadata import SnapshotMetadata
from headrace.core.state import entities_of
from headrace.wire.messages import Entities


class Journal:
    def __init__(self, config: Config, is_durable: bool = False) -> None:
        self.config, self.is_durable = config, is_durable
        self.last = self.durable = 0  # numbers of records
        self.floor = 0  # the last record that results of later epochs may depend on
        self.tickets = self.checked = 0
        self.unkept: deque[Epoch] = deque()  # final, but not durable yet
        self.logs_changes = False  # if so, an epoch is kept with its changes
        self.changes: dict[int, Changes] = {}  # of epochs that are not kept yet
        self.saved_epoch, self.saved_us = 0, 0  # of the last snapshot
        self.transactions = 0  # that a recovery would have to replay
        self.unsaved: Snapshot | None = None  # taken, but its records are not durable yet
        self.saving: Snapshot | None = None
        self.follows_from = 0  # the last record that the one under way depends on
        self.carried: Entities = []  # changes of a snapshot that failed
        self.is_full_next = False  # the next one holds everything and replaces earlier ones
        self.is_due = False  # the next one is taken at once
        self.earliest = 0  # the first epoch at whose end there may be one
        self.retired = 0  # snapshots before this epoch's are no longer used
        self.wanted: list[Any] = []  # tokens of requests for a snapshot
        self.promised: list[Any] = []  # those that the one under way answers
        self.effects: list[JournalEffect] = []

    def restore(self, epoch: int, last: int, is_full_next: bool) -> None:
        """Continue after the log's last record, with a snapshot of this epoch. With `is_full_next`, its state has
        changed since, and a full one is taken at once."""
        self.saved_epoch, self.last, self.durable = epoch, last, last
        self.is_full_next = self.is_due = is_full_next

    def append(self, record: Record) -> int:
        """Send a record to the log; returns its number."""
        if not self.is_durable:
            return 0
        self.last += 1
        self.effects.append(Append(self.last, record))
        return self.last

    def note(self, record: Note) -> None:
        """A record that results of its own epoch and of later ones may depend on."""
        self.floor = max(self.floor, self.append(record))

    def keep(self, epoch: Epoch, changes: Changes | None = None) -> None:
        """The epoch is final. Its replies are kept once they may leave and its changes are known."""
        self.transactions += len(epoch)
        if self.is_durable:
            self.unkept.append(epoch)
            if changes is not None:
                self.changes[epoch.number] = changes
            self._keep()
            self._save()

    def changed(self, epoch: int, changes: Changes) -> None:
        """The changes of a final epoch. If it was kept before, this was only a rerun."""
        if self.unkept and epoch >= self.unkept[0].number:
            self.changes[epoch] = changes
            self._keep()
            self._save()

    def _keep(self) -> None:
        while self.unkept and self.covers(self.unkept[0].position):
            if self.logs_changes and self.unkept[0].number not in self.changes:
                return
            epoch = self.unkept.popleft()
            self.effects.append(Keep(epoch, self.changes.pop(epoch.number, None)))

    def check(self) -> int:
        """Start a check that this engine still owns the log; returns a ticket for `has_checked`."""
        if self.is_durable:
            self.tickets += 1
            self.effects.append(Check(self.tickets))
        return self.tickets

    def has_checked(self, ticket: int) -> bool:
        return self.checked >= ticket

    def covers(self, position: int) -> bool:
        """May a result of an epoch with this record leave?"""
        return self.durable >= position and self.durable >= self.floor

    # --- snapshots ---

    def is_busy(self) -> bool:
        return self.unsaved is not None or self.saving is not None

    def wants_snapshot(self, now_us: int, epoch: int) -> bool:
        """Is one due at the end of this epoch?"""
        if not self.is_durable or self.is_busy() or epoch < self.earliest:
            return False
        if self.wanted or self.is_due:
            return True
        is_old = now_us - self.saved_us >= self.config.snapshot_interval_us
        is_long = self.transactions >= self.config.replay_transactions_max
        return epoch > self.saved_epoch and (is_old or is_long)

    def next_due_us(self, epoch: int) -> int | None:
        if not self.is_durable or self.is_busy() or epoch <= self.saved_epoch or epoch < self.earliest:
            return None
        return self.saved_us + self.config.snapshot_interval_us

    def take(self, now_us: int, changed: Delta, epoch: int, position: int, metadata: SnapshotMetadata) -> None:
        """Take a snapshot at the end of `epoch`. It is saved once all records so far are durable: it depends on them,
        and a recovery reads them after it."""
        if self.carried and not self.is_full_next:
            merged = {(operator, key): state for operator, key, state in [*self.carried, *rows_of(changed)]}
            changed = [(*entity, state) for entity, state in merged.items()]
        self.carried = []  # a full snapshot has all that it needs
        self.saved_us, self.transactions = now_us, 0
        self.promised, self.wanted, self.is_due = self.wanted, [], False
        if epoch == self.saved_epoch and not self.is_full_next:  # nothing has run since the last one
            self._keep_promises()
            return
        self.unsaved = Snapshot(epoch, position, changed, metadata, self.is_full_next)
        self.follows_from, self.is_full_next = self.last, False
        self._keep()
        self._save()

    def carry(self, changed: Entities) -> None:
        """Keep changes that the state no longer lists and no snapshot has yet."""
        if self.is_durable:
            self.carried = [*self.carried, *changed]

    def _save(self) -> None:
        """Save the snapshot once its records are durable and the replies of all that it covers are kept."""
        if self.unsaved is None or self.durable < self.follows_from:
            return
        if not self.unkept or self.unkept[0].number > self.unsaved.epoch:
            self.saving, self.unsaved = self.unsaved, None
            self.effects.append(Save(self.saving))

    def _keep_promises(self) -> None:
        self.effects += [SnapshotTaken(token, self.saved_epoch) for token in self.promised]
        self.promised = []

    def appended(self, number: int) -> None:
        self.durable = max(self.durable, number)
        self._keep()
        self._save()

    def saved(self, oldest: int) -> None:
        assert self.saving is not None
        self.saved_epoch, self.saving = self.saving.epoch, None
        self._keep_promises()
        if oldest > self.retired:  # logged, so that a superseded engine deletes nothing
            self.retired = oldest
            self.append(Retired(oldest))

    def failed(self) -> list[Any]:
        """The snapshot could not be written: its changes go into the next one. Returns the tokens it was to answer."""
        assert self.saving is not None
        if self.saving.is_full:
            self.is_full_next, self.carried = True, []
        else:
            self.carried = [*rows_of(self.saving.delta), *self.carried]
        self.saving = None
        promised, self.promised = self.promised, []
        return promised

    def drain(self) -> list[JournalEffect]:
        effects, self.effects = self.effects, []
        return effects


def rows_of(changes: Delta) -> Entities:
    return entities_of(changes) if isinstance(changes, dict) else changes
