"""Rows that are due at a given pace, for the benchmarks through Spark (`format("headrace.paced")`): the file that says
when each row is due, and the transfer that each row stands for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BITS, LOW = np.uint64(32), np.uint64(0xFFFF_FFFF)


class DueRows(NamedTuple):
    """From this moment on, rows become due at this rate. `rows` were due before."""

    from_s: float
    per_s: float
    rows: int


class PaceFile:
    """Writes the file from which the source learns which rows are due."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rates = [DueRows(time.time(), 0.0, 0)]
        self._write()

    def set_rate(self, per_s: float) -> int:
        """Set the rate from now on, in rows per second. Returns the number of the first row."""
        now = time.time()
        self.rates.append(DueRows(now, per_s, rows_due(self.rates[-1], now)))
        self._write()
        return self.rates[-1].rows

    def add_rows(self, rows: int) -> None:
        """Make this many more rows due now, and set the rate to 0."""
        first = self.set_rate(0.0)
        self.rates.append(DueRows(self.rates[-1].from_s, 0.0, first + rows))
        self._write()

    def rows(self) -> int:
        """The number of rows that are due by now."""
        return rows_due(self.rates[-1], time.time())

    def due_s(self, first: int, stop: int) -> Any:
        """When each of these rows was due."""
        rows = np.arange(first, stop)
        due = np.empty(len(rows))
        for rate in self.rates:
            after = rows >= rate.rows
            due[after] = rate.from_s + (rows[after] - rate.rows + 1) / rate.per_s if rate.per_s else rate.from_s
        return due

    def _write(self) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(self.rates[-1]))
        os.replace(aside, self.path)


def rows_due(rate: DueRows, now_s: float) -> int:
    return rate.rows + max(0, int((now_s - rate.from_s) * rate.per_s))


def transfers(first: int, stop: int, keys: int) -> tuple[Any, Any]:
    """The debtors and creditors of these rows: two different accounts, each equally likely."""
    numbers = mixed(np.arange(first, stop, dtype=np.uint64))
    src = ((numbers >> BITS) * np.uint64(keys)) >> BITS  # 32 bits each, without a division
    dst = src + np.uint64(1) + (((numbers & LOW) * np.uint64(keys - 1)) >> BITS)
    dst -= (dst >= keys) * np.uint64(keys)
    return src.view(np.int64), dst.view(np.int64)


def mixed(numbers: Any) -> Any:
    """Pseudo-random numbers (splitmix64): each depends only on its position."""
    numbers = (numbers + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return numbers ^ (numbers >> np.uint64(31))
