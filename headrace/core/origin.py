"""Where a batch of calls comes from: a client, a source, or the engine itself."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

from headrace.wire.messages import RequestIds


class BatchId(NamedTuple):
    """A batch of a source. A source numbers its batches from 0, without gaps."""

    source: str
    number: int


class FromClient(msgspec.Struct, frozen=True):
    """A request. The ids of its rows are known to the ledger."""

    ids: RequestIds  # of all rows, refused ones too
    stored: ClassVar[None] = None


class FromSource(msgspec.Struct, frozen=True):
    """A batch that is taken once, as a whole. The ids of its rows are for the replies; the ledger has none of them."""

    ids: RequestIds
    source: str
    number: int
    after: int = -1  # the last batch that ran, according to the source: the engine may have forgotten
    stored: bytes | None = None  # where its rows are stored; None if they are only in this batch

    @property
    def batch_id(self) -> BatchId:
        return BatchId(self.source, self.number)


class FromEngine(msgspec.Struct, frozen=True):
    """Rows that the engine itself adds: timers, schedules, expired state."""

    ids: list[str]
    stored: ClassVar[None] = None


Origin = FromClient | FromSource | FromEngine
