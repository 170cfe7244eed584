"""Streams whose offsets are epochs: between two offsets there is each epoch once, whatever happens to the log.

Spark is played here by the test: it plans with one reader, reads with others (copied as Spark does), and repeats.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles

from headrace.durability.log.log import Log, bounds
from headrace.durability.store import Store
from headrace.errors import StreamError
from headrace.spark.sources import epoch_streams
from headrace.spark.sources.epoch_streams import Epochs, EpochStream, EpochTable
from tests.durability.memory import BOTH, Disk

ORIGIN = 100  # the epoch of record 1 is 101
disks: dict[str, Disk] = {}  # by path: a reader that travels takes no disk along


class Numbers(Epochs):
    """A row for each epoch, with what its record holds."""

    folder, what = "replies", "the numbers"
    option_names = ()
    schema = pa.schema([("epoch", pa.int64()), ("data", pa.binary())])

    def batches(self, records: Iterator[tuple[int, bytes]], mark: Any = None) -> Iterator[pa.RecordBatch]:
        for epoch, data in records:
            yield pa.record_batch({"epoch": [epoch], "data": [data]})

    def origin(self, store: Store) -> int:
        return ORIGIN

    def cluster(self, store: Store) -> str:
        return "mine"

    def open(self) -> Store:
        return disks[self.options["path"]].store()


def begin(can_append: bool, options: Mapping[str, str] | None = None) -> tuple[Disk, Log, EpochStream]:
    disks["memory://here"] = disk = Disk(can_append)
    return disk, Log.take_over(disk.store(), "replies", segment_bytes=400), stream(**(options or {}))


def at(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "cluster": "mine"}


def stream(**options: Any) -> EpochStream:
    return EpochStream(Numbers({"path": "memory://here"} | {name: str(value) for name, value in options.items()}))


def read(reader: Any, partitions: Any) -> list[tuple[int, bytes]]:
    """As executors do: with copies."""
    rows = []
    for partition in pickle.loads(pickle.dumps(partitions)):  # noqa: S301 what Spark does
        for batch in pickle.loads(pickle.dumps(reader)).read(partition):  # noqa: S301
            rows += list(zip(*batch.to_pydict().values(), strict=True))
    return rows


@pytest.fixture(autouse=True)
def is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_streams, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(epoch_streams, "PARTITION_BYTES_MIN", 200)


@BOTH
@pytest.mark.parametrize("seed", range(10))
def test_each_epoch_is_delivered_once_and_a_repeat_is_the_same(can_append: bool, seed: int) -> None:
    random = Random(seed)
    disk, log, planner = begin(can_append, {"partitions": str(random.randint(1, 4))})
    written: list[bytes] = []
    start, seen, last_batch = planner.initialOffset(), [], None
    assert start == at(ORIGIN)
    for _ in range(60):
        match random.choice(["append", "append", "batch", "batch", "restart", "repeat", "take over"]):
            case "append":
                some = [random.randbytes(random.randrange(200)) for _ in range(random.randrange(1, 9))]
                log.append(some)
                written += some
            case "take over":
                log = Log.take_over(disk.store(), "replies", segment_bytes=random.choice([1, 400]))
            case "restart":
                planner = stream(partitions=random.randint(1, 4))
            case "repeat" if last_batch is not None:
                first, end, rows = last_batch
                again = stream(partitions=random.randint(1, 4))  # the query was started again
                assert sorted(read(again, again.partitions(first, end))) == rows
            case "batch":
                limit = random.choice([ReadAllAvailable(), ReadMaxFiles(random.randint(1, 5))])
                end = planner.latestOffset(start, limit)
                assert end["epoch"] == min(ORIGIN + len(written), start["epoch"] + getattr(limit, "max_files", 1 << 30))
                partitions = planner.partitions(start, end)
                assert len(partitions) <= 4
                if random.random() < 0.2:  # after it was planned
                    log = Log.take_over(disk.store(), "replies", segment_bytes=400)
                rows = read(planner, partitions)
                assert rows == sorted(rows)
                seen += rows
                last_batch = start, end, rows
                start = end
                if random.random() < 0.8:
                    planner.commit(end)
    assert seen == [(ORIGIN + number, data) for number, data in enumerate(written[: len(seen)], 1)]
    assert len(seen) == start["epoch"] - ORIGIN
    assert sorted(read(stream().epochs, EpochTable(stream().epochs).partitions())) == [
        (ORIGIN + number, data) for number, data in enumerate(written, 1)
    ]


def test_a_query_that_ends_with_what_there_is_does_not_see_what_comes_later() -> None:
    _, log, planner = begin(True, {"maxEpochsPerBatch": "2"})
    log.append([b"a", b"b", b"c"])
    limit = planner.getDefaultReadLimit()
    planner.prepareForTriggerAvailableNow()
    log.append([b"d"])
    ends = [planner.latestOffset(at(ORIGIN + epoch), limit)["epoch"] - ORIGIN for epoch in (0, 2, 3)]
    assert ends == [2, 3, 3]


def test_a_checkpoint_of_another_store_is_refused() -> None:
    _, log, planner = begin(True)
    log.append([b"a", b"b"])
    other = {"epoch": ORIGIN, "cluster": "another"}
    for ask in (
        lambda: planner.latestOffset(other, ReadAllAvailable()),
        lambda: planner.partitions(other, at(ORIGIN + 1)),
        lambda: planner.partitions(at(ORIGIN), other | {"epoch": ORIGIN + 1}),
    ):
        with pytest.raises(StreamError, match=r"its cluster is another, this one is mine.* new checkpoint location"):
            ask()
    assert planner.latestOffset({"epoch": ORIGIN}, ReadAllAvailable()) == at(ORIGIN + 2)


def test_an_offset_never_goes_back_also_if_the_log_does() -> None:
    """Its end was seen before it was durable, and power failed; the app, when it starts, writes it again."""
    _, log, planner = begin(True)
    log.append([b"a"])
    ahead = at(ORIGIN + 3)
    assert planner.latestOffset(ahead, ReadAllAvailable()) == ahead
    with pytest.raises(StreamError, match=f"the numbers of epoch {ORIGIN + 2} were there and are now missing"):
        read(planner, planner.partitions(at(ORIGIN + 1), ahead))
    log.append([b"b", b"c"])
    assert len(read(planner, planner.partitions(at(ORIGIN + 1), ahead))) == 2


@BOTH
def test_what_is_retired_is_named_with_the_oldest_that_is_kept(can_append: bool) -> None:
    disk, log, planner = begin(can_append)
    for number in range(20):
        log.append([bytes([number]) * 300])
    end = planner.latestOffset(planner.initialOffset(), ReadAllAvailable())
    partitions = planner.partitions(at(ORIGIN), end)
    log.retire(10)
    oldest = bounds(disk.store(), "replies")[0] + ORIGIN
    assert oldest > ORIGIN + 5
    text = f"the numbers of epoch {ORIGIN + 1} are no longer kept: those of epoch {oldest} are the oldest"
    with pytest.raises(StreamError, match=text):
        read(planner, partitions)
    with pytest.raises(StreamError, match=text):
        planner.partitions(at(ORIGIN), end)
    with pytest.raises(StreamError, match=text):
        stream(startingEpoch=ORIGIN + 1).initialOffset()
    with pytest.raises(StreamError, match=text):
        EpochTable(stream(startingEpoch=ORIGIN + 1).epochs).partitions()
    assert stream().initialOffset() == at(oldest - 1)
    assert stream(startingEpoch=oldest + 2).initialOffset() == at(oldest + 1)
    assert stream(startingEpoch=ORIGIN + 21).initialOffset() == at(ORIGIN + 20)
    with pytest.raises(StreamError, match=f"startingEpoch is {ORIGIN + 22}, but the last epoch so far"):
        stream(startingEpoch=ORIGIN + 22).initialOffset()


def test_a_bucket_is_not_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_streams, "LOOK_AGAIN_S", 3600.0)
    _, log, planner = begin(False)
    start = planner.initialOffset()
    log.append([b"a"])
    assert planner.latestOffset(start, ReadAllAvailable()) == start
    monkeypatch.setattr(epoch_streams, "LOOK_AGAIN_S", 0.0)
    assert planner.latestOffset(start, ReadAllAvailable()) == at(ORIGIN + 1)


def test_a_small_batch_is_read_by_one_task_and_a_large_one_by_as_many_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epoch_streams, "PARTITION_BYTES_MIN", 10_000)
    _, log, planner = begin(True, {"partitions": "3"})
    start = planner.initialOffset()
    sizes = []
    for total in (9_000, 25_000, 900_000):
        log.append([bytes(total // 100)] * 100)
        end = planner.latestOffset(start, ReadAllAvailable())
        sizes.append(len(planner.partitions(start, end)))
        start = end
    assert sizes == [1, 2, 3]
