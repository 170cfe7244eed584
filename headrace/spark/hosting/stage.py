"""Workers in the tasks of one Spark barrier stage, seen from the driver: a host of workers (runtime/hosts.py).

One thread does it all: it submits the stage, gives the workers that the cluster starts to the tasks (task.py) that
connect, and relays their pipes. Rules:
1. A worker that dies is replaced in its task. A task or an executor that dies fails the stage, and Spark does not run
   it again. So the stage is submitted again, after a growing pause, and all workers start again in a new term.
2. A task that connects has a ticket of the present stage, made for this task only; everything else is dropped unread.
   Secret keys never leave the process that made them.
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
from headrace.runtime.pipe import EndProcess, Job, PipeMessage, ProcessEnded, Ready, StartFailed, WorkerPipe
from headrace.runtime.sockets import Keys, bind
from headrace.spark.hosting.slots import CHECK_S, check_settings, check_slots, slots_of
from headrace.spark.hosting.task import ENVELOPE_BYTES_MAX, Envelope, RunTask, StageInfo, TaskReady

LOG = logging.getLogger("headrace.spark")
SLOTS_S_MAX = 30.0  # for executors to start when an app starts
SLOTS_AGAIN_S_MAX = 300.0  # for lost executors to come back
SLOTS_WARN_S = 15.0
AWAIT_S_MAX = 10.0  # for the cluster to start lost workers again
PING_S = 1.0
WAIT_MS = 100
ENVELOPES_MAX = 256  # read at once
PAUSE_S, PAUSE_S_MAX, DOUBLED_MAX = 0.2, 30.0, 8  # before a stage is submitted again; it doubles each time
STEADY_S = 60.0  # a stage that lived this long counts as healthy
UNREACHED_MAX = 3  # stages in a row without a task that reached the driver
CLOSE_S_MAX = 10.0


def gist(error: BaseException) -> str:
    """The message of a failed Spark job, without the stack traces of both languages."""
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
    """One incarnation of a worker, in a task or waiting for one. The cluster's thread has one end of its pipe; the
    thread of `SparkHosts` has the other (`relay_end`), and sets `stage` and `has_task`."""

    def __init__(self, job: Job, worker: int) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(job.number, WorkerPipe(ours), job.keeps_run_trace)
        self.job, self.worker, self.relay_end = job, worker, WorkerPipe(theirs)
        self.stage: Stage | None = None
        self.has_task = False
        self.waiting: list[PipeMessage] = []  # for its task
        self._pid = 0
        self._is_leaving = False
        self._ended: ProcessEnded | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def listen(self) -> list[PipeMessage]:
        messages = super().listen()
        for message in messages:
            if isinstance(message, Ready):
                self._pid = message.pid
            elif isinstance(message, ProcessEnded):
                self._ended = message
        return messages

    def last_tid(self) -> int:
        return 0 if self._ended is None else self._ended.last_tid

    def has_ended(self) -> bool:
        if self._is_leaving:  # the cluster does not listen any more; before, each message is for the cluster
            self.listen()
        return self._ended is not None or self.pipe.is_dead

    def is_silent(self, silence_us_max: int) -> bool:
        return self.has_task and super().is_silent(silence_us_max)

    def lost_with(self, other: Hosted) -> bool:
        return (
            self.stage is not None
            and self.stage.is_over
            and isinstance(other, TaskWorker)
            and other.stage is self.stage
        )

    def request_stop(self) -> None:
        self._is_leaving = True
        self.pipe.send(EndProcess(int(LEAVE_S_MAX * 1e6)))

    def end(self, patience_s: float = 0.0) -> int | None:
        """Its task ends it. A task that does not confirm this in time is stuck, and the pipe is closed."""
        self._is_leaving = True
        if not self.has_ended():
            self.pipe.send(EndProcess(int(patience_s * 1e6)))
        until_s = time.monotonic() + patience_s + REAP_S_MAX
        while not self.has_ended() and time.monotonic() < until_s:
            self.pipe.can_receive(0.05)
        self.pipe.close()
        return None if self._ended is None else self._ended.code


# --- the stage --------------------------------------------------------------------------------------------------------


class ConnectedTask:
    """A task that has connected to the driver."""

    def __init__(self, hello: TaskReady) -> None:
        self.host, self.pid = hello.host, hello.pid
        self.sent, self.received = 0, 1  # envelopes


class Stage:
    """One submission of the stage: a ticket for each worker, and the tasks that have connected."""

    def __init__(self, numbers: list[int]) -> None:
        self.tickets = {b"s" + secrets.token_bytes(32): number for number in numbers}
        self.tasks: dict[int, ConnectedTask] = {}
        self.ticket_of = {number: ticket for ticket, number in self.tickets.items()}
        self.submitted_s = time.monotonic()
        self.is_over = False  # nothing more is expected from it
        self.was_reached = False
        self.warn_s = self.submitted_s + SLOTS_WARN_S


class StageEnded:
    """The Spark job of a stage has ended, and the reason."""

    def __init__(self, stage: Stage, why: str, is_fatal: bool) -> None:
        self.stage, self.why, self.is_fatal = stage, why, is_fatal


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
        self._awaited = set(range(1, workers + 1))  # those that the cluster is about to start
        self._stage: Stage | None = None
        self._submit_s = 0.0  # submit no stage before this
        self._submit_s_max = time.monotonic() + AWAIT_S_MAX  # then submit it with the workers there are
        self._failures = self._unreached = 0  # stages in a row
        self._ping_s = 0.0
        self._is_closing, self._fatal = False, ""
        self._decoder = msgspec.json.Decoder(Envelope)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        keys = Keys.new()
        self._sockets = zmq.Context()
        self._socket = self._sockets.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._stage_info = StageInfo(bind(self._socket, self.host), keys.public)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="headrace-spark-hosts", daemon=True)
        self._thread.start()

    # --- for the cluster ---

    def start(self, job: Job) -> TaskWorker:
        self._started += 1
        store = job.store if job.store is None or "://" in job.store else os.path.abspath(job.store)
        worker = TaskWorker(msgspec.structs.replace(job, path=shipped(job.path), store=store), self._started)
        self._hand_over(worker)
        if not self._thread.is_alive():  # no task would ever get it
            worker.relay_end.send(StartFailed(self._fatal or "the Spark stage that hosts the workers is closed"))
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
            self._wake_sender.send(b"!")

    # --- the thread ---

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._end_tasks()
        except BaseException as error:
            LOG.exception("hosting the workers in Spark tasks failed")
            self._give_up(f"hosting the workers in Spark tasks failed: {error!r}")
        finally:
            for worker in self._workers.values():
                worker.relay_end.close()
            self._sockets.destroy()
            self._wake_sender.close()
            self._wake_receiver.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(WAIT_MS))
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(1 << 16)
        while not self._commands.empty():
            self._handle(self._commands.get())
        for _ in range(ENVELOPES_MAX):
            if not self._socket.poll(0):
                break
            self._read(*self._socket.recv_multipart())
        for worker in list(self._workers.values()):
            if worker.relay_end.fileno() in ready:
                self._relay(worker)
        self._check()

    def _handle(self, command: TaskWorker | StageEnded | None) -> None:
        if command is None:
            self._is_closing = True
        elif isinstance(command, StageEnded):
            self._note_ended(command)
        else:
            before = self._workers.get(command.number)
            if before is not None:
                self._relay(before)  # was its task stuck?
                self._drop(before)
            self._workers[command.number] = command
            self._awaited.discard(command.number)
            self._poller.register(command.relay_end.fileno(), zmq.POLLIN)
            if self._fatal:
                command.relay_end.send(StartFailed(self._fatal))
            elif self._stage is not None and not self._stage.is_over:
                command.stage = self._stage
                self._place(command)

    def _check(self) -> None:
        now_s, stage = time.monotonic(), self._stage
        if stage is None:
            is_due = now_s >= (self._submit_s_max if self._awaited else self._submit_s)
            if self._workers and is_due and not self._fatal:
                self._submit(sorted(self._workers))
        elif not stage.is_over:
            if not set(self._workers) <= set(stage.tickets.values()):
                self._end_stage("more workers are wanted")
            elif now_s > stage.warn_s and len(stage.tasks) < len(stage.tickets):
                LOG.warning("%s workers are waiting for free Spark task slots", len(stage.tickets) - len(stage.tasks))
                stage.warn_s = now_s + SLOTS_WARN_S
            if now_s - self._ping_s > PING_S:
                self._ping_s = now_s
                for number in list(stage.tasks):
                    self._write(number, None)

    # --- envelopes ---

    def _read(self, ticket: bytes, *parts: bytes) -> None:
        stage = self._stage
        number = None if stage is None else stage.tickets.get(ticket)
        if stage is None or number is None or len(parts) != 1:
            return None  # from an earlier stage, or a stranger
        try:
            envelope = self._decoder.decode(parts[0])
        except msgspec.DecodeError:
            return self._end_stage(f"the task that hosts worker {number} sent an invalid message")
        task, message, worker = stage.tasks.get(number), envelope.message, self._workers.get(number)
        if task is None and isinstance(message, TaskReady):
            stage.tasks[number], stage.was_reached = ConnectedTask(message), True
            LOG.info("worker %s is hosted on %s", number, message.host)
            self._write(number, EndProcess(0) if stage.is_over else None)
            if worker is not None:
                self._place(worker)
            return None
        if stage.is_over:
            return None
        if task is None or envelope.number != task.received + 1:
            return self._end_stage(f"the connection to the task that hosts worker {number} broke")
        task.received += 1
        if worker is None or worker.worker != envelope.worker or isinstance(message, TaskReady | None):
            return None
        worker.relay_end.send(message)
        if isinstance(message, ProcessEnded):
            self._drop(worker)
        return None

    def _write(self, number: int, message: PipeMessage | None, worker: int = 0) -> None:
        stage = self._stage
        if stage is None or number not in stage.tasks:
            return
        task = stage.tasks[number]
        task.sent += 1
        data = msgspec.json.encode(Envelope(task.sent, worker, message))
        try:
            self._socket.send_multipart([stage.ticket_of[number], data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            del stage.tasks[number]
            self._end_stage(f"the task that hosts worker {number} cannot be reached: {error}")

    # --- workers ---

    def _place(self, worker: TaskWorker) -> None:
        """Its task has connected: start the worker."""
        stage = worker.stage
        if stage is None or stage is not self._stage or stage.is_over or worker.number not in stage.tasks:
            return
        worker.heard_s, worker.has_task = time.monotonic(), True
        for message in (worker.job, *worker.waiting):
            self._write(worker.number, message, worker.worker)
        worker.waiting.clear()

    def _relay(self, worker: TaskWorker) -> None:
        """Pass on what the cluster sends to a worker."""
        for message in worker.relay_end.receive():
            if worker.has_task:
                self._write(worker.number, message, worker.worker)
            elif isinstance(message, EndProcess):  # before the worker has started
                worker.relay_end.send(ProcessEnded(None, 0))
                self._drop(worker)
                return
            else:
                worker.waiting.append(message)
        if worker.relay_end.is_dead:
            self._drop(worker)
            if worker.has_task:  # and the cluster has stopped waiting for its end: the task is stuck
                self._end_stage(f"the task that hosts worker {worker.number} does not answer")

    def _drop(self, worker: TaskWorker) -> None:
        if self._workers.get(worker.number) is worker:
            del self._workers[worker.number]
            self._poller.unregister(worker.relay_end.fileno())
            worker.relay_end.close()

    # --- the stage ---

    def _submit(self, numbers: list[int]) -> None:
        stage = self._stage = Stage(numbers)
        for worker in self._workers.values():
            worker.stage = stage
        threading.Thread(target=self._run, args=(stage,), name="headrace-stage", daemon=True).start()

    def _run(self, stage: Stage) -> None:
        """The Spark job, from its start to its end, in its own thread."""
        context, is_fatal = self._context, False
        try:
            self._await_slots(stage)
            if not stage.is_over:
                context.setJobGroup(self._group, "Headrace: workers", interruptOnCancel=True)
                rows = sorted((number, ticket) for ticket, number in stage.tickets.items())
                context.parallelize(rows, len(rows)).barrier().mapPartitions(RunTask(self._stage_info)).collect()
            why = "its tasks have ended"
        except BaseException as error:
            why = gist(error)
            is_fatal = isinstance(error, HeadraceError)
        if context._jsc is None or context._jsc.sc().isStopped():
            why, is_fatal = "the Spark session was stopped", True
        self._hand_over(StageEnded(stage, why, is_fatal))

    def _await_slots(self, stage: Stage) -> None:
        """Wait for enough slots. Those of a lost executor come back when Spark has started another one; until then
        Spark would refuse a barrier stage."""
        until_s = stage.submitted_s + SLOTS_AGAIN_S_MAX
        while slots_of(self._context) < len(stage.tickets) and not stage.is_over:
            if time.monotonic() > until_s:
                raise Stopped(
                    f"Spark has lost executors, and for {SLOTS_AGAIN_S_MAX:.0f} s there were fewer than the "
                    f"{len(stage.tickets)} task slots that the workers need: fix the Spark cluster, and start again"
                )
            time.sleep(CHECK_S)

    def _end_stage(self, why: str) -> None:
        """End the stage. Its job ends soon, and its workers are lost."""
        stage = self._stage
        if stage is None or stage.is_over:
            return
        LOG.warning("ending the Spark stage that hosts the workers: %s", why)
        self._abandon(stage)
        self._cancel()

    def _cancel(self) -> None:
        try:
            self._context.cancelJobGroup(self._group)
        except Exception as error:  # the session was stopped: the job has ended too
            LOG.warning("the Spark job that hosts the workers could not be cancelled: %s", gist(error))

    def _abandon(self, stage: Stage) -> None:
        stage.is_over = True  # before the pipes close: the cluster then asks `lost_with`
        for number in list(stage.tasks):
            self._write(number, EndProcess(0))
        for worker in list(self._workers.values()):
            if worker.stage is stage:
                self._awaited.add(worker.number)
                self._drop(worker)

    def _note_ended(self, over: StageEnded) -> None:
        stage, now_s = over.stage, time.monotonic()
        if not stage.is_over:
            LOG.warning("the Spark stage that hosts the workers has ended: %s", over.why)
            self._abandon(stage)
        self._stage = None
        self._failures = 1 if now_s - stage.submitted_s > STEADY_S else self._failures + 1
        self._unreached = 0 if stage.was_reached else self._unreached + 1
        self._submit_s = now_s + min(PAUSE_S * 2 ** min(self._failures - 1, DOUBLED_MAX), PAUSE_S_MAX)
        self._submit_s_max = max(self._submit_s, now_s + AWAIT_S_MAX)
        if over.is_fatal or self._unreached >= UNREACHED_MAX:
            self._give_up(over.why)

    def _give_up(self, why: str) -> None:
        self._fatal = why
        for worker in self._workers.values():
            worker.relay_end.send(StartFailed(why))

    def _end_tasks(self) -> None:
        """The workers have ended: let the tasks end by themselves, or cancel them."""
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
                while self._socket.poll(0):
                    self._read(*self._socket.recv_multipart())  # a task that connects only now
            if is_patient:
                self._cancel()


def shipped(path: list[str]) -> list[str]:
    """This Python's module search path, for another machine: without its installation, since the other machine has its
    own."""
    installed = [Path(place) for place in sysconfig.get_paths().values()]
    places = [Path(place or os.getcwd()).resolve() for place in path]
    return [
        str(place)
        for place in places
        if not any(place.is_relative_to(each) for each in installed)
        and not {"site-packages", "dist-packages"} & set(place.parts)
    ]
