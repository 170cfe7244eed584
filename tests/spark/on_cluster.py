"""The driver of the cluster tests, a process of its own: `python -m tests.spark.on_cluster <master> <folder>`.

It reads the names of scenarios and answers each with a line of JSON. A scenario runs an app on the Spark cluster,
checks what came out against the loop, and returns what it saw.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from pyspark.sql import SparkSession

from headrace import Config
from headrace.errors import HeadraceError
from headrace.runtime.cluster import Cluster
from headrace.runtime.inprocess import Runtime
from headrace.runtime.sockets import Keys
from headrace.spark import session, transact
from headrace.spark.hosting import slots, stage
from headrace.spark.hosting.spark_cluster import SparkCluster
from headrace.spark.hosting.stage import SparkHosts
from headrace.spark.hosting.task import Envelope, TaskReady
from headrace.spark.jvm.class_archive import java_options
from headrace.spark.jvm.java import find_java
from tests.process import bank
from tests.process.bank import account, compute_for_ever, crash, deposit, process_id, spin, transfer
from tests.process.test_cluster import SMALL, Load, is_alive
from tests.spark.standalone import CORES, HOSTS, command_of, descendants_of, parent_of
from tests.waiting import eventually

MARK = "=> "
PATIENCE_S = 240.0
GENERATIONS = {
    "worker": 0,
    "seat": 1,
    "executor": 3,
}  # a worker's parent is its seat; then Spark's daemon; then the JVM


def plain(spark: SparkSession, folder: Path) -> dict[str, Any]:
    with SparkCluster(bank.app, 2, SMALL, spark=spark) as cluster:
        Load(cluster, seed=11).check()
        ran = {cluster.client.call(process_id, f"k{i}") for i in range(20)}
        metrics = cluster.metrics()
        return {
            "ran": sorted(ran),
            "processes": sorted(cluster.processes().values()),
            "children": descendants_of(os.getpid()),
            "coordinator": cluster._network.endpoint,
            "seeds": [b"PYTHONHASHSEED=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in ran],
            "tasks": running_tasks(spark),
            **{name: metrics[name] for name in ("workers", "term", "strangers_refused", "messages_refused")},
        }


def running_tasks(spark: SparkSession) -> int:
    tracker = spark.sparkContext.statusTracker()
    return sum(tracker.getStageInfo(stage).numActiveTasks for stage in tracker.getActiveStageIds())


def kill(spark: SparkSession, folder: Path, what: str) -> dict[str, Any]:
    """In the middle of a stream of calls."""
    store = folder / f"store-{what}"
    with SparkCluster(bank.app, 2, SMALL, spark=spark, store=store) as cluster:
        before, stages = cluster.processes(), spark.sparkContext.statusTracker().getActiveStageIds()
        load = Load(cluster, seed=len(what), count=8_000)
        load.send(20)
        load.futures[3].result(PATIENCE_S)
        victim = before[1]
        for _ in range(GENERATIONS[what]):
            victim = parent_of(victim)
        killed, began_s = command_of(victim), time.monotonic()
        under_way = sum(not future.done() for future in load.futures)
        os.kill(victim, signal.SIGKILL)
        load.send()
        for future in load.futures:
            future.result(PATIENCE_S)
        pause_s = time.monotonic() - began_s
        load.check()
        after, metrics = cluster.processes(), cluster.metrics()
        again = cluster.client.options(request_id="0").batch(load.batches[0])
        assert list(again) == list(load.futures[0].result())
        state = cluster.state(account)
        is_same_stage = stages == spark.sparkContext.statusTracker().getActiveStageIds()
    with Runtime(bank.app, store=store) as runtime:
        assert runtime.state(account) == state
    return {
        "killed": killed,
        "under_way": under_way,
        "pause_s": round(pause_s, 2),
        "recoveries": metrics["recoveries"],
        "new": len(set(after.values()) - set(before.values())),
        "alive": [pid for pid in before.values() if is_alive(pid) and pid not in after.values()],
        "is_same_stage": is_same_stage,
    }


def stream(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Rows that Spark's own tasks bring, beside the workers, while an executor with a worker on it is killed."""
    rng, files, rows = random.Random(6), 4, 200
    (folder / "rows").mkdir()
    sums: dict[str, int] = {}
    for at in range(files):
        deposits = [{"who": f"k{rng.randrange(40)}", "amount": rng.randrange(1, 90)} for _ in range(rows)]
        (folder / "rows" / f"{at}.json").write_text("\n".join(map(json.dumps, deposits)))
        for each in deposits:
            sums[each["who"]] = sums.get(each["who"], 0) + each["amount"]
    store = str(folder / "store-stream")
    with SparkCluster(bank.app, 2, SMALL, spark=spark, store=store) as cluster:
        reader = spark.readStream.schema("who string, amount long").option("maxFilesPerTrigger", 1)
        df = reader.json(str(folder / "rows"))
        query = transact(df, deposit, key="who", args=["amount"], runtime=cluster, name="deposits")
        assert query is not None
        eventually(lambda: query.exception() or cluster.metrics()["committed"] >= rows, 2 * PATIENCE_S)
        assert query.exception() is None, str(query.exception())
        before = cluster.metrics()["committed"]
        executor = cluster.processes()[1]
        for _ in range(GENERATIONS["executor"]):
            executor = parent_of(executor)
        os.kill(executor, signal.SIGKILL)
        query.processAllAvailable()
        cluster.drain(PATIENCE_S)
        query.stop()
        assert cluster.state(account) == sums
        metrics = cluster.metrics()
    replies = spark.read.format("headrace.replies").load(store)
    ids = [row.request_id for row in replies.select("request_id").collect()]
    return {
        "rows": files * rows,
        "before": before,
        "committed": metrics["committed"],
        "recoveries": metrics["recoveries"],
        "replies": len(ids),
        "ids": len(set(ids)),
    }


def stop_seat(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Its worker lives, but nothing is heard of it, and nobody would start another one in this seat."""
    stage.REAP_S_MAX = 1.0
    with SparkCluster(bank.app, 2, Config(silence_us_max=3_000_000, resend_us=200_000), spark=spark) as cluster:
        seat = parent_of(cluster.processes()[2])
        before = set(cluster.processes().values())
        os.kill(seat, signal.SIGSTOP)
        Load(cluster, seed=3, count=1_000).check()
        eventually(lambda: not is_alive(seat))
        new = eventually(lambda: len(pids := set(cluster.processes().values()) - before - {0}) == 2 and pids)
        return {"new": len(new)}  # until they say so, they have the pid 0


def poison(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Functions that never return, or take their worker with them."""
    config = Config(wall_limit_us=2_000_000, silence_us_max=4_000_000, resend_us=200_000)
    with SparkCluster(bank.app, 2, config, spark=spark) as cluster:
        before = [(deposit, f"k{i}", 10) for i in range(10)]
        after = [(transfer, f"k{i}", f"k{i + 1}", 4) for i in range(9)]
        calls = [*before, (crash, "k3"), *after, (spin, "k4"), (compute_for_ever, "k5")]
        replies = cluster.client.submit("x", calls, wait=True).result(PATIENCE_S)
        return {
            "failures": {at: failure.code for at, failure in replies.failures.items()},
            "results": replies.results,
            "then": cluster.client.call(deposit, "k3", 1),
        }


def rescale(spark: SparkSession, folder: Path) -> dict[str, Any]:
    with SparkCluster(bank.app, 2, SMALL, spark=spark) as cluster:
        load = Load(cluster, seed=5, count=6_000)
        load.send(10)
        moved = [cluster.rescale(3)]
        load.send(10)
        eventually(lambda: len(cluster.processes()) == 3 and all(cluster.processes().values()))
        three = len(set(cluster.processes().values()))
        moved.append(cluster.rescale(1))
        load.check()
        return {
            "moved": moved,
            "three": three,
            "one": list(cluster.processes()),
            "too_many": refusal(cluster.rescale, 9),
        }


def refuse(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """What cannot be hosted, and what is said about it."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "hidden_bank.py").write_text(Path(bank.__file__).read_text())
    sys.path.append(str(hidden))
    __import__("hidden_bank")
    shutil.rmtree(hidden)  # as if it were on the driver's machine only
    slots.SETTLED_S = 0.5
    said = {
        "slots": refusal(SparkCluster, bank.app, 5, spark=spark),
        "app": refusal(SparkCluster, "hidden_bank:app", 1, spark=spark),
        "mode": refusal(SparkCluster, bank.app, 2, mode="parallel", spark=spark),
    }

    class Elsewhere(SparkHosts):
        """The driver sees a store that executors do not see."""

        def start(self, job: Any) -> Any:
            return super().start(msgspec.structs.replace(job, store=str(folder / "nowhere")))

    hosts = Elsewhere(spark.sparkContext, 1)
    said["store"] = refusal(Cluster, bank.app, 1, hosts=hosts)
    eventually(lambda: running_tasks(spark) == 0)
    return said


def refusal(ask: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        asked = ask(*args, **options)
    except HeadraceError as error:
        return f"{error.code}: {error}"
    raise AssertionError(f"{asked} was not refused")


def strangers(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Who knows the address and the public key, but has no ticket."""
    hosts = SparkHosts(spark.sparkContext, 1)
    with Cluster(bank.app, 1, hosts=hosts) as cluster:
        context, keys = zmq.Context(), Keys.new()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, b"s" + bytes(32))
        stranger.setsockopt_string(zmq.CURVE_SERVERKEY, hosts._stage_info.key)
        stranger.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        stranger.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        stranger.connect(hosts._stage_info.endpoint)
        for data in (msgspec.json.encode(Envelope(1, 0, TaskReady("there", 1))), b"nonsense"):
            stranger.send(data)
        answered = stranger.poll(1_500)
        context.destroy(0)
        return {"answered": answered, "called": cluster.client.call(deposit, "k", 1), "term": cluster.metrics()["term"]}


def leave_running(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """A function that never returns, in a cluster that nobody closes."""
    cluster = KEPT["cluster"] = SparkCluster(bank.app, 2, spark=spark)
    cluster.client.submit("x", [(spin, "k")], wait=True)
    workers = list(cluster.processes().values())
    seats = list(map(parent_of, workers))
    return {"pids": [*workers, *seats]}


KEPT: dict[str, Any] = {}
SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (plain, kill, stream, stop_seat, poison, rescale, refuse, strangers, leave_running)
}


def main(master: str, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.ERROR)
    settings = {
        "spark.driver.host": "127.0.0.2",  # not the address that everybody tries first
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java_options(find_java()[0]),
        "spark.executor.heartbeatInterval": "2s",
    }
    spark = session("cluster-tests", master=master, **settings)
    print(MARK + json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        name, *args = json.loads(line)
        slots.check_slots(
            spark.sparkContext, len(HOSTS) * CORES - slots.SLOTS_SPARE, PATIENCE_S
        )  # those killed are back
        try:
            answer: dict[str, Any] = {"saw": SCENARIOS[name](spark, folder, *args)}
        except BaseException:
            answer = {"trouble": traceback.format_exc()}
        print(MARK + json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
