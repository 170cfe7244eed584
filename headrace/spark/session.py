"""A Spark session that works out of the box: the right Java, this Python for the workers, quiet logs, local
defaults."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from headrace.spark.jvm import class_archive
from headrace.spark.jvm.java import find_java
from headrace.spark.sources.registry import register

LOG = logging.getLogger("headrace.spark")
LOGGING = Path(__file__).with_name("log4j2.properties")
WORKER_PYTHON = Path(__file__).with_name("worker-python")

LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    # The JVM starts a `chmod` for each file of a checkpoint: start it directly, without a helper process.
    "spark.driver.extraJavaOptions": (
        f'"-Dlog4j2.configurationFile=file:{LOGGING}" -Djdk.lang.Process.launchMechanism=VFORK'
    ),
    "spark.driver.host": "127.0.0.1",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # The default file manager starts twice as many of these processes.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


CLUSTER_DEFAULTS = {  # executors elsewhere must reach the driver
    key: value for key, value in LOCAL_DEFAULTS.items() if key not in ("spark.driver.bindAddress", "spark.driver.host")
}


def session(
    name: str = "headrace", *, master: str = "local[2]", java_options: str = "", **settings: str
) -> SparkSession:
    """The Spark session to use. If you have made one, it is returned as it is, with the data sources registered;
    otherwise a local one is started. Settings are Spark's own, with `_` for `.`: `session(spark_driver_memory="2g")`.
    The driver's JVM gets `java_options` in addition to its usual ones."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return register(active)
    home, _ = find_java()
    os.environ["JAVA_HOME"] = str(home)
    os.environ["HEADRACE_PYTHON"] = sys.executable
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(variable, str(WORKER_PYTHON) if starts_sooner(master) else sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    defaults = dict(LOCAL_DEFAULTS if is_local(master) else CLUSTER_DEFAULTS)
    defaults["spark.driver.extraJavaOptions"] += f"{class_archive.java_options(home)} {java_options}"
    for key, value in (defaults | {spelled(key): value for key, value in settings.items()}).items():
        builder = builder.config(key, value)
    with jvm_output_in_a_file():
        made = builder.getOrCreate()
    keep_quiet(made)
    return register(made)


def is_local(master: str) -> bool:
    """Whether Spark runs its tasks in this machine's one JVM."""
    return master == "local" or master.startswith("local[")


def keep_quiet(spark: SparkSession) -> None:
    """A task that is stopped disconnects from the server that collects the tasks' counters, which would print an
    error."""
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: LOG.debug("a task hung up", exc_info=True)


def spelled(key: str) -> str:
    """The name of a setting in Spark's spelling. A name with dots may also contain a `_`."""
    return key if "." in key else key.replace("_", ".")


def starts_sooner(master: str) -> bool:
    """Whether workers need no archives of Spark's Python code: they run here, and the installed PySpark is the one
    whose JVM is started."""
    home = os.environ.get("SPARK_HOME")
    own = Path(pyspark.__file__).parent
    is_own = own.is_dir() and (home is None or Path(home).resolve() == own.resolve())
    return is_own and is_local(master) and os.access(WORKER_PYTHON, os.X_OK) and os.name == "posix"


@contextlib.contextmanager
def jvm_output_in_a_file() -> Iterator[None]:
    """The JVM prints messages to the error stream that it is started with, whatever its log level: give it a file
    instead. Important errors still reach you as exceptions; if the start fails, the end of the file is shown."""
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
