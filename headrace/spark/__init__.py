"""Spark, and the only place that imports pyspark: the session, and streams that become transactions."""

from headrace.spark.session import session
from headrace.spark.transact import transact

__all__ = ["session", "transact"]
