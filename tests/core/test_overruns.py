"""Functions that take too long: which transaction a worker runs, and when an overrun aborts it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import App, Config, Context
from headrace.core.admission import Admission
from headrace.core.coordinator import REPLAY_CHANCES, Coordinator, on_workers
from headrace.core.events import Append, Overran, Perform, Submit
from headrace.core.log_records import Decree
from headrace.core.origin import FromClient
from headrace.core.worker import Worker
from tests.cluster import Cluster, exactly, looped, on, outcome

app = App("overruns")
thing = app.operator("thing")


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get(0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_transaction_that_was_answered_is_never_condemned(workers: int) -> None:
    cluster = Cluster(app, workers)
    before = [outcome(reply) for reply in cluster.run([(add, "a", 1), (add, "b", 1)])]
    for _ in range(3):
        cluster.submit(Overran(1, 1))
        cluster.settle()
    assert before == [("ok", 1), ("ok", 1)]
    assert [outcome(reply) for reply in cluster.run([(add, "a", 1)])] == [("ok", 2)]
    assert not cluster.coordinator.poisoned


def test_an_onlooker_sees_whose_code_runs_also_outside_a_function() -> None:
    """In the text of an exception, in a `finally` after an abort, in a combine that runs again."""
    seen: list[int] = []
    watched = App("watched")
    worker: Worker | None = None

    class Talkative(Exception):
        def __str__(self) -> str:
            seen.append(worker.running if worker else 0)
            return "talkative"

    operator = watched.operator("operator")

    @operator.register
    def fail(ctx: Context) -> None:
        raise Talkative

    cluster = Cluster(watched, 2)
    cluster.settle()
    worker = cluster.workers[1]
    [reply] = cluster.run([(fail, on(1, workers=2))])
    assert seen == [reply.tid]


item = app.operator("item")


@item.register
def dawdle(ctx: Context) -> int:
    return 1


@pytest.mark.parametrize("is_replayed", [False, True])
def test_it_takes_more_overruns_to_abort_what_an_earlier_coordinator_may_have_answered(is_replayed: bool) -> None:
    engine = on_workers(app, Config(), 1, "serial", is_durable=True)
    engine.start(0)
    batch = Admission(engine.program).admit(FromClient("x"), [(dawdle, "k")])
    engine.step(1, Submit([(0, batch)]))
    assert isinstance(engine.backend, Coordinator)
    (epoch,) = engine.backend.log
    epoch.is_replayed = is_replayed
    overruns, decrees = 0, []
    while not decrees:
        overruns += 1
        effects = engine.step(1 + overruns, Overran(1, epoch.tids[0]))
        decrees = [each for each in effects if isinstance(each, Append) and isinstance(each.record, Decree)]
    assert overruns == (REPLAY_CHANCES if is_replayed else 1)


# --- what is said to run, runs: else a worker that rests would be taken for one that hangs ----------------------------


def add_up(state: int, delta: int) -> int:
    if state + delta > 1_000:
        raise ValueError("sold out")
    return state + delta


stock = app.operator("stock", combine=add_up)
order = app.operator("order")
app.external("charge", lambda key, amount: amount)


@stock.register
def fill(ctx: Context, amount: int) -> None:
    ctx.put(amount)


@stock.register
def take(ctx: Context, amount: int) -> None:
    ctx.merge(amount)


@order.register
def refill(ctx: Context, key: str, amount: int) -> None:
    ctx.call_async(fill, key, amount)


@order.register
async def charge(ctx: Context, amount: int) -> Any:
    return await ctx.call_external("charge", amount)


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
