"""A stream that runs twice, or is killed and started again at any time, gives the same state, and each reply once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Runtime
from headrace.core.events import Read
from headrace.durability.inbox.inbox import last_finished
from headrace.durability.store import open_store
from tests.spark.crashes import CONFIG, Row, app, loop, replies_of, start_query, stream, write_files
from tests.waiting import LONG_PATIENCE_S, eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]
ROOT = Path(__file__).parents[2]
FILES, ROWS = 10, 600
KILLS = int(os.environ.get("HEADRACE_KILLS", "2"))  # more take a quarter of a minute each
SEED = int(os.environ.get("HEADRACE_SEED", "6"))


class Killable:
    """A process of its own, with all that it starts."""

    def __init__(self, what: str, folder: Path, store: Path) -> None:
        self.log = folder / f"{what}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.crashes", what, str(folder), str(store)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},  # it lives for seconds
                start_new_session=True,
            )

    def kill(self, is_whole: bool = True) -> None:
        """With its JVM; or only the Python of its driver, whereupon the JVM may go on for a moment."""
        with contextlib.suppress(ProcessLookupError):
            if is_whole:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None


def taken(store: Path) -> int:
    """How many batches of the only query there are."""
    names = open_store(store).list("taken/")
    return 1 + max((last_finished(open_store(store), name.split("/")[1].split("@")[0]) for name in names), default=-1)


def packed(store: Path) -> list[Any]:
    """All state, as it is stored."""
    with Runtime(app, CONFIG, store=store) as runtime:
        found = runtime._ask(lambda token: Read(token))
    return sorted((operator, key, state) for operator, key, state in found if not operator.startswith("_"))


def unpacked(store: Path) -> dict[tuple[str, str], Any]:
    with Runtime(app, CONFIG, store=store) as runtime:
        return {(name, key): state for name in app.operators for key, state in runtime.state(name).items()}


def check(spark: Any, store: Path, written: dict[int, Row | None]) -> None:
    """Each row has one reply, or is a dead letter; in the order of the TIDs they give this state in a loop."""
    replies = spark.read.format("headrace.replies").load(str(store)).collect()
    replies.sort(key=lambda row: row.tid)
    uids = [int(row.result) if row.status == "ok" else int(row.error.split()[0]) for row in replies]
    assert len({row.request_id for row in replies}) == len({row.tid for row in replies}) == len(replies)
    dead = spark.read.format("headrace.dead").load(str(store)).collect()
    lost = [json.loads(row.args)[0] for row in dead]
    assert sorted(uids + lost) == sorted(written)
    assert sorted(lost) == [uid for uid, row in written.items() if row is None]
    went, state = loop([row for row in map(written.get, uids) if row is not None])
    assert {uid: row.status == "ok" for uid, row in zip(uids, replies, strict=True)} == went
    assert unpacked(store) == state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactly-once")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[int, Row | None]:
    return write_files(folder / "in", FILES, ROWS, SEED)


@pytest.fixture(scope="module")
def undisturbed(spark: Any, folder: Path, written: dict[int, Row | None]) -> list[Any]:
    store = folder / "undisturbed"
    with Runtime(app, CONFIG, store=store) as runtime:
        start_query(spark, folder, store).awaitTermination(120)
        runtime.drain()
    check(spark, store, written)
    return packed(store)


@contextlib.contextmanager
def running(what: str, folder: Path, store: Path) -> Iterator[Killable]:
    made = Killable(what, folder, store)
    try:
        yield made
    finally:
        made.kill()


def test_spark_and_engine_killed_together_at_random_points(
    spark: Any, folder: Path, written: dict[int, Row | None], undisturbed: list[Any]
) -> None:
    rng, store = random.Random(SEED), folder / "killed"
    points = sorted(rng.sample(range(1, FILES - 1), KILLS))
    for at in points:
        with running("all", folder, store) as both:
            eventually(lambda at=at: taken(store) >= at or both.is_over, LONG_PATIENCE_S)  # type: ignore[misc]
            time.sleep(rng.random() * 0.5)
            assert not both.is_over, both.log.read_text()
            both.kill(rng.random() < 0.7)
    with running("all", folder, store) as both:
        both.process.wait(240)
        assert both.process.returncode == 0, both.log.read_text()
    # Killed between two notes of its own, Spark puts two files into one batch, in an order of its own.
    assert taken(store) < FILES or packed(store) == undisturbed
    check(spark, store, written)
    replies = spark.read.format("headrace.replies").load(str(store)).select("request_id", "tid", "status")
    assert sorted(spark.read.parquet(replies_of(store)).collect()) == sorted(replies.collect())


def test_an_engine_killed_again_and_again_under_a_query_that_goes_on(
    spark: Any, folder: Path, written: dict[int, Row | None], undisturbed: list[Any]
) -> None:
    rng, store = random.Random(SEED), folder / "engine-killed"
    query: Any = None
    for at in sorted(rng.sample(range(FILES - 1), 4)):
        with running("engine", folder, store) as engine:
            if query is None:
                eventually(lambda: (store / "apps" / "current.json").exists(), LONG_PATIENCE_S)
                query = start_query(spark, folder, store)
            eventually(lambda at=at: taken(store) > at, LONG_PATIENCE_S)  # type: ignore[misc]
            time.sleep(rng.random() * 0.3)
            assert not engine.is_over, engine.log.read_text()
    with running("engine", folder, store):
        query.awaitTermination(120)
        eventually(lambda: taken(store) == FILES, LONG_PATIENCE_S)
    assert packed(store) == undisturbed
    check(spark, store, written)


def test_a_query_that_is_stopped_and_started_again_goes_on_where_it_was(
    spark: Any, folder: Path, written: dict[int, Row | None], undisturbed: list[Any]
) -> None:
    """Also if Spark has lost what it knew of its last batches: they are closed, and not taken again."""
    rng, store = random.Random(SEED), folder / "stopped"
    commits = store.with_name("stopped-checkpoint") / "commits"
    with Runtime(app, CONFIG, store=store) as runtime:
        for at in sorted(rng.sample(range(1, FILES - 1), 3)):
            query = start_query(spark, folder, store)
            eventually(lambda at=at: taken(store) >= at, LONG_PATIENCE_S)  # type: ignore[misc]
            query.stop()
            last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
            (commits / str(last)).unlink()
            (commits / f".{last}.crc").unlink(missing_ok=True)
        start_query(spark, folder, store).awaitTermination(120)
        runtime.drain()
    assert packed(store) == undisturbed
    check(spark, store, written)


def test_a_query_without_an_engine_fails_again_and_again_and_loses_nothing(
    spark: Any, folder: Path, written: dict[int, Row | None]
) -> None:
    """Spark aborts the batch whose commit has failed; it is closed all the same. Each repeat cuts the rows anew."""
    store = folder / "alone"
    options = {
        "function": "account.transfer",
        "key": "src",
        "args": "uid,dst,amount",
        "patience": "1",
        "checkpointLocation": str(folder / "alone-checkpoint"),
    }
    writer = stream(spark, folder).repartition(3).writeStream.format("headrace.calls").options(**options)
    with Runtime(app, CONFIG, store=store):
        pass
    for _ in range(2):
        with pytest.raises(Exception, match="has not finished after 1 s"):
            writer.trigger(availableNow=True).start(str(store)).awaitTermination(60)
    assert taken(store) == 0
    with Runtime(app, CONFIG, store=store) as runtime:
        runtime.drain()
        assert taken(store) == 2
        writer.trigger(availableNow=True).option("patience", "60").start(str(store)).awaitTermination(120)
        runtime.drain()
    check(spark, store, written)
