"""Headrace workers in the tasks of a Spark stage."""
