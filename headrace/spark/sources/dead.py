"""`format("headrace.dead")`: the rows of streams that were not valid calls, with the reason, as a table or a stream.

Columns: query, batch, row, request_id, function, key and args (JSON), error_type, error. An offset is the last batch of
each query; the dead letters of a batch are complete before the batch is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from headrace.durability.inbox.dead_letters import DEAD, dead_letter_names, read_dead_letters
from headrace.durability.inbox.inbox import SEPARATOR
from headrace.spark.sources.options import check_names, located, store_of
from headrace.spark.tasks import freeze_gc

SCHEMA = (
    "query string, batch bigint, row bigint, request_id string, function string, key string, args string, "
    "error_type string, error string"
)


class DeadSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace.dead"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        check_names(self.options, ())
        return DeadReader(located(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        check_names(self.options, ())
        store_of(self.options)
        return DeadStream(located(self.options))


class DeadReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        names = dead_letter_names(store_of(self.options))
        return [InputPartition(names)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_of(self.options, partition.value or ())


class DeadStream(DataSourceStreamReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        last = dict(start)
        for query, batch in map(source_of, dead_letter_names(store_of(self.options))):
            last[query] = max(batch, last.get(query, -1))
        return last

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        names = []
        for name in dead_letter_names(store_of(self.options), is_final=False):
            query, batch = source_of(name)
            if start.get(query, -1) < batch <= end.get(query, -1):
                names.append(name)
        return [InputPartition(names)] if names else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_of(self.options, partition.value or ())


def source_of(name: str) -> tuple[str, int]:
    query, _, batch = name.removeprefix(f"{DEAD}/").rpartition(SEPARATOR)
    return query, int(batch)


def rows_of(options: dict[str, str], names: Iterable[str]) -> Iterator[pa.RecordBatch]:
    store = store_of(options)
    for name in names:
        yield from read_dead_letters(store, name).to_batches()
    freeze_gc()
