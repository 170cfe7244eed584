"""Frames: the format of records in a segment of the log, and how a broken frame is recognized.

A segment is a header frame, followed by the frames of its records. Two rules. A frame's checksum covers its segment's
name and its own offset, so that bytes of another file, or a record that contains a copy of a frame, never pass for a
frame. And every frame says how far the log was known to be durable when it was written (`synced`): this tells a tail
that was torn in a crash from a record that was acknowledged and is now unreadable.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

MAGIC = b"HRlg"
VERSION = 1
HEADER, RECORD, MARK = 1, 2, 3  # kinds; a mark is not a record: it only says how far the log is durable
RECORD_BYTES_MAX = 1 << 30
PIECE_BYTES, PIECES_BYTES_MAX = 5 << 10, 256 << 10  # checksums are computed in pieces, up to this size of the data
TERM_MAX = 99_999_999
NUMBER_MAX = 10**16 - 1

_HEAD = struct.Struct("<4sBBHIQIQ")  # magic, version, kind, unused, length, number, term, synced
_CRC = struct.Struct("<I")
_PLACE = struct.Struct("<Q")
_POINTER = struct.Struct("<QQQQ32s")  # first, sealed; the previous segment's bytes, last number, name
HEAD_BYTES = _HEAD.size + _CRC.size
HEADER_BYTES = HEAD_BYTES + _POINTER.size
_NAME = re.compile(r"(\d{16})-(\d{8})\.(seg|obj)")


class SegmentRef(NamedTuple):
    """A segment's name, parsed. Refs of one term sort in the order in which they were written."""

    term: int
    first: int
    is_whole: bool  # created in one piece (".obj"); else it grows (".seg")
    name: str


class SegmentHeader(NamedTuple):
    """Describes a segment and its predecessor."""

    first: int  # the number of its first record, also if it has none yet
    term: int
    sealed: int  # its size in bytes when it was created: they were durable then
    previous: str  # "" at the log's beginning
    previous_bytes: int  # how many bytes of the previous segment count
    previous_last: int


class LogFrame(NamedTuple):
    kind: int
    number: int
    term: int
    synced: int
    data: bytes
    offset: int
    end: int


class BadFrame(Exception):
    """There is no valid frame here. Internal: readers cut the log there or raise `LogBroken`."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"{why} at byte {offset}")
        self.offset, self.why = offset, why


class NewerFormat(Exception):
    """A valid frame in a format that this code does not know."""


def segment_ref(first: int, term: int, is_whole: bool) -> SegmentRef:
    return SegmentRef(term, first, is_whole, f"{first:016d}-{term:08d}.{'obj' if is_whole else 'seg'}")


def parse_name(name: str) -> SegmentRef | None:
    found = _NAME.fullmatch(name)
    return SegmentRef(int(found[2]), int(found[1]), found[3] == "obj", name) if found else None


def seed_of(name: str) -> int:
    """The start value of a segment's checksums."""
    return zlib.crc32(name.encode())


def _checksum(data: bytes, start: int) -> int:
    """Works in small pieces, as long as that is fast: for larger ones `zlib` releases the GIL, and with another busy
    thread it takes milliseconds to get it back."""
    if len(data) > PIECES_BYTES_MAX:
        return zlib.crc32(data, start)
    view = memoryview(data)
    for at in range(0, len(data), PIECE_BYTES):
        start = zlib.crc32(view[at : at + PIECE_BYTES], start)
    return start


def encode_frame(seed: int, offset: int, kind: int, number: int, term: int, synced: int, data: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, VERSION, kind, 0, len(data), number, term, synced)
    crc = _checksum(data, zlib.crc32(head, zlib.crc32(_PLACE.pack(offset), seed)))
    return b"".join((head, _CRC.pack(crc), data))


def length_at(head: bytes | memoryview, offset: int) -> int:
    """The length of the frame's data, from its head. `BadFrame` if this cannot be a frame's head."""
    if len(head) < HEAD_BYTES:
        raise BadFrame(offset, "a frame is cut short")
    if head[:4] != MAGIC:
        raise BadFrame(offset, "no frame starts here")
    length: int = _HEAD.unpack_from(head)[4]
    if length > RECORD_BYTES_MAX:
        raise BadFrame(offset, f"a frame cannot have {length} bytes")
    return length


def decode_frame(seed: int, offset: int, raw: bytes | memoryview) -> LogFrame:
    """The frame at the start of these bytes. `offset` is its position in the segment."""
    length = length_at(raw, offset)
    if len(raw) < HEAD_BYTES + length:
        raise BadFrame(offset, "a frame is cut short")
    _, version, kind, _, _, number, term, synced = _HEAD.unpack_from(raw)
    data = bytes(raw[HEAD_BYTES : HEAD_BYTES + length])
    crc = zlib.crc32(data, zlib.crc32(raw[: _HEAD.size], zlib.crc32(_PLACE.pack(offset), seed)))
    if crc != _CRC.unpack_from(raw, _HEAD.size)[0]:
        raise BadFrame(offset, "the checksum is wrong")
    if version != VERSION:
        raise NewerFormat(f"format {version}")
    return LogFrame(kind, number, term, synced, data, offset, offset + HEAD_BYTES + length)


def encode_header(seed: int, header: SegmentHeader) -> bytes:
    pointer = _POINTER.pack(
        header.first, header.sealed, header.previous_bytes, header.previous_last, header.previous.encode()
    )
    return encode_frame(seed, 0, HEADER, header.first, header.term, header.previous_last, pointer)


def decode_header(name: str, raw: bytes | memoryview) -> SegmentHeader:
    frame = decode_frame(seed_of(name), 0, raw)
    if frame.kind != HEADER or len(frame.data) != _POINTER.size:
        raise BadFrame(0, "the first frame is not a header")
    first, sealed, previous_bytes, previous_last, previous = _POINTER.unpack(frame.data)
    return SegmentHeader(first, frame.term, sealed, previous.rstrip(b"\0").decode(), previous_bytes, previous_last)
