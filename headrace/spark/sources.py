"""The data sources, by the names that Spark knows them by."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from headrace.errors import StreamError
from headrace.spark.calls import Calls
from headrace.spark.changes import Changes
from headrace.spark.dead import Dead
from headrace.spark.replies import Replies
from headrace.spark.state import State

OLDEST = (4, 1)
SOURCES: tuple[type[DataSource], ...] = (Calls, Changes, Dead, Replies, State)


def register(spark: SparkSession) -> SparkSession:
    """Make `format("headrace.replies")` and the others known to a session."""
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < OLDEST:
        raise StreamError(
            f"this is Spark {spark.version}, and Headrace needs {'.'.join(map(str, OLDEST))} or later, where Python "
            "can write a stream in Arrow: install pyspark 4.3, and use it for the cluster, too"
        )
    for source in SOURCES:
        spark.dataSource.register(source)
    return spark
