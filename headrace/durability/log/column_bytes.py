"""Tables: encodes the columns of a record to bytes, and decodes them.

Rules:
1. A few rows are a msgpack map: name -> list. More are an Arrow stream with one batch.
2. Ints are stored in the smallest width that holds the whole column, which saves about as much as compression. A table
   that holds anything else is compressed with zstd.
3. Work per row comes first (`to_column`), in the thread that has the rows in its CPU cache; any thread can do the rest
   (`to_bytes`).

Never here: what the columns mean.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.durability.columns import sealed_from_arrow, sealed_to_arrow

ROWS_FOR_ARROW = 32
SHAPES_MAX = 1_000  # how many stream shapes are cached
WIDTHS = {"H": pa.uint16(), "i": pa.int32(), "q": pa.int64()}
STREAM = b"\xff\xff\xff\xff"  # the first bytes of an Arrow stream, never of msgpack
END_BYTES = 8  # the end marker of a stream, after its last body

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, list[Any]])


class Ints(NamedTuple):
    """A column of ints of the same width."""

    code: str
    rows: int
    data: bytes

    def array(self) -> pa.Array:
        return pa.Array.from_buffers(WIDTHS[self.code], self.rows, [None, pa.py_buffer(self.data)])


Columns = dict[str, Any]  # name -> list, Ints or Arrow array


def to_column(values: list[Any]) -> Any:
    """The column for a list of sealed values or keys."""
    if len(values) < ROWS_FOR_ARROW:
        return values
    return ints_of(values) or sealed_to_arrow(values)


def from_column(column: Any) -> list[Any]:
    if type(column) is list:
        return column
    if column.type in WIDTHS.values():
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    return sealed_from_arrow(column)


def ints_of(values: list[Any]) -> Ints | None:
    """The column, or None if not all values are 64-bit ints."""
    if type(values[0]) is int:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(values, list[int])  # True is not an int here
            for code in WIDTHS:
                with contextlib.suppress(struct.error):
                    return Ints(code, len(values), struct.pack(f"<{len(values)}{code}", *values))
    return None


class Streams:
    """Encodes tables to bytes. Two Arrow streams of ints with the same names, widths and number of rows differ only in
    their bodies: what surrounds the bodies is cached, and Arrow is not called again."""

    def __init__(self) -> None:
        self._around: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}

    def to_bytes(self, columns: Columns) -> bytes:
        if not columns:
            return b""
        kinds = {column.code if type(column) is Ints else type(column) for column in columns.values()}
        if kinds == {list}:
            return _encoder.encode(columns)
        if kinds <= {"H", "i"}:
            return self._ints(columns)
        return to_stream(columns, "zstd")

    def _ints(self, columns: dict[str, Ints]) -> bytes:
        shape = tuple([(name, column.code, column.rows) for name, column in columns.items()])
        bodies = [column.data + bytes(-len(column.data) % 8) for column in columns.values()]
        around = self._around.get(shape)
        if around is None:
            stream = to_stream(columns, None)
            end = len(stream) - END_BYTES
            around = stream[: end - sum(map(len, bodies))], stream[end:]
            assert b"".join((around[0], *bodies, around[1])) == stream
            if len(self._around) >= SHAPES_MAX:
                self._around.clear()
            self._around[shape] = around
        return b"".join((around[0], *bodies, around[1]))


def to_stream(columns: Columns, compression: str | None) -> bytes:
    arrays = [column.array() if type(column) is Ints else column for column in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(data: memoryview) -> Columns:
    if not data:
        return {}
    if data[:4] != STREAM:
        return _decoder.decode(data)
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
    return dict(zip(batch.schema.names, batch.columns, strict=True))
