"""Snapshot metadata: what the next epoch depends on besides the state. Each part of the engine has a section.

A part makes its section with `describe`, and starts from it with `restore`. No field has a default, so what is stored
is either complete or refused.
"""

from __future__ import annotations

import msgspec

from headrace.wire.messages import Failure, RequestIds


class SequencingMetadata(msgspec.Struct, frozen=True):
    """Where numbering continues (core/sequencing.py)."""

    row: int  # how many rows came before
    lc: int  # the sequencer's counter
    closed_us: int  # when the last epoch was closed


class CountsMetadata(msgspec.Struct, frozen=True):
    """How many transactions there were (core/engine.py)."""

    committed: int
    aborted: int


class SourceMetadata(msgspec.Struct, frozen=True):
    """The last batch of a source, and where its rows went."""

    number: int
    ids: RequestIds
    refused: dict[int, Failure]
    stretches: list[tuple[int, int, int]]  # epoch (0 if the rows got a failure), first row, end


class SourcesMetadata(msgspec.Struct, frozen=True):
    """Which batches were taken (core/source_batches.py)."""

    last: dict[str, SourceMetadata]  # by source; the longest idle one comes first
    has_forgotten: bool


class LedgerMetadata(msgspec.Struct, frozen=True):
    """Which request ids are known (core/ledger.py). The ids are in the replies of these epochs."""

    oldest: int  # the first epoch with known ids


class DeferredMetadata(msgspec.Struct, frozen=True):
    """What the state does not say about timers, schedules and messages (core/later/deferred.py)."""

    spent: dict[str, int]


class PlacementMetadata(msgspec.Struct, frozen=True):
    """The shard map (core/placement.py)."""

    owners: list[int]
    version: int


class StoreMetadata(msgspec.Struct, frozen=True):
    """What the keeper adds when it saves the snapshot (durability/keeper.py)."""

    marks: list[tuple[int, int]]  # a record number of the replies, and the time up to which they reach
    loads: dict[str, int]  # how often the state of an operator was loaded or migrated


class SnapshotMetadata(msgspec.Struct, frozen=True):
    sequencing: SequencingMetadata
    counts: CountsMetadata
    sources: SourcesMetadata
    ledger: LedgerMetadata
    deferred: DeferredMetadata
    placement: PlacementMetadata | None  # None without workers
    store: StoreMetadata


NOTHING_STORED = StoreMetadata([], {})
INITIAL = SnapshotMetadata(  # of an engine that has not run
    SequencingMetadata(0, 0, 0),
    CountsMetadata(0, 0),
    SourcesMetadata({}, False),
    LedgerMetadata(1),
    DeferredMetadata({}),
    None,
    NOTHING_STORED,
)
