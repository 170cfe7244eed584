"""Workers on a Spark cluster: a real standalone one, with kills. What comes back is what the loop over the log gives.

The scenarios run in a driver of their own (on_cluster.py), which checks each answer and the state against the loop.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from headrace import Config
from headrace.errors import ConfigError
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load
from headrace.runtime.pipe import AppTarget, Job, Peer, ProcessEnded, Ready
from headrace.runtime.process import Processes
from headrace.runtime.sockets import Keys, Network
from headrace.spark.hosting import slots
from headrace.spark.hosting.spark_cluster import SparkCluster, hosts_on, is_local
from headrace.spark.hosting.stage import TaskWorker, shipped
from headrace.spark.jvm.class_archive import java_options
from headrace.spark.jvm.java import find_java
from headrace.spark.session import WORKER_PYTHON
from tests.process import bank
from tests.process.test_cluster import Load, is_alive
from tests.process.test_serving import headrace, metrics, served
from tests.spark.on_cluster import MARK
from tests.spark.standalone import CORES, HOSTS, Standalone, command_of, parent_of, standalone
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
ANSWER_S_MAX, START_S_MAX = 600.0, 600.0  # only a hang takes this long


class DriverProcess:
    """The process that has the Spark context."""

    def __init__(self, master: str, folder: Path) -> None:
        self._log = folder / "driver.log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.on_cluster", master, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ
                | {"PYTHONHASHSEED": "random"}  # of the driver; workers have their own
                | {"PYSPARK_PYTHON": str(WORKER_PYTHON)},  # Spark's start sooner with it; the command is run without
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.pid = json.loads(self._answers.get(timeout=START_S_MAX) or "{}").get("pid")
        except BaseException:
            self.kill()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line.removeprefix(MARK))
        self._answers.put("")

    def run(self, scenario: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([scenario, *args]), file=self._process.stdin, flush=True)
        try:
            answer = json.loads(self._answers.get(timeout=ANSWER_S_MAX) or '{"trouble": "the driver ended"}')
        except queue.Empty:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            answer = {"trouble": f"{scenario} hangs"}
        if "trouble" in answer:
            pytest.fail(f"{answer['trouble']}\n{self._log.read_text()[-4_000:]}")
        return answer["saw"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self.kill()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("standalone")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def driver(machines: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    made = DriverProcess(machines.master, tmp_path_factory.mktemp("driver"))
    try:
        yield made
    finally:
        made.stop()


# --- the same as the loop ---------------------------------------------------------------------------------------------


def test_workers_in_the_tasks_of_a_spark_stage_give_what_the_loop_gives(driver: DriverProcess) -> None:
    saw = driver.run("plain")
    assert saw["ran"] == saw["processes"]
    assert len(saw["processes"]) == saw["workers"] == saw["tasks"] == 2
    assert not set(saw["processes"]) & {driver.pid, *saw["children"]}, "they are Spark's, not the driver's"
    assert saw["coordinator"].startswith("tcp://127.0.0.2:"), "where Spark's driver is"
    assert saw["seeds"] == [True, True], "the driver's hash seed is its own affair"
    assert (saw["term"], saw["messages_refused"], saw["strangers_refused"]) == (1, 0, 0)


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_replaced_in_its_seat(driver: DriverProcess) -> None:
    saw = driver.run("kill", "worker")
    assert "headrace.runtime.worker_process" in saw["killed"]
    assert (saw["recoveries"], saw["new"], saw["alive"]) == (1, 1, [])
    assert saw["under_way"]
    assert saw["is_same_stage"]


@pytest.mark.parametrize(
    ("what", "command"), [("seat", "pyspark.daemon"), ("executor", "CoarseGrainedExecutorBackend")]
)
def test_a_spark_process_that_is_killed_in_the_middle_changes_no_answer(
    driver: DriverProcess, what: str, command: str
) -> None:
    saw = driver.run("kill", what)
    assert command in saw["killed"]
    assert (saw["recoveries"], saw["new"], saw["alive"]) == (1, 2, [])
    assert saw["under_way"]
    assert not saw["is_same_stage"]


def test_a_stream_goes_on_when_an_executor_is_killed_and_each_row_is_answered_once(driver: DriverProcess) -> None:
    saw = driver.run("stream")
    assert saw["before"] < saw["rows"], "it was killed when all was over"
    assert saw["recoveries"] == 1
    assert saw["committed"] == saw["replies"] == saw["ids"] == saw["rows"]


def test_a_seat_that_stands_still_is_given_up(driver: DriverProcess) -> None:
    assert driver.run("stop_seat")["new"] == 2


def test_functions_that_never_return_or_take_their_worker_with_them_are_aborted_by_decree(
    driver: DriverProcess,
) -> None:
    saw = driver.run("poison")
    assert saw["failures"] == {"10": "poisoned", "20": "poisoned", "21": "poisoned"}
    assert saw["results"] == [*[10] * 10, None, 6, *[10] * 8, None, None]
    assert saw["then"] == 11


# --- as many as are wanted --------------------------------------------------------------------------------------------


def test_rescaling_under_load_changes_no_answer(driver: DriverProcess) -> None:
    saw = driver.run("rescale")
    assert all(saw["moved"])
    assert (saw["three"], saw["one"]) == (3, [1])
    assert saw["too_many"].startswith("bad_request: 9 workers need 11 Spark slots")


def test_what_spark_cannot_host_is_refused_with_what_to_change(driver: DriverProcess) -> None:
    said = driver.run("refuse")
    assert said["slots"].startswith("bad_config: 5 workers need 7 Spark slots")
    assert f"this app has {CORES * len(HOSTS)}" in said["slots"]
    assert said["app"].startswith("bad_model: worker 1 could not start: on 127.0.0.")
    assert "no module 'hidden_bank'" in said["app"]
    assert "addPyFile" in said["app"]
    assert said["mode"].startswith("bad_config: mode")
    assert "a folder that all machines share" in said["store"]


def test_who_has_no_ticket_is_not_heard(driver: DriverProcess) -> None:
    assert driver.run("strangers") == {"answered": 0, "called": 1, "term": 1}


# --- the end ----------------------------------------------------------------------------------------------------------


def test_no_worker_outlives_a_driver_that_is_killed(driver: DriverProcess, machines: Standalone) -> None:
    """Also one that is busy in a function which never returns. This is the driver's last test."""
    pids = driver.run("leave_running")["pids"]
    assert len(set(pids)) == 4
    assert all(map(is_alive, pids))
    driver.kill()
    eventually(lambda: not any(map(is_alive, pids)), what="the end of the workers")
    eventually(lambda: not machines.executors(), what="the end of the executors")


def test_the_command_runs_an_app_on_a_spark_cluster_and_leaves_nothing(machines: Standalone, tmp_path: Path) -> None:
    """After the driver's last test: until then all slots were its."""
    words = ["--workers", "2", "--store", str(tmp_path / "store"), "--master", machines.master]
    settings = ["spark.driver.host=127.0.0.1", "spark.driver.memory=512m", "spark.executor.memory=512m"]
    settings.append(f"spark.executor.extraJavaOptions={java_options(find_java()[0])}")
    with served(*words, *(word for setting in settings for word in ("--conf", setting))) as url:
        made = headrace("call", "account.deposit", "alice", "100", "--url", url)
        assert (made.returncode, json.loads(made.stdout)) == (0, 100)
        assert (metrics(url)["workers"], metrics(url)["mode"]) == (2, "ordered")
        workers = [pid for pid in machines.descendants() if "headrace.runtime.worker_process" in command_of(pid)]
        assert len(workers) == 2
    assert not any(map(is_alive, workers))
    eventually(lambda: not machines.executors(), what="the end of the executors")
    with Runtime(load("examples.bank:app"), store=tmp_path / "store") as runtime:
        assert runtime.state("account") == {"alice": 100}


# --- without a cluster ------------------------------------------------------------------------------------------------


def test_a_local_session_has_its_workers_beside_spark(spark: Any) -> None:
    with SparkCluster(bank.app, 2, Config(epoch_transactions_max=100), spark=spark) as cluster:
        assert set(map(parent_of, cluster.processes().values())) == {os.getpid()}
        Load(cluster, seed=4, count=1_000).check()


def test_a_worker_that_says_that_it_is_ready_is_heard_also_if_it_is_looked_at_first() -> None:
    """Who asks whether it is gone must not take its words away: the cluster waited for them for ever."""
    worker = TaskWorker(Job(1, AppTarget("app", "bank"), [], "", {}, [], Peer("key")), 1)
    worker.relay_end.send(Ready("tcp://there:1", "its key", 7))
    assert not worker.is_gone()
    assert [type(message) for message in worker.listen()] == [Ready]
    assert (worker.endpoint, worker.key, worker.pid) == ("tcp://there:1", "its key", 7)
    worker.relay_end.send(ProcessEnded(-9, 42))
    worker.relay_end.close()
    worker.listen()
    assert (worker.is_gone(), worker.last_tid(), worker.end()) == (True, 42, -9)


def test_a_worker_without_a_seat_is_not_called_silent() -> None:
    worker = TaskWorker(Job(1, AppTarget("app", "bank"), [], "", {}, [], Peer("key")), 1)
    worker.heard_s -= 3_600
    assert not worker.is_silent(5_000_000)
    worker.has_task = True
    assert worker.is_silent(5_000_000)
    worker.relay_end.close()
    worker.pipe.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "192.0.2.1"])
def test_a_node_listens_where_others_find_it(host: str) -> None:
    """The last one is nobody's: as behind a gateway, it listens everywhere and gives the name it was told."""
    network = Network(1, Keys.new(), host=host)
    assert network.endpoint.startswith(f"tcp://{host}:")
    bound = network._pull.getsockopt_string(zmq.LAST_ENDPOINT)
    assert bound.startswith("tcp://0.0.0.0:" if host == "192.0.2.1" else f"tcp://{host}:")
    network.close()


@pytest.mark.parametrize(
    ("master", "is_one"),
    [("local", True), ("local[2]", True), ("local[*]", True), ("local-cluster[2,1,512]", False), ("yarn", False)],
)
def test_a_local_master_is_told_by_its_name(master: str, is_one: bool) -> None:
    assert is_local(master) == is_one
    if is_one:
        assert isinstance(hosts_on(SimpleNamespace(sparkContext=SimpleNamespace(master=master)), 2), Processes)  # type: ignore[arg-type]


class Context:
    """As much of a Spark context as the slots need."""

    def __init__(self, settings: dict[str, str], counts: list[int]) -> None:
        self._settings, self._counts = settings, counts
        self._jsc = SimpleNamespace(sc=lambda: self)
        self.resourceProfileManager = lambda: SimpleNamespace(defaultResourceProfile=lambda: None)

    def getConf(self) -> dict[str, str]:  # noqa: N802 Spark's name
        return self._settings

    def maxNumConcurrentTasks(self, profile: object) -> int:  # noqa: N802
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]


def test_dynamic_allocation_is_refused() -> None:
    slots.check_settings(Context({}, [4]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"spark\.dynamicAllocation\.enabled"):
        slots.check_settings(Context({"spark.dynamicAllocation.enabled": "true"}, [4]))  # type: ignore[arg-type]


def test_executors_that_are_still_coming_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CHECK_S", 0.001)
    slots.check_slots(Context({}, [0, 0, 2, 3, 4]), 2, 5.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"2 workers need 4 Spark slots.*has 3"):
        slots.check_slots(Context({}, [3]), 2, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no executor"):
        slots.check_slots(Context({}, [0]), 2, 0.0)  # type: ignore[arg-type]


def test_the_path_for_another_machine_leaves_out_what_belongs_to_this_python(tmp_path: Path) -> None:
    path = shipped(["", str(tmp_path), *sys.path, "/opt/x/lib/python3.11/site-packages"])
    assert path[:2] == [os.getcwd(), str(tmp_path)]
    assert not [place for place in path if "site-packages" in place or place == os.path.dirname(os.__file__)]
