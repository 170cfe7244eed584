"""A replay gives the same bytes: under other limits, with other epochs, on other workers, in another mode; or it stops.
And what other code may start from."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Context
from headrace.errors import NotDeterministic, RequestIdReused
from tests.cluster import exactly, outcome, serially
from tests.durability.hand import MACHINE, Hand, add, after_power_loss, app, ask, drop, memory, move, turned
from tests.durability.hand import weather as ask_weather

# --- other limits, epochs, workers, modes -----------------------------------------------------------------------------

limited = App("limited")
thing = limited.operator("thing")


@thing.register
async def dig(ctx: Context, left: int) -> int:
    """So many calls, so deep."""
    ctx.put(left)
    return 1 + (await ctx.call(dig, f"{ctx.key}-", left - 1) if left else 0)


@thing.register
def fan(ctx: Context, count: int) -> None:
    for at in range(count):
        ctx.call_async(fan, f"{ctx.key}{at}", 0)
    ctx.put(count)


@thing.register
def swell(ctx: Context, size: int) -> int:
    ctx.put("x" * size)
    return size


@thing.register
def nest(ctx: Context, depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    ctx.put(value)


@thing.register
def reach(ctx: Context, size: int) -> None:
    ctx.call_async(swell, "k" * size, 1)


LIMITED: list[Any] = [
    *((dig, f"dig{left}", left) for left in (1, 4, 7)),
    *((fan, f"fan{count}", count) for count in (1, 5, 9)),
    *((swell, f"swell{size}", size) for size in (1, 60, 500)),
    *((nest, f"nest{depth}", depth) for depth in (1, 5, 30)),
    *((reach, f"reach{size}", size) for size in (1, 20, 100)),
]
TIGHT = {"calls_max": 5, "depth_max": 5, "value_bytes_max": 64, "value_depth_max": 6, "key_bytes_max": 32}
TIGHTER = {"calls_max": 2, "depth_max": 2, "value_bytes_max": 48, "value_depth_max": 3, "key_bytes_max": 16}
WAYS = {
    "one process": (0, "auto"),
    "one worker": (1, "auto"),
    "one worker, ordered": (1, "ordered"),
    "three workers": (3, "auto"),
}


def asked_again(hand: Hand, ids: list[str]) -> list[Any]:
    """What the ledger has, without asking the gate: today's limits may not let the calls in."""
    hand.settle()
    found = []
    for request_id in ids:
        known = hand.core.ledger.find(request_id)
        assert known is not None, request_id
        epoch, row = known
        found.append((epoch.tids[row], epoch.number, epoch.results[row], epoch.failures.get(row)))
    return found


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", ["one process", "three workers"])
@pytest.mark.parametrize("limits", [{}, TIGHT, TIGHTER], ids=["wide", "tight", "tighter"])
def test_a_replay_under_other_limits_gives_the_same_bytes(before: str, after: str, limits: dict[str, int]) -> None:
    ids = [f"batch/{at}" for at in range(len(LIMITED))]
    expected, expected_state = serially(limited, LIMITED, **limits)
    store = memory()
    workers, mode = WAYS[before]
    hand = Hand(store, limited, workers, mode=mode, epoch_transactions_max=4, **limits)
    replies = hand.run("batch", LIMITED)
    assert list(map(outcome, replies)) == expected
    recorded = asked_again(hand, ids)
    for others in (TIGHTER, TIGHT, {}):
        workers, mode = WAYS[after]
        hand = Hand(after_power_loss(store), limited, workers, mode=mode, epoch_transactions_max=7, **others)
        assert asked_again(hand, ids) == recorded
        assert hand.state() == expected_state


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_is_replayed_under_the_limits_of_its_own_record(workers: int) -> None:
    store = memory()
    statuses = []
    for number, limits in enumerate([TIGHT, {}, TIGHTER, TIGHT]):
        hand = Hand(store, limited, workers, **limits)
        statuses.append(
            [reply.status for reply in hand.run(f"batch{number}", [(fan, f"{number}", 5), (dig, f"d{number}", 3)])]
        )
    assert statuses == [["ok", "ok"], ["ok", "ok"], ["aborted", "aborted"], ["ok", "ok"]]
    state = hand.state()
    hand = Hand(store, limited, 2 - workers, **TIGHTER)
    assert hand.state() == state
    assert [hand.core.ledger.find(f"batch{n}/0")[0].failures.keys() for n in range(4)] == [set(), set(), {0, 1}, set()]


CALLS: list[Any] = [
    *((add, key, at) for at, key in enumerate("abcabcab")),
    (move, "a", "b", 3),
    (move, "b", "c", 500),
    (ask, "c", "a"),
    (drop, "b"),
    (move, "a", "b", 1),
    *((ask, key, "d") for key in "abcd"),
]


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_a_store_moves_between_one_process_and_any_number_of_workers(
    before: str, after: str, with_snapshot: bool
) -> None:
    expected, expected_state = serially(app, CALLS)
    store = memory()
    workers, mode = WAYS[before]
    hand = Hand(store, app, workers, mode=mode, seed=1, epoch_transactions_max=3)
    replies = hand.run("first", CALLS[:9])
    if with_snapshot:
        hand.take_snapshot()
    replies += hand.run("then", CALLS[9:])
    assert list(map(outcome, replies)) == expected
    workers, mode = WAYS[after]
    for size in (1, 100):
        hand = Hand(store, app, workers, mode=mode, seed=2, epoch_transactions_max=size)
        assert hand.run("then", CALLS[9:]) + hand.run("first", CALLS[:9]) != []
        assert hand.run("first", CALLS[:9]) + hand.run("then", CALLS[9:]) == replies
        assert hand.state() == expected_state


# --- functions that are not deterministic -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_gives_something_else_stops_the_recovery_and_is_named(workers: int) -> None:
    store = memory()
    Hand(store, app, workers).run("all", [(add, "a", 1), (ask_weather, "w"), (add, "a", 1)])
    with turned("rainy"), pytest.raises(NotDeterministic, match=r"TID 2 \(item.weather of 'w'\).*fine.*rainy"):
        Hand(store, app, workers).settle()
    hand = Hand(store, app, workers)
    assert hand.state() == {("item", "a"): 2, ("item", "w"): "fine"}, "nothing is spoiled by it"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("calls_max", [10_000, 9_000], ids=["same limits", "other limits"])
def test_nobody_is_answered_by_a_replay_that_differs(workers: int, calls_max: int) -> None:
    store = memory()
    (reply,) = Hand(store, app, workers).run("all", [(ask_weather, "w")])
    with turned("rainy"):
        hand = Hand(store, app, workers, calls_max=calls_max)
        with pytest.raises(NotDeterministic):
            hand.run("all", [(ask_weather, "w")])
        assert all(replies == [reply] for replies in hand.replies.values())


@pytest.mark.parametrize("change", [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), (None, False), ((1,), [1])], ids=repr)
def test_another_type_is_another_result(change: tuple[Any, Any]) -> None:
    store = memory()
    with turned(change[0]):
        Hand(store, untyped).run("all", [(show, "w")])
    with turned(change[1]), pytest.raises(NotDeterministic, match=r"plain.show"):
        Hand(store, untyped).settle()
    with turned(change[0]):
        Hand(store, untyped).settle()


def test_an_abort_that_would_be_a_success_is_another_result_and_the_reverse() -> None:
    for first, then in (("storm", "fine"), ("fine", "storm")):
        store = memory()
        with turned(first):
            Hand(store, untyped).run("all", [(show, "w")])
        with turned(then), pytest.raises(NotDeterministic, match=r"plain.show of 'w'.*storm"):
            Hand(store, untyped).settle()


def test_a_failure_whose_message_differs_each_time_is_answered_with_its_first_message() -> None:
    store = memory()
    replies = Hand(store, untyped).run("all", [(fail_with_address, "w")])
    kept = [object() for _ in range(100)]
    for _ in range(2):
        assert Hand(store, untyped).run("all", [(fail_with_address, "w")]) == replies
    assert len(kept) == 100


# --- typed values -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: Any = None


untyped = App("untyped")
plain = untyped.operator("plain")
pointed = App("pointed")
spot = pointed.operator("spot", state=Any)


@plain.register
def show(ctx: Context) -> Any:
    if MACHINE["weather"] == "storm":
        raise Abort("storm")
    return MACHINE["weather"]


@plain.register
def fail_with_address(ctx: Context) -> None:
    raise ValueError(object())


@spot.register
def keep(ctx: Context, value: Any) -> Any:
    ctx.put(value)
    return value


@spot.register
def keep_point(ctx: Context, value: Point) -> Point:
    ctx.put(value)
    return value


@spot.register
def keep_two(ctx: Context, one: Any, other: Any = None) -> tuple[Any, Any]:
    ctx.put((one, other))
    return one, other


@spot.register
def remove(ctx: Context) -> None:
    ctx.delete()


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 5e-324,
    "", "1", "ü😀", "\x00", "x" * 500, b"", b"\xc1", b"\xc0", b"1", bytes(range(256)),
    (), (1,), [1], [(1, 2), [3, (4,)]], {}, {"a": (1,)}, {1: "int key"}, {"1": "text key"},
    decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("NaN"),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))),
    datetime.date(1, 1, 1), uuid.UUID(int=7), (Any, None)[1], [None, (None,)], Point(1, (2, Point(3))),
]  # fmt: skip
TWINS: list[Any] = ["1", 1, b"1", "", b"", 0, -1, "-1", (1 << 63) - 1, -(1 << 63), b"\xc1", "ü"]  # keys


def typed_calls() -> list[Any]:
    calls: list[Any] = [(keep, f"value{at}", value) for at, value in enumerate(VALUES)]
    calls += [(keep, key, at) for at, key in enumerate(TWINS)]
    calls += [(keep_point, "point", Point(1, [(2,)])), (keep_two, "two", 1), (keep_two, "two more", (1,), b"2")]
    calls += [
        (keep, "gone", 1),
        (remove, "gone"),
        (remove, "never"),
        (keep, "back", 1),
        (remove, "back"),
        (keep, "back", 2),
    ]
    return calls


@pytest.mark.parametrize("way", ["log", "snapshot", "two snapshots", "other limits"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_values_of_all_types_come_back_exactly(way: str, workers: int, size: int) -> None:
    """State, replies, and arguments: a request id asked again with the same call finds its reply."""
    calls = typed_calls()
    expected = serially(pointed, calls)
    store = memory(can_append=workers == 0)
    hand = Hand(store, pointed, workers, epoch_transactions_max=size)
    replies = hand.run("first", calls[:40])
    if way == "two snapshots":
        hand.take_snapshot()
    replies += hand.run("then", calls[40:])
    if "snapshot" in way:
        hand.take_snapshot()
    assert list(map(repr, map(outcome, replies))) == list(map(repr, expected[0]))
    again = Hand(store, pointed, workers, calls_max=9_999 if way == "other limits" else 10_000)
    assert exactly(again.state()) == exactly(expected[1])
    repeated = again.run("first", calls[:40]) + again.run("then", calls[40:])
    assert list(map(repr, repeated)) == list(map(repr, replies))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.decimals(),
    st.dates(),
    st.datetimes(),
    st.uuids(),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
ALL_KEYS = st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers(-(1 << 63), (1 << 63) - 1))


@settings(max_examples=25)
@given(st.lists(st.tuples(ALL_KEYS, ANYTHING), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_whatever_is_put_is_there_after_a_restart(
    rows: list[tuple[Any, Any]], with_snapshot: bool, can_append: bool
) -> None:
    calls: list[Any] = [(keep, key, value) for key, value in rows]
    store = memory(can_append)
    hand = Hand(store, pointed, epoch_transactions_max=3)
    replies, state = hand.run("all", calls), hand.state()
    assert exactly(state) == exactly(serially(pointed, calls)[1])
    if with_snapshot:
        hand.take_snapshot()
    hand = Hand(store, pointed)
    assert list(map(repr, hand.run("all", calls))) == list(map(repr, replies))
    assert exactly(hand.state()) == exactly(state)


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize(
    "others", [(1, True), (1, 1.0), ("1", b"1"), ((1,), [1]), (0.0, -0.0), (None, False)], ids=repr
)
def test_a_request_id_with_an_argument_of_another_type_is_refused_after_a_restart_too(
    others: tuple[Any, Any], with_snapshot: bool
) -> None:
    store = memory()
    hand = Hand(store, pointed)
    (reply,) = hand.run(["id"], [(keep, "a", others[0])])
    if with_snapshot:
        hand.take_snapshot()
    hand = Hand(store, pointed)
    (again,) = hand.run(["id"], [(keep, "a", others[0])])
    assert repr(again) == repr(reply)
    for call in [(keep, "a", others[1]), (keep, "b", others[0]), (keep_two, "a", others[0])]:
        (refused,) = hand.run(["id"], [call])
        assert refused.failure is not None
        assert refused.failure.code == RequestIdReused.code
    assert hand.run(["nan"], [(keep, "n", math.nan)])[0].tid == hand.run(["nan"], [(keep, "n", math.nan)])[0].tid
