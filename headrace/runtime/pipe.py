"""The pipe between the parent and one worker process. It carries what both need to know of each other, but no
transaction.

It is a pair of connected sockets; the worker gets one of them as its standard input. Each message is a line of JSON.
The parent sends the job and the address book. The worker sends its address and the public key that it made, the peers
that it knows, and several times a second a heartbeat with what it is running. If either end dies, the other one sees
the pipe close. A pipe that is relayed over a network also carries what the end of a process cannot tell there.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TypeVar

import msgspec

from headrace.errors import BadMessage
from headrace.runtime.sockets import LOOPBACK, Counts

SEND_S_MAX = 2.0  # for a few bytes: an end that does not take them in this time is stuck
CHUNK_BYTES = 1 << 16


class AppTarget(msgspec.Struct, frozen=True):
    """Where an app is found: in a module, or (`script`) in the script that was started."""

    attribute: str
    module: str = ""
    script: str = ""

    def __str__(self) -> str:
        return f"{self.module or self.script}:{self.attribute}"


class Peer(msgspec.Struct, frozen=True):
    """An entry of the address book. Without an endpoint, the node's address is not known yet."""

    key: str
    endpoint: str | None = None


class Job(msgspec.Struct, frozen=True, tag="job"):
    """What a worker process needs to start."""

    number: int
    target: AppTarget
    functions: list[str]  # of the app, in order: the worker must find the same ones
    fingerprint: str  # of the app's code: the worker's must be the same
    config: dict[str, int]
    path: list[str]  # Python's module search path
    coordinator: Peer
    store: str | None = None  # where the rows are that an epoch names instead of holding
    host: str = LOOPBACK  # where it listens, and the name by which others reach it
    parent_pid: int = 0
    keeps_run_trace: bool = False  # note each TID before it runs: slow
    run_trace_fd: int | None = None


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Changes of the address book; None: the node is gone."""

    peers: dict[int, Peer | None]


class StopRunTrace(msgspec.Struct, frozen=True, tag="stop_trace"):
    """The workers got past what killed them: the run trace is no longer needed."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded its app and listens; this is the key it made."""

    endpoint: str
    key: str
    pid: int = 0


class PeersReached(msgspec.Struct, frozen=True, tag="met"):
    """The public keys that the worker knows, and those of them that have reached it."""

    known: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot start, and the reason."""

    error: str


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The worker is alive. It has been running the function of this TID (0: none) for this long."""

    running: int
    running_us: int
    counts: Counts


class EndProcess(msgspec.Struct, frozen=True, tag="end"):
    """For the relay of a pipe: end the process, waiting at most this long."""

    patience_us: int


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The process has ended: its exit code, and the last TID in its run trace."""

    code: int | None
    last_tid: int


PipeMessage = Job | Peers | StopRunTrace | Ready | PeersReached | StartFailed | Heartbeat | EndProcess | ProcessEnded
Expected = TypeVar("Expected", bound=PipeMessage)


class WorkerPipe:
    """One end of the pipe. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._lock = threading.Lock()
        self._received = bytearray()
        self._decoder = msgspec.json.Decoder(PipeMessage)
        self.is_dead = False  # the other end is gone, is stuck, or sent an invalid message

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: PipeMessage) -> None:
        data = memoryview(msgspec.json.encode(message) + b"\n")
        with self._lock:
            while data and not self.is_dead:
                if not self.can_send(SEND_S_MAX):
                    self.is_dead = True
                    return
                try:
                    data = data[self._end.send(data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self.is_dead = True

    def can_send(self, patience_s: float = 0.0) -> bool:
        return self._wait(select.POLLOUT, patience_s)

    def receive(self) -> list[PipeMessage]:
        """The messages that have arrived, without waiting."""
        while not self.is_dead:
            try:
                data = self._end.recv(CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            self.is_dead = not data
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        try:
            return [self._decoder.decode(line) for line in lines]
        except msgspec.DecodeError:
            self.is_dead = True
            return []

    def expect(self, kind: type[Expected]) -> Expected:
        """Wait for the first message, which must be of this kind."""
        while b"\n" not in self._received:
            self._wait(select.POLLIN)
            data = self._end.recv(CHUNK_BYTES)
            if not data:
                raise BadMessage("the connection closed before the first message")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message = self._decoder.decode(line)
        if not isinstance(message, kind):
            raise BadMessage(f"a {type(message).__name__} came where a {kind.__name__} was expected")
        return message

    def can_receive(self, patience_s: float = 0.0) -> bool:
        return self._wait(select.POLLIN, patience_s)

    def _wait(self, event: int, patience_s: float | None = None) -> bool:
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(None if patience_s is None else patience_s * 1e3))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # this also closes copies that a fork has inherited
        self._end.close()
