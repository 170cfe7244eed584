"""The worker process: `python -m headrace.runtime.worker_process`, with the parent's line as its standard input.

One thread drives a core `Worker` and its network; a second one, the heart, tells the parent several times a second what
the first one is busy with, so that a long function is not taken for a death and one that never ends is noticed. The
process ends when the parent does: the kernel sees to it (where it can), and the heart when the line goes dead.
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
from headrace.core.channel import Received, Send, SetTimer, Tick
from headrace.core.worker import Worker
from headrace.errors import BadMessage, HeadraceError, ModelError, StoreError, WrongStore
from headrace.model.fingerprint import fingerprint
from headrace.runtime import gc_settings
from headrace.runtime.clock import Clock, system_clock
from headrace.runtime.loading import load
from headrace.runtime.pipe import Heartbeat, Job, Peers, PeersReached, Ready, StartFailed, StopDiary, WorkerPipe
from headrace.runtime.sockets import Counts, Keys, Network
from headrace.wire.messages import Frame, Run

if TYPE_CHECKING:
    from headrace.durability.inbox.batches import BatchCache

MARK = "HEADRACE_WORKER"  # in the environment: the process that is a worker, so that it starts no cluster of its own
PR_SET_PDEATHSIG = 1
COORDINATOR = 0
BEAT_S_MAX = 0.2


# Records live as long as their epoch and end by themselves: looking for cycles among them is mostly in vain.


def main() -> None:
    die_with_parent()
    line = take_line()
    job = line.expect(Job)
    if os.getppid() != job.parent_pid:  # it died before the kernel was told
        leave(1)
    os.environ[MARK] = str(os.getpid())
    config = Config(**job.config)
    heart = HeartbeatThread(line, config)
    heart.start()
    try:
        node = WorkerNode(job, config, line)
    except BaseException as error:
        line.send(StartFailed(reason(error)))
        leave(1)
    heart.node = node
    gc_settings.settle()
    line.send(Ready(node.network.endpoint, node.network.keys.public, os.getpid()))
    try:
        while not line.is_dead:
            node.serve_once()
    except BaseException:  # a broken invariant: the parent starts another worker from what it knows to be right
        traceback.print_exc()
        leave(1)
    leave(0)


def take_line() -> WorkerPipe:
    """The line, out of the way of functions that read from standard input."""
    end = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return WorkerPipe(end)


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent dies, however it dies. Elsewhere than on Linux only the line
    tells."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(code: int) -> None:
    """At once, whatever the other thread is doing."""
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

    def __init__(self, job: Job, config: Config, line: WorkerPipe, clock: Clock | None = None) -> None:
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
        self._line, self._clock = line, clock or system_clock()
        self.worker = Worker(app, config, job.number)
        self._store = job.store
        self._batches: BatchCache | None = None
        if job.store is not None and "://" in job.store:
            self._try_bucket()
        self.network = Network(job.number, Keys.new(), self.read_line, job.host)
        self.network.meet(COORDINATOR, job.coordinator.key, None)  # it says where it is once it knows this one's key
        self.network.watch(line.fileno())
        self._timer_us: int | None = None
        if job.diary_fd is not None:
            keep_diary(self.worker, job.diary_fd)

    def serve_once(self) -> None:
        self.network.wait(self._patience_ms())
        frames = self.network.receive()
        self.read_line()  # after the frames were taken: what the parent said before it sent them counts already
        if self.network.has_news:
            self.network.has_news = False
            self._line.send(PeersReached(self.network.known, frozenset(self.network.linked)))
        for frame in frames:
            if isinstance(frame.body, Run) and frame.body.stored:
                frame = self._filled(frame)
            self._step(Received(frame))
        if self._timer_us is not None and self._timer_us <= self._clock():
            self._step(Tick())

    def _filled(self, frame: Frame) -> Frame:
        """An epoch whose rows are in the store: they are read here, and nobody has to send them."""
        if frame.term < self.worker.channels.term:
            return frame  # not heard anyway, and what it names may be gone
        if self._batches is None:
            self._batches = self._open_batches()
        return msgspec.structs.replace(frame, body=self._batches.fill(frame.body))

    def _try_bucket(self) -> None:
        """What this machine lacks to read it is told at the start. One that does not answer just now may do so later. A
        folder was seen by its host."""
        try:
            self._batches = self._open_batches()
        except StoreError as error:
            if not error.retry:
                raise

    def _open_batches(self) -> BatchCache:
        from headrace.durability.identity import identity_of
        from headrace.durability.inbox.batches import BatchCache
        from headrace.durability.store import open_store

        assert self._store is not None
        store = open_store(self._store)
        if identity_of(store) is None:
            raise WrongStore(
                f"a worker finds no store at {self._store}, where the coordinator's store is: give a path that all "
                "processes see"
            )
        return BatchCache(store, self.worker.like)

    def read_line(self) -> None:
        for message in self._line.receive():
            if isinstance(message, StopDiary):
                sys.setprofile(None)
            elif isinstance(message, Peers):
                for node, peer in message.peers.items():
                    if peer is None:
                        self.network.forget(node)
                    else:
                        self.network.meet(node, peer.key, peer.endpoint)

    def _patience_ms(self) -> int | None:
        if self._timer_us is None:
            return None
        left_ms = max(0, -((self._clock() - self._timer_us) // 1_000))
        return max(1, left_ms) if self.network.is_congested else left_ms  # let the others catch up

    def _step(self, event: Received | Tick) -> None:
        now_us = self._clock()
        try:
            effects: list[Any] = self.worker.step(now_us, event)
        except BadMessage:  # well formed, from a known peer, and yet not for a worker
            self.network.refused += 1
            effects = [SetTimer(now_us)]
        self._timer_us = None
        for effect in effects:
            if isinstance(effect, Send):
                self.network.send(effect.frame)
            else:
                self._timer_us = effect.at_us


def keep_diary(worker: Worker, fd: int) -> None:
    """Note the TID of each function before it runs, in a file that the parent can read when this process is dead. The
    heart cannot do that: it does not get to beat while C code holds the interpreter, nor before a crash."""
    last = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal last
        if event == "call" and worker.running != last:
            last = worker.running
            os.pwrite(fd, last.to_bytes(8), 0)

    sys.setprofile(note)


class HeartbeatThread(threading.Thread):
    """Beats while the process lives, also while it loads its app; stops the process when the line goes dead."""

    def __init__(self, line: WorkerPipe, config: Config) -> None:
        super().__init__(name="headrace-heart", daemon=True)
        self._line = line
        self._beat_s = min(BEAT_S_MAX, config.wall_limit_us / 4e6, config.silence_us_max / 4e6)
        self.node: WorkerNode | None = None

    def run(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._line.fileno(), 0)  # nothing but its end
        running, since_s = 0, 0.0
        while not hang_up.poll(self._beat_s * 1e3) and not self._line.is_dead:
            node, now_s = self.node, time.monotonic()
            now_running = 0 if node is None else node.worker.running
            if now_running != running:
                running, since_s = now_running, now_s
            if self._line.can_send():
                running_us = int((now_s - since_s) * 1e6) if running else 0
                self._line.send(Heartbeat(running, running_us, Counts() if node is None else node.network.counts))
        leave(0)


if __name__ == "__main__":
    main()
