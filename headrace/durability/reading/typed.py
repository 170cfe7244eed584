"""Typed columns: how sealed states are converted to the columns of a table.

Rules:
1. A value becomes a cell only if nothing is lost (fitting.py); a state that does not fit is an error that names it, or
   a row of nulls: see `Misfits`.
2. Numbers and texts are never converted one by one; records are decoded by msgspec, many at a time (record_rows.py).

Never here: which columns (column_types.py, shape_guess.py), which entities, stores, Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from headrace.durability.columns import KINDS, Columns, join, packed
from headrace.durability.reading.column_types import Column, TableShape
from headrace.durability.reading.fitting import DoesNotFit, fit, json_of
from headrace.durability.reading.record_rows import RECORD_VALUES, columns_at_once, native_cells, unwrapped
from headrace.errors import BadValue
from headrace.wire.values import as_json, shown

NOTHING = pa.scalar(packed(None), KINDS["packed"])
AS_JSON = 'option("as", "json") gives each state as one JSON text'
ADVICE = f'{AS_JSON}, option("badRows", "null") leaves such rows empty'


class Misfits:
    """What to do with rows that do not fit: with `are_null` they are remembered, else the first one is an error.
    `named` names the entity of a row."""

    def __init__(self, named: Callable[[int], str], are_null: bool = False) -> None:
        self.named, self.are_null = named, are_null
        self.rows: set[int] = set()

    def add(self, row: int, field: str, why: object) -> None:
        if not self.are_null:
            raise BadValue(f"{field} of {self.named(row)}: {why}; {ADVICE}")
        self.rows.add(row)

    def within(self, rows: Any) -> Misfits:
        """For some of the rows, which are counted from 0 there."""
        return Misfits(lambda row: self.named(int(rows[row])), self.are_null)

    def nulled(self, array: pa.Array) -> pa.Array:
        """The column with nulls for these rows."""
        if not self.rows:
            return array
        is_bad = np.zeros(len(array), np.bool_)
        is_bad[list(self.rows)] = True
        return array.take(pa.array(np.arange(len(array)), mask=is_bad))


def arrays(states: Columns, shape: TableShape, misfits: Misfits) -> list[pa.Array]:
    """The columns of these states."""
    if shape.is_record:
        made = fields_of(states, shape.columns, misfits)
    else:
        made = [whole_of(states, shape.columns[0], misfits)]
    return [misfits.nulled(each) for each in made]


def one_array(states: Columns, shape: TableShape, misfits: Misfits) -> pa.Array:
    """The same as a single column: a record is a struct, and None, or a misfit, is null."""
    made = arrays(states, shape, misfits)
    if not shape.is_record:
        return made[0].cast(shape.whole)
    is_null = np.zeros(len(next(iter(states.values()))), np.bool_)
    is_null[sorted(misfits.rows)] = True
    cells = states.get("packed")
    if cells is not None:
        is_null |= pc.equal(cells, NOTHING).fill_null(False).to_numpy(zero_copy_only=False)
    made = [each.cast(field.type) for each, field in zip(made, shape.whole, strict=True)]
    return pa.StructArray.from_arrays(made, fields=list(shape.whole), mask=pa.array(is_null))


def whole_of(states: Columns, column: Column, misfits: Misfits) -> pa.Array:
    if column.is_json:
        return texts_of(states)
    quick = at_once(states, column.type)
    return quick if quick is not None else fitted(unsealed(states, misfits), column, misfits)


def at_once(states: Columns, type: pa.DataType) -> pa.Array | None:
    """The column if all states are numbers or texts of the right kind; else None."""
    if len(states) != 1:
        return None
    ((kind, array),) = states.items()
    same = {"int": pa.types.is_integer, "float": pa.types.is_floating, "text": pa.types.is_string}
    if kind not in same or array.null_count or not same[kind](type):
        return None
    try:
        return array.cast(type)
    except pa.ArrowInvalid:
        return None  # converting one by one finds the value at fault


def texts_of(states: Columns) -> pa.Array:
    if list(states) == ["int"]:
        return states["int"].cast(pa.string())
    return pa.array([as_json(state).decode() for state in join(states)], pa.string())


def fields_of(states: Columns, columns: Sequence[Column], misfits: Misfits) -> list[pa.Array]:
    """One column per field of a record, or of a dict."""
    cells = states.get("packed")
    if cells is None or cells.null_count or not columns:
        return fields_one_by_one(states, columns, misfits)
    cells = unwrapped(cells)
    made = columns_at_once(cells, columns)
    if made is not None:
        return made
    native = native_cells(cells)
    if native.all() or not native.any():
        return fields_one_by_one({"packed": cells}, columns, misfits)
    parts = [np.flatnonzero(native), np.flatnonzero(~native)]
    pieces = [fields_of_part(cells.take(pa.array(rows)), columns, misfits, rows) for rows in parts]
    order = pa.array(np.argsort(np.concatenate(parts)))
    return [pa.concat_arrays(both).take(order) for both in zip(*pieces, strict=True)]


def fields_of_part(cells: pa.Array, columns: Sequence[Column], misfits: Misfits, rows: Any) -> list[pa.Array]:
    """The same for some of the rows, all of one form."""
    made = columns_at_once(cells, columns)
    if made is not None:
        return made
    inner = misfits.within(rows)
    made = fields_one_by_one({"packed": cells}, columns, inner)
    misfits.rows.update(rows[sorted(inner.rows)].tolist())
    return made


def fields_one_by_one(states: Columns, columns: Sequence[Column], misfits: Misfits) -> list[pa.Array]:
    values = unsealed(states, misfits)
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, dict):
            misfits.add(row, "the state", f"{shown(value)} is not a record")
            values[row] = None
    return [
        fitted([None if value is None else value.get(each.name) for value in values], each, misfits) for each in columns
    ]


def fitted(values: list[Any], column: Column, misfits: Misfits) -> pa.Array:
    """Converts the values one by one."""
    cells = []
    for row, value in enumerate(values):
        try:
            cells.append(json_of(value) if column.is_json else fit(value, column.type))
        except DoesNotFit as error:
            misfits.add(row, column.name + error.path, error)
            cells.append(None)
    return pa.array(cells, column.type)


def unsealed(states: Columns, misfits: Misfits) -> list[Any]:
    """The values, decoded without their types."""
    return [unsealed_one(row, state, misfits) for row, state in enumerate(join(states))]


def unsealed_one(row: int, state: Any, misfits: Misfits) -> Any:
    try:
        return RECORD_VALUES.unseal(state)
    except BadValue as error:
        misfits.add(row, "the state", error)
        return None
