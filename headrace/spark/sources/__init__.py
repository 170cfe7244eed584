"""Spark data sources: calls in; replies, changes, state and rejected rows out."""
