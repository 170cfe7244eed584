"""A worker process, as its parent sees it: started, heard of, stopped. None outlives its parent, nor a kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from headrace.runtime.line import Beat, Job, Line, LineMessage, Ready, Relax
from headrace.runtime.sockets import Counts

HOME = str(Path(__file__).parent.parent.parent)  # the folder that holds the package
REAP_S_MAX = 5.0


class WorkerProcess:
    """One incarnation of a worker. When the line goes dead, the process is to be taken for dead. One that `is_careful`
    keeps a diary, in a file without a name: the TID of the function that it is about to run. It outlives the worker."""

    def __init__(self, job: Job, is_careful: bool = False) -> None:
        self.number, self.key = job.number, job.public_key
        self.endpoint: str | None = None  # once it is ready
        self.beat = Beat(0, 0, Counts())
        self.heard_s = time.monotonic()
        self._diary = tempfile.TemporaryFile() if is_careful else None  # noqa: SIM115 as long as the process
        handed_down = [] if self._diary is None else [self._diary.fileno()]
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join([HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.runtime.worker"],
                stdin=theirs.fileno(),
                env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path},
                pass_fds=handed_down,
                start_new_session=True,  # a Ctrl-C is for the parent; and what a function starts ends with its worker
            )
        self.line = Line(ours)
        self.fd = ours.fileno()
        self.line.send(msgspec.structs.replace(job, diary_fd=handed_down[0] if handed_down else None))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self.endpoint is not None

    @property
    def is_careful(self) -> bool:
        return self._diary is not None

    def last_words(self) -> int:
        """The TID whose function it ran when it died, 0 if none or not known."""
        return 0 if self._diary is None else int.from_bytes(os.pread(self._diary.fileno(), 8, 0))

    def relax(self) -> None:
        """It need not be careful any more."""
        if self._diary is not None:
            self.line.send(Relax())
            self._diary.close()
            self._diary = None

    def listen(self) -> list[LineMessage]:
        """What it said; heartbeats are noted here."""
        messages = self.line.receive()
        for message in messages:
            self.heard_s = time.monotonic()
            if isinstance(message, Beat):
                self.beat = message
            elif isinstance(message, Ready):
                self.endpoint = message.endpoint
        return messages

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_gone(self) -> bool:
        return self.line.is_dead or self.has_ended()

    def is_silent(self, silence_us_max: int) -> bool:
        return (time.monotonic() - self.heard_s) * 1e6 > silence_us_max

    def ask_to_leave(self) -> None:
        """It ends by itself when the line is closed."""
        self.line.close()

    def end(self, patience_s: float = 0.0) -> int | None:
        """Wait for its end this long, then kill it, and in any case all that it started. Returns the exit code."""
        self.line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S_MAX)
        return self._process.returncode
