"""Limits are met where one worker meets them, whichever workers the calls run on."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import App, Context
from tests.cluster import Cluster, check_like, on, outcome, serially

app = App("limits_on_workers")
thing = app.operator("thing")


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get(0)


@thing.register
def show_an_object(ctx: Context) -> None:
    raise ValueError(f"no {object()}")


@thing.register
def spread(ctx: Context, keys: list[str]) -> None:
    for key in keys:
        ctx.call_async(add, key, 1)


@thing.register
def spread_on(ctx: Context, fans: list[Any]) -> None:
    for key, keys in fans:
        ctx.call_async(spread, key, keys)


@thing.register
async def count_down(ctx: Context, key: str, rounds: int) -> int:
    for _ in range(rounds):
        ctx.put(ctx.get(0) + await ctx.call(add, key, 1))
    return ctx.get(0)  # type: ignore[no-any-return]


@thing.register
async def deep_below(ctx: Context, keys: list[str], levels: int) -> int:
    """Python's stack is nearly used up, below some calls that wait."""
    if levels:
        return await ctx.call(deep_below, keys[levels % len(keys)], keys, levels - 1)  # type: ignore[no-any-return]
    return depth_of(930)


def depth_of(depth: int) -> int:
    return 1 + depth_of(depth - 1) if depth else 0


def test_awaits_in_a_loop_cost_no_more_each_than_few_do() -> None:
    keys = on(1, workers=2), on(2, workers=2)
    cluster = Cluster(app, 2, "ordered")
    cluster.settle()
    for rounds in (20, 200):
        cluster.run([(count_down, keys[0], keys[1], rounds)])
    shares = [share for idle in cluster.sent if hasattr(idle.body, "shares") for share in idle.body.shares or ()]
    assert max(shares) < 500


def test_whether_the_stack_suffices_does_not_depend_on_the_workers() -> None:
    keys = [on(1, workers=2), on(1, "j", workers=2)]
    calls = [(deep_below, keys[0], keys, 14)]
    cluster = Cluster(app, 2, "ordered")
    cluster.run(calls)
    assert cluster.coordinator.metrics()["gathers"] <= 1
    assert outcome(cluster.replies[0][0])[0] == serially(app, calls)[0][0][0]


def test_the_limit_of_calls_may_be_lower_than_the_number_of_workers() -> None:
    keys = [on(worker, workers=5) for worker in (1, 2, 3, 4, 5)]
    calls = [(spread, keys[0], keys[:count]) for count in (1, 2, 3, 4)] * 2
    cluster = Cluster(app, 5, seed=3, calls_max=2)
    assert [outcome(reply) for reply in cluster.run(calls)] == serially(app, calls, calls_max=2)[0]


@thing.register
async def queue_and_ask(ctx: Context, count: int, keys: list[str]) -> None:
    for _ in range(count):
        ctx.call_async(add, ctx.key, 1)
    await (ctx.call(queue_and_ask, keys[0], count, keys[1:]) if keys else ctx.call(show_an_object, ctx.key + "!"))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_what_waiting_calls_have_queued_counts_when_another_one_fails(workers: int, count: int) -> None:
    keys = [on(1 + at % workers, f"{at} of ", workers) for at in range(3)]
    calls = [(queue_and_ask, keys[0], count, keys[1:])] * 2
    for calls_max in range(1, 12):
        cluster = Cluster(app, workers, seed=3, calls_max=calls_max, mode="ordered")
        found = [outcome(reply)[:2] for reply in cluster.run(calls)]
        assert found == [each[:2] for each in serially(app, calls, calls_max=calls_max)[0]], calls_max


def test_a_limit_of_calls_is_met_though_every_worker_is_below_it() -> None:
    """Twelve calls, four of them on each worker, and no function makes more than three."""
    fans = [[on(worker, "fan"), [on(other, f"leaf{worker}") for other in (1, 2, 3)]] for worker in (1, 2, 3)]
    calls: list[Any] = [(spread_on, on(1, "root"), fans), (add, on(2, "leaf1"), 1)]
    for calls_max in range(3, 14):
        limits = {"calls_max": calls_max}
        check_like(serially(app, calls, **limits), app, calls, workers=[3], seeds=range(4), **limits)
