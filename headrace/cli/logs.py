"""`headrace log`: the records of a store's log, as tables or JSON; and whether they can all be read."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import msgspec
import typer
from rich.console import Console

from headrace.core.log_records import Accepted, Decree, Intent, Retired
from headrace.durability.log.column_bytes import Columns, from_column
from headrace.durability.log.examine import ExamineReport, examine
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.records import BatchHeader, CallRows, EpochHeader, RepliesHeader, unpack
from headrace.durability.log.store_repair import repair_store
from headrace.durability.migration import LooseValues
from headrace.durability.reading.store_reader import StoreReader
from headrace.errors import BadRequest, HeadraceError
from headrace.wire.messages import Response

LOG, REPLIES = "log", "replies"
to_json = msgspec.json.Encoder(enc_hook=repr).encode


def in_json(value: Any) -> str:
    return to_json(value).decode()


# --- show -------------------------------------------------------------------------------------------------------------


def show_log(store: str, first: int | None, last: int | None, calls: bool, replies: bool, as_json: bool) -> None:
    past = StoreReader(store)
    out = Console(highlight=False, soft_wrap=True)
    for row in rows_of(past, REPLIES if replies else LOG, first, last, calls):
        if as_json:
            print(in_json(row))
            continue
        listed = row.pop("calls", [])
        number, term, kind = row.pop("record"), row.pop("term"), row.pop("kind")
        rest = "  ".join(f"{name} {value_text(value)}" for name, value in row.items())
        out.print(f"{number:>8}  term {term}  {kind:<8}  {rest}", markup=False)
        for call in listed:
            out.print(f"{'':>10}{call_text(call)}", markup=False)


def rows_of(past: StoreReader, name: str, first: int | None, last: int | None, calls: bool) -> Iterator[dict[str, Any]]:
    end = bounds(past.store, name)[1]
    if first is not None and first > end:
        raise BadRequest(f"{past.store.url}/{name} ends with record {end}: there is no record {first}")
    for record in read_log(past.store, name, first):
        if last is not None and record.number > last:
            return
        yield {"record": record.number, "term": record.term, **described(record.data, calls)}


def described(data: bytes, calls: bool) -> dict[str, Any]:
    """A record, without the app that wrote it."""
    header, columns = unpack(data)
    match header:
        case EpochHeader():
            return {"kind": "epoch", **of_epoch(header, columns, {}, calls), "bytes": len(data)}
        case RepliesHeader():
            row = {"kind": "replies", **of_epoch(header.epoch, columns, header.failures, calls)}
            digest = None if header.digest is None else header.digest.hex()
            return row | {"aborted": len(header.failures), "digest": digest, "bytes": len(data)}
        case BatchHeader():
            row = {"kind": "batch", "query": header.source[0], "batch": header.source[1]}
            return row | {"functions": [name for name, _ in header.rows.functions], "bytes": len(data)}
        case Decree():
            return {"kind": "decree", "tids": sorted(header.failures)}
        case Intent():
            return {"kind": "intent", "tid": header.tid, "call": header.call, "name": header.name}
        case Response():
            return {"kind": "response", "tid": header.tid, "call": header.call, "failure": header.failure}
        case Accepted():
            return {
                "kind": "accepted",
                "epoch": header.epoch,
                "tids": sorted(header.differences),
                "differences": list(header.differences.values()),
            }
        case Retired():
            return {"kind": "retired", "epoch": header.epoch}
    return {"kind": type(header).__name__.lower()}


def of_epoch(header: EpochHeader, columns: Columns, failures: dict[int, Any], calls: bool) -> dict[str, Any]:
    tids = range(*header.tids)
    row: dict[str, Any] = {
        "epoch": header.number,
        "tids": [tids[0], tids[-1]] if tids else [],
        "rows": len(tids),
        "at": time_text(header.closed_us),
        "functions": [name for name, _ in header.rows.functions],
        "code": header.fingerprint[:8],
    }
    if calls:
        # The rows of a source's batch are in the record of that batch.
        own = [
            row for piece, start in pieces_of(header) if not piece.position for row in range(start, start + piece.size)
        ]
        results = from_column(columns["result"]) if "result" in columns else None
        row["calls"] = [
            {"tid": tids[at], **call, **outcome_of(at, results, failures)}
            for at, call in zip(own, calls_of(header.rows, columns), strict=True)
        ]
    return row


def pieces_of(header: EpochHeader) -> Iterator[tuple[Any, int]]:
    start = 0
    for piece in header.pieces:
        yield piece, start
        start += piece.size


def calls_of(rows: CallRows, columns: Columns) -> Iterator[dict[str, Any]]:
    if "key" not in columns:
        return
    values, keys = LooseValues(), from_column(columns["key"])
    numbers = from_column(columns["function"]) if len(rows.functions) > 1 else [0] * len(keys)
    if rows.width is None:
        given = [msgspec.msgpack.decode(data) for data in from_column(columns["args"])]
    else:
        given = list(zip(*(from_column(columns[f"arg{at}"]) for at in range(rows.width)), strict=True))
        given = given or [()] * len(keys)
    for number, key, args in zip(numbers, keys, given, strict=True):
        name, is_sealed = rows.functions[number]
        yield {"function": name, "key": key, "args": args_of(values, args, is_sealed)}


def args_of(values: LooseValues, args: Any, is_sealed: bool) -> list[Any]:
    if is_sealed:
        return list(values.decode(args[0]))
    return [values.unseal(arg) for arg in args]


def outcome_of(at: int, results: list[Any] | None, failures: dict[int, Any]) -> dict[str, Any]:
    if results is None:
        return {}
    failure = failures.get(at)
    return {"result": LooseValues().unseal(results[at])} if failure is None else {"error": failure.message}


def time_text(at_us: int) -> str:
    return datetime.datetime.fromtimestamp(at_us / 1e6, datetime.UTC).isoformat(timespec="milliseconds")


def value_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def call_text(call: dict[str, Any]) -> str:
    given = ", ".join(map(repr, [call["key"], *call["args"]]))
    outcome = (
        "" if "result" not in call and "error" not in call else f"  →  {call.get('error') or repr(call['result'])}"
    )
    return f"TID {call['tid']}  {call['function']}({given}){outcome}"


# --- verify and repair ------------------------------------------------------------------------------------------------


def verify_log(store: str, as_json: bool) -> bool:
    """Both logs: every frame, and whether the records in them can be read."""
    past = StoreReader(store)
    found = {name: examine(past.store, name) for name in (LOG, REPLIES)}
    unreadable = [text for name, report in found.items() if report.is_sound for text in unreadable_in(past, name)]
    is_sound = not unreadable and all(report.is_sound for report in found.values())
    if as_json:
        print(in_json({"sound": is_sound, "unreadable": unreadable, **{n: plain(r) for n, r in found.items()}}))
        return is_sound
    out = Console(highlight=False, soft_wrap=True)
    for report in found.values():
        for text in report.lines():
            out.print(text, markup=False, style="red" if text.startswith("broken") else None)
    for text in unreadable:
        out.print(text, markup=False, style="red")
    out.print("sound" if is_sound else "BROKEN", style="green" if is_sound else "red")
    return is_sound


def unreadable_in(past: StoreReader, name: str) -> Iterator[str]:
    for record in read_log(past.store, name, None):
        try:
            unpack(record.data)
        except HeadraceError as error:
            yield f"{name}: record {record.number}: {error}"


def plain(report: ExamineReport) -> dict[str, Any]:
    return {
        "records": report.records,
        "first": report.first,
        "last": report.last,
        "segments": len(report.segments),
        "terms": report.terms,
        "broken": [each._asdict() for each in report.broken],
        "ignored": [each._asdict() for each in report.ignored],
        "orphans": report.orphans,
        "lost": report.lost,
        "saved": report.saved,
    }


def repair_log(store: str, is_sure: bool, as_json: bool) -> bool:
    """Returns True if both logs are sound now, from the newest snapshot on."""
    past = StoreReader(store)
    out = Console(highlight=False, soft_wrap=True)
    if not is_sure:
        for name in (LOG, REPLIES):
            for text in examine(past.store, name).lines():
                out.print(text, markup=False)
        typer.confirm("Take over the store and cut off the first broken record and everything after it?", abort=True)
    done = repair_store(past)
    if as_json:
        figures = {report.name: plain(report) for report in done.reports}
        print(in_json({"last_epoch": done.last_epoch, "forgotten_replies": done.forgotten, **figures}))
        return True
    for report in done.reports:
        if report.lost:
            out.print(f"{report.name}: records {report.lost[0]} to {report.lost[1]} were cut off", markup=False)
        for file in report.saved:
            out.print(f"  kept as {file}", markup=False)
    if done.forgotten:
        out.print(f"the replies of {done.forgotten} epochs are lost, and with them their request ids")
    what = "the store is complete" if done.has_changed else "there was nothing to repair: the store is complete"
    out.print(f"{what} up to epoch {done.last_epoch}", style="green")
    return True
