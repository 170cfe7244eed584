"""The directory as a store: durable, atomic, exclusive, and clear about what it cannot do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.durability import store as module
from headrace.durability.store import OPEN_FILES_MAX, DirectoryStore, check_name, open_store
from headrace.errors import ConfigError, ObjectMissing, StoreError, StoreFull, WrongStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    made = DirectoryStore(tmp_path / "data" / "bank")
    yield made
    made.close()


# --- objects ----------------------------------------------------------------------------------------------------------


def test_what_is_put_is_read_back_replaced_listed_and_deleted(store: DirectoryStore) -> None:
    assert not store.exists("a/b/one")
    store.put("a/b/one", b"1")
    store.put("a/b/one", b"11")
    store.put("a/two", b"")
    store.put("three", b"3")
    assert (store.get("a/b/one"), store.get("a/two"), store.get("three")) == (b"11", b"", b"3")
    assert store.exists("a/b/one")
    assert store.list("") == ["a/b/one", "a/two", "three"]
    assert store.list("a/") == ["a/b/one", "a/two"]
    assert store.list("a/t") == ["a/two"]
    assert store.list("th") == ["three"]
    assert store.list("a/b/c/") == store.list("three/") == []
    store.delete("a/b/one")
    store.delete("a/b/one")
    assert store.list("a/") == ["a/two"]
    with pytest.raises(ObjectMissing, match="a/b/one is missing"):
        store.get("a/b/one")
    with pytest.raises(ObjectMissing, match="three/four"):
        store.get("three/four")


def test_a_part_of_an_object_is_shorter_where_it_ends(store: DirectoryStore) -> None:
    store.put("x", b"0123456789")
    assert store.get_part("x", 2, 3) == b"234"
    assert store.get_part("x", 8, 100) == b"89"
    assert store.get_part("x", 10, 5) == store.get_part("x", 50, 5) == store.get_part("x", 0, 0) == b""
    with pytest.raises(ObjectMissing):
        store.get_part("y", 0, 1)


def test_only_the_first_creates(store: DirectoryStore) -> None:
    assert store.create("log/terms/1", b"a")
    assert not store.create("log/terms/1", b"b")
    assert store.get("log/terms/1") == b"a"


def exclusive(stores: list[DirectoryStore], names: int = 40) -> None:
    with ThreadPoolExecutor(len(stores)) as pool:
        for n in range(names):
            barrier = threading.Barrier(len(stores))

            def attempt(each: tuple[int, DirectoryStore], n: int = n, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait()
                return each[1].create(f"x/{n}", b"by %d" % each[0])

            won = list(pool.map(attempt, enumerate(stores)))
            assert won.count(True) == 1
            assert stores[0].get(f"x/{n}") == b"by %d" % won.index(True)


def test_of_many_that_create_at_once_one_wins_and_it_is_its_object_that_is_there(tmp_path: Path) -> None:
    exclusive([DirectoryStore(tmp_path) for _ in range(6)])


def test_it_is_exclusive_on_a_file_system_without_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    exclusive([DirectoryStore(tmp_path) for _ in range(6)])
    assert len(DirectoryStore(tmp_path).list("")) == 40


def test_a_link_that_was_made_although_the_answer_says_it_exists_counts(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may repeat a call whose answer it lost."""
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    assert store.create("x", b"mine")
    assert not store.create("x", b"other")


def test_who_reads_while_it_is_replaced_sees_the_old_or_the_new(store: DirectoryStore) -> None:
    values = [bytes([n]) * 200_000 for n in range(2)]
    store.put("x", values[0])
    is_over = False

    def write() -> None:
        for n in range(60):
            store.put("x", values[n % 2])

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over:
        is_over = not writer.is_alive()
        assert store.get("x") in values
    writer.join()


WRITER = """
import sys
from headrace.durability.store import DirectoryStore
store = DirectoryStore(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    n += 1
    assert store.create(f"made/{n}", b"%d " % n * 20_000)
    store.put("put/x", b"%d " % n * 20_000)
    print(n, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_objects_only(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        done = [int(process.stdout.readline()) for _ in range(4)]
        process.send_signal(signal.SIGKILL)
        done += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        store = DirectoryStore(tmp_path)
        assert {f"made/{n}" for n in done} <= set(store.list("made/"))
        for name in store.list(""):
            content = store.get(name)
            assert content == (content.split(b" ")[0] + b" ") * 20_000
        for name in store.list("made/"):
            store.delete(name)


def test_what_crashed_writers_left_is_not_listed_and_cleaned_when_it_is_old(store: DirectoryStore) -> None:
    store.put("log/a", b"1")
    folder = store.root / "log"
    young, old = folder / ".new-1-1-b", folder / ".new-1-2-c"
    for path in (young, old):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * module.STALE_SECONDS
    os.utime(old, (long_ago, long_ago))
    assert store.list("") == store.list("log/") == ["log/a"]
    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        ".hidden",
        "a/.new-1",
        "a\\b",
        "a b",
        "ä",
        "a\0",
        "x" * 201,
    ],
)
def test_a_name_that_could_leave_the_store_is_refused(store: DirectoryStore, name: str) -> None:
    with pytest.raises(StoreError, match="not a valid object name"):
        check_name(name)
    actions: list[Callable[[], Any]] = [
        lambda: store.put(name, b""),
        lambda: store.create(name, b""),
        lambda: store.get(name),
        lambda: store.get_part(name, 0, 1),
        lambda: store.exists(name),
        lambda: store.delete(name),
        lambda: store.append(name, b""),
        lambda: store.sync(name),
    ]
    for action in actions:
        with pytest.raises(StoreError, match="not a valid object name"):
            action()
    assert not store.root.exists()


# --- files that grow --------------------------------------------------------------------------------------------------


def test_what_is_appended_is_there_and_only_what_was_created_can_grow(store: DirectoryStore) -> None:
    with pytest.raises(ObjectMissing):
        store.append("log/x", b"1")
    with pytest.raises(ObjectMissing):
        store.sync("log/x")
    store.create("log/x", b"head ")
    store.append("log/x", b"one ")
    store.sync("log/x")
    store.append("log/x", b"two")
    store.sync("log/x")
    other = DirectoryStore(store.root)
    other.sync("log/x")
    assert other.get("log/x") == b"head one two"
    other.append("log/x", b" three")
    store.append("log/x", b" four")
    assert store.get("log/x") == b"head one two three four"
    other.close()


def test_a_file_that_was_deleted_does_not_rise_again(store: DirectoryStore) -> None:
    store.create("log/x", b"")
    zombie = DirectoryStore(store.root)
    zombie.append("log/x", b"open")
    store.delete("log/x")
    zombie.append("log/x", b"into nothing")
    zombie.sync("log/x")
    zombie.close()
    with pytest.raises(ObjectMissing):
        zombie.append("log/x", b"more")
    assert store.list("") == []


def test_only_so_many_files_stay_open_and_never_one_that_is_not_synced_is_closed(store: DirectoryStore) -> None:
    names = [f"log/{n}" for n in range(3 * OPEN_FILES_MAX)]
    for name in names:
        store.create(name, b"")
        store.append(name, b"1")
        store.sync(name)
    assert len(store._files) <= OPEN_FILES_MAX
    for name in names:
        store.append(name, b"2")
    assert len(store._files) == len(names)
    for name in names:
        store.sync(name)
        store.append(name, b"3")
    assert all(store.get(name) == b"123" for name in names)


# --- what is durable --------------------------------------------------------------------------------------------------


class Calls:
    """What the store asks the operating system to do, in order, by the names of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        for name in ("fsync", "fdatasync"):
            self._watch(monkeypatch, name, lambda file: os.readlink(f"/proc/self/fd/{file}"))
        for name in ("link", "replace"):
            self._watch(monkeypatch, name, lambda source, target: str(target))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, path: Callable[..., str]) -> None:
        real = getattr(os, name)

        def watched(*args: Any) -> Any:
            text = Path(path(*args)).name
            self.seen.append((name, "new" if text.startswith(".new-") else text))
            return real(*args)

        monkeypatch.setattr(os, name, watched)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_file_and_folders_are_synced_in_the_right_order(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    store.create("log/x", b"1")
    made = [("fsync", "data"), ("fsync", "bank")]  # the folders that hold the new folders
    expected = [("fsync", "new"), ("link", "x"), ("fsync", "log")]
    assert calls.seen[-3:] == expected
    assert calls.seen[-5:-3] == made
    calls.seen.clear()
    store.put("log/x", b"2")
    assert calls.seen == [("fsync", "new"), ("replace", "x"), ("fsync", "log")]
    calls.seen.clear()
    store.append("log/x", b"3")
    assert calls.seen == []
    store.sync("log/x")
    assert calls.seen == [("fdatasync", "x")]
    calls.seen.clear()
    assert not store.create("log/x", b"4")
    assert store.exists("log/x")
    assert calls.seen == []


# --- errors -----------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> list[str]:
    """Makes a function of the operating system fail with this error, and counts the calls."""
    calls: list[str] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(function)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)
    return calls


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.create("log/x", b"")
    with monkeypatch.context() as patch:
        failing(patch, "write", number)
        for action in (store.put, store.create, store.append):
            name = "log/x" if action == store.append else "log/new"
            with pytest.raises(StoreFull, match=rf"{name}: .*[Ff]ree some space"):
                action(name, b"data")
    assert store.list("") == ["log/x"]
    assert [path.name for path in (store.root / "log").iterdir()] == ["x"]  # nothing half done is left


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_really_full_is_too(store: DirectoryStore) -> None:
    store.put("log/x", b"")
    (store.root / "log" / "y").symlink_to("/dev/full")
    with pytest.raises(StoreFull, match="log/y"):
        store.append("log/y", b"data")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_disk_that_must_not_be_written_is_named_with_what_to_do(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.put("x", b"1")
    with monkeypatch.context() as patch:
        failing(patch, "open", number)
        for action in (store.put, store.create, store.append):
            name = "y" if action == store.create else "x"
            with pytest.raises(StoreError, match=rf"bank/{name}: .*write permission for"):
                action(name, b"data")
    assert store.get("x") == b"1"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may do everything")
def test_a_folder_without_the_right_to_write_is_too(store: DirectoryStore) -> None:
    store.put("x", b"1")
    store.root.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="write permission"):
            store.put("x", b"2")
    finally:
        store.root.chmod(0o700)


def test_a_sync_that_failed_is_never_tried_again(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("log/x", b"")
    store.append("log/x", b"1")
    with monkeypatch.context() as patch:
        calls = failing(patch, "fdatasync" if hasattr(os, "fdatasync") else "fsync", errno.EIO)
        with pytest.raises(StoreError, match=r"cannot sync .*log/x: .*Check the disk"):
            store.sync("log/x")
        for action in (lambda: store.sync("log/x"), lambda: store.append("log/x", b"2")):
            with pytest.raises(StoreError, match="was not synced"):
                action()
        assert len(calls) == 1
    with pytest.raises(StoreError, match="was not synced"):
        store.sync("log/x")


def test_an_object_whose_folder_could_not_be_synced_is_not_promised(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("log/x", b"1")
    failing(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StoreError, match="log/y"):
        store.create("log/y", b"")
    with pytest.raises(StoreError, match="log/x"):
        store.put("log/x", b"2")
    assert store.get("log/x") == b"1"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no store")
    with pytest.raises(WrongStore, match="give the path of a directory"):
        DirectoryStore(tmp_path / "file")


def test_a_store_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    store = open_store(tmp_path / "none")
    assert isinstance(store, DirectoryStore)
    assert store.list("") == store.list("log/") == []
    assert not store.exists("x")
    assert not (tmp_path / "none").exists()


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gs://.*s3://bucket/prefix"):
        open_store("gs://bucket/x")
