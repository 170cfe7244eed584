"""Styx, sections 5 and 6 (7 is in test_styx_7.py): a test for each claim. Where Headrace departs from the paper on
purpose, its docstring says.

The largest departure: there is no lock phase and no next epoch for those that conflict. The log is the serial order;
what came late is inserted where it belongs and repaired, until the epoch is what a loop over its transactions gives.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Config, Context
from headrace.core.epoch import FINAL
from headrace.core.events import Lost, Overran
from headrace.core.sequencing import Sequencer, Sequencing
from headrace.core.shares import add_share, is_whole, split_share
from headrace.wire.messages import Answered, AnsweredAll, Begin, Final, Gather, Idle, Made, Run, Traffic
from tests.cluster import Cluster, check_like_the_loop, looped, on, outcome, plant, tree
from tests.paper.items import (
    add,
    app,
    bump,
    fickle,
    follow,
    follow_and_wait,
    item,
    move,
    note,
    note_tid,
    point,
    read,
    seen,
    shift,
    touch,
)

# --- 5.1 Transaction sequencing ---------------------------------------------------------------------------------------


def test_three_sequencers_give_the_sequences_of_figure_5() -> None:
    """5.1, equation 1: TID = sid + lc * n_seq."""
    assert [list(Sequencer(sid, 3).take(3)) for sid in (1, 2, 3)] == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]


@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=30))
def test_tids_are_unique_and_dense_without_any_communication_between_sequencers(
    n_seq: int, takes: list[tuple[int, int]]
) -> None:
    """5.1: a global sequence without communication: no TID twice, no gap below what all have counted."""
    sequencers = [Sequencer(sid, n_seq) for sid in range(1, n_seq + 1)]
    given_ = [tid for which, count in takes for tid in sequencers[which % n_seq].take(count)]
    assert len(set(given_)) == len(given_)
    everyone_counted = min(sequencer.lc for sequencer in sequencers)
    assert set(range(1, 1 + everyone_counted * n_seq)) <= set(given_)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_after_an_epoch_every_sequencer_goes_on_from_the_largest_counter(counts: list[int]) -> None:
    """5.1, mitigating sequence imbalance: a less busy sequencer gets no priority in the next epoch."""
    sequencers = [Sequencer(sid, len(counts)) for sid in range(1, len(counts) + 1)]
    given_ = [tid for sequencer, count in zip(sequencers, counts, strict=True) for tid in sequencer.take(count)]
    for sequencer in sequencers:
        sequencer.level(max(counts))
    following = sorted(sequencer.take(1)[0] for sequencer in sequencers)
    assert following[0] > max(given_, default=0)
    assert following == list(range(following[0], following[0] + len(counts)))


@given(st.integers(1, 9), st.integers(0, 1000), st.integers(1, 9))
def test_another_number_of_sequencers_starts_above_every_tid_given(before: int, count: int, after: int) -> None:
    """5.1, and beyond it: the paper leaves open what becomes of the counters when n_seq changes."""
    largest = max([tid for sid in range(1, before + 1) for tid in Sequencer(sid, before).take(count)], default=0)
    firsts = [Sequencer.above(sid, after, largest).take(1)[0] for sid in range(1, after + 1)]
    assert min(firsts) > largest
    assert max(firsts) - largest < 2 * after, "no more than one round is left out"
    assert len(set(firsts)) == after


def test_transactions_of_one_of_several_sequencers_run_in_the_order_of_its_tids() -> None:
    """5.1: the sequence of one sequencer has gaps, which belong to the others."""
    cluster = Cluster(app, 3, seed=1)
    cluster.engine.sequencing.sequencer = Sequencer(2, 3)
    replies = cluster.run([(note_tid, on(1))] + [(touch, on(2), on(1), on(3))] * 3)
    assert [reply.tid for reply in replies] == [2, 5, 8, 11]
    assert cluster.state() == {("item", on(1)): [2, 5, 8, 11], ("item", on(3)): [5, 8, 11]}


# --- 5.2 Call-graph discovery -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_closes_at_a_configurable_number_of_transactions(workers: int) -> None:
    """5.2; by default 1000 transactions per epoch."""
    assert Config().epoch_transactions_max == 1000
    cluster = Cluster(app, workers, epoch_transactions_max=3, epoch_interval_us=1_000)
    replies = cluster.run([(add, on(1), 1)] * 7)
    assert [reply.epoch for reply in replies] == [1, 1, 1, 2, 2, 2, 3]


def test_an_epoch_closes_after_an_interval() -> None:
    """5.2: the interval counts from the first transaction, and a full epoch does not wait for it."""
    cluster = Cluster(app, 3, epoch_transactions_max=3, epoch_interval_us=1_000)
    cluster.send([(add, on(1), 1)] * 4)
    cluster.deliver_all()
    assert (cluster.now_us, len(cluster.bodies(Run))) == (0, 3)
    cluster.now_us = 999
    cluster.send([(add, on(1), 1)])
    cluster.deliver_all()
    assert len(cluster.bodies(Run)) == 3
    cluster.now_us = 1_000
    cluster.deliver_all()
    assert len(cluster.bodies(Run)) == 6
    assert [reply.epoch for token in (0, 1) for reply in cluster.replies[token]] == [1, 1, 1, 2, 2]
    sequencing = Sequencing(Config(epoch_interval_us=5))
    assert not sequencing.is_due(1 << 40), "an epoch without transactions is never due"


@item.register
async def walk(ctx: Context, hops: int) -> list[str]:
    """Awaits: follows what the state says, also in circles."""
    onward = await ctx.call(walk, ctx.get(), hops - 1) if hops else []
    return [ctx.key, *onward]


@item.register
def wander(ctx: Context, hops: int, path: list[str]) -> None:
    """The same one-way, and the last one notes the path."""
    path.append(ctx.key)
    if hops:
        ctx.call_async(wander, ctx.get(), hops - 1, path)
    else:
        ctx.call_async(note, "path", path)


@item.register
def point_from_afar(ctx: Context, key: str, to: str) -> None:
    ctx.call_async(point, key, to)


@pytest.mark.parametrize("hops", [1, 2, 7, 60])
@pytest.mark.parametrize("form", [walk, wander], ids=["awaited", "one-way"])
def test_a_call_graph_of_any_depth_with_cycles_over_workers_is_discovered_by_running_it(hops: int, form: Any) -> None:
    """5.2: before the functions execute, the call graph is unknown. Here the state decides it, and earlier transactions
    of the same epoch decide the state, some of them late: then it is another graph, and the first one never was. The
    paper's implementation has lost its awaited calls; Headrace has both."""
    ring = [on(1, "a"), on(2, "b"), on(3, "c"), on(3, "d"), on(1, "e")]
    calls: list[Any] = [(point, key, ring[at - 1]) for at, key in enumerate(ring)]
    args = (hops,) if form is walk else (hops, [])
    calls += [(form, ring[0], *args), (point, ring[0], ring[2]), (form, ring[0], *args)]
    calls += [(point_from_afar, on(2, "afar"), ring[0], ring[1]), (form, ring[0], *args)]
    check_like_the_loop(app, calls, seeds=range(4), predict_after_runs=1)


# --- 5.3 Function execution acknowledgment ----------------------------------------------------------------------------

FIGURE_6: list[Any] = [[[]], [], [[], []]]  # the root calls three; the left one calls one, the right one two


def unbalanced(fan_out: int, depth: int) -> list[Any]:
    """One branch goes on at every level, the others end."""
    shape: list[Any] = []
    for _ in range(depth):
        shape = [[]] * (fan_out - 1) + [shape]
    return shape


def adds_up_to_one(shares: Sequence[int]) -> bool:
    held: set[int] = set()
    for share in shares:
        add_share(held, share)
    return is_whole(held)


def float_shares(shape: Sequence[Any], share: float = 1.0) -> list[float]:
    """As published in code: each call gets an equal part, as a float; only calls that make none give theirs back."""
    return [part for called in shape for part in float_shares(called, share / len(shape))] if shape else [share]


SHAPES = {"figure 6": FIGURE_6, "fan-out 2, depth 30": unbalanced(2, 30), "fan-out 15, depth 8": unbalanced(15, 8)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shares_add_up_to_one_exactly_when_the_last_call_is_back(shape: Any) -> None:
    """5.3. Ours are halves, so a share travels as one small integer; a call that ends gives back what it kept."""
    shares = tree(shape, 0, split_share)
    assert adds_up_to_one(shares)
    for missing in range(len(shares)):
        assert not adds_up_to_one(shares[:missing] + shares[missing + 1 :])
    for back in range(len(shares)):
        assert not adds_up_to_one(shares[:back])


def added(shares: Sequence[float]) -> float:
    """One after the other, as acknowledgements come; `sum` compensates for errors since Python 3.12."""
    return functools.reduce(operator.add, shares, 0.0)


def test_floats_would_be_wrong_for_the_same_shapes() -> None:
    """5.3: "if we used floats instead of fractions": with a tolerance (1e-9, as in the published code) the root is done
    while calls are under way, without one it is never done."""
    halves = float_shares(SHAPES["fan-out 2, depth 30"])
    assert added(halves[:-1]) >= 1 - 1e-9, "done, though the last leaf is not back"
    fifteenths = float_shares(SHAPES["fan-out 15, depth 8"])
    assert added(fifteenths[:-2]) >= 1 - 1e-9, "done, though the last two leaves are not back"
    assert added(fifteenths) != 1.0
    thirds = [round(share, 2) for share in float_shares([[], [], []])]
    assert added(thirds) == 0.99, "the paper's own example"


@item.register
def fan(ctx: Context, keys: list[str], fan_out: int, depth: int) -> None:
    """Leaves everywhere, and one branch that goes on, from worker to worker."""
    if depth:
        for n in range(fan_out - 1):
            ctx.call_async(add, keys[n % len(keys)], 1)
        ctx.call_async(fan, keys[depth % len(keys)], keys, fan_out, depth - 1)


@pytest.mark.parametrize(("fan_out", "depth"), [(2, 30), (15, 8)])
def test_a_lone_transaction_settles_by_shares(fan_out: int, depth: int) -> None:
    """5.3. Departure: one share for all that goes to a worker at once, so that batching stays; and the
    coordinator, which nobody has to wait for, adds them up in the root's place."""
    keys = [on(1, "a"), on(2, "b"), on(3, "c")]
    calls = [(fan, keys[0], keys, fan_out, depth)]
    cluster = Cluster(app, 3, seed=fan_out)
    assert [outcome(reply) for reply in cluster.run(calls)] == looped(calls)[0]
    reports = cluster.bodies(Idle)
    assert all(report.shares is not None for report in reports)
    shares = [share for report in reports for share in report.shares]
    assert adds_up_to_one(shares)
    assert max(shares) >= depth // 2, "it went to and fro"
    assert cluster.state() == looped(calls)[1]


def test_messages_about_a_lone_transaction_go_only_to_workers_that_take_part() -> None:
    """5.3: acknowledgements go to the root instead of to everybody."""
    cluster = Cluster(app, 5)
    cluster.settle()
    cluster.run([(touch, on(2, workers=5), on(4, "x", 5), on(4, "y", 5))])
    told = {node for frame in cluster.sent if not isinstance(frame.body, Begin) and frame.body for node in (frame.to,)}
    assert told == {0, 2, 4}
    assert cluster.coordinator.metrics()["lone"] == 1


# --- 6.1 Lock-free commit phase ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_of_those_that_conflict_the_lower_tid_takes_effect_first(seed: int) -> None:
    """6.1, with the transactions of Figure 4: T1 on k1, k2; T2 on k2, k8; T3 on k8, k3. In the paper T1 commits and the
    others wait for the next phase; which of two comes first depends on who conflicted. Here it is always TID order."""
    k1, k2, k8, k3 = on(1, "k1-"), on(2, "k2-"), on(2, "k8-"), on(3, "k3-")
    cluster = Cluster(app, 3, seed=seed)
    cluster.run([(touch, on(1, "r"), k1, k2), (touch, on(3, "r"), k2, k8), (touch, on(2, "r"), k8, k3)])
    assert cluster.state() == {("item", k1): [1], ("item", k2): [1, 2], ("item", k8): [2, 3], ("item", k3): [3]}


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_when_nothing_crosses_workers_settle_with_two_messages_each(workers: int) -> None:
    """6.1: 2 * |W| messages, however many conflict. One report each, one answer each."""
    calls: list[Any] = [(add, on(worker, workers=workers), 1) for worker in range(1, workers + 1)] * 20
    cluster = Cluster(app, workers, seed=workers)
    cluster.settle()
    cluster.run(calls)
    assert [len(cluster.bodies(kind)) for kind in (Idle, Final, Traffic, Gather)] == [workers, workers, 0, 0]


def test_an_abort_by_the_applications_logic_disturbs_nobody_else() -> None:
    """6.1: "Styx removes the related entries from the read/write sets". What an aborted transaction wrote is seen by
    nobody, also by those that had run on it before the failure was known."""
    a, b = on(1, "a"), on(2, "b")
    calls = [(add, a, 5), (move, a, b, 1), (move, a, b, 500), (read, a), (move, b, a, 3), (read, b)]
    cluster = Cluster(app, 2)
    cluster.hold((1, 2))  # the callee, which fails, is late
    cluster.send(calls)
    cluster.deliver_all()
    assert not cluster.replies
    cluster.release()
    cluster.settle()
    assert list(map(outcome, cluster.replies[0])) == looped(calls)[0]
    assert [reply.status for reply in cluster.replies[0]] == ["ok", "ok", "aborted", "ok", "ok", "ok"]
    check_like_the_loop(app, calls, predict_after_runs=1)


# --- 6.2 Lock-based commit phase --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 20])
def test_conflicts_are_resolved_within_the_epoch(count: int) -> None:
    """6.2. Departure: no locks; whoever ran too early is repaired, in TID order."""
    target = on(1, "target")
    calls: list[Any] = [(bump, on(1 + at % 3, f"r{at}"), target) for at in range(count)]
    cluster = Cluster(app, 3, seed=count)
    replies = cluster.run([*calls, (read, target)])
    assert replies[-1].result == count
    assert {reply.epoch for reply in replies} == {1}
    check_like_the_loop(app, [*calls, (read, target)])


@pytest.mark.parametrize("form", [follow, follow_and_wait], ids=["one-way", "awaited"])
def test_a_transaction_commits_in_its_epoch_also_if_its_read_write_set_drifts_twice(form: Any) -> None:
    """6.2: "if a transaction's read/write set changes in this phase, Styx aborts the transaction and recomputes its
    read/write set in the next epoch". Departure: it stays, and what it no longer does is taken back, with all that came
    of it."""
    pointer, targets = on(1, "pointer"), [on(2, "x"), on(3, "y"), on(3, "z"), on(1, "w")]
    sums = [on(3, "sx"), on(1, "sy"), on(2, "sz"), on(2, "sw")]
    calls = [(shift, on(2, "r"), pointer, 1), (shift, on(3, "r"), pointer, 2), (form, pointer, targets, sums)]
    seen.clear()
    cluster = Cluster(app, 3)
    cluster.hold((2, 1), (3, 1))
    cluster.send(calls)
    cluster.deliver_all()
    cluster.release((3, 1))
    cluster.deliver_all()
    cluster.release((2, 1))
    cluster.settle()
    assert list(dict.fromkeys(seen)) == [0, 2, 3], "it ran three times at least, with three different targets"
    assert cluster.replies[0][2].result == 3
    assert {reply.epoch for reply in cluster.replies[0]} == {1}
    assert cluster.state() == {("item", pointer): 3, ("item", sums[3]): 1}
    check_like_the_loop(app, calls, predict_after_runs=1)


@item.register
async def ask(ctx: Context, targets: list[str]) -> Any:
    return await ctx.call(read, targets[ctx.get(0)])


def test_an_answer_to_a_call_that_was_not_made_after_all_is_ignored() -> None:
    """6.2, for awaited calls: the answer of the first run comes after that of the second."""
    pointer, targets = on(1, "pointer"), [on(2, "x"), on(3, "y")]
    cluster = Cluster(app, 3)
    cluster.run([(point, targets[0], "old"), (point, targets[1], "new")])
    cluster.hold((2, 1), (3, 1))
    cluster.send([(shift, on(3, "r"), pointer, 1), (ask, pointer, targets)])
    cluster.deliver_all()
    cluster.release((3, 1))
    cluster.deliver_all()
    cluster.release((2, 1))
    cluster.settle()
    assert cluster.replies[1][1].result == "new"


# --- 6.3 Call-graph caching -------------------------------------------------------------------------------------------


@item.register
async def fetch(ctx: Context, other: str) -> int:
    return int(await ctx.call(add, other, 1)) + 1


def trained(form: Any, calls: Sequence[Any], **config: int) -> Cluster:
    """A cluster that has seen these calls and has learned what they call."""
    cluster = Cluster(app, 3, predict_after_runs=2, **config)
    cluster.run(calls)
    assert cluster.coordinator.predictions, f"{form} was to be predicted"
    cluster.sent.clear()
    return cluster


@pytest.mark.parametrize(("form", "answers"), [(bump, 0), (fetch, 10)], ids=["one-way", "awaited"])
def test_predicted_calls_travel_without_messages(form: Any, answers: int) -> None:
    """6.3, Figure 7: "individual workers can re-invoke those function calls locally". Departure: not only when a
    transaction runs again, but from its first run on, once the function is known."""
    calls = [(form, on(1, f"r{at}"), on(2, f"t{at}")) for at in range(10)]
    cold = Cluster(app, 3, predict_after_runs=1_000)
    cold.run(calls)
    assert len(cold.rows(Made)) == 10
    warm = trained(form, calls)
    warm.run(calls)
    assert (len(warm.rows(Made)), len(warm.rows(Answered))) == (0, 0)
    assert sum(len(column.tids) for column in warm.rows(AnsweredAll)) == answers  # all in one row
    assert len(warm.rows(AnsweredAll)) == bool(answers)
    assert warm.state() == looped(calls * 2)[1]


@pytest.mark.parametrize("form", [bump, fetch], ids=["one-way", "awaited"])
def test_predicted_calls_run_before_their_caller_does(form: Any) -> None:
    """6.3, Figure 7: "all functions can execute in parallel"."""
    calls = [(form, on(1, f"r{at}"), on(2, f"t{at}")) for at in range(10)]
    cluster = trained(form, calls)
    cluster.hold((0, 1))  # the callers' worker does not know of the epoch yet
    ran = cluster.workers[2].ordered.ran
    cluster.send(calls)
    cluster.deliver_all()
    assert cluster.workers[2].ordered.ran == ran + 10
    cluster.release()
    cluster.settle()
    assert list(map(outcome, cluster.replies[1])) == looped(calls * 2)[0][10:]
    assert cluster.state() == looped(calls * 2)[1]


@item.register
def draw(ctx: Context, log: str) -> None:
    """The published mistake: what it passes on depends on what it read under conflict."""
    number = ctx.get(0)
    ctx.put(number + 1)
    ctx.call_async(note, log, number)


def drawn(late: Any, first: int, seed: int) -> list[int]:
    """What five conflicting draws append, after so many alone."""
    counter, log = on(1, "counter"), on(2, "log")
    cluster = Cluster(app, 3, seed=seed, predict_after_runs=1)
    if first:
        cluster.run([(draw, counter, log)] * first)
        assert cluster.coordinator.predictions
    cluster.hold(*late)
    cluster.send([(draw, counter, log)] * 5)
    cluster.deliver_all()
    cluster.release()
    cluster.settle()
    return list(cluster.state()["item", log])


@pytest.mark.parametrize("late", [(), ((1, 2),), ((0, 2),)])
@pytest.mark.parametrize("first", [0, 1], ids=["unknown", "predicted"])
def test_parameters_of_predicted_calls_are_compared(late: Any, first: int) -> None:
    """6.3: "the parameters of any of the functions along the call chains". The published code never compared them, and
    five conflicting draws appended [0, 0, 0, 0, 0]. With `first`, one run was enough to predict "it appends 0"."""
    for seed in range(6):
        assert drawn(late, first, seed) == list(range(5 + first)), f"seed {seed}"


def test_if_they_were_not_the_published_mistake_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "same_args", lambda one, other: True)
    assert drawn((), 1, 0) == [0] * 6


# The callee's worker learns that a prediction was wrong after it has run it (the corrections are late), or before it
# has heard of the epoch itself (that is late).
LATE: list[Any] = [(), ((1, 2), (1, 3)), ((0, 2),), ((0, 2), (0, 3))]
MOODS = ["aborts", "other target", "other argument", "one more", "awaits", "silent"]


@pytest.mark.parametrize("mood", MOODS)
def test_a_wrong_prediction_never_changes_a_result(mood: str) -> None:
    """6.3: "To the contrary, ... the transaction must be fully re-executed". Departure: only what
    turned out otherwise is."""
    root, target, other = on(1, "r"), on(2, "t"), on(3, "o")
    training = [(fickle, root, target, other)] * 2
    calls: list[Any] = [(fickle, root, target, other), (point, root, mood), (fickle, root, target, other)]
    calls += [(read, target), (point, root, "calm"), (fickle, root, target, other), (read, target), (read, other)]
    expected, state = looped(training + calls)
    for seed in range(8):
        cluster = Cluster(app, 3, seed=seed, predict_after_runs=1)
        assert list(map(outcome, cluster.run(training))) == expected[:2]
        assert cluster.coordinator.predictions
        cluster.hold(*LATE[seed % 4])
        cluster.send(calls)
        cluster.deliver_all()
        cluster.release()
        cluster.settle()
        assert list(map(outcome, cluster.replies[1])) == expected[2:], f"seed {seed}"
        assert cluster.state() == state, f"seed {seed}"


# --- 6.4 Early commit-replies via determinism -------------------------------------------------------------------------


@item.register
def look(ctx: Context) -> int:
    seen.append(ctx.key)
    return int(ctx.get(0))


def early_cluster() -> Cluster:
    """An epoch of three submissions; the middle one is a suspect: it overran its time, and is to be gathered."""
    cluster = Cluster(app, 3)
    cluster.settle()
    cluster.hold((0, 1), (0, 2), (0, 3))
    cluster.send([(add, on(1), 1), (bump, on(2), on(1))], [(look, on(3))], [(add, on(1), 1)])
    cluster.submit(Overran(3, 3))
    cluster.release()
    seen.clear()
    while 0 not in cluster.replies:
        assert cluster.deliver()
    return cluster


def test_what_is_below_the_lowest_suspect_is_answered_before_the_epoch_is_final() -> None:
    """6.4: "the client can receive the reply even before a persistent snapshot is stored"; here also before the epoch
    is final, as nothing above can change what is below."""
    cluster = early_cluster()
    assert [reply.result for reply in cluster.replies[0]] == [1, None]
    assert set(cluster.replies) == {0}
    assert not seen, "the suspect has not run"
    assert not cluster.bodies(Final)
    assert cluster.coordinator.log[0].phase != FINAL
    cluster.settle()
    assert seen == [on(3)]
    assert [cluster.replies[token][0].result for token in (1, 2)] == [0, 3]


@pytest.mark.parametrize("worker", [1, 2, 3])
def test_an_early_reply_still_holds_after_a_failure_and_is_not_repeated(worker: int) -> None:
    """6.4: "after a failure, the system would run the same transactions with exactly the same effects"."""
    cluster = early_cluster()
    cluster.submit(Lost(worker))
    cluster.settle()  # which asserts that a submission is answered once
    assert [reply.result for token in range(3) for reply in cluster.replies[token]] == [1, None, 0, 3]
    assert cluster.state() == {("item", on(1)): 3}
