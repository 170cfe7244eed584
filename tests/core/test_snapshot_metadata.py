"""Snapshot metadata: each part of an engine describes itself, and another engine starts from that."""

from __future__ import annotations

import msgspec
import pytest

from examples import bank
from headrace.core.engine import Engine
from headrace.core.snapshot_metadata import INITIAL, PlacementMetadata, SnapshotMetadata
from tests.durability.hand import Hand, memory


def test_an_engine_that_has_not_run_describes_the_beginning() -> None:
    assert Engine(bank.app).describe() == (0, 1, INITIAL)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_restored_engine_describes_what_it_was_restored_from(workers: int) -> None:
    store = memory()
    hand = Hand(store, bank.app, workers, epoch_transactions_max=2)
    hand.run("a", [(bank.deposit, f"k{at}", 1) for at in range(5)])
    hand.run("b", [(bank.deposit, "k", 1), (bank.deposit, "k", -1)])
    hand.take_snapshot()
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    metadata = loaded.manifest.metadata
    assert (metadata.counts.committed, metadata.counts.aborted) == (6, 1)
    assert (metadata.placement is None) == (workers == 0)
    epoch, _, described = Hand(store, bank.app, workers).core.describe()
    assert epoch == loaded.manifest.epoch
    assert msgspec.structs.replace(described, store=metadata.store) == metadata


def test_every_section_survives_its_encoding() -> None:
    changed = msgspec.structs.replace(INITIAL, placement=PlacementMetadata([1, 2, 1], 4))
    for metadata in (INITIAL, changed):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=SnapshotMetadata) == metadata
