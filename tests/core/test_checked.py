"""A check: every transaction runs twice. What is deterministic is as without it; what is not is named, and aborts."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Abort, Aborted, App, Context, Runtime
from headrace.core.checked import CheckedExecutor
from headrace.core.local import LocalBackend
from headrace.errors import NotDeterministic
from headrace.sim.oracle import Oracle
from tests.cluster import exactly, looped, outcome
from tests.core import test_outside_programs
from tests.core.outside_programs import BODIES, LOGS
from tests.driver import Driver
from tests.durability.hand import Hand, memory
from tests.outside import World
from tests.programs import PROGRAMS, Program
from tests.programs import app as programs_app

CHECKED = partial(LocalBackend, executor=CheckedExecutor)

# --- what is deterministic --------------------------------------------------------------------------------------------


@given(program=PROGRAMS)
@settings(max_examples=100, deadline=None)
def test_a_check_changes_no_reply_no_state_and_no_digest(program: Program) -> None:
    calls, found = program.calls(), []
    for backend in (LocalBackend, CHECKED):
        driver, replies, digests = Driver(programs_app, backend=backend, has_digests=True), [], []
        for at, call in enumerate(calls):
            replies.append(outcome(driver.call_at(at * 1_000_000, f"call{at}", *call)))
            digests.append(driver.core.last.digest)
        found.append((repr(replies), exactly(driver.state()), digests))
    assert found[0] == found[1]
    replies, state = looped(calls)
    assert found[1][:2] == (repr(replies), exactly(state))


class CheckedWorld(World):
    def prepare(self) -> None:
        if self.core.backend.__class__ is LocalBackend:
            self.core.backend = CHECKED(self.core)
        super().prepare()


WAYS = st.builds(
    partial(test_outside_programs.Way, 0, "auto", in_flight_max=1, slice_calls=1, predict_after=1, troubles=0),
    transactions_max=st.sampled_from([1, 3, 12, 30]),
    batches=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
)


@given(BODIES, LOGS, WAYS)
@settings(max_examples=100, deadline=None)
def test_timers_chance_time_and_external_calls_are_as_without_a_check(bodies: Any, log: Any, way: Any) -> None:
    """The oracle runs the rows that were logged, one after the other."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(test_outside_programs, "World", CheckedWorld)
        world = test_outside_programs.play(bodies, log, way)
    oracle = world.check()
    assert isinstance(oracle, Oracle)


# --- what is not ------------------------------------------------------------------------------------------------------

app = App("unsteady")
thing = app.operator("thing")
COUNT = itertools.count()


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@thing.register
def returns(ctx: Context) -> float:
    ctx.put(1)
    return time.perf_counter()


@thing.register
def puts(ctx: Context) -> None:
    ctx.put(next(COUNT))


@thing.register
def calls(ctx: Context) -> None:
    ctx.call_async(add, f"k{next(COUNT)}", 1)


@thing.register
def passes(ctx: Context) -> None:
    ctx.call_async(add, "k", next(COUNT))


@thing.register
async def awaits(ctx: Context) -> int:
    return await ctx.call(add, "k", next(COUNT))


@thing.register
async def asks(ctx: Context, of: Any) -> None:
    """Deterministic itself."""
    ctx.put(7)
    await ctx.call(of, "inner")


@thing.register
def sends(ctx: Context, of: Any) -> None:
    ctx.put(7)
    ctx.call_async(of, "inner")


@thing.register
def fails(ctx: Context) -> None:
    if next(COUNT) % 2:
        raise Abort("odd")


@thing.register
def mutes(ctx: Context) -> None:
    """Only the number of its calls differs."""
    for _ in range(next(COUNT) % 2):
        ctx.call_async(add, "k", 1)


@thing.register
async def draws(ctx: Context) -> float:
    """Deterministic, and needs the paths of calls."""
    await ctx.call(add, "drawn", 1)
    return ctx.random.random()


BAD = [returns, puts, calls, passes, awaits, fails, mutes]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: each.name)
def test_a_function_that_is_not_deterministic_is_named_with_its_entity_and_both_values(bad: Any) -> None:
    with Runtime(app, check=True) as runtime:
        runtime.client.call(add, "a", 1)
        with pytest.raises(
            Aborted, match=rf"thing\.{bad.name} of 'a' is not deterministic.* in one run, and .*"
        ) as found:
            runtime.client.call(bad, "a")
        assert (found.value.type, found.value.function, found.value.key) == ("NotDeterministic", bad.full_name, "a")
        assert runtime.client.call(draws, "b") != runtime.client.call(draws, "b")
        assert runtime.state(thing) == {"a": 1, "drawn": 2}, "it has left nothing"


@pytest.mark.parametrize("through", [asks, sends], ids=lambda each: each.name)
@pytest.mark.parametrize("bad", BAD, ids=lambda each: each.name)
def test_it_is_the_called_function_that_is_named_and_not_its_caller(through: Any, bad: Any) -> None:
    with Runtime(app, check=True) as runtime:
        if through is sends and bad in (returns,):
            runtime.client.call(through, "a", bad.full_name)  # the result of a one-way call is nobody's
            return
        with pytest.raises(Aborted, match=rf"thing\.{bad.name} of 'inner' is not deterministic"):
            runtime.client.call(through, "a", bad.full_name)
        assert runtime.state(thing) == {}


class CheckedHand(Hand):
    def prepare(self) -> None:
        self.core.backend = CHECKED(self.core)
        super().prepare()


@pytest.mark.parametrize("kind", [Hand, CheckedHand])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_abort_is_in_the_log_so_a_start_repeats_it_with_or_without_a_check(workers: int, kind: type[Hand]) -> None:
    if workers and kind is CheckedHand:
        pytest.skip("a check runs in one process")
    store = memory()
    rows = [(add, "a", 1), (puts, "a"), (returns, "b"), (add, "a", 5), (passes, "a")]
    hand = CheckedHand(store, app)
    replies = hand.run("all", rows)
    assert [reply.failure and reply.failure.type for reply in replies] == [
        None,
        NotDeterministic.__name__,
        NotDeterministic.__name__,
        None,
        NotDeterministic.__name__,
    ]
    again = kind(store, app, workers)
    assert again.run("all", rows) == replies
    assert again.state() == {("thing", "a"): 6}


def test_no_reply_leaves_before_the_abort_is_durable() -> None:
    store = memory()
    hand = CheckedHand(store, app)
    token = hand.send("all", [(puts, "a")])
    hand.compute()
    hand.sync(1)  # the epoch, not the decree
    hand.compute()
    assert token not in hand.replies
    hand.settle()
    assert token in hand.replies


def test_an_epoch_that_an_earlier_engine_logged_is_not_checked() -> None:
    """It may have been answered."""
    store = memory()
    first = Hand(store, app)
    given = first.run("all", [(fails, "a"), (add, "a", 1)])
    steps = itertools.count(0, 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.core.test_checked.COUNT", steps if given[0].failure is None else itertools.count(1, 2))
        assert CheckedHand(store, app).run("all", [(fails, "a"), (add, "a", 1)]) == given
