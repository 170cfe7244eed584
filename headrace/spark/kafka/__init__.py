"""Kafka topics in and out, through Spark's own connector."""
