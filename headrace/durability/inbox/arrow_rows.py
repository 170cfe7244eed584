"""Reads the segments of a closed batch into a table, and converts Arrow columns to Python values.

Rules:
1. A cell that Python cannot represent becomes an `UnreadableCell`: its row is refused, and the others are not.
2. A timestamp in a named time zone becomes one in UTC.

Never here: what the columns mean (batch_calls.py).
"""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from headrace.durability.inbox.inbox import ClosedBatch, read_segment
from headrace.durability.store import Store

Row = tuple[Any, ...]


def read_table(store: Store, closed: ClosedBatch) -> pa.Table | None:
    """All rows of a batch, in the order of its segments; None if it has none."""
    tables = [read_segment(store, segment) for segment in closed.segments if segment.rows]
    return pa.concat_tables(tables, promote_options="default") if tables else None


NAMED = "arg:"  # before the name, of a column with an argument by name
CARRIED = "carried"  # the column with what a source wants to find beside the replies


def rows_of(table: pa.Table) -> list[Row]:
    """The arguments by position."""
    width = sum(name.startswith("arg") and not name.startswith(NAMED) for name in table.column_names)
    columns = [to_python(table.column(f"arg{at}")) for at in range(width)]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def named_of(table: pa.Table) -> dict[str, list[Any]]:
    """The arguments by name, in columns."""
    names = [name.removeprefix(NAMED) for name in table.column_names if name.startswith(NAMED)]
    return {name: to_python(table.column(NAMED + name)) for name in names}


class UnreadableCell:
    """A cell that Python has no value for: text that is not valid Unicode, a date after the year 9999, a map with a
    duplicate key. It fits no function, so its row is refused, and the others are not."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"a value that cannot be read ({self.why})"


def to_python(column: pa.ChunkedArray) -> list[Any]:
    try:
        return column_to_python(column)
    except (ValueError, OverflowError, KeyError, pa.ArrowException):
        return [in_utc(cell) for cell in map(cell_to_python, column)]


def cell_to_python(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError, pa.ArrowException) as error:
        return UnreadableCell(f"{cell.type}: {error}")


def column_to_python(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if not column.null_count and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_text(kind)):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return list(map(in_utc, values)) if "timestamp" in str(kind) else values


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def in_utc(value: Any) -> Any:
    """Arrow returns timestamps in a named zone; a Headrace value has a fixed offset."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is None else value.astimezone(datetime.UTC)
    if isinstance(value, list):
        return list(map(in_utc, value))
    if isinstance(value, dict):
        return {in_utc(key): in_utc(item) for key, item in value.items()}
    return value
