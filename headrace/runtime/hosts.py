"""Who hosts the workers, as the cluster sees it: somebody who starts one, and each incarnation of a worker after that.

A cluster knows a worker by its line (line.py) only: what it says there, when it goes dead. Processes of this machine
are one kind of host (process.py); the tasks of a Spark stage are another (spark/hosting/spark_cluster.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Protocol

from headrace.runtime.pipe import Heartbeat, Job, Peer, Peers, PeersReached, PipeMessage, Ready, StopDiary, WorkerPipe
from headrace.runtime.sockets import Counts

LEAVE_S_MAX = 2.0  # for a worker to end by itself
REAP_S_MAX = 5.0  # for a process that was killed


class Hosted(ABC):
    """One incarnation of a worker. When the line goes dead, the worker is to be taken for dead. One that `is_careful`
    keeps a diary: the TID of the function that it is about to run. It outlives the worker."""

    def __init__(self, number: int, pipe: WorkerPipe, is_careful: bool) -> None:
        self.number, self.pipe, self.fd = number, pipe, pipe.fileno()
        self.key = ""  # both known once it is ready
        self.endpoint: str | None = None
        self.met = PeersReached()
        self._told: dict[int, Peer] = {}  # of the others
        self.is_careful = is_careful
        self.heartbeat = Heartbeat(0, 0, Counts())
        self.heard_s = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.endpoint is not None

    def listen(self) -> list[PipeMessage]:
        """What it said; heartbeats are noted here."""
        messages = self.pipe.receive()
        for message in messages:
            self.heard_s = time.monotonic()
            if isinstance(message, Heartbeat):
                self.heartbeat = message
            elif isinstance(message, Ready):
                self.endpoint, self.key = message.endpoint, message.key
            elif isinstance(message, PeersReached):
                self.met = message
        return messages

    def hear_of(self, other: Hosted) -> None:
        """It learns the other's key; and once that one knows its own, where the other is."""
        peer = Peer(other.key, other.endpoint if self.key in other.met.known else None)
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

    def relax(self) -> None:
        """It need not be careful any more."""
        if self.is_careful:
            self.is_careful = False
            self.pipe.send(StopDiary())

    def fell_with(self, other: Hosted) -> bool:
        """Was it one mishap of their host that ended both? Then neither is to blame."""
        return False

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of its process, wherever that runs; 0 while that is not known."""

    @abstractmethod
    def last_words(self) -> int:
        """The TID whose function it ran when it died, 0 if none or not known."""

    @abstractmethod
    def has_ended(self) -> bool: ...

    @abstractmethod
    def ask_to_leave(self) -> None:
        """It ends by itself, soon."""

    @abstractmethod
    def end(self, patience_s: float = 0.0) -> int | None:
        """Wait for its end this long, then kill it, and in any case all that it started. Returns the exit code."""


class Hosts(Protocol):
    """Where workers run."""

    host: str  # the name under which they reach this process

    def start(self, job: Job) -> Hosted:
        """Begin a fresh worker. It has been started, or will be as soon as there is room."""

    def check(self, workers: int) -> None:
        """Raises `ConfigError` if so many cannot be hosted."""

    def close(self) -> None:
        """All workers have been ended: give back what is left."""
