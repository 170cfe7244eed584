"""What the log and the replies hold, as bytes: a header in msgpack, and columns in Arrow IPC with zstd.

    log:      an epoch (its rows, time and limits), a source's batch (its rows), or a note (decree, intent, response)
    replies:  an epoch again, with the outcome of every row

Functions stand by their names, so that a log can be read when the app has grown. The rows of a source's batch are in
the batch's own record; an epoch only says how many of them it took.

Never here: files, who writes when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import FINAL, Batch, Epoch, Piece
from headrace.core.journal import Decree, Intent, Note, Record, Response, Retired
from headrace.core.program import Args, Entry, Program
from headrace.core.restore import Logged
from headrace.durability.columns import keys_from_arrow, keys_to_arrow, sealed_from_arrow, sealed_to_arrow
from headrace.errors import AppChanged, LogBroken, UnknownFunction
from headrace.wire.messages import Failure, RequestIds

ROWS_TO_COMPRESS = 32  # fewer are not worth it


class Rows(msgspec.Struct, frozen=True):
    """The calls of an epoch or batch, but for their columns."""

    functions: list[tuple[str, bool]]  # each that is called, and whether its arguments are encoded as one
    width: int | None  # how many arguments each has; None where they differ


class EpochHeader(msgspec.Struct, frozen=True, tag="epoch"):
    number: int
    first: int
    tids: tuple[int, int, int]
    opened_us: int
    closed_us: int
    pieces: list[Piece]
    limits: dict[str, int]
    fingerprint: str
    rows: Rows


class BatchHeader(msgspec.Struct, frozen=True, tag="batch"):
    source: tuple[str, int]
    ids: RequestIds
    refused: dict[int, Failure]
    rows: Rows


class RepliesHeader(msgspec.Struct, frozen=True, tag="replies"):
    epoch: EpochHeader
    failures: dict[int, Failure]


Header = EpochHeader | BatchHeader | RepliesHeader | Decree | Intent | Response | Retired

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_plain = msgspec.msgpack.Decoder(list[tuple[Any, ...]])
_rows_decoder = msgspec.msgpack.Decoder(tuple[Any, ...])

Columns = dict[str, pa.Array]


class Records:
    """Encodes and decodes for one program."""

    def __init__(self, program: Program, fingerprint: str = "") -> None:
        self.program, self.fingerprint, self.limits = program, fingerprint, program.config.limits()
        self._called: dict[int, tuple[EpochHeader, Columns]] = {}  # epoch -> what its replies repeat

    # --- the log ---

    def encode(self, record: Record) -> bytes:
        if isinstance(record, Epoch):
            header, columns = self._epoch(record)
            self._called[record.number] = header, columns
            return pack(header, columns)
        if isinstance(record, Batch):
            assert record.source is not None
            rows, columns = calls_to_columns(record.entries, record.keys, record.args)
            return pack(BatchHeader(record.source, record.given_ids, record.refused, rows), columns)
        return pack(record, {})

    def decode(self, number: int, data: bytes, batches: dict[int, Batch]) -> Logged:
        """`batches` are those decoded before, by the numbers of their records; a new one is added."""
        header, columns = unpack(data)
        if isinstance(header, EpochHeader):
            epoch = self._read_epoch(header, columns, batches)
            epoch.position = number
            return Logged(number, epoch, header.limits, header.fingerprint)
        if isinstance(header, BatchHeader):
            entries, keys, args = self._read_calls(header.rows, columns, self._entry)
            batch = batches[number] = Batch(header.ids, entries, keys, args, header.refused, header.source)
            batch.position = number
            return Logged(number, batch)
        assert isinstance(header, Note)
        return Logged(number, header)

    # --- replies ---

    def encode_replies(self, epoch: Epoch) -> bytes:
        """An epoch that is final."""
        header, columns = self._called.pop(epoch.number) if epoch.number in self._called else self._epoch(epoch)
        return pack(RepliesHeader(header, epoch.failures), columns, {"result": sealed_to_arrow(epoch.results)})

    def decode_replies(self, data: bytes) -> Epoch:
        header, columns = unpack(data)
        if not isinstance(header, RepliesHeader):
            raise LogBroken(f"a record among the replies holds {type(header).__name__}")
        epoch = self._read_epoch(header.epoch, columns, None)
        epoch.results = sealed_from_arrow(columns["result"])
        epoch.failures = header.failures
        epoch.final_rows, epoch.phase = len(epoch), FINAL
        return epoch

    # --- rows ---

    def _epoch(self, epoch: Epoch) -> tuple[EpochHeader, Columns]:
        entries, keys, args = epoch.entries, epoch.keys, epoch.args
        if any(piece.source for piece in epoch.pieces):
            spans = [
                range(start, start + piece.size)
                for piece, start in zip(epoch.pieces, epoch.starts(), strict=True)
                if not piece.source
            ]
            rows = [row for span in spans for row in span]
            entries, keys, args = (
                [entries[row] for row in rows],
                [keys[row] for row in rows],
                [args[row] for row in rows],
            )
        described, columns = calls_to_columns(entries, keys, args)
        tids = (epoch.tids.start, epoch.tids.stop, epoch.tids.step)
        header = EpochHeader(
            epoch.number,
            epoch.first,
            tids,
            epoch.opened_us,
            epoch.closed_us,
            [piece._replace(ids="") if piece.source else piece for piece in epoch.pieces],
            self.limits,
            self.fingerprint,
            described,
        )
        return header, columns

    def _read_epoch(self, header: EpochHeader, columns: Columns, batches: dict[int, Batch] | None) -> Epoch:
        """Without `batches`, of replies, the rows of sources stay empty and functions may be gone: their results are
        enough. Rows of a batch that is not among them are not needed."""
        epoch = Epoch(header.number, header.first, header.opened_us)
        epoch.closed_us, epoch.tids, epoch.pieces = header.closed_us, range(*header.tids), header.pieces
        find = self._entry if batches is not None else self._entry_or_none
        entries, keys, args = self._read_calls(header.rows, columns, find)
        at = 0
        for piece in header.pieces:
            if not piece.source:
                epoch.has_ids |= not piece.is_own
                epoch.entries += entries[at : at + piece.size]
                epoch.keys += keys[at : at + piece.size]
                epoch.args += args[at : at + piece.size]
                at += piece.size
            elif batches is None or piece.source not in batches:
                epoch.entries += [None] * piece.size  # type: ignore[list-item]
                epoch.keys += [None] * piece.size  # type: ignore[list-item]
                epoch.args += [()] * piece.size
            else:
                batch, stop = batches[piece.source], piece.start + piece.size
                epoch.entries += batch.entries[piece.start : stop]
                epoch.keys += batch.keys[piece.start : stop]
                epoch.args += batch.args[piece.start : stop]
        return epoch

    def _read_calls(
        self, rows: Rows, columns: Columns, find: Callable[[str, bool], Any]
    ) -> tuple[list[Entry], list[Any], list[Args]]:
        if "key" not in columns:
            return [], [], []
        keys = keys_from_arrow(columns["key"])
        called = [find(name, is_sealed) for name, is_sealed in rows.functions]
        entries = called * len(keys)
        if len(called) > 1:
            entries = [called[at] for at in columns["function"].to_pylist()]
        args: list[Args]
        if rows.width is None:
            args = [_rows_decoder.decode(data) for data in columns["args"].to_pylist()]
        elif rows.width == 0:
            args = [()] * len(keys)
        else:
            given = [sealed_from_arrow(columns[f"arg{at}"]) for at in range(rows.width)]
            args = list(zip(*given, strict=True))
        return entries, keys, args

    def _entry_or_none(self, name: str, is_sealed: bool) -> Entry | None:
        entry = self.program.named.get(name)
        return entry.sealed if entry is not None and is_sealed else entry

    def _entry(self, name: str, is_sealed: bool) -> Entry:
        try:
            entry = self.program.named.get(name) or self.program.find(name)
        except UnknownFunction as error:
            raise AppChanged(
                f"the log calls {name}, which app {self.program.app.name!r} does not have: {error}. Start it with the "
                "code that wrote the log, or run `headrace upgrade` with that code first"
            ) from None
        return entry.sealed if is_sealed else entry


def calls_to_columns(entries: list[Entry], keys: list[Any], args: list[Args]) -> tuple[Rows, Columns]:
    if not keys:
        return Rows([], 0), {}
    columns: Columns = {"key": keys_to_arrow(keys)}
    called = dict.fromkeys(entries)
    if len(called) > 1:
        numbers = {entry: at for at, entry in enumerate(called)}
        columns["function"] = pa.array([numbers[entry] for entry in entries], pa.int32())
    widths = set(map(len, args))
    width = widths.pop() if len(widths) == 1 else None
    if width is None:
        columns["args"] = pa.array([_encoder.encode(row) for row in args], pa.large_binary())
    else:
        for at in range(width):
            columns[f"arg{at}"] = sealed_to_arrow([row[at] for row in args])
    return Rows([(entry.name, entry is entry.sealed) for entry in called], width), columns


def pack(header: Header, *tables: Columns) -> bytes:
    """The header, then each table of columns, each after its length."""
    sink = pa.BufferOutputStream()
    head = _encoder.encode(header)
    sink.write(len(head).to_bytes(4, "little") + head)
    for columns in tables:
        body = to_ipc(columns) if columns else b""
        sink.write(len(body).to_bytes(4, "little"))
        sink.write(body)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def to_ipc(columns: Columns) -> Any:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    options = pa.ipc.IpcWriteOptions(compression="zstd" if batch.num_rows >= ROWS_TO_COMPRESS else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unpack(data: bytes) -> tuple[Header, Columns]:
    """The header, and the columns of all tables: they may differ in length."""
    try:
        parts, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            parts.append(memoryview(data)[at + 4 : at + 4 + size])
            at += 4 + size
        columns: Columns = {}
        for part in parts[1:]:
            columns |= from_ipc(part)
        return _decoder.decode(parts[0]), columns
    except (msgspec.DecodeError, pa.ArrowException, ValueError, IndexError) as error:
        raise LogBroken(f"a record with a right checksum cannot be read: {error}. Is it of a newer version?") from None


def from_ipc(data: memoryview) -> Columns:
    if not data:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
    return dict(zip(batch.schema.names, batch.columns, strict=True))
