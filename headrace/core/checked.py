"""An executor that runs every transaction twice, and aborts those that are not deterministic.

Rules:
1. Both runs see the same state. They write to an overlay. If they did the same, what the second one wrote is stored, in
   the same order: replies, state and digests are those of the serial mode.
2. If they did not, the transaction aborts with `NotDeterministic`, which names the function, its entity and both
   values. The engine logs that as a decree, so a replay repeats the abort, with or without a check.
3. A transaction that is stopped, in either run, aborts by that decree.
4. Epochs that an earlier engine logged run once: they may have been answered.

A run is compared step by step: each call with its arguments and the state it finds, and how it ends: its result or
error, its state, and the one-way calls that it made. So the first difference shows which function made it.

Never here: what is logged, when.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.core import order
from headrace.core.contexts import SerialContext, TrackedContext
from headrace.core.decrees import is_late
from headrace.core.digests import UNCHANGED
from headrace.core.epoch import Epoch
from headrace.core.outcome import same_outcome
from headrace.core.program import Program
from headrace.core.raised import describe
from headrace.core.serial import Body, SerialExecutor
from headrace.core.state import State, States, Table
from headrace.errors import NotDeterministic
from headrace.model.operator import Operator
from headrace.wire.messages import Failure, Need
from headrace.wire.values import MISSING, Key, same, shown

ADVICE = "Use ctx.random, ctx.now, ctx.uuid or ctx.call_external instead of what lies outside the log"
BEGIN, END = "begin", "end"


class OverlayStates(States):
    """What was written since the last `clear`, MISSING where an entity was deleted, over other states."""

    def __init__(self, below: States) -> None:
        super().__init__()
        self.below = below

    def get(self, key: Key, default: Any = None) -> Any:
        state = super().get(key, UNCHANGED)
        if state is UNCHANGED:
            return self.below.get(key, default)
        return default if state is MISSING else state

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.below

    def pop(self, key: Key, *default: Any) -> Any:
        """The entity has no state from now on."""
        self[key] = MISSING


class OverlayTable(Table):
    """A table over another one, which it does not change."""

    __slots__ = ("below",)

    states: OverlayStates

    def __init__(self, below: Table) -> None:
        super().__init__(below.operator, OverlayStates(below.states))
        self.below = below

    def clear(self) -> None:
        self.states.clear()
        for each in (self.written, self.news):
            if each is not None:
                each.clear()

    def store(self) -> None:
        """Make all writes in the table below, in their order."""
        assert self.written is not None
        assert self.news is not None
        for key, state in zip(self.written, self.news, strict=True):
            if state is not UNCHANGED:
                self.below.change(key, self.below.get(key), state)
        for key, state in self.states.items():
            if not same(self.below.get(key), state):  # 0.0 became -0.0, say
                self.below.change(key, self.below.get(key), state)


class Step(NamedTuple):
    """A call begins, or ends."""

    kind: str
    function: str
    key: Key
    values: tuple[tuple[str, Any], ...]  # what to compare, each with its name; sealed
    maker: tuple[str, Key] | None  # of the call: the function that waits for it, if any


class Trial(NamedTuple):
    """What one run of a transaction did."""

    steps: list[Step]
    result: Any
    failure: Failure | None
    need: Need | None
    writes: dict[tuple[str, Any], Any]


class CheckedExecutor:
    """Made like the serial executor, and used like it."""

    def __init__(self, program: Program, state: State) -> None:
        self.program, self.state = program, state
        self.tables: dict[str, OverlayTable] = {}
        self.overlay = State(program, state.seed, self._table)
        self.overlay.keep_digests()
        self.steps: list[Step] = []
        self.stack: list[tuple[str, Key]] = []  # the running call, and those that wait for it
        self.twice = SerialExecutor(program, self.overlay, around=self._traced)
        self.once = SerialExecutor(program, state)

    def _table(self, operator: Operator) -> OverlayTable:
        table = self.tables[operator.name] = OverlayTable(self.state.tables[operator.name])
        return table

    @property
    def running(self) -> int:
        return self.twice.running or self.once.running

    def doom_running(self, tid: int) -> bool:
        return (self.twice if self.twice.running else self.once).doom_running(tid)

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        if epoch.is_replayed:
            return self.once.run(epoch, start, stop)
        self.overlay.seed = self.state.seed
        self.state.sort_out()
        for row in range(start, len(epoch) if stop is None else stop):
            need = self._run_row(epoch, row)
            if need is not None:
                return need
        return None

    def _run_row(self, epoch: Epoch, row: int) -> Need | None:
        first = second = self._try(epoch, row)
        if first.need is not None:
            return first.need
        if not is_late(first.failure):
            if first.failure is not None:  # only that of the second run is reported
                self.twice.traces.release(first.failure)
            second = self._try(epoch, row)
        failure = second.failure if is_late(second.failure) else difference(first, second, epoch, row)
        if failure is None:
            for table in self.tables.values():
                table.store()
            epoch.results.append(second.result)
            failure = second.failure
        else:
            epoch.results.append(None)
        if failure is not None:
            epoch.failures[row] = failure
        return None

    def _try(self, epoch: Epoch, row: int) -> Trial:
        """Run a row on the overlay, as if nothing had run before."""
        for table in self.tables.values():
            table.clear()
        self.steps = []
        self.stack.clear()
        need = self.twice.run(epoch, row, row + 1)
        result = epoch.results.pop() if need is None else None
        return Trial(self.steps, result, epoch.failures.pop(row, None), need, dict(self._writes()))

    def _writes(self) -> Iterator[tuple[tuple[str, Any], Any]]:
        for name, table in self.tables.items():
            for key, state in table.states.items():
                if not same(table.below.get(key), state):
                    yield (name, key), state

    # --- what a run does ---

    def _traced(self, body: Body) -> Body:
        def run(context: SerialContext, *args: Any) -> Any:
            if isinstance(context, TrackedContext) and context._path == order.ROOT:  # an earlier try is void
                self.steps.clear()
                self.stack.clear()
            key, queued = context.key, len(context._queue)
            is_one_way = self._begin(context, args)
            if not context._binding.is_plain:
                return self._await(context, key, queued, is_one_way, body(context, *args))
            try:
                result = body(context, *args)
            except BaseException as error:
                self._end(context, key, queued, (("raised", describe(error)[1]),))
                raise
            self._end(context, key, queued, self._returned(context, result, is_one_way))
            return result

        return run

    async def _await(self, context: SerialContext, key: Key, queued: int, is_one_way: bool, coroutine: Any) -> Any:
        try:
            result = await coroutine
        except GeneratorExit:
            raise
        except BaseException as error:
            self._end(context, key, queued, (("raised", describe(error)[1]),))
            raise
        self._end(context, key, queued, self._returned(context, result, is_one_way))
        return result

    def _begin(self, context: SerialContext, args: tuple[Any, ...]) -> bool:
        """Returns whether nobody gets its result."""
        name, is_one_way = context._binding.name, bool(self.steps) and not self.stack
        values = (("the state", context._state), *(("the argument", arg) for arg in args))
        self.steps.append(Step(BEGIN, name, context.key, values, self.stack[-1] if self.stack else None))
        self.stack.append((name, context.key))
        return is_one_way

    def _returned(self, context: SerialContext, result: Any, is_one_way: bool) -> tuple[tuple[str, Any], ...]:
        if is_one_way:
            return ()
        try:
            return (("returned", context._binding.seal(result)),)
        except BaseException as error:  # it aborts with this error
            return (("raised", describe(error)[1]),)

    def _end(self, context: SerialContext, key: Key, queued: int, outcome: tuple[tuple[str, Any], ...]) -> None:
        made = [
            (f"called {binding.name} of", value)
            for binding, called, args in context._queue[queued:]
            for value in (called, *args)
        ]
        name = context._binding.name
        if self.stack:
            self.stack.pop()
        self.steps.append(Step(END, name, key, (*outcome, ("put", context._state), *made), None))


def difference(first: Trial, second: Trial, epoch: Epoch, row: int) -> Failure | None:
    """The failure of a transaction whose two runs differ."""
    for one, other in zip(first.steps, second.steps, strict=False):
        if (one.kind, one.function) != (other.kind, other.function) or not same(one.key, other.key):
            return failure_of(one.maker or other.maker or root_of(epoch, row), told(one), told(other))
        for (what, value), (also, again) in zip(one.values, other.values, strict=False):
            if what != also or not same(value, again):
                who = (one.function, one.key) if one.kind == END else one.maker or root_of(epoch, row)
                return failure_of(who, f"{what} {shown_state(value)}", f"{also} {shown_state(again)}")
        if len(one.values) != len(other.values):
            counts = [f"passed {len(step.values)} values on" for step in (one, other)]
            return failure_of((one.function, one.key), *counts)
    if len(first.steps) != len(second.steps):
        counts = [f"led to {sum(step.kind == BEGIN for step in run.steps)} calls" for run in (first, second)]
        return failure_of(root_of(epoch, row), *counts)
    if not same(first.result, second.result) or not same_outcome(first.failure, second.failure):
        return failure_of(root_of(epoch, row), ended(first), ended(second))
    nothing = object()
    if len(first.writes) != len(second.writes) or not all(
        same(state, second.writes.get(entity, nothing)) for entity, state in first.writes.items()
    ):
        return failure_of(root_of(epoch, row), f"wrote {first.writes}", f"wrote {second.writes}")
    return None


def root_of(epoch: Epoch, row: int) -> tuple[str, Key]:
    return epoch.entries[row].name, epoch.keys[row]


def told(step: Step) -> str:
    return f"{'called' if step.kind == BEGIN else 'ended'} {step.function} of {shown(step.key)}"


def ended(run: Trial) -> str:
    if run.need is not None:
        return f"called {run.need.name}"
    return f"returned {shown(run.result)}" if run.failure is None else f"aborted ({run.failure.type})"


def shown_state(value: Any) -> str:
    return "nothing" if value == MISSING else shown(value)


def failure_of(who: tuple[str, Key], one: str, other: str) -> Failure:
    function, key = who
    text = (
        f"{function} of {shown(key)} is not deterministic: with the same arguments and state it {one} in one run, and "
        f"{other} in the next. {ADVICE}"
    )
    return Failure(NotDeterministic.code, NotDeterministic.__name__, text, function, key)
