"""The process runtime: a coordinator in this process, workers in their own processes, ZeroMQ between them.

One thread drives the coordinator. It waits for frames, for messages on the workers' pipes, for clients and for its
timer, all in one poll. It has workers started and stopped by their host (hosts.py) as the coordinator asks, and tells
the coordinator which workers are lost: a process that ended, one that is silent for `silence_us_max`, and one that runs
a single function for longer than `wall_limit_us`, which is killed and its transaction named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.config import Config
from headrace.core.coordinator import Coordinator, on_workers
from headrace.core.events import Lost, Overran, Received, Rescale, Rescaled, Send, Start, Stop, Submit, Tick
from headrace.errors import BadMessage, BadRequest, ConfigError, ModelError, Stopped
from headrace.model.app import App
from headrace.model.fingerprint import fingerprint
from headrace.runtime import loading
from headrace.runtime.clock import Clock
from headrace.runtime.driver import Driver, open_store
from headrace.runtime.hosts import LEAVE_S_MAX, Hosted, Hosts
from headrace.runtime.pipe import Job, Peer, Peers, PeersReached, Ready, StartFailed
from headrace.runtime.process import Processes
from headrace.runtime.sockets import Counts, Keys, Network
from headrace.runtime.worker_process import MARK
from headrace.wire.messages import Frame
from headrace.wire.values import shown

if TYPE_CHECKING:
    from headrace.durability.store import Store

LOG = logging.getLogger("headrace.cluster")
CHECK_S_MAX = 0.2  # how often the workers are checked
START_SILENCE_US_MAX = 10_000_000  # for a worker until its first heartbeat; while it loads its app, it sends them
DEATHS_TO_RUN_TRACE = 2  # in a row, with no transaction done in between: from then on workers record what they run
DEATHS_MAX = 10  # likewise: then a transaction is not the cause
FORGIVEN_S = 600.0  # deaths that are further apart do not count as in a row


class Cluster(Driver):
    """Runs an app on several processes: `with Cluster(app, workers=2) as cluster: cluster.client.call(...)`. Pass the
    app itself or its name, "module:attribute"; the workers import it from there."""

    EFFECTS: ClassVar[dict[type, str]] = Driver.EFFECTS | {
        Send: "_send",
        Start: "_start_worker",
        Stop: "_stop_worker",
        Rescaled: "_give_moved",
    }

    def __init__(
        self,
        app: App | str,
        workers: int = 2,
        config: Config | None = None,
        mode: str = "auto",
        clock: Clock | None = None,
        store: str | Path | Store | None = None,
        hosts: Hosts | None = None,
        *,
        accept_logged: bool = False,
    ) -> None:
        """With `accept_logged`, a recovery goes on where a function gives another reply than before the crash, if it
        writes the same: the logged reply stands."""
        if os.environ.get(MARK) == str(os.getpid()):
            raise ModelError(
                'a worker would start its own cluster: put the code that starts it under if __name__ == "__main__"'
            )
        if not isinstance(app, App | str):
            raise ModelError(f"Cluster takes an App or its name, not {shown(app)}")
        config = config or Config()
        self.target = loading.parse(app) if isinstance(app, str) else loading.target_of(app)
        app = loading.load(self.target) if isinstance(app, str) else app
        self._fingerprint = fingerprint(app).digest
        opened = open_store(store, app, config)
        core = on_workers(
            app,
            config,
            workers,
            mode,
            is_durable=opened is not None,
            seed=secrets.randbits(63) if opened is None else opened.seed,
            term=0 if opened is None else opened.log.term,
        )
        core.accepts = accept_logged
        if opened is not None:
            opened.restore(core)
        super().__init__(app, config, core, clock, opened)
        self.coordinator: Coordinator = core.backend  # type: ignore[assignment]
        self.coordinator.names_rows = isinstance(store, str | Path)  # otherwise workers could not open it
        self._hosts = hosts or Processes()
        self._workers: dict[int, Hosted] = {}
        self._leaving: list[tuple[float, Hosted]] = []  # with the time until which they may end by themselves
        self._started = threading.Event()  # all workers are linked with each other; or the start failed
        self._deaths, self._done_at_death, self._died_s = 0, 0, 0.0
        self._blamed: dict[int, int] = {}  # TID -> how many workers died while running it
        self._checked_s = time.monotonic()
        self._check_s = min(CHECK_S_MAX, config.wall_limit_us / 4e6, config.silence_us_max / 4e6)
        self._past = Counts()  # of workers that have ended
        self._wake_sender, self._wake_receiver = socket.socketpair()  # wakes the thread
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._network = Network(0, Keys.new(), host=self._hosts.host)
        self._network.watch(self._wake_receiver.fileno())
        self._peer = Peer(self._network.keys.public, self._network.endpoint)
        self._begin()
        try:
            self._started.wait()
        except BaseException:
            self.close()
            raise
        if self._broken is not None:
            self._ended.wait()
            raise self._broken

    # --- for clients ---

    def rescale(self, workers: int) -> int:
        try:
            self.coordinator.check(workers)
            self._hosts.check(workers)
        except ConfigError as error:
            raise BadRequest(str(error)) from None
        moved: int = self._ask(lambda token: Rescale(token, workers))
        return moved

    def metrics(self) -> dict[str, Any]:
        coordinator, workers = self.coordinator, list(self._workers.values())
        counts = self._network.counts.plus(self._past)
        for worker in workers:
            counts = counts.plus(worker.heartbeat.counts)
        return {
            **coordinator.metrics(),
            "app": self.app.name,
            "mode": coordinator.mode_now,
            "workers": len(workers),
            "term": coordinator.term,
            "pending": self._pending,
            **self._journal_metrics(),
            "messages_sent": counts.sent,
            "bytes_sent": counts.sent_bytes,
            "messages_refused": counts.refused,
            "messages_dropped": counts.dropped,
            "strangers_refused": counts.strangers,
        }

    def processes(self) -> dict[int, int]:
        """The workers' process ids, by number."""
        return {number: worker.pid for number, worker in list(self._workers.items())}

    # --- the thread ---

    def _serve_once(self) -> bool:
        self._turn()
        if self._network.is_congested or self._queue.empty():  # back-pressure: first let the queued frames leave
            return True
        batches, asked, is_open = self._collect_batches(self._queue.get())
        if batches:
            self._step(Submit(batches))
        if asked is not None:
            future, question = asked
            if future is None:
                self._handle_report(question)
            else:
                self._step(question(future))
        return is_open

    def _turn(self) -> None:
        """Wait, then handle the workers, their messages, and the timer."""
        ready = self._network.wait(self._patience_ms())
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(1 << 16)
        for worker in list(self._workers.values()):
            if worker.fd in ready:
                self._listen(worker)
        for frame in self._network.receive():
            self._take(frame)
        if not self._started.is_set() and self._is_linked():
            self._started.set()
        if ready or time.monotonic() - self._checked_s >= self._check_s:
            self._check()
        if self._timer_us is not None and self._timer_us <= self._clock():
            self._step(Tick())

    def _patience_ms(self) -> int:
        if not (self._queue.empty() or self._network.is_congested):
            return 0
        patience_ms = int(self._check_s * 1e3) + 1
        if self._timer_us is None:
            return patience_ms
        return min(patience_ms, max(0, -((self._clock() - self._timer_us) // 1_000)))

    def _take(self, frame: Frame) -> None:
        try:
            self._step(Received(frame))
        except BadMessage:  # well formed, from a known peer, but not for a coordinator
            self._network.refused += 1
            self._timer_us = self._clock()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or has ended
            self._wake_sender.send(b"!")

    def _clean_up(self) -> None:
        self._started.set()
        leaving = [*self._workers.values(), *(worker for _, worker in self._leaving)]
        for worker in leaving:
            worker.request_stop()
        until_s = time.monotonic() + LEAVE_S_MAX
        for worker in leaving:
            worker.end(max(0.0, until_s - time.monotonic()))
        self._hosts.close()
        self._network.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _send(self, effect: Send) -> None:
        self._network.send(effect.frame)

    def _start_worker(self, effect: Start) -> None:
        self._start(effect.worker)

    def _stop_worker(self, effect: Stop) -> None:
        self._stop(effect.worker)

    def _give_moved(self, effect: Rescaled) -> None:
        self._answer(effect.token, effect.moved)

    # --- the workers ---

    def _start(self, number: int) -> None:
        """Start a new process with new keys. Whatever was meant for the previous one is dropped."""
        before = self._dismiss(number)
        if before is not None:
            before.end()
        job = Job(
            number=number,
            target=self.target,
            functions=[function.full_name for function in self.app.functions],
            fingerprint=self._fingerprint,
            config=dataclasses.asdict(self.config),
            path=sys.path,
            coordinator=self._peer,
            store=self.store_url if self.coordinator.names_rows else None,
            keeps_run_trace=self._deaths >= DEATHS_TO_RUN_TRACE,
        )
        worker = self._workers[number] = self._hosts.start(job)
        self._network.watch(worker.fd)

    def _stop(self, number: int) -> None:
        worker = self._dismiss(number)
        if worker is not None:
            worker.request_stop()
            self._leaving.append((time.monotonic() + LEAVE_S_MAX, worker))

    def _dismiss(self, number: int) -> Hosted | None:
        """Stop all communication with this worker. Its process must still be ended."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            self._past = self._past.plus(worker.heartbeat.counts)
            self._network.unwatch(worker.fd)
            self._network.forget(number)
            for other in self._workers.values():
                other.forget(number)
        return worker

    def _listen(self, worker: Hosted) -> None:
        for message in worker.listen():
            if isinstance(message, StartFailed):
                kind = Stopped if self._started.is_set() else ModelError
                raise kind(f"worker {worker.number} could not start: {message.error}")
            if isinstance(message, Ready):  # it listens, and has known our key from the start
                self._network.add_node(worker.number, worker.key, worker.endpoint)
                worker.pipe.send(Peers({0: self._peer}))
            if isinstance(message, Ready | PeersReached) and worker.is_ready:
                self._introduce(worker)

    def _introduce(self, worker: Hosted) -> None:
        """One step further with each of the others. A worker learns another's address only after that one knows its
        key, so no worker is refused as a stranger, however late the messages arrive."""
        for other in self._workers.values():
            if other is not worker and other.is_ready:
                other.add_peer(worker)
                worker.add_peer(other)

    def _is_linked(self) -> bool:
        """Whether every worker and the coordinator have reached each other."""
        workers = self._workers.values()
        keys = {worker.key for worker in workers}
        return keys <= self._network.linked and all(
            keys - {worker.key} | {self._peer.key} <= worker.reached.linked for worker in workers
        )

    def _check(self) -> None:
        """Find the lost workers. The pipes have been read, so what was sent in time counts."""
        now_s, silence_us_max = time.monotonic(), self.config.silence_us_max
        away_s, self._checked_s = now_s - self._checked_s, now_s
        for worker in list(self._workers.values()):
            if away_s > 4 * self._check_s:  # this process itself was stopped: no worker is to blame
                worker.heard_s += away_s
            if self._workers.get(worker.number) is not worker:  # it was replaced together with another one
                continue
            heartbeat = worker.heartbeat
            if worker.is_gone():
                self._lose(worker, "it ended")
            elif heartbeat.running and heartbeat.running_us > self.config.wall_limit_us:
                self._lose(worker, "a function did not return", Overran(worker.number, heartbeat.running))
            elif worker.is_silent(silence_us_max if worker.is_ready else max(silence_us_max, START_SILENCE_US_MAX)):
                self._lose(worker, "it was silent")
        for until_s, worker in self._leaving:
            if now_s >= until_s or worker.is_gone():
                worker.end()
        if any(worker.keeps_run_trace for worker in self._workers.values()):
            self._stop_run_traces()
        self._leaving = [(until_s, worker) for until_s, worker in self._leaving if not worker.has_ended()]

    def _lose(self, worker: Hosted, why: str, event: Lost | Overran | None = None) -> None:
        self._dismiss(worker.number)
        code = worker.end()
        LOG.warning("worker %s (process %s, exit code %s) is lost: %s", worker.number, worker.pid, code, why)
        done, now_s = self._done(), time.monotonic()
        is_new = event is not None or done > self._done_at_death or now_s - self._died_s > FORGIVEN_S
        self._deaths = 0 if is_new else self._deaths + 1
        self._done_at_death, self._died_s = done, now_s
        if self._deaths >= DEATHS_MAX:
            raise Stopped(f"workers died {DEATHS_MAX} times without any progress; the last: {why}, exit code {code}")
        for other in list(self._workers.values()):
            if worker.lost_with(other):  # replace it now: the loss starts a new term anyway
                self._start(other.number)
        self._step(event or self._explain(worker))

    def _explain(self, worker: Hosted) -> Lost | Overran:
        """A worker that dies twice in the same transaction dies of it: a crash, memory exhausted, C code that never
        ends. A single death may be a coincidence."""
        tid = worker.last_tid()
        if not tid:
            return Lost(worker.number)
        self._blamed[tid] = self._blamed.get(tid, 0) + 1
        if self._blamed[tid] == 1:
            return Lost(worker.number)
        self._deaths = DEATHS_TO_RUN_TRACE
        return Overran(worker.number, tid)

    def _stop_run_traces(self) -> None:
        """Once the epochs that were running at the last death are done, workers need not record what they run any
        more."""
        under_way = self.config.epochs_in_flight_max * self.config.epoch_transactions_max
        if not self._unanswered or self._done() >= self._done_at_death + under_way:
            self._blamed.clear()
            for worker in self._workers.values():
                worker.stop_run_trace()

    def _done(self) -> int:
        return int(self.engine.committed + self.engine.aborted)
