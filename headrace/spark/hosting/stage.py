"""The seats of workers on a Spark cluster, seen from the driver: a host of workers (runtime/hosts.py) whose place is
the tasks of one Spark barrier stage.

One thread has all of it in hand: it submits the stage, gives the workers that the cluster wants to the seats (seat.py)
that come, and relays their lines. Rules:
1. A worker that dies is replaced in its seat. A seat or an executor that dies fails the stage, and Spark does not run
   that again: so the stage is submitted anew, after a pause that grows, and all workers begin anew in a new term.
2. Whoever comes has a ticket of the present stage, made for one task; all else is dropped unread. Secret keys never
   leave the process that made them.
3. The stage holds one Spark slot for each worker, for as long as the app runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import sysconfig
import threading
import time
from pathlib import Path

import msgspec
import zmq
from pyspark import SparkContext

from headrace.errors import HeadraceError, Stopped
from headrace.runtime.hosts import LEAVE_S_MAX, REAP_S_MAX, Hosted
from headrace.runtime.pipe import EndProcess, Job, LineMessage, ProcessEnded, Ready, StartFailed, WorkerPipe
from headrace.runtime.sockets import Keys, bind
from headrace.spark.hosting.slots import CHECK_S, check_settings, check_slots, slots_of
from headrace.spark.hosting.task import LETTER_BYTES_MAX, Envelope, RunTask, StageInfo, TaskReady

LOG = logging.getLogger("headrace.spark")
SLOTS_S_MAX = 30.0  # for executors to come when an app starts
SLOTS_AGAIN_S_MAX = 300.0  # for lost ones to come back
SEATS_WARN_S = 15.0
AWAIT_S_MAX = 10.0  # for the cluster to start again what fell
PING_S = 1.0
WAIT_MS = 100
LETTERS_MAX = 256  # read at once
PAUSE_S, PAUSE_S_MAX, DOUBLED_MAX = 0.2, 30.0, 8  # before a stage is submitted again; it doubles
STEADY_S = 60.0  # a stage that lived for so long was a good one
FRUITLESS_MAX = 3  # stages in a row of which no task ever reached the driver
CLOSE_S_MAX = 10.0


def gist(error: BaseException) -> str:
    """What a Spark job says when it fails, without the stack traces of both languages."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("headrace.errors.", "ModuleNotFoundError", "ImportError"))]
    if any("No module named 'headrace'" in line for line in told):
        told.append(
            "(install headrace for the Python that Spark's executors run, and set PYSPARK_PYTHON to that Python)"
        )
    return " ".join(told or lines[:2])[:600]


# --- a worker ---------------------------------------------------------------------------------------------------------


class TaskWorker(Hosted):
    """One incarnation of a worker, in a seat or waiting for one. The cluster's thread has one end of its line; the
    thread of the seats has the other, and sets `stage` and `is_seated`."""

    def __init__(self, job: Job, worker: int) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(job.number, WorkerPipe(ours), job.is_careful)
        self.job, self.worker, self.far = job, worker, WorkerPipe(theirs)
        self.stage: Stage | None = None
        self.is_seated = False
        self.waiting: list[LineMessage] = []  # for its seat
        self._pid = 0
        self._is_leaving = False
        self._ended: ProcessEnded | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def listen(self) -> list[LineMessage]:
        messages = super().listen()
        for message in messages:
            if isinstance(message, Ready):
                self._pid = message.pid
            elif isinstance(message, ProcessEnded):
                self._ended = message
        return messages

    def last_words(self) -> int:
        return 0 if self._ended is None else self._ended.last_words

    def has_ended(self) -> bool:
        if self._is_leaving:  # nobody else listens any more; before that, each word is for the cluster
            self.listen()
        return self._ended is not None or self.line.is_dead

    def is_silent(self, silence_us_max: int) -> bool:
        return self.is_seated and super().is_silent(silence_us_max)

    def fell_with(self, other: Hosted) -> bool:
        return (
            self.stage is not None
            and self.stage.is_over
            and isinstance(other, TaskWorker)
            and other.stage is self.stage
        )

    def ask_to_leave(self) -> None:
        self._is_leaving = True
        self.line.send(EndProcess(int(LEAVE_S_MAX * 1e6)))

    def end(self, patience_s: float = 0.0) -> int | None:
        """Its seat sees to it. A seat that does not say so in time is stuck, and its line is closed."""
        self._is_leaving = True
        if not self.has_ended():
            self.line.send(EndProcess(int(patience_s * 1e6)))
        until_s = time.monotonic() + patience_s + REAP_S_MAX
        while not self.has_ended() and time.monotonic() < until_s:
            self.line.can_receive(0.05)
        self.line.close()
        return None if self._ended is None else self._ended.code


# --- the stage --------------------------------------------------------------------------------------------------------


class TaskSlot:
    """A seat, as the driver sees it."""

    def __init__(self, hello: TaskReady) -> None:
        self.host, self.pid = hello.host, hello.pid
        self.sent, self.received = 0, 1  # letters


class Stage:
    """One submission: a ticket for each worker, and who has come."""

    def __init__(self, numbers: list[int]) -> None:
        self.tickets = {b"s" + secrets.token_bytes(32): number for number in numbers}
        self.chairs: dict[int, TaskSlot] = {}
        self.ticket_of = {number: ticket for ticket, number in self.tickets.items()}
        self.submitted_s = time.monotonic()
        self.is_over = False  # nothing more is expected of it
        self.was_reached = False
        self.warn_s = self.submitted_s + SEATS_WARN_S


class StageEnded:
    """The Spark job of a stage has come to its end, and why."""

    def __init__(self, stage: Stage, why: str, is_hopeless: bool) -> None:
        self.stage, self.why, self.is_hopeless = stage, why, is_hopeless


class SparkHosts:
    """Hosts workers in the tasks of a Spark barrier stage."""

    def __init__(self, context: SparkContext, workers: int) -> None:
        check_settings(context)
        check_slots(context, workers, SLOTS_S_MAX)
        self._context = context
        self.host = context.getConf().get("spark.driver.host") or socket.gethostname()
        self._group = f"headrace-{secrets.token_hex(4)}"
        self._commands: queue.SimpleQueue[TaskWorker | StageEnded | None] = queue.SimpleQueue()
        self._started = 0  # workers, so far
        self._workers: dict[int, TaskWorker] = {}  # the newest by number
        self._awaited = set(range(1, workers + 1))  # those the cluster is about to start
        self._stage: Stage | None = None
        self._submit_s, self._submit_s_max = 0.0, time.monotonic() + AWAIT_S_MAX  # not before; and with whom there is
        self._failures = self._fruitless = 0  # stages in a row
        self._ping_s = 0.0
        self._is_closing, self._hopeless = False, ""
        self._decoder = msgspec.json.Decoder(Envelope)
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        keys = Keys.new()
        self._sockets = zmq.Context()
        self._post = self._sockets.socket(zmq.ROUTER)
        self._post.setsockopt(zmq.LINGER, 1_000)
        self._post.setsockopt(zmq.MAXMSGSIZE, LETTER_BYTES_MAX)
        self._post.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._post.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._post.setsockopt(zmq.CURVE_SERVER, 1)
        self._post.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._invitation = StageInfo(bind(self._post, self.host), keys.public)
        self._poller = zmq.Poller()
        self._poller.register(self._post, zmq.POLLIN)
        self._poller.register(self._ear.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="headrace-seats", daemon=True)
        self._thread.start()

    # --- for the cluster ---

    def start(self, job: Job) -> TaskWorker:
        self._started += 1
        store = job.store if job.store is None or "://" in job.store else os.path.abspath(job.store)
        worker = TaskWorker(msgspec.structs.replace(job, path=shipped(job.path), store=store), self._started)
        self._hand_over(worker)
        if not self._thread.is_alive():  # nobody would ever seat it
            worker.far.send(StartFailed(self._hopeless or "the Spark stage that hosts the workers is closed"))
        return worker

    def check(self, workers: int) -> None:
        check_slots(self._context, workers, 0.0)

    def close(self) -> None:
        if self._thread.is_alive():
            self._hand_over(None)
            self._thread.join()

    def _hand_over(self, command: TaskWorker | StageEnded | None) -> None:
        self._commands.put(command)
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    # --- the thread ---

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._dissolve()
        except BaseException as error:
            LOG.exception("hosting the workers in Spark tasks failed")
            self._give_up(f"hosting the workers in Spark tasks failed: {error!r}")
        finally:
            for worker in self._workers.values():
                worker.far.close()
            self._sockets.destroy()
            self._bell.close()
            self._ear.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(WAIT_MS))
        if self._ear.fileno() in ready:
            self._ear.recv(1 << 16)
        while not self._commands.empty():
            self._obey(self._commands.get())
        for _ in range(LETTERS_MAX):
            if not self._post.poll(0):
                break
            self._read(*self._post.recv_multipart())
        for worker in list(self._workers.values()):
            if worker.far.fileno() in ready:
                self._relay(worker)
        self._tend()

    def _obey(self, command: TaskWorker | StageEnded | None) -> None:
        if command is None:
            self._is_closing = True
        elif isinstance(command, StageEnded):
            self._note_over(command)
        else:
            before = self._workers.get(command.number)
            if before is not None:
                self._relay(before)  # was its seat stuck?
                self._drop(before)
            self._workers[command.number] = command
            self._awaited.discard(command.number)
            self._poller.register(command.far.fileno(), zmq.POLLIN)
            if self._hopeless:
                command.far.send(StartFailed(self._hopeless))
            elif self._stage is not None and not self._stage.is_over:
                command.stage = self._stage
                self._place(command)

    def _tend(self) -> None:
        now_s, stage = time.monotonic(), self._stage
        if stage is None:
            is_due = now_s >= (self._submit_s_max if self._awaited else self._submit_s)
            if self._workers and is_due and not self._hopeless:
                self._submit(sorted(self._workers))
        elif not stage.is_over:
            if not set(self._workers) <= set(stage.tickets.values()):
                self._end_stage("more workers are wanted")
            elif now_s > stage.warn_s and len(stage.chairs) < len(stage.tickets):
                LOG.warning("%s workers are waiting for free Spark task slots", len(stage.tickets) - len(stage.chairs))
                stage.warn_s = now_s + SEATS_WARN_S
            if now_s - self._ping_s > PING_S:
                self._ping_s = now_s
                for number in list(stage.chairs):
                    self._write(number, None)

    # --- letters ---

    def _read(self, ticket: bytes, *parts: bytes) -> None:
        stage = self._stage
        number = None if stage is None else stage.tickets.get(ticket)
        if stage is None or number is None or len(parts) != 1:
            return None  # of a stage that was, or a stranger
        try:
            letter = self._decoder.decode(parts[0])
        except msgspec.DecodeError:
            return self._end_stage(f"the task that hosts worker {number} sent an invalid message")
        chair, message, worker = stage.chairs.get(number), letter.message, self._workers.get(number)
        if chair is None and isinstance(message, TaskReady):
            stage.chairs[number], stage.was_reached = TaskSlot(message), True
            LOG.info("worker %s is hosted on %s", number, message.host)
            self._write(number, EndProcess(0) if stage.is_over else None)
            if worker is not None:
                self._place(worker)
            return None
        if stage.is_over:
            return None
        if chair is None or letter.number != chair.received + 1:
            return self._end_stage(f"the connection to the task that hosts worker {number} broke")
        chair.received += 1
        if worker is None or worker.worker != letter.worker or isinstance(message, TaskReady | None):
            return None
        worker.far.send(message)
        if isinstance(message, ProcessEnded):
            self._drop(worker)
        return None

    def _write(self, number: int, message: LineMessage | None, worker: int = 0) -> None:
        stage = self._stage
        if stage is None or number not in stage.chairs:
            return
        chair = stage.chairs[number]
        chair.sent += 1
        data = msgspec.json.encode(Envelope(chair.sent, worker, message))
        try:
            self._post.send_multipart([stage.ticket_of[number], data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            del stage.chairs[number]
            self._end_stage(f"the task that hosts worker {number} cannot be reached: {error}")

    # --- workers ---

    def _place(self, worker: TaskWorker) -> None:
        """Its seat is there: let it begin."""
        stage = worker.stage
        if stage is None or stage is not self._stage or stage.is_over or worker.number not in stage.chairs:
            return
        worker.heard_s, worker.is_seated = time.monotonic(), True
        for message in (worker.job, *worker.waiting):
            self._write(worker.number, message, worker.worker)
        worker.waiting.clear()

    def _relay(self, worker: TaskWorker) -> None:
        """What the cluster has to say to it."""
        for message in worker.far.receive():
            if worker.is_seated:
                self._write(worker.number, message, worker.worker)
            elif isinstance(message, EndProcess):  # before it has begun
                worker.far.send(ProcessEnded(None, 0))
                self._drop(worker)
                return
            else:
                worker.waiting.append(message)
        if worker.far.is_dead:
            self._drop(worker)
            if worker.is_seated:  # and the cluster waits no longer for its end: this seat is stuck
                self._end_stage(f"the task that hosts worker {worker.number} does not answer")

    def _drop(self, worker: TaskWorker) -> None:
        if self._workers.get(worker.number) is worker:
            del self._workers[worker.number]
            self._poller.unregister(worker.far.fileno())
            worker.far.close()

    # --- the stage ---

    def _submit(self, numbers: list[int]) -> None:
        stage = self._stage = Stage(numbers)
        for worker in self._workers.values():
            worker.stage = stage
        threading.Thread(target=self._run, args=(stage,), name="headrace-stage", daemon=True).start()

    def _run(self, stage: Stage) -> None:
        """Its own thread: the Spark job, from its start to its end."""
        context, is_hopeless = self._context, False
        try:
            self._await_slots(stage)
            if not stage.is_over:
                context.setJobGroup(self._group, "Headrace: workers", interruptOnCancel=True)
                rows = sorted((number, ticket) for ticket, number in stage.tickets.items())
                context.parallelize(rows, len(rows)).barrier().mapPartitions(RunTask(self._invitation)).collect()
            why = "its tasks have ended"
        except BaseException as error:
            why = gist(error)
            is_hopeless = isinstance(error, HeadraceError)
        if context._jsc is None or context._jsc.sc().isStopped():
            why, is_hopeless = "the Spark session was stopped", True
        self._hand_over(StageEnded(stage, why, is_hopeless))

    def _await_slots(self, stage: Stage) -> None:
        """Those of an executor that was lost come back when Spark has started another one; until there are enough, a
        barrier stage would be refused."""
        until_s = stage.submitted_s + SLOTS_AGAIN_S_MAX
        while slots_of(self._context) < len(stage.tickets) and not stage.is_over:
            if time.monotonic() > until_s:
                raise Stopped(
                    f"Spark has lost executors, and for {SLOTS_AGAIN_S_MAX:.0f} s there were fewer than the "
                    f"{len(stage.tickets)} task slots that the workers need: fix the Spark cluster, and start again"
                )
            time.sleep(CHECK_S)

    def _end_stage(self, why: str) -> None:
        """Nothing more is expected of it. Its job will be over soon, and its workers are lost."""
        stage = self._stage
        if stage is None or stage.is_over:
            return
        LOG.warning("ending the Spark stage that hosts the workers: %s", why)
        self._abandon(stage)
        self._cancel()

    def _cancel(self) -> None:
        try:
            self._context.cancelJobGroup(self._group)
        except Exception as error:  # the session was stopped: the job is over too
            LOG.warning("the Spark job that hosts the workers could not be cancelled: %s", gist(error))

    def _abandon(self, stage: Stage) -> None:
        stage.is_over = True  # before the lines go dead: who fell with whom is asked then
        for number in list(stage.chairs):
            self._write(number, EndProcess(0))
        for worker in list(self._workers.values()):
            if worker.stage is stage:
                self._awaited.add(worker.number)
                self._drop(worker)

    def _note_over(self, over: StageEnded) -> None:
        stage, now_s = over.stage, time.monotonic()
        if not stage.is_over:
            LOG.warning("the Spark stage that hosts the workers has ended: %s", over.why)
            self._abandon(stage)
        self._stage = None
        self._failures = 1 if now_s - stage.submitted_s > STEADY_S else self._failures + 1
        self._fruitless = 0 if stage.was_reached else self._fruitless + 1
        self._submit_s = now_s + min(PAUSE_S * 2 ** min(self._failures - 1, DOUBLED_MAX), PAUSE_S_MAX)
        self._submit_s_max = max(self._submit_s, now_s + AWAIT_S_MAX)
        if over.is_hopeless or self._fruitless >= FRUITLESS_MAX:
            self._give_up(over.why)

    def _give_up(self, why: str) -> None:
        self._hopeless = why
        for worker in self._workers.values():
            worker.far.send(StartFailed(why))

    def _dissolve(self) -> None:
        """The workers are gone: let the tasks end, in peace if they do."""
        stage = self._stage
        if stage is None:
            return
        self._abandon(stage)
        for is_patient in (True, False):
            until_s = time.monotonic() + CLOSE_S_MAX / 2
            while time.monotonic() < until_s:
                with contextlib.suppress(queue.Empty):
                    command = self._commands.get(timeout=0.05)
                    if isinstance(command, StageEnded) and command.stage is stage:
                        return
                while self._post.poll(0):
                    self._read(*self._post.recv_multipart())  # one that comes only now
            if is_patient:
                self._cancel()


def shipped(path: list[str]) -> list[str]:
    """Where this Python looks for modules, for another machine: without what belongs to its installation, of which the
    other one has its own."""
    installed = [Path(place) for place in sysconfig.get_paths().values()]
    places = [Path(place or os.getcwd()).resolve() for place in path]
    return [
        str(place)
        for place in places
        if not any(place.is_relative_to(each) for each in installed)
        and not {"site-packages", "dist-packages"} & set(place.parts)
    ]
