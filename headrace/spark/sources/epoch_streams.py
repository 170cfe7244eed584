"""What streams of epochs have in common: the offsets are epochs, and the rows of an epoch are one record of a log.

Rules:
1. The offset {"epoch": n, "cluster": id} says that all epochs up to n were delivered, of that store; it is not valid
   for another store. What is between two offsets never changes: a micro-batch that Spark repeats has the same rows.
   Some streams keep a `mark` of what they began with, to detect when it no longer holds.
2. Spark plans in a process that lives as long as the query, and follows the log there (durability/reading/tail.py). It
   reads in other processes: they open the store themselves, and get the position in the log to begin with.
3. An epoch that is no longer kept, or does not exist yet, stops the query with an error that names it. Nothing is
   skipped silently.

A subclass gives the name of its log and makes record batches of its records. See replies.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headrace.durability.identity import identity_of
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.segments import RecordPosition
from headrace.durability.reading.tail import Tail
from headrace.durability.store import Store
from headrace.errors import LogBroken, StoreError, StreamError
from headrace.spark.sources.key_column import asked_key_type
from headrace.spark.sources.options import check_names, located, store_of, whole
from headrace.spark.tasks import freeze_gc

PARTITIONS = 2
PARTITION_BYTES_MIN = 256 << 10  # of the log: less is not worth another task
OPTIONS = ("partitions", "startingEpoch", "endingEpoch", "maxEpochsPerBatch", "keyType")
LOOK_AGAIN_S = 0.2  # with a bucket, where each check is a request that costs money


class RecordRange(InputPartition):
    """Consecutive records of a log."""

    def __init__(
        self, first: int, last: int, origin: int, spot: RecordPosition | None = None, mark: Any = None
    ) -> None:
        self.first, self.last, self.origin, self.spot, self.mark = first, last, origin, spot, mark

    def __repr__(self) -> str:
        return f"Stretch({self.first}, {self.last})"


class Epochs(ABC):
    """One log whose records are epochs, as a source of rows. It holds no open resources: it is sent to the readers."""

    folder: ClassVar[str]  # of the log, in the store
    what: ClassVar[str]  # what an epoch holds, for messages: "the replies"
    option_names: ClassVar[tuple[str, ...]]  # those of the subclass, beside the ones here

    def __init__(self, options: Mapping[str, str]) -> None:
        check_names(options, (*OPTIONS, *self.option_names))
        self.options = located(options)
        self.partitions_max = whole(options, "partitions", PARTITIONS, 1)
        self.starting = whole(options, "startingEpoch", 0, 1)  # 0: not given
        self.ending = whole(options, "endingEpoch", 0, 1)
        self.epochs_max = whole(options, "maxEpochsPerBatch", 0, 1)
        self.key_type = asked_key_type(options)  # None: by the keys that are there

    @abstractmethod
    def batches(self, records: Iterator[tuple[int, bytes]], mark: Any = None) -> Iterator[pa.RecordBatch]:
        """The rows of these records: (epoch, data), in order, for a stream that began with this mark. Runs where Spark
        reads."""

    def origin(self, store: Store) -> int:
        """The epoch of a record is its number plus this."""
        identity = identity_of(store)
        assert identity is not None
        return int(identity["epoch0"])

    def cluster(self, store: Store) -> str:
        """The identity of this store; it differs from that of a store made later in the same place."""
        identity = identity_of(store)
        assert identity is not None
        return str(identity["cluster"])

    def begin(self, store: Store) -> int:
        """The epoch to begin with, unless another one is given."""
        return 0

    def oldest(self, store: Store) -> int:
        """Earlier epochs do not count, although they may be there."""
        return 0

    def mark(self, store: Store, epoch: int) -> Any:
        """What a stream that begins with this epoch must remember, in JSON; None if nothing."""
        return None

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Of the rows. It may depend on what `look` has found."""

    def look(self, store: Store) -> None:  # noqa: B027 there may be nothing to look for
        """Check the options, and determine what the schema depends on."""

    def open(self) -> Store:
        return store_of(self.options)

    def check_begin(self, epoch: int, oldest: int, last: int | None = None) -> None:
        """A stream can begin with an epoch that is kept, or with the next one."""
        if last is not None and epoch > last + 1:
            raise StreamError(f"startingEpoch is {epoch}, but the last epoch so far is {last}")
        if epoch < oldest:
            raise StreamError(
                f"{self.what} of epoch {epoch} are no longer kept: those of epoch {oldest} are the oldest. Start "
                f'there, with .option("startingEpoch", {oldest}) and a new checkpoint; Config(reply_retention_us=...) '
                "sets how long they are kept"
            )

    def read(self, stretch: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(stretch, RecordRange):  # Spark's placeholder when there are no partitions
            return iter(())
        return self._read(stretch)

    def _read(self, stretch: RecordRange) -> Iterator[pa.RecordBatch]:
        yield from self.batches(self._records(stretch), stretch.mark)
        freeze_gc()

    def _records(self, stretch: RecordRange) -> Iterator[tuple[int, bytes]]:
        store, origin, number = self.open(), stretch.origin, stretch.first
        trouble: StoreError | None = None
        try:
            for record in read_log(store, self.folder, stretch.first, stretch.spot):
                yield record.number + origin, record.data
                number = record.number + 1
                if number > stretch.last:
                    return
        except StoreError as error:
            trouble = error
        first, last = bounds(store, self.folder)
        self.check_begin(number + origin, first + origin)
        if trouble is not None and not (isinstance(trouble, LogBroken) and last < number):
            raise trouble
        raise StreamError(
            f"{self.what} of epoch {number + origin} were there and are now missing: {store.url}/{self.folder} ends "
            f"with epoch {last + origin}. If the machine crashed, they are written again when the app starts; start "
            "the query again after that"
        )


class EpochStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream reader for epochs."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs
        self._tail: Tail | None = None  # opened where Spark plans, never where it reads
        self._origin, self._oldest, self._cluster = 0, 0, ""
        self._seen: tuple[float, int, int] | None = None  # the last check: when, the oldest epoch, the last
        self._target: int | None = None  # of a query that ends with what is there now

    def __reduce__(self) -> tuple[type[EpochStream], tuple[Epochs]]:
        """What is sent to the readers holds no open resources."""
        return EpochStream, (self.epochs,)

    def initialOffset(self) -> dict[str, Any]:
        oldest, last = self._look()
        first = self.epochs.starting
        if first:
            self.epochs.check_begin(first, oldest, last)
        else:
            first = max(oldest, self.epochs.begin(self._store))
        return self._marked({"epoch": first - 1, "cluster": self._cluster})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        last = self._target if self._target is not None else self._look()[1]
        self._check(start)
        if isinstance(limit, ReadMaxFiles):
            last = min(last, start["epoch"] + limit.max_files)
        if last <= start["epoch"]:
            return start
        return self._marked(start) | {"epoch": last, "cluster": self._cluster}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark has limits of rows, bytes and files; an epoch is most like a file."""
        return ReadMaxFiles(self.epochs.epochs_max) if self.epochs.epochs_max else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return {"epoch": self._seen[2], "cluster": self._cluster} if self._seen is not None else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._look()[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if start["epoch"] >= end["epoch"]:
            return []
        oldest, _ = self._look()
        self._check(start)
        self._check(end)
        self.epochs.check_begin(start["epoch"] + 1, oldest)
        assert self._tail is not None
        first, last = start["epoch"] + 1 - self._origin, end["epoch"] - self._origin
        stretches = self._tail.cut(first, last, self.epochs.partitions_max, PARTITION_BYTES_MIN)
        spot, mark = self._tail.position_of, self._marked(start).get("mark")
        return [RecordRange(first, last, self._origin, spot(first), mark) for first, last in stretches]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.epochs.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self._tail is not None:
            self._tail.forget(end["epoch"] + 1 - self._origin)

    def _marked(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The offset with the mark of its stream; if there is none, the stream begins here."""
        if "mark" not in offset:
            mark = self.epochs.mark(self._store, offset["epoch"] + 1)
            return offset if mark is None else offset | {"mark": mark}
        return offset

    @property
    def _store(self) -> Store:
        assert self._tail is not None
        return self._tail.store

    def _check(self, offset: dict[str, Any]) -> None:
        if offset.get("cluster", self._cluster) != self._cluster:
            raise StreamError(
                f"the checkpoint belongs to another store (its cluster is {offset['cluster']}, this one is "
                f"{self._cluster}), which has other epochs. Give the store that it belongs to, or start the query with "
                "a new checkpoint location"
            )

    def _look(self) -> tuple[int, int]:
        """The oldest epoch that is kept, and the last one."""
        if self._tail is None:
            store = self.epochs.open()
            self._origin, self._oldest = self.epochs.origin(store), self.epochs.oldest(store)
            self._cluster = self.epochs.cluster(store)
            self._tail = Tail(store, self.epochs.folder)
        now = time.monotonic()
        if self._seen is None or self._tail.store.can_append or now - self._seen[0] >= LOOK_AGAIN_S:
            first, last = self._tail.look()
            self._seen = now, max(first + self._origin, self._oldest), last + self._origin
        return self._seen[1:]


class EpochTable(DataSourceReader):
    """The same rows as a table: of all epochs, or of some of them."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def partitions(self) -> list[InputPartition]:
        store = self.epochs.open()
        origin = self.epochs.origin(store)
        tail = Tail(store, self.epochs.folder)
        oldest, last = (number + origin for number in tail.look())
        oldest = max(oldest, self.epochs.oldest(store))
        first = self.epochs.starting or max(oldest, self.epochs.begin(store))
        end = self.epochs.ending or last
        self.epochs.check_begin(first, oldest, last)
        if end > last:
            raise StreamError(f"endingEpoch is {end}, but the last epoch so far is {last}")
        if first > end:
            return []
        stretches = tail.cut(first - origin, end - origin, self.epochs.partitions_max, PARTITION_BYTES_MIN)
        mark = self.epochs.mark(store, first)
        return [RecordRange(first, last, origin, tail.position_of(first), mark) for first, last in stretches]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.epochs.read(partition)


class EpochSource(DataSource):
    """`format("headrace....")`, as a stream and as a table. A subclass gives its name and its `Epochs`."""

    epochs: ClassVar[type[Epochs]]

    def schema(self) -> StructType:
        """Also the first place where `load` reports wrong options."""
        return from_arrow_schema(self._looked().schema)

    def reader(self, schema: StructType) -> EpochTable:
        return EpochTable(self._looked(schema))

    def streamReader(self, schema: StructType) -> EpochStream:
        epochs = self._looked(schema)
        if epochs.ending:
            raise StreamError(
                "endingEpoch is for spark.read only: a stream does not end (availableNow stops at the last epoch)"
            )
        return EpochStream(epochs)

    def _looked(self, schema: StructType | None = None) -> Epochs:
        """With a schema, which a query has when it starts, the type of the keys is no longer open."""
        epochs = self.epochs(self.options)
        if schema is not None:
            epochs.key_type = to_arrow_schema(schema, timezone="UTC").field("key").type
        epochs.look(epochs.open())
        return epochs
