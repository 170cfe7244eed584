"""Time and chance in functions: the same in every mode, with any number of workers, whenever it is run again."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App, Context
from headrace.core import order
from headrace.model.chance import Chance, is_id
from headrace.sim.oracle import path
from tests.outside import SECOND, World

# --- paths ------------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(1, 6) | st.sampled_from([0xEF, 0xF0, 0xFF, 0x100, 10_000])


@given(st.lists(st.tuples(NUMBERS, st.booleans(), NUMBERS), max_size=6))
def test_a_path_is_a_place_without_the_workers(hops: list[tuple[int, bool, int]]) -> None:
    place = way = order.ROOT
    for n, is_one_way, worker in hops:
        place = order.sent(place, n, worker) if is_one_way else order.awaited(place, n, worker)
        way = order.path_sent(way, n) if is_one_way else order.path_awaited(way, n)
    assert order.path_of(place) == way == path(tuple((n, is_one_way) for n, is_one_way, _ in hops))


# --- time and chance --------------------------------------------------------------------------------------------------

drawing = App("drawing")
thing = drawing.operator("thing")
runs: list[str] = []


@thing.register
def when(ctx: Context) -> datetime.datetime:
    return ctx.now


@thing.register
def draw(ctx: Context, count: int) -> list[float]:
    runs.append("draw")
    return [ctx.random.random() for _ in range(count)]


@thing.register
async def draw_around(ctx: Context, other: str) -> list[Any]:
    """Before and after an await: one sequence."""
    first = ctx.random.random()
    inner = await ctx.call(draw, other, 1)
    return [first, inner[0], ctx.random.random(), str(ctx.uuid()), str(ctx.uuid())]


@thing.register
async def count_in_order(ctx: Context, others: list[str]) -> list[float]:
    return [(await ctx.call(draw, other, 1))[0] for other in others]


@thing.register
def stubborn(ctx: Context) -> list[Any]:
    """Catches whatever it can."""
    caught = 0
    drawn = None
    for _ in range(3):
        try:
            drawn = ctx.random.random()
        except BaseException:
            caught += 1
    ctx.put(caught)
    return [caught, drawn]


@thing.register
def plain(ctx: Context) -> int:
    ctx.put(ctx.get(0) + 1)
    return ctx.get(0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_now_is_the_time_of_the_epoch_in_utc(workers: int) -> None:
    world = World(drawing, workers)
    world.until(5 * SECOND + 250)
    replies = world.run((when, "a"), (when, "b"), (when, "c"))
    at = datetime.datetime(1970, 1, 1, 0, 0, 5, 250, tzinfo=datetime.UTC)
    assert [reply.unwrap() for reply in replies] == [at] * 3


def everywhere(calls: list[Any]) -> list[Any]:
    """What the calls give, which is the same in every mode and with any number of workers."""
    given = []
    for workers in range(6):
        for mode in ("auto", "ordered") if workers else ("auto",):
            world = World(drawing, workers, mode, seed=workers)
            given.append([reply.unwrap() for reply in world.run(*calls)])
            world.check()
    assert all(each == given[0] for each in given)
    return given[0]


def test_random_numbers_are_the_same_in_every_mode_and_others_in_every_call() -> None:
    drawn = everywhere([(draw, key, 3) for key in "aabb"])
    assert len({number for numbers in drawn for number in numbers}) == 12


def test_a_call_goes_on_with_its_numbers_after_an_await() -> None:
    ((first, inner, second, one, other),) = everywhere([(draw_around, "a", "b")])
    ((alone, *_), *_) = everywhere([(draw, "a", 2)])
    assert first == alone, "the root's path is that of any root"
    assert len({first, inner, second}) == 3
    assert [uuid.UUID(each).version for each in (one, other)] == [4, 4]
    assert one != other


def test_calls_have_paths_by_their_numbers() -> None:
    (numbers,) = everywhere([(count_in_order, "a", list("bcdbcd") * 50)])
    assert len(set(numbers)) == 300


def test_other_seeds_and_other_tids_draw_other_numbers() -> None:
    def first(seed: int, tid: int) -> float:
        return Chance(seed, tid, order.ROOT).random.random()

    assert len({first(seed, tid) for seed in range(3) for tid in (1, 2)}) == 6
    assert Chance(1, 2, b"\x01").random.random() == Chance(1, 2, b"\x01").random.random()


def test_a_transaction_that_needs_its_path_is_undone_and_the_next_one_goes_there_directly() -> None:
    world = World(drawing)
    runs.clear()
    world.run((draw, "a", 1))
    assert len(runs) == 2, "it was begun without a path, and run again with it"
    world.run((draw, "a", 1), (plain, "a"), (draw, "b", 1))
    assert len(runs) == 4
    assert world.state() == {("thing", "a"): 1}
    world.check()


def test_who_catches_everything_draws_the_same() -> None:
    assert [caught for caught, _ in everywhere([(stubborn, "a"), (stubborn, "a")])] == [0, 0]


def test_an_id_is_an_id() -> None:
    chance = Chance(0, 12, order.ROOT)
    ids = [chance.id("later"), chance.id("later"), chance.id("external")]
    assert len(set(ids)) == 3
    assert all(map(is_id, ids))
    assert not any(map(is_id, ("", "12", "0-" + "a" * 32, ids[0] + "0", ids[0].upper().replace("1", "G"), 5, None)))
