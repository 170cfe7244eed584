"""Frames: how records lie in a segment of the log, and how a broken one is told from a good one.

A segment is a header frame and then the frames of its records. Two rules. A frame's checksum covers its segment's
name and its own place in it, so that bytes of another file, or a record that holds the picture of a frame, are never
taken for one. And every frame says how far the log was known to be durable when it was written (`synced`): by this
a reader tells a tail that was torn in a crash from a record that was promised and is now unreadable.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

MAGIC = b"HRlg"
VERSION = 1
HEADER, RECORD, MARK = 1, 2, 3  # kinds; a mark is no record: it only says how far the log is durable
RECORD_BYTES_MAX = 1 << 30
PIECE_BYTES, PIECES_BYTES_MAX = 5 << 10, 256 << 10  # what is checksummed at a time, and up to where in pieces
TERM_MAX = 99_999_999
NUMBER_MAX = 10**16 - 1

_HEAD = struct.Struct("<4sBBHIQIQ")  # magic, version, kind, nothing, length, number, term, synced
_CRC = struct.Struct("<I")
_PLACE = struct.Struct("<Q")
_POINTER = struct.Struct("<QQQQ32s")  # first, sealed, and of the previous segment: bytes, last number, name
HEAD_BYTES = _HEAD.size + _CRC.size
HEADER_BYTES = HEAD_BYTES + _POINTER.size
_NAME = re.compile(r"(\d{16})-(\d{8})\.(seg|obj)")


class Ref(NamedTuple):
    """A segment by its name. Refs of one term sort in the order in which they were written."""

    term: int
    first: int
    is_whole: bool  # made in one piece (".obj"); else it grows (".seg")
    name: str


class Header(NamedTuple):
    """What a segment says of itself and of the one before it."""

    first: int  # the number of its first record, also if it has none yet
    term: int
    sealed: int  # so many bytes were there when it got its name: they were durable then
    previous: str  # "" at the log's beginning
    previous_bytes: int  # so much of the previous segment counts
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
    """No frame here. Inside only: readers make a cut or a `LogBroken` of it."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"{why} at byte {offset}")
        self.offset, self.why = offset, why


class NewerFormat(Exception):
    """A sound frame of a format that this code does not know."""


def name_of(first: int, term: int, is_whole: bool) -> Ref:
    return Ref(term, first, is_whole, f"{first:016d}-{term:08d}.{'obj' if is_whole else 'seg'}")


def parse_name(name: str) -> Ref | None:
    found = _NAME.fullmatch(name)
    return Ref(int(found[2]), int(found[1]), found[3] == "obj", name) if found else None


def seed_of(name: str) -> int:
    """What the checksums of a segment begin with."""
    return zlib.crc32(name.encode())


def _checksum(data: bytes, start: int) -> int:
    """In small pieces, as far as that is quick: for larger ones `zlib` lets other threads run, and with a busy one
    among them it takes milliseconds to have the interpreter back."""
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
    """How long the data of the frame with this head is, if it is one; `BadFrame` if it cannot be."""
    if len(head) < HEAD_BYTES:
        raise BadFrame(offset, "a frame is cut short")
    if head[:4] != MAGIC:
        raise BadFrame(offset, "no frame starts here")
    length: int = _HEAD.unpack_from(head)[4]
    if length > RECORD_BYTES_MAX:
        raise BadFrame(offset, f"a frame cannot have {length} bytes")
    return length


def decode_frame(seed: int, offset: int, raw: bytes | memoryview) -> LogFrame:
    """The frame that these bytes begin with. `offset` is its place in the segment."""
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


def encode_header(seed: int, header: Header) -> bytes:
    pointer = _POINTER.pack(
        header.first, header.sealed, header.previous_bytes, header.previous_last, header.previous.encode()
    )
    return encode_frame(seed, 0, HEADER, header.first, header.term, header.previous_last, pointer)


def decode_header(name: str, raw: bytes | memoryview) -> Header:
    frame = decode_frame(seed_of(name), 0, raw)
    if frame.kind != HEADER or len(frame.data) != _POINTER.size:
        raise BadFrame(0, "the first frame is not a header")
    first, sealed, previous_bytes, previous_last, previous = _POINTER.unpack(frame.data)
    return Header(first, frame.term, sealed, previous.rstrip(b"\0").decode(), previous_bytes, previous_last)
