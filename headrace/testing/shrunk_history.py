"""From a failing run of the simulator to a short test: the calls of its log, run in the test kit, as few as will do.

The log of a run is a list of calls with their times. The same calls, in the test kit, break the same invariant if the
mistake is in the app: faults have no part in it, since the results are those of a loop over the log. Then calls are
left out, times rounded and numbers made smaller, as long as it still fails. What is printed has been run.

If it does not fail there (a function that is not deterministic needs a crash in the right place), the calls of the log
are printed as they are, and only the seed repeats it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.events import LogFailures
from headrace.errors import HeadraceError, NotDeterministic
from headrace.model.app import App
from headrace.sim.check import Reference
from headrace.sim.user_app import Invariant, UserRun, first_broken
from headrace.testing.virtual_runtime import TestRuntime

ATTEMPTS_MAX = 1_500
DAY_US = 86_400_000_000
ROUND_US = (1_000_000, 60_000_000, 3_600_000_000, DAY_US)
SMALL = (1, 2, 3, 5, 10)


class CallStep(NamedTuple):
    function: str
    key: Any
    args: tuple[Any, ...]


class TimeStep(NamedTuple):
    us: int


class CrashStep(NamedTuple):
    """The app is killed, and started again from its store."""


HistoryStep = CallStep | TimeStep | CrashStep


class HistoryVerdict(NamedTuple):
    """What the test kit says to some steps."""

    why: str
    kind: str  # of failure: while it is made smaller it stays the same
    aborts: dict[int, str]  # of the steps: those that aborted, and why
    ran: int  # steps until it failed


class ShrunkHistory(NamedTuple):
    steps: list[HistoryStep]
    externals: dict[str, Any]
    verdict: HistoryVerdict | None  # None: it does not fail in the test kit


def shrink_history(app: App, invariants: Sequence[Invariant], run: UserRun) -> ShrunkHistory:
    """The history of a run that failed, as few steps as possible."""
    log = run.simulation.log
    if not log.rows:  # the run broke off before its log was read
        log = Reference.of_history(run.simulation.world.history)
    steps = steps_of(log, run.workload.broken_at)
    answers = {name: found[0] for name, found in run.workload.answers.items()}
    for externals in (answers_for(app, answers), answers_for(app, {})):
        verdict = judge(app, invariants, steps, externals)
        if verdict is not None:
            steps, verdict = smallest(app, invariants, steps[: verdict.ran], externals, verdict)
            return ShrunkHistory(steps, externals, verdict)
    return ShrunkHistory(steps, answers_for(app, answers), None)


def answers_for(app: App, answers: Mapping[str, Any]) -> dict[str, Any]:
    """An answer for each external function; those without one fail."""
    return {name: answers.get(name, ConnectionError("it does not answer")) for name in app.externals}


def steps_of(log: Reference, until: int) -> list[HistoryStep]:
    """The calls of the clients, in the order of the log, and the time between them; up to this TID, if it is not 0."""
    steps: list[HistoryStep] = []
    rows = list(zip(log.rows, log.times_us, strict=True))
    last_us = rows[0][1] if rows else 0
    for row, time_us in rows:
        if time_us > last_us:
            steps.append(TimeStep(time_us - last_us))
        last_us = max(last_us, time_us)
        if row.answered < 1 << 62:  # not one of the engine's own
            function, key, *args = row.call
            steps.append(CallStep(getattr(function, "full_name", function), key, tuple(args)))
        if until and row.tid == until:
            break
    return [*steps, CrashStep()]


class QuietRuntime(TestRuntime):
    """Runs the same failures many times, and logs none."""

    def _log_failures(self, effect: LogFailures) -> None:
        pass


def judge(
    app: App, invariants: Sequence[Invariant], steps: Sequence[HistoryStep], externals: Mapping[str, Any]
) -> HistoryVerdict | None:
    """Run the steps. None if nothing is wrong after any of them."""
    aborts: dict[int, str] = {}
    with QuietRuntime(app, externals=externals) as runtime:
        for at, step in enumerate(steps):
            try:
                match step:
                    case CallStep():
                        reply = runtime.client.batch([(step.function, step.key, *step.args)])[0]
                        if reply.error is not None:
                            aborts[at] = reply.error
                    case TimeStep():
                        runtime.advance(datetime.timedelta(microseconds=step.us))
                    case CrashStep():
                        runtime.crash()
                why = first_broken(invariants, runtime.states())
            except NotDeterministic as error:
                return HistoryVerdict(str(error), error.code, aborts, at + 1)
            except HeadraceError:
                return None
            if why is not None:
                return HistoryVerdict(why, why.partition(":")[0], aborts, at + 1)
    return None


def smallest(
    app: App,
    invariants: Sequence[Invariant],
    steps: list[HistoryStep],
    externals: Mapping[str, Any],
    verdict: HistoryVerdict,
) -> tuple[list[HistoryStep], HistoryVerdict]:
    attempts, is_smaller = 0, True
    while is_smaller:
        is_smaller = False
        for fewer in candidates(steps):
            attempts += 1
            if attempts > ATTEMPTS_MAX:
                return steps, verdict
            found = judge(app, invariants, fewer, externals)
            if found is not None and found.kind == verdict.kind:
                steps, verdict, is_smaller = fewer[: found.ran], found, True
                break
    return steps, verdict


def candidates(steps: list[HistoryStep]) -> Iterator[list[HistoryStep]]:
    """All that are one step smaller: large parts are left out first."""
    size = len(steps) // 2
    while size:
        for at in range(0, len(steps), size):
            yield steps[:at] + steps[at + size :]
        size //= 2
    for at, step in enumerate(steps):
        if isinstance(step, TimeStep):
            if at + 1 < len(steps) and isinstance(steps[at + 1], TimeStep):
                yield [*steps[:at], TimeStep(step.us + steps[at + 1].us), *steps[at + 2 :]]  # type: ignore[union-attr]
            for us in ROUND_US:
                if us < step.us or step.us % us:
                    rounded = -(-step.us // us) * us if us <= step.us else us
                    if rounded != step.us and weight(rounded) < weight(step.us):
                        yield [*steps[:at], TimeStep(rounded), *steps[at + 1 :]]
        elif isinstance(step, CallStep):
            for place, arg in enumerate(step.args):
                for small in SMALL:
                    if type(arg) is int and small < arg:
                        args = (*step.args[:place], small, *step.args[place + 1 :])
                        yield [*steps[:at], step._replace(args=args), *steps[at + 1 :]]


def weight(us: int) -> tuple[int, int]:
    """A round time is smaller than one that is not."""
    return sum(us % each != 0 for each in ROUND_US), us


# --- as text ----------------------------------------------------------------------------------------------------------


def as_test(found: ShrunkHistory, app: str, invariants: Sequence[str]) -> str:
    """A test to paste: it fails as the run did. `app` and `invariants` are the names that the command was given."""
    imports: dict[str, list[str]] = {}
    for module, name in (target.split(":") for target in (app, *invariants)):
        imports.setdefault(module, []).append(name)
    lines = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    lines += ["from headrace.testing import TestRuntime", "", ""]
    lines.append("def test_found_by_the_simulator() -> None:")
    given = ", ".join(f"{text_of(name)}: {text_of(answer)}" for name, answer in found.externals.items())
    opened = f"TestRuntime({app.partition(':')[2]}{', externals={' + given + '}' if given else ''})"
    lines.append(f"    with {opened} as runtime:")
    aborts = {} if found.verdict is None else found.verdict.aborts
    for at, step in enumerate(found.steps):
        lines.append(f"        {line_of(step, aborts.get(at))}")
    for target in invariants:
        name = target.partition(":")[2]
        lines.append(f"        assert {name}(runtime.states()) is not False")
    if not found.steps and not invariants:
        lines.append("        pass")
    return "\n".join(lines)


def line_of(step: HistoryStep, why: str | None) -> str:
    match step:
        case CallStep():
            call = ", ".join(map(text_of, (step.function, step.key, *step.args)))
            return f"runtime.client.call({call})" if why is None else f"runtime.client.batch([({call})])  # {why}"
        case TimeStep():
            return f"runtime.advance({span_of(step.us)})"
    return "runtime.crash()"


def text_of(value: Any) -> str:
    """As Python code."""
    return json.dumps(value, ensure_ascii=False) if type(value) is str and value.isprintable() else repr(value)


def span_of(us: int) -> str:
    parts = []
    units: tuple[tuple[str, int], ...] = (("days", DAY_US), ("hours", 3_600_000_000), ("minutes", 60_000_000))
    for name, unit in units:
        if us >= unit:
            parts.append(f"{name}={us // unit}")
            us %= unit
    if us or not parts:
        parts.append(f"seconds={us / 1_000_000:g}" if us % 1_000_000 == 0 else f"seconds={us / 1_000_000!r}")
    return ", ".join(parts)
