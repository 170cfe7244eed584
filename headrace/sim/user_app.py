"""A workload of a user's app: calls drawn from its annotations, or given; and what the user says must always hold.

The world is the same as for the other workloads. Timers and schedules of an app are due in minutes or in days, and may
never end, so the clocks of the coordinators jump to some of them (`World.jump`).
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from headrace.config import Config
from headrace.core.program import Program
from headrace.errors import Abort, ModelError
from headrace.model.app import App
from headrace.sim.checked_oracle import CheckedOracle
from headrace.sim.drawing import KEYS, draw_value
from headrace.sim.oracle import Oracle, copied
from headrace.sim.parameters import Parameters, draw
from headrace.sim.run import RunReport, Simulation
from headrace.sim.workload import Call, Workload
from headrace.wire.hints import Hints, Unsupported

LONG_US = 10**15  # clocks jump, and request ids must be known after it
BROKEN = "invariant"  # how a violation of one begins
LimitedState = dict[str, dict[Any, Any]]
Invariant = Callable[[LimitedState], Any]
DrawCalls = Callable[[random.Random], Sequence[Call]]  # some calls, to be made one after the other


class UserApp(Workload):
    name = "app"
    is_timeless = True

    def __init__(self, app: App, calls: DrawCalls | None = None, invariants: Sequence[Invariant] = ()) -> None:
        super().__init__(app)
        self.invariants = list(invariants)
        self.calls = calls or DrawnCalls(app)
        self.waiting: list[Call] = []
        self.answers: dict[str, list[Any]] = defaultdict(list)  # of the outside world, by the external's name
        self.raised: Counter[str] = Counter()  # what functions raised, other than Abort
        self.broken_at = 0  # the TID after which an invariant did not hold

    def call(self, rng: random.Random) -> Call:
        if not self.waiting:
            self.waiting = [tuple(call) for call in self.calls(rng)]
            if not self.waiting:
                raise ModelError("--calls gave no calls")
        return self.waiting.pop(0)

    def respond(self, name: str, args: tuple[Any, ...], rng: random.Random) -> tuple[Any, str | None]:
        answer = draw_answer(self.app, name, rng)
        if rng.random() < 0.15:
            return None, f"{name}: refused by the simulator"
        self.answers[name].append(answer)
        return answer, None

    def oracle(self, program: Program, seed: int) -> Oracle:
        return CheckedOracle(program, seed)

    def check_state(self, oracle: Oracle, tid: int) -> list[str]:
        if oracle.failure is not None and oracle.failure[0] != Abort.__name__:
            self.raised[f"{oracle.failure[0]} in {oracle.failure[2]}: {oracle.failure[1]}"] += 1
        if self.broken_at or not self.invariants:
            return []
        state: LimitedState = {name: {} for name in self.app.operators}
        for (name, key), value in oracle.visible(oracle.now_us, self.app).items():
            if name in state:
                state[name][key] = copied(value)
        why = first_broken(self.invariants, state)
        if why is None:
            return []
        self.broken_at = tid
        return [f"{BROKEN} {why}, after TID {tid}"]


def first_broken(invariants: Sequence[Invariant], state: LimitedState) -> str | None:
    """The first invariant that does not hold: it raises, or returns False."""
    for invariant in invariants:
        name = getattr(invariant, "__name__", "invariant")
        try:
            holds = invariant(state)
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}".removesuffix(": ")
        if holds is False:
            return f"{name}: it returned False"
    return None


class DrawnCalls:
    """Calls of all functions of an app, with arguments drawn from their annotations. A function whose name begins with
    an underscore is for other functions: it is not called from outside."""

    def __init__(self, app: App) -> None:
        program = Program(app, Config())
        self.entries = [program.functions[each] for each in app.functions if not each.name.startswith("_")]
        if not self.entries:
            raise ModelError(f"app {app.name!r} has no functions to call (those whose names begin with _ are internal)")

    def __call__(self, rng: random.Random) -> list[Call]:
        entry = rng.choice(self.entries)
        signature = entry.signature
        count = rng.randint(signature.least, signature.most) if signature.least < signature.most else signature.most
        return [(entry.function, rng.choice(KEYS), *(draw_value(each.type, rng) for each in signature.codecs[:count]))]


def draw_answer(app: App, name: str, rng: random.Random) -> Any:
    """A response of an external function, by its annotation."""
    external = app.externals.get(name)
    function = getattr(external, "function", None)
    try:
        hint = typing.get_type_hints(function).get("return", Any)
        return draw_value(Hints().type_of(hint), rng)
    except (TypeError, NameError, Unsupported, ModelError):
        return rng.choice((None, True, 1, "a"))


def parameters_of(seed: int) -> Parameters:
    """All faults, over 0 to 5 workers, always with a store: the log says what the loop has to run. The limits of calls
    are those of production, or most transactions would abort."""
    drawn = draw(seed)
    limits = {name: getattr(Config(), name) for name in ("calls_max", "depth_max")}
    limits |= dict.fromkeys(("request_id_retention_us", "reply_retention_us"), LONG_US)
    return dataclasses.replace(
        drawn,
        workload=UserApp.name,
        store="files" if drawn.store == "none" else drawn.store,
        transactions=random.Random(f"headrace {seed} size").randint(20, 80),
        config=dataclasses.replace(drawn.config, **limits),
        faults=dataclasses.replace(drawn.faults, misbehaviour=False, new_limits=False),
        chaos_us=max(drawn.chaos_us, 200_000),
    )


class UserRun:
    """One run of a user's app, from one seed."""

    def __init__(
        self, app: App, seed: int, calls: DrawCalls | None = None, invariants: Sequence[Invariant] = ()
    ) -> None:
        self.workload = UserApp(app, calls, invariants)
        self.simulation = Simulation(parameters_of(seed), workload=self.workload)

    def report(self) -> RunReport:
        logged = {operator: operator.changes for operator in self.workload.app.operators.values()}
        try:
            return self.simulation.report()
        finally:
            for operator, changes in logged.items():
                operator.changes = changes
