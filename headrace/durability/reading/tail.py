"""Follows the tail of a log: each look reads only what is new.

Rules:
1. A look follows the log's own chain: of a segment with a successor only the bytes that the successor names count, even
   if more were seen before.
2. The positions of the records that were seen are remembered until `forget`, so that a reader can start there. A
   position is a hint: it is checked when it is used.

Nothing is written and no writer is fenced.
"""

from __future__ import annotations

from bisect import bisect_left

from headrace.durability.log.frames import HEADER_BYTES, NUMBER_MAX, RECORD
from headrace.durability.log.segments import (
    LogSegment,
    ReadPosition,
    RecordPosition,
    SegmentChain,
    find_chain_with_retry,
)
from headrace.durability.store import Store
from headrace.errors import ObjectMissing

POSITIONS_MAX = 1_000_000  # how many are remembered at most


class Tail:
    """Follows one log, beginning with its newest segment."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self._segment: LogSegment | None = None
        self._cursor = ReadPosition(HEADER_BYTES, 1, 0)  # where the next look begins
        self._first = 1  # the number of the first record that is remembered
        self._positions: list[tuple[str, int]] = []  # of consecutive records: segment, offset
        self._bytes = [0]  # bytes seen before the first of them, and up to the end of each

    def look(self) -> tuple[int, int]:
        """The numbers of the first kept record and of the last one; (1, 0) if there are none. Same as `bounds`."""
        for attempt in (1, 2, 3):
            chain = find_chain_with_retry(self.store, self.folder)
            try:
                return self._look(chain)
            except ObjectMissing:  # retired while we read
                self._segment = None
                if attempt == 3:
                    raise
        raise AssertionError("not reached")

    def position_of(self, number: int) -> RecordPosition | None:
        """Where this record was seen."""
        at = number - self._first
        return RecordPosition(number, *self._positions[at]) if 0 <= at < len(self._positions) else None

    def cut(self, first: int, last: int, parts: int, bytes_min: int) -> list[tuple[int, int]]:
        """Splits these records into at most `parts` ranges: of about equal bytes, and at least `bytes_min` each, if
        their sizes are known; else of about equally many records."""
        at, end = first - self._first, last - self._first + 1
        if at < 0 or end > len(self._positions):
            count = last - first + 1
            edges = [first + count * part // parts for part in range(parts)]
        else:
            before, size = self._bytes[at], self._bytes[end] - self._bytes[at]
            parts = max(1, min(parts, size // bytes_min))
            edges = [
                self._first + bisect_left(self._bytes, before + size * part // parts, at, end) for part in range(parts)
            ]
        edges = sorted({first, *(edge for edge in edges if edge <= last)})
        return list(zip(edges, [*(edge - 1 for edge in edges[1:]), last], strict=True))

    def forget(self, below: int) -> None:
        """Forgets the positions of the records before this one."""
        count = min(below - self._first, len(self._positions))
        if count > 0:
            del self._positions[:count]
            del self._bytes[:count]
            self._first += count

    # --- inside ---

    def _look(self, chain: SegmentChain) -> tuple[int, int]:
        if not chain.refs:
            return 1, 0
        names = [ref.name for ref in chain.refs]
        if self._segment is None or self._segment.ref.name not in names:  # the first look, or the segment is gone
            self._segment = self._begin(LogSegment(self.store, self.folder, chain.refs[-1]))
            self._remember_from(self._cursor.number)
        for ref in chain.refs[names.index(self._segment.ref.name) + 1 :]:
            if self._segment.ref.is_whole and ref is not chain.refs[-1]:
                continue  # it does not grow: its successor's name says where it ends
            following = LogSegment(self.store, self.folder, ref)
            if self._cursor.offset < following.header.previous_bytes and not self._segment.ref.is_whole:
                self._follow(self._segment, following.header.previous_bytes)
            self._segment = self._begin(following)
        self._follow(self._segment, None)
        return chain.refs[0].first, self._cursor.number - 1

    def _begin(self, segment: LogSegment) -> LogSegment:
        """Continues with this segment. For records that were seen before, the copy in this segment counts."""
        self._cursor = ReadPosition(HEADER_BYTES, segment.ref.first, 0)
        kept = max(segment.ref.first - self._first, 0)
        del self._positions[kept:]
        del self._bytes[kept + 1 :]
        return segment

    def _follow(self, segment: LogSegment, limit: int | None) -> None:
        """Broken frames are skipped: a reader of those records gets the error."""
        for frame in segment.read(limit, NUMBER_MAX, self._cursor):
            if frame.kind == RECORD:
                if frame.number != self._first + len(self._positions) or len(self._positions) >= POSITIONS_MAX:
                    self._remember_from(frame.number)
                self._positions.append((segment.ref.name, frame.offset))
                self._bytes.append(self._bytes[-1] + frame.end - frame.offset)
            self._cursor = ReadPosition(frame.end, frame.number + 1, frame.term)

    def _remember_from(self, number: int) -> None:
        self._positions, self._bytes, self._first = [], [0], number
