"""State as a table: the entities of one operator at the end of an epoch, one row each.

    spark.read.format("headrace.state").option("operator", "account").load("bank-store")

Rules:
1. A DataFrame is the state at one epoch, which is chosen when it is loaded. Everything derived from it is consistent.
2. The key is a column of its own type. A dataclass or struct is one column per field, anything else the column `value`.
   `option("as", "json")` gives any state as text.
3. Readers share the work by ranges of shards. A query for given keys reads only their shards.

Spark 4 keeps the plan of a Python source per `load`, not per query: a filter that was pushed down stays for all later
uses of that DataFrame. So filters are pushed down only with `option("pushdown", "true")`, for a DataFrame that is used
with one filter only; from Spark 5 on always.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    In,
    InputPartition,
    IsNotNull,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from headrace.durability.columns import join, unpacked
from headrace.durability.reading.column_types import JSON, VALUE, Column, TableShape, declared
from headrace.durability.reading.scan import ScannedRows, ShardRange
from headrace.durability.reading.shape_guess import ShapeGuess
from headrace.durability.reading.typed import Misfits, arrays
from headrace.durability.reading.views import EpochEnd, View
from headrace.errors import StreamError
from headrace.model.fingerprint import Fingerprint
from headrace.runtime.loading import load
from headrace.spark.sources.footers import file_columns
from headrace.spark.sources.key_column import asked_key_type, common_type, keys_as
from headrace.spark.sources.options import (
    bad_rows_are_null,
    check_names,
    located,
    one_of,
    plain_places,
    store_of,
    text,
    whole,
)
from headrace.wire.values import shown

OPTIONS = (
    "operator",
    "keyColumn",
    "keyType",
    "as",
    "asOfEpoch",
    "partitions",
    "keys",
    "live",
    "pushdown",
    "app",
    "decimals",
    "badRows",
)
PARTITION_BYTES = 16 << 20  # compressed
PARTITIONS_MIN, PARTITIONS_MAX = 2, 256
KINDS = {"int": "long", "text": "string", "packed": "binary"}  # types of keys by the columns of a snapshot
YES, NO = ("true", "1", "yes"), ("false", "0", "no")


class Slice(InputPartition):
    """The part of one reader. Without a moment it is the newest one at the time of reading."""

    def __init__(self, within: ShardRange | None, keys: list[Any] | None, moment: EpochEnd | None) -> None:
        self.within, self.keys, self.moment = within, keys, moment

    def __repr__(self) -> str:
        return f"Slice({self.within})"


class StateQuery:
    """The values of the options. It holds no open resources: it is sent to the readers."""

    def __init__(self, options: Mapping[str, str]) -> None:
        check_names(options, OPTIONS)
        self.options = located(options)
        self.operator = text(options, "operator")
        self.key = text(options, "keyColumn", "key")
        self.key_type = asked_key_type(options)
        self.is_json = one_of(options, "as", ("columns", "json")) == "json"
        self.epoch = whole(options, "asOfEpoch", 0) if "asOfEpoch" in options else None
        self.partitions = whole(options, "partitions", 0, 1)
        self.keys = keys_of(options["keys"]) if "keys" in options else None
        self.is_live = flag(options, "live", False)
        self.pushes = flag(options, "pushdown", int(pyspark.__version__.partition(".")[0]) >= 5)
        self.app = options.get("app")
        self.plain = plain_places(options)
        self.nulls_bad_rows = bad_rows_are_null(options)
        if self.is_live and (self.epoch is not None or self.partitions > 1):
            raise StreamError("a live table is the newest state, in one partition: leave out asOfEpoch and partitions")

    def view(self) -> View:
        return View(store_of(self.options), self.operator, None if self.app is None else load(self.app))

    def moment(self, view: View) -> EpochEnd:
        return view.newest() if self.epoch is None else view.at(self.epoch)


class StateSource(DataSource):
    """`headrace.state`."""

    moment: EpochEnd | None = None  # set by `schema`, which Spark calls first, unless it was given

    @classmethod
    def name(cls) -> str:
        return "headrace.state"

    @functools.cached_property
    def asked(self) -> StateQuery:
        return StateQuery(self.options)

    def schema(self) -> StructType:
        asked = self.asked
        view = asked.view()
        self.moment = asked.moment(view)
        fingerprint = view.app_fingerprint(self.moment)
        view.check(fingerprint)
        look = InferredTypes(view, self.moment, fingerprint, asked)
        shape = JSON if asked.is_json else declared(fingerprint, asked.operator, asked.plain) or look.shape()
        if asked.key in (column.name for column in shape.columns):
            raise StreamError(
                f"operator {asked.operator!r} already has a field {asked.key!r}: give the key column another name, as "
                'in option("keyColumn", "id")'
            )
        fields = [pa.field(asked.key, asked.key_type or look.key_type(), nullable=False)]
        fields += [
            pa.field(column.name, column.type, metadata={"json": "true"} if column.is_json else None)
            for column in shape.columns
        ]
        made = from_arrow_schema(pa.schema(fields))
        for field, column in zip(made.fields[1:], shape.columns, strict=True):
            field.metadata = {"json": True} if column.is_json else {}
        return made

    def reader(self, schema: StructType) -> DataSourceReader:
        kind = PushingReader if self.asked.pushes else StateReader
        return kind(self.asked, schema, self.moment)


class StateReader(DataSourceReader):
    def __init__(self, asked: StateQuery, schema: StructType, moment: EpochEnd | None) -> None:
        self.asked, self.table, self.moment = asked, schema, moment
        self.whose = f"operator {asked.operator!r}"
        self.keys = asked.keys

    def partitions(self) -> list[InputPartition]:
        asked = self.asked
        if asked.is_live:
            return [Slice(None, self.keys, None)]
        view = asked.view()
        moment = self.moment or asked.moment(view)
        fingerprint = view.app_fingerprint(moment)
        view.check(fingerprint)
        scan = view.scan(moment, fingerprint)
        count = asked.partitions or min(max(PARTITIONS_MIN, scan.bytes // PARTITION_BYTES), PARTITIONS_MAX)
        ranges = view.ranges(moment, scan, count, self.keys)
        return [Slice(within, self.keys, moment) for within in ranges] or [Slice((0, -1), [], moment)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        view = self.asked.view()
        moment = partition.moment or view.newest()
        fingerprint = view.app_fingerprint(moment)
        view.check(fingerprint)
        target = to_arrow_schema(self.table, timezone="UTC")
        shape = self._shape(fingerprint)
        for found in view.read(moment, fingerprint, partition.within, partition.keys):
            yield self._batch(found, shape, target)

    def _shape(self, fingerprint: Fingerprint) -> TableShape:
        """The shape by the table's schema, which may be given by the user. A table with the single column `value` holds
        whole states, unless the state's only field has that name."""
        target = to_arrow_schema(self.table, timezone="UTC")
        columns = tuple(
            Column(field.name, target.field(field.name).type, bool((field.metadata or {}).get("json")))
            for field in self.table.fields
            if field.name != self.asked.key
        )
        known = declared(fingerprint, self.asked.operator, self.asked.plain)
        if self.asked.is_json:
            return TableShape(tuple(column._replace(is_json=True) for column in columns), False)
        if known is not None:
            return TableShape(self._known(columns, known), known.is_record)
        return TableShape(columns, [column.name for column in columns] != [VALUE])

    def _known(self, columns: tuple[Column, ...], known: TableShape) -> tuple[Column, ...]:
        names = [column.name for column in known.columns]
        stranger = [column.name for column in columns if column.name not in names]
        if stranger:
            raise StreamError(
                f"the states of operator {self.asked.operator!r} have no {', '.join(stranger)}; they have: "
                f"{', '.join(names)} (and the key column is {self.asked.key!r})"
            )
        known_as = {column.name: column for column in known.columns}
        return tuple(
            column._replace(
                is_json=known_as[column.name].is_json and pa.types.is_string(column.type),
                declared=known_as[column.name].declared,
            )
            for column in columns
        )

    def _batch(self, found: ScannedRows, shape: TableShape, target: pa.Schema) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        if shape.columns:
            misfits = Misfits(namer(self.asked.operator, found), self.asked.nulls_bad_rows)
            made = arrays(found.states, shape, misfits)
            columns = {column.name: array for column, array in zip(shape.columns, made, strict=True)}
        if self.asked.key in target.names:
            columns[self.asked.key] = keys_as(found.keys, target.field(self.asked.key).type, self.whose)
        cells = [columns[field.name].cast(field.type) for field in target]
        return pa.RecordBatch.from_arrays(cells, schema=target)


class PushingReader(StateReader):
    """Handles filters by key itself; all others are left to Spark."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for each in filters:
            wanted = self._wanted(each)
            if wanted is None:
                yield each
            else:
                self.keys = [key for key in wanted if self.keys is None or key in self.keys]

    def _wanted(self, filter: Filter) -> list[Any] | None:
        """The keys that a filter allows; None if it is about something else, or if a key's text may stand for several
        keys."""
        if getattr(filter, "attribute", None) != (self.asked.key,) or isinstance(filter, IsNotNull):
            return None
        given = filter.value if isinstance(filter, In) else [filter.value] if is_equality(filter) else None
        if given is None or any(key is None for key in given):
            return None
        kind = self.table[self.asked.key].dataType.typeName()
        if kind == "string":
            return [key for value in given for key in meant_by(value)]
        return [bytes(key) if kind == "binary" else key for key in given]


def is_equality(filter: Filter) -> bool:
    return isinstance(filter, EqualTo | EqualNullSafe)


def meant_by(value: str) -> list[Any]:
    """The keys that may appear as this text in a column."""
    found: list[Any] = [value]
    if value.removeprefix("-").isdecimal() and str(int(value)) == value and -(1 << 63) <= int(value) < 1 << 64:
        found.append(int(value))
    try:
        if bytes.fromhex(value).hex() == value:
            found.append(bytes.fromhex(value))
    except ValueError:
        pass
    return found


class InferredTypes:
    """The types of keys and states where none are declared, as found in the data."""

    def __init__(self, view: View, moment: EpochEnd, fingerprint: Fingerprint, asked: StateQuery) -> None:
        self.view, self.moment, self.fingerprint, self.asked = view, moment, fingerprint, asked
        self.guesses = not asked.is_json and not fingerprint.operators[view.name].state
        self.scan = view.scan(moment, fingerprint)

    @functools.cached_property
    def kinds(self) -> set[str] | None:
        """The columns of all files of a snapshot, if that is all there is to read: then no rows have to be read."""
        return file_columns(self.view.store, self.scan.layers) if self.moment.how == "snapshot" else None

    @functools.cached_property
    def seen(self) -> tuple[set[str], ShapeGuess]:
        """All entities, read once."""
        kinds: set[str] = set()
        guess = ShapeGuess(self.view.name, self.asked.plain, self.asked.nulls_bad_rows)
        for found in self.view.read(self.moment, self.fingerprint):
            for kind, column in found.keys.items():
                kinds.add("large" if kind == "packed" and has_large(column) else KINDS[kind])
            if self.guesses:
                guess.add(found.states, namer(self.view.name, found))
        return kinds, guess

    def key_type(self) -> pa.DataType:
        """The type of the keys: a text if they are mixed, or if there are none."""
        kinds = kinds_of(self.kinds, "key_")
        if len(kinds) != 1 or kinds == {"packed"}:
            return common_type(self.seen[0])
        return common_type({KINDS[kind] for kind in kinds})

    def shape(self) -> TableShape:
        kinds = kinds_of(self.kinds, "state_")
        if len(kinds) == 1 and kinds < {"int", "float", "text"}:
            types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
            return TableShape((Column(VALUE, types[kinds.pop()]),), False)
        return self.seen[1].shape() or JSON


def namer(operator: str, found: ScannedRows) -> Callable[[int], str]:
    """Names the entity of a row, for errors."""

    def named(row: int) -> str:
        key = join({kind: column.slice(row, 1) for kind, column in found.keys.items()})[0]
        return f"{operator} {shown(key)}"

    return named


def kinds_of(names: set[str] | None, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names or () if name.startswith(prefix)}


def has_large(keys: pa.Array) -> bool:
    """Whether there is an int above 63 bits among the bytes."""
    return any(type(unpacked(cell)) is int for cell in keys.drop_null().to_pylist())


def keys_of(given: str) -> list[Any]:
    """The option `keys`: a JSON list of strings and ints."""
    try:
        keys = json.loads(given)
    except ValueError:
        keys = None
    if not isinstance(keys, list) or any(type(key) not in (str, int) for key in keys):
        raise StreamError(f'the option keys is {given!r}; it must be a JSON list, as in ["alice", "bob"] or [1, 2]')
    return keys


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    given = options.get(name)
    if given is None:
        return default
    if given.lower() not in (*YES, *NO):
        raise StreamError(f"the option {name} is {given!r}; it must be true or false")
    return given.lower() in YES
