"""What leaves is what a loop over the log gives: every reply and the whole state, whatever the batches and epochs.

The apps are random, too: see `headrace/sim/programs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Config, Reply, Runtime
from headrace.sim.oracle import Oracle
from tests.cluster import exactly, looped, outcome
from tests.driver import Driver
from tests.programs import MANY, PROGRAMS, Program, app

# --- ways to run a log ------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How a log is cut and when its parts come."""

    transactions_max: int
    interval_us: int
    cuts: list[tuple[int, bool, int, bool]]  # rows, in a new step?, microseconds later, a tick before?


CUTS = st.tuples(st.integers(1, 6), st.booleans(), st.sampled_from([0, 1, 4, 50]), st.booleans())
WAYS = st.builds(
    Way,
    st.integers(1, 12),
    st.sampled_from([0, 0, 1, 5, 1000]),
    st.lists(CUTS, min_size=1, max_size=6),
)


def run_engine(calls: Sequence[Any], way: Way) -> tuple[list[Reply], dict[Any, Any]]:
    config = Config(epoch_transactions_max=way.transactions_max, epoch_interval_us=way.interval_us)
    driver = Driver(app, config)
    now_us, at, cut, gathered = 0, 0, 0, []
    while at < len(calls):
        rows, in_new_step, later_us, ticks = way.cuts[cut % len(way.cuts)]
        cut += 1
        if in_new_step and gathered:
            driver.submit_at(now_us, *gathered)
            gathered = []
        if not gathered:
            now_us += later_us
            if ticks:
                driver.tick(now_us)
        ids = f"stem{cut}" if cut % 2 else [f"single{at + row}" for row in range(len(calls[at : at + rows]))]
        gathered.append((ids, calls[at : at + rows]))
        at += rows
    driver.submit_at(now_us, *gathered)
    driver.finish()
    return [reply for token in range(driver.submitted) for reply in driver.replies[token]], driver.state()


# --- the log is the order ---------------------------------------------------------------------------------------------


@given(PROGRAMS, WAYS)
@settings(max_examples=5 * MANY)
def test_replies_and_state_are_those_of_a_loop_over_the_log(program: Program, way: Way) -> None:
    calls = program.calls()
    expected, state = looped(calls)
    replies, found = run_engine(calls, way)
    event(f"{sum(kind == 'aborted' for kind, *_ in expected)} aborts")
    assert list(map(repr, map(outcome, replies))) == list(map(repr, expected))
    assert exactly(found) == exactly(state)


@given(PROGRAMS, st.lists(WAYS, min_size=2, max_size=3))
@settings(max_examples=MANY)
def test_where_epochs_and_batches_end_never_changes_a_result(program: Program, ways: list[Way]) -> None:
    calls = program.calls()
    ran = [run_engine(calls, way) for way in ways]
    assert len({repr([(reply.tid, outcome(reply)) for reply in replies]) for replies, _ in ran}) == 1
    assert len({repr(exactly(state)) for _, state in ran}) == 1


@given(PROGRAMS, WAYS)
@settings(max_examples=MANY)
def test_tids_are_dense_and_increase_and_epochs_hold_them_in_order(program: Program, way: Way) -> None:
    replies, _ = run_engine(program.calls(), way)
    assert [reply.tid for reply in replies] == list(range(1, len(program.roots) + 1))
    epochs = [reply.epoch for reply in replies]
    assert epochs == sorted(epochs)
    assert set(epochs) == set(range(1, epochs[-1] + 1))
    assert max(map(epochs.count, epochs)) <= way.transactions_max


@given(PROGRAMS, st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=MANY)
def test_a_client_gets_the_replies_of_a_loop_over_the_log(program: Program, rows: int, epoch_max: int) -> None:
    calls = program.calls()
    expected, state = looped(calls)
    replies: list[Reply] = []
    with Runtime(app, Config(epoch_transactions_max=epoch_max)) as runtime:
        for at in range(0, len(calls), rows):
            replies += runtime.client.batch(calls[at : at + rows])
        found = {(name, key): value for name in app.operators for key, value in runtime.state(name).items()}
        counted = runtime.metrics()
    assert list(map(repr, map(outcome, replies))) == list(map(repr, expected))
    assert exactly(found) == exactly(state)
    aborts = sum(kind == "aborted" for kind, *_ in expected)
    assert (counted["aborted"], counted["committed"]) == (aborts, len(calls) - aborts)


# --- the same, by hand ------------------------------------------------------------------------------------------------

loops = App("loops")
node = loops.operator("node")


@node.register
async def visit(ctx: Any, levels: int, fails: bool) -> list[Any]:
    """Calls itself, on the same entity, and reads what that call left."""
    before = ctx.get([])
    ctx.put([*before, f"down {levels}"])
    if levels:
        await ctx.call(visit, ctx.key, levels - 1, fails)
    elif fails:
        raise Abort("at the bottom")
    ctx.put([*ctx.get(), f"up {levels}"])
    return ctx.get()  # type: ignore[no-any-return]


@node.register
def note(ctx: Any, text: str) -> None:
    ctx.put([*ctx.get([]), text])


@node.register
async def order(ctx: Any) -> None:
    ctx.call_async(note, "log", "first asynchronous")
    await ctx.call(note, "log", "synchronous")
    ctx.call_async(note, "log", "second asynchronous")
    await ctx.call(nested_order, "other")


@node.register
async def nested_order(ctx: Any) -> None:
    ctx.call_async(note, "log", "third asynchronous")
    await ctx.call(note, "log", "nested synchronous")


def test_an_entity_that_calls_itself_reads_what_the_call_wrote() -> None:
    driver = Driver(loops)
    trace = ["down 2", "down 1", "down 0", "up 0", "up 1", "up 2"]
    assert driver.call_at(0, "a", visit, "k", 2, False).unwrap() == trace
    aborted = driver.call_at(1, "b", visit, "k", 3, True)
    assert outcome(aborted) == ("aborted", "Abort", "at the bottom", "node.visit", "k")
    assert driver.state() == {("node", "k"): trace}


def test_asynchronous_calls_run_after_the_root_in_the_order_made() -> None:
    driver = Driver(loops)
    driver.call_at(0, "a", order, "k")
    calls = ["synchronous", "nested synchronous"]
    assert driver.state() == {
        ("node", "log"): [*calls, "first asynchronous", "second asynchronous", "third asynchronous"]
    }


# --- request ids ------------------------------------------------------------------------------------------------------

counters = App("counters")
counter = counters.operator("counter")


@counter.register
def add(ctx: Any, amount: Any) -> Any:
    if amount == "fail":
        raise Abort(f"{ctx.key} has {ctx.get(0)}")
    ctx.put(ctx.get(0) + 1)
    return [ctx.get(), amount]


CALLS = st.tuples(
    st.just(add),
    st.sampled_from(["k", 1, "1"]),
    st.sampled_from([1, 1.0, True, float("nan"), 0.0, -0.0, "fail", [1], [True], (1,), {"a": 1}]),
)
SINGLE_IDS = st.lists(
    st.sampled_from(["x", "y", "x/0", "x/1", "x/01", "x/", "/", "y/2", "x/0/0"]), min_size=1, max_size=4
)
SUBMISSIONS = st.lists(
    st.tuples(
        st.sampled_from(["x", "y", "x/0"]) | SINGLE_IDS,
        st.lists(CALLS, min_size=4, max_size=4),
        st.integers(1, 4),
        st.booleans(),
    ),
    min_size=2,
    max_size=8,
)


def spell(ids: Any, rows: list[Any], count: int) -> tuple[Any, list[str], list[Any]]:
    """The ids as they are sent, as they are meant, and the calls."""
    if isinstance(ids, str):
        return ids, [f"{ids}/{row}" for row in range(count)], rows[:count]
    return ids, ids, rows[: len(ids)]


@given(SUBMISSIONS, st.integers(1, 6), st.sampled_from([0, 0, 3, 1000]))
@settings(max_examples=5 * MANY)
def test_a_repeated_request_id_never_runs_twice_and_gets_an_equal_reply(
    submissions: Any, epoch_max: int, interval_us: int
) -> None:
    driver = Driver(counters, Config(epoch_transactions_max=epoch_max, epoch_interval_us=interval_us))
    oracle, ran, expected = Oracle(), {}, []
    repeated = reused = 0
    for now_us, (ids, rows, count, ticks) in enumerate(submissions):
        sent, meant, calls = spell(ids, rows, count)
        if ticks:
            driver.tick(now_us)
        driver.submit_at(now_us, (sent, calls))
        for request_id, call in zip(meant, calls, strict=True):
            if request_id not in ran:
                ran[request_id] = (repr(call), (len(ran) + 1, *oracle.transact(*call)))
            elif ran[request_id][0] == repr(call):
                repeated += 1
            else:
                reused += 1
                expected.append((request_id, None, "refused", "request_id_reused"))
                continue
            expected.append((request_id, *ran[request_id][1]))
    driver.finish()
    event(f"repeats: {repeated > 0}, reuses: {reused > 0}")
    found = [
        (reply.request_id, None, "refused", reply.failure.code)
        if reply.failure and reply.tid is None
        else (reply.request_id, reply.tid, *outcome(reply))
        for token in range(driver.submitted)
        for reply in driver.replies[token]
    ]
    assert list(map(repr, found)) == list(map(repr, expected))
    assert exactly(driver.state()) == exactly(oracle.state)


@given(st.lists(st.tuples(SINGLE_IDS, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=MANY // 2)
def test_a_repeated_request_id_gets_the_same_reply_from_a_client(asked: Any) -> None:
    first: dict[str, str] = {}
    with Runtime(counters) as runtime:
        for ids, fails in asked:
            for request_id in ids:
                call = (add, "k", "fail" if fails else 1)
                reply = runtime.client.submit([request_id], [call], wait=True).result(timeout=10)[0]
                if reply.failure is not None and reply.failure.code == "request_id_reused":
                    assert reply.status == "refused"
                    assert first[request_id][0] != call[2]
                else:
                    assert first.setdefault(request_id, (call[2], repr(reply))) == (call[2], repr(reply))
        runs = sum(amount == 1 for amount, _ in first.values())
        assert runtime.get(counter, "k", 0) == runs


@given(CALLS, CALLS, st.sampled_from(["x", ["x/0"]]), st.sampled_from(["x", ["x/0"]]))
@settings(max_examples=MANY)
def test_a_request_id_with_another_call_is_refused_and_changes_nothing(
    first: Any, second: Any, ids: Any, again: Any
) -> None:
    assume(repr(first) != repr(second))
    driver = Driver(counters)
    driver.submit_at(0, (ids, [first]))
    before = exactly(driver.state())
    driver.submit_at(1, (again, [second]))
    driver.submit_at(2, (["other"], [first]))
    refused = driver.replies[1][0]
    assert refused.status == "refused"
    assert refused.failure is not None
    assert refused.failure.code == "request_id_reused"
    assert "x/0" in refused.failure.message
    if first[2] == "fail":
        assert exactly(driver.state()) == before
    assert driver.replies[2][0].tid == 2
