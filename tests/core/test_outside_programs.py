"""Random programs with timers, external calls and what expires do what a loop over the log does: with any number of
workers, with trouble, and when the engine is killed and another one goes on from its store."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.core.epoch import Epoch
from headrace.core.events import Append, Perform, Responded, TakeSnapshot
from headrace.sim.disk import SimStore
from headrace.sim.oracle import Oracle
from headrace.wire.messages import Response
from tests.cluster import exactly
from tests.core.outside_programs import BODIES, LOGS, outside
from tests.durability.hand import Hand, after_power_loss, memory
from tests.outside import SECOND, World, check_nothing_is_left, response
from tests.programs import MANY


class Way(NamedTuple):
    workers: int
    mode: str
    transactions_max: int
    in_flight_max: int
    slice_calls: int
    predict_after: int
    batches: int
    troubles: int  # workers that are lost, and changes of their number
    seed: int


WAYS = st.builds(
    Way,
    st.integers(0, 5),
    st.sampled_from(["auto", "ordered"]),
    st.sampled_from([1, 3, 12, 30]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 500]),
    st.sampled_from([1, 2, 1000]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 1 << 32),
)


def play(bodies: Any, log: Any, way: Way) -> World:
    outside.bodies = [bodies[body % len(bodies)] for body in range(3)]
    calls = [(outside.forms[operator][form], key, *args) for operator, form, key, *args in log]
    world = World(
        outside.app,
        way.workers,
        way.mode,
        way.seed,
        epoch_transactions_max=way.transactions_max,
        epochs_in_flight_max=way.in_flight_max,
        slice_calls_max=way.slice_calls,
        predict_after_runs=way.predict_after,
    )
    size = -(-len(calls) // way.batches)
    rng = random.Random(way.seed)
    for at in range(0, len(calls), size):
        world.send(calls[at : at + size])
        for _ in range(rng.randrange(30)):
            world.deliver()
        for _ in range(rng.randint(0, way.troubles)):
            world.trouble()
            for _ in range(rng.randrange(60)):
                world.deliver()
        if rng.random() < 0.5:
            world.until(world.now_us + rng.choice([1, SECOND, 2 * SECOND + 1]))
    world.until(world.now_us + 20 * SECOND)
    return world


@given(BODIES, LOGS, WAYS)
@settings(max_examples=5 * MANY)
def test_what_was_logged_gives_the_same_in_a_loop(bodies: Any, log: Any, way: Way) -> None:
    world = play(bodies, log, way)
    assert set(world.replies) == set(range(world.submitted)), "something was not answered"
    world.check()
    rows = [entry.name for epoch in world.epochs for entry in epoch.entries]
    event(f"{way.workers} workers, timers: {'headrace.fire' in rows}, external: {bool(world.performed)}")


# --- killed, and gone on from a store ---------------------------------------------------------------------------------


def respond(perform: Perform) -> Responded:
    return Responded(perform.call, *response(*perform))


class Killed(NamedTuple):
    workers: list[int]  # of the engines, one after the other; 0 is one without workers
    transactions_max: int
    batches: int
    snapshot_chance: float
    sync_chance: float
    seed: int


KILLED = st.builds(
    Killed,
    st.lists(st.integers(0, 3), min_size=2, max_size=4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 1 << 32),
)


class Story:
    """What is in the log, whoever wrote it."""

    def __init__(self, way: Killed) -> None:
        self.way, self.rng = way, random.Random(way.seed)
        self.store: SimStore = memory()
        self.records: dict[int, Any] = {}
        self.now_us = 0
        self.seen: set[str] = set()

    def engine(self, workers: int) -> Hand:
        """The next one; what its predecessor had not made durable is gone."""
        if self.rng.random() < 0.5:
            self.store = after_power_loss(self.store)
        story = self

        class Watched(Hand):
            is_new = True

            def _apply(self, node: int, effects: list[Any]) -> None:
                if self.is_new:  # what was not durable is not there
                    self.is_new, last = False, self.opened_store.log.last
                    story.records = {number: each for number, each in story.records.items() if number <= last}
                story.records |= {each.number: each.record for each in effects if isinstance(each, Append)}
                super()._apply(node, effects)

        config: dict[str, Any] = {"epoch_transactions_max": self.way.transactions_max, "snapshot_interval_us": 1 << 60}
        hand = Watched(self.store, outside.app, workers, self.now_us, self.rng.randrange(1 << 30), **config)
        hand.outside = respond
        return hand

    def live(self, hand: Hand, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < self.way.snapshot_chance:
                hand.submit(TakeSnapshot(object()))
            if not hand.happen(self.rng, self.way.sync_chance):
                due = min(hand.timers.values(), default=None)
                if due is None:
                    break
                hand.now_us = max(hand.now_us, min(due, hand.now_us + SECOND))
        self.now_us = hand.now_us

    def check(self, hand: Hand) -> None:
        """Every row of the log, and the state, are what a loop over the log gives, with the responses in it."""
        values = hand.core.program.values
        given = {each.call: each for each in self.records.values() if isinstance(each, Response)}

        def logged(call: str, name: str, args: tuple[Any, ...]) -> tuple[Any, str | None]:
            return values.unseal(given[call].result), given[call].failure

        oracle = Oracle(values, app=outside.app, seed=hand.opened_store.seed, respond=logged)
        epochs = [each for _, each in sorted(self.records.items()) if isinstance(each, Epoch)]
        assert [epoch.number for epoch in epochs] == list(range(1, len(epochs) + 1))
        for epoch in epochs:
            oracle.now_us = epoch.closed_us
            for row, entry in enumerate(epoch.entries):
                args = values.decode(epoch.args[row][0]) if entry.sealed is entry else epoch.args[row]
                assert oracle.tid + 1 == epoch.tids[row]
                oracle.transact(entry.function, epoch.keys[row], *args)
        assert exactly(hand.state()) == exactly(oracle.visible(hand.core.sequencing.last_us, outside.app))
        check_nothing_is_left(oracle, epochs, hand.now_us)


def tell(bodies: Any, log: Any, way: Killed) -> Story:
    outside.bodies = [bodies[body % len(bodies)] for body in range(3)]
    calls = [(outside.forms[operator][form], key, *args) for operator, form, key, *args in log]
    story = Story(way)
    answered: dict[int, str] = {}
    size = -(-len(calls) // way.batches)
    for life, workers in enumerate(way.workers):
        hand = story.engine(workers)
        tokens = {}
        for number, at in enumerate(range(0, len(calls), size)):  # who has no answer asks again
            tokens[hand.send(f"batch{number}", calls[at : at + size])] = number
            story.live(hand, story.rng.randrange(60))
        if life + 1 == len(way.workers):
            while hand.settle() or hand.performs or story.now_us + 20 * SECOND > hand.now_us:
                story.now_us = min(story.now_us, hand.now_us)
                hand.now_us += SECOND
        for token, replies in hand.replies.items():
            replied = repr([(reply.tid, reply.result, reply.failure) for reply in replies])
            assert answered.setdefault(tokens[token], replied) == replied, "another answer than before"
    assert len(answered) == len(set(tokens.values())), "something was not answered"
    story.check(hand)
    return story


@given(BODIES, LOGS, KILLED)
@settings(max_examples=2 * MANY)
def test_whoever_goes_on_does_what_a_loop_over_the_log_does(bodies: Any, log: Any, way: Killed) -> None:
    story = tell(bodies, log, way)
    names = {entry.name for each in story.records.values() if isinstance(each, Epoch) for entry in each.entries}
    event(f"timers: {'headrace.fire' in names}")
