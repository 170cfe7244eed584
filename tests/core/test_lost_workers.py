"""A worker is lost, or their number changes: nothing is lost, nothing is repeated, and values keep their types."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import App, Context
from headrace.core.events import Lost, Rescale, Rescaled
from tests.cluster import Cluster, exactly, looped, on, outcome
from tests.core.scenario import check_scenario
from tests.core.things import LOSABLE, VALUES, add, app, pass_on, read

# --- B5: nothing is lost, nothing repeated ----------------------------------------------------------------------------


@pytest.mark.parametrize("copy_after", [1, 1_000], ids=["often copied", "never copied"])
@pytest.mark.parametrize("worker", [1, 3])
def test_b5_a_worker_lost_at_any_moment_loses_and_repeats_nothing(worker: int, copy_after: int) -> None:
    """As published, a transaction that was put off to the next epoch was skipped by the offsets of a snapshot. Here no
    epoch leaves one behind, and a copy of the state stands between two epochs."""
    expected, state = looped(LOSABLE)
    at, is_over = 0, False
    while not is_over:
        cluster = Cluster(app, 3, seed=at, epoch_transactions_max=5, replay_transactions_max=copy_after)
        cluster.settle()
        cluster.send(LOSABLE[:9], LOSABLE[9:])
        is_over = not all(cluster.deliver() for _ in range(at))
        cluster.submit(Lost(worker))
        cluster.settle()  # which asserts that no submission is answered twice
        assert [outcome(reply) for token in (0, 1) for reply in cluster.replies[token]] == expected, f"after {at} steps"
        assert cluster.state() == state, f"after {at} steps"
        cluster.check_left_behind()
        at += 2
    assert at > 40


# --- B13: values are what they were -----------------------------------------------------------------------------------


def test_b13_values_keep_their_types_over_workers_recovery_and_rescale() -> None:
    calls = [(pass_on, on(1, f"from{at}"), on(2, f"to{at}"), value) for at, value in enumerate(VALUES)]
    expected, state = looped(calls)
    assert list(map(repr, expected)) == [repr(("ok", value)) for value in VALUES]
    cluster = Cluster(app, 3, seed=13, replay_transactions_max=1, entities_per_frame_max=3)
    assert list(map(repr, cluster.results(calls))) == list(map(repr, VALUES))
    for event in (Lost(1), Rescale("wider", 5), Lost(4), Rescale("narrower", 2), Lost(2)):
        cluster.submit(event)
        cluster.settle()
        assert exactly(cluster.state()) == exactly(state), f"after {event}"
        again = cluster.results([(read, to) for _, _, to, _ in calls])
        assert list(map(repr, again)) == list(map(repr, VALUES)), f"after {event}"
    assert [effect.workers for effect in cluster.others if isinstance(effect, Rescaled)] == [5, 2]


@pytest.mark.parametrize("keys", [[1, "1", b"1", -1], [0, 1 << 63, -(1 << 63), ""]], ids=["alike", "at the edges"])
def test_b13_keys_keep_their_types_over_recovery_and_rescale(keys: list[Any]) -> None:
    calls = [(add, key, at + 1) for at, key in enumerate(keys)]
    cluster = Cluster(app, 3, seed=1)
    cluster.run(calls)
    for event in (Rescale("wider", 4), Lost(2), Rescale("narrower", 1)):
        cluster.submit(event)
        cluster.settle()
        assert exactly(cluster.state()) == exactly(looped(calls)[1]), f"after {event}"


# --- a term that begins elsewhere first -------------------------------------------------------------------------------


def test_what_comes_before_a_term_has_begun_here_is_not_lost() -> None:
    check_scenario("term_begins_elsewhere_first")


# --- a replay ---------------------------------------------------------------------------------------------------------

showing = App("showing")
shown = showing.operator("thing")


@shown.register
def count(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get(0)


@shown.register
def show_an_object(ctx: Context) -> None:
    raise ValueError(f"no {object()}")


def test_a_replay_may_show_another_address() -> None:
    cluster = Cluster(showing, 2)
    cluster.run([(show_an_object, "a"), (count, "a", 1)])
    elsewhere = [object() for _ in range(10_001)]
    cluster.submit(Lost(1))
    cluster.settle()
    assert [outcome(reply) for reply in cluster.run([(count, "a", 1)])] == [("ok", 2)]
    assert elsewhere
