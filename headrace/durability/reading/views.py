"""Views: an operator's state at the end of an epoch, for who only reads: which epoch that is, and where it comes from.

    snapshot   the layers of a snapshot of that very epoch
    changes    a snapshot before it, and what the operator's changelog says of the epochs since
    replay     a snapshot before it, and the log's epochs since, run again by the app's own code

A moment is chosen once; readers in other processes then read just that. It is a few numbers, and travels well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, NamedTuple

from headrace.durability.columns import split, split_keys
from headrace.durability.identity import CURRENT, print_of, read_checked
from headrace.durability.log.changelog import Changelog
from headrace.durability.reading.scan import LaterStates, Range, Scan, ScannedRows
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.snapshots.layers import FOLD_ROWS
from headrace.durability.snapshots.manifests import Manifest, ManifestName, read_manifest
from headrace.durability.store import Store
from headrace.errors import BadRequest, ObjectMissing, SnapshotBroken, StoreError
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, fingerprint
from headrace.model.operator import Operator

SNAPSHOT, CHANGES, REPLAY = "snapshot", "changes", "replay"


class EpochEnd(NamedTuple):
    """The end of an epoch, and how to get there."""

    epoch: int
    place: ManifestName | None  # of the snapshot to begin with; None: with nothing
    how: str = SNAPSHOT


class View:
    """Of one operator. With an app its epochs can be run again, and keys be found that it partitions by something."""

    def __init__(self, store: Store, operator: str, app: App | None = None) -> None:
        self.past = StoreReader(store, app)
        self.store, self.app, self.name = store, app, operator
        self.shards = int(self.past.identity["shards"])
        self.changelog = Changelog(store)

    # --- which moment ---

    def newest(self) -> EpochEnd:
        """As far as can be read without running anything again; without any snapshot, by doing so."""
        base = self.past.snapshots.newest()
        begin = self._begin(base)
        last = self.changelog.bounds()[1]
        if last > begin and self._logs_from(begin + 1, base):
            return EpochEnd(last, place_of(base), CHANGES)
        if base is not None:
            return EpochEnd(base.epoch, base.place)
        if self.app is not None:
            return EpochEnd(self.past.last_epoch(), None, REPLAY)
        raise BadRequest(
            f"{self.store.url} has no snapshot yet. One is taken every Config(snapshot_interval_us=...), at once by "
            'runtime.snapshot(), and when the app is closed; or give option("app", "module:attribute") to replay the '
            "log"
        )

    def at(self, epoch: int) -> EpochEnd:
        """The end of this very epoch, or an error that says which ones there are."""
        manifests = self._manifests()
        below = [each for each in manifests if each.epoch <= epoch]
        base = max(below, key=lambda each: (each.epoch, each.place), default=None)
        if base is not None and base.epoch == epoch:
            return EpochEnd(epoch, base.place)
        kept = sorted({each.epoch for each in manifests})
        if kept and base is None:
            raise BadRequest(
                f"epoch {epoch} is older than the oldest snapshot that {self.store.url} keeps, of epoch {kept[0]}: "
                "read a later epoch. Config(snapshots_kept=...) sets how many snapshots are kept"
            )
        last = self.changelog.bounds()[1]
        if epoch <= last and self._logs_from(self._begin(base) + 1, base):
            return EpochEnd(epoch, place_of(base), CHANGES)
        end = self.past.last_epoch(base.position if base is not None else None)
        if epoch > end:
            raise BadRequest(f"{self.store.url} has no epoch {epoch}: the last one so far is {end}")
        if self.app is not None:
            return EpochEnd(epoch, place_of(base), REPLAY)
        raise BadRequest(
            f"{self.store.url} has no snapshot of epoch {epoch}; it has snapshots of epochs "
            f'{", ".join(map(str, kept)) or "none"}. Read one of those; or give option("app", "module:attribute") to '
            f"replay the epochs up to {epoch}; or let {self.name} log its changes from now on, with "
            f"app.operator({self.name!r}, changes=True)"
        )

    def _manifests(self) -> list[Manifest]:
        return [each for each in self.past.snapshots.manifests() if each.is_complete]

    def _begin(self, base: Manifest | None) -> int:
        return self.past.epoch0 if base is None else base.epoch

    def _logs_from(self, epoch: int, base: Manifest | None) -> bool:
        """Are all changes from this epoch on in the changelog? Without a snapshot, it must begin with the store."""
        since = self.changelog.since(self.name)
        if since is None or since > epoch:
            return False
        if base is None:
            return self.past.epoch0 == 0
        return bool(self.changelog.loads(self.name) == base.meta.get("loads", {}).get(self.name, 0))

    # --- what is known of the operator ---

    def print(self, moment: EpochEnd) -> Fingerprint:
        """Of the code that the state is of."""
        manifest = self._manifest(moment)
        if manifest is not None:
            return print_of(self.store, manifest.fingerprint)
        if self.app is not None:
            return fingerprint(self.app)
        return print_of(self.store, str(read_checked(self.store, CURRENT)["fingerprint"]))

    def check(self, print: Fingerprint) -> None:
        if self.name not in print.operators:
            known = ", ".join(print.operators) or "none"
            raise BadRequest(f"app {print.app!r} in {self.store.url} has no operator {self.name!r}; it has: {known}")

    def scan(self, moment: EpochEnd, print: Fingerprint) -> Scan:
        placed: Operator | None = None
        if not print.operators[self.name].partition_by:
            placed = Operator(self.name)
        elif self.app is not None and self.name in self.app.operators:
            placed = self.app.operators[self.name]
        return Scan(self.store, self._manifest(moment), self.name, self.shards, placed)

    def _manifest(self, moment: EpochEnd) -> Manifest | None:
        if moment.place is None:
            return None
        try:
            return read_manifest(self.store, moment.place)
        except ObjectMissing:
            raise self._retired(moment) from None

    # --- reading ---

    def ranges(self, moment: EpochEnd, scan: Scan, count: int, keys: Collection[Any] | None) -> list[Range]:
        """Of shards, for so many readers. What is run again is in one place; so is what changed, if nobody knows where
        a key is."""
        is_whole = moment.how == REPLAY or (moment.how == CHANGES and scan.placed is None)
        return [(0, self.shards - 1)] if is_whole else scan.ranges(count, keys)

    def read(
        self, moment: EpochEnd, print: Fingerprint, within: Range | None = None, keys: Collection[Any] | None = None
    ) -> Iterator[ScannedRows]:
        within = within or (0, self.shards - 1)
        if moment.how == REPLAY:
            yield from self._replayed(moment, keys)
            return
        lives = print.operators[self.name].ttl
        try:
            scan = self.scan(moment, print)
            later, now_us = self._later(moment, scan.manifest)
            ttl = (int(lives.removesuffix(" us")), now_us) if lives else None
            yield from scan.read(within, keys, later, ttl)
        except SnapshotBroken:
            if moment.place is not None and not self.store.exists(moment.place.manifest()):
                raise self._retired(moment) from None
            raise

    def _later(self, moment: EpochEnd, manifest: Manifest | None) -> tuple[LaterStates | None, int]:
        now_us = int(manifest.meta["closed_us"]) if manifest is not None else 0
        if moment.how != CHANGES:
            return None, now_us
        changed: dict[Any, Any] = {}
        for epoch in self.changelog.read(self._begin(manifest) + 1, moment.epoch):
            now_us = epoch.closed_us
            found = epoch.of(self.name)
            if found is not None:
                changed.update(zip(found.keys, found.afters, strict=True))
        return LaterStates(changed), now_us

    def _replayed(self, moment: EpochEnd, keys: Collection[Any] | None) -> Iterator[ScannedRows]:
        engine = self.past.replay(moment.epoch).engine
        entities = engine._visible(engine._select(self.name, None))
        wanted = None if keys is None else set(keys)
        rest = ((key, state) for _, key, state in entities if wanted is None or key in wanted)
        while some := list(islice(rest, FOLD_ROWS)):
            yield ScannedRows(split_keys([key for key, _ in some]), split([state for _, state in some]))

    def _retired(self, moment: EpochEnd) -> StoreError:
        kept: list[int] = []
        with contextlib.suppress(StoreError):
            kept = sorted({each.epoch for each in self._manifests()})
        return StoreError(
            f"the snapshot of epoch {moment.place.epoch if moment.place else 0} in {self.store.url} has been deleted "
            f"in the meantime; there are snapshots of epochs {', '.join(map(str, kept)) or 'none'}. Load the table "
            "again, or keep more snapshots: Config(snapshots_kept=...)"
        )


def place_of(manifest: Manifest | None) -> ManifestName | None:
    return None if manifest is None else manifest.place
