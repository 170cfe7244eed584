"""Batches that come as files: whatever Spark repeats and whoever dies, each row runs once, in the order it came."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headrace import Config, Runtime
from headrace.core.admission import Admission
from headrace.core.origin import BatchId
from headrace.core.program import Program
from headrace.durability.identity import with_checksum
from headrace.durability.inbox import sign_of_life
from headrace.durability.inbox.batch_cache import BatchCache
from headrace.durability.inbox.batch_calls import read_calls
from headrace.durability.inbox.inbox import (
    ClosedBatch,
    await_finished,
    close_batch,
    held,
    last_finished,
    mark_finished,
    waiting,
    write_segment,
)
from headrace.durability.inbox.sign_of_life import Sign, SignOfLife, Watch, sign_in
from headrace.durability.store import DirectoryStore, address_of, open_store
from headrace.errors import Fenced, StoreError, StreamError
from headrace.sim.disk import SimStore
from headrace.spark.sources import calls
from headrace.wire.messages import Run
from tests.durability.hand import memory
from tests.durability.inbox_world import (
    World,
    app,
    both,
    close,
    item,
    log_batch,
    notes,
    settle,
    start,
    table,
)
from tests.durability.test_s3 import Server, process, server
from tests.waiting import eventually

__all__ = ["process", "server"]  # fixtures
WORLDS = int(120 * float(os.environ.get("HEADRACE_EXAMPLES", "1")))


# --- a world ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, WORLDS, 20))
def test_each_row_runs_once_whatever_spark_repeats_and_whoever_dies(first: int) -> None:
    """Killed before any operation on the store, replaced while they go on, recut, aborted, without power, and with a
    store that fails: see `World.check` for what holds in the end."""
    for seed in range(first, first + 20):
        world = World(seed, can_append=seed % 3 != 2, faults=(0, 0, 0.003, 0.02)[seed % 4])
        try:
            world.run().check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
def test_what_is_closed_first_counts_however_a_repeat_cuts_the_rows(can_append: bool) -> None:
    store = memory(can_append)
    start(store)
    close(store, 0, table([1, 2]), table([3]))
    close(store, 0, table([3, 1]), table([2]))
    engine = settle(start(store))
    assert notes(engine) == [1, 2, 3]
    close(store, 0, table([2]), table([3, 1]))
    assert waiting(store) == [], "it is known by its number"
    store.create("inbox/q@000000000000", b"whatever")  # by one who has looked before it was taken
    assert notes(settle(engine)) == [1, 2, 3]
    assert waiting(store) == []


@pytest.mark.parametrize("epochs", range(4))
def test_a_batch_whose_name_outlives_its_segments_is_taken_away_without_a_look_at_them(epochs: int) -> None:
    """The engine ends between the last epoch of a batch and the removal of its name. Later engines need its rows no
    more, and delete them."""
    store = memory()
    engine = start(store, epoch_transactions_max=1)
    closed = close(store, 0, table([1, 2, 3]))
    log_batch(engine, epochs)
    engine = start(store, snapshots_kept=1)
    for number in range(2):
        engine.hand.run(f"more{number}", [(both, "b", 1)])
        engine.hand.take_snapshot()
    assert not store.exists(closed.segments[0].name)
    assert waiting(store) == [("q", 0)]
    engine = settle(start(store))
    assert notes(engine) == [1, 2, 3]
    assert (waiting(store), held(store), last_finished(store, "q")) == ([], set(), 0)
    close(store, 1, table([4]))
    assert notes(settle(engine)) == [1, 2, 3, 4]


def test_a_segment_is_there_as_long_as_a_snapshot_that_is_kept_could_need_it() -> None:
    store = memory()
    engine = start(store, snapshots_kept=2)
    engine.hand.run("before", [(both, "b", 1)])
    engine.hand.take_snapshot()
    closed = close(store, 0, table([1, 2]))
    orphan = write_segment(store, "q", 0, 7, table([9]))
    early = write_segment(store, "q", 1, 7, table([9]))
    settle(engine)
    for number, is_there in enumerate([True, True, False]):  # none covers it, one of two does, both do
        assert store.exists(closed.segments[0].name) == is_there, number
        assert store.exists(orphan.name) == is_there, number
        engine.hand.run(f"more{number}", [(both, "b", 1)])
        engine.hand.take_snapshot()
    assert store.exists(early.name), "an attempt of a batch that was not closed yet"


def test_segments_of_a_query_that_is_forgotten_are_deleted_too() -> None:
    store = memory()
    engine = start(store, snapshots_kept=1, sources_max=1)
    for source in ("q", "r", "s"):
        close(store, 0, table([1]), source=source)
        settle(engine)
    for number in range(3):
        engine.hand.run(f"more{number}", [(both, "b", 1)])
        engine.hand.take_snapshot()
    assert store.list("calls/") == []


def test_a_query_that_the_engine_has_forgotten_goes_on_where_the_store_says() -> None:
    store = memory()
    engine = start(store, sources_max=1)
    for number in range(3):
        for source in ("q", "r"):
            close(store, number, table([number]), source=source)
            settle(engine)
        engine = start(store, sources_max=1)
        engine.hand.settle()
    assert notes(engine) == [0, 0, 1, 1, 2, 2]
    assert held(store) == set()


def test_also_after_the_limit_was_raised() -> None:
    store = memory()
    engine = start(store, sources_max=1)
    for source in ("q", "r"):
        close(store, 0, table([0]), source=source)
        settle(engine)
    for number in (1, 2):
        engine.hand.take_snapshot()
        engine = start(store, sources_max=5)
        close(store, number, table([number]), source="q")
        settle(engine)
    assert notes(engine) == [0, 0, 1, 2]
    assert held(store) == set()


# --- who may refuse ---------------------------------------------------------------------------------------------------


def test_an_engine_that_was_replaced_does_not_refuse_what_its_successor_would_take() -> None:
    """It has missed a batch, and takes the next one for a gap."""
    store = memory()
    old = start(store)
    close(store, 0, table([1]))
    settle(old)
    new = start(store)
    close(store, 1, table([2]))
    settle(new)
    close(store, 2, table([3]))
    with pytest.raises(Fenced):
        settle(old)
    assert waiting(store) == [("q", 2)]
    assert notes(settle(new)) == [1, 2, 3]
    assert held(store) == set()


def test_a_gap_is_refused_by_the_source_and_by_the_engine() -> None:
    store = memory()
    engine = start(store)
    close(store, 0, table([1]))
    settle(engine)
    with pytest.raises(StreamError, match=r"sent batch 2, but 1 was expected.*new checkpoint"):
        close(store, 2, table([2]))
    closed = ClosedBatch("r", 3, "item.note", [write_segment(store, "r", 3, 0, table([2]))])
    store.create("taken/r@000000000002", b"")  # of a store that this is a copy of
    assert close_batch(store, closed)
    settle(engine)
    assert waiting(store) == []
    with pytest.raises(StreamError, match="sent batch 3, but 0 was expected"):
        await_finished(store, BatchId("r", 3), 1)
    assert not store.exists(closed.segments[0].name)
    assert notes(engine) == [1]


def test_a_batch_that_comes_after_all_runs_though_the_one_behind_it_was_refused() -> None:
    store = memory()
    engine = start(store)
    closed = ClosedBatch("q", 1, "item.note", [write_segment(store, "q", 1, 0, table([2]))])
    store.create("inbox/q@000000000001", with_checksum(msgspec.to_builtins(closed)))
    settle(engine)
    assert waiting(store) == [], "a gap"
    close(store, 0, table([1]))
    close(store, 1, table([2]))
    assert notes(settle(engine)) == [1, 2]


def test_what_the_store_says_has_run_is_never_taken_for_new_without_its_rows() -> None:
    """The log is older than the rest of the store: somebody has brought it back from a backup."""
    store = memory()
    engine = start(store)
    close(store, 0, table([1]))
    engine.reader.look(lambda *item: None)  # it is handed over, and not logged
    store.create("taken/q@000000000000", b"")
    engine = settle(start(store))
    assert notes(engine) == []
    assert last_finished(store, "q") == 0
    close(store, 1, table([2]))
    settle(engine)
    with pytest.raises(StreamError, match="sent batch 1, but 0 was expected"):
        await_finished(store, BatchId("q", 1), 1)


def test_a_list_that_shows_a_batch_and_not_the_one_before_it_is_no_gap() -> None:
    """It may: both came while the list was made."""

    class Late(SimStore):
        def list(self, prefix: str) -> list[str]:
            return [name for name in super().list(prefix) if name != self.hidden]

        hidden = "inbox/q@000000000000"

    disk = memory().disk
    store = Late(disk, "late")
    engine = start(store)
    close(store, 0, table([1]))
    close(store, 1, table([2]))
    settle(engine)
    assert notes(engine) == []
    store.hidden = ""
    assert notes(settle(engine)) == [1, 2]


def test_one_name_is_not_taken_for_the_beginning_of_another() -> None:
    store = memory()
    engine = start(store)
    close(store, 0, table([1]), source="load@2024")
    settle(engine)
    assert last_finished(store, "load") == -1
    close(store, 0, table([2]), source="load")
    assert notes(settle(engine)) == [1, 2]


# --- batches that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoiled", [b"", b"junk", None], ids=["empty", "junk", "missing"])
def test_a_batch_with_a_broken_segment_is_held_and_taken_when_it_is_mended(spoiled: bytes | None) -> None:
    store = memory()
    engine = start(store)
    closed = close(store, 0, table([1]))
    name = closed.segments[0].name
    sound = store.get(name)
    store.delete(name)
    if spoiled is not None:
        store.put(name, spoiled)
    close(store, 1, table([2]))
    settle(engine)
    with pytest.raises(StreamError, match=r"batch 0 of query q .* backup"):
        await_finished(store, BatchId("q", 0), 60)
    assert waiting(store) == [("q", 0), ("q", 1)], "nothing is lost"
    engine = settle(start(store))
    assert notes(engine) == []
    store.put(name, sound)
    engine = settle(start(store))
    assert notes(engine) == [1, 2]
    await_finished(store, BatchId("q", 0), 1)
    assert held(store) == set()


def test_whatever_stands_in_the_inbox_does_not_stop_the_rest() -> None:
    store = memory()
    engine = start(store)
    store.create("inbox/README", b"what is this?")
    store.create("inbox/p@000000000000", b"no JSON")
    close(store, 0, table([1]))
    settle(engine)
    assert notes(engine) == [1]
    with pytest.raises(StreamError, match="Restore it from a backup"):
        await_finished(store, BatchId("p", 0), 60)


# --- Spark's writer ---------------------------------------------------------------------------------------------------


@pytest.fixture
def spark_store(monkeypatch: pytest.MonkeyPatch) -> SimStore:
    store = memory()
    start(store)
    monkeypatch.setattr(calls, "store_of", lambda options: store)
    return store


def stream_writer(**options: str) -> calls.StreamWriter:
    schema = Schema(["key", "n"])
    return calls.StreamWriter({"path": "store", "function": "item.note", "args": "n", **options}, schema)  # type: ignore[arg-type]


class Schema(list[str]):
    def fieldNames(self) -> list[str]:  # noqa: N802 Spark's name
        return self


def arrow(*uids: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"key": ["a"] * len(uids), "n": list(uids)})


def test_an_abort_after_a_commit_that_failed_leaves_what_is_closed(spark_store: SimStore) -> None:
    """Spark aborts what it could not commit, and the commit fails when no engine takes the batch before."""
    for number in range(2):
        writer = stream_writer()
        messages = [writer._write(arrow(number), "q", number, 0)]
        writer.patience_s = 0
        try:
            writer.commit(list(messages), number)
        except StreamError:
            assert number == 1
            writer.abort(list(messages), number)
    failed: list[Any] = [writer._write(arrow(7), "q", 2, 0), None]
    writer.abort(failed, 2)
    assert len(spark_store.list("calls/")) == 2, "of the two that are closed"
    assert notes(settle(start(spark_store))) == [0, 1]


def test_an_abort_when_the_batch_is_in_the_log_leaves_it(spark_store: SimStore) -> None:
    writer = stream_writer()
    messages = [writer._write(arrow(1, 2), "q", 0, 0)]
    writer.commit(list(messages), 0)
    log_batch(start(spark_store), 0)
    writer.abort(list(messages), 0)
    assert notes(settle(start(spark_store))) == [1, 2]
    writer.abort(list(messages), 0)
    assert notes(settle(start(spark_store))) == [1, 2]


@pytest.mark.parametrize("name", ["write-mine", "x" * 180, "../x", "a b", ""])
def test_a_table_has_a_name_that_objects_can_have(name: str, spark_store: SimStore) -> None:
    options = {"path": "store", "function": "item.note", "args": "n", "name": name}
    if name:
        with pytest.raises(StreamError, match="name"):
            calls.TableWriter(options, Schema(["key", "n"]))  # type: ignore[arg-type]
    else:
        assert calls.TableWriter(options, Schema(["key", "n"])).query.startswith("write-")  # type: ignore[arg-type]


# --- a runtime, with its thread ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_a_runtime_takes_batches_on_a_real_store_once(kind: str, tmp_path: Path, request: Any) -> None:
    server: Server | None = request.getfixturevalue("server") if kind == "bucket" else None
    store: Any = open_store(tmp_path / "store") if server is None else server.store()
    for run in range(3):
        with Runtime(app, Config(snapshots_kept=1), store=store) as runtime:
            for number in range(2 * run, 2 * run + 2):
                if server is not None:
                    server.spoil(("lost", "late", "refused")[run])
                uids = [100 * number + at for at in range(50)]
                close(store, number, table(uids[:20]), table(uids[20:]))
                close(store, number, table(uids[30:]), table(uids[:30]))
                await_finished(store, BatchId("q", number), 60)
            with pytest.raises(StreamError, match="was sent again with 2"):
                close(store, number, table([0]), table([1]))
            expected = [100 * batch + at for batch in range(number + 1) for at in range(50)]
            assert runtime.get(item, "a") == expected
            assert runtime.metrics()["source_rows"] == 100
    assert last_finished(store, "q") == 5
    assert waiting(store) == []


def test_a_runtime_whose_inbox_fails_goes_on_and_can_be_closed(tmp_path: Path) -> None:
    store: Any = Flaky(tmp_path / "store")
    runtime = Runtime(app, store=store)
    for number in range(2):
        store.is_flaky = True
        close(open_store(tmp_path / "store"), number, table([number]))
        eventually(lambda: store.failures > 3)
        assert runtime.get(item, "a", []) == list(range(number)), "it answers meanwhile"
        store.is_flaky, store.failures = False, 0
        eventually(lambda: not waiting(open_store(tmp_path / "store")))
    store.is_flaky = True
    runtime.close()
    with Runtime(app, store=tmp_path / "store") as again:
        assert again.get(item, "a") == [0, 1]


class Flaky(DirectoryStore):
    is_flaky = False
    failures = 0

    def list(self, prefix: str) -> list[str]:
        if self.is_flaky and prefix.startswith("inbox/"):
            self.failures += 1
            raise StoreError("the network is down")
        return super().list(prefix)


def test_who_waits_for_a_batch_that_is_held_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with Runtime(app, store=store) as runtime:
        segment = write_segment(store, "q", 0, 0, table([1]))
        store.delete(segment.name)
        close_batch(store, ClosedBatch("q", 0, "item.note", [segment]))
        with pytest.raises(StreamError, match=f"blocked: {segment.name}.*it is missing"):
            runtime.drain(20)
        assert runtime.get(item, "a") is None, "it goes on"


def test_an_engine_shows_that_it_lives_and_takes_the_sign_away_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_of_life, "EVERY_S", 0.01)
    store = open_store(tmp_path / "store")
    old = Runtime(app, store=tmp_path / "store")
    eventually(lambda: getattr(sign_in(store), "count", 0) > 2)
    with Runtime(app, store=tmp_path / "store"):
        eventually(lambda: getattr(sign_in(store), "count", 0) > 2)
    old.close()
    assert sign_in(store) is None


@pytest.mark.parametrize("left_behind", [None, Sign("killed", 7, 0.01)])
def test_who_waits_for_an_engine_that_does_not_run_is_warned_once_and_waits_on(
    left_behind: Sign | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sign_of_life, "PATIENCE_S", 0.1)
    store = open_store(tmp_path / "store")
    with Runtime(app, store=tmp_path / "store"):
        pass
    if left_behind is not None:
        store.put("alive", msgspec.json.encode(left_behind))
    close(store, 0, table([1]))
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(await_finished, store, BatchId("q", 0), 60)
        eventually(lambda: "no app seems to run" in caplog.text)
        assert not waits.done()
        with Runtime(app, store=tmp_path / "store") as runtime:
            waits.result(60)
            assert runtime.get(item, "a") == [1]
    assert caplog.text.count("no app seems to run") == 1
    assert str(tmp_path / "store") in caplog.text


def test_who_waits_for_an_engine_that_is_slow_is_not_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sign_of_life, "PATIENCE_S", 0.2)
    store = open_store(tmp_path / "store")
    with Runtime(app, store=tmp_path / "store"):
        eventually(lambda: sign_in(store) is not None)
        watch = Watch(store)
        watch.look()
        SignOfLife(store).give()
        watch.wait()
    assert "no app" not in caplog.text


def test_a_runtime_that_is_replaced_leaves_the_inbox_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    old = Runtime(app, store=tmp_path / "store")
    close(store, 0, table([1]))
    eventually(lambda: last_finished(store, "q") == 0)
    with Runtime(app, store=tmp_path / "store") as new:
        for number in (1, 2, 3):
            close(store, number, table([number + 1]))
            await_finished(store, BatchId("q", number - 1), 20)
        await_finished(store, BatchId("q", 3), 20)
        assert new.get(item, "a") == [1, 2, 3, 4]
        assert held(store) == set()
    old.close()


def test_take_away_never_lowers_what_was_taken() -> None:
    store = memory()
    for number in (0, 1, 2, 1):
        mark_finished(store, BatchId("q", number))
    assert last_finished(store, "q") == 2


def test_a_batch_that_comes_again_with_other_rows_is_refused_whether_it_has_run_or_not(tmp_path: Path) -> None:
    """As after a loss of power that took away what Spark had planned."""
    store = open_store(tmp_path)

    def closed(rows: int) -> ClosedBatch:
        table = pa.table({"key": ["a"] * rows, "arg0": [1] * rows})
        return ClosedBatch("q", 0, "account.deposit", [write_segment(store, "q", 0, 0, table)])

    assert close_batch(store, closed(3))
    assert not close_batch(store, closed(3))
    with pytest.raises(StreamError, match="was closed with 3 rows, and was sent again with 4"):
        close_batch(store, closed(4))
    mark_finished(store, BatchId("q", 0))
    assert not close_batch(store, closed(3))
    with pytest.raises(StreamError, match="was closed with 3 rows, and was sent again with 2"):
        close_batch(store, closed(2))


def test_a_bucket_is_opened_again_elsewhere_with_its_options() -> None:
    store = open_store("s3://bucket/bank?endpoint=http://127.0.0.1:1&region=eu-west-1&allow_http=true")
    assert store.url == "s3://bucket/bank"
    assert open_store(address_of(store)).endpoint == store.endpoint == "http://127.0.0.1:1"  # type: ignore[attr-defined]


def test_a_worker_judges_rows_by_the_limits_that_they_were_taken_under(tmp_path: Path) -> None:
    """An id that was too long when the batch was closed, and would not be today."""
    store = open_store(tmp_path)
    rows = pa.table({"key": ["a", "b"], "arg0": [1, 2], "id": ["short", "l" * 300]})
    closed = ClosedBatch("q", 0, "item.note", [write_segment(store, "q", 0, 0, rows)])
    taken = read_calls(store, closed, Admission(Program(app, Config())))
    assert list(taken.refused) == [1]
    cache = BatchCache(store, Program(app, Config(request_id_bytes_max=1_000)))
    run = Run(1, "serial", (1, 2, 1), 0, [], [], None, [], [], stored=[(taken.origin.stored or b"", 0, 1)])
    assert cache.fill(run).keys == ["a"]
