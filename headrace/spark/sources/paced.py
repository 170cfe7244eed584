"""A stream of transfers on time, to measure with: `format("headrace.faucet")`.

Row i is due at a moment that a schedule says, and is the same transfer whoever makes it: columns `src` and `dst`, two
different accounts out of `keys`, each as likely as any other. The rate can be changed while a query runs. Rows come
as soon as they are due, not once a second like those of Spark's own `rate`: so a row's latency is its own.

Options: the path of the schedule, which a `PaceFile` writes; `keys`; `partitions`; `maxRowsPerBatch`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from headrace.spark.sources.options import text, whole
from headrace.spark.tasks import settle

BATCH = 50_000  # rows of one record batch
BITS, LOW = np.uint64(32), np.uint64(0xFFFF_FFFF)


class DueRows(NamedTuple):
    """From this moment on rows become due at this rate, after those that were due before."""

    from_s: float
    per_s: float
    rows: int


class PaceFile:
    """Says when which row is due, by a file that the source looks at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turns = [DueRows(time.time(), 0.0, 0)]
        self._write()

    def turn(self, per_s: float) -> int:
        """From now on so many rows per second. Returns the number of the first one."""
        now = time.time()
        self.turns.append(DueRows(now, per_s, rows_due(self.turns[-1], now)))
        self._write()
        return self.turns[-1].rows

    def give(self, rows: int) -> None:
        """So many more rows, due now."""
        first = self.turn(0.0)
        self.turns.append(DueRows(self.turns[-1].from_s, 0.0, first + rows))
        self._write()

    def rows(self) -> int:
        """That are due by now."""
        return rows_due(self.turns[-1], time.time())

    def due_s(self, first: int, stop: int) -> Any:
        """When each of these rows was due."""
        rows = np.arange(first, stop)
        due = np.empty(len(rows))
        for turn in self.turns:
            after = rows >= turn.rows
            due[after] = turn.from_s + (rows[after] - turn.rows + 1) / turn.per_s if turn.per_s else turn.from_s
        return due

    def _write(self) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(self.turns[-1]))
        os.replace(aside, self.path)


def rows_due(turn: DueRows, now_s: float) -> int:
    return turn.rows + max(0, int((now_s - turn.from_s) * turn.per_s))


class PacedSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace.faucet"

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
        settle()


def transfers(first: int, stop: int, keys: int) -> tuple[Any, Any]:
    """Debtors and creditors of these rows."""
    numbers = mixed(np.arange(first, stop, dtype=np.uint64))
    src = ((numbers >> BITS) * np.uint64(keys)) >> BITS  # of 32 bits a part, without a division
    dst = src + np.uint64(1) + (((numbers & LOW) * np.uint64(keys - 1)) >> BITS)
    dst -= (dst >= keys) * np.uint64(keys)
    return src.view(np.int64), dst.view(np.int64)


def mixed(numbers: Any) -> Any:
    """Numbers that look like drawn ones (splitmix64): each depends on its place only."""
    numbers = (numbers + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return numbers ^ (numbers >> np.uint64(31))
