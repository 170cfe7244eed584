"""Runtimes with a store: real threads, real files, real processes that are killed, and a real server that speaks S3."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace import App, Config
from headrace.core.origin import FromSource
from headrace.durability.log.log import bounds
from headrace.durability.store import DirectoryStore, Store
from headrace.errors import (
    BadRequest,
    ConfigError,
    Fenced,
    HeadraceError,
    NotDeterministic,
    Stopped,
    StoreError,
    StoreFull,
    WrongStore,
)
from headrace.runtime.client import Replies
from headrace.runtime.cluster import Cluster
from headrace.runtime.inprocess import Runtime
from headrace.sim.disk import SimStore
from tests.durability.hand import (
    Hand,
    add,
    after_power_loss,
    app,
    ask,
    drop,
    exhaust,
    exhausted,
    memory,
    move,
    put,
    turned,
    weather,
)
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parent.parent.parent
CALLS: list[Any] = [
    (add, "a", 1),
    (add, "b", 2),
    (move, "a", "b", 1),
    (move, "a", "b", 500),
    (drop, "b"),
    (ask, "b", "a"),
]
SMALL = Config(epoch_transactions_max=2, segment_bytes_max=1, snapshot_interval_us=1, snapshots_kept=1)


class Fussy:
    """A store that refuses what it is told to refuse."""

    def __init__(self, store: Store) -> None:
        self.store, self.url, self.can_append = store, store.url, store.can_append
        self.refuses: Callable[[str, str], HeadraceError | None] = lambda operation, name: None

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self.store, operation)

        def checked(name: str, *rest: Any) -> Any:
            error = self.refuses(operation, name)
            if error is not None:
                if operation == "append":
                    method(name, rest[0][: len(rest[0]) // 2])  # a part of it got there
                raise error
            return method(name, *rest)

        return checked


def full(prefix: str) -> Callable[[str, str], HeadraceError | None]:
    """No room for what begins like this."""

    def refuses(operation: str, name: str) -> HeadraceError | None:
        is_write = operation in ("put", "create", "append") and name.startswith(prefix)
        return StoreFull(f"no room for {name}") if is_write else None

    return refuses


# --- a restart --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Config(), SMALL], ids=["usual", "small"])
def test_what_was_answered_is_there_after_a_restart_and_ids_get_the_same_bytes(tmp_path: Path, config: Config) -> None:
    with Runtime(app) as runtime:
        expected = list(runtime.client.options(request_id="all").batch(CALLS))
        state = runtime.state("item")
    with Runtime(app, config, store=tmp_path / "store") as runtime:
        replies = list(runtime.client.options(request_id="all").batch(CALLS))
        assert [(r.tid, r.result, r.failure) for r in replies] == [(r.tid, r.result, r.failure) for r in expected]
        assert runtime.state("item") == state
    for _ in range(3):
        with Runtime(app, config, store=str(tmp_path / "store")) as runtime:
            assert list(runtime.client.options(request_id="all").batch(CALLS)) == replies
            assert runtime.state("item") == state
            assert runtime.get("item", "a") == state["a"]
            assert runtime.metrics()["committed"] == 5
            assert runtime.metrics()["aborted"] == 1


def test_a_runtime_that_was_closed_leaves_nothing_to_replay(tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.batch(CALLS)
    runs: list[int] = []

    class Counting(Hand):
        def _apply(self, node: int, effects: list[Any]) -> None:
            runs.append(len(self.core.backlog))
            super()._apply(node, effects)

    Counting(DirectoryStore(tmp_path), app)
    assert runs == [0]


def test_snapshots_are_taken_when_asked_for_and_only_with_a_store(tmp_path: Path) -> None:
    with Runtime(app) as runtime, pytest.raises(BadRequest, match="--store"):
        runtime.snapshot()
    with Runtime(app, store=tmp_path) as runtime:
        assert runtime.snapshot() == {"epoch": 0}
        runtime.client.call(add, "a", 1)
        assert runtime.snapshot() == {"epoch": 1}
        assert runtime.snapshot() == {"epoch": 1}


def test_neither_files_nor_threads_are_left_open(tmp_path: Path) -> None:
    def start() -> None:
        with Runtime(app, SMALL, store=tmp_path) as runtime:
            runtime.client.batch(CALLS)

    start()
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(8):
        start()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert threading.active_count() <= threads


def test_a_batch_of_a_source_runs_once_across_restarts(tmp_path: Path) -> None:
    rows: list[Any] = [("a", 1), ("b", 2), ("a", 3)]

    def send(runtime: Runtime, number: int) -> Replies:
        keys, args = [key for key, _ in rows], [(amount,) for _, amount in rows]
        batch = runtime.admission.admit_columns(FromSource(f"q/{number}", "q", number), add, keys, args)
        return Replies(runtime.submit(batch).result(PATIENCE_S), runtime.engine.program.values.unseal)

    seen = []
    for number in (0, 0, 1, 1, 2):
        with Runtime(app, SMALL, store=tmp_path) as runtime:
            seen.append(list(send(runtime, number)))
            runtime.client.call(add, "other", 1)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    with Runtime(app, store=tmp_path) as runtime:
        assert runtime.state("item") == {"a": 12, "b": 6, "other": 5}


# --- kill -9 ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from headrace import Config
from headrace.runtime.inprocess import Runtime
from tests.durability.hand import add, app
config = Config(epoch_transactions_max=3, segment_bytes_max=2_000, snapshot_interval_us=2_000, snapshots_kept=1)
runtime = Runtime(app, config, store=sys.argv[1])
print("state", runtime.get("item", "sum", 0), flush=True)
for number in range(int(sys.argv[2]), 1_000_000):
    replies = runtime.client.options(request_id=f"id{number}").batch([(add, "sum", 1)] * 5)
    print("acknowledged", number, *replies.results, flush=True)
"""


def test_a_process_killed_again_and_again_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    acknowledged: dict[int, list[int]] = {}
    for after in (1, 30):
        first = max(acknowledged, default=-1) + 1
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(first)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                words = line.split()
                if words[0] == "acknowledged":
                    acknowledged[int(words[1])] = list(map(int, words[2:]))
                    if len(acknowledged) % (after + 1) == after:
                        child.send_signal(signal.SIGKILL)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    with Runtime(app, store=tmp_path) as runtime:
        number = max(acknowledged) + 1  # perhaps it ran, and nobody heard
        acknowledged[number] = runtime.client.options(request_id=f"id{number}").batch([(add, "sum", 1)] * 5).results
        assert [one for number in sorted(acknowledged) for one in acknowledged[number]] == list(
            range(1, 5 * len(acknowledged) + 1)
        )
        for number, results in acknowledged.items():
            assert runtime.client.options(request_id=f"id{number}").batch([(add, "sum", 1)] * 5).results == results
        assert runtime.state("item") == {"sum": 5 * len(acknowledged)}


# --- several processes ------------------------------------------------------------------------------------------------


def test_a_store_moves_from_one_process_to_workers_and_back(tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        first = list(runtime.client.options(request_id="first").batch(CALLS))
    with Cluster(app, 2, SMALL, store=tmp_path) as cluster:
        assert list(cluster.client.options(request_id="first").batch(CALLS)) == first
        then = list(cluster.client.options(request_id="then").batch(CALLS))
        os.kill(cluster.processes()[1], signal.SIGKILL)
        later = list(cluster.client.options(request_id="later").batch(CALLS))
        assert list(cluster.client.options(request_id="then").batch(CALLS)) == then
        assert cluster.snapshot()["epoch"] > 0
        last = list(cluster.client.options(request_id="last").batch(CALLS))
        state = cluster.state("item")
        broken = Runtime(app, store=tmp_path)  # takes over while the cluster has not been closed
    with broken as runtime:
        for name, replies in (("first", first), ("then", then), ("later", later), ("last", last)):
            assert list(runtime.client.options(request_id=name).batch(CALLS)) == replies
        assert runtime.state("item") == state
    with Runtime(app) as runtime:
        for _ in range(4):
            runtime.client.batch(CALLS)
        assert runtime.state("item") == state


# --- takeover ---------------------------------------------------------------------------------------------------------


def check_takeover(store: Any) -> None:
    first = Runtime(app, store=store)
    replies = list(first.client.options(request_id="all").batch(CALLS))
    with Runtime(app, store=store) as second:
        state = second.state("item")
        with pytest.raises(Stopped, match="has taken over"):
            first.client.options(request_id="zombie").call(add, "a", 1)
        with pytest.raises(Fenced):
            first.wait()
        first.close()
        with pytest.raises(Stopped):
            first.state("item")
        assert second.state("item") == state
        assert list(second.client.options(request_id="all").batch(CALLS)) == replies
        assert second.client.options(request_id="zombie").call(add, "a", 1) == state["a"] + 1
        third = Runtime(app, store=store)
        with pytest.raises(Stopped):
            second.state("item")
        assert third.state("item")["a"] == state["a"] + 1
        third.close()
        with Runtime(app, store=store) as onlooker:  # it has nothing to write
            assert onlooker.state("item")["a"] == state["a"] + 1
            with Runtime(app, store=store) as last:
                with pytest.raises(Stopped, match="has taken over"):
                    onlooker.state("item")
                assert last.state("item")["a"] == state["a"] + 1


def test_whoever_is_superseded_answers_nothing_any_more_and_says_why(tmp_path: Path) -> None:
    check_takeover(tmp_path)


@pytest.mark.parametrize("takers", [5])
def test_clients_that_repeat_their_ids_lose_nothing_while_runtimes_take_over_from_each_other(
    tmp_path: Path, takers: int
) -> None:
    clients, each = 4, 60
    runtimes = [Runtime(app, SMALL, store=tmp_path)]
    results: list[dict[str, int]] = [{} for _ in range(clients)]
    progress = threading.Semaphore(0)

    def work(own: dict[str, int], name: str) -> None:
        for number in range(each):
            request_id = f"{name}-{number}"
            while request_id not in own:
                try:
                    own[request_id] = runtimes[-1].client.options(request_id=request_id).call(add, "sum", 1)
                except Stopped:
                    continue  # somebody else has the store now
            progress.release()

    threads = [threading.Thread(target=work, args=(own, f"client{at}")) for at, own in enumerate(results)]
    for thread in threads:
        thread.start()
    for _ in range(takers):
        for _ in range(clients * each // (takers + 1)):
            assert progress.acquire(timeout=PATIENCE_S)
        runtimes.append(Runtime(app, SMALL, store=tmp_path))
    for thread in threads:
        thread.join(PATIENCE_S)
    answered = sorted(result for own in results for result in own.values())
    assert answered == list(range(1, clients * each + 1)), "each ran once, and was told so"
    assert runtimes[-1].state("item") == {"sum": clients * each}
    for runtime in runtimes:
        runtime.close()


# --- a store that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
@pytest.mark.parametrize("what", ["log/", "replies/", ""])
def test_a_full_store_stops_the_runtime_loses_nothing_acknowledged_and_works_again_when_there_is_room(
    what: str, can_append: bool
) -> None:
    disk = memory(can_append).disk
    store = Fussy(SimStore(disk, "first"))
    runtime = Runtime(app, Config(segment_bytes_max=1), store=store)  # type: ignore[arg-type]
    before = list(runtime.client.options(request_id="before").batch(CALLS))
    store.refuses = full(what)
    acknowledged: list[Any] | None = None
    with suppress(Stopped):
        acknowledged = list(runtime.client.options(request_id="in doubt").batch(CALLS))
    assert (acknowledged is None) or what == "replies/", "a reply needs its log record, and nothing else"
    with pytest.raises(StoreFull, match="no room"):
        runtime.wait()
    with pytest.raises(Stopped, match="no room"):
        runtime.client.call(add, "a", 1)
    runtime.close()
    with Runtime(app, store=SimStore(disk, "second")) as runtime:
        after = list(runtime.client.options(request_id="in doubt").batch(CALLS))
        assert acknowledged in (None, after)
        assert list(runtime.client.options(request_id="before").batch(CALLS)) == before
        state = runtime.state("item")
    with Runtime(app) as reference:
        reference.client.batch(CALLS)
        reference.client.batch(CALLS)
        assert state == reference.state("item")


def test_a_snapshot_that_fails_is_told_to_who_asked_and_the_runtime_goes_on() -> None:
    disk = memory().disk
    store = Fussy(SimStore(disk, "first"))
    with Runtime(app, store=store) as runtime:  # type: ignore[arg-type]
        runtime.client.call(put, "kept", 1)
        assert runtime.snapshot() == {"epoch": 1}
        for prefix in ("state/", "snapshots/"):
            runtime.client.call(put, f"in {prefix}", 1)
            store.refuses = full(prefix)
            with pytest.raises(StoreFull, match=prefix):
                runtime.snapshot()
            assert runtime.client.call(add, "a", 1) > 0
            store.refuses = lambda operation, name: None
        runtime.client.call(drop, "kept")
        assert runtime.snapshot() == {"epoch": 6}
        state = runtime.state("item")
    with Runtime(app, store=SimStore(disk, "second")) as runtime:
        assert runtime.state("item") == state == {"in state/": 1, "in snapshots/": 1, "a": 2}


def test_a_runtime_closes_though_its_last_snapshot_fails() -> None:
    disk = memory().disk
    store = Fussy(SimStore(disk, "first"))
    runtime = Runtime(app, store=store)  # type: ignore[arg-type]
    runtime.client.call(add, "a", 1)
    store.refuses = full("state/")
    runtime.close()
    runtime.wait()
    with Runtime(app, store=SimStore(disk, "second")) as runtime:
        assert runtime.state("item") == {"a": 1}


def test_a_runtime_closes_though_its_store_is_gone() -> None:
    disk = memory().disk
    store = Fussy(SimStore(disk, "first"))
    runtime = Runtime(app, Config(epoch_interval_us=60_000_000), store=store)  # type: ignore[arg-type]
    waiting: Future[Any] = runtime.client.submit("never", [(add, "a", 1)], wait=False)
    store.refuses = lambda operation, name: StoreError(f"{operation} of {name}: no answer")
    runtime.close()
    with pytest.raises(Stopped, match="no answer"):
        waiting.result(PATIENCE_S)
    with pytest.raises(StoreError, match="no answer"):
        runtime.wait()
    with Runtime(app, store=SimStore(disk, "second")) as runtime:
        assert runtime.client.options(request_id="never").batch([(add, "a", 1)]).results == [1]


def test_a_function_that_is_not_deterministic_stops_the_runtime_and_is_named(tmp_path: Path) -> None:
    first = Runtime(app, store=tmp_path)
    first.client.options(request_id="id").call(weather, "w")
    eventually(lambda: bounds(DirectoryStore(tmp_path), "replies") == (1, 1))  # what was answered is known
    with turned("rainy"):
        second = Runtime(app, store=tmp_path)  # the first one has not been closed: there is something to replay
        with pytest.raises(NotDeterministic, match=r"item.weather of 'w'.*fine.*rainy"):
            second.wait()
        with pytest.raises(Stopped, match=r"item\.weather"):
            second.client.options(request_id="id").call(weather, "w")
        second.close()
    first.close()
    with Runtime(app, store=tmp_path) as third:
        assert third.client.options(request_id="id").call(weather, "w") == "fine"


def test_a_decree_is_kept(tmp_path: Path) -> None:
    with exhausted():
        first = Runtime(app, store=tmp_path)
        replies = list(first.client.options(request_id="id").batch([(exhaust, "a", "stack")]))
        assert replies[0].failure is not None
        assert replies[0].failure.code == "poisoned"
    with Runtime(app, store=tmp_path) as second:
        assert list(second.client.options(request_id="id").batch([(exhaust, "a", "stack")])) == replies
        assert second.state("item") == {}
    first.close()


# --- wrong stores -----------------------------------------------------------------------------------------------------


def test_a_store_of_another_app_or_of_nobody_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = App("other")
    other.operator("item")
    with Runtime(app, store=tmp_path / "ours") as runtime:
        runtime.client.call(add, "a", 1)
    ours = {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()}
    with pytest.raises(WrongStore, match=r"belongs to app 'hand', not to 'other'"):
        Runtime(other, store=tmp_path / "ours")
    with pytest.raises(WrongStore, match=r"64 shards.*32.*set shards=64"):
        Runtime(app, Config(shards=32), store=tmp_path / "ours")
    assert {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()} == ours
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letters.txt").write_text("dear")
    with pytest.raises(WrongStore, match=r"not empty.*letters.txt"):
        Runtime(app, store=tmp_path / "foreign")
    assert os.listdir(tmp_path / "foreign") == ["letters.txt"]
    with pytest.raises(HeadraceError, match=r"letters\.txt"):
        Runtime(app, store=tmp_path / "foreign" / "letters.txt")
    with pytest.raises(ConfigError, match="gs://"):
        Runtime(app, store="gs://bucket")
    with Runtime(app, store=tmp_path / "ours") as runtime:
        assert runtime.state("item") == {"a": 1}


def test_a_store_without_its_name_never_begins_empty(tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "a", 1)
    (tmp_path / "headrace.json").rename(tmp_path / "aside.json")
    with pytest.raises(WrongStore, match=r"headrace\.json"):
        Runtime(app, store=tmp_path)
    (tmp_path / "aside.json").rename(tmp_path / "headrace.json")
    with Runtime(app, store=tmp_path) as runtime:
        assert runtime.state("item") == {"a": 1}


NEXT_STEPS = ("bring", "put it back", "restore", "headrace ")
NAMES = ("log", "replies", "snapshots/", "state/", "headrace.json")


def damaged(data: bytes) -> Iterator[bytes | None]:
    """The file is gone, cut, or has other bits: at its start, middle and end."""
    yield None
    if not data:
        return
    yield b""
    yield data[: len(data) // 2]
    yield data[:-1]
    for at in {len(data) // 2, len(data) - 1}:
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(("is_closed", "kept"), [(False, 1), (True, 2)], ids=["crashed", "closed, two snapshots"])
@pytest.mark.parametrize("can_append", [True, False], ids=["files", "objects"])
def test_with_any_file_damaged_a_store_starts_with_all_that_was_answered_or_says_which_file_it_is(
    can_append: bool, is_closed: bool, kept: int
) -> None:
    """Only what was not durable when the process ended may be missing, and here all was."""
    store = memory(can_append)
    hand = Hand(store, app, epoch_transactions_max=2, segment_bytes_max=400, snapshots_kept=kept)
    answered = [hand.run("one", CALLS)]
    assert hand.take_snapshot()
    answered.append(hand.run("two", CALLS))
    assert hand.take_snapshot()
    answered.append(hand.run("three", CALLS))
    state = hand.state()
    if is_closed:
        hand.opened_store.close()
    refused, started = set(), set()
    for name, file in sorted(store.disk.files.items()):
        for spoiled in damaged(bytes(file.data)):
            copy = after_power_loss(store)
            if spoiled is None:
                del copy.disk.files[name]
            else:
                copy.disk.put(name, spoiled)
            refusal = ""
            try:
                again = Hand(copy, app)
                again.settle()
            except HeadraceError as error:
                refusal = str(error)
            if refusal:
                assert any(folder in refusal for folder in NAMES), refusal
                assert any(step in refusal.lower() for step in NEXT_STEPS), refusal
                refused.add(name.split("/")[0])
                continue
            started.add(name.split("/")[0])
            assert again.state() == state, f"{name} with {spoiled!r}"
            assert [again.run(ids, CALLS) for ids in ("one", "two", "three")] == answered, f"{name} with {spoiled!r}"
    assert {"log", "replies", "state", "headrace.json"} <= refused
    assert ("snapshots" in refused) == (kept == 1), "if an older one and the log reach as far, it is not needed"
    assert "apps" in started


# --- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a server in this process that speaks S3, with a bucket."""
    moto = pytest.importorskip("moto.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        endpoint = f"http://127.0.0.1:{port}"
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="headrace")
        yield f"s3://headrace/{{}}?endpoint={endpoint}&region=us-east-1&allow_http=true"
    server.stop()


def test_a_bucket_is_a_store_like_a_directory(bucket: str) -> None:
    with Runtime(app) as runtime:
        runtime.client.batch(CALLS)
        state = runtime.state("item")
    with Runtime(app, Config(epoch_transactions_max=2, snapshots_kept=1), store=bucket.format("app")) as runtime:
        replies = list(runtime.client.options(request_id="all").batch(CALLS))
        runtime.snapshot()
    with Runtime(app, store=bucket.format("app")) as runtime:
        assert list(runtime.client.options(request_id="all").batch(CALLS)) == replies
        assert runtime.state("item") == state
    other = App("other")
    other.operator("item")
    with pytest.raises(WrongStore, match="belongs to app 'hand'"):
        Runtime(other, store=bucket.format("app"))


def test_a_bucket_is_taken_over_like_a_directory(bucket: str) -> None:
    check_takeover(bucket.format("taken"))
