"""Calls that are predicted from earlier runs give what the loop gives."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import App, Context
from tests.cluster import Cluster, exactly, looped, on, outcome

app = App("predictions")
stock = app.operator("stock")
order = app.operator("order")


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


# --- what is only equal -----------------------------------------------------------------------------------------------

cell = app.operator("cell", combine=lambda state, delta: state + delta)


@cell.register
def keep(ctx: Context, value: Any) -> None:
    ctx.put(value)


@cell.register
def tell_whether(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(keep, to, bool(value))


def test_a_prediction_of_what_is_only_equal_is_wrong() -> None:
    cluster = Cluster(app, 2, predict_after_runs=1)
    for value in (True, True, 1, 1):
        cluster.run([(tell_whether, on(1, f"from {n}", 2), on(2, f"to {n} {value!r}", 2), value) for n in range(4)])
    assert cluster.coordinator.metrics()["predicted"] > 0
    assert {type(state) for state in cluster.state().values()} == {bool}
