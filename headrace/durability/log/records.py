"""What the log and the replies hold, as bytes: a header in msgpack, and tables of columns (column_bytes.py).

    log:      an epoch (its rows, time and limits), a source's batch (its rows), or a note (decree, intent, response)
    replies:  an epoch again, with the outcome of every row

Functions stand by their names, so that a log can be read when the app has grown. The rows of a source's batch are in
the batch's own record, or in segments that it names; an epoch only says how many of them it took.

Never here: files, who writes when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import FINAL, Batch, Epoch, Piece, piece_of
from headrace.core.journal import Decree, Intent, Note, Record, Retired
from headrace.core.program import Entry, Program
from headrace.core.restore import LoggedRecord
from headrace.core.signature import Args
from headrace.durability.inbox.batches import judged_by, read_again
from headrace.durability.inbox.inbox import Closed
from headrace.durability.log.column_bytes import Columns, Streams, from_bytes, from_column, to_column
from headrace.durability.store import Store
from headrace.errors import AppChanged, LogBroken, UnknownFunction
from headrace.wire.messages import Failure, RequestIds, Response


class CallRows(msgspec.Struct, frozen=True):
    """The calls of an epoch or batch, but for their columns."""

    functions: list[tuple[str, bool]]  # each that is called, and whether its arguments are encoded as one
    width: int | None  # how many arguments each has; None where they differ


NO_ROWS = CallRows([], 0)


class EpochHeader(msgspec.Struct, frozen=True, tag="epoch"):
    number: int
    first: int
    tids: tuple[int, int, int]
    opened_us: int
    closed_us: int
    pieces: list[Piece]
    limits: dict[str, int]
    fingerprint: str
    rows: CallRows


class BatchHeader(msgspec.Struct, frozen=True, tag="batch"):
    source: tuple[str, int]
    ids: RequestIds
    refused: dict[int, Failure]
    rows: CallRows
    closed: Closed | None = None  # where the rows are, if not here
    limits: dict[str, int] = {}  # and what decided which of them are refused


class RepliesHeader(msgspec.Struct, frozen=True, tag="replies"):
    epoch: EpochHeader
    failures: dict[int, Failure]


class ChangesHeader(msgspec.Struct, frozen=True, tag="changes"):
    """Of a record of the changelog: see changelog.py."""

    epoch: int
    closed_us: int
    begin: int
    since: dict[str, int]
    operators: list[str]
    breaks: dict[str, int] = {}
    loads: dict[str, int] = {}


class ColumnRecord(NamedTuple):
    """A record in columns, not in bytes yet."""

    header: Any
    tables: tuple[Columns, ...] = ()


Header = EpochHeader | BatchHeader | RepliesHeader | ChangesHeader | Decree | Intent | Response | Retired

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_replies_decoder = msgspec.msgpack.Decoder(RepliesHeader)
_rows_decoder = msgspec.msgpack.Decoder(tuple[Any, ...])


class Records:
    """Encodes and decodes for one program."""

    def __init__(self, program: Program, fingerprint: str = "", store: Store | None = None) -> None:
        """The store is where segments of batches are, which records only name."""
        self.store = store
        self.program, self.fingerprint, self.limits = program, fingerprint, program.config.limits()
        self._streams = Streams()
        self._called: dict[int, tuple[EpochHeader, Columns]] = {}  # epoch -> what its replies repeat

    # --- the log ---

    def lay_out(self, record: Record) -> ColumnRecord:
        """The first half of the work, for who has just made the record; `pack` is the second, for any thread."""
        if isinstance(record, Epoch):
            header, columns = self._called[record.number] = self._epoch(record)
            return ColumnRecord(header, (columns,))
        if isinstance(record, Batch):
            assert record.source is not None
            if record.closed is not None:
                limits = judged_by(self.program.config)
                return ColumnRecord(BatchHeader(record.source, "", record.refused, NO_ROWS, record.closed, limits))
            rows, columns = calls_to_columns(record.entries, record.keys, record.args)
            return ColumnRecord(BatchHeader(record.source, record.given_ids, record.refused, rows), (columns,))
        return ColumnRecord(record)

    def pack(self, laid: ColumnRecord) -> bytes:
        return pack(self._streams, laid)

    def decode(self, number: int, data: bytes, batches: dict[int, Batch]) -> LoggedRecord:
        """`batches` are those decoded before, by the numbers of their records; a new one is added."""
        header, columns = unpack(data)
        if isinstance(header, EpochHeader):
            epoch = self._read_epoch(header, columns, batches)
            epoch.position = number
            return LoggedRecord(number, epoch, header.limits, header.fingerprint)
        if isinstance(header, BatchHeader) and header.closed is not None:
            assert self.store is not None
            batch = read_again(self.store, header.closed, self.program, header.limits, header.refused)
            batches[number] = batch
            batch.position = number
            return LoggedRecord(number, batch)
        if isinstance(header, BatchHeader):
            entries, keys, args = self._read_calls(header.rows, columns, self._entry)
            batch = batches[number] = Batch(header.ids, entries, keys, args, header.refused, header.source)
            batch.position = number
            return LoggedRecord(number, batch)
        assert isinstance(header, Note)
        return LoggedRecord(number, header)

    # --- replies ---

    def lay_out_replies(self, epoch: Epoch) -> ColumnRecord:
        """Of an epoch that is final."""
        header, columns = self._called.pop(epoch.number) if epoch.number in self._called else self._epoch(epoch)
        if any(piece.source for piece in epoch.pieces):  # who reads the replies does not read the log
            header = msgspec.structs.replace(header, pieces=epoch.pieces)
        return ColumnRecord(RepliesHeader(header, epoch.failures), (columns, {"result": to_column(epoch.results)}))

    def encode_replies(self, epoch: Epoch) -> bytes:
        return self.pack(self.lay_out_replies(epoch))

    def decode_replies(self, data: bytes) -> Epoch:
        header, columns = unpack(data)
        if not isinstance(header, RepliesHeader):
            raise LogBroken(f"a record among the replies holds {type(header).__name__}")
        epoch = self._read_epoch(header.epoch, columns, None)
        epoch.results = from_column(columns["result"])
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
        epoch.closed_us, epoch.tids, epoch.pieces = header.closed_us, range(*header.tids), list(header.pieces)
        find = self._entry if batches is not None else self._entry_or_none
        entries, keys, args = self._read_calls(header.rows, columns, find)
        at = 0
        for number, piece in enumerate(header.pieces):
            known = None if batches is None else batches.get(piece.source)
            epoch.stored.append(None if known is None else known.stored)
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
                epoch.pieces[number] = piece_of(batch, piece.start, stop)
                epoch.entries += batch.entries[piece.start : stop]
                epoch.keys += batch.keys[piece.start : stop]
                epoch.args += batch.args[piece.start : stop]
        return epoch

    def _read_calls(
        self, rows: CallRows, columns: Columns, find: Callable[[str, bool], Any]
    ) -> tuple[list[Entry], list[Any], list[Args]]:
        if "key" not in columns:
            return [], [], []
        keys = from_column(columns["key"])
        called = [find(name, is_sealed) for name, is_sealed in rows.functions]
        entries = called * len(keys)
        if len(called) > 1:
            entries = [called[at] for at in from_column(columns["function"])]
        args: list[Args]
        if rows.width is None:
            args = [_rows_decoder.decode(data) for data in from_column(columns["args"])]
        elif rows.width == 0:
            args = [()] * len(keys)
        else:
            given = [from_column(columns[f"arg{at}"]) for at in range(rows.width)]
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
                f"the log calls {name}, which app {self.program.app.name!r} does not have: {error}. Start with the "
                "code that wrote the log, or run `headrace upgrade` with that code first"
            ) from None
        return entry.sealed if is_sealed else entry


def calls_to_columns(entries: list[Entry], keys: list[Any], args: list[Args]) -> tuple[CallRows, Columns]:
    if not keys:
        return CallRows([], 0), {}
    columns: Columns = {"key": to_column(keys)}
    called = [entries[0]]
    if entries.count(entries[0]) < len(entries):
        numbers = {entry: at for at, entry in enumerate(dict.fromkeys(entries))}
        called = list(numbers)
        columns["function"] = to_column([numbers[entry] for entry in entries])
    given = turned(args)
    if given is None:
        columns["args"] = to_column([_encoder.encode(row) for row in args])
    else:
        columns |= {f"arg{at}": to_column(values) for at, values in enumerate(given)}
    width = None if given is None else len(given)
    return CallRows([(entry.name, entry is entry.sealed) for entry in called], width), columns


def turned(rows: list[Args]) -> list[list[Any]] | None:
    """The columns of rows that are all of one width; None if they are not."""
    width = len(rows[0])
    try:
        if width == 1:
            return [[value for (value,) in rows]]
        if width == 2:
            return [[value for value, _ in rows], [value for _, value in rows]]
    except ValueError:
        return None
    if list(map(len, rows)).count(width) < len(rows):
        return None
    return [[row[at] for row in rows] for at in range(width)]


def pack(streams: Streams, laid: ColumnRecord) -> bytes:
    """The header, then each table of columns, each after its length."""
    parts = [_encoder.encode(laid.header), *map(streams.to_bytes, laid.tables)]
    return b"".join([piece for part in parts for piece in (len(part).to_bytes(4, "little"), part)])


def unpack(data: bytes) -> tuple[Header, Columns]:
    """The header, and the columns of all tables: they may differ in length."""
    try:
        parts = parts_of(data)
        columns: Columns = {}
        for part in parts[1:]:
            columns |= from_bytes(part)
        return _decoder.decode(parts[0]), columns
    except UNREADABLE as error:
        raise unreadable(error) from None


def unpack_results(data: bytes) -> tuple[RepliesHeader, Any]:
    """Of a record of replies only the header and the results (a list, or Arrow's): the calls are not looked at."""
    try:
        parts = parts_of(data)
        return _replies_decoder.decode(parts[0]), from_bytes(parts[-1])["result"]
    except (*UNREADABLE, KeyError) as error:
        raise unreadable(error) from None


def parts_of(data: bytes) -> list[memoryview]:
    parts, at, view = [], 0, memoryview(data)
    while at < len(data):
        size = int.from_bytes(view[at : at + 4], "little")
        parts.append(view[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


UNREADABLE = (msgspec.DecodeError, pa.ArrowException, ValueError, IndexError)


def unreadable(error: Exception) -> LogBroken:
    return LogBroken(f"a record with a correct checksum cannot be read: {error}. Was it written by a newer version?")
