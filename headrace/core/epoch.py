"""An epoch: a batch of transactions, in columns, from its first request to its replies.

Row i is one transaction; its TID is `tids[i]`. An epoch is OPEN while it takes rows, CLOSED once it has its TIDs and
its place in the log, FINAL once every row has its result or failure.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from headrace.core.program import Entry
from headrace.core.signature import Args
from headrace.wire.messages import Failure, RequestIds, id_of
from headrace.wire.values import Key

OPEN, CLOSED, FINAL = "open", "closed", "final"
NEXT = {OPEN: CLOSED, CLOSED: FINAL}  # the phases of an epoch, in order


class Piece(NamedTuple):
    """Rows of an epoch that came together: `size` rows of a batch, from its row `start` on."""

    ids: RequestIds  # of the whole batch; or of these rows, if each has its own
    start: int
    size: int
    source: int = 0  # the number of the log record with the rows, for a source batch
    is_own: bool = False  # not from outside: timers, schedules, sweeps

    def id_at(self, row: int) -> str:
        """The request id of one of its rows."""
        return f"{self.ids}/{self.start + row}" if isinstance(self.ids, str) else self.ids[row]


class Epoch:
    __slots__ = (
        "args",
        "bytes",
        "closed_us",
        "decreed",
        "entries",
        "failures",
        "final_rows",
        "first",
        "has_ids",
        "ids",
        "is_replayed",
        "keys",
        "limits",
        "number",
        "opened_us",
        "phase",
        "pieces",
        "position",
        "responses",
        "results",
        "stored",
        "tids",
    )

    def __init__(self, number: int, first: int, opened_us: int) -> None:
        self.number, self.first = number, first  # first: how many rows precede it
        self.opened_us = self.closed_us = opened_us
        self.phase = OPEN
        self.position = 0  # the number of its record in the log; 0 if there is none
        self.pieces: list[Piece] = []
        self.stored: list[bytes | None] = []  # for workers: where each stored piece's rows are
        self.is_replayed = False  # an earlier engine logged it, and may have answered it
        self.limits: dict[str, int] | None = None  # those it was logged with, if they differ from today's
        self.bytes = 0  # size of all arguments that are not small
        self.has_ids = False  # whether any row has a request id: rows of a source batch have none
        self.ids: list[RequestIds] = []  # of the batches whose last row is here
        self.entries: list[Entry] = []
        self.keys: list[Key] = []
        self.args: list[Args] = []
        self.tids = range(0)
        self.results: list[Any] = []  # sealed; None where the row failed
        self.failures: dict[int, Failure] = {}
        self.decreed: dict[int, Failure] = {}  # rows that abort by decree, whatever their functions do
        self.responses: dict[Any, Any] = {}  # to external calls, as they were logged
        self.final_rows = 0  # how many leading rows are final, while the epoch is not

    def starts(self) -> list[int]:
        """The first row of each piece."""
        return [0, *accumulate(piece.size for piece in self.pieces)][:-1]

    def enter(self, phase: str) -> None:
        assert NEXT.get(self.phase) == phase, f"epoch {self.number} is {self.phase}, so it cannot become {phase}"
        self.phase = phase

    def __len__(self) -> int:
        return len(self.keys)


class Batch:
    """Admitted calls of one request, as columns; some may turn out to be repeats. Rows refused at admission are not
    in the columns, but their places and reasons are kept for the answers."""

    __slots__ = (
        "after",
        "args",
        "closed",
        "entries",
        "given_ids",
        "ids",
        "is_own",
        "keys",
        "position",
        "refused",
        "sizes",
        "source",
        "stored",
    )

    def __init__(
        self,
        ids: RequestIds,
        entries: list[Entry],
        keys: list[Key],
        args: list[Args],
        refused: dict[int, Failure] | None = None,
        source: tuple[str, int] | None = None,
        sizes: list[int] | None = None,
        is_own: bool = False,
    ) -> None:
        self.position = 0  # of a source batch: the number of its record in the log
        self.closed: Any = None  # of one whose rows are already durable: where they are,
        self.stored: bytes | None = None  # the same for readers,
        self.after = -1  # and the last one that ran, by the store: the engine may have forgotten
        self.is_own = is_own
        self.sizes = sizes  # bytes of each row's arguments, if any need counting
        self.entries, self.keys, self.args = entries, keys, args
        self.refused = refused or {}
        self.given_ids = self.ids = ids  # given: of all rows; ids: of rows not refused
        if self.refused:
            count = len(keys) + len(self.refused)
            self.ids = [id_of(ids, at) for at in range(count) if at not in self.refused]
        self.source = source  # (query id, batch id): taken once as a whole, so row ids are not kept

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, at: int) -> Batch:
        ids = [id_of(self.ids, at)]
        sizes = None if self.sizes is None else self.sizes[at : at + 1]
        return Batch(ids, self.entries[at : at + 1], self.keys[at : at + 1], self.args[at : at + 1], sizes=sizes)


def piece_of(batch: Batch, start: int, stop: int) -> Piece:
    """These rows of a source batch. Their ids are for the replies; the log has them in the batch's record."""
    ids = batch.ids if isinstance(batch.ids, str) else batch.ids[start:stop]
    return Piece(ids, start, stop - start, batch.position)
