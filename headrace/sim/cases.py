"""One case from one seed: a random program on several workers, under a random schedule, compared with the reference.

There are no network or disk faults, so that cases are fast, many and large. They look for wrong results of the ordered
mode, unbounded work, and nodes that never rest. Workers are lost and their number changes.

A case passes if
1. every reply and the final state are those of the reference, and nothing is left behind;
2. functions are run and messages are sent within the bounds of decision 0022;
3. no node asks for a timer when it has nothing to do, and none waits for a message that never comes.
"""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.config import Config
from headrace.core.admission import Admission
from headrace.core.events import Answer, Lost, Read, ReadResult, Rescale, Rescaled, Send, SetTimer, Submit
from headrace.core.ordered.exchange import Caps
from headrace.core.origin import FromClient
from headrace.core.program import Program
from headrace.runtime.client import Replies, Reply
from headrace.sim.fleet import Fleet
from headrace.sim.oracle import Oracle
from headrace.sim.programs import (
    KEYS,
    WRONG_STEPS,
    Interpreter,
    ProgramShape,
    Root,
    draw_bodies,
    draw_root,
    draw_shape,
    size_of,
)
from headrace.sim.schedules import SCHEDULES, UNEVEN
from headrace.sim.shrink import smallest

CALLS_MAX = 4_000  # per case, roughly
ROOTS = ((1, 9), (10, 60), (60, 300), (300, 1000), (300, 1000))
CAUTIOUS = Caps(4, 8, 1, 0, 4)  # almost everything is held
BOLD = Caps(512, 1024, 256, 64, 4096)  # almost nothing is held: only in small cases, as repairs may storm
BOLD_CALLS_MAX = 800  # per case, roughly
EVENTS_PER_RUN = 40  # a case with more events per run does not end
RUNS_PER_CALL = 2  # decision 0022: c
MESSAGES_PER_RUN = 6  # what a run may send, with the messages that follow from it


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that decides a case. `roots` and `bodies` can be made smaller; the rest is drawn from the seed."""

    seed: int
    shape: ProgramShape
    workers: int
    schedule: str
    keys: tuple[Any, ...]
    bodies: tuple[tuple[Any, ...], ...]
    roots: tuple[Root, ...]
    batches: int = 1
    losses: int = 0
    rescales: tuple[int, ...] = ()
    config: Config = dataclasses.field(default_factory=Config)
    caps: Caps = dataclasses.field(default_factory=Caps)

    def rng(self, concern: str) -> random.Random:
        return random.Random(f"headrace case {self.seed} {concern}")

    @property
    def is_usual(self) -> bool:
        """No worker is lost, and the caps are those of production."""
        return not self.losses and not self.rescales and self.caps == Caps()

    def described(self) -> dict[str, Any]:
        usual = dataclasses.asdict(Config())
        config = {name: value for name, value in dataclasses.asdict(self.config).items() if value != usual[name]}
        return {
            "seed": self.seed,
            "workers": self.workers,
            "schedule": self.schedule,
            "batches": self.batches,
            "losses": self.losses,
            "rescales": list(self.rescales),
            "config": config,
            "caps": list(self.caps),
            "modulus": self.shape.modulus,
            "bodies": [repr(body) for body in self.bodies],
            "roots": [repr(root) for root in self.roots],
        }


def draw_case(seed: int) -> Case:
    rng = random.Random(f"headrace case {seed}")
    shape = draw_shape(rng, WRONG_STEPS if rng.random() < 0.3 else ())
    keys = rng.sample(KEYS, shape.keys)
    bodies = draw_bodies(rng, shape, keys)
    is_tangled, is_relayed = shape.kind == "tangled", shape.kind == "relayed"
    low, high = rng.choice(ROOTS) if not is_tangled else (6, 40)
    count = min(rng.randint(low, high), max(1, int(CALLS_MAX / size_of(shape))))
    limits: dict[str, int] = {}
    if rng.random() < 0.15:
        limits["calls_max"] = rng.choice((1, 2, 3, 5, 8, 20))
    if rng.random() < 0.1:
        limits["depth_max"] = rng.choice((1, 2, 3))
    if rng.random() < 0.4 or is_relayed:  # calls learned in an epoch are predicted in later ones
        limits["epoch_transactions_max"] = rng.choice((1, 2, 7, 20, 40, 150))
    workers = rng.choice((2, 2, 3, 3, 4, 4, 5, 6) if not is_tangled else (3, 4, 5, 6))
    limits_rng = random.Random(f"headrace case {seed} limits")
    config = Config(
        **limits,
        entities_per_frame_max=limits_rng.choice((1, 3, 10_000, 10_000)),
        epochs_in_flight_max=rng.choice((1, 2, 2, 4)),
        slice_calls_max=rng.choice((1, 2, 5, 50, 500)),
        predict_after_runs=rng.choice((1, 2, 16, 16, 1000) if not is_relayed else (1, 1, 2, 16)),
        replay_transactions_max=rng.choice((50, 100_000)),
    )
    is_calm = rng.random() < 0.75
    if rng.random() < 0.15:
        caps = CAUTIOUS
    elif count * size_of(shape) < BOLD_CALLS_MAX and limits_rng.random() < 0.7:
        caps = BOLD
    else:
        caps = Caps()
    return Case(
        seed=seed,
        shape=shape,
        workers=workers,
        schedule=rng.choice(list(SCHEDULES) if not is_tangled else UNEVEN),
        keys=tuple(keys),
        bodies=tuple(map(tuple, bodies)),
        roots=tuple(draw_root(rng, shape, keys) for _ in range(count)),
        batches=rng.choice((1, 1, 2, 4)),
        losses=0 if is_calm else rng.choice((0, 1, 1, 2)),
        rescales=() if is_calm else tuple(rng.randint(1, 6) for _ in range(rng.choice((0, 1, 2)))),
        config=config,
        caps=caps,
    )


class CaseVerdict(msgspec.Struct):
    """The result of a case."""

    seed: int
    violations: list[str]
    transactions: int = 0
    calls: int = 0  # made by the reference
    runs: int = 0  # of functions, on all workers
    messages: int = 0  # besides the three per worker that every epoch takes
    is_usual: bool = True  # no worker was lost, and the caps are those of production
    drawn: dict[str, int] = {}

    @property
    def runs_per_call(self) -> float:
        return self.runs / max(1, self.calls)

    @property
    def messages_per_call(self) -> float:
        return self.messages / max(1, self.calls)


class TooMuch(Exception):
    """More happens than decision 0022 allows."""


class CountedFleet(Fleet):
    """Counts events, and checks that no node asks for a timer in the past without work to do."""

    def __init__(self, case: Case, program: Program, interpreter: Interpreter, runs_max: int) -> None:
        self.interpreter, self.runs_max, self.caps = interpreter, runs_max, case.caps
        self.may_resend = case.losses > 0  # else none gets lost: a node that resends waits for one that never comes
        self.told: dict[tuple[int, int, int], int] = {}  # the highest number sent, by term and link
        self.told_in_all = self.events = 0
        choose = SCHEDULES[case.schedule](case.rng("schedule"))
        super().__init__(program.app, case.config, case.workers, "ordered", choose, program)

    def deliver(self) -> bool:
        self.events += 1
        if self.interpreter.runs > self.runs_max:
            raise TooMuch(f"{self.interpreter.runs} runs")
        if self.events > 10_000 + EVENTS_PER_RUN * self.runs_max:
            raise TooMuch(f"{self.events} events")
        return super().deliver()

    def _apply(self, node: int, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and effect.frame.body is not None:
                frame = effect.frame
                link = (frame.term, frame.source, frame.to)
                if frame.sequence > self.told.get(link, 0):
                    self.told[link] = frame.sequence
                    self.told_in_all += 1
                elif not self.may_resend:
                    raise TooMuch("a message is sent again, though none was lost,")
            elif isinstance(effect, SetTimer) and effect.at_us <= self.now_us and not self._has_work(node):
                raise RuntimeError(f"node {node} wants to go on at {effect.at_us}, it is {self.now_us}")
        if node in self.workers and self.workers[node].running:
            raise RuntimeError(f"worker {node} says that TID {self.workers[node].running} runs, and nothing does")
        super()._apply(node, effects)

    def _has_work(self, node: int) -> bool:
        """Whether it can work without a message. A coordinator never can."""
        return node > 0 and self.workers[node].has_work()


class Judge:
    """Runs cases, one after the other: the app is made once."""

    def __init__(self) -> None:
        self.interpreter = Interpreter("programs")
        self.program = Program(self.interpreter.app, Config())

    def judge(self, case: Case) -> CaseVerdict:
        """Runs a case and returns what is wrong."""
        interpreter = self.interpreter
        verdict = CaseVerdict(case.seed, [], len(case.roots), is_usual=case.is_usual)
        interpreter.load(list(map(list, case.bodies)), list(case.keys), case.shape.modulus)
        calls = [interpreter.call(root) for root in case.roots]
        expected, state = self.loop(case, calls, verdict)
        interpreter.runs = 0
        fleet = CountedFleet(case, self.program, interpreter, runs_max(case, verdict.calls))
        try:
            replies, found = run(case, fleet, calls)
        except TooMuch as error:
            verdict.violations.append(f"too much work: {error} for {verdict.calls} calls of {verdict.transactions}")
            return verdict
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            verdict.violations.append(f"broken: {error!r} in {where.name}, line {where.lineno}")
            return verdict
        metrics = fleet.coordinator.metrics()
        verdict.runs = interpreter.runs
        verdict.messages = max(0, fleet.told_in_all - 3 * metrics["epochs"] * metrics["workers"])
        verdict.drawn |= drawn(case, metrics, expected)
        verdict.violations += differences(expected, replies, state, found)
        verdict.violations += left_behind(fleet)
        verdict.violations += too_much(case, verdict, metrics["lone"])
        return verdict

    def loop(self, case: Case, calls: list[Any], verdict: CaseVerdict) -> tuple[list[Any], dict[Any, Any]]:
        """The replies and the state of the reference."""
        interpreter, config = self.interpreter, case.config
        oracle = Oracle(self.program.values, config.calls_max, config.depth_max)
        interpreter.runs, interpreter.seen = 0, Counter()
        expected = [oracle.transact(*call) for call in calls]
        verdict.calls, verdict.drawn = interpreter.runs, dict(interpreter.seen)
        interpreter.seen = None
        return expected, oracle.state


def deliver_all(fleet: CountedFleet) -> None:
    """Let everything happen that is under way."""
    while fleet.timers or any(fleet.links.values()):
        while fleet.deliver():
            pass
        if fleet.timers:
            fleet.now_us = max(fleet.now_us, min(fleet.timers.values()))


def run(case: Case, fleet: CountedFleet, calls: list[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Submits calls, loses workers, rescales and delivers; returns the replies and the final state."""
    rng = case.rng("life")
    program = fleet.coordinator.program
    admission = Admission(program)
    size = -(-len(calls) // case.batches)
    todo: list[Any] = [
        Submit([(token, admission.admit(FromClient(f"batch{token}"), calls[at : at + size]))])
        for token, at in enumerate(range(0, len(calls), size))
    ]
    reads = [Read("in between")] * case.rng("reads").choice((0, 0, 0, 2))  # in any of its states, nothing must break
    for event in [*reads, *[None] * case.losses, *(Rescale("rescale", workers) for workers in case.rescales)]:
        todo.insert(rng.randint(1, len(todo)), event)
    for event in todo:
        fleet.submit(Lost(rng.choice(sorted(fleet.workers))) if event is None else event)
        for _ in range(rng.choice((0, 3, 30, 300))):
            fleet.deliver()
    deliver_all(fleet)
    fleet.submit(Read("state"))  # it shows closed epochs only, so everything has to be answered first
    deliver_all(fleet)
    rescaled = sum(isinstance(effect, Rescaled) for effect in fleet.effects)
    if rescaled != len(case.rescales):
        raise RuntimeError(f"{rescaled} of {len(case.rescales)} rescalings were done")
    answers: dict[int, list[Any]] = {}
    found: dict[Any, Any] = {}
    unseal = program.values.unseal
    for effect in fleet.effects:
        if isinstance(effect, Answer):
            if effect.token in answers:
                raise RuntimeError(f"batch {effect.token} was answered twice")
            answers[effect.token] = list(Replies(effect.answers, unseal))
        elif isinstance(effect, ReadResult) and effect.token == "state":
            found = {(name, key): unseal(value) for name, key, value in effect.entities}
    return [reply for token in sorted(answers) for reply in answers[token]], found


# --- what must hold ---------------------------------------------------------------------------------------------------


def outcome(reply: Reply) -> tuple[Any, ...]:
    if reply.failure is None:
        return "ok", reply.result
    failure = reply.failure
    return reply.status, failure.type, failure.message, failure.function, failure.key


def exactly(state: dict[Any, Any]) -> list[str]:
    """The state with its types: 1, 1.0 and True differ here, and a NaN equals itself."""
    return sorted(map(repr, state.items()))


def differences(expected: list[Any], replies: list[Reply], state: dict[Any, Any], found: dict[Any, Any]) -> list[str]:
    wrong = []
    if len(replies) != len(expected):
        wrong.append(f"wrong replies: {len(replies)} of {len(expected)} came")
    for tid, (mine, reply) in enumerate(zip(expected, replies, strict=False), start=1):
        if repr(outcome(reply)) != repr(mine):
            wrong.append(f"wrong reply: TID {tid} gave {outcome(reply)!r}, the loop gives {mine!r}")
            break
    was, now = set(exactly(state)), set(exactly(found))
    if was != now:
        wrong.append(f"wrong state: {sorted(now - was)[:3]}, the loop gives {sorted(was - now)[:3]}")
    return wrong


def left_behind(fleet: Fleet) -> list[str]:
    wrong = []
    for number, worker in fleet.workers.items():
        ordered = worker.ordered
        left = [worker.progress, ordered.parts, worker.early, ordered.aborted, *ordered.chains.values()]
        if any(left):
            wrong.append(f"left behind: worker {number} still has something of an epoch that is over")
    return wrong


def runs_max(case: Case, calls: int, lone: int | None = None) -> int:
    """How often functions may be started if the reference makes this many calls: decision 0022. If it is not known how
    many transactions are alone in their epochs (`lone`), the largest possible number is used."""
    workers = max(case.workers, *case.rescales) if case.rescales else case.workers
    count, caps = len(case.roots), case.caps
    if lone is None:
        lone = count if count == 1 or case.config.epoch_transactions_max == 1 or case.batches > 1 else 0
    tries = (caps.tries + 1) * max(0, count - lone) + (caps.lone_tries + 1) * lone
    return (1 + case.losses) * (RUNS_PER_CALL * calls + tries * workers)


def too_much(case: Case, verdict: CaseVerdict, lone: int) -> list[str]:
    """Checks the bounds, now that `lone` is known."""
    most = runs_max(case, verdict.calls, lone)
    wrong = []
    if verdict.runs > most:
        wrong.append(f"too much work: {verdict.runs} runs")
    if verdict.messages > MESSAGES_PER_RUN * most:
        wrong.append(f"too much talk: {verdict.messages} messages")
    return [f"{each} for {verdict.calls} calls of {verdict.transactions}" for each in wrong]


def drawn(case: Case, metrics: dict[str, Any], expected: list[Any]) -> dict[str, int]:
    """The features of the case, with counts."""
    aborted = sum(each[0] == "aborted" for each in expected)
    features = {
        f"{case.workers} workers": 1,
        f"schedule {case.schedule}": 1,
        f"{case.shape.kind} programs": 1,
        f"depth {case.shape.depth}": 1,
        f"{span(len(case.roots))} roots": 1,
        f"{span(len(case.keys))} keys": 1,
        f"{round(case.shape.awaited * 100)}% awaited": 1,
        "aborted": aborted,
        "losses": case.losses,
        "rescalings": len(case.rescales),
        "several epochs in flight": int(case.config.epochs_in_flight_max > 1),
        **{name: metrics.get(name, 0) for name in ("repairs", "waits", "gathered", "gathers", "predicted", "lone")},
    }
    return {name: count for name, count in features.items() if count}


SPANS = ((1, "1"), (9, "2-9"), (60, "10-60"), (300, "61-300"))


def span(count: int) -> str:
    return next((text for most, text in SPANS if count <= most), "301+")


# --- shrinking --------------------------------------------------------------------------------------------------------


def shrink(judge: Judge, case: Case, attempts_max: int = 400) -> tuple[Case, CaseVerdict]:
    """The smallest case found that fails in the same way."""
    return smallest(case, judge.judge, candidates, kind_of, attempts_max)


def kind_of(verdict: CaseVerdict) -> str:
    return verdict.violations[0].split(":")[0] if verdict.violations else ""


def candidates(case: Case) -> Iterator[Case]:
    """All that are one step smaller."""
    replace: Callable[..., Case] = dataclasses.replace
    if case.losses:
        yield replace(case, losses=0)
    if case.rescales:
        yield replace(case, rescales=())
    if case.batches > 1:
        yield replace(case, batches=1)
    roots = case.roots
    for size in (len(roots) // 2, len(roots) // 4, len(roots) // 8, 1):
        for at in range(0, len(roots), size) if size else ():
            if len(roots) > size:
                yield replace(case, roots=roots[:at] + roots[at + size :])
    for workers in range(2, case.workers):
        yield replace(case, workers=workers)
    usual = Config()
    for field in dataclasses.fields(Config):
        if getattr(case.config, field.name) != getattr(usual, field.name):
            config = dataclasses.replace(case.config, **{field.name: getattr(usual, field.name)})
            yield replace(case, config=config)
    if case.schedule != "at_random":
        yield replace(case, schedule="at_random")
    for at, body in enumerate(case.bodies):
        for step in range(len(body)):
            less = (*body[:step], *body[step + 1 :])
            yield replace(case, bodies=(*case.bodies[:at], less, *case.bodies[at + 1 :]))
