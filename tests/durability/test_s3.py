"""A bucket as a store, against a server process on the loopback that speaks S3."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.durability.log.log import Log, bounds, examine, read_log, repair
from headrace.durability.s3 import S3Store
from headrace.durability.store import open_store
from headrace.errors import ConfigError, Fenced, LogBroken, ObjectMissing, StoreError, StoreFull, WrongStore

ROOT = Path(__file__).parents[2]


class Server:
    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._count = itertools.count()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")).close()

    def store(self, prefix: str | None = None) -> S3Store:
        prefix = prefix or f"tests/{next(self._count)}"
        made = open_store(f"s3://bucket/{prefix}?endpoint={self.endpoint}&region=us-east-1")
        assert isinstance(made, S3Store)
        return made

    def spoil(self, kind: str, method: str = "PUT", count: int = 1) -> None:
        url = f"{self.endpoint}/-/faults?kind={kind}&method={method}&count={count}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()

    @property
    def requests(self) -> int:
        with urllib.request.urlopen(f"{self.endpoint}/-/faults") as answer:
            return int(answer.read())


@pytest.fixture(scope="module")
def process() -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.durability.s3_server"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert running.stdout is not None
    try:
        yield Server(int(running.stdout.readline()))
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def server(process: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    only_these(monkeypatch, tmp_path, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    process.spoil("none", count=0)
    return process


def only_these(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> None:
    """The environment of AWS is this, and no file of this machine is looked at."""
    variables = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    } | variables
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# --- objects ----------------------------------------------------------------------------------------------------------


def test_what_is_put_is_read_back_replaced_listed_and_deleted(server: Server) -> None:
    store = server.store()
    assert store.url.startswith("s3://bucket/tests/")
    assert "?" not in store.url
    assert not store.can_append
    assert not store.exists("a/b/one")
    store.put("a/b/one", b"1")
    store.put("a/b/one", b"11")
    store.put("a/two", b"")
    store.put("three", b"3" * 7_000_000)
    assert (store.get("a/b/one"), store.get("a/two")) == (b"11", b"")
    assert store.get("three") == b"3" * 7_000_000
    assert store.exists("a/b/one")
    assert store.list("") == ["a/b/one", "a/two", "three"]
    assert store.list("a/") == ["a/b/one", "a/two"]
    assert store.list("a/t") == ["a/two"]
    assert store.list("none/") == []
    store.delete("a/b/one")
    store.delete("a/b/one")
    assert store.list("a/") == ["a/two"]
    with pytest.raises(ObjectMissing, match=rf"{store.url}/a/b/one is missing"):
        store.get("a/b/one")


def test_a_part_of_an_object_is_shorter_where_it_ends(server: Server) -> None:
    store = server.store()
    store.put("x", b"0123456789")
    assert store.get_part("x", 2, 3) == b"234"
    assert store.get_part("x", 8, 100) == b"89"
    assert store.get_part("x", 10, 5) == store.get_part("x", 50, 5) == store.get_part("x", 0, 0) == b""
    with pytest.raises(ObjectMissing):
        store.get_part("y", 0, 1)


def test_two_prefixes_of_one_bucket_are_two_stores(server: Server) -> None:
    one, two = server.store("shared/a"), server.store("shared/ab")
    one.put("x", b"1")
    assert two.list("") == []
    assert server.store("shared").list("") == ["a/x"]


def test_more_objects_than_one_answer_lists_are_all_listed(server: Server) -> None:
    store = server.store()
    names = [f"many/{n:04d}" for n in range(1_050)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    assert store.list("many/") == names


def test_nothing_can_be_appended(server: Server) -> None:
    for action in (lambda: server.store().append("x", b""), lambda: server.store().sync("x")):
        with pytest.raises(StoreError, match="S3 objects"):
            action()


# --- creating ---------------------------------------------------------------------------------------------------------


def test_only_the_first_creates_also_if_both_want_the_same_content(server: Server) -> None:
    store, other = server.store("same"), server.store("same")
    assert store.create("log/terms/1", b"a")
    assert not other.create("log/terms/1", b"a")
    assert not store.create("log/terms/1", b"b")
    assert store.get("log/terms/1") == b"a"


def test_of_many_that_create_at_once_one_wins(server: Server) -> None:
    stores = [server.store("race") for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as pool:
        for n in range(10):
            barrier = threading.Barrier(len(stores))

            def attempt(store: S3Store, n: int = n, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait()
                return store.create(f"x/{n}", b"the same")

            assert list(pool.map(attempt, stores)).count(True) == 1


@pytest.mark.parametrize("kind", ["lost", "late", "refused"])
def test_a_create_whose_answer_was_lost_finds_its_own_object_and_counts(server: Server, kind: str) -> None:
    store = server.store()
    assert store.create("first", b"")  # the check of the bucket is behind us
    server.spoil(kind, count=2)
    assert store.create("x", b"data")
    assert store.get("x") == b"data"


@pytest.mark.parametrize("kind", ["lost", "late", "refused"])
def test_a_create_whose_answer_was_lost_does_not_take_the_object_of_another_for_its_own(
    server: Server, kind: str
) -> None:
    store = server.store()
    assert store.create("x", b"the same")
    server.spoil(kind)
    assert not store.create("x", b"the same")


def test_a_bucket_that_ignores_conditions_is_refused(server: Server) -> None:
    store = server.store()
    server.spoil("blind", count=2)
    with pytest.raises(WrongStore, match="ignores conditional puts"):
        store.create("log/terms/1", b"")
    assert store.list("") == []
    server.spoil("none", count=0)
    assert store.create("log/terms/1", b"")
    assert store.list("") == ["log/terms/1"]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_the_wrong_store(server: Server) -> None:
    store = open_store(f"s3://no-such-bucket/x?endpoint={server.endpoint}&region=us-east-1")
    actions: list[Callable[[], Any]] = [
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
        lambda: store.get("a"),
        lambda: store.list("log/"),
        lambda: store.delete("a"),
    ]
    for action in actions:
        with pytest.raises(WrongStore, match=rf"no bucket 'no-such-bucket' at {server.endpoint}. Create it"):
            action()


def test_a_full_store_is_named(server: Server) -> None:
    store = server.store()
    store.create("first", b"")
    server.spoil("full", count=50)
    with pytest.raises(StoreFull, match=r"cannot create s3://bucket/tests/.*/x: no space is left"):
        store.create("x", b"")


def test_a_server_that_is_not_there_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path
) -> None:
    monkeypatch.setattr("headrace.durability.s3.PAUSE_SECONDS", 0.001)
    store = open_store("s3://bucket/x?endpoint=http://127.0.0.1:9&region=us-east-1")
    begin = time.monotonic()
    for action in (lambda: store.get("log/a"), lambda: store.create("log/a", b""), lambda: store.exists("log/a")):
        with pytest.raises(
            StoreError, match=r"s3://bucket/x/(log|probes)/.*Check that http://127.0.0.1:9 can be reached"
        ):
            action()
    assert time.monotonic() - begin < 60


def test_a_short_trouble_of_the_server_is_waited_out(server: Server) -> None:
    store = server.store()
    store.put("x", b"1")
    server.spoil("refused", "GET", count=2)
    assert store.get("x") == b"1"
    server.spoil("late", "PUT", count=2)
    store.put("x", b"2")
    assert store.get("x") == b"2"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "write s3://bucket/prefix"),
        ("s3://b b/x", "write s3://bucket/prefix"),
        ("s3://bucket/x?colour=red", "no option 'colour'"),
        ("s3://bucket/x?access_key_id=k", "no option 'access_key_id'"),
        ("s3://bucket/x?endpoint=nonsense", "must be like https://host:port"),
        ("s3://bucket/x?endpoint=http://example.com", "is not encrypted"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&allow_http=false", "is not encrypted"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1&allow_http=yes", "allow_http must be true or false"),
    ],
)
def test_a_bad_url_is_refused_with_what_is_wrong(server: Server, url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


def test_a_prefix_that_is_no_name_is_refused() -> None:
    with pytest.raises(StoreError, match="not a valid object name"):
        open_store("s3://bucket/a/../b")


# --- who we are -------------------------------------------------------------------------------------------------------


def test_credentials_come_from_the_environment_or_from_the_files_of_aws(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (
        "access_key_id" not in server.store()._objects.config
        or server.store()._objects.config["access_key_id"] == "key"
    )
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = ds\n"
        "[work]\naws_access_key_id = w\naws_secret_access_key = ws\naws_session_token = wt\n"
    )
    (tmp_path / "config").write_text("[profile work]\nregion = eu-west-3\n")
    only_these(monkeypatch, tmp_path)
    assert server.store()._objects.config["access_key_id"] == "d"
    only_these(monkeypatch, tmp_path, AWS_PROFILE="work")
    store = open_store(f"s3://bucket/who?endpoint={server.endpoint}")
    assert isinstance(store, S3Store)
    assert store._objects.config["access_key_id"] == "w"
    assert store._objects.config["region"] == "eu-west-3"
    store.put("x", b"1")
    assert store.get("x") == b"1"
    only_these(monkeypatch, tmp_path, AWS_PROFILE="nobody")
    with pytest.raises(ConfigError, match="AWS_PROFILE is 'nobody'"):
        server.store()


@pytest.mark.parametrize("source", ["environment", "file"])
def test_no_secret_is_shown(server: Server, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if source == "file":
        (tmp_path / "credentials").write_text("[default]\naws_access_key_id = key\naws_secret_access_key = secret\n")
        only_these(monkeypatch, tmp_path)
    store = server.store()
    assert "secret" not in repr(store) + store.url
    with pytest.raises(ObjectMissing) as caught:
        store.get("x")
    assert "secret" not in str(caught.value)


# --- the log in a bucket ----------------------------------------------------------------------------------------------


def test_a_log_lives_in_a_bucket(server: Server) -> None:
    store = server.store("log-one")
    log = Log.take_over(store)
    for n in range(5):
        log.append([b"one of %d" % n, b"two of %d" % n])
    again = Log.take_over(server.store("log-one"))
    with pytest.raises(Fenced):
        log.append([b"late"])
    assert (again.term, again.last) == (2, 10)
    again.append([b"more"])
    assert [record.number for record in read_log(store)] == list(range(1, 12))
    assert examine(store).is_sound
    assert again.retire(below=6)
    assert bounds(store) == (5, 11)
    assert [record.number for record in Log.take_over(store).read(6)] == list(range(6, 12))


def test_an_append_to_a_bucket_is_one_put_and_one_look(server: Server) -> None:
    log = Log.take_over(server.store())
    before = server.requests
    log.append([b"x"] * 100)
    assert server.requests - before == 2


def test_a_broken_object_of_the_log_is_named_and_repaired(server: Server) -> None:
    store = server.store()
    log = Log.take_over(store)
    for n in range(4):
        log.append([b"record %d" % n])
    name = next(name for name in store.list("log/") if name.endswith("03-00000001.obj"))
    raw = bytearray(store.get(name))
    raw[-2] ^= 1
    store.put(name, bytes(raw))
    with pytest.raises(LogBroken, match=rf"{store.url}/{name} is broken at byte 100"):
        list(Log.take_over(store).read(1))
    assert repair(store).lost == (3, 4)
    assert [record.data for record in Log.take_over(store).read(1)] == [b"record 0", b"record 1"]


@pytest.mark.parametrize("kind", ["lost", "late", "refused"])
def test_writers_in_a_bucket_with_a_bad_connection_acknowledge_one_history(server: Server, kind: str) -> None:
    acknowledged: dict[int, bytes] = {}
    prefix = f"zombies-{kind}"
    logs: list[Log] = []
    for turn in range(4):
        server.spoil(kind, count=1)
        logs.append(Log.take_over(server.store(prefix)))
        for writer, log in enumerate(logs):  # the old ones wake up and try
            server.spoil(kind, count=1)
            payload = b"%d by %d" % (turn, writer)
            try:
                last = log.append([payload])
            except (Fenced, StoreError):
                assert log is not logs[-1]
                continue
            assert last not in acknowledged
            acknowledged[last] = payload
    server.spoil("none", count=0)
    found = {record.number: record.data for record in Log.take_over(server.store(prefix)).read(1)}
    assert found == acknowledged
    assert len(found) == 4
