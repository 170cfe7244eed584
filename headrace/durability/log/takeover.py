"""The steps of a take-over: announce a term, find the log's end, begin a segment of one's own. Repairs take them, too.

Two rules. A term announces itself by creating its marker, which only one can; markers are consecutive and never
deleted, so that one look tells whether there is a later one. And what is found behind the last proof of durability is
written again: it may lie in a cache only, and a sync of what others wrote can succeed although their own failed.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.durability.log.frames import (
    HEADER_BYTES,
    MARK,
    NUMBER_MAX,
    RECORD,
    TERM_MAX,
    Header,
    LogFrame,
    Ref,
    encode_frame,
    encode_header,
    name_of,
    seed_of,
)
from headrace.durability.log.segments import CHUNK_BYTES, LogSegment, SegmentChain, ends_early, refs_in
from headrace.durability.store import Store
from headrace.errors import Fenced, StoreError

TAKEOVER_TRIES = 100


class LogEnd(NamedTuple):
    """Where a log ends, as its next writer found it."""

    ref: Ref | None  # None: there is no segment
    end: int  # so many bytes of it are surely durable
    last: int  # the last record in them
    loose: list[LogFrame]  # records after that: sound, but perhaps only in a cache


def marker(name: str, term: int) -> str:
    """The object by which a term announces itself. Markers are consecutive and never deleted: so one look is enough."""
    return f"{name}/terms/{term:08d}"


def highest_term(store: Store, name: str = "log") -> int:
    """The highest term that was ever announced; 0 if none was."""
    found = (text.rpartition("/")[2] for text in store.list(f"{name}/terms/"))
    return max((int(text) for text in found if text.isdecimal()), default=0)


def announce(store: Store, name: str, owner: str) -> int:
    for _ in range(TAKEOVER_TRIES):
        # Segments, too: whoever removed the markers by hand must not make an old writer equal to a new one.
        term = max(highest_term(store, name), *(ref.term for ref in refs_in(store, name)), 0) + 1
        if term > TERM_MAX:
            raise StoreError(
                f"{store.url}/{name} has used up all {TERM_MAX} terms: start from a snapshot in a new store"
            )
        if store.create(marker(name, term), f"term {term} {owner}".strip().encode() + b"\n"):
            return term
    raise StoreError(
        f"{store.url}/{name}: other processes took over {TAKEOVER_TRIES} times in the meantime. Find out what keeps "
        "starting them"
    )


def find_end(store: Store, folder: str, chain: SegmentChain) -> LogEnd:
    """How far the log goes. What no later frame proves durable is `loose`, to be written again by who takes over.

    Durable records that cannot be read any more do not matter here: they keep their numbers; who reads them is told.
    """
    end = _find_end(store, folder, chain)
    last = end.last + len(end.loose)
    if last + 1 < chain.kept:  # what was retired was durable: so the log went further once
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


def begin_segment(store: Store, folder: str, term: int, end: LogEnd, is_whole: bool = False) -> tuple[Ref, int]:
    """A new segment that names its predecessor, with the loose records in it. Gives it and its size in bytes."""
    first = end.last + 1
    ref = name_of(first, term, is_whole)
    seed = seed_of(ref.name)
    frames, size = [], HEADER_BYTES
    for frame in end.loose:
        frames.append(encode_frame(seed, size, RECORD, frame.number, frame.term, end.last, frame.data))
        size += len(frames[-1])
    header = Header(first, term, size, end.ref.name if end.ref else "", end.end, end.last)
    data = b"".join((encode_header(seed, header), *frames))
    if not store.create(f"{folder}/{ref.name}", data) and not _is_ours(store, f"{folder}/{ref.name}", data):
        raise Fenced(f"{store.url}/{folder}/{ref.name} already exists: another coordinator has term {term}")
    return ref, size


def _is_ours(store: Store, file: str, data: bytes) -> bool:
    """A create that was sent again, as its answer was lost, finds its own object. Nobody else has our term."""
    return any(store.get(file) == data for _ in range(2))
