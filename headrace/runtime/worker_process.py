"""The worker process: `python -m headrace.runtime.worker_process`, with the pipe to the parent as its standard input.

One thread drives a core `Worker` and its network. A second one, the heartbeat thread, tells the parent several times a
second what the first one is running, so that a long function is not taken for a death, and one that never ends is
noticed. The process ends when the parent does: by the kernel (where it can), or by the heartbeat thread when the pipe
closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.config import Config
from headrace.core.events import Received, Send, SetTimer, Tick
from headrace.core.worker import Worker
from headrace.errors import BadMessage, HeadraceError, ModelError, StoreError, WrongStore
from headrace.model.fingerprint import fingerprint
from headrace.runtime import gc_settings
from headrace.runtime.clock import Clock, system_clock
from headrace.runtime.loading import load
from headrace.runtime.pipe import Heartbeat, Job, Peers, PeersReached, Ready, StartFailed, StopRunTrace, WorkerPipe
from headrace.runtime.sockets import Counts, Keys, Network
from headrace.wire.messages import Frame, Run

if TYPE_CHECKING:
    from headrace.durability.inbox.batch_cache import BatchCache

MARK = "HEADRACE_WORKER"  # an environment variable that marks worker processes, so that they start no cluster
PR_SET_PDEATHSIG = 1
COORDINATOR = 0
HEARTBEAT_S_MAX = 0.2


def main() -> None:
    die_with_parent()
    pipe = take_pipe()
    job = pipe.expect(Job)
    if os.getppid() != job.parent_pid:  # it died before the kernel was told
        leave(1)
    os.environ[MARK] = str(os.getpid())
    config = Config(**job.config)
    heartbeat = HeartbeatThread(pipe, config)
    heartbeat.start()
    try:
        node = WorkerNode(job, config, pipe)
    except BaseException as error:
        pipe.send(StartFailed(reason(error)))
        leave(1)
    heartbeat.node = node
    gc_settings.freeze_gc()
    pipe.send(Ready(node.network.endpoint, node.network.keys.public, os.getpid()))
    try:
        while not pipe.is_dead:
            node.serve_once()
    except BaseException:  # a broken invariant: the parent starts a new worker from known good state
        traceback.print_exc()
        leave(1)
    leave(0)


def take_pipe() -> WorkerPipe:
    """Take the pipe from standard input, so that functions that read standard input do not disturb it."""
    end = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return WorkerPipe(end)


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent dies for any reason. On systems other than Linux only the
    closed pipe ends it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(code: int) -> None:
    """End the process at once, whatever the other thread is doing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def reason(error: BaseException) -> str:
    if isinstance(error, HeadraceError):
        return str(error)
    return "".join(traceback.format_exception(error, limit=-3)).strip()


class WorkerNode:
    """A core worker and its network."""

    def __init__(self, job: Job, config: Config, pipe: WorkerPipe, clock: Clock | None = None) -> None:
        sys.path[:] = job.path
        app = load(job.target)
        functions = [function.full_name for function in app.functions]
        if functions != job.functions:
            raise ModelError(
                f"{job.target} has other functions in a worker than where the cluster was started ({functions} and "
                f"{job.functions}): register them all when the module is imported"
            )
        if fingerprint(app).digest != job.fingerprint:
            raise ModelError(
                f"the code of {job.target} is not what the cluster was started with: it has changed since, and a "
                "worker that starts now would run different functions from the others. Restart the whole cluster"
            )
        self._pipe, self._clock = pipe, clock or system_clock()
        self.worker = Worker(app, config, job.number)
        self._store = job.store
        self._batches: BatchCache | None = None
        if job.store is not None and "://" in job.store:
            self._try_bucket()
        self.network = Network(job.number, Keys.new(), self.read_pipe, job.host)
        self.network.add_node(COORDINATOR, job.coordinator.key, None)  # it sends its address once it knows our key
        self.network.watch(pipe.fileno())
        self._timer_us: int | None = None
        if job.run_trace_fd is not None:
            keep_run_trace(self.worker, job.run_trace_fd)

    def serve_once(self) -> None:
        self.network.wait(self._patience_ms())
        frames = self.network.receive()
        self.read_pipe()  # after the frames were taken: what the parent sent before them takes effect first
        if self.network.links_changed:
            self.network.links_changed = False
            self._pipe.send(PeersReached(self.network.known, frozenset(self.network.linked)))
        for frame in frames:
            if isinstance(frame.body, Run) and frame.body.stored:
                frame = self._filled(frame, frame.body)
            self._step(Received(frame))
        if self._timer_us is not None and self._timer_us <= self._clock():
            self._step(Tick())

    def _filled(self, frame: Frame, run: Run) -> Frame:
        """Fill in an epoch whose rows are in the store: they are read here and need not be sent."""
        if frame.term < self.worker.channels.term:
            return frame  # it is dropped anyway, and the rows that it names may be gone
        if self._batches is None:
            self._batches = self._open_batches()
        return msgspec.structs.replace(frame, body=self._batches.fill(run))

    def _try_bucket(self) -> None:
        """Open the bucket now, so that a machine that cannot read it fails at the start. A bucket that does not answer
        just now may do so later. A directory was checked by the host."""
        try:
            self._batches = self._open_batches()
        except StoreError as error:
            if not error.retry:
                raise

    def _open_batches(self) -> BatchCache:
        from headrace.durability.identity import identity_of
        from headrace.durability.inbox.batch_cache import BatchCache
        from headrace.durability.store import open_store

        assert self._store is not None
        store = open_store(self._store)
        if identity_of(store) is None:
            raise WrongStore(
                f"a worker finds no store at {self._store}, where the coordinator's store is: give a path that all "
                "processes see"
            )
        return BatchCache(store, self.worker.compiled)

    def read_pipe(self) -> None:
        for message in self._pipe.receive():
            if isinstance(message, StopRunTrace):
                sys.setprofile(None)
            elif isinstance(message, Peers):
                for node, peer in message.peers.items():
                    if peer is None:
                        self.network.forget(node)
                    else:
                        self.network.add_node(node, peer.key, peer.endpoint)

    def _patience_ms(self) -> int | None:
        if self._timer_us is None:
            return None
        left_ms = max(0, -((self._clock() - self._timer_us) // 1_000))
        return max(1, left_ms) if self.network.is_congested else left_ms  # let the peers catch up

    def _step(self, event: Received | Tick) -> None:
        now_us = self._clock()
        try:
            effects: list[Any] = self.worker.step(now_us, event)
        except BadMessage:  # well formed, from a known peer, but not for a worker
            self.network.refused += 1
            effects = [SetTimer(now_us)]
        self._timer_us = None
        for effect in effects:
            if isinstance(effect, Send):
                self.network.send(effect.frame)
            else:
                self._timer_us = effect.at_us


def keep_run_trace(worker: Worker, fd: int) -> None:
    """Note the TID of each function before it runs, in a file that the parent can read when this process is dead. A
    heartbeat cannot do that: it is not sent while C code holds the interpreter, nor before a crash."""
    last = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal last
        if event == "call" and worker.running != last:
            last = worker.running
            os.pwrite(fd, last.to_bytes(8), 0)

    sys.setprofile(note)


class HeartbeatThread(threading.Thread):
    """Sends heartbeats while the process lives, also while it loads its app. Stops the process when the pipe closes."""

    def __init__(self, pipe: WorkerPipe, config: Config) -> None:
        super().__init__(name="headrace-heartbeat", daemon=True)
        self._pipe = pipe
        self._interval_s = min(HEARTBEAT_S_MAX, config.wall_limit_us / 4e6, config.silence_us_max / 4e6)
        self.node: WorkerNode | None = None

    def run(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._pipe.fileno(), 0)  # only when it is closed
        running, since_s = 0, 0.0
        while not hang_up.poll(self._interval_s * 1e3) and not self._pipe.is_dead:
            node, now_s = self.node, time.monotonic()
            now_running = 0 if node is None else node.worker.running
            if now_running != running:
                running, since_s = now_running, now_s
            if self._pipe.can_send():
                running_us = int((now_s - since_s) * 1e6) if running else 0
                self._pipe.send(Heartbeat(running, running_us, Counts() if node is None else node.network.counts))
        leave(0)


if __name__ == "__main__":
    main()
