"""Timers and schedules: durable, once, in the order of the log, and cancellable."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Context
from headrace.core.events import Tick
from headrace.core.later.deferred import Deferred
from headrace.errors import ModelError
from headrace.model import cron
from headrace.model.cron import DAY_US, MINUTE_US, Cron, Interval
from tests.durability.hand import Hand, after_power_loss, memory
from tests.outside import SECOND, World
from tests.programs import MANY

clocks = App("clocks")
bell = clocks.operator("bell")


@bell.register
def ring(ctx: Context, text: str) -> None:
    ctx.put([*ctx.get([]), f"{text} at {ctx.now.timestamp():g}"])


@bell.register
def ring_and_fail(ctx: Context, text: str) -> None:
    ctx.call_async(ring, ctx.key, text)
    raise Abort("out of order")


@bell.register
def set_bell(ctx: Context, delay: Any, to: str, text: str) -> str:
    return ctx.call_later(delay, ring, to, text)


@bell.register
def set_and_abort(ctx: Context, to: str) -> None:
    ctx.call_later(1, ring, to, "never")
    raise Abort("not after all")


@bell.register
def set_failing(ctx: Context, to: str) -> str:
    return ctx.call_later(1, ring_and_fail, to, "once")


@bell.register
def stop_bell(ctx: Context, timer: Any) -> None:
    ctx.cancel(timer)


@bell.register
def set_and_stop(ctx: Context, to: str) -> None:
    ctx.cancel(ctx.call_later(1, ring, to, "never"))


@bell.register
def repeat(ctx: Context, times: int) -> None:
    """A timer that sets the next one."""
    ctx.put(ctx.get(0) + 1)
    if times > 1:
        ctx.call_later(1, repeat, ctx.key, times - 1)


@bell.register
def set_wrongly(ctx: Context, how: str) -> None:
    if how == "negative":
        ctx.call_later(-1, ring, "a", "text")
    elif how == "negative timedelta":
        ctx.call_later(datetime.timedelta(seconds=-1), ring, "a", "text")
    elif how == "no time":
        ctx.call_later("soon", ring, "a", "text")  # type: ignore[arg-type]
    elif how == "not a number":
        ctx.call_later(float("nan"), ring, "a", "text")
    elif how == "for ever":
        ctx.call_later(datetime.timedelta.max, ring, "a", "text")
    elif how == "true":
        ctx.call_later(True, ring, "a", "text")
    elif how == "unknown":
        ctx.call_later(1, "bell.ting", "a")
    elif how == "arguments":
        ctx.call_later(1, ring, "a", 5)
    elif how == "key":
        ctx.call_later(1, ring, 1.5, "text")
    elif how == "value":
        ctx.call_later(1, "bell.ring", "a", {1})


WRONG = {
    "negative": ("BadCall", "no negative time"),
    "negative timedelta": ("BadCall", "no negative time"),
    "no time": ("BadCall", "call_later takes a timedelta or seconds, not 'soon'"),
    "not a number": ("BadCall", "call_later takes a timedelta or seconds, not nan"),
    "for ever": ("BadCall", "at most 1000000000000 seconds"),
    "true": ("BadCall", "not a bool"),
    "unknown": ("UnknownFunction", "no function 'ting'"),
    "arguments": ("BadArguments", "'text': wanted str, found 5 (int)"),
    "key": ("BadKey", "not 1.5"),
    "value": ("BadArguments", "a set"),
}
WORKERS = [0, 1, 2, 4]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", WRONG)
def test_what_could_not_be_called_later_is_refused_now(how: str, workers: int) -> None:
    (reply,) = World(clocks, workers).run((set_wrongly, "k", how))
    assert reply.failure is not None
    assert reply.failure.type == WRONG[how][0]
    assert WRONG[how][1] in reply.failure.message


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("timer", ["", "soon", "1-2", 5, None, "0-" + "a" * 32])
def test_only_what_call_later_returned_can_be_cancelled(timer: Any, workers: int) -> None:
    (reply,) = World(clocks, workers).run((stop_bell, "k", timer))
    assert reply.failure is not None
    assert (reply.failure.type, "cancel takes what" in reply.failure.message) == ("BadCall", True)


@pytest.mark.parametrize("workers", WORKERS)
def test_timers_fire_when_they_are_due_and_not_before(workers: int) -> None:
    world = World(clocks, workers)
    world.send([(set_bell, "k", delay, "a", f"{delay}") for delay in (3, 1, 0.5, 0)])
    world.send([(set_bell, "k", 2, "a", "two")])
    world.until(SECOND // 2)
    assert world.state()["bell", "a"] == ["0 at 0", "0.5 at 0.5"]
    world.until(5 * SECOND)
    assert world.state() == {("bell", "a"): ["0 at 0", "0.5 at 0.5", "1 at 1", "two at 2", "3 at 3"]}
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_timer_of_a_transaction_that_aborts_was_never_set(workers: int) -> None:
    world = World(clocks, workers)
    world.send([(set_and_abort, "k", "a"), (set_and_stop, "k", "a")])
    world.until(3 * SECOND)
    assert world.state() == {}
    assert len(world.epochs) == 1
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_cancelled_timer_does_not_fire(workers: int) -> None:
    world = World(clocks, workers)
    first, second = (reply.unwrap() for reply in world.run(*[(set_bell, key, 2, "a", key) for key in "xy"]))
    world.until(max(world.now_us, SECOND))
    assert first != second
    world.send([(stop_bell, "k", first), (stop_bell, "k", "1-" + "0" * 32)])
    world.until(9 * SECOND)
    assert [text.split()[0] for text in world.state()["bell", "a"]] == ["y"]
    world.call(stop_bell, "k", second)  # too late
    assert len(world.state()) == 1
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_timer_that_is_due_before_its_cancellation_has_run_does_nothing(workers: int) -> None:
    world = World(clocks, workers, epoch_interval_us=100)
    timer = world.run((set_bell, "k", 1, "a", "text"))[0].unwrap()
    world.until(world.epochs[0].closed_us + SECOND - 50)
    world.send([(stop_bell, "k", timer)])
    world.until(2 * SECOND)
    rows = [entry.name for epoch in world.epochs for entry in epoch.entries]
    assert rows == ["bell.set_bell", "bell.stop_bell", "headrace.fire"]
    assert world.epochs[-1].results[-1] is False
    assert world.state() == {}
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_timer_whose_transaction_aborts_is_not_tried_again(workers: int) -> None:
    world = World(clocks, workers)
    world.run((set_failing, "k", "a"))
    world.until(20 * SECOND)
    rows = [entry.name for epoch in world.epochs for entry in epoch.entries]
    assert rows == ["bell.set_failing", "headrace.fire", "headrace.drop"]
    (failure,) = world.epochs[1].failures.values()
    assert (failure.type, failure.function, failure.key) == ("Abort", "bell.ring_and_fail", "a")
    assert world.state() == {}
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_timer_can_set_the_next_one(workers: int) -> None:
    world = World(clocks, workers)
    world.send([(repeat, "a", 5)])
    world.until(3 * SECOND + 1)
    assert world.state()["bell", "a"] == 4
    world.until(9 * SECOND)
    assert world.state() == {("bell", "a"): 5}
    world.check()


# --- calls that come when a timer is due ------------------------------------------------------------------------------


def rows_of(epochs: Any) -> list[tuple[str, int]]:
    """The functions in the log, with their times."""
    return [(entry.name, epoch.closed_us) for epoch in epochs for entry in epoch.entries]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_timer_that_is_due_runs_before_calls_with_a_later_time(workers: int) -> None:
    world = World(clocks, workers)
    world.run(*[(set_bell, "k", delay, "a", "timer") for delay in (2, 1)])
    world.now_us = 5 * SECOND  # nobody has looked at the clock meanwhile
    world.run((ring, "a", "call"))
    assert [text.split()[0] for text in world.state()["bell", "a"]] == ["timer", "timer", "call"]
    world.check()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_call_that_waits_in_an_epoch_is_logged_before_a_timer_or_not_later(workers: int) -> None:
    """The epoch is open for ten seconds, and a timer is due in the middle of it."""
    world = World(clocks, workers, epoch_interval_us=10 * SECOND)
    world.run((set_bell, "k", 5, "a", "timer"))
    begin_us = world.epochs[0].closed_us
    world.send([(ring, "a", "first")])
    world.until(begin_us + 7 * SECOND)
    world.send([(ring, "a", "second")])
    world.until(begin_us + 40 * SECOND)
    rows = rows_of(world.epochs)[1:]
    assert [name for name, _ in rows] == ["bell.ring", "headrace.fire", "bell.ring"]
    (_, first_us), (_, timer_us), (_, second_us) = rows
    assert first_us <= begin_us + 5 * SECOND <= timer_us <= second_us
    world.check()


def test_more_timers_than_fit_into_one_batch_run_before_a_call_with_a_later_time() -> None:
    world = World(clocks)
    world.send([(set_bell, "k", 1, "a", "timer") for _ in range(1_200)])
    world.happen()
    world.now_us = 5 * SECOND
    world.run((ring, "a", "call"))
    assert [text.split()[0] for text in world.state()["bell", "a"]] == ["timer"] * 1_200 + ["call"]


def test_timers_and_schedules_that_are_due_run_in_the_order_of_their_times() -> None:
    app = App("both")
    log = app.operator("log")

    @log.register
    def note(ctx: Context, text: str) -> None:
        ctx.put([*ctx.get([]), text])

    @log.register
    def later(ctx: Context, delay: float, text: str) -> None:
        ctx.call_later(delay, note, "all", text)

    app.every(30, note, "all", "schedule at 30")
    world = World(app)
    world.until(SECOND)
    world.run((later, "k", 50, "timer at 51"), (later, "k", 10, "timer at 11"))
    world.now_us = 55 * SECOND
    world.until(55 * SECOND)
    assert world.state()["log", "all"] == ["timer at 11", "schedule at 30", "timer at 51"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("snapshot", [False, True])
def test_after_a_restart_a_timer_that_was_due_runs_before_new_calls(snapshot: bool, workers: int) -> None:
    """Also if only a replay of the log shows that there is a timer, and calls come before it has begun."""
    store = memory()
    hand = Hand(store, clocks, workers)
    hand.send("a", [(set_bell, "k", 30, "a", "timer")])
    hand.settle()
    if snapshot:
        assert hand.take_snapshot() is not None
    hand = Hand(after_power_loss(store), clocks, workers, now_us=60 * SECOND)
    hand.send("b", [(ring, "a", "call")])
    hand.settle()
    assert hand.state() == {("bell", "a"): ["timer at 60", "call at 60"]}


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_timer_outlives_the_engine(snapshot: bool, workers: int) -> None:
    store = memory()
    hand = Hand(store, clocks, workers)
    hand.send("a", [(set_bell, "k", 30, "a", "text")])
    hand.settle()
    if snapshot:
        assert hand.take_snapshot() is not None
    hand = Hand(after_power_loss(store), clocks, 2 - workers, now_us=60 * SECOND)
    hand.settle()
    assert hand.state() == {("bell", "a"): ["text at 60"]}


def test_what_aborted_when_it_fired_is_not_fired_again_by_the_next_engine() -> None:
    store = memory()
    hand = Hand(store, clocks, snapshot_interval_us=SECOND // 2)
    hand.run("a", [(set_failing, "k", "a")])  # which lets ten seconds pass, with a snapshot before and one after
    assert hand.core.aborted == 1
    kept = []
    for manifest in hand.opened_store.snapshots.manifests():
        again = Hand(store, clocks)
        kept.append(manifest.epoch)
        assert (again.state(), again.core.aborted) == ({}, 1)
    assert kept


def test_a_snapshot_knows_what_has_fired_and_is_not_dropped_yet() -> None:
    hand = Hand(memory(), clocks, snapshot_interval_us=SECOND // 2)
    hand.send("a", [(set_failing, "k", "a")])
    saved = []
    for now_us in (0, 0, SECOND * 6 // 10, SECOND * 12 // 10, SECOND * 12 // 10):
        hand.now_us = now_us
        hand.submit(Tick())
        while hand.sync() or hand.work():
            if hand.core.journal.saving is not None:
                saved.append(hand.core.journal.saving)
            if hand.core.deferred.spent:
                break
    (spent,) = [snapshot.metadata.deferred for snapshot in saved if snapshot.epoch == 2][:1]
    assert len(spent.spent) == 1
    other = Deferred(hand.core.program)
    other.restore(spent, hand.core.state)
    due = other.due(hand.now_us)
    assert due is not None
    assert [entry.name for entry in due.batch.entries] == ["headrace.drop"]


# --- schedules --------------------------------------------------------------------------------------------------------


def scheduled() -> App:
    app = App("scheduled")
    log = app.operator("log")

    @log.register
    def note(ctx: Context, text: str) -> None:
        ctx.put([*ctx.get([]), f"{text} {ctx.now.timestamp():g}"])

    @log.register
    def fail(ctx: Context) -> None:
        raise Abort("never")

    app.options(name="by cron").every("*/2 * * * *", note, "cron", "tick")
    app.every(datetime.timedelta(seconds=45), note, "often", "tock")
    app.every(60, fail, "bad")
    return app


@pytest.mark.parametrize("workers", WORKERS)
def test_schedules_are_due_by_the_clock_and_go_on_after_an_abort(workers: int) -> None:
    world = World(scheduled(), workers)
    world.until(5 * 60 * SECOND)
    state = world.state()
    assert state["log", "cron"] == ["tick 120", "tick 240"]
    assert state["log", "often"] == [f"tock {at}" for at in range(45, 301, 45)]
    assert [row for _, row in sorted(state) if row == "bad"] == []
    assert state["headrace", "every/fail"] == 300 * SECOND
    world.check()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("down_s", [1, 90])
def test_a_schedule_whose_firing_aborted_is_not_tried_again_by_the_next_engine(down_s: int, workers: int) -> None:
    """The log has several firings of it that the next engine runs again, one epoch after the other."""
    store, app = memory(), scheduled()
    hand = Hand(store, app, workers)
    for _ in range(5):
        hand.settle()
        hand.now_us += 60 * SECOND
    hand.settle()
    assert hand.core.aborted == 5
    hand = Hand(after_power_loss(store), app, workers, now_us=hand.now_us + down_s * SECOND)
    hand.settle()
    assert hand.core.aborted == 5 + down_s // 60


def test_an_entity_that_expired_under_the_name_of_a_schedule_does_not_stop_it() -> None:
    app, store = App("names"), memory()

    @app.operator("brief", ttl=1).register
    def touch(ctx: Context) -> None:
        ctx.put(0)

    @app.operator("count").register
    def count(ctx: Context) -> None:
        ctx.put(ctx.get(0) + 1)

    app.every(10, count, "all")
    hand = Hand(store, app)
    hand.settle()
    hand.take_snapshot()
    hand.send("a", [(touch, "every/count")])
    hand.settle()
    hand = Hand(after_power_loss(store), app, now_us=hand.now_us + 60 * SECOND)
    hand.settle()
    assert hand.state()["headrace", "every/count"] == hand.now_us // (10 * SECOND) * 10 * SECOND


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_missed_while_nothing_ran_is_done_once_and_for_the_last_time_it_was_due(workers: int) -> None:
    store, app = memory(), scheduled()
    hand = Hand(store, app, workers)
    hand.settle()
    for _ in range(13):
        hand.now_us += 10 * SECOND
        hand.settle()
    assert hand.state()["log", "cron"] == ["tick 120"]
    down_us = 3_601 * SECOND
    hand = Hand(after_power_loss(store), app, workers, now_us=down_us)
    hand.settle()
    state = hand.state()
    assert state["log", "cron"] == ["tick 120", "tick 3601"]
    assert state["headrace", "every/by cron"] == 3600 * SECOND
    assert len(state["log", "often"]) == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("* * * *",), "four|4 fields"),
        (("60 * * * *",), "is not a valid minute"),
        (("* * 0 * *",), "is not a valid day"),
        (("a * * * *",), "is not a valid minute"),
        (("5-1 * * * *",), "is not a valid minute"),
        (("*/0 * * * *",), "is not a valid minute"),
        (("0 0 30 2 *",), "never due"),
        ((0,), "every millisecond"),
        ((-1,), "no negative time"),
        (([],), "a timedelta or seconds"),
    ],
)
def test_a_schedule_is_checked_when_it_is_made(given: Any, why: str) -> None:
    app = App("checked")
    function = app.operator("log").register(repeat.body)
    with pytest.raises(ModelError, match=why):
        app.every(given[0], function, "a", 1)


def test_two_schedules_have_two_names() -> None:
    app = scheduled()
    note = app.operators["log"].functions["note"]
    with pytest.raises(ModelError, match="two schedules named note"):
        app.every(5, note, "x", "y")
    with pytest.raises(ModelError, match="registered function"):
        app.every(5, "log.note", "x", "y")  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "args"), [(1.5, ("text",)), ("a", (5,)), ("a", ()), ("a", ({1},))])
def test_a_schedule_that_could_not_be_called_is_found_when_the_app_starts(key: Any, args: Any) -> None:
    app = scheduled()
    app.options(name="wrong").every(5, app.operators["log"].functions["note"], key, *args)
    with pytest.raises(ModelError, match="schedule wrong"):
        World(app)


# --- cron, against a look at every minute -----------------------------------------------------------------------------


def field(low: int, high: int) -> Any:
    numbers = st.integers(low, high)
    spans = st.tuples(numbers, numbers).map(lambda pair: f"{min(pair)}-{max(pair)}")
    plain = numbers.map(str) | spans | st.just("*")
    stepped = st.tuples(spans | st.just("*"), st.integers(1, 20)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    return st.just("*") | st.lists(plain | stepped, min_size=1, max_size=2).map(",".join)


def matches(text: str, at: datetime.datetime) -> bool:
    """As the manual of cron has it."""

    def has(field: str, value: int, low: int, high: int) -> bool:
        for part in field.split(","):
            span, _, step = part.partition("/")
            first, _, last = span.partition("-")
            start, stop = (low, high) if span == "*" else (int(first), int(last or first))
            if value in range(start, stop + 1, int(step or 1)):
                return True
        return False

    minute, hour, day, month, weekday = text.split()
    of_week = at.isoweekday() % 7
    by_day = has(day, at.day, 1, 31)
    by_weekday = has(weekday, of_week, 0, 7) or (of_week == 0 and has(weekday, 7, 0, 7))
    either = not day.startswith("*") and not weekday.startswith("*")
    is_day = by_day or by_weekday if either else by_day and by_weekday
    return is_day and has(minute, at.minute, 0, 59) and has(hour, at.hour, 0, 23) and has(month, at.month, 1, 12)


CRONS = st.tuples(field(0, 59), field(0, 23), field(1, 28), st.just("*"), field(0, 7)).map(" ".join)


@given(CRONS, st.integers(0, 2_000_000_000), st.integers(1, 3 * 24 * 60))
@settings(max_examples=MANY)
def test_cron_is_due_at_the_minutes_that_match(text: str, at_s: int, minutes: int) -> None:
    schedule, start = Cron(text), at_s // 60 * 60
    begin = datetime.datetime.fromtimestamp(start, datetime.UTC)
    later = [begin + datetime.timedelta(minutes=n) for n in range(1, minutes + 1)]
    due = [int(at.timestamp()) * SECOND for at in later if matches(text, at)]
    found, at_us = [], start * SECOND
    while (at_us := schedule.after(at_us)) <= (start + minutes * 60) * SECOND:
        found.append(at_us)
    assert found == due
    last = schedule.before((start + minutes * 60) * SECOND, start * SECOND)
    assert last == (due[-1] if due else None)


def test_cron_knows_leap_years_and_looks_back_over_long_times() -> None:
    leap = Cron("0 0 29 2 *")
    in_2024 = int(datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC).timestamp()) * SECOND
    assert leap.after(in_2024) == in_2024 + 1461 * DAY_US
    assert leap.before(in_2024 + 1000 * DAY_US, 0) == in_2024
    assert leap.before(in_2024 + 1000 * DAY_US, in_2024) is None
    assert Cron("0 12 * * 7").after(0) == Cron("0 12 * * 0").after(0) == 3 * DAY_US + DAY_US // 2


@given(st.integers(1_000, 10**9), st.integers(0, 10**12), st.integers(0, 10**12))
def test_an_interval_is_due_at_its_multiples(every_us: int, one: int, other: int) -> None:
    schedule = Interval(every_us)
    since, at = min(one, other), max(one, other)
    assert schedule.after(at) % every_us == 0
    assert at < schedule.after(at) <= at + every_us
    last = schedule.before(at, since)
    assert last is None if at // every_us * every_us <= since else last == at // every_us * every_us


def test_seconds_and_timedeltas_are_times() -> None:
    assert cron.duration_us(1.5, "x") == cron.duration_us(datetime.timedelta(seconds=1.5), "x") == 1_500_000
    assert cron.duration_us(0, "x") == 0
    assert cron.duration_us(60, "x") == MINUTE_US
    for wrong in (random.Random(), None, "5", True, float("inf"), float("nan"), -1, 10**13, datetime.timedelta.max):
        with pytest.raises(ModelError, match="x takes"):
            cron.duration_us(wrong, "x")
