"""A worker process on this machine, as its parent sees it: started, monitored, stopped. No worker outlives its parent,
not even a parent that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from headrace.runtime.hosts import REAP_S_MAX, Hosted
from headrace.runtime.pipe import Job, WorkerPipe
from headrace.runtime.sockets import LOOPBACK

HOME = str(Path(__file__).parent.parent.parent)  # the folder that holds the package


class WorkerProcess(Hosted):
    """A child process of this one. With `keeps_run_trace`, the run trace is an unnamed temporary file."""

    def __init__(self, job: Job) -> None:
        # Open as long as the process:
        self._run_trace = tempfile.TemporaryFile() if job.keeps_run_trace else None  # noqa: SIM115
        handed_down = [] if self._run_trace is None else [self._run_trace.fileno()]
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.runtime.worker_process"],
                stdin=theirs.fileno(),
                env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path},
                pass_fds=handed_down,
                start_new_session=True,  # a Ctrl-C is for the parent; and what a function starts ends with its worker
            )
        super().__init__(job.number, WorkerPipe(ours), job.keeps_run_trace)
        run_trace_fd = handed_down[0] if handed_down else None
        self.pipe.send(msgspec.structs.replace(job, parent_pid=os.getpid(), run_trace_fd=run_trace_fd))

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_tid(self) -> int:
        return 0 if self._run_trace is None else int.from_bytes(os.pread(self._run_trace.fileno(), 8, 0))

    def stop_run_trace(self) -> None:
        super().stop_run_trace()
        if self._run_trace is not None:
            self._run_trace.close()
            self._run_trace = None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def request_stop(self) -> None:
        """The worker ends by itself when the pipe is closed."""
        self.pipe.close()

    def end(self, patience_s: float = 0.0) -> int | None:
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S_MAX)
        return self._process.returncode


class Processes:
    """Hosts workers on this machine, as children of this process."""

    host = LOOPBACK

    def start(self, job: Job) -> WorkerProcess:
        return WorkerProcess(job)

    def check(self, workers: int) -> None:
        """Any number of workers is allowed."""

    def close(self) -> None:
        """There is nothing to release."""
