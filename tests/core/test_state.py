"""State: what has changed since it was last taken is known exactly; several executors run over one state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import App, Config, Context
from headrace.core import state as states
from headrace.core.epoch import Epoch
from headrace.core.program import Program
from headrace.core.serial import SerialExecutor, TrackedExecutor
from headrace.core.state import State, entities_of
from headrace.wire.values import MISSING
from tests.cluster import exactly, looped
from tests.driver import Driver
from tests.programs import PROGRAMS, app
from tests.programs import Program as Drawn

CUTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def epoch_of(program: Program, calls: list[Any], first: int) -> Epoch:
    epoch = Epoch(1, 0, 0)
    for function, key, *args in calls:
        entry = program.functions[function]
        entry, given = (entry, tuple(args)) if entry.fits(tuple(args)) else entry.admit(tuple(args))
        epoch.entries.append(entry)
        epoch.keys.append(key)
        epoch.args.append(given)
    epoch.tids = range(first, first + len(calls))
    return epoch


def found_in(state: State) -> dict[Any, Any]:
    return {(name, key): sealed for name in app.operators for key, sealed in state.tables[name].items()}


@given(program=PROGRAMS, cuts=CUTS, written_max=st.sampled_from([0, 2, 200_000]), keeps=st.integers(1, 3))
@settings(max_examples=150)
def test_all_that_was_taken_together_is_the_state(
    program: Drawn, cuts: list[int], written_max: int, keeps: int
) -> None:
    """A delta is taken after every `keeps` epochs; keys are sorted out when more than `written_max` were written."""
    with mock.patch.object(states, "WRITTEN_MAX", written_max):
        check_deltas(program, cuts, keeps)


def check_deltas(program: Drawn, cuts: list[int], keeps: int) -> None:
    calls = program.calls()
    compiled = Program(app, Config())
    state = State(compiled)
    state.keep_deltas()
    executor = SerialExecutor(compiled, state)
    taken: dict[Any, Any] = {}
    at, cut = 0, 0
    while at < len(calls):
        size = 1 + cuts[cut % len(cuts)]
        executor.run(epoch_of(compiled, calls[at : at + size], at + 1))
        at, cut = at + size, cut + 1
        if cut % keeps and at < len(calls):
            continue
        rows = entities_of(state.take_delta())
        assert len({(name, type(key), key) for name, key, _ in rows}) == len(rows), "an entity was taken twice"
        for name, key, sealed in rows:
            taken[name, key] = sealed
        kept = {entity: sealed for entity, sealed in taken.items() if sealed is not MISSING}
        assert exactly(found_in(state)) == exactly(kept)
        assert all(state.tables[name].get(key) is sealed for (name, key), sealed in kept.items())
        assert sum(len(state.tables[name]) for name in app.operators) == len(kept)
    unseal = compiled.values.unseal
    assert exactly({entity: unseal(sealed) for entity, sealed in found_in(state).items()}) == exactly(looped(calls)[1])
    assert not state.take_delta()


@given(program=PROGRAMS, cuts=CUTS, has_deltas=st.booleans())
@settings(max_examples=150)
def test_changes_are_what_differs_between_the_start_and_the_end_of_an_epoch(
    program: Drawn, cuts: list[int], has_deltas: bool
) -> None:
    calls = program.calls()
    compiled = Program(app, Config())
    state = State(compiled)
    state.watch(app.operators)
    if has_deltas:
        state.keep_deltas()
    executor = SerialExecutor(compiled, state)
    at, cut = 0, 0
    while at < len(calls):
        size = 1 + cuts[cut % len(cuts)]
        earlier = found_in(state)
        executor.run(epoch_of(compiled, calls[at : at + size], at + 1))
        at, cut = at + size, cut + 1
        later, changed = found_in(state), state.take_changes()
        differing = {entity for entity in earlier.keys() | later.keys() if earlier.get(entity) is not later.get(entity)}
        told = {(name, key) for name, changes in changed.items() for key in changes.keys}
        assert differing <= told
        for name, changes in changed.items():
            for key, before, after in zip(*changes, strict=True):
                assert before is earlier.get((name, key), MISSING)
                assert after is later.get((name, key), MISSING)
    assert not state.take_changes()
    assert has_deltas or not any(table.written for table in state.tables.values()), "a delta that nobody takes grows"


@given(program=PROGRAMS, turns=st.lists(st.integers(0, 2), min_size=1, max_size=12))
@settings(max_examples=150)
def test_executors_that_take_turns_over_one_state_give_what_the_loop_gives(program: Drawn, turns: list[int]) -> None:
    calls = program.calls()
    compiled = Program(app, Config())
    other = compiled.under(Config(value_bytes_max=1 << 19))
    assert other.entries[0] is not compiled.entries[0], "other limits of values need other checks"
    state = State(compiled)
    fast, under_other_limits, tracked = (
        SerialExecutor(compiled, state),
        SerialExecutor(other, state),
        TrackedExecutor(compiled, state),
    )
    replies, entities = looped(calls)
    unseal = compiled.values.unseal
    for at, call in enumerate(calls):
        epoch = epoch_of(compiled, [call], at + 1)
        turn = turns[at % len(turns)]
        if turn == 2:
            tracked.run_row(epoch, epoch.entries[0].number)
        else:
            (fast, under_other_limits)[turn].run(epoch)
        status, *_ = replies[at]
        assert (0 in epoch.failures) is (status != "ok")
        if status == "ok":
            assert repr(unseal(epoch.results[0])) == repr(replies[at][1])
    assert exactly({entity: unseal(sealed) for entity, sealed in found_in(state).items()}) == exactly(entities)


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
    state = State(program)
    state.keep_deltas()
    state.tables["counter"].load({"a": 1, "b": 2})
    calls = [(add, "a", 0), (add, "b", -1), (add, "c", 1), (add, "d", 1), (add, "d", -1)]
    SerialExecutor(program, state).run(epoch_of(program, calls, 1))
    assert state.take_delta() == {"counter": {"b": MISSING, "c": 1, "d": MISSING}}
    assert dict(state.tables["counter"].items()) == {"a": 1, "c": 1}


def test_what_was_taken_does_not_change_any_more() -> None:
    counters, add = small()
    program = Program(counters, Config())
    state = State(program)
    state.keep_deltas()
    executor = SerialExecutor(program, state)
    executor.run(epoch_of(program, [(add, 1, 1)], 1))
    taken = state.take_delta()
    executor.run(epoch_of(program, [(add, 1, 1)], 2))
    assert taken == {"counter": {1: 1}}
    assert state.take_delta() == {"counter": {1: 2}}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_no_delta_grows_that_nobody_takes(workers: int) -> None:
    """Timers are entities that come and go; in memory, nobody takes what they have written."""
    clocks = App("clocks")
    alarm = clocks.operator("alarm", ttl=60)

    @alarm.register
    def ring(ctx: Context) -> None:
        ctx.put(1)

    @alarm.register
    def wind(ctx: Context) -> None:
        ctx.call_later(0.001, ring, ctx.key)

    driver = Driver(clocks, Config(replay_transactions_max=50), workers)
    for at in range(100):
        driver.submit_at(at * 10_000, ([f"r{at}"], [(wind, f"k{at}")]))
        driver.settle()
    assert not any(table.written for table in driver.core.state.tables.values())
    for worker in driver.workers.values():  # until the next copy of the state
        assert max(len(table.written or ()) for table in worker.state.tables.values()) < 100
        assert not any(table.befores for table in worker.state.tables.values())
