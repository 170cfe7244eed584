"""The ordered mode gives what the serial loop gives: any app, any interleaving, 1 to 5 workers, any epoch size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace import App, Config, Reply
from headrace.core.events import Read
from headrace.core.origin import FromClient
from tests.cluster import exactly, looped, outcome
from tests.driver import Driver
from tests.programs import MANY, PROGRAMS, Program, app


class Way(NamedTuple):
    workers: int
    mode: str
    transactions_max: int
    in_flight_max: int
    slice_calls: int
    batches: int
    predict_after: int
    seed: int


WAYS = st.builds(
    Way,
    st.integers(1, 5),
    st.sampled_from(["auto", "ordered"]),
    st.integers(1, 12) | st.just(1000),
    st.integers(1, 3),
    st.sampled_from([1, 2, 5, 500]),
    st.integers(1, 4),
    st.sampled_from([1, 1, 2, 3, 1000]),
    st.integers(0, 1 << 32),
)


def run_fleet(
    calls: Sequence[Any], way: Way, app: App = app, **limits: int
) -> tuple[list[Reply], dict[Any, Any], dict[str, Any]]:
    rng = random.Random(way.seed)
    config = Config(
        epoch_transactions_max=way.transactions_max,
        epochs_in_flight_max=way.in_flight_max,
        slice_calls_max=way.slice_calls,
        predict_after_runs=way.predict_after,
        **limits,
    )
    driver = Driver(app, config, way.workers, way.mode, choose=rng.choice)
    size = -(-len(calls) // way.batches)
    for token, at in enumerate(range(0, len(calls), size)):
        driver.hand_over(driver.admission.admit(FromClient(f"batch{token}"), calls[at : at + size]))
        for _ in range(rng.randrange(30)):
            driver.deliver()
    driver.submit(Read("in between"))
    driver.settle()
    driver.submit(Read("state"))
    driver.settle()
    for worker in driver.workers.values():
        left = [worker.progress, worker.ordered.parts, worker.early, worker.ordered.aborted]
        assert not any(left), "an epoch was left behind"
        assert not any(worker.ordered.chains.values()), "a chain was left behind"
    replies = [reply for token in sorted(driver.replies) for reply in driver.replies[token]]
    return replies, driver.found["state"], driver.coordinator.metrics()


@given(PROGRAMS, WAYS)
@settings(max_examples=10 * MANY)
def test_ordered_epochs_give_what_a_loop_over_the_log_gives(program: Program, way: Way) -> None:
    calls = program.calls()
    expected, state = looped(calls)
    replies, found, metrics = run_fleet(calls, way)
    event(f"{way.workers} workers, gathered: {metrics['gathered'] > 0}")
    assert list(map(repr, map(outcome, replies))) == list(map(repr, expected))
    assert exactly(found) == exactly(state)


LIMITS = st.fixed_dictionaries(
    {
        "calls_max": st.sampled_from([1, 2, 3, 5, 8, 10_000]),
        "depth_max": st.sampled_from([1, 2, 3, 256]),
        "transaction_bytes_max": st.sampled_from([1, 4, 8, 20, 40, 1 << 20]),
        "value_bytes_max": st.sampled_from([64, 1 << 20]),
    }
)


@given(PROGRAMS, WAYS, LIMITS)
@settings(max_examples=5 * MANY)
def test_limits_are_met_where_a_serial_run_meets_them(program: Program, way: Way, limits: dict[str, int]) -> None:
    calls = program.calls()
    driver = Driver(app, Config(**limits))
    driver.submit_at(0, ("all", calls))
    driver.finish()
    replies, found, metrics = run_fleet(calls, way, **limits)
    event(f"gathered: {metrics['gathered'] > 0}")
    assert list(map(repr, map(outcome, replies))) == list(map(repr, map(outcome, driver.replies[0])))
    assert exactly(found) == exactly(driver.state())
