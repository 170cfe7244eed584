"""Spark's Kafka connector: which Java archives it is made of, where they are, and how to get them.

PySpark does not bring it. It is there if it lies among Spark's own archives, or in our cache, or if your own Spark
settings name it (`spark.jars.packages`). The one made for the Spark that is installed is wanted; where Maven Central
lacks it, an older one is taken that was tried with this Spark.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark

from headrace.errors import ConnectorMissing
from headrace.spark.jvm.caches import alone, jars_of, maven_cache, user_cache

NAME = "spark-sql-kafka-0-10_2.13"
PACKAGE = f"org.apache.spark:{NAME}"
SIZE = "10 MB"
PROVIDER = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
# Tried with PySpark 4.3: all that it needs beside Spark's own archives, each by its exact version.
FALLBACKS = (
    (
        f"{PACKAGE}:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
        "org.apache.kafka:kafka-clients:3.9.2",
        "org.apache.commons:commons-pool2:2.13.1",
    ),
)


@dataclasses.dataclass(frozen=True)
class Connector:
    """Its version, and the archives to hand to Spark; none, if Spark has them already."""

    version: str
    jars: tuple[Path, ...]

    @property
    def settings(self) -> dict[str, str]:
        """What a session needs to be told."""
        return {"spark_jars": ",".join(map(str, self.jars))} if self.jars else {}


def packages() -> str:
    """The line for a session that you make yourself."""
    return f"spark.jars.packages={PACKAGE}:{pyspark.__version__}"


def hint() -> str:
    return (
        f"run: pip install 'headrace[kafka]' && headrace doctor --install-kafka; or start Spark with {packages()} (for "
        "instance in spark-defaults.conf)"
    )


def cache() -> Path:
    """Where `fetch` puts it: a folder for each version of Spark, whole or not there."""
    return user_cache() / "kafka" / pyspark.__version__


def spark_jars() -> Path:
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent) / "jars"


def find() -> Connector | None:
    """The connector on this machine. Never asks the network."""
    for jar in sorted(spark_jars().glob(f"{NAME}-*.jar")):
        return Connector(version_of(jar), ())
    for jar in sorted(cache().glob(f"{NAME}-*.jar")):
        return Connector(version_of(jar), tuple(sorted(cache().glob("*.jar"))))
    return None


def require() -> Connector:
    found = find()
    if found is None:
        raise ConnectorMissing(f"Spark's Kafka connector is not installed. To install it, {hint()}")
    return found


def is_loaded(spark: Any) -> bool:
    """Whether this session has it, wherever from."""
    return bool(spark._jvm.org.apache.spark.util.Utils.classIsLoadable(PROVIDER))


def fetch() -> Connector:
    """The connector, downloaded into the cache if the machine has none: the exact version, else one that was tried."""
    found = find()
    if found is not None:
        return found
    tried: list[str] = []
    with alone(cache().parent), alone(maven_cache()):
        found = find()
        if found is not None:  # by now
            return found
        print(f"Fetching Spark's Kafka connector ({SIZE}) from Maven Central into {cache()} ...", file=sys.stderr)
        for jars in resolutions(tried):
            return keep(jars)
    raise ConnectorMissing(
        f"the download of Spark's Kafka connector failed: {'; '.join(tried)}. To install it, {hint()}"
    )


def resolutions(tried: list[str]) -> Iterator[list[Path]]:
    """The archives of each version that can be had, the most wanted first. What went wrong is noted in `tried`."""
    try:
        import jgo
        from jgo.maven import MavenContext
    except ImportError:
        tried.append("jgo, which resolves Java archives, is not installed")
        return
    own = {jar.name.rpartition("-")[0] for jar in spark_jars().glob("*.jar")}
    context = MavenContext()
    for coordinates in ((f"{PACKAGE}:{pyspark.__version__}",), *FALLBACKS):
        try:
            if len(coordinates) > 1:
                parts = [coordinate.split(":") for coordinate in coordinates]
                wanted = [context.project(group, name).at_version(version).artifact() for group, name, version in parts]
            else:
                wanted = [artifact for artifact in jgo.resolve(*coordinates) if artifact.artifactId not in own]
            jars = jars_of(wanted)
        except (RuntimeError, OSError, AssertionError) as error:  # what requests raises is an OSError
            tried.append(f"{coordinates[0]}: {str(error).partition(chr(10))[0]}")
        else:
            yield jars


def keep(jars: list[Path]) -> Connector:
    """Copies them into the cache."""
    cache().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=cache().parent))
    try:
        for jar in jars:
            shutil.copyfile(jar, made / jar.name)
        made.chmod(0o755)
        made.rename(cache())
    except OSError:
        if find() is None:
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return require()


def version_of(jar: Path) -> str:
    return jar.name.removeprefix(f"{NAME}-").removesuffix(".jar")
