"""The seat of a worker: what one task of the Spark stage does, on the executor's machine.

It runs one worker process after the other for the cluster in the driver, as process.py does it there, and relays the
line between the two. The worker is a process of its own, not the task's: so it has our hash seed, may be killed with
all that it started, leaves its last words, and is replaced without another Spark stage. Rules:
1. A seat is known by its ticket, which only its task was given. It reaches the driver by the key and the address that
   came with the task, and only who holds that key's secret can answer.
2. Letters are numbered. One that is missing ends the seat, and with it the stage: a line loses nothing.
3. The first workers of a stage find each other by the barrier's own exchange; news after that come from the driver.
4. Nobody stays: the worker ends with its seat (the kernel sees to it), the seat when the driver is silent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from pyspark import BarrierTaskContext

from headrace.durability.identity import IDENTITY
from headrace.errors import BadMessage, Unreachable
from headrace.runtime.pipe import EndProcess, Job, LineMessage, Peer, Peers, ProcessEnded, Ready, StartFailed, StopDiary
from headrace.runtime.process import WorkerProcess
from headrace.runtime.sockets import Keys

LETTER_BYTES_MAX = 16 << 20
WAIT_MS = 200
GREETING_S_MAX = 15.0  # for the driver's first word
SILENCE_S_MAX = 30.0  # of the driver, after that: Spark notices sooner if it has died
ADVICE = (
    "The app must be importable on Spark's executors: install it there, keep it in a folder that they share with the "
    "driver, or ship it with spark.sparkContext.addPyFile(...)"
)


class TaskReady(msgspec.Struct, frozen=True, tag="hello"):
    """The seat is there."""

    host: str
    pid: int


class Envelope(msgspec.Struct, frozen=True):
    """What goes between a seat and the driver. Without a message it says that its sender lives."""

    number: int  # from 1, each way
    worker: int = 0  # which incarnation it is from or for; 0: the seat itself
    message: LineMessage | TaskReady | None = None


class StageInfo(NamedTuple):
    """What every task of the stage is told."""

    endpoint: str  # of the driver
    key: str  # its public key


class RunTask:
    """The function of the stage: one seat for the one row of each task."""

    def __init__(self, invitation: StageInfo) -> None:
        self.invitation = invitation

    def __call__(self, rows: Iterable[tuple[int, bytes]]) -> list[None]:
        for number, ticket in rows:
            context = BarrierTaskContext.get()
            seat = WorkerTask(self.invitation, number, ticket, context, host_of(context))
            try:
                seat.serve()
            finally:
                seat.close()
        return []


def host_of(context: BarrierTaskContext) -> str:
    """The name under which Spark reaches this task's executor, so that other executors do too."""
    address = context.getTaskInfos()[context.partitionId()].address
    return address.rpartition(":")[0] or address


class WorkerTask:
    def __init__(
        self, invitation: StageInfo, number: int, ticket: bytes, context: BarrierTaskContext, host: str
    ) -> None:
        self.invitation, self.number, self.host, self._context = invitation, number, host, context
        self._sent = self._received = 0
        self._worker = 0  # which incarnation this process is
        self._process: WorkerProcess | None = None
        self._ready: Ready | None = None  # it is, but the others do not know yet
        self._meeting: KeyExchange | None = None
        self._is_over = False
        self._heard_s = time.monotonic()
        self._sockets = zmq.Context()
        self._post = self._sockets.socket(zmq.DEALER)
        self._post.setsockopt(zmq.LINGER, 1_000)
        self._post.setsockopt(zmq.MAXMSGSIZE, LETTER_BYTES_MAX)
        self._post.setsockopt(zmq.ROUTING_ID, ticket)
        keys = Keys.new()
        self._post.setsockopt_string(zmq.CURVE_SERVERKEY, invitation.key)
        self._post.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self._post.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._post.connect(invitation.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._post, zmq.POLLIN)
        self._decoder = msgspec.json.Decoder(Envelope)

    def serve(self) -> None:
        self._write(TaskReady(self.host, os.getpid()), 0)
        while not self._is_over:
            self._poller.poll(WAIT_MS)
            while not self._is_over and self._post.poll(0):
                self._read(self._decoder.decode(self._post.recv()))
            self._attend()
            self._check_driver()

    def close(self) -> None:
        self._end(0.0)
        self._sockets.destroy()

    # --- the driver ---

    def _write(self, message: LineMessage | TaskReady | None, worker: int) -> None:
        self._sent += 1
        self._post.send(msgspec.json.encode(Envelope(self._sent, worker, message)))

    def _read(self, letter: Envelope) -> None:
        self._received += 1
        self._heard_s = time.monotonic()
        if letter.number != self._received:
            raise BadMessage(f"message {self._received} from the driver is missing: the connection broke")
        message = letter.message
        if isinstance(message, Job):
            self._end(0.0)
            self._start(letter.worker, message)
        elif isinstance(message, EndProcess) and not letter.worker:
            self._is_over = True
        elif letter.worker == self._worker and self._process is not None:
            if isinstance(message, EndProcess):
                self._end(message.patience_us / 1e6)
            elif isinstance(message, StopDiary):
                self._process.relax()
            elif isinstance(message, Peers):
                self._introduce(self._process, message)

    def _check_driver(self) -> None:
        limit_s = SILENCE_S_MAX if self._received else GREETING_S_MAX
        if time.monotonic() - self._heard_s > limit_s:
            raise Unreachable(
                f"on {self.host} nothing was received from the driver at {self.invitation.endpoint} for {limit_s:.0f} "
                "s: set spark.driver.host to an address that executors can reach, and open its ports to them"
            )

    # --- the worker ---

    def _start(self, worker: int, job: Job) -> None:
        self._worker = worker
        if job.store is not None and "://" not in job.store and not Path(job.store, IDENTITY).is_file():
            why = (
                f"{job.store} is not a store on {self.host}: give a folder that all machines share, or a bucket, "
                "s3://..."
            )
            self._write(StartFailed(why), worker)
            return
        shipped = [place for place in job.path if os.path.exists(place)]
        path = [*shipped, *(place for place in sys.path if place not in shipped)]
        self._process = WorkerProcess(msgspec.structs.replace(job, path=path, host=self.host))
        self._poller.register(self._process.fd, zmq.POLLIN)

    def _attend(self) -> None:
        """See what the worker said, and whether it lives."""
        process = self._process
        if process is None:
            return
        for message in process.listen():
            if isinstance(message, Ready):
                self._ready = message
            elif isinstance(message, StartFailed):
                self._write(StartFailed(self._advised(message.error)), self._worker)
            else:
                self._write(message, self._worker)
        if process.is_gone():
            self._end(0.0)
        elif self._ready is not None and self._has_met(process):
            self._write(self._ready, self._worker)
            self._ready = None

    def _advised(self, error: str) -> str:
        is_missing = "no module" in error.lower() or "no such file" in error.lower()
        return f"on {self.host}: {error}" + (f". {ADVICE}" if is_missing else "")

    def _end(self, patience_s: float) -> None:
        process, self._process, self._ready = self._process, None, None
        if process is None:
            return
        self._poller.unregister(process.fd)
        for message in process.listen():  # its last words may be why
            if isinstance(message, StartFailed):
                self._write(StartFailed(self._advised(message.error)), self._worker)
        code = process.end(patience_s)
        self._write(ProcessEnded(code, process.last_words()), self._worker)

    # --- the others ---

    def _has_met(self, process: WorkerProcess) -> bool:
        """Has the exchange of the first workers come to its end? Until then nobody hears that this one is ready."""
        if self._meeting is None:
            self._meeting = KeyExchange(self._context, process)
            self._meeting.start()
        if self._meeting.error is not None:
            raise self._meeting.error
        return self._meeting.is_over

    def _introduce(self, process: WorkerProcess, news: Peers) -> None:
        if self._meeting is None:
            process.line.send(news)
        else:
            self._meeting.pass_on(process, news)


class KeyExchange(threading.Thread):
    """The barrier's exchange, once per stage: each tells all which key its worker has. Two connect when the driver says
    where the other is: it does so once it has heard that each knows the other's key."""

    def __init__(self, context: BarrierTaskContext, process: WorkerProcess) -> None:
        super().__init__(name="headrace-meeting", daemon=True)
        self._context, self._process = context, process
        self._lock = threading.Lock()
        self._newer: set[int] = set()  # of whom the driver has told something since
        self.is_over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        me = self._process
        try:
            entry = msgspec.json.encode((me.number, Peer(me.key, me.endpoint))).decode()
            told = [msgspec.json.decode(each, type=tuple[int, Peer]) for each in self._context.allGather(entry)]
            others = {number: peer for number, peer in told if number != me.number}
            self._tell({number: Peer(peer.key) for number, peer in others.items()})
            self.is_over = True
        except BaseException as error:
            self.error = error

    def _tell(self, peers: dict[int, Peer]) -> None:
        with self._lock:
            self._process.line.send(
                Peers({number: peer for number, peer in peers.items() if number not in self._newer})
            )

    def pass_on(self, process: WorkerProcess, news: Peers) -> None:
        with self._lock:
            self._newer.update(news.peers)
            process.line.send(news)
