"""A user's app in the simulator: mistakes are found, made small and printed as tests; what is right passes."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import strategies as st

from examples import auction, faulty_auction, subscriptions
from headrace import Abort, App, Context, Places
from headrace.errors import ModelError
from headrace.sim.drawing import draw_value
from headrace.sim.mutants import MUTANTS, planted
from headrace.sim.user_app import BROKEN, DrawnCalls, UserRun, parameters_of
from headrace.testing import TestRuntime
from headrace.testing.given_calls import calls_from
from headrace.testing.shrunk_history import CallStep, TimeStep, as_test, shrink_history, span_of
from headrace.wire.hints import Hints

FAULTY = ("examples.faulty_auction:app", "examples.faulty_auction:money_is_conserved")
RIGHT = ("examples.auction:app", "examples.auction:money_is_conserved")


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", "sim", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_planted_bug_is_found_within_a_minute_and_printed_as_a_test_that_fails() -> None:
    began_s = time.monotonic()
    done = command("--app", FAULTY[0], "--invariant", FAULTY[1], "--seeds", "10", "--json")
    assert time.monotonic() - began_s < 60
    assert done.returncode == 1, done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    first = whole["found"][0]
    assert first["violation"].startswith(f"{BROKEN} money_is_conserved: it returned False")
    assert first["is_verified"]
    namespace: dict[str, Any] = {}
    exec(first["test"], namespace)  # noqa: S102 what the command printed
    with pytest.raises(AssertionError):
        namespace["test_found_by_the_simulator"]()
    assert first["test"] in (Path(__file__).parents[2] / "docs/testing.md").read_text(), "the page shows another one"
    lines = [line.strip() for line in first["test"].splitlines()]
    calls = [line for line in lines if line.startswith("runtime.client.call(")]
    assert len(calls) == 3, "a deposit, a bid, and a higher bid of the same bidder"
    assert [line.split('"')[1] for line in calls] == ["account.deposit", "lot.bid", "lot.bid"]


def test_one_seed_is_repeated_with_all_that_is_needed() -> None:
    seed = json.loads(
        command("--app", FAULTY[0], "--invariant", FAULTY[1], "--seeds", "4", "--json").stdout.splitlines()[-1]
    )["found"][0]["seed"]
    done = command("--app", FAULTY[0], "--invariant", FAULTY[1], "--seed", str(seed))
    assert done.returncode == 1, done.stderr
    for word in (f"seed {seed}: invariant money_is_conserved", "def test_found_by_the_simulator", "VIOLATED"):
        assert word in done.stdout


def test_the_auction_house_passes_a_fixed_number_of_seeds_under_all_faults() -> None:
    done = command("--app", RIGHT[0], "--invariant", RIGHT[1], "--seeds", "30", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    assert (whole["seeds"], whole["violations"], whole["found"]) == (30, 0, [])
    assert whole["raised"] == {}
    for probe in ("ok", "aborted", "timers fired", "messages fired", "recoveries", "snapshots", "rescaled"):
        assert whole["probes"].get(probe, 0) > 0, probe
    expected = {"coordinator crashes", "crashes", "power lost", "lost", "duplicated", "flipped bits", "clocks jumped"}
    assert expected <= set(whole["faults"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--app", "examples.nowhere:app"], "no module 'examples.nowhere' found"),
        (["--app", "examples.auction:deposit"], "is not an App"),
        (["--app", RIGHT[0], "--invariant", "examples.auction:nothing"], "has no 'nothing'"),
        (["--app", RIGHT[0], "--invariant", "examples.auction:OPEN"], "must be a function of the state"),
        (["--app", RIGHT[0], "--calls", "examples.auction:OPEN"], "takes a Hypothesis strategy, or a function"),
        (["--app", RIGHT[0], "--calls", "nothing"], "give module:attribute"),
        (["--invariant", RIGHT[1]], "need --app"),
        (["--app", RIGHT[0], "--programs"], "takes no --programs"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(args: list[str], message: str) -> None:
    done = command(*args, "--seeds", "1")
    assert done.returncode == 2
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_itself() -> None:
    def look(seed: int) -> Any:
        return UserRun(auction.app, seed, None, [auction.money_is_conserved]).report()

    assert look(3) == look(3)
    assert look(3).digest != look(4).digest


def test_parameters_cover_one_to_five_workers_and_always_have_a_store() -> None:
    drawn = [parameters_of(seed) for seed in range(200)]
    assert {each.workers for each in drawn} == {0, 1, 2, 3, 4, 5}
    assert {each.store for each in drawn} == {"files", "objects"}


def test_timers_schedules_and_externals_of_an_app_are_checked_against_the_loop() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        run = UserRun(subscriptions.app, seed, lambda rng: [some_subscription(rng)])
        report = run.report()
        assert report.violations == []
        seen.update(report.probes)
    for probe in ("external calls", "timers fired", "schedules fired", "messages fired"):
        assert seen[probe] > 0, probe


def some_subscription(rng: random.Random) -> tuple[Any, ...]:
    key = rng.choice("abc")
    kind = rng.randrange(5)
    if kind < 2:
        return subscriptions.begin, key, rng.choice(("basic", "pro")), "card"
    return ((subscriptions.pay, key), (subscriptions.cancel, key), (subscriptions.visit, key))[kind - 2]


@pytest.mark.parametrize(
    "name", ["request ids are not remembered", "a recovery forgets epochs that were final", "aborted writes are seen"]
)
def test_a_mistake_of_the_engine_is_found_with_a_users_app_too(name: str) -> None:
    (mutant,) = [each for each in MUTANTS if each.name == name]
    with planted(mutant):
        assert any(UserRun(auction.app, seed).report().violations for seed in range(60))


def careless() -> App:
    """Functions with all kinds of mistakes that abort."""
    app = App("careless")
    thing = app.operator("thing", state=int)
    bag = app.operator("bag", state=dict[str, int], combine=lambda old, new: {**old, **new})

    @thing.register
    def put_wrong(ctx: Context[int]) -> None:
        ctx.put("text")  # type: ignore[arg-type]

    @thing.register
    def return_wrong(ctx: Context[int]) -> int:
        return "text"  # type: ignore[return-value]

    @thing.register
    def add(ctx: Context[int], amount: int, times: int = 1) -> int:
        ctx.put(ctx.get(0) + amount * times)
        return ctx.get(0)

    @thing.register
    def call_wrong(ctx: Context[int], how: Literal["type", "name", "key", "count", "caught", "unknown"]) -> None:
        ctx.put(7)
        if how == "type":
            ctx.call_async(add, "a", "one")
        elif how == "name":
            ctx.call_async(add, "a", sum=1)
        elif how == "key":
            ctx.call_async(add, 1.5, 1)
        elif how == "count":
            ctx.call_later(1, add, "a")
        elif how == "unknown":
            ctx.call_async("thing.nothing", "a")
        else:
            try:
                ctx.call_async(add, "a", "one")
            except Exception:
                ctx.put(8)

    @thing.register
    async def call_right(ctx: Context[int], amount: int) -> int:
        ctx.call_later(5, add, "b", times=2, amount=amount)
        return await ctx.call(add, "c", amount, times=3)

    @bag.register
    def merge(ctx: Context[dict[str, int]], what: dict[str, int]) -> None:
        ctx.merge(what)

    @thing.register
    def merge_wrong(ctx: Context[int]) -> None:
        ctx.merge(1)

    @thing.register
    def fail(ctx: Context[int], text: str) -> None:
        raise Abort(text) if text == "a" else KeyError(text)

    return app


def test_mistakes_with_types_and_calls_abort_in_the_loop_as_they_do_in_production() -> None:
    raised: Counter[str] = Counter()
    for seed in range(12):
        run = UserRun(careless(), seed)
        assert run.report().violations == []
        raised.update(run.workload.raised)
    kinds = {text.split()[0] for text in raised}
    assert kinds == {"BadValue", "BadArguments", "BadKey", "BadCall", "UnknownFunction", "KeyError"}


# --- what is found ----------------------------------------------------------------------------------------------------


def found_in(app: App, invariants: list[Any], seeds: range, calls: Any = None) -> UserRun:
    for seed in seeds:
        run = UserRun(app, seed, calls, invariants)
        if run.report().violations:
            return run
    raise AssertionError("nothing was found")


def with_a_late_mistake() -> App:
    """Money is lost if a timer fires after the account was closed."""
    app = App("late")
    account = app.operator("account", state=int)
    total = app.operator("total", state=int, combine=lambda old, new: old + new)

    @total.register
    def _count(ctx: Context[int], change: int) -> None:
        ctx.merge(change)

    @account.register
    def pay_in(ctx: Context[int], amount: int) -> None:
        if amount <= 0:
            raise Abort("nothing")
        ctx.put(ctx.get(0) + amount)
        ctx.call_async(_count, "all", amount)

    @account.register
    def remove_later(ctx: Context[int]) -> None:
        ctx.call_later(datetime.timedelta(days=3), _remove, ctx.key)

    @account.register
    def _remove(ctx: Context[int]) -> None:
        ctx.delete()

    return app


def test_a_mistake_that_needs_time_to_pass_is_printed_with_the_time() -> None:
    app = with_a_late_mistake()

    def conserved(state: dict[str, dict[Any, Any]]) -> bool:
        return sum(state["account"].values()) == sum(state["total"].values())

    run = found_in(app, [conserved], range(30))
    found = shrink_history(app, [conserved], run)
    assert found.verdict is not None
    calls = [step.function for step in found.steps if isinstance(step, CallStep)]
    assert sorted(calls) == ["account.pay_in", "account.remove_later"]
    assert [step.us for step in found.steps if isinstance(step, TimeStep)] == [3 * 86_400_000_000]
    text = as_test(found, "some.module:app", ["some.module:conserved"])
    assert "        runtime.advance(days=3)\n" in text
    assert "        assert conserved(runtime.states()) is not False" in text


def test_a_function_that_is_not_deterministic_is_found_and_shown_with_a_crash() -> None:
    app = App("moody")
    thing = app.operator("thing", state=int)
    runs = Counter[str]()

    @thing.register
    def count(ctx: Context[int]) -> int:
        runs["all"] += 1
        return runs["all"]

    run = found_in(app, [], range(30))
    found = shrink_history(app, [], run)
    assert found.verdict is not None
    text = as_test(found, "some.module:app", [])
    assert [line.strip() for line in text.splitlines()[-2:]] == [
        text.splitlines()[-2].strip(),
        "runtime.crash()",
    ]
    assert text.splitlines()[-2].strip().startswith('runtime.client.call("thing.count", ')


def test_an_invariant_may_raise_or_return_false_and_may_not_change_the_state() -> None:
    def raises(state: Any) -> None:
        state["lot"].clear()
        raise ValueError("not this")

    run = found_in(faulty_auction.app, [lambda state: True, raises], range(1))
    assert run.simulation.world.violations == [f"{BROKEN} raises: ValueError: not this, after TID 1"]


def test_times_are_written_as_people_write_them() -> None:
    spans = {1_000_000: "seconds=1", 90_000_000: "minutes=1, seconds=30", 1: "seconds=1e-06", 86_400_000_000: "days=1"}
    assert {us: span_of(us) for us in spans} == spans


# --- calls ------------------------------------------------------------------------------------------------------------


class Colour(msgspec.Struct):
    name: str
    depth: int = 1


@dataclasses.dataclass
class Box:
    colours: list[Colour]
    owner: str | None
    inner: Box | None = None


HINTS = [
    *(int, str, float, bool, bytes, None, Any, decimal.Decimal, uuid.UUID, datetime.date, datetime.datetime),
    *(list[int], tuple[int, ...], tuple[int, str], dict[str, list[bool]], int | None, Colour, Box),
    *(Literal["x", "y", 3], Annotated[int, msgspec.Meta(gt=1000, multiple_of=7)]),
    Annotated[decimal.Decimal, Places(6, 2)],
]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_what_is_drawn_has_the_type(hint: Any) -> None:
    from headrace.core.signature import conforms

    rng = random.Random(1)
    of = Hints().type_of(hint)
    for _ in range(200):
        value = draw_value(of, rng)
        assert conforms(value, hint), value


def test_drawn_calls_meet_and_leave_out_internal_functions() -> None:
    drawn, rng = DrawnCalls(auction.app), random.Random(0)
    calls = [call for _ in range(500) for call in drawn(rng)]
    assert {call[0].name for call in calls} == {"deposit", "withdraw", "begin", "bid", "close", "call_off"}
    assert {call[1] for call in calls} == {"a", "b", "c"}


def test_calls_are_given_by_a_strategy_or_a_function_one_or_several_at_a_time() -> None:
    one = st.tuples(st.just(auction.deposit), st.sampled_from("ab"), st.integers(1, 3))
    rng = random.Random(0)
    for given in (one, st.lists(one, min_size=2, max_size=2), lambda rng: (auction.deposit, "a", 1)):
        draw = calls_from(given)(7)
        calls = [call for _ in range(20) for call in draw(rng)]
        assert {call[0] for call in calls} == {auction.deposit}
        assert len(calls) in (20, 40)
    assert [calls_from(one)(5)(random.Random(n)) for n in range(9)] == [
        calls_from(one)(5)(random.Random(n)) for n in range(9)
    ]


@pytest.mark.parametrize("given", [lambda rng: "text", lambda rng: [("only",)], lambda rng: (1, 2)])
def test_what_is_no_call_is_refused(given: Any) -> None:
    with pytest.raises(ModelError, match=r"a call is \(function, key, \*args\)"):
        calls_from(given)(0)(random.Random(0))


def test_an_app_without_functions_to_call_is_refused() -> None:
    with pytest.raises(ModelError, match="has no functions to call"):
        DrawnCalls(App("empty"))


def test_a_run_leaves_the_app_as_it_was() -> None:
    before = {name: operator.changes for name, operator in auction.app.operators.items()}
    UserRun(auction.app, 1).report()
    assert {name: operator.changes for name, operator in auction.app.operators.items()} == before
    with TestRuntime(auction.app) as runtime:
        assert runtime.client.call(auction.deposit, "a", 1) == 1
