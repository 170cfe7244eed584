"""The processes under test: `headrace run`, as a user starts it, once or several times over one store.

No process outlives this one: the kernel kills each coordinator when its parent dies, and each worker when its
coordinator dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from headrace.errors import HeadraceError

TARGET = "headrace.chaos.tested_app:app"
START_S_MAX = 60.0
REAP_S_MAX = 10.0
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
# The plain command, except that the kernel kills it when its parent dies.
SCRIPT = (
    "from headrace.runtime.worker_process import die_with_parent; die_with_parent();"
    "import runpy; runpy.run_module('headrace.cli', run_name='__main__', alter_sys=True)"
)


class ChaosFailed(HeadraceError):
    """The test itself cannot continue: a coordinator does not start, or the system has no /proc."""

    code = "chaos_failed"


class Process(NamedTuple):
    """One process. Its start time tells it from a later process with the same pid."""

    pid: int
    began: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        found = stat_of(pid)
        return None if found is None else cls(pid, found[1])

    def is_alive(self) -> bool:
        found = stat_of(self.pid)
        return found is not None and found[1] == self.began and found[0] != "Z"

    def is_stopped(self) -> bool:
        found = stat_of(self.pid)
        return found is not None and found[1] == self.began and found[0] in "tT"

    def signal(self, number: int) -> bool:
        """Sends a signal; False if the process is gone. A pidfd makes sure that no other process gets it."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def stat_of(pid: int) -> tuple[str, str] | None:
    """The state and the start time of a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]


def children_of(pid: int) -> list[Process]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [Process.of(int(child)) for child in path.read_text().split()]
    return [process for process in found if process is not None]


class Server:
    """One `headrace run`: a coordinator and its workers. Start it only in the main thread: the kernel kills it when the
    thread that started it ends."""

    def __init__(self, number: int, folder: Path, options: list[str]) -> None:
        self.number, self.url = number, ""
        self.began_s = time.monotonic()
        self._stdout = folder / f"server-{number}.out"
        self._stderr = folder / f"server-{number}.err"
        command = [sys.executable, "-u", "-c", SCRIPT, "run", TARGET, "--port", "0", *options]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONHASHSEED": "0"},  # else the command would restart itself to set it
                start_new_session=True,
            )
        found = Process.of(self._popen.pid)
        assert found is not None  # it is our child, and not reaped yet
        self.process = found
        self.known: set[Process] = {found}  # all of its processes that were ever seen

    def is_serving(self) -> bool:
        """Whether it serves. Once it does, it has an address."""
        if not self.url:
            found = ADDRESS.search(self._stdout.read_text(errors="replace"))
            self.url = found.group() if found else ""
        return bool(self.url)

    def workers(self) -> list[Process]:
        """Its current worker processes."""
        found = children_of(self.process.pid)
        self.known.update(found)
        return [process for process in found if process.is_alive()]

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        """Kills it with all its workers, and waits for their end."""
        self.workers()
        self.process.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S_MAX)
        until_s = time.monotonic() + REAP_S_MAX
        while any(process.is_alive() for process in self.known) and time.monotonic() < until_s:
            time.sleep(0.005)

    def still_alive(self) -> list[Process]:
        return [process for process in self.known if process.is_alive()]

    def last_errors(self) -> str:
        """The end of its stderr."""
        return self._stderr.read_text(errors="replace")[-2_000:].strip()


class Servers:
    """The current server, and replaced ones that may not know it yet."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        if not Path("/proc/self/stat").exists():
            raise ChaosFailed("chaos needs /proc to find processes: run it on Linux")
        self.folder, self.options = folder, options
        self.all: list[Server] = []
        self.current: Server | None = None  # the newest that serves
        self.zombies: list[Server] = []  # replaced, but alive

    def start(self) -> Server:
        server = Server(len(self.all) + 1, self.folder, self.options)
        self.all.append(server)
        return server

    def await_service(self, server: Server) -> None:
        """Waits until it serves: then it is the current one."""
        while not server.is_serving():
            self.check(server)
            time.sleep(0.01)
        self.current = server

    def check(self, server: Server) -> None:
        """Raises `ChaosFailed` if the server ended before it served, or takes too long."""
        if server.has_ended() and not server.is_serving():
            raise ChaosFailed(f"server {server.number} ended with {server.exit_code}: {server.last_errors()}")
        if time.monotonic() - server.began_s > START_S_MAX:
            raise ChaosFailed(f"server {server.number} does not serve after {START_S_MAX:.0f} s")

    def addresses(self) -> tuple[str | None, list[str]]:
        """For clients: the address of the current server, and those of replaced ones."""
        current = self.current
        return None if current is None else current.url, [zombie.url for zombie in self.zombies]

    def end(self) -> list[Process]:
        """Kills all servers, whatever state they are in. Returns the processes that are still alive."""
        self.current = None
        for server in self.all:
            server.kill()
        return [process for server in self.all for process in server.still_alive()]
