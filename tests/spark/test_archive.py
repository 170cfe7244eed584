"""Spark's classes at hand: used where they fit, and no trouble where they do not."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import JavaMissing
from headrace.spark.jvm import class_archive
from headrace.spark.jvm.java import find_java

pytestmark = pytest.mark.spark


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the Java here, in an environment that has no archive yet."""
    monkeypatch.setattr(class_archive.sys, "prefix", str(tmp_path))
    monkeypatch.delenv("JDK_JAVA_OPTIONS", raising=False)
    return find_java()[0]


def test_without_an_archive_there_is_no_option(home: Path, tmp_path: Path) -> None:
    assert class_archive.java_options(home) == ""
    assert class_archive.java_options(tmp_path / "no java") == ""


def test_nobody_needs_a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(class_archive.Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert class_archive.java_options(home) == ""
    monkeypatch.setattr(class_archive.sys, "prefix", class_archive.sys.base_prefix)
    assert class_archive.java_options(home) == ""


def test_each_java_and_each_spark_has_its_own(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, jars = tmp_path / "java", tmp_path / "spark" / "jars"
    (other / "lib").mkdir(parents=True)
    (other / "lib" / "modules").write_bytes(b"")
    jars.mkdir(parents=True)
    places = {class_archive.place(home), class_archive.place(other)}
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    places.add(class_archive.place(home))
    (jars / "more.jar").write_bytes(b"")
    places.add(class_archive.place(home))
    assert len(places) == 4
    assert all(tmp_path in place.parents for place in places), "in the virtual environment"
    monkeypatch.setattr(class_archive.sys, "prefix", class_archive.sys.base_prefix)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tmp_path / "cache" in class_archive.place(home).parents


@pytest.mark.parametrize("content", [b"", b"nonsense" * 1_000])
def test_one_that_does_not_fit_is_left_alone_without_a_word(home: Path, content: bytes) -> None:
    place = class_archive.place(home)
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    words = [str(home / "bin" / "java"), *shlex.split(class_archive.java_options(home)), "-version"]
    assert str(place) in " ".join(words)
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    plain = subprocess.run([words[0], "-version"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, plain.stdout, plain.stderr.replace(", sharing", ""))


def test_a_rehearsal_that_fails_leaves_nothing_and_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive.sys, "executable", "/bin/false")
    with pytest.raises(JavaMissing, match="could not be made"):
        class_archive.make(home)
    assert [left.name for left in class_archive.place(home).parent.iterdir()] == [".lock"]


SESSION = """
from headrace.spark import session
spark = session()
print(*spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments(), sep="\\n")
"""


@pytest.mark.timeout(2_400)
def test_a_session_uses_the_archive_and_loads_sparks_classes_from_it(tmp_path: Path) -> None:
    """`make test` has made one; else it is made here, which takes a minute."""
    home, _ = find_java()
    class_archive.make(home)
    log = tmp_path / "classes.log"
    ran = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=os.environ | {"JDK_JAVA_OPTIONS": f"-Xlog:class+load:file={log}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    words = shlex.split(class_archive.java_options(home))
    assert words
    assert set(words) <= set(ran.stdout.splitlines())
    loaded = [line for line in log.read_text().splitlines() if " org.apache.spark." in line]
    assert sum("shared objects file (top)" in line for line in loaded) > len(loaded) / 2
