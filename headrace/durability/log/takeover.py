"""The steps of a take-over: announce a term, find the end of the log, begin a new segment. Repairs use them too.

Two rules. A term is announced by creating its marker, which only one process can do; markers are consecutive and never
deleted, so one lookup tells whether there is a later term. And what is found after the last proof of durability is
written again: it may be in a cache only, and a sync of what others wrote can succeed although their own sync failed.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.durability.log.frames import (
    HEADER_BYTES,
    MARK,
    NUMBER_MAX,
    RECORD,
    TERM_MAX,
    LogFrame,
    SegmentHeader,
    SegmentRef,
    encode_frame,
    encode_header,
    seed_of,
    segment_ref,
)
from headrace.durability.log.segments import CHUNK_BYTES, LogSegment, SegmentChain, ends_early, refs_in
from headrace.durability.store import Store
from headrace.errors import Fenced, StoreError

TAKEOVER_TRIES = 100


class LogEnd(NamedTuple):
    """Where a log ends, as its next writer found it."""

    ref: SegmentRef | None  # None: there is no segment
    end: int  # how many of its bytes are proven durable
    last: int  # the last record in them
    loose: list[LogFrame]  # records after that: valid, but perhaps only in a cache


def term_marker(name: str, term: int) -> str:
    """The object that announces a term. Markers are consecutive and never deleted, so one lookup is enough."""
    return f"{name}/terms/{term:08d}"


def highest_term(store: Store, name: str = "log") -> int:
    """The highest term that was ever announced; 0 if there is none."""
    found = (text.rpartition("/")[2] for text in store.list(f"{name}/terms/"))
    return max((int(text) for text in found if text.isdecimal()), default=0)


def announce(store: Store, name: str, owner: str) -> int:
    for _ in range(TAKEOVER_TRIES):
        # Segments count too: if the markers were deleted by hand, an old term must not be used again.
        term = max(highest_term(store, name), *(ref.term for ref in refs_in(store, name)), 0) + 1
        if term > TERM_MAX:
            raise StoreError(
                f"{store.url}/{name} has used up all {TERM_MAX} terms: start from a snapshot in a new store"
            )
        if store.create(term_marker(name, term), f"term {term} {owner}".strip().encode() + b"\n"):
            return term
    raise StoreError(
        f"{store.url}/{name}: other processes took over {TAKEOVER_TRIES} times in the meantime. Find out what keeps "
        "starting them"
    )


def find_end(store: Store, folder: str, chain: SegmentChain) -> LogEnd:
    """Finds the end of the log. What no later frame proves durable is `loose`, and the new writer writes it again.

    Durable records that can no longer be read do not matter here: they keep their numbers, and reading them fails.
    """
    end = _find_end(store, folder, chain)
    last = end.last + len(end.loose)
    if last + 1 < chain.kept:  # what was retired was durable: the log was longer once
        raise ends_early(store, folder, last, chain.kept)
    return end


def _find_end(store: Store, folder: str, chain: SegmentChain) -> LogEnd:
    if not chain.refs:
        return LogEnd(None, 0, 0, [])
    ref = chain.refs[-1]
    segment = LogSegment(store, folder, ref, CHUNK_BYTES)
    end, last = HEADER_BYTES, ref.first - 1
    loose: list[LogFrame] = []
    for frame in segment.read(None, NUMBER_MAX):
        if frame.kind == RECORD:
            loose.append(frame)
        proven = frame.number if frame.end <= segment.header.sealed else frame.synced
        if proven > last or frame.kind == MARK:
            loose = [each for each in loose if each.number > proven]
            end, last = loose[0].offset if loose else frame.end, proven
    return LogEnd(ref, end, last, loose)


def begin_segment(store: Store, folder: str, term: int, end: LogEnd, is_whole: bool = False) -> tuple[SegmentRef, int]:
    """Creates a segment that names its predecessor and holds the loose records. Returns it and its size in bytes."""
    first = end.last + 1
    ref = segment_ref(first, term, is_whole)
    seed = seed_of(ref.name)
    frames, size = [], HEADER_BYTES
    for frame in end.loose:
        frames.append(encode_frame(seed, size, RECORD, frame.number, frame.term, end.last, frame.data))
        size += len(frames[-1])
    header = SegmentHeader(first, term, size, end.ref.name if end.ref else "", end.end, end.last)
    data = b"".join((encode_header(seed, header), *frames))
    if not store.create(f"{folder}/{ref.name}", data) and not _is_ours(store, f"{folder}/{ref.name}", data):
        raise Fenced(f"{store.url}/{folder}/{ref.name} already exists: another process has term {term}")
    return ref, size


def _is_ours(store: Store, file: str, data: bytes) -> bool:
    """A create that was retried because its answer was lost finds its own object: no other writer has our term."""
    return any(store.get(file) == data for _ in range(2))
