"""What ran too early runs again: a run that read what a lower TID has changed since is repaired."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.ordered import chains
from headrace.core.ordered.executor import OrderedExecutor
from tests.cluster import Cluster, check_like_the_loop, exactly, looped, on, outcome, plant
from tests.core import scenario_app
from tests.core.scenario import check_scenario, played
from tests.core.scenario_app import go, put, send_put

# --- B2: drift is noticed on every worker -----------------------------------------------------------------------------

OLD, NEW, POINTER = on(3, "old"), on(3, "new"), on(2, "pointer")
INCREMENTS: list[Any] = [(send_put, on(3), POINTER, NEW)] + [(go, on(1, f"root{at}"), POINTER) for at in range(10)]


def test_b2_ten_increments_through_a_moved_pointer_are_ten() -> None:
    check_scenario("moved_pointer")
    check_like_the_loop(scenario_app.app, [(put, POINTER, OLD), *INCREMENTS], predict_after_runs=1)


def test_b2_if_only_the_roots_worker_looked_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    check = OrderedExecutor._check

    def check_own(self: Any, part: Any, record: Any) -> None:
        if part.owner(record.order[0]) == self.me:
            check(self, part, record)

    monkeypatch.setattr(OrderedExecutor, "_check", check_own)
    assert "\nnew@3: 10\n" not in played("moved_pointer")


# --- B16: a run sees its own writes, also the second time -------------------------------------------------------------


def test_b16_a_run_sees_its_own_writes_also_when_it_runs_again() -> None:
    check_scenario("own_writes")


def test_b16_a_run_that_did_not_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(records: Any, at: int, tid: int, aborted: set[int]) -> Any:
        others = [records[0], *(record for record in records[1:at] if record.order[0] != tid)]
        return value_before(others, len(others), tid, aborted)

    value_before = chains.value_before
    plant(monkeypatch, "value_before", of_others)
    assert "\nbatch 1: ok [5, 50, 51, 51, 53]\nbatch 1: ok 53\n" not in played("own_writes")


# --- answers to calls that are gone -----------------------------------------------------------------------------------

app = App("repair")
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


def test_an_answer_to_a_call_that_was_taken_back_is_not_taken_for_that_to_the_next_one() -> None:
    check_scenario("answer_to_a_call_taken_back")
