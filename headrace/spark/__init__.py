"""Spark, and the only package that imports pyspark: the session, streams in and out, state as tables."""

from headrace.spark.hosting.spark_cluster import SparkCluster
from headrace.spark.load import load
from headrace.spark.session import session
from headrace.spark.sources.registry import register
from headrace.spark.transact import transact

__all__ = ["SparkCluster", "load", "register", "session", "transact"]
