"""Views: an operator's state at the end of an epoch, for readers: chooses the epoch and where its state comes from.

    snapshot   the layers of a snapshot of that very epoch
    changes    an earlier snapshot, and the operator's changelog of the epochs since
    replay     an earlier snapshot, and the log's epochs since, run again by the app's own code

The epoch's end is chosen once; readers in other processes then read just that. It is a few numbers, cheap to send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, NamedTuple

from headrace.durability.columns import split, split_keys
from headrace.durability.identity import CURRENT, read_checked, read_fingerprint
from headrace.durability.log.changelog import Changelog
from headrace.durability.reading.scan import LaterStates, Scan, ScannedRows, ShardRange
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.snapshots.layers import FOLD_ROWS
from headrace.durability.snapshots.manifests import Manifest, SnapshotId, read_manifest
from headrace.durability.store import Store
from headrace.errors import BadRequest, ObjectMissing, SnapshotBroken, StoreError
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, fingerprint
from headrace.model.operator import Operator

SNAPSHOT, CHANGES, REPLAY = "snapshot", "changes", "replay"


class EpochEnd(NamedTuple):
    """The end of an epoch, and how to get there."""

    epoch: int
    snapshot_id: SnapshotId | None  # the snapshot to begin with; None: begin with no state
    how: str = SNAPSHOT


class View:
    """A view of one operator. With an app, epochs can be replayed, and keys found in operators with `partition_by`."""

    def __init__(self, store: Store, operator: str, app: App | None = None) -> None:
        self.reader = StoreReader(store, app)
        self.store, self.app, self.name = store, app, operator
        self.shards = int(self.reader.identity["shards"])
        self.changelog = Changelog(store)

    # --- which epoch ---

    def newest(self) -> EpochEnd:
        """The newest epoch that can be read without a replay; if there is no snapshot, the newest one by replay."""
        base = self.reader.snapshots.newest()
        begin = self._begin(base)
        last = self.changelog.bounds()[1]
        if last > begin and self._logs_from(begin + 1, base):
            return EpochEnd(last, snapshot_id_of(base), CHANGES)
        if base is not None:
            return EpochEnd(base.epoch, base.snapshot_id)
        if self.app is not None:
            return EpochEnd(self.reader.last_epoch(), None, REPLAY)
        raise BadRequest(
            f"{self.store.url} has no snapshot yet. One is taken every Config(snapshot_interval_us=...), at once by "
            'runtime.snapshot(), and when the app is closed; or give option("app", "module:attribute") to replay the '
            "log"
        )

    def at(self, epoch: int) -> EpochEnd:
        """The end of exactly this epoch, or an error that says which ones can be read."""
        manifests = self._manifests()
        below = [each for each in manifests if each.epoch <= epoch]
        base = max(below, key=lambda each: (each.epoch, each.snapshot_id), default=None)
        if base is not None and base.epoch == epoch:
            return EpochEnd(epoch, base.snapshot_id)
        kept = sorted({each.epoch for each in manifests})
        if kept and base is None:
            raise BadRequest(
                f"epoch {epoch} is older than the oldest snapshot that {self.store.url} keeps, of epoch {kept[0]}: "
                "read a later epoch. Config(snapshots_kept=...) sets how many snapshots are kept"
            )
        last = self.changelog.bounds()[1]
        if epoch <= last and self._logs_from(self._begin(base) + 1, base):
            return EpochEnd(epoch, snapshot_id_of(base), CHANGES)
        end = self.reader.last_epoch(base.position if base is not None else None)
        if epoch > end:
            raise BadRequest(f"{self.store.url} has no epoch {epoch}: the last one so far is {end}")
        if self.app is not None:
            return EpochEnd(epoch, snapshot_id_of(base), REPLAY)
        raise BadRequest(
            f"{self.store.url} has no snapshot of epoch {epoch}; it has snapshots of epochs "
            f'{", ".join(map(str, kept)) or "none"}. Read one of those; or give option("app", "module:attribute") to '
            f"replay the epochs up to {epoch}; or let {self.name} log its changes from now on, with "
            f"app.operator({self.name!r}, changes=True)"
        )

    def _manifests(self) -> list[Manifest]:
        return [each for each in self.reader.snapshots.manifests() if each.is_complete]

    def _begin(self, base: Manifest | None) -> int:
        return self.reader.epoch0 if base is None else base.epoch

    def _logs_from(self, epoch: int, base: Manifest | None) -> bool:
        """Whether the changelog has all changes from this epoch on. Without a snapshot it must begin with the store."""
        since = self.changelog.since(self.name)
        if since is None or since > epoch:
            return False
        if base is None:
            return self.reader.epoch0 == 0
        return bool(self.changelog.loads(self.name) == base.metadata.store.loads.get(self.name, 0))

    # --- what is known of the operator ---

    def app_fingerprint(self, epoch_end: EpochEnd) -> Fingerprint:
        """The fingerprint of the code that wrote the state."""
        if epoch_end.how == REPLAY and self.app is not None:
            return fingerprint(self.app)
        manifest = self._manifest(epoch_end)
        if manifest is not None:
            return read_fingerprint(self.store, manifest.fingerprint)
        if self.app is not None:
            return fingerprint(self.app)
        return read_fingerprint(self.store, str(read_checked(self.store, CURRENT)["fingerprint"]))

    def check(self, app_fingerprint: Fingerprint) -> None:
        if self.name not in app_fingerprint.operators:
            known = ", ".join(app_fingerprint.operators) or "none"
            raise BadRequest(
                f"app {app_fingerprint.app!r} in {self.store.url} has no operator {self.name!r}; it has: {known}"
            )

    def scan(self, epoch_end: EpochEnd, app_fingerprint: Fingerprint) -> Scan:
        operator: Operator | None = None
        if not app_fingerprint.operators[self.name].partition_by:
            operator = Operator(self.name)
        elif self.app is not None and self.name in self.app.operators:
            operator = self.app.operators[self.name]
        return Scan(self.store, self._manifest(epoch_end), self.name, self.shards, operator)

    def _manifest(self, epoch_end: EpochEnd) -> Manifest | None:
        if epoch_end.snapshot_id is None:
            return None
        try:
            return read_manifest(self.store, epoch_end.snapshot_id)
        except ObjectMissing:
            raise self._retired(epoch_end) from None

    # --- reading ---

    def ranges(self, epoch_end: EpochEnd, scan: Scan, count: int, keys: Collection[Any] | None) -> list[ShardRange]:
        """Ranges of shards for this many readers. A replay needs a single reader; so do changes, if the shard of a key
        is not known."""
        is_whole = epoch_end.how == REPLAY or (epoch_end.how == CHANGES and scan.operator is None)
        return [(0, self.shards - 1)] if is_whole else scan.ranges(count, keys)

    def read(
        self,
        epoch_end: EpochEnd,
        app_fingerprint: Fingerprint,
        within: ShardRange | None = None,
        keys: Collection[Any] | None = None,
    ) -> Iterator[ScannedRows]:
        within = within or (0, self.shards - 1)
        if epoch_end.how == REPLAY:
            yield from self._replayed(epoch_end, keys)
            return
        lives = app_fingerprint.operators[self.name].ttl
        try:
            scan = self.scan(epoch_end, app_fingerprint)
            later, now_us = self._later(epoch_end, scan.manifest)
            ttl = (int(lives.removesuffix(" us")), now_us) if lives else None
            yield from scan.read(within, keys, later, ttl)
        except SnapshotBroken:
            if epoch_end.snapshot_id is not None and not self.store.exists(epoch_end.snapshot_id.manifest()):
                raise self._retired(epoch_end) from None
            raise

    def _later(self, epoch_end: EpochEnd, manifest: Manifest | None) -> tuple[LaterStates | None, int]:
        now_us = manifest.metadata.sequencing.closed_us if manifest is not None else 0
        if epoch_end.how != CHANGES:
            return None, now_us
        changed: dict[Any, Any] = {}
        for epoch in self.changelog.read(self._begin(manifest) + 1, epoch_end.epoch):
            now_us = epoch.closed_us
            found = epoch.of(self.name)
            if found is not None:
                changed.update(zip(found.keys, found.afters, strict=True))
        return LaterStates(changed), now_us

    def _replayed(self, epoch_end: EpochEnd, keys: Collection[Any] | None) -> Iterator[ScannedRows]:
        engine = self.reader.replay(epoch_end.epoch).engine
        entities = engine.visible(engine.state.select(self.name))
        wanted = None if keys is None else set(keys)
        rest = ((key, state) for _, key, state in entities if wanted is None or key in wanted)
        while some := list(islice(rest, FOLD_ROWS)):
            yield ScannedRows(split_keys([key for key, _ in some]), split([state for _, state in some]))

    def _retired(self, epoch_end: EpochEnd) -> StoreError:
        kept: list[int] = []
        with contextlib.suppress(StoreError):
            kept = sorted({each.epoch for each in self._manifests()})
        epoch = epoch_end.snapshot_id.epoch if epoch_end.snapshot_id else 0
        return StoreError(
            f"the snapshot of epoch {epoch} in {self.store.url} has been deleted "
            f"in the meantime; there are snapshots of epochs {', '.join(map(str, kept)) or 'none'}. Load the table "
            "again, or keep more snapshots: Config(snapshots_kept=...)"
        )


def snapshot_id_of(manifest: Manifest | None) -> SnapshotId | None:
    return None if manifest is None else manifest.snapshot_id
