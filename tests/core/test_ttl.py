"""State with a time to live: gone by the log's time, for functions and for whoever reads it, and then deleted."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App, Context
from headrace.core.events import Read, TakeSnapshot
from headrace.core.later.deferred import ExpiryQueue
from headrace.errors import BadValue, ModelError
from headrace.model.operator import Operator
from headrace.wire.values import MISSING, WRAP_BYTES, Values, is_wrapped, wrap, written_us
from tests.durability.hand import Hand, after_power_loss, memory
from tests.outside import MOMENT, SECOND, World

visits = App("visits")
session = visits.operator("session", ttl=10, combine=lambda state, delta: state + delta)
forever = visits.operator("forever")


@session.register
def visit(ctx: Context) -> int:
    ctx.put(ctx.get(0) + 1)
    return ctx.get(0)


@session.register
def look(ctx: Context) -> Any:
    return ctx.get("nobody")


@session.register
def add(ctx: Context, amount: Any) -> None:
    ctx.merge(amount)


@session.register
def leave(ctx: Context) -> None:
    ctx.delete()


@session.register
def store(ctx: Context, value: Any) -> Any:
    ctx.put(value)
    return ctx.get("nothing")


@forever.register
def count(ctx: Context, who: str) -> int:
    ctx.put(ctx.get(0) + 1)
    ctx.call_async(visit, who)
    return ctx.get(0)


WORKERS = [0, 1, 3]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_entity_is_gone_so_long_after_its_last_write(workers: int) -> None:
    world = World(visits, workers)
    world.send([(visit, "a"), (visit, "b")])
    world.until(6 * SECOND)
    assert world.call(visit, "a") == 2  # which writes it anew
    world.until(10 * SECOND - 1)
    world.until(12 * SECOND)
    assert [reply.unwrap() for reply in world.run((look, "a"), (look, "b"))] == [2, "nobody"]
    assert world.state() == {("session", "a"): 2}
    world.until(20 * SECOND)
    assert world.state() == {}
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("later_us", "seen"), [(10 * SECOND - 1, 1), (10 * SECOND, "nobody")])
def test_it_is_gone_at_the_very_microsecond(later_us: int, seen: Any, workers: int) -> None:
    world = World(visits, workers, epoch_interval_us=1)
    world.send([(visit, "a")])
    world.until(5)
    world.core.deferred.expiring["session"].queue.clear()  # nobody deletes it
    at_us = world.epochs[0].closed_us + later_us
    world.until(at_us - 1)
    world.send([(look, "a")])
    world.until(at_us + MOMENT)
    assert (world.epochs[-1].closed_us, world.epochs[-1].results) == (at_us, [seen])


@pytest.mark.parametrize("workers", WORKERS)
def test_a_merge_into_what_has_expired_starts_anew(workers: int) -> None:
    world = World(visits, workers)
    world.core.deferred.expiring["session"].note = lambda key, written: None  # nobody deletes it
    for amount, seen, at_s in ((1, 1, 0), (2, 3, 9), (4, 7, 18), (8, 8, 29)):
        world.until(at_s * SECOND)
        world.send([(add, "a", amount)])
        world.until(world.now_us + SECOND // 2)
        assert world.state() == {("session", "a"): seen}


@pytest.mark.parametrize("workers", WORKERS)
def test_whoever_reads_the_state_does_not_see_what_has_expired(workers: int) -> None:
    world = World(visits, workers)
    world.core.deferred.expiring["session"].note = lambda key, written: None  # nobody deletes it
    world.send([(visit, "a")])
    world.until(SECOND)
    assert len(world.state()) == 1
    world.until(15 * SECOND)
    world.run((count, "c", "d"))  # the log's time goes on
    assert set(world.state()) == {("forever", "c"), ("session", "d")}
    world.submit(Read("one", "session", "a"))
    world.until(16 * SECOND)
    assert world.found["one"] == {}


@pytest.mark.parametrize("workers", WORKERS)
def test_what_has_expired_is_deleted_by_rows_of_the_log(workers: int) -> None:
    world = World(visits, workers)
    world.send([(visit, f"k{n}") for n in range(20)])
    world.send([(leave, f"k{n}") for n in range(5)])
    world.until(8 * SECOND)
    world.send([(visit, f"k{n}") for n in range(10, 15)])
    world.until(11 * SECOND)
    rows = [(entry.name, key) for epoch in world.epochs for entry, key in zip(epoch.entries, epoch.keys, strict=True)]
    swept = [key for name, key in rows if name == "session.headrace_expire"]
    assert sorted(swept) == sorted(f"k{n}" for n in [*range(5, 10), *range(15, 20)])
    world.until(60 * SECOND)
    assert world.state() == {}
    assert not world.core.deferred.expiring["session"].last
    world.check()


def finish(hand: Hand) -> None:
    """All that needs no time."""
    hand.compute()
    while hand.sync() or hand.work():
        hand.compute()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("snapshot", [False, True])
def test_the_next_engine_goes_on_with_what_is_left_of_the_time(snapshot: bool, workers: int) -> None:
    disk = memory()
    hand = Hand(disk, visits, workers, snapshot_interval_us=1 << 60)
    hand.send("a", [(visit, "a"), (store, "b", [None, (1, 2)])])
    finish(hand)
    if snapshot:
        hand.submit(TakeSnapshot("now"))
        finish(hand)
        assert hand.snapshots
    for later_s, left in ((4, 2), (9, 2), (40, 0)):
        hand = Hand(after_power_loss(disk), visits, workers, now_us=later_s * SECOND, snapshot_interval_us=1 << 60)
        finish(hand)
        hand.submit(Read("state"))
        finish(hand)
        assert len(hand.found.pop("state")) == left


# --- values -----------------------------------------------------------------------------------------------------------

SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1 << 63,
    1.0,
    -0.0,
    float("nan"),
    "",
    "é",
    b"",
    b"a",
    [],
    (1,),
    {"a": [1]},
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_with_a_time_to_live_keeps_its_type(value: Any, workers: int) -> None:
    world = World(visits, workers)
    assert repr(world.call(store, "a", value)) == repr(value)
    assert repr(world.state()["session", "a"]) == repr(value)
    assert repr(world.call(look, "a")) == repr(value)


def test_a_value_as_large_as_the_limit_can_have_a_time_to_live() -> None:
    world = World(visits, value_bytes_max=100)
    assert world.call(store, "a", "x" * 90) == world.call(look, "a")
    assert world.state()["session", "a"] == "x" * 90
    (reply,) = world.run((store, "a", "x" * 101))
    assert reply.failure is not None
    assert reply.failure.code == "too_large"


@given(st.integers(0, (1 << 63) - 1), st.sampled_from(SCALARS))
def test_a_wrapped_value_is_msgpack_that_no_user_can_make(at_us: int, value: Any) -> None:
    values = Values()
    sealed = values.seal(value)
    wrapped = wrap(sealed, at_us)
    assert is_wrapped(wrapped)
    assert written_us(wrapped) == at_us
    assert repr(values.unseal(wrapped)) == repr(value)
    assert len(wrapped) > WRAP_BYTES
    assert not is_wrapped(sealed)
    assert not is_wrapped(values.encode([value]))
    assert not is_wrapped(MISSING)
    with pytest.raises(BadValue):
        values.decode(wrapped)


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_queue_gives_each_entity_once_and_after_its_last_write() -> None:
    rng = random.Random(5)
    for _ in range(200):
        queue, now = ExpiryQueue(Operator("brief", ttl=datetime.timedelta(microseconds=20))), 0
        last: dict[Any, int] = {}
        due: list[Any] = []
        for _ in range(rng.randrange(60)):
            now += rng.choice((0, 1, 5, 30))
            key = rng.randrange(5)
            if rng.random() < 0.2:
                last.pop(key, None)
                queue.note(key, MISSING)
            else:
                last[key] = now
                queue.note(key, now)
            for _, gone, _ in queue.due(now, rng.randrange(3)):
                assert last.pop(gone) + 20 <= now
                queue.note(gone, MISSING)
                due.append(gone)
        again = ExpiryQueue(Operator("brief", ttl=datetime.timedelta(microseconds=20)))
        again.restore((written, key) for key, written in last.items())
        for each in (queue, again):
            assert each.next_due_us() == (min(last.values()) + 20 if last else None)
            assert {key for _, key, _ in each.due(now + 100, 100)} == set(last)


@pytest.mark.parametrize("ttl", [0, -1, "long", float("nan"), datetime.timedelta(0), True, [1]])
def test_a_time_to_live_is_checked_when_the_operator_is_made(ttl: Any) -> None:
    with pytest.raises(ModelError, match=r"operator brief"):
        App("checks").operator("brief", ttl=ttl)


def test_a_migration_is_kept_with_the_operator() -> None:
    def migrate(state: Any) -> Any:
        return state

    assert App("checks").operator("a", migrate=migrate).migrate is migrate
    with pytest.raises(ModelError, match="migrate is 5"):
        App("checks").operator("a", migrate=5)  # type: ignore[arg-type]
