"""What ran too early runs again: a run that read what a lower TID has changed since is repaired."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.ordered import chains
from headrace.core.ordered.executor import OrderedExecutor
from tests.cluster import Cluster, check_like_the_loop, exactly, looped, on, outcome, plant

app = App("repair")
thing = app.operator("thing")
seen: list[Any] = []  # what functions saw while they ran, also in runs that came to nothing


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@thing.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


@thing.register
def read(ctx: Context) -> Any:
    return ctx.get()


@thing.register
def send_put(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(put, to, value)


# --- B2: drift is noticed on every worker -----------------------------------------------------------------------------


@thing.register
def go(ctx: Context, pointer: str) -> None:
    ctx.call_async(follow, pointer)


@thing.register
def follow(ctx: Context) -> None:
    ctx.call_async(add, ctx.get(), 1)


OLD, NEW, POINTER = on(3, "old"), on(3, "new"), on(2, "pointer")
INCREMENTS: list[Any] = [(send_put, on(3), POINTER, NEW)] + [(go, on(1, f"root{at}"), POINTER) for at in range(10)]


def moved() -> dict[Any, Any]:
    """Ten increments through a pointer that a lower TID moves, after all ten have run."""
    cluster = Cluster(app, 3)
    cluster.run([(put, POINTER, OLD)])
    cluster.hold((3, 2))
    cluster.send(INCREMENTS)
    cluster.deliver_all()
    cluster.release()
    cluster.settle()
    return cluster.state()


def test_b2_ten_increments_through_a_moved_pointer_are_ten() -> None:
    assert moved() == {("thing", POINTER): NEW, ("thing", NEW): 10}
    check_like_the_loop(app, [(put, POINTER, OLD), *INCREMENTS], predict_after_runs=1)


def test_b2_if_only_the_roots_worker_looked_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    check = OrderedExecutor._check

    def check_own(self: Any, part: Any, record: Any) -> None:
        if part.owner(record.order[0]) == self.me:
            check(self, part, record)

    monkeypatch.setattr(OrderedExecutor, "_check", check_own)
    assert moved().get(("thing", NEW)) != 10


A, B, C = on(1, "a"), on(2, "b"), on(3, "c")


# --- B16: a run sees its own writes, also the second time -------------------------------------------------------------


@thing.register
async def rewrite(ctx: Context, other: str) -> list[Any]:
    """Reads what it wrote: at once, after an await, and after a call that came back to the same entity."""
    trace = [ctx.get(0)]
    ctx.put(trace[0] * 10)
    trace.append(ctx.get())
    trace.append(await ctx.call(call_back, other, ctx.key))
    trace.append(ctx.get())
    ctx.put(ctx.get() + 2)
    trace.append(ctx.get())
    seen.append(trace[0])
    return trace


@thing.register
async def call_back(ctx: Context, to: str) -> int:
    return int(await ctx.call(add, to, 1))


def rewritten() -> list[Any]:
    """The entity's value changes below a transaction that has run."""
    cluster = Cluster(app, 3)
    cluster.run([(put, A, 1)])
    seen.clear()
    cluster.hold((2, 1))
    cluster.send([(send_put, B, A, 5), (rewrite, A, C), (read, A)])
    cluster.deliver_all()
    cluster.release()
    cluster.settle()
    assert seen[0] == 1, "it ran too early"
    return [reply.result for reply in cluster.replies[1]]


def test_b16_a_run_sees_its_own_writes_also_when_it_runs_again() -> None:
    assert rewritten() == [None, [5, 50, 51, 51, 53], 53]
    assert set(seen) == {1, 5}


def test_b16_a_run_that_did_not_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(records: Any, at: int, tid: int, aborted: set[int]) -> Any:
        others = [records[0], *(record for record in records[1:at] if record.order[0] != tid)]
        return value_before(others, len(others), tid, aborted)

    value_before = chains.value_before
    plant(monkeypatch, "value_before", of_others)
    assert rewritten() != [None, [5, 50, 51, 51, 53], 53]


# --- answers to calls that are gone -----------------------------------------------------------------------------------

cell = app.operator("cell", combine=lambda state, delta: state + delta)


@cell.register
async def run(ctx: Context, steps: list[Any], acc: int) -> int:
    for kind, *args in steps:
        if kind == "put":
            ctx.put((acc + args[0]) % 101)
        elif kind == "merge":
            ctx.merge(args[0] + acc % 2)
        elif kind == "abort_if":
            acc = (acc + ctx.get(0)) % 101
            if acc % args[0] == 0:
                raise Abort(str(acc))
        else:  # what was read decides whom it calls
            key, inner = args[acc % 2]
            if kind == "sync":
                acc = (acc + await ctx.call(run, key, inner, acc)) % 101
            else:
                ctx.call_async(run, key, inner, acc)
    return acc


def sync(first: Any, second: Any) -> Any:
    return ("sync", first, second)


def one_way(first: Any, second: Any) -> Any:
    return ("async", first, second)


AN_ANSWER_TO_A_CALL_THAT_IS_GONE = [
    (0, []),
    (0, []),
    (0, [sync((17, []), (14, [("put", 5)]))]),
    (10, [one_way((5, []), (0, [sync((12, []), (14, [("merge", 3)]))]))]),
    (15, [("put", 2)]),
    (14, [sync((7, []), (15, [("abort_if", 5), ("merge", 3)])), ("abort_if", 5)]),
    (15, [("abort_if", 3), sync((7, [sync((17, []), (15, []))]), (15, [sync((6, []), (5, []))]))]),
]
A_PUT_OF_WHAT_IS_THERE = [
    (0, []),
    (4, [one_way((7, []), (6, [one_way((4, []), (6, [("put", 4)]))]))]),
    (0, [sync((6, []), (2, [one_way((9, []), (6, [("put", 2)]))]))]),
    (
        3,
        [
            sync((8, []), (9, [sync((6, []), (4, []))])),
            sync((8, []), (6, [sync((0, []), (6, [("merge", 2), ("merge", 2)])), ("put", 5)])),
        ],
    ),
]


@pytest.mark.parametrize(
    ("workers", "log"),
    [(4, AN_ANSWER_TO_A_CALL_THAT_IS_GONE), (3, A_PUT_OF_WHAT_IS_THERE)],
    ids=["an answer to a call that is gone is not taken for that to its successor", "a put of what is there is a put"],
)
def test_programs_that_were_wrong_under_some_schedule_give_what_the_loop_gives(workers: int, log: Any) -> None:
    calls = [(run, key, steps, 1) for key, steps in log]
    replies, state = looped(calls)
    for seed in range(200):
        cluster = Cluster(app, workers, seed=seed)
        assert [outcome(reply) for reply in cluster.run(calls)] == replies, f"schedule {seed}"
        assert exactly(cluster.state()) == exactly(state), f"schedule {seed}"


@cell.register
def keep(ctx: Context, value: Any) -> None:
    ctx.put(value)


@cell.register
def tell(ctx: Context, to: str, value: int) -> None:
    ctx.call_async(keep, to, value)


@cell.register
def give(ctx: Context, value: int) -> int:
    return value


@cell.register
async def ask(ctx: Context, first: str, second: str) -> int:
    seen = ctx.get(0)
    return -1 if seen == 1 else await ctx.call(give, first if seen == 0 else second, seen)


def test_an_answer_to_a_call_that_was_taken_back_is_not_taken_for_that_to_the_next_one() -> None:
    """It asks the first, then nobody, then the second; the first one's answer comes last of all."""
    cluster = Cluster(app, 5)
    asked = on(1, workers=5)
    cluster.hold((4, 1), (5, 1), (2, 1))
    calls = [(tell, on(4, workers=5), asked, 1), (tell, on(5, workers=5), asked, 2)]
    cluster.send([*calls, (ask, asked, on(2, workers=5), on(3, workers=5))])
    for link in ((4, 1), (5, 1), (2, 1)):
        cluster.deliver_all()
        cluster.release(link)
    cluster.settle()
    assert cluster.replies[0][2].unwrap() == 2
