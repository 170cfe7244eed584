"""The chain: which segments make up the log, and how their records are read, for writers and readers alike.

Two rules. The newest segment (highest term, then highest number) decides: each segment names its predecessor and how
many bytes of it count, and segments that are not on this path do not count. And nothing is reported as broken before
it was read a second time. Nothing is written here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from headrace.durability.log.frames import (
    HEAD_BYTES,
    HEADER_BYTES,
    MAGIC,
    MARK,
    NUMBER_MAX,
    RECORD,
    BadFrame,
    LogFrame,
    NewerFormat,
    SegmentHeader,
    SegmentRef,
    decode_frame,
    decode_header,
    length_at,
    parse_name,
    seed_of,
)
from headrace.durability.store import Store
from headrace.errors import LogBroken, ObjectMissing, StoreError, WrongStore

CHUNK_BYTES = 4 << 20


class LogRecord(NamedTuple):
    """One record of the log: its number, the term of the coordinator that wrote it, and its data."""

    number: int
    term: int
    data: bytes


class BrokenAt(LogBroken):
    """`LogBroken` with the location for programs: the file, the byte in it, and the first lost record."""

    def __init__(self, store: Store, file: str, offset: int, number: int, why: str) -> None:
        super().__init__(
            f"{store.url}/{file} is broken at byte {offset}: {why}, in record {number}, which was durable. Restore the "
            f"file from a backup; or run `headrace log repair`, which cuts the log before record {number} and keeps "
            "the rest under broken/"
        )
        self.file, self.offset, self.number, self.why = file, offset, number, why


class ReadPosition(NamedTuple):
    """A reader's position: at this byte, before the record of this number; the previous record had this term."""

    offset: int
    number: int
    term: int


class RecordPosition(NamedTuple):
    """Where a record is, for readers that start there and not at the beginning of its segment."""

    number: int
    segment: str
    offset: int


class SegmentChain(NamedTuple):
    """The segments of a log, oldest first, and other segments in its folder."""

    refs: list[SegmentRef]
    torn: list[SegmentRef]  # begun and empty: ignored
    orphans: list[SegmentRef]  # of writers that lost a race, or left over from a retirement
    kept: int  # records from this number on must be there; older ones are retired

    @property
    def term(self) -> int:
        """The highest term of all these segments."""
        return max((ref.term for ref in (*self.refs, *self.torn, *self.orphans)), default=0)


def refs_in(store: Store, folder: str) -> list[SegmentRef]:
    """All segments in the folder, whether they count or not, in the order of their terms."""
    return _list_segments(store, folder)[0]


def _list_segments(store: Store, folder: str) -> tuple[list[SegmentRef], list[int]]:
    """The segments in the folder, and the numbers in the marks of what is retired."""
    refs, retired = [], []
    for name in store.list(f"{folder}/"):
        ref = parse_name(name.removeprefix(f"{folder}/"))
        if ref is not None:
            refs.append(ref)
        elif name.startswith(f"{folder}/retired/") and (number := name.rpartition("/")[2]).isdecimal():
            retired.append(int(number))
    return sorted(refs), retired


def retired_mark(folder: str, below: int) -> str:
    """The object that says that records below this number may be gone. The highest one counts, whoever wrote it."""
    return f"{folder}/retired/{below:016d}"


def find_chain(store: Store, folder: str, broken: list[BrokenAt] | None = None) -> SegmentChain:
    """Follows the log back from its newest segment. Reads the names, and one header per term.

    If a list `broken` is given, unreadable headers are added to it, and their predecessors are guessed.
    """
    refs, marks = _list_segments(store, folder)
    kept = max(marks, default=0)
    torn: list[SegmentRef] = []
    while refs and LogSegment(store, folder, refs[-1], is_lenient=broken is not None).is_torn:
        torn.append(refs.pop())
    chain: list[SegmentRef] = []
    orphans: list[SegmentRef] = []
    index = len(refs) - 1  # of the newest segment that counts and is not in the chain yet
    while index >= 0:
        low = index
        while low > 0 and refs[low - 1].term == refs[index].term and refs[low].first > kept <= refs[low - 1].first:
            low -= 1
        chain[:0] = refs[low : index + 1]
        before = low - 1
        # What comes before a retired record is retired: a crash undid its deletion, or a zombie wrote it. A segment
        # that begins below `kept` counts only if the next one names it: the one between them may be retired.
        index = -1 if refs[low].first <= kept else _previous(store, folder, refs, low, broken)
        orphans[:0] = refs[index + 1 : before + 1]
    return SegmentChain(chain, torn, orphans, kept)


def _previous(store: Store, folder: str, refs: list[SegmentRef], low: int, broken: list[BrokenAt] | None) -> int:
    """The index of the predecessor of segment `low`; -1 if it is not there."""
    index = low - 1
    try:
        name = LogSegment(store, folder, refs[low]).header.previous
    except BrokenAt as error:
        if broken is None:
            raise
        broken.append(error)
        while index >= 0 and refs[index].first > refs[low].first:
            index -= 1
        return index
    while index >= 0 and refs[index].name != name:
        index -= 1
    return index


class LogSegment:
    """Reads one segment: its header, and its frames in order, with a few megabytes in memory at a time."""

    def __init__(
        self, store: Store, folder: str, ref: SegmentRef, ahead: int = HEADER_BYTES + 1, is_lenient: bool = False
    ) -> None:
        """Reads `ahead` bytes with the header. `ObjectMissing`; `BrokenAt` if the header is broken, unless lenient."""
        self.ref = ref
        self.file = f"{folder}/{ref.name}"
        self._store = store
        self._seed = seed_of(ref.name)
        self._buffer = b""
        self._base = 0
        self.is_torn = False  # it was never finished: a broken header, and nothing after it
        self._error = BrokenAt(store, self.file, 0, ref.first, "its header is unreadable")
        self._header = self._read_header(ahead)
        if self._header is None and not self.is_torn and not is_lenient:
            raise self._error

    @property
    def has_header(self) -> bool:
        return self._header is not None

    @property
    def header(self) -> SegmentHeader:
        if self._header is None:
            raise self._error
        return self._header

    def frames(self, limit: int | None = None, cursor: ReadPosition | None = None) -> Iterator[LogFrame]:
        """All frames after the header, or from `cursor` on, up to byte `limit`; `BadFrame` at the first invalid one."""
        offset, number, term = cursor or ReadPosition(HEADER_BYTES, self.ref.first, 0)
        while offset != limit:
            frame = self._frame_twice(offset)
            if frame is None:
                if limit is None:
                    return
                raise BadFrame(offset, f"the file ends here, but had {limit} bytes")
            if limit is not None and frame.end > limit:
                raise BadFrame(
                    offset, f"a frame reaches beyond byte {limit}, where the log continued in another segment"
                )
            if frame.kind == RECORD:
                if frame.number != number or not term <= frame.term <= self.ref.term:
                    raise BadFrame(offset, f"record {frame.number} of term {frame.term} is out of place")
                number, term = number + 1, frame.term
            elif frame.kind != MARK:
                raise BadFrame(offset, f"a frame of kind {frame.kind} is out of place")
            yield frame
            offset = frame.end

    def read(self, limit: int | None, needed: int = 1, cursor: ReadPosition | None = None) -> Iterator[LogFrame]:
        """The frames that count: up to byte `limit`, or (None: the newest segment) up to a tail torn in a crash; all of
        them, or from `cursor` on.

        `BrokenAt` if what is broken was durable; but lost records below number `needed` are skipped.
        """
        is_newest = limit is None
        if limit is None and self.ref.is_whole:
            limit = self.header.sealed
        cursor = cursor or ReadPosition(HEADER_BYTES, self.ref.first, 0)
        suspect = -1
        while True:
            try:
                for frame in self.frames(limit, cursor):
                    cursor = ReadPosition(frame.end, cursor.number + (frame.kind == RECORD), frame.term)
                    yield frame
                return
            except BadFrame as bad:
                if is_newest and not self.was_durable(cursor):
                    return
                # Read again now that we know it was durable: a reader may have seen half a frame, and later the next.
                if suspect != cursor.offset:
                    suspect, self._buffer = cursor.offset, b""
                    continue
                after = self._after_damage(cursor, limit, is_newest)
                if after is None or after.number > needed:
                    raise BrokenAt(self._store, self.file, cursor.offset, cursor.number, bad.why) from None
                cursor = after

    def _after_damage(self, cursor: ReadPosition, limit: int | None, is_newest: bool) -> ReadPosition | None:
        """Where the log continues after a broken frame: only if all that is lost in between was durable."""
        synced = 0
        found: ReadPosition | None = None
        for frame in self.valid_after(cursor.offset):
            if limit is not None and frame.end > limit:
                break
            number = frame.number + (frame.kind == MARK)
            if found is None and frame.kind in (RECORD, MARK) and number >= cursor.number:
                found = ReadPosition(frame.offset, number, 0)
            synced = max(synced, frame.synced)
        if found is None or (is_newest and found.offset >= self.header.sealed and synced < found.number - 1):
            return None
        return found

    def was_durable(self, cursor: ReadPosition) -> bool:
        """Whether a later frame or the header proves that what should be at this position was durable once."""
        return cursor.offset < self.header.sealed or any(
            frame.synced >= cursor.number for frame in self.valid_after(cursor.offset)
        )

    def size(self) -> int:
        """The size of the file in bytes, found by reading it."""
        at = 0
        while part := len(self._store.get_part(self.file, at, CHUNK_BYTES)):
            at += part
        return at

    def valid_after(self, offset: int) -> Iterator[LogFrame]:
        """The valid frames after a broken one, wherever they begin."""
        at = offset + 1
        while True:
            self._fill(at, CHUNK_BYTES)
            found = self._buffer.find(MAGIC, at - self._base)
            if found < 0:
                end = self._base + len(self._buffer)
                if end - at < CHUNK_BYTES:
                    return
                at = end - len(MAGIC) + 1
                continue
            at = self._base + found
            try:
                frame = self._frame(at)
            except BadFrame:
                at += 1
                continue
            if frame is None:
                return
            yield frame
            at = frame.end

    def _read_header(self, ahead: int) -> SegmentHeader | None:
        why = ""
        for _ in range(2):
            self._buffer = raw = self._store.get_part(self.file, 0, ahead)
            try:
                header = decode_header(self.ref.name, raw)
            except NewerFormat as newer:
                raise self._too_new(newer, 0) from None
            except BadFrame as bad:
                why = f"its header is unreadable ({bad.why})"
                continue
            if (header.first, header.term) == (self.ref.first, self.ref.term):
                return header
            why = "it has the header of another segment"
        self.is_torn = len(raw) <= HEADER_BYTES
        self._error = BrokenAt(self._store, self.file, 0, self.ref.first, why)
        return None

    def _frame_twice(self, offset: int) -> LogFrame | None:
        try:
            return self._frame(offset)
        except BadFrame:
            self._buffer = b""
            return self._frame(offset)

    def _frame(self, offset: int) -> LogFrame | None:
        """The frame at this byte, or None if the file ends here."""
        self._fill(offset, HEAD_BYTES)
        start = offset - self._base
        if start >= len(self._buffer):
            return None
        size = HEAD_BYTES + length_at(self._buffer[start : start + HEAD_BYTES], offset)
        self._fill(offset, size)
        start = offset - self._base
        try:
            return decode_frame(self._seed, offset, memoryview(self._buffer)[start : start + size])
        except NewerFormat as newer:
            raise self._too_new(newer, offset) from None

    def _too_new(self, newer: NewerFormat, offset: int) -> WrongStore:
        return WrongStore(
            f"{self._store.url}/{self.file} has {newer} at byte {offset}, which this version of Headrace cannot read:"
            " use a newer one"
        )

    def _fill(self, offset: int, size: int) -> None:
        """Makes the buffer hold these bytes, as far as the file has them."""
        if not (self._base <= offset and offset + size <= self._base + len(self._buffer)):
            self._buffer = self._store.get_part(self.file, offset, max(size, CHUNK_BYTES))
            self._base = offset


def read_chain(
    store: Store,
    folder: str,
    chain: SegmentChain,
    first: int,
    last: int | None = None,
    record_position: RecordPosition | None = None,
) -> Iterator[LogRecord]:
    """The records from number `first` on, up to the end or to `last`. Streamed: one chunk of a segment at a time.
    `record_position` is where `first` was seen: if it still is in that segment, what comes before is not read."""
    check_first(store, folder, chain, first)
    refs = chain.refs[max(bisect_right(chain.refs, first, key=lambda ref: ref.first) - 1, 0) :]
    cursor: ReadPosition | None = None
    if (
        record_position is not None
        and refs
        and (record_position.segment, record_position.number) == (refs[0].name, first)
    ):
        cursor = ReadPosition(record_position.offset, first, 0)
    ahead = CHUNK_BYTES if cursor is None else HEADER_BYTES + 1
    segments = (LogSegment(store, folder, ref, CHUNK_BYTES if at else ahead) for at, ref in enumerate(refs))
    segment = next(segments, None)
    reached = 0
    while segment is not None:
        following = next(segments, None)
        header = following.header if following is not None else None
        if header is not None and header.previous != segment.ref.name:
            raise BrokenAt(store, f"{folder}/{header.previous}", 0, segment.ref.first, "the file is missing")
        reached = segment.ref.first - 1 if cursor is None else first - 1
        for frame in segment.read(header.previous_bytes if header is not None else None, first, cursor):
            reached = frame.number
            if last is not None and reached > last:
                return
            if frame.kind == RECORD and reached >= first:
                yield LogRecord(reached, frame.term, frame.data)
        if header is not None and reached < header.previous_last and header.previous_last >= first:
            raise BrokenAt(store, segment.file, header.previous_bytes, reached + 1, "records are missing")
        segment, cursor = following, None
    if reached + 1 < first:
        raise ends_early(store, folder, reached, first)


def check_first(store: Store, folder: str, chain: SegmentChain, first: int) -> None:
    """Raises an error if the record is no longer kept."""
    begin = chain.refs[0].first if chain.refs else 1
    if first >= begin:
        return
    if first >= chain.kept and (missing := LogSegment(store, folder, chain.refs[0]).header.previous):
        raise LogBroken(
            f"{store.url}/{folder}/{missing} is missing, so record {first} cannot be read. Restore the file from a "
            f"backup, or start from a snapshot at or after record {begin}"
        )
    raise StoreError(
        f"record {first} is not in {store.url}/{folder} any more, which starts with record {begin} (older ones were "
        "deleted): start from a snapshot that reaches that far, or restore older segments from a backup"
    )


def ends_early(store: Store, folder: str, last: int, first: int) -> LogBroken:
    return LogBroken(
        f"{store.url}/{folder} ends with record {last}, but record {first} is expected, so {first - 1} must have "
        "existed: restore the log's files from a backup; or run `headrace log repair`, which continues after the "
        "newest snapshot"
    )


def read_log(
    store: Store, name: str = "log", first: int | None = 1, record_position: RecordPosition | None = None
) -> Iterator[LogRecord]:
    """Reads the log without a take-over, also while it is written: the last records may not be acknowledged yet.

    `first=None` begins with the oldest kept record. Nothing is written and no writer is fenced.
    `record_position` is where `first` was seen (see tail.py).
    """
    for attempt in (1, 2, 3):
        chain = find_chain_with_retry(store, name)
        if first is None:
            first = chain.refs[0].first if chain.refs else 1
        try:
            for record in read_chain(store, name, chain, first, record_position=record_position):
                first = record.number + 1
                yield record
            return
        except ObjectMissing:  # retired while we read: the chain has changed
            if attempt == 3:
                raise


def find_chain_with_retry(store: Store, folder: str) -> SegmentChain:
    """`find_chain`, repeated if segments are retired meanwhile."""
    for _ in range(3):
        try:
            return find_chain(store, folder)
        except ObjectMissing:
            continue
    return find_chain(store, folder)


def bounds(store: Store, name: str = "log") -> tuple[int, int]:
    """The numbers of the first kept record and of the last one. (1, 0) if there are none."""
    chain = find_chain_with_retry(store, name)
    if not chain.refs:
        return 1, 0
    last = chain.refs[-1].first - 1
    for frame in LogSegment(store, name, chain.refs[-1], CHUNK_BYTES).read(None, NUMBER_MAX):
        last = frame.number
    return chain.refs[0].first, last
