"""Finding and fetching Spark's Kafka connector, on machines that have it, could have it, or could not."""

from __future__ import annotations

import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pyspark
import pytest

from headrace.errors import ConnectorMissing
from headrace.spark.kafka import connector


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose Spark and cache are empty folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("M2_REPO", str(tmp_path / "maven"))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    return tmp_path


class Central:
    """A stand-in for jgo: the artifacts that can be had, and what was asked for."""

    def __init__(self, folder: Path, *there: str) -> None:
        self.folder, self.there = folder, set(there)
        self.asked: list[str] = []
        self.is_cut_short = False

    def artifact(self, coordinate: str) -> Any:
        name, version = coordinate.split(":")[1:]

        def resolve() -> Path:
            self.asked.append(coordinate)
            if coordinate not in self.there:
                raise RuntimeError(f"Artifact {coordinate} not found\nin remote repositories")
            jar = self.folder / f"{name}-{version}.jar"
            with zipfile.ZipFile(jar, "w") as archive:
                archive.writestr("a", "b" * 100)
            if self.is_cut_short:
                jar.write_bytes(jar.read_bytes()[:50])
            return jar

        return types.SimpleNamespace(artifactId=name, resolve=resolve)

    def install(self, monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...] = ()) -> None:
        def project(group: str, name: str) -> Any:
            return types.SimpleNamespace(
                at_version=lambda version: types.SimpleNamespace(
                    artifact=lambda: self.artifact(f"{group}:{name}:{version}")
                )
            )

        jgo, maven = types.ModuleType("jgo"), types.ModuleType("jgo.maven")
        jgo.resolve = lambda coordinate: [self.artifact(each) for each in (coordinate, *needs)]  # type: ignore[attr-defined]
        maven.MavenContext = lambda: types.SimpleNamespace(project=project)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "jgo", jgo)
        monkeypatch.setitem(sys.modules, "jgo.maven", maven)


EXACT = f"{connector.PACKAGE}:{pyspark.__version__}"


def test_where_there_is_none_the_error_says_how_to_get_it(bare: Path) -> None:
    assert connector.find() is None
    with pytest.raises(ConnectorMissing, match=rf"headrace doctor --install-kafka.*spark.jars.packages={EXACT}"):
        connector.require()


def test_one_among_sparks_own_archives_needs_no_setting(bare: Path) -> None:
    (bare / "spark" / "jars" / f"{connector.NAME}-4.3.9.jar").touch()
    assert connector.find() == connector.Connector("4.3.9", ())
    assert connector.require().settings == {}


def test_the_exact_version_is_taken_with_what_it_needs_and_spark_has_not(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "spark" / "jars" / "scala-library-2.13.16.jar").touch()
    needs = ("org.apache.kafka:kafka-clients:9.9", "org.scala-lang:scala-library:2.13.18")
    central = Central(bare, EXACT, *needs, *connector.FALLBACKS[0])
    central.install(monkeypatch, needs)
    found = connector.fetch()
    assert found.version == pyspark.__version__
    assert sorted(jar.name for jar in found.jars) == [
        "kafka-clients-9.9.jar",
        f"{connector.NAME}-{pyspark.__version__}.jar",
    ]
    assert connector.find() == found
    assert found.settings["spark_jars"].split(",") == [str(jar) for jar in found.jars]
    central.asked.clear()
    assert connector.fetch() == found
    assert central.asked == []


def test_where_the_exact_version_cannot_be_had_the_one_that_was_tried_is_taken(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    central = Central(bare, *connector.FALLBACKS[0])
    central.install(monkeypatch)
    found = connector.fetch()
    assert central.asked == [EXACT, *connector.FALLBACKS[0]]
    assert (found.version, len(found.jars)) == ("4.2.0", 4)


def test_a_download_that_fails_leaves_nothing_behind_and_says_what_was_tried(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    central = Central(bare, *connector.FALLBACKS[0][:2])
    central.install(monkeypatch)
    with pytest.raises(ConnectorMissing, match=rf"{EXACT} not found; .*kafka-clients:3.9.2 not found\. To install it"):
        connector.fetch()
    central = Central(bare, *connector.FALLBACKS[0])
    central.is_cut_short = True
    central.install(monkeypatch)
    with pytest.raises(ConnectorMissing, match="was truncated in two downloads"):
        connector.fetch()
    assert connector.find() is None
    monkeypatch.setitem(sys.modules, "jgo", None)
    with pytest.raises(ConnectorMissing, match="jgo, which resolves Java archives, is not installed"):
        connector.fetch()


def test_the_doctor_tells_whether_it_is_there(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.doctor import examine

    assert examine(install_java=False, quick=True, port=0)  # most do without it
    assert "- Kafka" in capsys.readouterr().out
    (bare / "spark" / "jars" / f"{connector.NAME}-4.3.9.jar").touch()
    assert examine(install_java=False, quick=True, port=0)
    assert "✓ Kafka     Spark's connector 4.3.9" in capsys.readouterr().out
