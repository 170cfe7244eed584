"""The world: one thread, one heap of (time, tie, event), virtual time only, and the production core in it.

The coordinator is node 0; a worker's number may have several incarnations: crashed ones vanish, one that was paused or
cut off when it was replaced goes on as a zombie until the driver can stop it. Whatever the core is told and does goes
into the trace, and its digest tells two runs apart.

Rules:
1. Events of one instant are permuted: ties are drawn.
2. Every effect happens by itself: a crash may come between any two of them.
3. Nothing here depends on hashes, addresses or the machine: a seed gives the same trace everywhere.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.core.channel import Received, Tick
from headrace.core.coordinator import Coordinator, Lost, Overran, Read, Rescale
from headrace.core.engine import Submit
from headrace.core.ingress import Admission
from headrace.core.worker import Worker
from headrace.sim.history import History, Look
from headrace.sim.network import Network
from headrace.sim.parameters import Parameters
from headrace.sim.workload import Call, Workload
from headrace.wire.messages import Answers, Frame, RequestIds

EVENTS_MAX = 100_000
TRACE_LINES_MAX = 50_000


class Broken(Exception):
    """The core raised, or did what it never may: no use to go on."""


class Clock:
    """A node's own: off by a constant, and running a little fast or slow."""

    def __init__(self, offset_us: int = 0, drift_ppm: int = 0) -> None:
        self.offset_us, self.drift_ppm = offset_us, drift_ppm

    def read(self, now_us: int) -> int:
        return now_us + now_us * self.drift_ppm // 1_000_000 + self.offset_us

    def when(self, reads_us: int) -> int:
        """The time at which this clock will have reached what it then reads."""
        at_us = (reads_us - self.offset_us) * 1_000_000 // (1_000_000 + self.drift_ppm)
        while self.read(at_us) < reads_us:
            at_us += 1
        return at_us


class Node:
    """One incarnation of the coordinator or of a worker."""

    def __init__(self, number: int, incarnation: int, core: Any, clock: Clock) -> None:
        self.number, self.incarnation, self.core, self.clock = number, incarnation, core, clock
        self.name = f"{number}.{incarnation}"
        self.is_alive = True
        self.is_paused = False
        self.backlog: list[Any] = []  # what came while it was paused
        self.timer = 0  # which one counts
        self.lives: int | None = None  # effects until it crashes
        self.cut_off_until_us = 0  # the driver cannot reach it


class World:
    def __init__(self, parameters: Parameters, workload: Workload, trace: Callable[[str], None] | None = None) -> None:
        self.parameters, self.workload, self.config = parameters, workload, parameters.config
        self.schedule = parameters.rng("schedule")
        self.clocks = parameters.rng("clock")
        self.now_us = 1_000_000
        self.heap: list[tuple[int, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.pushed = self.events = self.effects = 0
        self.is_chaos = True
        self.faults: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.digest = hashlib.blake2b(digest_size=16)
        self.trace = trace
        self.tokens: dict[int, tuple[Callable[[Any], None], bool, Callable[[], bool]]] = {}
        self.last_token = 0
        self.gathered: list[tuple[int, Any]] = []  # submissions that go into the next step
        self.zombies: list[Node] = []
        self.workers: dict[int, Node] = {}
        self.incarnations: Counter[int] = Counter()
        self.on_start: Callable[[Node], None] = lambda node: None
        self.on_effect: Callable[[Node, str], None] = lambda node, name: None
        core = Coordinator(workload.app, self.config, parameters.workers, parameters.mode)
        self.coordinator = Node(0, 1, core, self._clock())
        self.admission = Admission(core.program)
        self.history = History(core.program.values.unseal, self.violate)
        self.network = Network(self, parameters.rng("network"))

    # --- what the others use ---

    def at(self, time_us: int, action: Callable[..., None], *args: Any) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time_us, self.schedule.random(), self.pushed, action, args))

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now_us + delay_us, action, *args)

    def travel_us(self, rng: random.Random) -> int:
        return rng.randint(1, 2 * self.parameters.delay_us)

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def probe(self, name: str) -> None:
        self.probes[name] += 1

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def node(self, number: int) -> Node | None:
        """The one that has this number now."""
        return self.coordinator if number == 0 else self.workers.get(number)

    def new_token(
        self,
        then: Callable[[Any], None],
        is_misuse: bool = False,
        may_be_refused: Callable[[], bool] = lambda: False,
    ) -> int:
        """For a question; a misuse is one that must not be taken."""
        self.last_token += 1
        self.tokens[self.last_token] = (then, is_misuse, may_be_refused)
        return self.last_token

    # --- time ---

    def begin(self) -> None:
        self._happen(self.coordinator, self.coordinator.core.start(self.coordinator.clock.read(self.now_us)))

    def run(self, until: Callable[[], bool], until_us: int) -> bool:
        """Let events happen until something holds. False if the time is over, or nothing is left to happen, before."""
        heap = self.heap
        while not until():
            if not heap or heap[0][0] > until_us:
                return False
            self.now_us, _, _, action, args = heapq.heappop(heap)
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Broken(f"more than {EVENTS_MAX} events: it does not come to rest")
            action(*args)
        return True

    # --- nodes ---

    def _clock(self) -> Clock:
        offset_us, drift_ppm = self.clocks.randint(-500_000, 500_000), self.clocks.randint(-20_000, 20_000)
        if not self.parameters.faults.clocks:
            return Clock()
        self.fault("clocks off")
        return Clock(offset_us, drift_ppm)

    def receive(self, node: Node, frame: Frame) -> None:
        self.step(node, Received(frame))

    def step(self, node: Node, event: Any) -> None:
        if not node.is_alive:
            return
        if node.is_paused:
            node.backlog.append(event)
            return
        node.timer += 1
        hooks = self.workload.hooks
        hooks.watch(node.core if node.number else None)
        try:
            effects = node.core.step(node.clock.read(self.now_us), event)
        except Exception as error:
            raise Broken(f"node {node.name} raised {error!r} on {type(event).__name__}") from error
        if not node.number and len(node.core.flights) > self.config.epochs_in_flight_max:
            self.violate(f"{len(node.core.flights)} epochs run at the same time")
        if hooks.spun is not None:
            self._get_stuck(node, hooks.spun)
        else:
            self._happen(node, effects)

    def _happen(self, node: Node, effects: list[Any]) -> None:
        for effect in effects:
            name = type(effect).__name__
            self.effects += 1
            if node.number:
                self.on_effect(node, name)
                if node.lives is not None:
                    node.lives -= 1
                    if node.lives < 0:
                        self.crash(node)
                if not node.is_alive:
                    return
            data = EFFECTS[name](self, node, effect)
            line = f"{self.now_us} {node.name} {name} "
            self.digest.update(line.encode())
            self.digest.update(data)
            if self.trace is not None:
                self.trace(line + shorten(effect))

    def _set_timer(self, node: Node, effect: Any) -> bytes:
        at_us = node.clock.when(effect.at_us)
        if at_us <= self.now_us:
            at_us = self.now_us + self.schedule.randint(1, 100)  # more to do
        self.at(at_us, self._tick, node, node.timer)
        return b"%d" % effect.at_us

    def _tick(self, node: Node, timer: int) -> None:
        if timer == node.timer:
            self.step(node, Tick())

    def _send(self, node: Node, effect: Any) -> bytes:
        frame = effect.frame
        if frame.source != node.number:
            raise Broken(f"node {node.name} sends in the name of {frame.source}")
        if node.number == 0:
            self._watch_term(frame.term)
        elif frame.term > self.coordinator.core.term:
            raise Broken(f"worker {node.name} has term {frame.term}, the coordinator {self.coordinator.core.term}")
        elif node is not self.workers.get(node.number):
            self.probe("zombies spoke")
            if frame.term == self.coordinator.core.term:
                self.violate(f"{node.name} was replaced, and takes part in term {frame.term}")
        return self.network.send(node, frame)

    last_term = 0

    def _watch_term(self, term: int) -> None:
        if term < self.last_term:
            raise Broken(f"the coordinator sends in term {term} after {self.last_term}")
        self.last_term = term

    def _start(self, node: Node, effect: Any) -> bytes:
        """A fresh worker; the one before is stopped, if it can be reached."""
        number = effect.worker
        self._dismiss(number)
        self.incarnations[number] += 1
        program = self.coordinator.core.program
        core = Worker(self.workload.app, self.config, number, like=program, term=effect.term)
        fresh = self.workers[number] = Node(number, self.incarnations[number], core, self._clock())
        self.on_start(fresh)
        return b"%d" % number

    def _stop(self, node: Node, effect: Any) -> bytes:
        self._dismiss(effect.worker)
        return b"%d" % effect.worker

    def _dismiss(self, number: int) -> None:
        old = self.workers.pop(number, None)
        if old is None or not old.is_alive:
            return
        if old.is_paused or old.cut_off_until_us > self.now_us:
            self.fault("zombies")
            self.zombies.append(old)
        else:
            old.is_alive = False

    def crash(self, node: Node) -> None:
        if node.is_alive:
            self.fault("crashes")
            node.is_alive = False
            self.note(f"{node.name} crashes")
            self.after(self.schedule.randint(100, 30_000), self.report_lost, node)

    def report_lost(self, node: Node) -> None:
        """The driver tells the coordinator, unless it was replaced already."""
        if self.workers.get(node.number) is node:
            self.note(f"{node.name} is lost")
            self.step(self.coordinator, Lost(node.number))

    def _get_stuck(self, node: Node, tid: int) -> None:
        """Its function does not come back: after a while the driver stops it."""
        self.fault("overruns")
        node.is_alive = False
        self.note(f"{node.name} is stuck in TID {tid}")
        self.after(self.config.wall_limit_us, self._stop_stuck, node, tid)

    def _stop_stuck(self, node: Node, tid: int) -> None:
        if self.workers.get(node.number) is node:
            self.note(f"{node.name} overran in TID {tid}")
            self.step(self.coordinator, Overran(node.number, tid))

    def pause(self, node: Node, until_us: int) -> None:
        if node.is_alive and not node.is_paused:
            self.fault("pauses")
            node.is_paused = True
            self.note(f"{node.name} pauses")
            self.at(until_us, self.wake, node)
            if node.number:
                self.after(self.config.silence_us_max, self._miss, node)

    def _miss(self, node: Node) -> None:
        """It has been silent for long."""
        if node.is_paused or node.cut_off_until_us > self.now_us:
            self.report_lost(node)

    def cut_off(self, node: Node, until_us: int) -> None:
        """The driver does not hear of it either."""
        node.cut_off_until_us = max(until_us, node.cut_off_until_us)
        self.after(self.config.silence_us_max, self._miss, node)

    def wake(self, node: Node) -> None:
        if node.is_alive and node.is_paused:
            node.is_paused = False
            self.note(f"{node.name} wakes")
            backlog, node.backlog = node.backlog, []
            for event in backlog:
                self.step(node, event)

    def bury_zombies(self) -> None:
        for node in self.zombies:
            node.is_alive = False

    # --- clients and operators ---

    def submit(self, token: int, ids: RequestIds, calls: list[Call], source: tuple[str, int] | None) -> None:
        """A batch comes to the coordinator's door; what comes close together goes into one step."""
        batch = self.admission.admit(ids, calls)
        batch.source = source
        self.gathered.append((token, batch))
        if len(self.gathered) == 1:
            self.after(self.schedule.choice((0, 0, 200)), self._hand_over)

    def _hand_over(self) -> None:
        batches, self.gathered = self.gathered, []
        self.step(self.coordinator, Submit(batches))

    def _answer(self, node: Node, effect: Any) -> bytes:
        answers: Answers = effect.answers
        if effect.token not in self.tokens:
            raise Broken(f"submission {effect.token} was answered twice: {answers.ids}")
        then, is_misuse, _ = self.tokens.pop(effect.token)
        if not is_misuse:
            self.history.answer(answers)
            then(answers)
        elif answers.tids[0] is not None:
            self.violate(f"{answers.ids} was taken for another call, as TID {answers.tids[0]}")
        return repr((effect.token, list(answers.tids), answers.results)).encode()

    def _refuse(self, node: Node, effect: Any) -> bytes:
        _, _, may_be_refused = self.tokens.pop(effect.token)
        if not may_be_refused():
            self.violate(f"submission {effect.token} was refused: {effect.error!r}")
        return repr(effect.token).encode()

    def read(self, operator: str | None, key: Any) -> Look:
        look = Look(operator, key, self.history.now())
        self.history.looks.append(look)
        token = self.new_token(lambda entities: self._note_found(look, entities))
        self.step(self.coordinator, Read(token, operator, key))
        return look

    def _note_found(self, look: Look, entities: list[Any]) -> None:
        look.found, look.entities = self.history.now(), entities

    def _found(self, node: Node, effect: Any) -> bytes:
        self.tokens.pop(effect.token)[0](effect.entities)
        return repr(effect.entities).encode()

    def rescale(self, workers: int) -> None:
        self.fault("rescales")
        self.note(f"rescale to {workers}")
        may_refuse = workers > self.config.shards or (workers > 1 and self.parameters.mode == "serial")
        token = self.new_token(lambda effect: None, may_be_refused=lambda: may_refuse)
        self.step(self.coordinator, Rescale(token, workers))

    def _rescaled(self, node: Node, effect: Any) -> bytes:
        self.tokens.pop(effect.token)
        self.probe("rescaled")
        return repr(effect).encode()

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now_us} - {text}")


EFFECTS: dict[str, Callable[[World, Node, Any], bytes]] = {
    "Send": World._send,
    "SetTimer": World._set_timer,
    "Answer": World._answer,
    "Refuse": World._refuse,
    "Start": World._start,
    "Stop": World._stop,
    "Found": World._found,
    "Rescaled": World._rescaled,
}


def shorten(effect: Any) -> str:
    text = repr(effect)
    return text if len(text) < 400 else text[:400] + "…"
