"""A stream of transfers at a given pace, for benchmarks only: `format("headrace.paced")`.

A schedule file says when row i is due. The row depends only on i: the columns `src` and `dst` are two different
accounts out of `keys`, each equally likely. The rate can be changed while a query runs. Rows arrive as soon as they are
due, not once a second as with Spark's own `rate` source, so the latency of each row can be measured.

Options: the path of the schedule, which a `PaceFile` (bench/pace.py) writes; `keys`; `partitions`; `maxRowsPerBatch`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from headrace.bench.pace import DueRows, rows_due, transfers
from headrace.spark.sources.options import text, whole
from headrace.spark.tasks import freeze_gc

BATCH = 50_000  # rows of one record batch


class PacedSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace.paced"

    def schema(self) -> str:
        return "src long, dst long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return Stream(self.options)


class Stream(DataSourceStreamReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self.schedule = text(options, "path")
        self.keys = whole(options, "keys", 10_000, 2)
        self.parts = whole(options, "partitions", 2, 1)
        self.rows_max = whole(options, "maxRowsPerBatch", 0, 1)

    def initialOffset(self) -> dict[str, Any]:
        return {"row": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.rows_max) if self.rows_max else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        due = rows_due(DueRows(*json.loads(Path(self.schedule).read_text())), time.time())
        if isinstance(limit, ReadMaxRows):
            due = min(due, start["row"] + limit.max_rows)
        return {"row": max(due, start["row"])}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        first, count = start["row"], end["row"] - start["row"]
        edges = [first + count * part // self.parts for part in range(self.parts + 1)]
        return [InputPartition(edge) for edge in itertools.pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        first, stop = partition.value
        for at in range(first, stop, BATCH):
            src, dst = transfers(at, min(at + BATCH, stop), self.keys)
            yield pa.RecordBatch.from_arrays([pa.array(src), pa.array(dst)], ["src", "dst"])
        freeze_gc()
