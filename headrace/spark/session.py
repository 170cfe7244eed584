"""A Spark session that starts: the right Java, this Python for the workers, quiet logs, sane local defaults."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.spark.java import find_java

LOGGING = Path(__file__).with_name("log4j2.properties")

LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{LOGGING}",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def session(name: str = "headrace", *, master: str = "local[2]", **settings: str) -> SparkSession:
    """The Spark session to use. One that you made is handed back as it is; else a local one is started. Settings are
    Spark's own, with `_` for `.` in their names: `session(spark_driver_memory="2g")`."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    home, _ = find_java()
    os.environ["JAVA_HOME"] = str(home)
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(variable, sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (LOCAL_DEFAULTS | {key.replace("_", "."): value for key, value in settings.items()}).items():
        builder = builder.config(key, value)
    with jvm_output_in_a_file():
        return builder.getOrCreate()


@contextlib.contextmanager
def jvm_output_in_a_file() -> Iterator[None]:
    """The JVM greets on the error stream it is started with, whatever its log level: give it a file instead. What
    matters still reaches you, as an exception; if the start fails, the end of the file is told."""
    file, name = tempfile.mkstemp(prefix="headrace-spark-", suffix=".log")
    path = Path(name)
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    except Exception as error:
        error.add_note(f"What the JVM said ({path}):\n{path.read_text(errors='replace')[-2_000:]}")
        raise
    finally:
        os.dup2(own, 2)
        os.close(own)
