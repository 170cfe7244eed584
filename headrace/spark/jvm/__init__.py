"""The Java side of a Spark session: the runtime, its archives and its caches."""
