"""Spark's Kafka connector: which Java archives it consists of, where they are, and how to get them.

PySpark does not include it. It is found among Spark's own archives, in our cache, or through your own Spark settings
(`spark.jars.packages`). The preferred version is the one made for the installed Spark; if Maven Central does not have
it, an older one is used that was tested with this Spark.
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
# Tested with PySpark 4.3: everything it needs besides Spark's own archives, with exact versions.
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
    """Its version, and the archives to pass to Spark; none, if Spark has them already."""

    version: str
    jars: tuple[Path, ...]

    @property
    def settings(self) -> dict[str, str]:
        """The settings that a session needs."""
        return {"spark_jars": ",".join(map(str, self.jars))} if self.jars else {}


def packages() -> str:
    """The setting to use for a session that you make yourself."""
    return f"spark.jars.packages={PACKAGE}:{pyspark.__version__}"


def hint() -> str:
    return (
        f"run: pip install 'headrace[kafka]' && headrace doctor --install-kafka; or start Spark with {packages()} (for "
        "instance in spark-defaults.conf)"
    )


def cache() -> Path:
    """Where `fetch` puts it: a folder for each version of Spark, complete or absent."""
    return user_cache() / "kafka" / pyspark.__version__


def spark_jars() -> Path:
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent) / "jars"


def find() -> Connector | None:
    """The connector on this machine. Never uses the network."""
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
    """Whether this session has it, from any place."""
    return bool(spark._jvm.org.apache.spark.util.Utils.classIsLoadable(PROVIDER))


def fetch() -> Connector:
    """The connector, downloaded into the cache if this machine has none: the exact version, or else one that was
    tested."""
    found = find()
    if found is not None:
        return found
    tried: list[str] = []
    with alone(cache().parent), alone(maven_cache()):
        found = find()
        if found is not None:  # another process has fetched it
            return found
        print(f"Fetching Spark's Kafka connector ({SIZE}) from Maven Central into {cache()} ...", file=sys.stderr)
        for jars in resolutions(tried):
            return keep(jars)
    raise ConnectorMissing(
        f"the download of Spark's Kafka connector failed: {'; '.join(tried)}. To install it, {hint()}"
    )


def resolutions(tried: list[str]) -> Iterator[list[Path]]:
    """The archives of each available version, preferred ones first. Failures are noted in `tried`."""
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
    """Copy the archives into the cache."""
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
