"""Mistakes in how snapshots are saved, folded and retired, planted one at a time: a test of them notices each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase

from headrace.core.events import Snapshot
from headrace.durability.snapshots import snapshots
from headrace.durability.snapshots.layers import LayerSource
from headrace.durability.snapshots.manifests import Layer, Manifest, SnapshotId
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.errors import HeadraceError
from tests.durability.snapshot_world import small_limits
from tests.durability.test_snapshots import Oracle, run_oracle
from tests.durability.test_snapshots_broken import asleep, deaths, in_common, nine_and_ten, other_code, unanswered


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_limits():
        yield


class LexicalOrder(Snapshots):
    """Folds layer 10 before layer 9, as their names without zeros are ordered."""

    def _sources(self, snapshot_id: SnapshotId, layer: Layer, sharding: str) -> list[LayerSource]:
        found = super()._sources(snapshot_id, layer, sharding)
        for source in found:
            source.epoch = str(layer.epoch)  # type: ignore[attr-defined]
        return found

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        fold_all = snapshots.fold_all

        def in_lexical_order(some: list[list[LayerSource]], is_base: bool) -> Any:
            return fold_all(sorted(some, key=lambda layer: layer[0].epoch), is_base)  # type: ignore[attr-defined]

        with mock.patch.object(snapshots, "fold_all", in_lexical_order):
            return super().compact(term, fingerprint)


class DeletionsLost(Snapshots):
    """Drops deletions in any fold, also where there is something below."""

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        fold_all = snapshots.fold_all
        with mock.patch.object(snapshots, "fold_all", lambda some, is_base: fold_all(some, True)):
            return super().compact(term, fingerprint)


class Aliased(Snapshots):
    """Keeps the snapshot it was given, and encodes it when the next thing is done."""

    waiting: Any = None

    def save(self, snapshot: Snapshot, term: int, fingerprint: str) -> Manifest:
        self.catch_up()
        manifest = super().save(snapshot._replace(delta=[]), term, fingerprint)
        self.waiting = lambda: super(Aliased, self).save(snapshot, term, fingerprint)
        return manifest

    def catch_up(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        self.catch_up()
        return super().compact(term, fingerprint)

    def manifests(self) -> list[Manifest]:
        self.catch_up()
        return super().manifests()


class ManifestFirst(Snapshots):
    """Writes the objects after the manifest that names them."""

    later: tuple[tuple[str, bytes], ...] = ()

    def _put(self, name: str, data: bytes, written: list[str]) -> None:
        self.later = (*self.later, (name, data))

    def _publish(self, *args: Any) -> Manifest:
        manifest = super()._publish(*args)
        for name, data in self.later:
            self.store.put(name, data)
        self.later = ()
        return manifest


class GreedyRetirement(Snapshots):
    """Retires the objects of all older snapshots, also those that newer ones have in common with them."""

    def retire(self, keep: Manifest) -> list[str]:
        older = [each for each in self.manifests() if each.snapshot_id < keep.snapshot_id]
        return [each.name for each in older] + [stored.name for each in older for stored in each.body.objects()]


class RetiredUnderneath(Snapshots):
    """Retires what is only needed by the snapshot that the next one continues."""

    def retire(self, keep: Manifest) -> list[str]:
        with mock.patch.object(self, "_last", None):
            return super().retire(keep)


class NewestByEpoch(Snapshots):
    """Takes the highest epoch for the newest, whoever wrote it."""

    def _ids(self) -> list[SnapshotId]:
        return sorted(super()._ids(), key=lambda snapshot_id: (snapshot_id.epoch, snapshot_id.term, snapshot_id.number))


class OldShards(Snapshots):
    """Trusts the shards of layers that other code has written."""

    def _sharding(self, fingerprint: str) -> str:
        return "always the same"


class MetaLeftOut(Snapshots):
    """A fold forgets all but the state."""

    def compact(self, term: int, fingerprint: str) -> Manifest | None:
        publish = self._publish
        with mock.patch.object(self, "_publish", lambda *args: publish(*args[:-1], b"\x80")):
            return super().compact(term, fingerprint)


STORIES = [
    (LexicalOrder, nine_and_ten),
    (DeletionsLost, nine_and_ten),
    (Aliased, nine_and_ten),
    (ManifestFirst, deaths),
    (GreedyRetirement, in_common),
    (RetiredUnderneath, unanswered),
    (MetaLeftOut, deaths),
    (NewestByEpoch, asleep),
    (OldShards, other_code),
]


@pytest.mark.parametrize(("mutant", "story"), STORIES, ids=lambda each: each.__name__)
def test_a_story_catches_a_planted_mistake(mutant: type[Snapshots], story: Callable[[type[Snapshots]], Any]) -> None:
    with pytest.raises((AssertionError, HeadraceError)):
        story(mutant)


@pytest.mark.parametrize("mutant", [LexicalOrder, DeletionsLost, Aliased, ManifestFirst, GreedyRetirement, MetaLeftOut])
def test_the_oracle_catches_a_planted_mistake(mutant: type[Snapshots]) -> None:
    machine = type(mutant.__name__, (Oracle,), {"made": mutant})
    with pytest.raises((AssertionError, HeadraceError)):
        run_oracle(machine, 5, phases=[Phase.generate], report_multiple_bugs=False)
