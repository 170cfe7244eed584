"""The Python processes in which Spark runs its tasks, one after the other."""

from __future__ import annotations

import functools
import sys

from headrace.runtime import garbage


@functools.cache
def settle() -> None:
    """To be called at the end of a task. Spark collects garbage after each, and would look through everything that was
    ever imported each time: more work than most tasks. Only the first call does anything, and only in such a process:
    those of users are not ours."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "pyspark.daemon":
        garbage.settle()
