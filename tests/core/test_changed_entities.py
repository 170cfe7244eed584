"""What has changed since it was last taken is known exactly, in a small state and in a large one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import App, Config
from headrace.core import program as programs
from headrace.core.epoch import Epoch
from headrace.core.program import Program
from headrace.core.serial import SerialExecutor
from headrace.wire.values import MISSING
from tests.cluster import exactly, looped
from tests.programs import PROGRAMS, app
from tests.programs import Program as Drawn

CUTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def run(program: Program, executor: SerialExecutor, calls: list[Any], first: int) -> None:
    epoch = Epoch(1, 0, 0)
    for function, key, *args in calls:
        entry = program.functions[function]
        entry, given = (entry, tuple(args)) if entry.fits(tuple(args)) else entry.admit(tuple(args))
        epoch.entries.append(entry)
        epoch.keys.append(key)
        epoch.args.append(given)
    epoch.tids = range(first, first + len(calls))
    executor.run(epoch)


@pytest.mark.parametrize("large", [3, 100_000])
@given(program=PROGRAMS, cuts=CUTS)
@settings(max_examples=150)
def test_all_that_was_taken_together_is_the_state(large: int, program: Drawn, cuts: list[int]) -> None:
    was, programs.LARGE = programs.LARGE, large
    try:
        calls = program.calls()
        compiled = Program(app, Config())
        executor = SerialExecutor(compiled)
        taken: dict[Any, Any] = {}
        at, cut = 0, 0
        while at < len(calls):
            size = 1 + cuts[cut % len(cuts)]
            run(compiled, executor, calls[at : at + size], at + 1)
            at, cut = at + size, cut + 1
            rows = compiled.take_written()
            assert len({(name, type(key), key) for name, key, _ in rows}) == len(rows), "an entity was taken twice"
            for name, key, state in rows:
                taken[name, key] = state
            kept = {entity: state for entity, state in taken.items() if state is not MISSING}
            found = {(name, key): state for name in app.operators for key, state in compiled.items(name)}
            assert exactly(found) == exactly(kept)
            assert all(compiled.state(*entity) is state for entity, state in kept.items())
            assert sum(map(compiled.count, app.operators)) == len(kept)
        unseal = compiled.values.unseal
        found = {entity: unseal(state) for entity, state in found.items()}
        assert exactly(found) == exactly(looped(calls)[1])
        assert not compiled.take_written()
    finally:
        programs.LARGE = was


def small() -> tuple[App, Any]:
    counters = App("counters")

    def add(ctx: Any, amount: int) -> int:
        if amount:
            ctx.put(ctx.get(0) + amount)
        if amount < 0:
            ctx.delete()
        return ctx.get(0)  # type: ignore[no-any-return]

    return counters, counters.operator("counter").register(add)


def test_a_read_changes_nothing_and_a_deletion_is_a_change() -> None:
    counters, add = small()
    program = Program(counters, Config())
    executor = SerialExecutor(program)
    program.load("counter", {"a": 1, "b": 2})
    run(program, executor, [(add, "a", 0), (add, "b", -1), (add, "c", 1), (add, "d", 1), (add, "d", -1)], 1)
    assert program.take_written() == [("counter", "b", MISSING), ("counter", "c", 1)]
    assert dict(program.items("counter")) == {"a": 1, "c": 1}


def test_a_program_over_another_shares_its_state_also_once_it_is_large() -> None:
    counters, add = small()
    program = Program(counters, Config())
    other = Program(counters, Config(), over=program)
    first, second = SerialExecutor(program), SerialExecutor(other)
    program.load("counter", dict.fromkeys(range(programs.LARGE), 1))
    assert program.notes
    assert other.notes
    run(program, first, [(add, 1, 1)], 1)
    run(other, second, [(add, 1, 1), (add, 2, 1)], 2)
    assert program.take_written() == [("counter", 1, 3), ("counter", 2, 2)]
    assert program.state("counter", 1) == 3
    assert Program(counters, Config(), over=other).notes
