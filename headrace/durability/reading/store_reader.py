"""Reads a store, also while it is being written. Nothing is taken over and no writer is fenced.

The state at the end of any epoch that the store still covers comes from a snapshot at or before it and the log's epochs
up to it, run again by the app's own code. It can be inspected, compared with the recorded replies, or written to a new
store (`headrace restore`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.config import Config
from headrace.core.engine import Engine
from headrace.core.epoch import FINAL, Batch, Epoch
from headrace.core.events import Snapshot
from headrace.core.local import run_backlog
from headrace.core.origin import BatchId
from headrace.core.restore import LoggedRecord, Restored, restore
from headrace.core.snapshot_metadata import INITIAL, LedgerMetadata
from headrace.core.state import States
from headrace.durability.identity import IDENTITY, check_identity, identity_of, read_fingerprint, with_checksum
from headrace.durability.inbox.inbox import mark_finished
from headrace.durability.log.log import Log, bounds, read_log
from headrace.durability.log.records import BatchHeader, EpochHeader, Records, unpack, unpack_results
from headrace.durability.migration import migrate
from headrace.durability.recovery import snapshots_of
from headrace.durability.snapshots.snapshots import LoadedSnapshot
from headrace.durability.store import Store, open_store
from headrace.errors import AppChanged, BadRequest, SnapshotBroken, WrongStore
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, fingerprint

REPLIES_AT_ONCE = 200  # how many are copied to a new store in one append


class Replay(NamedTuple):
    """An engine at the end of an epoch, and the epochs that were replayed to get there, with their outcomes."""

    engine: Engine
    epoch: int
    began: int  # the epoch of the snapshot that it began with; 0 without one
    epochs: list[Epoch]
    codes: frozenset[str]  # fingerprints of the code that logged these epochs; if there are none, the snapshot's

    def state(self) -> dict[str, States]:
        """Sealed states by operator and key."""
        tables: dict[str, States] = {name: {} for name in self.engine.program.app.operators}
        for operator, key, state in self.engine.state.select():
            tables.setdefault(operator, {})[key] = state
        return tables


class StoreReader:
    """Reads what a store holds. With an app, its epochs can be replayed."""

    def __init__(self, where: str | Path | Store, app: App | None = None) -> None:
        self.store = open_store(where) if isinstance(where, str | Path) else where
        identity = identity_of(self.store)
        if identity is None:
            raise WrongStore(
                f"{self.store.url} is empty: give the path of a store that `headrace run --store` has created"
            )
        self.identity = identity
        self.config = Config(shards=int(identity["shards"]))
        if app is not None:
            check_identity(self.store, identity, app, self.config)
        self.app = app
        self.epoch0 = int(identity["epoch0"])
        self.snapshots = snapshots_of(self.store, identity, app or App(str(identity["app"])))

    def known_fingerprint(self, digest: str) -> Fingerprint | None:
        """The fingerprint with this digest, if the store has it."""
        try:
            return read_fingerprint(self.store, digest)
        except AppChanged:
            return None

    def load(self, epoch: int | None) -> LoadedSnapshot | None:
        """The newest intact snapshot at or before this epoch from which the log continues. None if the log alone
        reaches back to the beginning."""
        first = bounds(self.store, "log")[0]
        complete = [each for each in self.snapshots.manifests() if each.is_complete]
        if epoch is not None and complete and min(each.epoch for each in complete) > epoch and first == 1:
            return None
        reached = {each.epoch for each in complete if each.position >= first and (epoch is None or each.epoch <= epoch)}
        for earlier in sorted(reached, reverse=True)[:-1]:
            with contextlib.suppress(SnapshotBroken):
                return self.snapshots.load(earlier)
        return self.snapshots.load(min(reached, default=epoch))

    def last_epoch(self, position: int | None = None) -> int:
        """The last epoch in the log (read from this record on), or of a snapshot if that is later."""
        epochs = [each.epoch for each in self.snapshots.manifests() if each.is_complete]
        for record in read_log(self.store, "log", position):
            header, _ = unpack(record.data)
            if isinstance(header, EpochHeader):
                epochs.append(header.number)
        return max(epochs, default=self.epoch0)

    # --- replay ---

    def replay(
        self, epoch: int | None = None, before: int | None = None, is_strict: bool = True, has_digests: bool = False
    ) -> Replay:
        """Runs the log again up to this epoch, or to its end; from a snapshot of epoch `before` or earlier. With
        `is_strict`, the code must be the same as when the epochs were logged, or only add to it. With `has_digests`,
        epochs get digests of what they write, of the kind that was recorded."""
        app = self._need_app()
        loaded = self.load(epoch if before is None else before)
        began, position = (0, 1) if loaded is None else (loaded.manifest.epoch, loaded.manifest.position)
        engine = Engine(app, self.config, seed=int(self.identity["seed"]), has_digests=has_digests)
        mine = fingerprint(app)
        records = self._records(Records(engine.program, mine, self.store), position, epoch)
        epochs = [each.record for each in records if isinstance(each.record, Epoch) and each.record.number > began]
        if epoch is not None and max([began, *(each.number for each in epochs)]) < epoch:
            raise BadRequest(f"{self.store.url} has no epoch {epoch}: the last one is {self.last_epoch()}")
        codes = {
            each.fingerprint or "" for each in records if isinstance(each.record, Epoch) and each.record.number > began
        }
        if is_strict:
            self._check_code(mine, codes)
        tables: dict[str, States] = {} if loaded is None else loaded.tables
        metadata = INITIAL if loaded is None else loaded.manifest.metadata
        if loaded is not None and loaded.manifest.fingerprint != mine.digest:
            written = self.known_fingerprint(loaded.manifest.fingerprint)
            if not epochs:
                codes.add(loaded.manifest.fingerprint)
            if epochs or (written is not None and not written.obstacles(mine)):
                written = read_fingerprint(self.store, loaded.manifest.fingerprint)
                tables = migrate(tables, written, mine, app, metadata.sequencing.closed_us, engine.program.values)
        kept = [each for each in self.recorded(metadata.ledger.oldest, began).values() if each.number <= began]
        last = records[-1].number if records else position - 1
        restore(engine, Restored(began, tables, metadata, kept, records, last))
        if has_digests:
            known = dict(self.replies(began + 1))
            for each in epochs:
                each.digest = unpack_results(known[each.number])[0].digest if each.number in known else None
        run_backlog(engine)
        waiting = next((each.number for each in epochs if each.phase != FINAL), None)
        if waiting is not None and epoch is None:
            return self.replay(waiting - 1, before, is_strict, has_digests)
        if waiting is not None:
            raise BadRequest(
                f"epoch {waiting} waits for a response to an external call; the last complete one is {waiting - 1}"
            )
        return Replay(engine, epochs[-1].number if epochs else began, began, epochs, frozenset(codes))

    def _records(self, records: Records, position: int, epoch: int | None) -> list[LoggedRecord]:
        """The records from this one on, without the epochs after `epoch` and what only they need: other code may have
        written them."""
        found = [(record, unpack(record.data)[0]) for record in read_log(self.store, "log", position)]
        taken = [
            record.number
            for record, header in found
            if isinstance(header, EpochHeader) and (epoch is None or header.number <= epoch)
        ]
        last = found[-1][0].number if epoch is None and found else max(taken, default=position - 1)
        batches: dict[int, Batch] = {}
        return [
            records.decode(record.number, record.data, batches)
            for record, header in found
            if record.number <= last or not isinstance(header, EpochHeader | BatchHeader)
        ]

    def _check_code(self, mine: Fingerprint, codes: Iterable[str]) -> None:
        """The code must be that which wrote the store, or one that only adds to it."""
        for digest in sorted(set(codes) - {mine.digest}):
            known = self.known_fingerprint(digest)
            obstacles = ["the differences are not known"] if known is None else known.obstacles(mine)
            if obstacles:
                raise AppChanged(
                    f"{self.store.url} was written by other code of app {mine.app!r} ({'; '.join(obstacles[:5])}): use "
                    "the code that wrote it"
                )

    def recorded(self, first: int, last: int | None = None) -> dict[int, Epoch]:
        """The epochs whose replies are kept, from this one on, with their recorded replies."""
        records = Records(Engine(self._need_app(), self.config).program)
        return {
            epoch: records.decode_replies(data) for epoch, data in self.replies(first) if last is None or epoch <= last
        }

    def replies(self, first: int) -> Iterator[tuple[int, bytes]]:
        """The records of replies, from this epoch on as far as they are kept."""
        begin, end = bounds(self.store, "replies")
        if max(begin, first - self.epoch0) <= end:
            for record in read_log(self.store, "replies", max(begin, first - self.epoch0)):
                yield record.number + self.epoch0, record.data

    def _need_app(self) -> App:
        if self.app is None:
            raise BadRequest("this needs the app's code: name it, as in --app examples.bank:app")
        return self.app

    # --- into a new store ---

    def write_new_store(self, replay: Replay, where: str | Path | Store) -> dict[str, Any]:
        """Writes a new store that continues from there, with the state, the counters, and the kept request ids."""
        app, engine = self._need_app(), replay.engine
        mine = fingerprint(app)
        self._check_code(mine, replay.codes)
        new = open_store(where) if isinstance(where, str | Path) else where
        if identity_of(new) is not None:
            raise WrongStore(f"{new.url} is already a store: give an empty or new folder")
        again = {epoch.number: epoch for epoch in replay.epochs}
        _, _, metadata = engine.describe()
        oldest = metadata.ledger.oldest
        kept = {number: data for number, data in self.replies(oldest) if number <= replay.epoch}
        first = min([*(number for number in (*kept, *again) if number >= oldest), replay.epoch + 1])
        identity = self.identity | {"cluster": secrets.token_hex(8), "epoch0": first - 1}
        log = Log.take_over(new, "log")
        replies = Log.take_over(new, "replies", term=log.term)
        records = Records(engine.program, mine)
        pending: list[bytes] = []
        for number in range(first, replay.epoch + 1):
            pending.append(kept[number] if number in kept else records.encode_replies(again[number]))
            if len(pending) == REPLIES_AT_ONCE or number == replay.epoch:
                replies.append(pending)
                pending = []
        entities = engine.state.select()
        metadata = msgspec.structs.replace(metadata, ledger=LedgerMetadata(first))
        snapshot = Snapshot(replay.epoch, 1, entities, metadata, True)
        snapshots_of(new, identity, app).save(snapshot, log.term, mine.digest)
        new.create(f"apps/{mine.digest}.json", with_checksum(mine.plain()))
        for source, last in metadata.sources.last.items():
            mark_finished(new, BatchId(source, last.number))  # so that the source can continue
        replies.close()
        log.close()
        new.create(IDENTITY, with_checksum(identity))  # last: a half-written store does not count as one
        return {"epoch": replay.epoch, "entities": len(entities), "cluster": identity["cluster"], "store": new.url}
