"""An epoch: a batch of transactions, in columns, from its first request to its replies.

Row i is one transaction; its TID is `tids[i]`. An epoch is OPEN while it takes rows, CLOSED once it has its TIDs and
its place in the log, FINAL once every row has its result or failure.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from headrace.core.origin import FromClient, FromEngine, FromSource, Origin
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
    position: int = 0  # of the log record with the rows, for a batch of a source
    is_own: bool = False  # not from outside: timers, schedules, sweeps

    def id_at(self, row: int) -> str:
        """The request id of one of its rows."""
        return f"{self.ids}/{self.start + row}" if isinstance(self.ids, str) else self.ids[row]


class Epoch:
    __slots__ = (
        "accepted",
        "args",
        "bytes",
        "carried",
        "closed_us",
        "decreed",
        "digest",
        "entries",
        "failures",
        "final_rows",
        "first",
        "has_ids",
        "ids",
        "is_inherited",
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
        self.carried: list[Any] = []  # of each piece: see `Batch.carried`
        self.is_replayed = False  # an earlier engine logged it, and may have answered it
        self.is_inherited = False  # so did an earlier version of the app
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
        self.accepted: dict[int, str] = {}  # rows whose logged reply stands, though a second run gave another one
        self.digest: bytes | None = None  # of what it wrote, if digests are taken
        self.final_rows = 0  # how many leading rows are final, while the epoch is not

    def has_calls(self) -> bool:
        """Whether any row came from outside."""
        return any(not piece.is_own for piece in self.pieces)

    def starts(self) -> list[int]:
        """The first row of each piece."""
        return [0, *accumulate(piece.size for piece in self.pieces)][:-1]

    def id_at(self, row: int) -> str:
        """The request id of a row."""
        for piece in self.pieces:
            if row < piece.size:
                return piece.id_at(row)
            row -= piece.size
        raise IndexError(row)

    def enter(self, phase: str) -> None:
        assert NEXT.get(self.phase) == phase, f"epoch {self.number} is {self.phase}, so it cannot become {phase}"
        self.phase = phase

    def __len__(self) -> int:
        return len(self.keys)


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Admitted calls of one origin, as columns; some may turn out to be repeats. Rows refused at admission are not
    in the columns, but their places and reasons are kept for the answers."""

    origin: Origin
    entries: list[Entry]
    keys: list[Key]
    args: list[Args]
    refused: dict[int, Failure] = {}
    sizes: list[int] | None = None  # bytes of each row's arguments, if any need counting
    ids: RequestIds = ""  # of rows not refused; they follow from the origin
    carried: Any = None  # what a source wants to find beside the reply to each row that is not refused, as a column

    def __post_init__(self) -> None:
        ids = self.origin.ids
        if self.refused:
            count = len(self.keys) + len(self.refused)
            ids = [id_of(ids, at) for at in range(count) if at not in self.refused]
        msgspec.structs.force_setattr(self, "ids", ids)

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, at: int) -> Batch:
        """One row of a client's batch, as a batch of its own."""
        origin = FromClient([id_of(self.ids, at)])
        sizes = None if self.sizes is None else self.sizes[at : at + 1]
        return Batch(origin, self.entries[at : at + 1], self.keys[at : at + 1], self.args[at : at + 1], sizes=sizes)

    def piece(self, start: int, stop: int, position: int = 0) -> Piece:
        """These rows, for an epoch. `position` is that of the record of a source's batch. The ids of its rows are for
        the replies; the log has them in that record."""
        ids = self.ids
        if isinstance(ids, str):
            return Piece(ids, start, stop - start, position)
        if isinstance(self.origin, FromSource):
            return Piece(ids[start:stop], start, stop - start, position)
        return Piece(ids[start:stop], 0, stop - start, 0, isinstance(self.origin, FromEngine))
