"""What one task of the Spark stage does, on the executor's machine: it runs one worker process after the other.

It does so for the cluster in the driver, as process.py does it there, and relays the pipe between the two. The worker
is a separate process, not the task's own: so it has our hash seed, can be killed with everything that it started,
leaves its run trace, and is replaced without another Spark stage. Rules:
1. A task is identified by its ticket, which only this task was given. It reaches the driver with the key and the
   address that came with the task, and only the holder of that key's secret can answer.
2. Envelopes are numbered. A missing one ends the task, and with it the stage: a relayed pipe loses nothing.
3. The first workers of a stage exchange their keys through the barrier; later changes come from the driver.
4. Nothing is left running: the worker ends with its task (by the kernel), the task when the driver is silent.
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
from headrace.runtime.pipe import (
    EndProcess,
    Job,
    Peer,
    Peers,
    PipeMessage,
    ProcessEnded,
    Ready,
    StartFailed,
    StopRunTrace,
)
from headrace.runtime.process import WorkerProcess
from headrace.runtime.sockets import Keys

ENVELOPE_BYTES_MAX = 16 << 20
WAIT_MS = 200
FIRST_MESSAGE_S_MAX = 15.0  # for the first message from the driver
SILENCE_S_MAX = 30.0  # of the driver, after that: Spark notices sooner if it has died
ADVICE = (
    "The app must be importable on Spark's executors: install it there, keep it in a folder that they share with the "
    "driver, or ship it with spark.sparkContext.addPyFile(...)"
)


class TaskReady(msgspec.Struct, frozen=True, tag="hello"):
    """The task has connected."""

    host: str
    pid: int


class Envelope(msgspec.Struct, frozen=True):
    """A message between a task and the driver. Without a message it only says that its sender is alive."""

    number: int  # from 1, each way
    worker: int = 0  # the incarnation that it is from or for; 0: the task itself
    message: PipeMessage | TaskReady | None = None


class StageInfo(NamedTuple):
    """What every task of the stage gets."""

    endpoint: str  # of the driver
    key: str  # its public key


class RunTask:
    """The function of the stage: runs the task for its one row."""

    def __init__(self, stage_info: StageInfo) -> None:
        self.stage_info = stage_info

    def __call__(self, rows: Iterable[tuple[int, bytes]]) -> list[None]:
        for number, ticket in rows:
            context = BarrierTaskContext.get()
            task = WorkerTask(self.stage_info, number, ticket, context, host_of(context))
            try:
                task.serve()
            finally:
                task.close()
        return []


def host_of(context: BarrierTaskContext) -> str:
    """The name by which Spark reaches this task's executor, so that other executors can too."""
    address = context.getTaskInfos()[context.partitionId()].address
    return address.rpartition(":")[0] or address


class WorkerTask:
    def __init__(
        self, stage_info: StageInfo, number: int, ticket: bytes, context: BarrierTaskContext, host: str
    ) -> None:
        self.stage_info, self.number, self.host, self._context = stage_info, number, host, context
        self._sent = self._received = 0
        self._worker = 0  # the incarnation of the current process
        self._process: WorkerProcess | None = None
        self._ready: Ready | None = None  # it is ready, but the driver does not know yet
        self._key_exchange: KeyExchange | None = None
        self._is_over = False
        self._heard_s = time.monotonic()
        self._sockets = zmq.Context()
        self._socket = self._sockets.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTING_ID, ticket)
        keys = Keys.new()
        self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, stage_info.key)
        self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.connect(stage_info.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._decoder = msgspec.json.Decoder(Envelope)

    def serve(self) -> None:
        self._write(TaskReady(self.host, os.getpid()), 0)
        while not self._is_over:
            self._poller.poll(WAIT_MS)
            while not self._is_over and self._socket.poll(0):
                self._read(self._decoder.decode(self._socket.recv()))
            self._check_worker()
            self._check_driver()

    def close(self) -> None:
        self._end(0.0)
        self._sockets.destroy()

    # --- the driver ---

    def _write(self, message: PipeMessage | TaskReady | None, worker: int) -> None:
        self._sent += 1
        self._socket.send(msgspec.json.encode(Envelope(self._sent, worker, message)))

    def _read(self, envelope: Envelope) -> None:
        self._received += 1
        self._heard_s = time.monotonic()
        if envelope.number != self._received:
            raise BadMessage(f"message {self._received} from the driver is missing: the connection broke")
        message = envelope.message
        if isinstance(message, Job):
            self._end(0.0)
            self._start(envelope.worker, message)
        elif isinstance(message, EndProcess) and not envelope.worker:
            self._is_over = True
        elif envelope.worker == self._worker and self._process is not None:
            if isinstance(message, EndProcess):
                self._end(message.patience_us / 1e6)
            elif isinstance(message, StopRunTrace):
                self._process.stop_run_trace()
            elif isinstance(message, Peers):
                self._introduce(self._process, message)

    def _check_driver(self) -> None:
        limit_s = SILENCE_S_MAX if self._received else FIRST_MESSAGE_S_MAX
        if time.monotonic() - self._heard_s > limit_s:
            raise Unreachable(
                f"on {self.host} nothing was received from the driver at {self.stage_info.endpoint} for {limit_s:.0f} "
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

    def _check_worker(self) -> None:
        """Read the worker's messages, and check whether it is alive."""
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
        elif self._ready is not None and self._keys_exchanged(process):
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
        for message in process.listen():  # the last ones may say why it ended
            if isinstance(message, StartFailed):
                self._write(StartFailed(self._advised(message.error)), self._worker)
        code = process.end(patience_s)
        self._write(ProcessEnded(code, process.last_tid()), self._worker)

    # --- the peers ---

    def _keys_exchanged(self, process: WorkerProcess) -> bool:
        """Whether the key exchange of the first workers is over. Until then this worker is not reported as ready."""
        if self._key_exchange is None:
            self._key_exchange = KeyExchange(self._context, process)
            self._key_exchange.start()
        if self._key_exchange.error is not None:
            raise self._key_exchange.error
        return self._key_exchange.is_over

    def _introduce(self, process: WorkerProcess, news: Peers) -> None:
        if self._key_exchange is None:
            process.pipe.send(news)
        else:
            self._key_exchange.pass_on(process, news)


class KeyExchange(threading.Thread):
    """The key exchange through the barrier, once per stage: each task sends its worker's key to all. Two workers
    connect when the driver sends them each other's address, which it does once each knows the other's key."""

    def __init__(self, context: BarrierTaskContext, process: WorkerProcess) -> None:
        super().__init__(name="headrace-key-exchange", daemon=True)
        self._context, self._process = context, process
        self._lock = threading.Lock()
        self._newer: set[int] = set()  # peers of which the driver has sent something since
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
            self._process.pipe.send(
                Peers({number: peer for number, peer in peers.items() if number not in self._newer})
            )

    def pass_on(self, process: WorkerProcess, news: Peers) -> None:
        with self._lock:
            self._newer.update(news.peers)
            process.pipe.send(news)
