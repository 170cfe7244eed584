"""Shape guesses: the columns of a table of states whose type is not declared, by the states themselves.

Rules:
1. States that agree have one shape. If they do not, the shape that most of them have is taken, and the others are
   misfits: the error names the first of them, or they become rows of nulls.
2. Records, and dicts that all have the same str keys, have one column per field; other dicts are maps.

Never here: which entities, stores, Spark.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from headrace.durability.columns import Columns, join, split
from headrace.durability.reading.column_types import (
    LOCAL_TIME,
    PLAIN_DECIMAL,
    TIMESTAMP,
    VALUE,
    Column,
    TableShape,
    decimal_type,
)
from headrace.durability.reading.record_rows import RECORD_VALUES, LooseRecord
from headrace.durability.reading.typed import ADVICE, Misfits, arrays
from headrace.errors import BadValue
from headrace.model.places import Places

SHAPES_MAX = 16  # states of more kinds than this are misfits of whichever wins
FAILS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)


class Disagree(Exception):
    """A state does not have the shape of those before."""


class StateKind:
    """The shape that some states have in common."""

    def __init__(self, plain: Places) -> None:
        self.plain = plain
        self.count = 0
        self.type: pa.DataType = pa.null()  # of the values; a struct for records and dicts
        self.records: bool | None = None  # True: records; False: dicts; None: neither
        self.names: frozenset[frozenset[Any]] = frozenset()  # of dicts: if all have the same str keys, they are columns
        self.items: pa.DataType | None = pa.null()  # of dicts as maps; None if they cannot be maps

    def takes(self, values: list[Any]) -> bool:
        """Whether the states are of this kind; if so, they are counted."""
        before = dict(self.__dict__)
        try:
            self._add(values)
        except Disagree:
            self.__dict__.update(before)
            return False
        self.count += len(values)
        return True

    def takes_scalars(self, type: pa.DataType, count: int) -> bool:
        """The same for numbers or texts."""
        if self.records is not None:
            return False
        try:
            self.type = self._united(self.type, type)
        except Disagree:
            return False
        self.count += count
        return True

    def shape(self) -> TableShape:
        if self.records is None:
            return TableShape((Column(VALUE, tidy(self.type, self.plain)),), False)
        if self.records or self._is_like_records():
            return TableShape(tuple(Column(field.name, tidy(field.type, self.plain)) for field in self.type), True)
        assert self.items is not None
        items = pa.map_(pa.string(), pa.string()) if self.items == pa.null() else self.items
        return TableShape((Column(VALUE, items),), False)

    def _add(self, values: list[Any]) -> None:
        kinds: set[type] = set(map(type, values))
        if not all(issubclass(kind, dict) for kind in kinds):
            if self.records is not None:
                raise Disagree("records and other values")
            self.type = self._united(self.type, self._inferred(values))
            return
        if len(kinds) > 1 or self.records not in (None, kinds == {LooseRecord}):
            raise Disagree("records and dicts")
        if self.records is None and self.type != pa.null():
            raise Disagree("records and other values")
        self.records = kinds == {LooseRecord}
        if not self.records:
            self.names |= frozenset(map(frozenset, values))
            self._see_items([item for value in values for item in value.items()])
        if self.records or self._is_like_records():
            self.type = self._united(self.type, self._inferred(values))
        elif self.items is None:
            raise Disagree("dicts of several types")

    def _united(self, one: pa.DataType, other: pa.DataType) -> pa.DataType:
        one, other = (tidy(type, self.plain, pa.null()) for type in (one, other))
        if pa.null() in (one, other) or one == other:
            return other if one == pa.null() else one
        try:
            schemas = [pa.schema([(VALUE, type)]) for type in (one, other)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(VALUE).type
        except FAILS:
            raise Disagree(f"{one} and {other}") from None

    def _inferred(self, values: list[Any]) -> pa.DataType:
        try:
            return inferred(values)
        except FAILS as error:
            raise Disagree(str(error).partition("\n")[0]) from None

    def _is_like_records(self) -> bool:
        return len(self.names) == 1 and all(names and set(map(type, names)) == {str} for names in self.names)

    def _see_items(self, items: list[tuple[Any, Any]]) -> None:
        if not items or self.items is None:
            return
        try:
            keys, values = (tidy(inferred(list(each)), self.plain) for each in zip(*items, strict=True))
            found = pa.map_(keys, values)
        except FAILS:
            found = None
        self.items = found if self.items in (pa.null(), found) else None


class Misfit(NamedTuple):
    """The first state of a kind that did not win."""

    name: str
    state: Any  # sealed


class ShapeGuess:
    """Infers the shape of a table from states. With `are_null`, misfits do not matter."""

    def __init__(self, operator: str, plain: Places = PLAIN_DECIMAL, are_null: bool = False) -> None:
        self.operator, self.plain, self.are_null = operator, plain, are_null
        self.kinds: list[StateKind] = []
        self.first: list[Misfit] = []  # of each kind
        self.odd: list[Misfit] = []  # the first one that no column can hold

    def add(self, states: Columns, named: Callable[[int], str]) -> None:
        """`named` names the entity of a row."""
        for kind, array in states.items():
            if kind == "packed":
                self._add_packed(array, named)
            else:
                self._add_scalars(array, named)

    def shape(self) -> TableShape | None:
        """The shape; None if there were no states."""
        if not self.kinds:
            if self.odd and not self.are_null:
                raise self._differ(f"that of {self.odd[0].name} fits into no column")
            return None
        best = max(range(len(self.kinds)), key=lambda at: (self.kinds[at].count, -at))
        shape = self.kinds[best].shape()
        others = [*self.first[:best], *self.first[best + 1 :], *self.odd]
        if others and not self.are_null:
            raise self._differ(difference(others[0], shape, self.kinds[best].count))
        return shape

    def _add_scalars(self, array: pa.Array, named: Callable[[int], str]) -> None:
        count, row = len(array) - array.null_count, array.is_valid().index(True).as_py()
        if not any(each.takes_scalars(array.type, count) for each in self.kinds):
            fresh = StateKind(self.plain)
            fresh.takes_scalars(array.type, count)
            self._take(fresh, Misfit(named(row), array[row].as_py()))

    def _add_packed(self, array: pa.Array, named: Callable[[int], str]) -> None:
        rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)).tolist()
        cells = join({"packed": array.drop_null()})
        found = [
            (row, cell, value) for row, cell in zip(rows, cells, strict=True) if (value := unsealed(cell)) is not None
        ]
        if not found:
            return
        values = [value for _, _, value in found]
        first = self.kinds[0] if self.kinds else StateKind(self.plain)
        if first.takes(values):  # the common case
            if not self.kinds:
                self._take(first, Misfit(named(found[0][0]), found[0][1]))
            return
        for row, cell, value in found:
            if not any(each.takes([value]) for each in self.kinds):
                self._add_odd(value, Misfit(named(row), cell))

    def _add_odd(self, value: Any, misfit: Misfit) -> None:
        """A state that is of no kind so far."""
        fresh = StateKind(self.plain)
        if fresh.takes([value]):
            self._take(fresh, misfit)
        else:  # such as a list of texts and numbers
            self.odd = self.odd or [misfit]

    def _take(self, fresh: StateKind, misfit: Misfit) -> None:
        if len(self.kinds) < SHAPES_MAX:
            self.kinds.append(fresh)
            self.first.append(misfit)

    def _differ(self, what: str) -> BadValue:
        return BadValue(
            f"the states of operator {self.operator!r} do not have one type: {what}. Declare it, as in "
            f"app.operator({self.operator!r}, state=...); or {ADVICE}"
        )


def difference(misfit: Misfit, shape: TableShape, count: int) -> str:
    """What about the misfit does not fit to the others."""
    try:
        arrays(split([misfit.state]), shape, Misfits(lambda row: misfit.name))
    except BadValue as error:
        return str(error).removesuffix(f"; {ADVICE}")
    return f"that of {misfit.name} is not like {count} others"


def unsealed(cell: Any) -> Any:
    """None for a state that cannot be read: whoever reads it names it."""
    try:
        return RECORD_VALUES.unseal(cell)
    except BadValue:
        return None


def inferred(values: list[Any]) -> pa.DataType:
    with contextlib.suppress(*FAILS):
        return pa.array(values).type
    return pa.array(list(map(inferable, values))).type


def inferable(value: Any) -> Any:
    """The value as Arrow can infer its type: UUIDs are texts, and a Decimal may be any."""
    if type(value) is uuid.UUID:
        return str(value)
    if type(value) is Decimal:
        return Decimal(0)
    if type(value) in (list, tuple):
        return list(map(inferable, value))
    if isinstance(value, dict):
        return {key: inferable(item) for key, item in value.items()}
    return value


def tidy(type: pa.DataType, plain: Places = PLAIN_DECIMAL, nothing: pa.DataType | None = None) -> pa.DataType:
    """Converts an inferred type to one that a table has. A column that is always null is text."""
    if pa.types.is_null(type):
        return nothing or pa.string()
    if pa.types.is_large_string(type):
        return pa.string()
    if pa.types.is_large_binary(type):
        return pa.binary()
    if pa.types.is_timestamp(type):
        return LOCAL_TIME if type.tz is None else TIMESTAMP
    if pa.types.is_decimal(type):
        return decimal_type(plain)
    if pa.types.is_list(type):
        return pa.list_(tidy(type.value_type, plain, nothing))
    if pa.types.is_struct(type):
        return pa.struct([(field.name, tidy(field.type, plain, nothing)) for field in type])
    return type
