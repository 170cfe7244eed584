"""A standalone Spark cluster of one's own: a master and two Spark workers on loopback, from the pip package.

The second Spark worker has another address of this machine, so that who binds or calls 127.0.0.1 only is found out.
None of the processes outlives the one that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark

from headrace.spark.jvm.class_archive import java_options
from headrace.spark.jvm.java import find_java
from tests.process.test_cluster import is_alive
from tests.waiting import eventually

SPARK = Path(pyspark.__file__).parent
HOSTS = ("127.0.0.1", "127.0.0.2")
CORES = 3
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Standalone:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master = ""
        home, _ = find_java()
        others = ("PYTHON", "SPARK_")  # whatever the machine has
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(others)} | {
            "JAVA_HOME": str(home),
            "SPARK_HOME": str(SPARK),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1{java_options(home)}",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "HEADRACE_PYTHON": sys.executable,  # for who wants `worker-python`
        }

    def start(self) -> None:
        log = self._launch("master.Master", "--host", HOSTS[0], "--port", "0", "--webui-port", "0")
        self.master = eventually(lambda: said(log, r"Starting Spark master at (spark://\S+)"), what="the master")
        for at, host in enumerate(HOSTS):
            place = ("--host", host, "--port", "0", "--webui-port", "0", "--work-dir", str(self.folder / f"work{at}"))
            self._launch("worker.Worker", *place, "--cores", str(CORES), "--memory", "1g", self.master)
        for at in range(len(HOSTS)):
            log = self.folder / f"{at + 1}.log"
            eventually(lambda log=log: said(log, r"(Successfully registered with master)"), what="a Spark worker")

    def _launch(self, name: str, *words: str) -> Path:
        log = self.folder / f"{len(self._processes)}.log"
        with log.open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *words],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    preexec_fn=die_with_parent,
                )
            )
        return log

    def executors(self) -> list[int]:
        """The JVMs of all executors."""
        return [pid for pid in self.descendants() if EXECUTOR in command_of(pid)]

    def descendants(self) -> list[int]:
        return descendants_of(*(process.pid for process in self._processes))

    def stop(self) -> None:
        """All of it. Executors end when their Spark worker does; whoever does not is killed, and told of."""
        rest = self.descendants()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        with contextlib.suppress(AssertionError):
            eventually(lambda: not any(map(is_alive, rest)), 10)
        alive = {pid: command_of(pid)[:200] for pid in rest if is_alive(pid)}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not alive, f"left over: {alive}"


def said(log: Path, pattern: str) -> str | None:
    found = re.search(pattern, log.read_text(errors="replace"))
    return found.group(1) if found else None


# --- processes of this machine ----------------------------------------------------------------------------------------


def descendants_of(*pids: int) -> list[int]:
    parents = {pid: parent_of(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
    found: list[int] = []
    generation = list(pids)
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        found += generation
    return found


def parent_of(pid: int) -> int:
    """0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[Standalone]:
    cluster = Standalone(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
