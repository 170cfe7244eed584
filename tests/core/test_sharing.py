"""Nothing is shared: a function, its caller, its state and its client each have a value of their own."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import App, Context, Runtime
from headrace.wire.values import Values
from tests.cluster import Cluster, check_like_the_loop, looped, on, outcome

sharing = App("sharing")
shared = sharing.operator("shared", combine=lambda state, delta: state.append(delta) or state)
kept: list[Any] = []


@shared.register
def store(ctx: Any, value: Any) -> Any:
    ctx.put(value)
    value.append("changed after put")
    return ctx.get()


@shared.register
def change_what_get_returned(ctx: Any) -> Any:
    ctx.get([]).append("changed after get")
    return ctx.get([])


@shared.register
def read(ctx: Any) -> Any:
    return ctx.get()


@shared.register
def merge(ctx: Any, delta: Any) -> None:
    ctx.merge(delta)
    delta.append("changed after merge")


@shared.register
def return_and_change(ctx: Any) -> Any:
    kept[:] = [[1]]
    ctx.call_async(change_what_was_kept, "other")
    return kept[0]


@shared.register
def change_what_was_kept(ctx: Any) -> None:
    kept[0].append("changed after the return")


@shared.register
async def change_arguments(ctx: Any, to: Any) -> Any:
    value: list[Any] = [1]
    call = ctx.call(store, to, value)
    value.append("changed after call")
    answer = await call
    answer.append("changed in the caller")
    ctx.call_async(store, f"{to}, async", value)
    value.append("changed after call_async")
    return [value, await ctx.call(read, to)]


@shared.register
async def give_away(ctx: Any) -> Any:
    value: list[Any] = [1]
    first = await ctx.call(lend, "lender")
    first.append("changed by the borrower")
    return [value, first, await ctx.call(lend, "lender")]


@shared.register
def lend(ctx: Any) -> Any:
    if not kept:
        kept.append([])
    return kept[0]


@pytest.fixture(name="share")
def sharing_runtime() -> Any:
    kept.clear()
    with Runtime(sharing) as runtime:
        yield runtime


def test_changing_what_get_returned_changes_nothing(share: Runtime) -> None:
    share.client.call(store, "k", [1])
    assert share.client.call(change_what_get_returned, "k") == [1]
    assert share.get(shared, "k") == [1]


def test_changing_a_value_after_put_or_merge_changes_nothing(share: Runtime) -> None:
    assert share.client.call(store, "k", [1]) == [1]
    share.client.call(merge, "k", [2])
    share.client.call(merge, "new", [3])
    assert share.state(shared) == {"k": [1, [2]], "new": [3]}


def test_changing_an_argument_after_a_call_changes_nothing(share: Runtime) -> None:
    value = [1]
    replies = share.client.submit("x", [(store, "k", value)], wait=True)
    value.append(2)
    assert replies.result(timeout=10)[0].unwrap() == [1]
    rows = [(store, "row", value)]
    batch = share.client.submit("y", rows, wait=True)
    rows.clear()
    value.append(3)
    assert batch.result(timeout=10).results == [[1, 2]]
    assert share.client.call(change_arguments, "caller", "to")[1] == [1]
    assert share.get(shared, "to, async") == [1, "changed after call"]


def test_changing_a_result_changes_nothing(share: Runtime) -> None:
    first = share.client.options(request_id="same").call(store, "k", [1])
    first.append("changed by the client")
    assert share.client.options(request_id="same").call(store, "k", [1]) == [1]
    replies = share.client.batch([(read, "k")])
    replies[0].result.append("changed by the client")
    replies.results[0].append("changed by the client")
    assert (replies[0].result, replies.results) == ([1], [[1]])
    share.state(shared)["k"].append("changed by the client")
    assert share.get(shared, "k") == [1]


def test_a_caller_and_whom_it_called_share_no_result(share: Runtime) -> None:
    assert share.client.call(give_away, "k") == [[1], ["changed by the borrower"], []]


def test_a_result_is_taken_when_the_root_returns(share: Runtime) -> None:
    assert share.client.call(return_and_change, "k") == [1]


# --- B14: over workers ------------------------------------------------------------------------------------------------

spoiling = App("spoiling")
thing = spoiling.operator("thing")


@thing.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


@thing.register
def look_at(ctx: Context) -> Any:
    return ctx.get()


@thing.register
def send_put(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(put, to, value)


A, B, C = on(1, "a"), on(2, "b"), on(3, "c")


@thing.register
def spoil(ctx: Context, given: list[Any]) -> list[Any]:
    """Changes what it was given, and what it has read, and keeps and returns both."""
    given.append(ctx.get(0))
    ctx.put(len(given))
    return given


@thing.register
async def share_out(ctx: Context, keys: list[str]) -> Any:
    given: list[Any] = ["given"]
    for key in keys:
        ctx.call_async(spoil, key, given)
        ctx.call_async(spoil, key, given)
    answer = await ctx.call(spoil, keys[-1], given)
    answer.append("changed by the caller")
    keys.append("changed")
    given.append("changed afterwards")
    return [given, answer, keys]


SHARED: list[Any] = [(share_out, on(worker, f"r{at}"), [A, B, C]) for at in range(3) for worker in (1, 2, 3)]
SHARED += [(send_put, on(2), A, 7), (share_out, on(1), [A, A]), (look_at, A), (look_at, C)]


def test_b14_sibling_calls_callers_and_second_runs_share_nothing() -> None:
    check_like_the_loop(spoiling, SHARED, workers=(1, 2, 3), predict_after_runs=2)


def test_b14_values_that_were_shared_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[bytes, Any] = {}
    decode = Values.decode
    monkeypatch.setattr(Values, "decode", lambda self, data: known.setdefault(data, decode(self, data)))
    cluster = Cluster(spoiling, 2, slice_calls_max=10)
    cluster.settle()
    cluster.send(SHARED)
    for _ in range(60):  # each run spoils what the next one sees: it may never end
        cluster.deliver()
    assert list(map(outcome, cluster.replies.get(0, ()))) != looped(SHARED)[0]
