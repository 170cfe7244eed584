"""Helpers for Spark tasks, in Python processes that run one task after another."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator

import pyarrow as pa

from headrace.runtime import gc_settings


@functools.cache
def freeze_gc() -> None:
    """Call this at the end of a task. Spark runs the garbage collector after each task, which would search everything
    that was ever imported: more work than most tasks. Only the first call does anything, and only in a process of
    Spark's: users' own processes are left alone."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "pyspark.daemon":
        gc_settings.freeze_gc()


def gathered(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """The rows of a task in tables of about this many bytes; no table if there are no rows."""
    some: list[pa.RecordBatch] = []
    bytes_so_far = 0
    for batch in batches:
        some.append(batch)
        bytes_so_far += batch.nbytes
        if bytes_so_far >= size:
            yield pa.Table.from_batches(some)
            some, bytes_so_far = [], 0
    if any(batch.num_rows for batch in some):
        yield pa.Table.from_batches(some)
