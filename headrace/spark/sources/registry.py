"""The data sources, by their names in Spark."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from headrace.errors import StreamError
from headrace.spark.sources.calls import CallsSource
from headrace.spark.sources.changes import ChangesSource
from headrace.spark.sources.dead import DeadSource
from headrace.spark.sources.replies import RepliesSource
from headrace.spark.sources.state_table import StateSource

OLDEST = (4, 1)
SOURCES: tuple[type[DataSource], ...] = (CallsSource, ChangesSource, DeadSource, RepliesSource, StateSource)


def register(spark: SparkSession) -> SparkSession:
    """Register `format("headrace.replies")` and the other sources with a session."""
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < OLDEST:
        raise StreamError(
            f"this is Spark {spark.version}, but Headrace needs {'.'.join(map(str, OLDEST))} or later, where Python "
            "can write a stream in Arrow: install pyspark 4.3, and use it for the cluster too"
        )
    for source in SOURCES:
        spark.dataSource.register(source)
    return spark
