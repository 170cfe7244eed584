"""The slots of a Spark cluster: how many tasks can run at the same time, and whether there are enough for the
workers."""

from __future__ import annotations

import time

from pyspark import SparkContext

from headrace.errors import ConfigError

SLOTS_SPARE = 2  # besides those of the workers: for the streams that feed them
SETTLED_S = 15.0  # if the number has not changed for this long, no more are expected
CHECK_S = 0.1


def check_settings(context: SparkContext) -> None:
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise ConfigError(
            "spark.dynamicAllocation.enabled is true: Spark would remove executors, but workers must keep theirs. Set "
            "it to false for the session that hosts the workers"
        )


def slots_of(context: SparkContext) -> int:
    """How many tasks can run at the same time on the present executors."""
    spark = context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


def check_slots(context: SparkContext, workers: int, patience_s: float) -> None:
    """Check that there are enough slots for the workers and the streams. Executors may still be starting."""
    needed = workers + SLOTS_SPARE
    began_s = changed_s = time.monotonic()
    slots = slots_of(context)
    while slots < needed:
        now_s = time.monotonic()
        if now_s - began_s > patience_s or (slots and now_s - changed_s > min(SETTLED_S, patience_s)):
            what = (
                f"this app has {slots}"
                if slots
                else "Spark has given this app no executor: does the master have free cores?"
            )
            raise ConfigError(
                f"{workers} workers need {needed} Spark slots, one for each worker and {SLOTS_SPARE} for the streams "
                f"that feed them; {what}. Start fewer workers, or give the app more cores (spark.cores.max, "
                "spark.executor.cores, more Spark workers)"
            )
        time.sleep(CHECK_S)
        before, slots = slots, slots_of(context)
        changed_s = time.monotonic() if slots != before else changed_s
