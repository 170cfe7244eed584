"""Column types: the columns of a table of an operator's states, or of a function's results, by their declared type.

Rules:
1. The declared type decides: a dataclass or struct has one column per field, anything else has one column, `value`. A
   part that no column can hold (a union, Any, a record inside itself) is JSON text.
2. Types are read as a fingerprint has them, as text: so a table is read without the app's code.
3. A Decimal has the places that are declared for it, else those of `Plain`.

Never here: values, stores, Spark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from headrace.model.fingerprint import Fingerprint
from headrace.model.places import Places

VALUE = "value"
TIMESTAMP, LOCAL_TIME = pa.timestamp("us", "UTC"), pa.timestamp("us")
PLAIN_DECIMAL = Places(38, 18)  # of a Decimal without places
SCALARS: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "datetime": TIMESTAMP,
    "UUID": pa.string(),
}
GENERIC = re.compile(r"(\w+)\[(.*)\]\Z", re.DOTALL)
PLACES = re.compile(r"Places\((\d+), (\d+)\)")
WITHOUT_ZONE = re.compile(r"\bMeta\([^()]*\btz=False\b")

LISTS = ("list", "Sequence", "MutableSequence", "Collection", "Iterable")
DICTS = ("dict", "Mapping", "MutableMapping")

Records = Mapping[str, Sequence[tuple[str, str]]]  # record -> its fields and their types


class Column(NamedTuple):
    name: str
    type: pa.DataType
    is_json: bool = False  # any value, as JSON text
    declared: pa.DataType | None = None  # the type that all its values have; None if that is not known


class TableShape(NamedTuple):
    """The columns of a table of states, besides the keys."""

    columns: tuple[Column, ...]
    is_record: bool  # one column per field; else one for the whole state

    @property
    def whole(self) -> pa.DataType:
        """The type of one column that holds all of it."""
        if not self.is_record:
            return self.columns[0].type
        return pa.struct([(column.name, column.type) for column in self.columns])


JSON = TableShape((Column(VALUE, pa.string(), True),), False)


def declared(app: Fingerprint, operator: str, plain: Places = PLAIN_DECIMAL) -> TableShape | None:
    """The declared shape; None if the app does not declare the operator's state."""
    state = app.operators[operator].state
    return shape_of(state, records_of(app), plain) if state else None


def records_of(app: Fingerprint) -> Records:
    return {name: type.fields for name, type in app.types.items()}


def shape_of(text: str, records: Records, plain: Places = PLAIN_DECIMAL) -> TableShape:
    """The shape of a table of values of this type."""
    types = DeclaredColumns(records, plain)
    members, _ = union_of(text)
    if len(members) == 1 and members[0] in records:
        return TableShape(tuple(column(name, types.of(each)) for name, each in records[members[0]]), True)
    return TableShape((column(VALUE, types.of(text)),), False)


def column(name: str, type: pa.DataType | None) -> Column:
    return Column(name, pa.string(), True) if type is None else Column(name, type, False, type)


class DeclaredColumns:
    """The Arrow types of types as a fingerprint writes them. `plain` are the places of Decimals that have none."""

    def __init__(self, records: Records, plain: Places = PLAIN_DECIMAL) -> None:
        self.records, self.plain = records, plain

    def of(self, text: str, inside: tuple[str, ...] = ()) -> pa.DataType | None:
        """None if only JSON can hold it. `inside` are the records around it."""
        members, notes = union_of(text)
        if set(members) == {"int", "float"}:
            return pa.float64()
        if len(members) != 1:
            return None
        (only,) = members
        if only == "Decimal":
            places = PLACES.search(notes)
            return decimal_type(Places(*map(int, places.groups())) if places else self.plain)
        if only == "datetime" and WITHOUT_ZONE.search(notes):
            return LOCAL_TIME
        if only in SCALARS:
            return SCALARS[only]
        return self._record(only, inside) if only in self.records else self._generic(only, inside)

    def _record(self, name: str, inside: tuple[str, ...]) -> pa.DataType | None:
        if name in inside:
            return None
        fields = [(field, self.of(text, (*inside, name))) for field, text in self.records[name]]
        return None if not fields or any(type is None for _, type in fields) else pa.struct(fields)

    def _generic(self, text: str, inside: tuple[str, ...]) -> pa.DataType | None:
        generic = GENERIC.match(text)
        if generic is None:
            return None
        origin, given = generic[1], split_outside_brackets(generic[2], ", ")
        if origin == "Literal":
            kinds = {"str" if each[0] in "'\"" else "int" if each.lstrip("-").isdecimal() else each for each in given}
            kinds.discard("None")
            return SCALARS.get(kinds.pop()) if len(kinds) == 1 else None
        types = [self.of(each, inside) for each in given if each != "..."]
        if any(type is None for type in types):
            return None
        if origin in LISTS or (origin == "tuple" and given[-1] == "..."):
            return pa.list_(types[0])
        if origin == "tuple":
            return pa.struct([(f"_{at}", type) for at, type in enumerate(types, 1)])
        return pa.map_(*types) if origin in DICTS and len(types) == 2 else None


def decimal_type(places: Places) -> pa.DataType:
    return pa.decimal128(places.precision, places.scale)


class Union(NamedTuple):
    """The members of a union except None, or a type that is none; and all that is annotated for them."""

    members: list[str]
    notes: str


def union_of(text: str) -> Union:
    members, notes = [], []
    for part in split_outside_brackets(text.strip(), " | "):
        member, *noted = split_outside_brackets(part, " with ")
        members += [member] if member != "None" else []
        notes += noted
    return Union(members, ", ".join(notes))


def split_outside_brackets(text: str, mark: str) -> list[str]:
    """Splits the text at the marks that are outside of brackets and quotes."""
    parts, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif not depth and at >= begin and text.startswith(mark, at):
            parts.append(text[begin:at])
            begin = at + len(mark)
    return [*parts, text[begin:]]
