"""Transactions that are gathered, because they are repaired too often or near a limit: one worker runs them alone."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.ordered.exchange import Caps
from headrace.wire import messages
from headrace.wire.codec import encode
from headrace.wire.messages import Traffic
from tests.cluster import Cluster, exactly, looped, on, outcome
from tests.core.scenario import check_scenario

app = App("gathering")
counter = app.operator("counter")
order = app.operator("order")


# --- a storm ----------------------------------------------------------------------------------------------------------

runs: list[Any] = []


@counter.register
def take(ctx: Context, x: int) -> int:
    runs.append(x)
    seen: int = ctx.get(1)
    ctx.put((seen * 31 + x) % 1009)
    return seen


@order.register
async def place(ctx: Context, hot: str, x: int) -> int:
    runs.append(x)
    seen = await ctx.call(take, hot, x)
    if (seen + x) % 3 == 0:
        raise Abort(f"{seen}")
    return seen


@pytest.mark.parametrize("hot", [1, 7])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_aborts_that_depend_on_a_hot_counter_cost_a_bounded_number_of_runs(hot: int, seed: int | None) -> None:
    """Without a bound, sixty of them took 35,000 to 68,000 runs, and a hundred did not end."""
    calls = [(place, k, f"hot {k % hot}", k % 7) for k in range(60)]
    replies, state = looped(calls)
    runs.clear()
    cluster = Cluster(app, 3, seed=seed)
    assert [outcome(reply) for reply in cluster.run(calls)] == replies
    assert exactly(cluster.state()) == exactly(state)
    assert len(runs) <= 6 * 2 * len(calls)
    metrics = cluster.coordinator.metrics()
    assert metrics["repairs"] <= len(runs)
    assert metrics["waits"] > 0
    assert metrics["gathered"] > 0


def test_a_function_that_storms_is_gathered_without_a_try_the_next_time() -> None:
    cluster = Cluster(app, 3, seed=1)
    calls = [(place, k, "hot", k % 7) for k in range(60)]
    cluster.run(calls)
    runs.clear()
    cluster.run(calls)
    assert len(runs) <= 2 * 2 * len(calls)
    assert cluster.coordinator.metrics()["gathered"] >= len(calls)


# --- a worker that spins ----------------------------------------------------------------------------------------------


def test_no_worker_asks_for_a_timer_in_the_past_while_its_transaction_is_gathered() -> None:
    check_scenario("lent_before_it_is_gathered")


# --- what is lent -----------------------------------------------------------------------------------------------------

thing = app.operator("thing")


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get(0)


@thing.register
def spread(ctx: Context, keys: list[str]) -> None:
    for key in keys:
        ctx.call_async(add, key, 1)


def test_a_suspect_that_writes_more_than_its_share_settles() -> None:
    keys = [on(worker, f"k{n}") for n in range(4) for worker in (1, 2, 3)]
    calls = [(spread, keys[0], keys)]
    cluster = Cluster(app, 3, calls_max=len(keys))
    assert [outcome(reply) for reply in cluster.run(calls)] == [("ok", None)]
    assert cluster.coordinator.metrics()["gathers"] == 1
    assert cluster.state() == {("thing", key): 1 for key in keys}


def test_a_transaction_that_is_gathered_asks_for_many_entities_at_once() -> None:
    keys = [on(worker, f"k{n}", workers=2) for n in range(150) for worker in (1, 2)]
    cluster = Cluster(app, 2, calls_max=len(keys))
    cluster.settle()
    before = cluster.messages
    cluster.run([(spread, keys[0], keys)])
    assert cluster.coordinator.metrics()["gathers"] == 1
    assert cluster.messages - before < 30


@order.register
def write(ctx: Context, size: int) -> None:
    ctx.put("x" * size)


@order.register
def append(ctx: Context, size: int) -> None:
    ctx.put(ctx.get("") + "y" * size)


@order.register
def append_twice(ctx: Context, size: int) -> int:
    ctx.call_async(append, ctx.key, size)
    ctx.call_async(append, ctx.key, size)
    return len(ctx.get(""))


def test_what_is_lent_and_given_back_travels_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "caps", Caps(0, 0, 0, 0, 0))
    monkeypatch.setattr(messages, "PART_BYTES_MAX", 20_000)
    cluster = Cluster(app, 2)
    keys = [on(1 + n % 2, f"d{n} ", 2) for n in range(40)]
    batches = [(write, key, 5_000) for key in keys], [(append_twice, key, 100) for key in keys]
    replies, state = looped([*batches[0], *batches[1]])
    assert [outcome(reply) for batch in batches for reply in cluster.run(batch)] == replies
    assert cluster.coordinator.metrics()["gathered"] == 40
    sizes = [len(encode(frame)) for frame in cluster.sent if isinstance(frame.body, Traffic)]
    assert sum(sizes) > 20_000
    assert max(sizes) < 30_000
    stretches = [worker.stretch for worker in cluster.workers.values() if worker.stretch is not None]
    assert stretches
    assert not any(len(table) for stretch in stretches for table in stretch.tables.values())
    assert exactly(cluster.state()) == exactly(state)
