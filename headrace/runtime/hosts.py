"""Hosts of workers, as the cluster sees them: `Hosts` starts workers, and a `Hosted` is one incarnation of a worker.

A cluster knows a worker only through its pipe (pipe.py): its messages, and when it closes. Processes on this machine
are one kind of host (process.py); the tasks of a Spark stage are another (spark/hosting/stage.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Protocol

from headrace.runtime.pipe import (
    Heartbeat,
    Job,
    Peer,
    Peers,
    PeersReached,
    PipeMessage,
    Ready,
    StopRunTrace,
    WorkerPipe,
)
from headrace.runtime.sockets import Counts

LEAVE_S_MAX = 2.0  # for a worker to end by itself
REAP_S_MAX = 5.0  # for a process that was killed


class Hosted(ABC):
    """One incarnation of a worker. When the pipe closes, the worker counts as dead. With `keeps_run_trace` it
    notes the TID of each function that it is about to run. The run trace outlives the worker."""

    def __init__(self, number: int, pipe: WorkerPipe, keeps_run_trace: bool) -> None:
        self.number, self.pipe, self.fd = number, pipe, pipe.fileno()
        self.key = ""  # this and the endpoint are known once it is ready
        self.endpoint: str | None = None
        self.reached = PeersReached()
        self._told: dict[int, Peer] = {}  # what this worker knows of the others
        self.keeps_run_trace = keeps_run_trace
        self.heartbeat = Heartbeat(0, 0, Counts())
        self.heard_s = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.endpoint is not None

    def listen(self) -> list[PipeMessage]:
        """The messages that have arrived; heartbeats are noted here."""
        messages = self.pipe.receive()
        for message in messages:
            self.heard_s = time.monotonic()
            if isinstance(message, Heartbeat):
                self.heartbeat = message
            elif isinstance(message, Ready):
                self.endpoint, self.key = message.endpoint, message.key
            elif isinstance(message, PeersReached):
                self.reached = message
        return messages

    def add_peer(self, other: Hosted) -> None:
        """Tell this worker the other's key and, once the other knows this one's key, the other's address."""
        peer = Peer(other.key, other.endpoint if self.key in other.reached.known else None)
        if self._told.get(other.number) != peer:
            self._told[other.number] = peer
            self.pipe.send(Peers({other.number: peer}))

    def forget(self, number: int) -> None:
        self._told.pop(number, None)
        self.pipe.send(Peers({number: None}))

    def is_gone(self) -> bool:
        return self.pipe.is_dead or self.has_ended()

    def is_silent(self, silence_us_max: int) -> bool:
        return (time.monotonic() - self.heard_s) * 1e6 > silence_us_max

    def stop_run_trace(self) -> None:
        """The worker need not keep a run trace any more."""
        if self.keeps_run_trace:
            self.keeps_run_trace = False
            self.pipe.send(StopRunTrace())

    def lost_with(self, other: Hosted) -> bool:
        """Whether one failure of their host ended both. Then neither is to blame."""
        return False

    @property
    @abstractmethod
    def pid(self) -> int:
        """The id of its process, wherever that runs; 0 while it is not known."""

    @abstractmethod
    def last_tid(self) -> int:
        """The TID of the function that it ran when it died; 0 if none or not known."""

    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    def request_stop(self) -> None:
        """Let it end by itself, soon."""

    @abstractmethod
    def end(self, patience_s: float = 0.0) -> int | None:
        """Wait this long for it to end, then kill it; in any case kill everything that it started. Returns the exit
        code."""


class Hosts(Protocol):
    """Where workers run."""

    host: str  # the name by which workers reach this process

    def start(self, job: Job) -> Hosted:
        """Start a new worker, now or as soon as there is room."""

    def check(self, workers: int) -> None:
        """Raises `ConfigError` if this many workers cannot be hosted."""

    def close(self) -> None:
        """All workers have ended: release the remaining resources."""
