"""What the log and the replies hold, as bytes: a header in msgpack, and tables of columns (column_bytes.py).

    log:      an epoch (its rows, time and limits), a source's batch (its rows), or a note (decree, intent, response)
    replies:  an epoch again, with the outcome of every row, and a digest of what it wrote

Functions are stored by name, so that a log can be read when the app has grown. The rows of a source's batch are in the
batch's own record, or in segments that it names; an epoch only says how many of them it took.

Never here: files, which thread writes, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.core.epoch import CLOSED, FINAL, Batch, Epoch, Piece
from headrace.core.log_records import Note, Record
from headrace.core.origin import BatchId, FromSource
from headrace.core.program import Entry, Program
from headrace.core.restore import LoggedRecord
from headrace.core.signature import Args
from headrace.durability.identity import read_fingerprint
from headrace.durability.inbox.batch_calls import StoredRows, decode_stored, reread_calls
from headrace.durability.inbox.inbox import ClosedBatch
from headrace.durability.log.column_bytes import Columns, Streams, from_bytes, from_column, to_column
from headrace.durability.store import Store
from headrace.errors import AppChanged, LogBroken, UnknownFunction
from headrace.model.fingerprint import Fingerprint, added_fields
from headrace.wire.messages import Failure, RequestIds


class CallRows(msgspec.Struct, frozen=True):
    """Describes the calls of an epoch or batch; their values are in columns."""

    functions: list[tuple[str, bool]]  # each called function, and whether its arguments are encoded as one value
    width: int | None  # how many arguments each call has; None if they differ


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
    source: BatchId
    ids: RequestIds
    refused: dict[int, Failure]
    rows: CallRows
    closed: ClosedBatch | None = None  # where the rows are, if not here
    limits: dict[str, int] = {}  # the settings that decided which of them are refused
    fingerprint: str | msgspec.UnsetType = msgspec.UNSET  # of the code that logged it, if the rows are not here


class RepliesHeader(msgspec.Struct, frozen=True, tag="replies"):
    epoch: EpochHeader
    failures: dict[int, Failure]
    called: list[
        str
    ] = []  # the functions that rows of sources called; if there are several, a column has their numbers
    digest: bytes | None = None  # of what the epoch wrote; records of older versions have none


class ChangesHeader(msgspec.Struct, frozen=True, tag="changes"):
    """The header of a changelog record: see changelog.py."""

    epoch: int
    closed_us: int
    begin: int
    since: dict[str, int]
    operators: list[str]
    breaks: dict[str, int] = {}
    loads: dict[str, int] = {}
    key_types: dict[str, list[str]] = {}
    fingerprint: str = ""  # of the code that wrote it


class ColumnRecord(NamedTuple):
    """A record as columns, not encoded to bytes yet."""

    header: Any
    tables: tuple[Columns, ...] = ()


RecordHeader = EpochHeader | BatchHeader | RepliesHeader | ChangesHeader | Note

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordHeader)
_replies_decoder = msgspec.msgpack.Decoder(RepliesHeader)
_rows_decoder = msgspec.msgpack.Decoder(tuple[Any, ...])


class Records:
    """Encodes and decodes the records of one program."""

    def __init__(
        self, program: Program, app_fingerprint: Fingerprint | None = None, store: Store | None = None
    ) -> None:
        """`store` holds the segments of batches, which records only name."""
        self.store, self.app_fingerprint = store, app_fingerprint
        self.fingerprint = "" if app_fingerprint is None else app_fingerprint.digest
        self.program, self.limits = program, program.config.limits()
        self._streams = Streams()
        self._logged_columns: dict[int, tuple[EpochHeader, Columns]] = {}  # epoch -> what its replies repeat

    # --- the log ---

    def to_columns(self, record: Record) -> ColumnRecord:
        """The first half of encoding, for the thread that made the record; `pack` is the second, for any thread."""
        if isinstance(record, Epoch):
            header, columns = self._logged_columns[record.number] = self._epoch_to_columns(record)
            return ColumnRecord(header, (columns,))
        if isinstance(record, Batch):
            origin = record.origin
            assert isinstance(origin, FromSource)
            if origin.stored is not None:
                closed, limits, *_ = decode_stored(origin.stored)
                named = BatchHeader(origin.batch_id, "", record.refused, NO_ROWS, closed, limits, self.fingerprint)
                return ColumnRecord(named)
            rows, columns = calls_to_columns(record.entries, record.keys, record.args)
            return ColumnRecord(BatchHeader(origin.batch_id, origin.ids, record.refused, rows), (columns,))
        return ColumnRecord(record)

    def pack(self, record: ColumnRecord) -> bytes:
        return pack(self._streams, record)

    def decode(self, number: int, data: bytes, batches: dict[int, Batch]) -> LoggedRecord:
        """`batches` holds the batches decoded so far, by record number; a new one is added to it."""
        header, columns = unpack(data)
        if isinstance(header, EpochHeader):
            epoch = self._read_epoch(header, columns, batches)
            epoch.position = number
            return LoggedRecord(number, epoch, header.limits, header.fingerprint)
        if isinstance(header, BatchHeader) and header.closed is not None:
            assert self.store is not None
            stored = StoredRows(header.closed, header.limits, sorted(header.refused), self._added(header.fingerprint))
            batch = reread_calls(self.store, stored, self.program)
            batches[number] = batch = msgspec.structs.replace(batch, refused=header.refused)
            return LoggedRecord(number, batch)
        if isinstance(header, BatchHeader):
            entries, keys, args = self._read_calls(header.rows, columns, self._entry)
            origin = FromSource(header.ids, header.source.source, header.source.number)
            batch = batches[number] = Batch(origin, entries, keys, args, header.refused)
            return LoggedRecord(number, batch)
        assert isinstance(header, Note)
        return LoggedRecord(number, header)

    def _added(self, fingerprint: str | msgspec.UnsetType) -> dict[str, list[str]]:
        """The fields that record types have got since this code logged a batch."""
        if self.store is None or self.app_fingerprint is None or not fingerprint or fingerprint == self.fingerprint:
            return {}
        return added_fields(read_fingerprint(self.store, fingerprint), self.app_fingerprint)

    # --- replies ---

    def replies_to_columns(self, epoch: Epoch) -> ColumnRecord:
        """The replies of a final epoch."""
        header, columns = (
            self._logged_columns.pop(epoch.number)
            if epoch.number in self._logged_columns
            else self._epoch_to_columns(epoch)
        )
        results: Columns = {"result": to_column(epoch.results)}
        if not any(piece.position for piece in epoch.pieces):
            return ColumnRecord(RepliesHeader(header, epoch.failures, [], epoch.digest), (columns, results))
        header = msgspec.structs.replace(header, pieces=epoch.pieces)  # readers of the replies do not read the log
        called, tables = called_by_sources(epoch)
        return ColumnRecord(RepliesHeader(header, epoch.failures, called, epoch.digest), (columns, *tables, results))

    def encode_replies(self, epoch: Epoch) -> bytes:
        return self.pack(self.replies_to_columns(epoch))

    def decode_replies(self, data: bytes) -> Epoch:
        header, columns = unpack(data)
        if not isinstance(header, RepliesHeader):
            raise LogBroken(f"a record among the replies holds {type(header).__name__}")
        epoch = self._read_epoch(header.epoch, columns, None)
        epoch.results = from_column(columns["result"])
        epoch.failures = header.failures
        if self.fingerprint in ("", header.epoch.fingerprint):  # other code may write states in another form
            epoch.digest = header.digest
        epoch.final_rows = len(epoch)
        epoch.enter(CLOSED)
        epoch.enter(FINAL)
        return epoch

    # --- rows ---

    def _epoch_to_columns(self, epoch: Epoch) -> tuple[EpochHeader, Columns]:
        entries, keys, args = epoch.entries, epoch.keys, epoch.args
        if any(piece.position for piece in epoch.pieces):
            spans = [
                range(start, start + piece.size)
                for piece, start in zip(epoch.pieces, epoch.starts(), strict=True)
                if not piece.position
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
            [piece._replace(ids="") if piece.position else piece for piece in epoch.pieces],
            self.limits,
            self.fingerprint,
            described,
        )
        return header, columns

    def _read_epoch(self, header: EpochHeader, columns: Columns, batches: dict[int, Batch] | None) -> Epoch:
        """Without `batches` (for replies) the rows of sources stay empty and functions may be gone: the results are
        enough. Rows of a batch that is not in `batches` are not needed, and stay empty too."""
        epoch = Epoch(header.number, header.first, header.opened_us)
        epoch.closed_us, epoch.tids, epoch.pieces = header.closed_us, range(*header.tids), list(header.pieces)
        find = self._entry if batches is not None else self._entry_or_none
        entries, keys, args = self._read_calls(header.rows, columns, find)
        at = 0
        for number, piece in enumerate(header.pieces):
            known = None if batches is None else batches.get(piece.position)
            epoch.stored.append(None if known is None else known.origin.stored)
            epoch.carried.append(None)
            if not piece.position:
                epoch.has_ids |= not piece.is_own
                epoch.entries += entries[at : at + piece.size]
                epoch.keys += keys[at : at + piece.size]
                epoch.args += args[at : at + piece.size]
                at += piece.size
            elif known is None:
                epoch.entries += [None] * piece.size  # type: ignore[list-item]
                epoch.keys += [None] * piece.size  # type: ignore[list-item]
                epoch.args += [()] * piece.size
            else:
                stop = piece.start + piece.size
                epoch.pieces[number] = known.piece(piece.start, stop, piece.position)
                epoch.carried[number] = None if known.carried is None else known.carried[piece.start : stop]
                epoch.entries += known.entries[piece.start : stop]
                epoch.keys += known.keys[piece.start : stop]
                epoch.args += known.args[piece.start : stop]
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


def called_by_sources(epoch: Epoch) -> tuple[list[str], list[Columns]]:
    """The functions that rows of sources called. And tables with a row for each of these: the number of its function,
    if there are several; its key; what the source wants to find beside the reply."""
    entries: list[Entry | None] = []
    keys: list[Any] = []
    carried: list[Any] = []
    for piece, start, beside in zip(epoch.pieces, epoch.starts(), epoch.carried, strict=True):
        if piece.position:
            entries += epoch.entries[start : start + piece.size]
            keys += epoch.keys[start : start + piece.size]
            carried.append(pa.nulls(piece.size, pa.string()) if beside is None else beside)
    if not entries or None in entries:  # of an epoch whose rows were not read
        return [], []
    tables: list[Columns] = [{"called_key": to_column(keys)}]
    if any(each.null_count < len(each) for each in carried):
        tables.append({"carried": pa.concat_arrays(carried)})
    names = {entry: entry.name for entry in dict.fromkeys(entries) if entry is not None}
    called = list(dict.fromkeys(names.values()))
    if len(called) > 1:
        tables.append({"called": to_column([called.index(names[entry]) for entry in entries if entry is not None])})
    return called, tables


def calls_to_columns(entries: list[Entry], keys: list[Any], args: list[Args]) -> tuple[CallRows, Columns]:
    if not keys:
        return CallRows([], 0), {}
    columns: Columns = {"key": to_column(keys)}
    called = [entries[0]]
    if entries.count(entries[0]) < len(entries):
        numbers = {entry: at for at, entry in enumerate(dict.fromkeys(entries))}
        called = list(numbers)
        columns["function"] = to_column([numbers[entry] for entry in entries])
    given = transposed(args)
    if given is None:
        columns["args"] = to_column([_encoder.encode(row) for row in args])
    else:
        columns |= {f"arg{at}": to_column(values) for at, values in enumerate(given)}
    width = None if given is None else len(given)
    return CallRows([(entry.name, entry is entry.sealed) for entry in called], width), columns


def transposed(rows: list[Args]) -> list[list[Any]] | None:
    """The columns of rows that all have the same width; None if they do not."""
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


def pack(streams: Streams, record: ColumnRecord) -> bytes:
    """Encodes the header, then each table of columns, each preceded by its length."""
    parts = [_encoder.encode(record.header), *map(streams.to_bytes, record.tables)]
    return b"".join([piece for part in parts for piece in (len(part).to_bytes(4, "little"), part)])


def unpack(data: bytes) -> tuple[RecordHeader, Columns]:
    """Decodes the header and the columns of all tables, which may differ in length."""
    try:
        parts = parts_of(data)
        columns: Columns = {}
        for part in parts[1:]:
            columns |= from_bytes(part)
        return _decoder.decode(parts[0]), columns
    except UNREADABLE as error:
        raise unreadable(error) from None


def writer_of(data: bytes) -> str:
    """The fingerprint of the code that wrote a record of replies."""
    try:
        return _replies_decoder.decode(parts_of(data)[0]).epoch.fingerprint
    except UNREADABLE as error:
        raise unreadable(error) from None


def unpack_results(data: bytes) -> tuple[RepliesHeader, Any]:
    """Decodes only the header and the results (a list, or an Arrow array) of a record of replies, not the calls."""
    try:
        parts = parts_of(data)
        return _replies_decoder.decode(parts[0]), from_bytes(parts[-1])["result"]
    except (*UNREADABLE, KeyError) as error:
        raise unreadable(error) from None


class CalledRows(NamedTuple):
    """What rows of an epoch called: the names of the functions; for each row the number of its function, None if there
    is only one; the keys; what is carried. A column that the record does not have is None."""

    names: list[str]
    numbers: Any
    keys: Any
    carried: Any = None


def unpack_called(data: bytes) -> tuple[CalledRows, CalledRows]:
    """The rows of a record of replies that came from sources, and the others."""
    header, columns = unpack(data)
    if not isinstance(header, RepliesHeader):
        raise LogBroken(f"a record among the replies holds {type(header).__name__}")
    of_sources = CalledRows(header.called, columns.get("called"), columns.get("called_key"), columns.get("carried"))
    names = [name for name, _ in header.epoch.rows.functions]
    return of_sources, CalledRows(names, columns.get("function"), columns.get("key"))


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
