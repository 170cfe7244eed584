"""The world: one thread, one heap of (time, tie, event), virtual time only, and the production core in it.

A coordinator runs in a process (coordinator_process.py) and is its node 0; a worker's number may have several
incarnations there: crashed ones vanish, one that was paused or cut off when it was replaced continues as a zombie until
the driver can stop it. A superseded coordinator continues in its process, too. All events and effects of the core and
all operations on the disk go into the trace; its digest identifies a run.

Rules:
1. Events at the same instant run in random order: ties are drawn.
2. Every effect is applied separately: a crash may come between any two of them, and in every store operation.
3. Nothing here depends on hashes, addresses or the machine: a seed gives the same trace everywhere.
4. A process that is in the middle of an operation while others run is a Python call in which events happen: processes
   stopped like that continue in reverse order.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.core.events import (
    Answer,
    Append,
    Check,
    Keep,
    LogFailures,
    Lost,
    Overran,
    Perform,
    Read,
    ReadResult,
    Received,
    Refuse,
    Rescale,
    Rescaled,
    Responded,
    Save,
    Send,
    SetTimer,
    Start,
    Stop,
    Tick,
)
from headrace.core.program import values_of
from headrace.core.source_batches import EXPIRED
from headrace.core.worker import Worker
from headrace.sim.coordinator_process import CoordinatorProcess
from headrace.sim.disk import Disk
from headrace.sim.history import History, StateRead
from headrace.sim.network import SimNetwork
from headrace.sim.node import SimClock, SimNode
from headrace.sim.parameters import Parameters
from headrace.sim.promises import Archive
from headrace.sim.timer_check import NEVER_US
from headrace.sim.workload import Workload
from headrace.wire.messages import Answers, Frame

EVENTS_MAX, EVENTS_PER_TRANSACTION_MAX = 100_000, 4_000  # each overrun has the epochs since the last copy run again
STARTS_MAX = 60  # of coordinators: a run must end
FAR_US = 15_000_000  # what is due later than that, in a world whose clocks jump, is reached by a jump or not at all


class CoreFailed(Exception):
    """The core raised an exception, or did something that is never allowed: the run cannot continue."""


class World:
    def __init__(self, parameters: Parameters, workload: Workload, trace: Callable[[str], None] | None = None) -> None:
        self.parameters, self.workload = parameters, workload
        self.schedule = parameters.rng("schedule")
        self.clocks = parameters.rng("clock")
        self.disk_times = parameters.rng("disk times")
        self.settings = parameters.rng("settings")
        self.changes = parameters.rng("changes")
        self.outside_rng = parameters.rng("outside")
        self.versions = parameters.rng("versions")
        self.now_us = 1_000_000
        self.heap: list[tuple[int, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.ahead_us = 0  # by which the clocks of coordinators have jumped
        self.pushed = self.events = self.effects = self.nested = 0
        self.events_max = EVENTS_MAX + EVENTS_PER_TRANSACTION_MAX * parameters.transactions
        self.is_chaos = True
        self.faults: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.digest = hashlib.blake2b(digest_size=16)
        self.trace = trace
        self.last_token = 0
        self.zombies: list[SimNode] = []
        self.processes: list[CoordinatorProcess] = []
        self.process: CoordinatorProcess | None = None  # the newest that serves
        self.on_start: Callable[[SimNode], None] = lambda node: None
        self.on_effect: Callable[[SimNode, str], None] = lambda node, name: None
        self.on_operation: Callable[[CoordinatorProcess, str, str], None] = lambda process, op, name: None
        self.on_pause: Callable[[CoordinatorProcess], None] = lambda process: None
        self.on_open: Callable[[CoordinatorProcess], None] = lambda process: None
        self.on_end: Callable[[CoordinatorProcess], None] = lambda process: None
        self.on_saved: Callable[[CoordinatorProcess], None] = lambda process: None
        self.disk = Disk(
            parameters.rng("disk"), parameters.faults.of_disk, parameters.store != "objects", self._later, self.fault
        )
        self.archive = Archive(self)
        self.history = History(values_of(workload.app, parameters.config), self.violate)
        self.network = SimNetwork(self, parameters.rng("network"))

    # --- used by the other modules ---

    def at(self, time_us: int, action: Callable[..., None], *args: Any) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time_us, self.schedule.random(), self.pushed, action, args))

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now_us + delay_us, action, *args)

    def _later(self, action: Callable[[], None]) -> None:
        self.after(self.disk_times.randint(1, 50_000), action)

    def travel_us(self, rng: random.Random) -> int:
        return rng.randint(1, 2 * self.parameters.delay_us)

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def probe(self, name: str) -> None:
        self.probes[name] += 1

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def broken(self, what: str) -> CoreFailed:
        return CoreFailed(what)

    @property
    def is_durable(self) -> bool:
        return self.parameters.store != "none"

    @property
    def workers(self) -> dict[int, SimNode]:
        return self.process.workers if self.process is not None else {}

    @property
    def coordinator(self) -> SimNode:
        """The current coordinator's node."""
        assert self.process is not None
        return self.process.node

    def is_slow(self) -> bool:
        return self.is_chaos and self.parameters.faults.slow_store and self.disk_times.random() < 0.02

    # --- time ---

    def begin(self) -> None:
        self.start_coordinator()
        if self.process is None:
            self.run(lambda: self.process is not None, self.now_us + 10_000_000)

    def run(self, until: Callable[[], bool], until_us: int) -> bool:
        """Runs events until the condition holds. False if the time is over, or no events are left, before that."""
        heap = self.heap
        while not until():
            if not heap or heap[0][0] > until_us:
                return False
            time_us, _, _, action, args = heapq.heappop(heap)
            self.now_us = max(time_us, self.now_us)
            self.events += 1
            if self.events > self.events_max:
                raise CoreFailed(f"more than {self.events_max} events: it does not come to rest")
            action(*args)
        return True

    def run_others_while(self, waits: Callable[[], bool], until_us: int | None = None) -> None:
        """Runs other events while the caller, which is in the middle of an operation, waits."""
        self.nested += 1
        self.run(lambda: not waits(), 1 << 62 if until_us is None else until_us)
        if until_us is not None:
            self.now_us = max(self.now_us, until_us)
        self.nested -= 1

    # --- coordinators ---

    def start_coordinator(self) -> None:
        """Starts a coordinator, which takes over from the current one."""
        number = len(self.processes) + 1
        if number > STARTS_MAX:
            raise CoreFailed(f"{STARTS_MAX} coordinators were started: none of them stays")
        if number > STARTS_MAX // 2:  # a failed start leaves segments that the next one reads: none would come through
            self.disk.is_calm = True
        config, workers, mode = self.parameters.settings(self.settings, number, self.is_chaos)
        process = CoordinatorProcess(self, number, config, workers, mode, self._next_version())
        self.processes.append(process)
        self.note(f"coordinator {number} starts, {workers} workers, {mode}")
        self.on_open(process)
        if not process.open():
            return
        if self.process is None or self.process.number < process.number:
            if self.process is not None and self.process.is_alive:
                self.fault("coordinators superseded")
            self.process = process
        self.step(process.node, None)

    def _next_version(self) -> int:
        """The version of the app that the next coordinator runs: that of the last one, or a newer one."""
        known = self.processes[-1].version if self.processes else 0
        newest = len(self.workload.apps) - 1
        return known if known == newest or self.versions.random() < 0.5 else self.versions.randint(known + 1, newest)

    def end(self, process: CoordinatorProcess) -> None:
        """Ends the process; a supervisor starts another one, unless one was started already."""
        if not process.node.is_alive:
            return
        process.node.is_alive = process.is_serving = False
        self.on_end(process)
        if process.store is not None:
            process.store.is_alive = False
        process.tokens.clear()
        self.history.reads = [
            state_read for state_read in self.history.reads if state_read.found or state_read.process is not process
        ]
        for node in process.workers.values():
            self.after(self.schedule.randint(0, 30_000), self._vanish, node)
        if process is self.processes[-1]:
            self.after(self.schedule.randint(500, 20_000), self.replace, process)

    def replace(self, process: CoordinatorProcess) -> None:
        if process is self.processes[-1]:
            self.start_coordinator()

    def _vanish(self, node: SimNode) -> None:
        node.is_alive = False

    def lose_power(self) -> None:
        self.note("power is lost")
        self.disk.lose_power()
        for process in self.processes:
            self.end(process)

    # --- nodes ---

    def new_clock(self) -> SimClock:
        offset_us, drift_ppm = self.clocks.randint(-500_000, 500_000), self.clocks.randint(-20_000, 20_000)
        if not self.parameters.faults.clocks:
            return SimClock()
        self.fault("clocks off")
        return SimClock(offset_us, drift_ppm)

    def jump(self, rng: random.Random) -> bool:
        """The clocks of all coordinators jump to what is due next in the newest one, or somewhat beyond; False if
        nothing is due."""
        process = self.process
        if process is None or not process.is_alive or process.core is None:
            return False
        reads_us = process.node.clock.read(self.now_us)
        due_us = process.core.deferred.next_due_us(reads_us)
        if due_us is None or due_us >= NEVER_US:
            return False
        by_us = max(0, due_us - reads_us) + rng.choice((0, 0, 1, 1_000, 60_000_000))
        self.fault("clocks jumped")
        self.ahead_us += by_us
        for each in self.processes:
            each.node.clock.offset_us += by_us
        for each in self.processes:
            if each.is_serving:
                self.step(each.node, Tick())
        return True

    def receive(self, node: SimNode, frame: Frame) -> None:
        self.step(node, Received(frame))

    def step(self, node: SimNode, event: Any) -> None:
        """An event of None is the start of a coordinator."""
        if not node.is_alive or node.is_stuck:
            return
        if node.is_paused:
            node.backlog.append(event)
            return
        node.timer += 1
        core, hooks = node.core, self.workload.hooks
        is_alone = not node.number and not node.process.wanted_workers
        hooks.watch(core if node.number else None, core.backend if is_alone else None, self.is_durable)
        try:
            now_us = node.clock.read(self.now_us)
            effects = core.start(now_us) if event is None else core.step(now_us, event)
        except Exception as error:
            raise CoreFailed(f"node {node.name} raised {error!r} on {type(event).__name__}") from error
        flights = () if node.number else getattr(core.backend, "flights", ())
        if len(flights) > node.process.config.epochs_in_flight_max:
            self.violate(f"{len(flights)} epochs run at the same time")
        if hooks.spun is not None:
            self._get_stuck(node, hooks.spun)
        else:
            self._apply_effects(node, effects)

    def _apply_effects(self, node: SimNode, effects: list[Any]) -> None:
        for effect in effects:
            name = type(effect).__name__
            self.effects += 1
            self.on_effect(node, name)
            if node.crash_in is not None:
                node.crash_in -= 1
                if node.crash_in < 0:
                    self.crash(node)
            if not node.is_alive:
                return
            self.trace_event(node, name, EFFECTS[type(effect)](self, node, effect), effect)

    def trace_event(self, node: SimNode, what: str, data: bytes, effect: Any = None) -> None:
        """Adds an event to the trace."""
        line = f"{self.now_us} {node.name} {what} "
        self.digest.update(line.encode())
        self.digest.update(data)
        if self.trace is not None:
            self.trace(line + (shorten(effect) if effect is not None else data.decode()))

    def _set_timer(self, node: SimNode, effect: Any) -> bytes:
        far_us = node.clock.read(self.now_us) + FAR_US if self.workload.is_timeless else NEVER_US
        if effect.at_us >= far_us:
            return b"never"
        at_us = node.clock.when(effect.at_us)
        if at_us <= self.now_us:
            at_us = self.now_us + self.schedule.randint(1, 100)  # more to do
        self.at(at_us, self._tick, node, node.timer)
        return b"%d" % effect.at_us

    def _tick(self, node: SimNode, timer: int) -> None:
        if timer == node.timer:
            self.step(node, Tick())

    def _send(self, node: SimNode, effect: Any) -> bytes:
        frame, process = effect.frame, node.process
        if frame.source != node.number:
            raise CoreFailed(f"node {node.name} sends in the name of {frame.source}")
        if node.number == 0:
            if frame.term < process.last_term:
                raise CoreFailed(f"the coordinator sends in term {frame.term} after {process.last_term}")
            process.last_term = frame.term
        elif frame.term > process.core.backend.term:
            raise CoreFailed(f"worker {node.name} has term {frame.term}, the coordinator {process.core.backend.term}")
        elif node is not process.workers.get(node.number):
            self.probe("zombies spoke")
            if frame.term == process.core.backend.term:
                self.violate(f"{node.name} was replaced, and takes part in term {frame.term}")
        return self.network.send(node, frame)

    def _start(self, node: SimNode, effect: Any) -> bytes:
        """Starts a new worker; the previous one is stopped, if it can be reached."""
        number, process = effect.worker, node.process
        self._dismiss(process, number)
        process.incarnations[number] += 1
        core = Worker(process.app, process.config, number, program=process.core.program, term=effect.term)
        fresh = process.workers[number] = SimNode(process, number, process.incarnations[number], core, self.new_clock())
        self.on_start(fresh)
        return b"%d" % number

    def _stop(self, node: SimNode, effect: Any) -> bytes:
        self._dismiss(node.process, effect.worker)
        return b"%d" % effect.worker

    def _dismiss(self, process: CoordinatorProcess, number: int) -> None:
        old = process.workers.pop(number, None)
        if old is None or not old.is_alive:
            return
        if old.is_paused or old.cut_off_until_us > self.now_us:
            self.fault("zombies")
            self.zombies.append(old)
        else:
            old.is_alive = False

    def crash(self, node: SimNode) -> None:
        if not node.is_alive:
            return
        self.note(f"{node.name} crashes")
        if node.number == 0:
            self.fault("coordinator crashes")
            self.end(node.process)
        else:
            self.fault("crashes")
            node.is_alive = False
            self.after(self.schedule.randint(100, 30_000), self.report_lost, node)

    def report_lost(self, node: SimNode) -> None:
        """The driver tells the coordinator, unless the node was replaced already."""
        if node.process.workers.get(node.number) is node:
            self.note(f"{node.name} is lost")
            self.step(node.process.node, Lost(node.number))

    def _get_stuck(self, node: SimNode, tid: int) -> None:
        """A function does not return: after a while the driver stops the worker, or gives up an engine."""
        self.fault("overruns" if node.number else "overruns of an engine")
        self.note(f"{node.name} is stuck in TID {tid}")
        if node.number:
            node.is_alive = False
            self.after(node.process.config.wall_limit_us, self._stop_stuck, node, tid)
        else:
            node.is_stuck = True  # its threads that write to the store go on
            self.after(node.process.config.wall_limit_us, node.process.give_up, tid, self.workload.hooks.decree)

    def _stop_stuck(self, node: SimNode, tid: int) -> None:
        if node.process.workers.get(node.number) is node:
            self.note(f"{node.name} overran in TID {tid}")
            self.step(node.process.node, Overran(node.number, tid))

    def pause(self, node: SimNode, until_us: int) -> None:
        if node.is_alive and not node.is_paused:
            self.fault("pauses" if node.number else "coordinator pauses")
            node.is_paused = True
            self.note(f"{node.name} pauses")
            self.at(until_us, self.wake, node)
            if node.number:
                self.after(node.process.config.silence_us_max, self._miss, node)

    def _miss(self, node: SimNode) -> None:
        """The driver notices that the node was silent for too long."""
        if node.is_paused or node.cut_off_until_us > self.now_us:
            self.report_lost(node)

    def cut_off(self, node: SimNode, until_us: int) -> None:
        """The driver cannot reach the node either."""
        node.cut_off_until_us = max(until_us, node.cut_off_until_us)
        self.after(node.process.config.silence_us_max, self._miss, node)

    def wake(self, node: SimNode) -> None:
        if node.is_alive and node.is_paused:
            node.is_paused = False
            self.note(f"{node.name} wakes")
            backlog, node.backlog = node.backlog, []
            for event in backlog:
                self.step(node, event)

    def bury_zombies(self) -> None:
        for node in self.zombies:
            node.is_alive = False
        for process in self.processes[:-1]:
            self.end(process)

    # --- clients and operators ---

    def new_token(
        self,
        process: CoordinatorProcess,
        then: Callable[[Any], None],
        is_misuse: bool = False,
        may_be_refused: Callable[[], bool] = lambda: False,
    ) -> int:
        """A token for a request; a misuse is a request that must not be accepted."""
        self.last_token += 1
        process.tokens[self.last_token] = (then, is_misuse, may_be_refused)
        return self.last_token

    def _answer(self, node: SimNode, effect: Any) -> bytes:
        answers: Answers = effect.answers
        if effect.token is None:  # the client is gone
            return b""
        if effect.token not in node.process.tokens:
            raise CoreFailed(f"submission {effect.token} was answered twice: {answers.ids}")
        then, is_misuse, may_be_refused = node.process.tokens.pop(effect.token)
        if is_past(answers) and may_be_refused():
            return repr(effect.token).encode()
        if self.is_durable:
            self.archive.answer(node.process, answers)
            if self.disk_times.random() < 0.05:
                self.archive.check_worst_power_loss()
        if not is_misuse:
            self.history.answer(answers)
            then(answers)
        elif answers.tids[0] is not None:
            self.violate(f"{answers.ids} was taken for another call, as TID {answers.tids[0]}")
        return repr((effect.token, list(answers.tids), answers.results)).encode()

    def _refuse(self, node: SimNode, effect: Any) -> bytes:
        _, _, may_be_refused = node.process.tokens.pop(effect.token)
        if not may_be_refused():
            self.violate(f"submission {effect.token} was refused: {effect.error!r}")
        return repr(effect.token).encode()

    def read(self, operator: str | None, key: Any, process: CoordinatorProcess | None = None) -> StateRead | None:
        """None if no coordinator is running."""
        process = process or self.process
        if process is None or not process.is_alive:
            return None
        state_read = StateRead(operator, key, self.history.now(), process)
        self.history.reads.append(state_read)
        token = self.new_token(process, lambda entities: self._note_found(state_read, entities))
        self.step(process.node, Read(token, operator, key))
        return state_read

    def _note_found(self, state_read: StateRead, entities: list[Any]) -> None:
        state_read.found, state_read.entities = self.history.now(), entities

    def _read_result(self, node: SimNode, effect: Any) -> bytes:
        node.process.tokens.pop(effect.token)[0](effect.entities)
        return repr(effect.entities).encode()

    def rescale(self, workers: int) -> None:
        process = self.process
        if process is None or not process.is_alive or not process.wanted_workers:
            return
        self.fault("rescales")
        self.note(f"rescale to {workers}")
        may_refuse = workers > process.config.shards or (workers > 1 and process.mode == "serial")
        token = self.new_token(process, lambda effect: None, may_be_refused=lambda: may_refuse)
        self.step(process.node, Rescale(token, workers))

    def _rescaled(self, node: SimNode, effect: Any) -> bytes:
        node.process.tokens.pop(effect.token)
        self.probe("rescaled")
        return repr(effect).encode()

    # --- durability ---

    def _append(self, node: SimNode, effect: Any) -> bytes:
        return node.process.append(effect)

    def _check(self, node: SimNode, effect: Any) -> bytes:
        node.process.check(effect)
        return b"%d" % effect.ticket

    def _keep(self, node: SimNode, effect: Any) -> bytes:
        node.process.store_work.prepare(effect.epoch, effect.changes)
        node.process.keep(effect.epoch)
        self.history.keep(effect.epoch.number)
        return b"%d" % effect.epoch.number

    def _save(self, node: SimNode, effect: Any) -> bytes:
        self.probe("snapshots")
        node.process.keep(effect.snapshot)
        return b"%d" % effect.snapshot.epoch

    # --- the outside world ---

    def _log_failures(self, node: SimNode, effect: Any) -> bytes:
        """A failure is reported once by a process, with its place in the app and its trace."""
        reported = node.process.reported
        for run in effect.runs:
            if run.tid in reported or not run.failure.trace or run.failure.where.startswith("/"):
                self.violate(f"{node.name} reports the failure of TID {run.tid} again, or without its trace and place")
            reported.add(run.tid)
        self.probe("failures reported")
        return b"%d" % len(effect.runs)

    def _perform(self, node: SimNode, effect: Any) -> bytes:
        """The outside world answers differently each time: a recovery must use the response in the log."""
        rng = self.outside_rng
        self.probe("external calls")
        self.archive.perform(node.process, effect.call)
        result, failure = self.workload.respond(effect.name, effect.args, rng)
        self.after(rng.choice((100, 1_000, 30_000)), self.step, node, Responded(effect.call, result, failure))
        return bytes(effect.call.encode())

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now_us} - {text}")


EFFECTS: dict[type, Callable[[World, SimNode, Any], bytes]] = {
    Send: World._send,
    SetTimer: World._set_timer,
    Answer: World._answer,
    Refuse: World._refuse,
    Start: World._start,
    Stop: World._stop,
    ReadResult: World._read_result,
    Rescaled: World._rescaled,
    Append: World._append,
    Check: World._check,
    Keep: World._keep,
    Save: World._save,
    Perform: World._perform,
    LogFailures: World._log_failures,
}


def is_past(answers: Answers) -> bool:
    """Whether the answers only say that the batch has run."""
    return len(answers.failures) == len(answers.tids) > 0 and all(
        failure.code == EXPIRED.code for failure in answers.failures.values()
    )


def shorten(effect: Any) -> str:
    text = repr(effect)
    return text if len(text) < 400 else text[:400] + "…"
