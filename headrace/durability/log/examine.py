"""Examines a log and repairs it, for operators, after a disk has lost or damaged data.

Two rules. `examine` changes nothing and does not stop at an error: it reports everything it finds. And `repair` throws
nothing away: it takes over, as any writer does, rebuilds lost headers, and begins a segment that continues after the
last valid record; all that it replaces or cuts away is kept under `broken/`, to be looked at later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from headrace.durability.log.frames import (
    HEADER_BYTES,
    RECORD,
    BadFrame,
    LogFrame,
    SegmentHeader,
    SegmentRef,
    encode_header,
    seed_of,
)
from headrace.durability.log.segments import (
    CHUNK_BYTES,
    LogSegment,
    ReadPosition,
    SegmentChain,
    find_chain,
    retired_mark,
)
from headrace.durability.log.takeover import LogEnd, announce, begin_segment, term_marker
from headrace.durability.store import Store
from headrace.errors import Fenced, ObjectMissing


class LostRecords(NamedTuple):
    """A location where durable data cannot be read: the records that are lost there, and why."""

    file: str
    offset: int
    number: int
    last: int | None  # None: nothing valid comes after it
    why: str

    def concerns(self, first: int) -> bool:
        """Whether it affects a reader that starts at this record."""
        return self.last is None or self.last >= first


class Ignored(NamedTuple):
    """Bytes of a segment that do not count: they were never acknowledged, so nothing is lost."""

    file: str
    offset: int
    bytes: int
    why: str


class ExaminedSegment(NamedTuple):
    """The part of a segment that counts."""

    file: str
    term: int
    first: int
    last: int  # first - 1 if it has no record
    records: int
    bytes: int
    is_sound: bool


@dataclass
class ExamineReport:
    """What `examine` found, and what `repair` did."""

    url: str
    name: str
    segments: list[ExaminedSegment] = field(default_factory=list)  # of the chain, oldest first
    broken: list[LostRecords] = field(default_factory=list)  # in the order of the records
    ignored: list[Ignored] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)  # segments that do not count at all
    lost: tuple[int, int] | None = None  # set by `repair`: the first and the last record that were cut away
    saved: list[str] = field(default_factory=list)  # set by `repair`: where they are now

    @property
    def is_sound(self) -> bool:
        return not self.broken

    @property
    def first(self) -> int:
        return self.segments[0].first if self.segments else 1

    @property
    def last(self) -> int:
        return max((part.last for part in self.segments), default=0)

    @property
    def records(self) -> int:
        return sum(part.records for part in self.segments)

    @property
    def terms(self) -> list[int]:
        return sorted({part.term for part in self.segments})

    def lines(self) -> list[str]:
        """The report as text."""
        text = [
            f"{self.url}/{self.name}: {self.records} records, {self.first} to {self.last},"
            f" in {len(self.segments)} segments of {len(self.terms)} terms"
        ]
        text += [f"broken: {each.file} at byte {each.offset}, record {each.number}: {each.why}" for each in self.broken]
        text += [
            f"ignored: {each.bytes} bytes of {each.file} from byte {each.offset} on: {each.why}"
            for each in self.ignored
        ]
        text += [f"ignored: {file}: it is not part of the log" for file in self.orphans]
        if self.lost is not None:
            text.append(f"cut off: records {self.lost[0]} to {self.lost[1]}")
        text += [f"kept: {file}" for file in self.saved]
        if self.broken and self.lost is None:
            text.append(f"run `headrace log repair` to cut the log before record {self.broken[0].number}")
        return text


def examine(store: Store, name: str = "log") -> ExamineReport:
    """Reads the whole log and reports all that is wrong with it. Changes nothing; works also while it is written."""
    return _examine(store, name)[0]


def repair(store: Store, name: str = "log", first: int = 1, fence: str = "log", owner: str = "") -> ExamineReport:
    """Cuts a broken log before its first unreadable record; what is cut away is kept under `broken/`.

    Records below `first` are ignored: with a snapshot only what comes after it is needed, and a log that does not even
    reach that far continues at `first`. A log that is sound from there on is left alone. `fence` is the log whose
    terms count, as in `Log.take_over`.
    """
    report, _ = _examine(store, name)
    if not _problems(report, first):
        return report
    term = announce(store, fence, owner)  # from here on its writer is fenced
    saved = _repair_headers(store, name, term)
    report, chain = _examine(store, name)
    first = max(first, chain.kept)
    numbers = [each.number for each in _problems(report, first)]
    if numbers:
        before = max(min(numbers), first)
        end = _end_before(store, name, chain, before) if min(numbers) >= first else LogEnd(None, 0, first - 1, [])
        saved += _cut(store, name, chain, end, term, fence)
        if min(numbers) >= first or report.last >= first:
            report.lost = before, max(before, report.last)
    report.saved = saved
    return report


def cut(store: Store, name: str, before: int, fence: str = "log", owner: str = "") -> ExamineReport:
    """Cuts a sound log before a record, as `repair` does; what is cut away is kept under `broken/`."""
    term = announce(store, fence, owner)
    report, chain = _examine(store, name)
    if before <= report.last:
        report.saved = _cut(store, name, chain, _end_before(store, name, chain, before), term, fence)
        report.lost = before, report.last
    return report


def _problems(report: ExamineReport, first: int) -> list[LostRecords]:
    """The losses that affect a reader that starts at this record."""
    if report.last + 1 < first:
        report.broken.append(LostRecords(report.name, 0, report.last + 1, None, "the log ends before it"))
    return [each for each in report.broken if each.concerns(first)]


# --- examining --------------------------------------------------------------------------------------------------------


def _examine(store: Store, name: str) -> tuple[ExamineReport, SegmentChain]:
    chain = find_chain(store, name, [])
    report = ExamineReport(store.url, name)
    report.orphans = [f"{name}/{ref.name}" for ref in (*chain.orphans, *chain.torn)]
    if chain.refs and chain.refs[0].first > max(chain.kept, 1):
        header = _header_of(store, name, chain.refs[0])
        if header is None or header.previous:
            file = f"{name}/{header.previous}" if header else name
            report.broken.append(
                LostRecords(file, 0, max(chain.kept, 1), chain.refs[0].first - 1, "the file is missing")
            )
    for ref, following in zip_longest(chain.refs, chain.refs[1:]):
        try:
            _examine_segment(store, name, ref, following, report)
        except ObjectMissing:
            continue  # retired just now
    if report.last + 1 < chain.kept:
        report.broken.append(LostRecords(name, 0, report.last + 1, None, "the log ends before it"))
    report.broken.sort(key=lambda each: each.number)
    return report, chain


def _examine_segment(
    store: Store, name: str, ref: SegmentRef, following: SegmentRef | None, report: ExamineReport
) -> None:
    segment = LogSegment(store, name, ref, CHUNK_BYTES, is_lenient=True)
    problems: list[LostRecords] = []
    if not segment.has_header:
        problems.append(LostRecords(segment.file, 0, ref.first, None, "its header is unreadable"))
    limit = _limit_of(store, name, segment, following)
    records, reached, end = 0, ref.first - 1, HEADER_BYTES
    for frame in _sound_frames(segment, limit, following, problems, report.ignored):
        end = frame.end
        if frame.kind == RECORD:
            records, reached = records + 1, frame.number
    if following is not None and not problems:
        after = _header_of(store, name, following)
        file = after.previous if after else ref.name
        if file != ref.name or reached + 1 < following.first:
            problems.append(LostRecords(f"{name}/{file}", 0, reached + 1, following.first - 1, "records are missing"))
    if limit is not None and (more := segment.size() - limit) > 0:
        report.ignored.append(Ignored(segment.file, limit, more, "written after the log continued in another segment"))
    report.segments.append(ExaminedSegment(segment.file, ref.term, ref.first, reached, records, end, not problems))
    report.broken += problems


def _limit_of(store: Store, name: str, segment: LogSegment, following: SegmentRef | None) -> int | None:
    """How many bytes of the segment count; None if that is not known."""
    if following is not None:
        after = _header_of(store, name, following)
        if after is not None and after.previous == segment.ref.name:
            return after.previous_bytes
    return segment.header.sealed if segment.ref.is_whole and segment.has_header else None


def _header_of(store: Store, name: str, ref: SegmentRef) -> SegmentHeader | None:
    segment = LogSegment(store, name, ref, is_lenient=True)
    return segment.header if segment.has_header else None


def _sound_frames(
    segment: LogSegment,
    limit: int | None,
    following: SegmentRef | None,
    problems: list[LostRecords],
    ignored: list[Ignored],
) -> Iterator[LogFrame]:
    """All frames that can be read, also those after broken ones."""
    cursor = ReadPosition(HEADER_BYTES, segment.ref.first, 0)
    until = None if following is None else following.first - 1
    while True:
        try:
            for frame in segment.frames(limit, cursor):
                if until is not None and frame.kind == RECORD and frame.number > until:
                    return  # the next header is broken, so the limit is unknown; but its name says where it begins
                cursor = ReadPosition(frame.end, cursor.number + (frame.kind == RECORD), frame.term)
                yield frame
            return
        except BadFrame as bad:
            if until is not None and cursor.number > until and limit is None:
                return
            if following is None and segment.has_header and not segment.was_durable(cursor):
                more = segment.size() - cursor.offset
                ignored.append(Ignored(segment.file, cursor.offset, more, f"a torn tail ({bad.why})"))
                return
            sound = (frame for frame in segment.valid_after(cursor.offset) if limit is None or frame.end <= limit)
            found = next((frame for frame in sound if frame.kind == RECORD and frame.number >= cursor.number), None)
            last = until if found is None else found.number - 1
            problems.append(LostRecords(segment.file, cursor.offset, cursor.number, last, bad.why))
            if found is None:
                return
            cursor = ReadPosition(found.offset, found.number, found.term)


# --- repairing --------------------------------------------------------------------------------------------------------


def _repair_headers(store: Store, name: str, term: int) -> list[str]:
    """Rebuilds unreadable headers from the name and the predecessor. Returns where the old files are kept."""
    saved = []
    chain = find_chain(store, name, [])
    for index, ref in enumerate(chain.refs):
        segment = LogSegment(store, name, ref, is_lenient=True)
        if segment.has_header:
            continue
        end = _end_before(store, name, chain._replace(refs=chain.refs[:index]), ref.first)
        data = store.get(segment.file)
        saved.append(f"broken/{term:08d}/{segment.file}")
        store.put(saved[-1], data)
        sealed = len(data) if ref.is_whole else HEADER_BYTES
        header = SegmentHeader(ref.first, ref.term, sealed, end.ref.name if end.ref else "", end.end, end.last)
        store.put(segment.file, encode_header(seed_of(ref.name), header) + data[HEADER_BYTES:])
    return saved


def _end_before(store: Store, name: str, chain: SegmentChain, number: int) -> LogEnd:
    """The log's end, if it ended just before this record."""
    index = bisect_right(chain.refs, number, key=lambda ref: ref.first) - 1
    if index < 0:
        return LogEnd(None, 0, number - 1, [])
    ref = chain.refs[index]
    end, last = HEADER_BYTES, ref.first - 1
    try:
        for frame in LogSegment(store, name, ref, CHUNK_BYTES, is_lenient=True).frames():
            if frame.kind == RECORD and frame.number < number:
                end, last = frame.end, frame.number
    except BadFrame:
        pass
    return LogEnd(ref, end, last, []) if last == number - 1 else LogEnd(None, 0, number - 1, [])


def _cut(store: Store, name: str, chain: SegmentChain, end: LogEnd, term: int, fence: str) -> list[str]:
    for mark in store.list(f"{name}/retired/"):
        if mark > retired_mark(name, end.last + 1):
            store.delete(mark)  # else what is written from here on would count as retired
    begin_segment(store, name, term, end)
    if store.exists(term_marker(fence, term + 1)):
        raise Fenced(
            f"{store.url}/{fence} was taken over during the repair, by term {term + 1}: stop that process, and repair "
            "again"
        )
    return _set_aside(store, name, chain, end, term)


def _set_aside(store: Store, name: str, chain: SegmentChain, end: LogEnd, term: int) -> list[str]:
    """Keeps what was cut away: moves segments that no longer count, and copies the rest of the last one that does."""
    saved = []
    position = chain.refs.index(end.ref) if end.ref else -1
    if end.ref and (rest := store.get(f"{name}/{end.ref.name}")[end.end :]):
        saved.append(f"broken/{term:08d}/{name}/{end.ref.name}.from-{end.end}")
        store.put(saved[-1], rest)
    for ref in chain.refs[position + 1 :]:
        saved.append(f"broken/{term:08d}/{name}/{ref.name}")
        store.put(saved[-1], store.get(f"{name}/{ref.name}"))
        store.delete(f"{name}/{ref.name}")
    return saved
