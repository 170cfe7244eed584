"""Finding a Java, on machines that have several, the wrong ones, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import JavaMissing
from headrace.spark.jvm import java


def fake_java(home: Path, version: str, *, has_vector_module: bool = True) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    fails = "" if has_vector_module else "echo 'Module jdk.incubator.vector not found' >&2; exit 1\n"
    program.write_text(f"#!/bin/sh\n{fails}echo 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return home


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose only Javas are in this folder."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "PLACES", (str(tmp_path / "jvm" / "*"), "~/.jdk/*"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(java.shutil, "which", lambda name: None)
    (tmp_path / "jvm").mkdir()
    return tmp_path / "jvm"


def test_a_java_of_the_right_version_is_found_among_wrong_ones(only: Path) -> None:
    fake_java(only / "a-25", "25.0.1")
    fake_java(only / "b-8", "1.8.0")
    fake_java(only / "c-17-trimmed", "17.0.2", has_vector_module=False)
    good = fake_java(only / "d-21", "21.0.4")
    assert java.find_java() == (good, 21)


def test_java_home_comes_first(only: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_java(only / "17", "17.0.2")
    mine = fake_java(tmp_path / "mine", "21.0.4")
    monkeypatch.setenv("JAVA_HOME", str(mine))
    assert java.find_java() == (mine, 21)


def test_a_java_home_that_cannot_run_spark_is_passed_over(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = fake_java(only / "17", "17.0.2")
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    assert java.find_java() == (good, 17)


def test_without_a_java_the_error_says_what_was_found_and_what_to_do(only: Path) -> None:
    fake_java(only / "25", "25.0.1")
    with pytest.raises(JavaMissing, match=r"25 \(Java 25\).*headrace doctor --install-java"):
        java.find_java()


def test_a_missing_java_is_fetched_into_the_cache(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jdk

    fetched = Path.home() / ".jdk" / "jdk-17"
    fake_java(fetched, "17.0.1", has_vector_module=False)  # what a kill left of an earlier one
    monkeypatch.setattr(jdk, "install", lambda version, path: fake_java(Path(path) / "jdk-17", f"{version}.0.9"))
    assert java.install_java() == (fetched, 17)
    monkeypatch.setattr(jdk, "install", lambda version, path: pytest.fail("it is there already"))
    assert java.install_java() == (fetched, 17)
    assert sorted(each.name for each in fetched.parent.iterdir()) == [".lock", "jdk-17"]


def test_a_download_that_fails_says_what_to_do(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jdk

    def fail(version: str, path: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(jdk, "install", fail)
    with pytest.raises(JavaMissing, match=r"no network.*set JAVA_HOME"):
        java.install_java()
