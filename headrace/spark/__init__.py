"""Spark, and the only place that imports pyspark: the session, streams in and out, state as tables."""

from headrace.spark.load import load
from headrace.spark.session import session
from headrace.spark.sources import register
from headrace.spark.transact import transact
from headrace.spark.workers import SparkCluster

__all__ = ["SparkCluster", "load", "register", "session", "transact"]
