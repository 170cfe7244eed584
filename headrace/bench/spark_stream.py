"""A stream of transfers through Spark, measured from end to end: when each row was due, and when it passed each stage.

    paced source ──► Spark ──► transact ──► store ──► runtime ──► store ──► headrace.replies ──► Spark ──► nowhere

Rows are due one by one, whatever happens to earlier ones. The latency of a row runs from when it was due to the end of
the micro-batch of the second query that delivered its reply, and every row counts. In between it is known when the
files were written to the store (by their times), when the runtime received the batch, when the row's epoch was final
and kept (by wrappers around the runtime's own steps), and what Spark reports of its micro-batches. All times are from
one clock.
"""

from __future__ import annotations

import bisect
import json
import os
import time
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.bench import ycsb
from headrace.bench.pace import PaceFile, transfers
from headrace.config import Config
from headrace.core.epoch import Batch, Epoch
from headrace.core.origin import FromSource
from headrace.durability.store import DirectoryStore
from headrace.runtime import gc_settings
from headrace.runtime.inprocess import Runtime
from headrace.wire.messages import Answers

LOST_S, LOST_ROWS = 3.0, 10_000  # a stream that is so far behind is given up
PATIENCE_S = 120.0


# --- measuring --------------------------------------------------------------------------------------------------------


class BatchWatch(DirectoryStore):
    """Notes when the batches of a source were written to the store, by the times of their files."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: dict[int, float] = {}  # by batch: its last segment
        self.closed: dict[int, float] = {}

    def get(self, name: str) -> bytes:
        folder, _, rest = name.partition("/")
        if folder == "inbox":
            batch = int(rest.rpartition("@")[2])
            self.closed[batch] = os.stat(self.root / name).st_mtime
        elif folder == "calls":
            batch = int(rest.split("@")[1])
            self.written[batch] = max(self.written.get(batch, 0), os.stat(self.root / name).st_mtime)
        return super().get(name)


class BatchRun(NamedTuple):
    """Rows of an epoch that come from one batch: which batch, and from which of its rows on."""

    epoch: int
    batch: int
    start: int
    size: int


class WatchedRuntime(Runtime):
    """Notes when it receives a batch, when epochs are final, and when their replies are in the store."""

    def __init__(self, store: BatchWatch, config: Config | None) -> None:
        self.handed: dict[int, float] = {}  # by batch
        self.final: dict[int, float] = {}  # by epoch
        self.kept: list[tuple[int, float]] = []  # the last epoch each time, and when
        self.runs: list[BatchRun] = []
        self.rows_final = 0
        super().__init__(ycsb.app, config, store=store)
        assert self._keeper is not None
        store_work = self._keeper.store_work
        self._prepare, self._keep = store_work.prepare, store_work.keep
        store_work.prepare, store_work.keep = self._note_final, self._note_kept  # type: ignore[method-assign,assignment]

    def submit(self, batch: Batch, wait: bool = True) -> Future[Answers]:
        if isinstance(batch.origin, FromSource):
            self.handed[batch.origin.number] = time.time()
        return super().submit(batch, wait)

    def _note_final(self, epoch: Epoch, *more: Any) -> None:
        if epoch.number not in self.final:
            self.final[epoch.number] = time.time()
            for piece in epoch.pieces:
                if piece.position:
                    batch = int(str(piece.ids).rpartition("/")[2])
                    self.runs.append(BatchRun(epoch.number, batch, piece.start, piece.size))
                    self.rows_final += piece.size
        self._prepare(epoch, *more)

    def _note_kept(self, epochs: list[Any], *more: Any) -> None:
        self._keep(epochs, *more)
        assert self._keeper is not None
        self.kept.append((self._keeper.store_work.kept, time.time()))


class MicroBatch(NamedTuple):
    """One of Spark's micro-batches, from its progress report."""

    number: int
    began_s: float
    ended_s: float
    start: dict[str, int]
    end: dict[str, int]
    rows: int
    took_ms: dict[str, int]


class StreamProgress:
    """All micro-batches of a query that had rows."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self.batches: list[MicroBatch] = []

    def look(self) -> list[MicroBatch]:
        last = self.batches[-1].number if self.batches else -1
        for told in self.query.recentProgress:
            if told["numInputRows"] and told["batchId"] > last:
                self.batches.append(micro_batch(told))
        return self.batches

    def check(self) -> None:
        error = self.query.exception()
        if error is not None:
            raise error


def micro_batch(told: Any) -> MicroBatch:
    began = datetime.fromisoformat(told["timestamp"]).timestamp()
    took = dict(told["durationMs"])
    source = told["sources"][0]
    start, end = (as_offset(source[name]) for name in ("startOffset", "endOffset"))
    ended = began + took["triggerExecution"] / 1e3
    return MicroBatch(told["batchId"], began, ended, start, end, told["numInputRows"], took)


def as_offset(told: Any) -> dict[str, int]:
    """The offset as a dict; empty before the first batch."""
    return (json.loads(told) if isinstance(told, str) else told) or {}


# --- latency ----------------------------------------------------------------------------------------------------------

STAGES = {  # of a row's way, in order
    "wait": "until a micro-batch begins",
    "plan": "Spark: offsets, its own log, the plan",
    "write": "Spark: rows made, carried, in segments",
    "close": "the batch closed in the inbox",
    "intake": "found, read, admitted",
    "engine": "logged, run, final",
    "keep": "replies in the store",
    "see": "until a micro-batch of the replies begins",
    "deliver": "Spark: that micro-batch",
}
PLANNING = ("latestOffset", "walCommit", "queryPlanning", "getBatch")


class Window(NamedTuple):
    """What was measured for some rows."""

    per_s: float  # committed, from the first delivery to the last
    p50_ms: float
    p99_ms: float
    rows: int
    stages_ms: dict[str, float]  # means over rows


class StreamUnderTest:
    """Both queries, and the runtime between them."""

    def __init__(
        self,
        spark: Any,
        folder: Path,
        keys: int,
        partitions: int = 2,
        trigger: dict[str, Any] | None = None,
        config: Config | None = None,
    ) -> None:
        from headrace.spark import register, transact
        from headrace.spark.sources.paced import PacedSource

        register(spark).dataSource.register(PacedSource)
        self.keys, self.pace = keys, PaceFile(folder / "schedule.json")
        self.store = BatchWatch(folder / "store")
        self.runtime = WatchedRuntime(self.store, config)
        self.runtime.client.map(ycsb.open_account, list(range(keys)), [(ycsb.BALANCE,)] * keys)
        paced = spark.readStream.format("headrace.paced")
        source = paced.options(keys=keys, partitions=partitions).load(str(self.pace.path))
        calls = transact(
            source,
            ycsb.transfer,
            key="src",
            args=["dst"],
            runtime=self.runtime,
            name="calls",
            checkpoint=str(folder / "calls"),
            trigger=trigger,
        )
        replies = spark.readStream.format("headrace.replies").option("startingEpoch", self.last_epoch() + 1)
        replies = replies.load(self.store.url).writeStream.format("noop").queryName("replies")
        self.calls = StreamProgress(calls)
        self.replies = StreamProgress(replies.option("checkpointLocation", str(folder / "replies")).start())
        gc_settings.freeze_gc()

    def last_epoch(self) -> int:
        return int(self.runtime.engine.sequencing.open.number) - 1

    def run(self, per_s: float, seconds: float, window: tuple[float, float] | None = None) -> Window | None:
        """Send rows at this rate for this long; only those due within the window count. None if it fell far behind."""
        first, began = self.pace.set_rate(per_s), time.time()
        is_lost = False
        while time.time() < began + seconds and not is_lost:
            time.sleep(0.25)
            is_lost = self.pace.rows() - self.runtime.rows_final > max(LOST_S * per_s, LOST_ROWS)
            self.check()
        self.pace.set_rate(0.0)
        self.drain()
        if is_lost:
            return None
        since, until = window or (0.0, seconds)
        return self.window(first + round(since * per_s), first + round(until * per_s))

    def check(self) -> None:
        self.calls.check()
        self.replies.check()
        self.runtime._check_alive()

    def drain(self) -> None:
        """Wait until the replies of all rows that were due are delivered."""
        until = time.time() + PATIENCE_S
        while self.runtime.rows_final < self.pace.rows() or not self.is_delivered(self.last_epoch()):
            if time.time() > until:
                raise TimeoutError(f"{self.pace.rows()} rows were due, {self.runtime.rows_final} are final")
            time.sleep(0.05)
            self.check()

    def is_delivered(self, epoch: int) -> bool:
        last = self.replies.query.lastProgress
        if last is None:
            return False
        return as_offset(last["sources"][0]["endOffset"]).get("epoch", 0) >= epoch

    def window(self, first: int, stop: int) -> Window:
        """The measurements of these rows. All their replies are delivered."""
        due, moments = self.pace.due_s(first, stop), self.moments(first, stop)
        delivered = moments[-1]
        latency_ms = (delivered - due) * 1e3
        stages_ms = np.diff(np.vstack([due, *moments]), axis=0).mean(axis=1) * 1e3
        elapsed_s = float(delivered[-1] - delivered[0])
        return Window(
            # The rows of the first delivery arrived before the measured time begins.
            per_s=float((delivered > delivered[0]).sum()) / elapsed_s if elapsed_s else 0.0,
            p50_ms=float(np.percentile(latency_ms, 50)),
            p99_ms=float(np.percentile(latency_ms, 99)),
            rows=stop - first,
            stages_ms={name: round(float(ms), 1) for name, ms in zip(STAGES, stages_ms, strict=True)},
        )

    def moments(self, first: int, stop: int) -> list[Any]:
        """For each of these rows: when it passed each stage."""
        batches = self.calls.look()
        starts = {each.number: each.start.get("row", 0) for each in batches}
        runs = [run for run in self.runtime.runs if starts.get(run.batch) is not None]
        ends = np.array([starts[run.batch] + run.start + run.size for run in runs])
        assert (np.diff(ends) > 0).all(), "rows ran in a different order from the one they were made in"
        of_row = np.searchsorted(ends, np.arange(first, stop), side="right")
        low, high = int(of_row[0]), int(of_row[-1]) + 1
        of_row, runs = of_row - low, runs[low:high]
        by_number = {each.number: each for each in batches}
        delivered = self.replies.look()
        epochs_delivered = [each.end["epoch"] for each in delivered]
        epochs_kept = [epoch for epoch, _ in self.runtime.kept]
        per_run = []
        for run in runs:
            batch, number = by_number[run.batch], run.batch
            reply = delivered[bisect.bisect_left(epochs_delivered, run.epoch)]
            planned_s = sum(batch.took_ms.get(name, 0) for name in PLANNING) / 1e3
            per_run.append(
                (
                    batch.began_s,
                    batch.began_s + planned_s,
                    self.store.written[number],
                    self.store.closed[number],
                    self.runtime.handed[number],
                    self.runtime.final[run.epoch],
                    self.runtime.kept[bisect.bisect_left(epochs_kept, run.epoch)][1],
                    reply.began_s,
                    reply.ended_s,
                )
            )
        return list(np.array(per_run)[of_row].T)

    def checks(self) -> dict[str, bool]:
        """Check the totals at the end. No account runs dry, so the balances follow from how often each account was
        drawn."""
        rows = self.pace.rows()
        state = self.runtime.state(ycsb.account)
        src, dst = transfers(0, rows, self.keys)
        balances = ycsb.BALANCE - np.bincount(src, minlength=self.keys) + np.bincount(dst, minlength=self.keys)
        return {
            "conserved": sum(state.values()) == self.keys * ycsb.BALANCE,
            "same_as_sums": state == dict(enumerate(balances.tolist())),
            "all_delivered": sum(each.rows for each in self.replies.look()) == rows,
        }

    def close(self) -> None:
        for progress in (self.calls, self.replies):
            progress.query.stop()
        self.runtime.close()
