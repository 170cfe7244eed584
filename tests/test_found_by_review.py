"""What a reader of the code found: functions that are said to run and do not, and an exception that Python changes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.events import Lost, Perform
from headrace.core.ordered.exchange import Caps
from headrace.wire import messages
from headrace.wire.codec import encode
from headrace.wire.messages import Traffic
from tests.cluster import Cluster, exactly, looped, on, outcome, serially


def add(state: int, delta: int) -> int:
    if state + delta > 1_000:
        raise ValueError("sold out")
    return state + delta


app = App("found_by_review")
stock = app.operator("stock", combine=add)
order = app.operator("order")
app.external("charge", lambda key, amount: amount)


@stock.register
def fill(ctx: Context, amount: int) -> None:
    ctx.put(amount)


@stock.register
def take(ctx: Context, amount: int) -> None:
    ctx.merge(amount)


@stock.register
def count(ctx: Context, x: int) -> int:
    seen: int = ctx.get(1)
    ctx.put((seen * 31 + x) % 1_009)
    return seen


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


@order.register
def refill(ctx: Context, key: str, amount: int) -> None:
    ctx.call_async(fill, key, amount)


@order.register
async def place(ctx: Context, x: int) -> int:
    seen: int = await ctx.call(count, "hot", x)
    if (seen + x) % 3 == 0:
        raise Abort(f"{seen}")
    return seen


@order.register
async def charge(ctx: Context, amount: int) -> Any:
    return await ctx.call_external("charge", amount)


# --- what is said to run, runs: else a worker that rests would be taken for one that hangs ----------------------------


def test_no_transaction_is_said_to_run_when_its_merges_failed_and_it_was_held() -> None:
    cluster, key = Cluster(app, 2), on(1, workers=2)
    calls = [(refill, on(2, workers=2), key, 1_000), *[(take, key, 1)] * 200]
    replies, state = looped(calls)
    assert [outcome(reply) for reply in cluster.run(calls)] == replies
    assert exactly(cluster.state()) == exactly(state)
    assert cluster.coordinator.metrics()["waits"] > 0
    assert {number: worker.running for number, worker in cluster.workers.items()} == {1: 0, 2: 0}


@pytest.mark.parametrize("workers", [1, 2])
def test_no_transaction_is_said_to_run_while_it_waits_for_the_outside_world(workers: int) -> None:
    cluster = Cluster(app, workers)
    cluster.send([(charge, "a", 5)])
    cluster.settle()
    assert [type(effect) for effect in cluster.others if isinstance(effect, Perform)] == [Perform]
    assert not cluster.replies
    assert {worker.running for worker in cluster.workers.values()} == {0}


# --- what is lent is cut, and given up --------------------------------------------------------------------------------


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
    assert not any(table for stretch in stretches for table in stretch.program.bases.values())
    assert exactly(cluster.state()) == exactly(state)


@order.register
def tell(ctx: Context, size: int) -> str:
    return "z" * size


@order.register
async def hear(ctx: Context, key: str, size: int) -> int:
    return len(await ctx.call(tell, key, size))


@order.register
def keep(ctx: Context, text: str) -> None:
    ctx.put(text)


@order.register
def hand_on(ctx: Context, key: str, size: int) -> None:
    ctx.call_async(keep, key, "w" * size)


def test_calls_and_answers_travel_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a few large ones come after many small ones."""
    monkeypatch.setattr(messages, "PART_BYTES_MAX", 20_000)
    cluster, key = Cluster(app, 2), on(2, "target", 2)
    here = [on(1, f"from {n} ", 2) for n in range(100)]
    calls: list[Any] = [(hand_on, each, key, 1) for each in here]
    calls += [call for each in here[:30] for call in ((hear, each, key, 4_000), (hand_on, each, key, 4_000))]
    replies, state = looped(calls)
    assert [outcome(reply) for reply in cluster.run(calls)] == replies
    assert exactly(cluster.state()) == exactly(state)
    sizes = [len(encode(frame)) for frame in cluster.sent if isinstance(frame.body, Traffic)]
    assert sum(sizes) > 200_000
    assert max(sizes) < 30_000


# --- calls that are predicted for a whole column of rows --------------------------------------------------------------


@stock.register
def number_of(ctx: Context) -> int:
    seen: int = ctx.get(0)
    ctx.put(seen + 1)
    return seen


@order.register
async def visit(ctx: Context, to: int) -> int:
    """It asks its neighbour every third time, and nobody can know that beforehand."""
    seen: int = ctx.get(0)
    ctx.put(seen + 1)
    return await ctx.call(number_of, to if seen % 3 != 2 else to + 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_predicted_for_a_whole_column_gives_what_the_loop_gives(seed: int) -> None:
    cluster = Cluster(app, 3, seed=seed, predict_after_runs=1)
    batches: list[Any] = [[(visit, 0, 0)], *[[(visit, n % 5, n * 7 % 9) for n in range(60)]] * 2]
    replies, state = looped([call for batch in batches for call in batch])
    assert [outcome(reply) for batch in batches for reply in cluster.run(batch)] == replies
    assert exactly(cluster.state()) == exactly(state)
    assert cluster.coordinator.metrics()["predicted"] > 10


# --- what a function raises is what the reply says --------------------------------------------------------------------


@order.register
def first_of(ctx: Context, values: list[int]) -> int:
    return next(iter(values))


@order.register
def newest(ctx: Context) -> str:
    ctx.uuid()  # only an executor that knows the paths of calls can run this
    return next(entry for entry in ctx.get([]))  # type: ignore[no-any-return]


@order.register
async def ask(ctx: Context, key: str) -> int:
    ctx.random.random()
    return await ctx.call(first_of, key, [])  # type: ignore[no-any-return]


@pytest.mark.parametrize("caps", [Caps(), Caps(0, 0, 0, 0, 0)], ids=["as usual", "all held"])
def test_a_stop_iteration_is_the_same_in_every_mode(caps: Caps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "caps", caps)
    keys = [on(worker, workers=2) for worker in (1, 2)]
    calls: list[Any] = [(first_of, keys[0], []), (newest, keys[0]), (ask, keys[0], keys[1]), (ask, keys[1], keys[0])]
    replies, _ = serially(app, calls)
    assert {reply[1] for reply in replies} == {"StopIteration"}
    assert [outcome(reply) for reply in Cluster(app, 2).run(calls)] == replies


def test_a_stop_iteration_is_the_same_when_it_is_run_again_and_gathered() -> None:
    cluster = Cluster(app, 3, seed=1)
    replies = cluster.run([(place, 0, 0), (newest, "l"), *((place, k, k % 7) for k in range(1, 60))])
    assert outcome(replies[1])[1] == "StopIteration"
    gathered = cluster.coordinator.metrics()["gathered"]
    cluster.submit(Lost(1))
    cluster.settle()
    assert cluster.coordinator.metrics()["gathered"] > gathered
