"""Bad calls and many workers: what is wrong fails with its name, where it is wrong, and harms nobody else.

Twice compared: with one worker, which decides what a failure is called; and with the loop over the good ones alone, as
those that fail leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace import Abort, App, Config, Context
from headrace.wire.codec import MESSAGE_BYTES_MAX
from tests.cluster import Cluster, check_like, exactly, looped, on, serially
from tests.core import scenario_app
from tests.core.scenario import check_scenario
from tests.core.scenario_app import buy, send_add

app = App("bad_calls_on_workers")
node = app.operator("node")


def part_of(key: Any) -> Any:
    """A `partition_by` that does not do for every key."""
    if key == "raises":
        raise RuntimeError("no part")
    return {"no key": 1.5, "none": None, "huge": "x" * (2 << 20)}.get(key, key.split("/")[0])


parted = app.operator("parted", partition_by=part_of)
A, B, C = on(1, "a"), on(2, "b"), on(3, "c")
RING = [A, B, C]
LIMITS = {"calls_max": 60, "depth_max": 25, "value_bytes_max": 1_000, "key_bytes_max": 100}


@node.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@node.register
def spread(ctx: Context, amount: int) -> int:
    for key in RING:
        ctx.call_async(add, key, amount)
    return add.body(ctx, amount)  # type: ignore[no-any-return]


@parted.register
def keep(ctx: Context, value: Any) -> None:
    ctx.put(value)


@node.register
async def forever(ctx: Context, at: int) -> None:
    ctx.put(ctx.get(0) + 1)
    await ctx.call(forever, RING[at % 3], at + 1)


@node.register
def forever_one_way(ctx: Context, at: int) -> None:
    ctx.put(ctx.get(0) + 1)
    ctx.call_async(forever_one_way, RING[at % 3], at + 1)


@node.register
def breed(ctx: Context, at: int) -> None:
    """More calls with every generation, until the limit."""
    ctx.put(ctx.get(0) + 1)
    ctx.call_async(breed, RING[at % 3], at + 1)
    ctx.call_async(breed, RING[(at + 1) % 3], at + 2)


# What a function does wrong -> how it fails.
WRONGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no such operator": (lambda ctx: ctx.call_async("nowhere.add", "k", 1), "unknown_function"),
    "no such function": (lambda ctx: ctx.call_async("node.nothing", "k", 1), "unknown_function"),
    "a float for a key": (lambda ctx: ctx.call_async(add, 1.5, 1), "bad_key"),
    "a key too long": (lambda ctx: ctx.call_async(add, "k" * 101, 1), "bad_key"),
    "an argument of another type": (lambda ctx: ctx.call_async(add, B, "1"), "bad_arguments"),
    "an argument too many": (lambda ctx: ctx.call_async(add, B, 1, 1), "bad_arguments"),
    "an argument too large": (lambda ctx: ctx.call_async(keep, "k/1", "x" * 2_000), "too_large"),
    "state too large": (lambda ctx: ctx.put(["x" * 600, "x" * 600]), "too_large"),
    "a result too large": (lambda ctx: "x" * 2_000, "too_large"),
    "a result that cannot be carried": (lambda ctx: {1, 2}, "bad_value"),
    "state that cannot be carried": (lambda ctx: ctx.put(object()), "bad_value"),
    "a call that nobody awaits": (lambda ctx: ctx.call(add, B, 1) and None, "bad_call"),
    "partition_by raises": (lambda ctx: ctx.call_async(keep, "raises", 1), "bad_key"),
    "partition_by gives a float": (lambda ctx: ctx.call_async(keep, "no key", 1), "bad_key"),
    "partition_by gives nothing": (lambda ctx: ctx.call_async(keep, "none", 1), "bad_key"),
    "partition_by gives too much": (lambda ctx: ctx.call_async(keep, "huge", 1), "bad_key"),
}


@node.register
def large(ctx: Context, characters: int) -> str:
    return "x" * characters


@node.register
async def deep(ctx: Context, levels: int, wrong: str) -> Any:
    """Goes down from worker to worker and does something wrong at the bottom; awaits every level."""
    ctx.put(ctx.get(0) + 100)
    if not levels:
        return WRONGS[wrong][0](ctx) if wrong else None
    answer = await ctx.call(deep, RING[levels % 3], levels - 1, wrong)
    ctx.put(ctx.get(0) + 100)
    return answer


@node.register
def deep_one_way(ctx: Context, levels: int, wrong: str) -> None:
    ctx.put(ctx.get(0) + 100)
    ctx.call_async(deep_one_way if levels > 1 else deep, RING[levels % 3], levels - 1, wrong)


GOOD: list[Any] = [(spread, A, 1), (spread, B, 10), (add, C, 100), (spread, C, 1_000), (keep, "k/1", 1)]


def check_bad_among_good(bad: Any, code: str, seeds: Any = range(4), **config: int) -> None:
    """The same in every place of an epoch, alone, and predicted or not."""
    config = LIMITS | config
    for calls in ([*GOOD[:2], bad, *GOOD[2:]], [bad, *GOOD, bad], [bad]):
        expected, state = serially(app, calls, **config)
        good = [call for call in calls if call is not bad]
        assert [reply for reply in expected if reply[0] == "ok"] == looped(good)[0]
        assert exactly(state) == exactly(looped(good)[1])
        check_like((expected, state), app, calls, seeds=seeds, predict_after_runs=1, **config)
    failure = Cluster(app, 3, **config).run([bad])[0].failure
    assert failure is not None
    assert failure.code == code


@pytest.mark.parametrize("function", [forever, forever_one_way, breed], ids=lambda function: function.name)
def test_recursion_without_end_meets_its_limit(function: Any) -> None:
    check_bad_among_good((function, A, 1), "limit_reached")


@pytest.mark.parametrize("depth_max", [1, 2, 3, 1_000])
def test_awaited_recursion_ends_at_the_depth_or_at_the_number_of_calls(depth_max: int) -> None:
    check_bad_among_good((forever, B, 0), "limit_reached", seeds=range(2), depth_max=depth_max)


@pytest.mark.parametrize(("depth_max", "status"), [(3, "aborted"), (4, "ok")])
def test_calls_may_be_nested_up_to_the_limit_and_no_deeper(depth_max: int, status: str) -> None:
    calls = [*GOOD[:2], (deep, A, 4, ""), *GOOD[2:]]
    expected = serially(app, calls, depth_max=depth_max)
    assert expected[0][2][0] == status
    check_like(expected, app, calls, depth_max=depth_max, predict_after_runs=1)


@pytest.mark.parametrize("form", [deep, deep_one_way], ids=["awaited", "one-way"])
@pytest.mark.parametrize("wrong", WRONGS)
def test_what_goes_wrong_deep_in_the_graph_on_another_worker_aborts_by_its_name(wrong: str, form: Any) -> None:
    levels, code = 4, WRONGS[wrong][1]
    if form is deep_one_way and wrong.startswith("a result"):
        assert Cluster(app, 3, **LIMITS).run([(form, A, levels, wrong)])[0].ok, "what one-way calls return is dropped"
        return
    check_bad_among_good((form, A, levels, wrong), code, seeds=range(2))
    failure = Cluster(app, 3, **LIMITS).run([(form, A, levels, wrong)])[0].failure
    assert failure is not None
    assert (failure.function, failure.key) == ("node.deep", B), "it says where: at the bottom"


@pytest.mark.parametrize("key", ["raises", "no key", "none", "huge"])
def test_a_key_that_has_no_partition_is_refused_at_the_gate(key: str) -> None:
    cluster = Cluster(app, 3, **LIMITS)
    replies = cluster.run([*GOOD, (keep, key, 1)])
    assert [reply.status for reply in replies] == ["ok"] * 5 + ["refused"]
    assert replies[-1].failure is not None
    assert replies[-1].failure.code == "bad_key"
    assert exactly(cluster.state()) == exactly(looped(GOOD)[1])


@node.register
def fail(ctx: Context, name: str) -> None:
    raise Abort(f"{name} at {ctx.get(0)}")


@node.register
async def fail_here_and_there(ctx: Context, keys: list[str], awaits: bool) -> None:
    for name, key in enumerate(keys):
        ctx.call_async(fail, key, str(name))
    if awaits:
        await ctx.call(fail, keys[-1], "awaited")


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("keys", [[B, A, C], [C, B, A], [A, C, B]], ids=str)
def test_of_several_failures_the_one_that_comes_first_in_the_loop_is_the_reply(keys: list[str], awaits: bool) -> None:
    calls = [GOOD[0], (fail_here_and_there, A, keys, awaits), *GOOD[1:], (fail_here_and_there, B, keys, awaits)]
    check_like(looped(calls), app, calls, predict_after_runs=1)


def test_a_failure_that_only_a_run_too_early_met_is_taken_back_everywhere() -> None:
    check_scenario("failure_taken_back")
    calls = [(send_add, C, A, 5), (buy, B, A, C), (scenario_app.add, C, 10)]
    assert looped(calls)[0] == [("ok", None), ("ok", "bought"), ("ok", 11)]
    check_like(looped(calls), scenario_app.app, calls, predict_after_runs=1)


def test_results_that_are_together_larger_than_a_frame_are_answered() -> None:
    """Each of them is within its limit, and so is their number."""
    count = MESSAGE_BYTES_MAX // Config().value_bytes_max + 1
    replies = Cluster(app, 2).run([(large, A, Config().value_bytes_max)] * count)
    assert all(reply.ok for reply in replies)


def test_a_limit_is_never_the_reason_for_another_transactions_failure() -> None:
    """Together these are far over each limit; each by itself is within."""
    calls = [(spread, key, 1) for key in RING] * 30
    expected = looped(calls)
    check_like(expected, app, calls, seeds=range(3), calls_max=9, depth_max=1, transaction_bytes_max=10)
