"""An exception is the same in every mode, on whichever worker it is raised."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.events import Lost
from headrace.core.ordered.exchange import Caps
from tests.cluster import Cluster, on, outcome, serially

app = App("aborts_on_workers")
thing = app.operator("thing")


@dataclasses.dataclass
class Picky:
    value: int


def set_value(picky: Any, value: int) -> None:
    if value > 5:
        raise AttributeError("too large")
    picky.__dict__["_value"] = value


Picky.value = property(lambda picky: picky.__dict__["_value"], set_value)  # type: ignore[assignment]
app.record(Picky)


@thing.register
def give(ctx: Context, value: int) -> Picky:
    picky = object.__new__(Picky)
    picky.__dict__["_value"] = value
    return picky


@thing.register
async def get(ctx: Context, key: str, value: int) -> int:
    picky = await ctx.call(give, key, value)
    return picky.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [1, 9])
@pytest.mark.parametrize("callee", [on(1, workers=2), on(2, workers=2)])
def test_a_result_that_cannot_be_put_together_fails_where_it_was_made(value: int, callee: str) -> None:
    calls = [(get, on(1, "root", workers=2), callee, value)]
    cluster = Cluster(app, 2, "ordered")
    assert [outcome(reply) for reply in cluster.run(calls)] == serially(app, calls)[0]


# --- what a function raises is what the reply says --------------------------------------------------------------------

stock = app.operator("stock")
order = app.operator("order")


@stock.register
def count(ctx: Context, x: int) -> int:
    seen: int = ctx.get(1)
    ctx.put((seen * 31 + x) % 1_009)
    return seen


@order.register
async def place(ctx: Context, x: int) -> int:
    seen: int = await ctx.call(count, "hot", x)
    if (seen + x) % 3 == 0:
        raise Abort(f"{seen}")
    return seen


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
