"""Workers on a Spark cluster: each runs in a task of one Spark barrier stage; the coordinator stays in the driver.

`SparkCluster` is a `Cluster` (runtime/cluster.py) whose workers are hosted by Spark (stage.py) or, if the Spark master
is local, by this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.model.app import App
from headrace.runtime.clock import Clock
from headrace.runtime.cluster import Cluster
from headrace.runtime.hosts import Hosts
from headrace.runtime.process import Processes
from headrace.spark.hosting.stage import SparkHosts
from headrace.spark.session import is_local, session

if TYPE_CHECKING:
    from headrace.durability.store import Store


class SparkCluster(Cluster):
    """Runs an app on the executors of a Spark cluster: `SparkCluster("bank:app", spark=spark, workers=4, store=...)`.
    The executors must be able to import the app and share the store. With a local master the workers are processes on
    this machine and take no Spark slots."""

    def __init__(
        self,
        app: App | str,
        workers: int = 2,
        config: Config | None = None,
        mode: str = "auto",
        clock: Clock | None = None,
        store: str | Path | Store | None = None,
        *,
        spark: SparkSession | None = None,
        accept_logged: bool = False,
    ) -> None:
        hosts = hosts_on(spark or session(), workers)
        try:
            super().__init__(app, workers, config, mode, clock, store, hosts, accept_logged=accept_logged)
        except BaseException:
            hosts.close()
            raise


def hosts_on(spark: SparkSession, workers: int) -> Hosts:
    """The host of the workers in this session."""
    try:
        context = spark.sparkContext
    except Exception:  # a Spark Connect session has none
        raise ConfigError(
            "workers need a Spark session that runs in this process, but this one is a Spark Connect client: make one "
            "with headrace.spark.session(master='spark://...')"
        ) from None
    if is_local(context.master or ""):
        return Processes()
    return SparkHosts(context, workers)
