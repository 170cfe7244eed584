"""Two that fetch the same at once: one does it, the other finds it there."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.jvm import class_archive, java
from headrace.spark.jvm.caches import alone, jars_of
from headrace.spark.kafka import connector
from tests.kafka.test_connector import Central, bare
from tests.spark.test_java import fake_java, only

__all__ = ["bare", "only"]  # fixtures
SLOW_S = 0.2


def both(act: Any) -> list[Any]:
    """What two threads get that begin together. A lock on a file holds between threads as between processes."""
    got: list[Any] = []
    begin = threading.Barrier(2)

    def run() -> None:
        begin.wait()
        try:
            got.append(act())
        except BaseException as error:
            got.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return got


class Strict(Central):
    """Like jgo, which asserts that a file is not there yet, and writes it bit by bit."""

    def artifact(self, coordinate: str) -> Any:
        made = super().artifact(coordinate)
        name, version = coordinate.split(":")[1:]
        jar = self.folder / f"{name}-{version}.jar"

        def resolve() -> Path:
            if jar.exists():
                return jar
            threading.Event().wait(SLOW_S)
            assert not jar.exists()
            return made.resolve()

        return types.SimpleNamespace(artifactId=name, resolve=resolve)


def test_of_two_that_fetch_the_connector_one_does(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    central = Strict(bare, *connector.FALLBACKS[0])
    central.install(monkeypatch)
    first, second = both(connector.fetch)
    assert first == second == connector.find()
    assert len(central.asked) == 1 + len(connector.FALLBACKS[0]), "each was asked for once, and the exact version"


def test_of_two_that_install_a_java_one_does(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jdk

    asked = []

    def install(version: str, path: str) -> Path:
        asked.append(version)
        threading.Event().wait(SLOW_S)
        return fake_java(Path(path) / "jdk-17", f"{version}.0.9")

    monkeypatch.setattr(jdk, "install", install)
    assert both(java.install_java) == [(Path.home() / ".jdk" / "jdk-17", 17)] * 2
    assert asked == ["17"]


def test_of_two_that_make_the_archive_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, made = tmp_path / "share" / "spark.jsa", []

    def write(path: Path) -> None:
        made.append(path)
        threading.Event().wait(SLOW_S)
        path.touch()

    monkeypatch.setattr(class_archive, "place", lambda home: place)
    monkeypatch.setattr(class_archive, "write", write)
    assert both(lambda: class_archive.make(tmp_path)) == [place, place]
    assert made == [place]


WAITER = """
import sys
from pathlib import Path
from headrace.spark.jvm.caches import alone
print("waits", flush=True)
with alone(Path(sys.argv[1])):
    print("is alone", flush=True)
    sys.stdin.read()
"""


def test_a_process_waits_for_another_one_and_for_none_that_was_killed(tmp_path: Path) -> None:
    def started() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WAITER, str(tmp_path)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with alone(tmp_path):
        first = started()
        assert first.stdout is not None
        assert first.stdout.readline() == "waits\n"
        (tmp_path / "made").touch()
    assert first.stdout.readline() == "is alone\n"
    with started() as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
        first.kill()
        first.communicate()
        assert second.stdout.readline() == "is alone\n"


def test_where_no_lock_can_be_written_one_goes_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "folder"):
        pass


def test_what_a_kill_left_of_an_archive_is_fetched_again(tmp_path: Path) -> None:
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"PK")

    def resolve() -> Path:
        if not jar.exists():
            with zipfile.ZipFile(jar, "w") as made:
                made.writestr("a", "b")
        return jar

    assert jars_of([types.SimpleNamespace(resolve=resolve)]) == [jar]
    assert zipfile.is_zipfile(jar)
