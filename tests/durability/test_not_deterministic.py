"""A function that is not deterministic, and a crash: what the error says, when the logged replies may stand, and that
nothing else changes."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import App, Context, Runtime
from headrace.cli.logs import rows_of
from headrace.core.digests import NET, net_digest, net_sum
from headrace.core.epoch_changes import OperatorChanges
from headrace.core.local import LocalBackend
from headrace.durability.log.log import bounds
from headrace.durability.log.records import unpack_results
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.store import DirectoryStore
from headrace.errors import NotDeterministic
from headrace.sim.disk import SimStore
from headrace.wire.values import MISSING
from tests.cluster import exactly, outcome
from tests.core.test_executors import Alternating
from tests.driver import Driver
from tests.durability.hand import Hand, loop, memory, turned
from tests.programs import PROGRAMS, Program
from tests.programs import app as programs_app
from tests.waiting import eventually

app = App("clocks")
thing = app.operator("thing")
OUTSIDE = {"count": 0}  # no log knows it


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@thing.register
def tell(ctx: Context) -> int:
    """Its reply depends on what is not in the log; what it writes does not."""
    OUTSIDE["count"] += 1
    ctx.put(ctx.get(0) + 1)
    return OUTSIDE["count"]


@thing.register
async def ask(ctx: Context, of: str) -> int:
    return int(await ctx.call(tell, of))


@thing.register
def write(ctx: Context) -> None:
    """What it writes depends on that; its reply does not."""
    OUTSIDE["count"] += 1
    ctx.put(OUTSIDE["count"])


@thing.register
def write_constant(ctx: Context) -> None:
    ctx.put(123_456_789)


@thing.register
def write_given(ctx: Context, value: float) -> None:
    ctx.put(value)


class Accepting(Hand):
    def prepare(self) -> None:
        self.core.accepts = True
        super().prepare()


def digests(store: SimStore) -> list[bytes | None]:
    return [unpack_results(data)[0].digest for _, data in StoreReader(store).replies(1)]


# --- what the error says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_error_names_the_function_and_both_ways_out(workers: int) -> None:
    store = memory()
    Hand(store, app, workers).run("all", [(add, "a", 1), (tell, "b")])
    with pytest.raises(NotDeterministic) as refused:
        Hand(store, app, workers).settle()
    for part in ("thing.tell of 'b'", "--accept-logged", "headrace restore --epoch 0", "--check"):
        assert part in str(refused.value)
    assert "is the same" in str(refused.value)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Hand, Accepting])
def test_other_writes_are_refused_whatever_the_user_says(kind: type[Hand], workers: int) -> None:
    store = memory()
    Hand(store, app, workers).run("all", [(add, "a", 1), (write, "b")])
    with pytest.raises(NotDeterministic, match=r"called .*thing.write, gave the same replies again, but wrote"):
        kind(store, app, workers).settle()


def test_a_reply_and_a_write_that_both_differ_are_refused_whatever_the_user_says() -> None:
    from tests.durability.hand import app as machine_app
    from tests.durability.hand import weather

    store = memory()
    Hand(store, machine_app).run("all", [(weather, "w")])
    with turned("rainy"), pytest.raises(NotDeterministic, match=r"fine.*rainy.*differs, too"):
        Accepting(store, machine_app).settle()


def test_without_a_digest_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    hand = Hand(store, app)
    hand.core.state.has_digests = False  # as older versions wrote it
    hand.run("all", [(tell, "b")])
    assert digests(store) == [None]
    with pytest.raises(NotDeterministic, match="It is not known whether epoch 1 wrote the same"):
        Accepting(store, app).settle()


# --- the logged replies stand -----------------------------------------------------------------------------------------

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just(add), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just(tell), st.sampled_from("abc")),
        st.tuples(st.just(ask), st.sampled_from("ab"), st.just("c")),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("workers", [0, 1, 2])
@given(first=CALLS, second=CALLS, seed=st.integers(0, 1 << 32), has_snapshot=st.booleans())
@settings(max_examples=25, deadline=None)
def test_after_a_crash_the_first_lifes_replies_and_state_are_there(
    workers: int, first: list[Any], second: list[Any], seed: int, has_snapshot: bool
) -> None:
    """The oracle is a loop over the log for the state; for the replies, what the first life has given."""
    rng, store = random.Random(seed), memory()
    hand = Hand(store, app, workers, seed=seed, epoch_transactions_max=rng.choice((1, 3, 100)))
    if has_snapshot:
        hand.run("before", [(add, "a", 1), (tell, "a")])
        hand.take_snapshot()
    given = hand.run("first", first)
    token = hand.send("second", second)
    for _ in range(rng.randint(0, 20)):
        hand.happen(rng)
    answered = hand.replies.get(token)
    is_telling = any(call[0] in (tell, ask) for call in first)
    if is_telling:
        with pytest.raises(NotDeterministic, match=r"thing.(tell|ask).*--accept-logged.*headrace restore"):
            Hand(store, app, workers).settle()
    again = Accepting(store, app, workers)
    assert again.run("first", first) == given
    kept = [row for row in rows_of(StoreReader(store), "log", None, None, False) if row["kind"] == "accepted"]
    assert bool(kept) >= is_telling
    if kept:
        assert all("thing." in text for row in kept for text in row["differences"])
    if answered is not None and not any(call[0] in (tell, ask) for call in second):
        assert again.run("second", second) == answered
    else:
        again.run("second", second)
    before = [(add, "a", 1), (tell, "a")] if has_snapshot else []
    assert again.state() == loop([*before, *first, *second])[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_accepted_is_in_the_log_and_need_not_be_accepted_again(workers: int) -> None:
    store = memory()
    given = Hand(store, app, workers).run("all", [(tell, "a"), (add, "a", 1)])
    Accepting(store, app, workers).settle()
    rows = [row for row in rows_of(StoreReader(store), "log", None, None, False) if row["kind"] == "accepted"]
    assert [(row["epoch"], row["tids"]) for row in rows] == [(1, [1])]
    again = Hand(store, app, workers)
    assert again.run("all", [(tell, "a"), (add, "a", 1)]) == given
    assert again.state() == {("thing", "a"): 2}


def test_one_process_can_accept_what_several_workers_wrote() -> None:
    store = memory()
    given = Hand(store, app, 2).run("all", [(tell, "a"), (add, "b", 1)])
    assert Accepting(store, app).run("all", [(tell, "a"), (add, "b", 1)]) == given


def test_several_workers_say_that_one_process_must_accept_what_one_process_wrote() -> None:
    store = memory()
    given = Hand(store, app).run("all", [(tell, "a"), (add, "b", 1)])
    with pytest.raises(NotDeterministic, match="a start in one process, without --workers"):
        Accepting(store, app, 2).settle()
    Accepting(store, app).settle()
    assert Hand(store, app, 2).run("all", [(tell, "a"), (add, "b", 1)]) == given


def test_a_runtime_goes_on_with_the_logged_reply_if_it_is_told_to(tmp_path: Path) -> None:
    first = Runtime(app, store=tmp_path)
    given = first.client.options(request_id="id").call(tell, "w")
    eventually(lambda: bounds(DirectoryStore(tmp_path), "replies") == (1, 1))  # what was answered is known
    second = Runtime(app, store=tmp_path)  # the first one has not been closed: there is something to replay
    with pytest.raises(NotDeterministic, match=r"thing.tell of 'w'.*--accept-logged"):
        second.wait()
    second.close()
    with Runtime(app, store=tmp_path, accept_logged=True) as third:
        assert third.client.options(request_id="id").call(tell, "w") == given
        assert third.state(thing) == {"w": 1}
    first.close()
    with Runtime(app, store=tmp_path) as fourth:
        assert fourth.client.options(request_id="id").call(tell, "w") == given


# --- digests ----------------------------------------------------------------------------------------------------------


@given(program=PROGRAMS, size=st.sampled_from((1, 3, 100)))
@settings(max_examples=40, deadline=None)
def test_digests_do_not_depend_on_the_number_of_workers(program: Program, size: int) -> None:
    calls = program.calls()
    found = []
    for workers in (2, 3):
        store = memory()
        Hand(store, programs_app, workers, seed=program.seed, epoch_transactions_max=size).run("all", calls)
        found.append(digests(store))
        Hand(store, programs_app).settle()  # one process compares them with its own
    assert found[0] == found[1]
    assert all(each is not None and each.startswith(NET) for each in found[0])


@given(program=PROGRAMS)
@settings(max_examples=25, deadline=None)
def test_the_digest_of_several_workers_is_that_of_a_loop(program: Program) -> None:
    calls = program.calls()
    store = memory()
    hand = Hand(store, programs_app, 2, epoch_transactions_max=1)
    state: dict[Any, Any] = {}
    expected = []
    serial = Driver(programs_app)
    seal = serial.program.values.seal
    for at, call in enumerate(calls):
        serial.call_at(at * 1_000_000, f"call{at}", *call)
        now = {entity: seal(value) for entity, value in serial.state().items()}
        changes: dict[str, OperatorChanges] = {}
        for operator, key in {*state, *now}:
            columns = changes.setdefault(operator, OperatorChanges([], [], []))
            for column, states in zip(columns, ({(operator, key): key}, state, now), strict=True):
                column.append(states.get((operator, key), MISSING))
        expected.append(net_digest([net_sum(changes)]))
        state = now
    hand.run("all", calls)
    assert digests(store) == expected


@given(program=PROGRAMS)
@settings(max_examples=40, deadline=None)
def test_digests_do_not_depend_on_the_way_a_row_runs(program: Program) -> None:
    calls, found = program.calls(), []
    for backend in (LocalBackend, partial(LocalBackend, executor=Alternating)):
        driver, taken = Driver(programs_app, backend=backend, has_digests=True), []
        for at, call in enumerate(calls):
            driver.call_at(at * 1_000_000, f"call{at}", *call)
            taken.append(driver.core.last.digest)
        found.append(taken)
    assert found[0] == found[1]
    assert None not in found[0]


@pytest.mark.parametrize("value", [1.5, float("nan"), 0.0, -0.0, float("inf"), 10.0**9])
def test_digests_do_not_depend_on_which_object_holds_a_value(value: float) -> None:
    """In the first life, the state after the snapshot is the very object that is put again; in the second it is not."""
    store = memory()
    hand = Hand(store, app)
    calls: list[Any] = [(write_constant, "a"), (write_given, "b", value), (write_given, "c", 0.0)]
    hand.run("before", calls)
    hand.take_snapshot()
    hand.run("after", [*calls, (write_given, "c", value), (add, "d", 1), (add, "d", 0), (add, "d", 10**12)])
    state = exactly(hand.state())
    assert exactly(Hand(store, app).state()) == state
    assert len(set(digests(store))) == 2


@given(program=PROGRAMS, seed=st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_a_replay_from_a_snapshot_gives_the_same_digests(program: Program, seed: int) -> None:
    calls, rng, store = program.calls(), random.Random(seed), memory()
    cut = rng.randint(0, len(calls))
    hand = Hand(store, programs_app, epoch_transactions_max=rng.choice((1, 2, 50)))
    hand.run("first", calls[:cut])
    hand.take_snapshot()
    replies = hand.run("rest", calls[cut:])
    again = Hand(store, programs_app)  # which compares
    assert list(map(outcome, again.run("rest", calls[cut:]))) == list(map(outcome, replies))


def test_the_digest_differs_if_any_write_does() -> None:
    found = set()
    runs: list[list[Any]] = [
        [(add, "a", 1), (add, "b", 2)],
        [(add, "a", 2), (add, "b", 1)],
        [(add, "b", 1), (add, "a", 2)],
        [(add, "a", 1)],
        [(add, "a", 0)],
        [(add, "a", 1), (add, "a", 1)],
        [(add, "a", 2)],
        [(write_given, "a", 1.0)],
    ]
    for calls in runs:
        store = memory()
        Hand(store, app).run("all", calls)
        found.add(digests(store)[0])
    assert len(found) == len(runs)
