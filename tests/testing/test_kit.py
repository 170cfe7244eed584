"""The test kit: deterministic, on a virtual clock, with fake externals, and with crashes that change nothing."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import threading
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import bank
from headrace import Abort, Aborted, App, Config, Context, Runtime
from headrace.errors import (
    BadArguments,
    BadRequest,
    ExternalFailed,
    LimitReached,
    ModelError,
    NotDeterministic,
    RequestIdReused,
    Stopped,
)
from headrace.testing import START, MissingFake, TestRuntime, fixture

app = App("kit")
note = app.operator("note", state=list)
brief = app.operator("brief", state=int, ttl=60)
MACHINE: dict[str, Any] = {"draws": 0, "runtime": None}


@note.register
def write(ctx: Context[list], text: str) -> list:
    ctx.put([*ctx.get([]), f"{text} {(ctx.now - START).total_seconds():g}"])
    return ctx.get([])


@note.register
def later(ctx: Context[list], delay: float, text: str) -> str:
    return ctx.call_later(delay, write, ctx.key, text)


@note.register
def chain(ctx: Context[list], delay: float, times: int) -> None:
    ctx.call_async(write, ctx.key, f"{times} left")
    if times:
        ctx.call_later(delay, chain, ctx.key, delay, times - 1)


@note.register
def draw(ctx: Context[list]) -> list:
    ctx.put([str(ctx.uuid()), ctx.random.randrange(1_000_000)])
    return ctx.get([])


@note.register
async def buy(ctx: Context[list], amount: int) -> Any:
    try:
        paid = await ctx.call_external("charge", amount)
    except ExternalFailed as error:
        paid = str(error)
    ctx.put([*ctx.get([]), paid])
    return paid


@note.register
def post(ctx: Context[list], text: str) -> None:
    ctx.send_external("mail", text, then=posted)


@note.register
def posted(ctx: Context[list], result: Any, error: str | None) -> None:
    ctx.put([*ctx.get([]), result or error])


@note.register
def refuse(ctx: Context[list]) -> None:
    raise Abort("no")


@note.register
def count_runs(ctx: Context[list]) -> int:
    """Not deterministic: it counts how often it was run."""
    MACHINE["draws"] += 1
    ctx.put([MACHINE["draws"]])
    return MACHINE["draws"]


@note.register
def use_a_client(ctx: Context[list]) -> None:
    MACHINE["runtime"].client.call(write, "x", "never")


@brief.register
def touch(ctx: Context[int]) -> int:
    ctx.put(ctx.get(0) + 1)
    return ctx.get(0)


app.external("charge", lambda key, amount: pytest.fail("the real one was called"), tries=3)
app.external("mail", lambda key, text: pytest.fail("the real one was called"), tries=2)

kit = fixture(app, externals={"charge": "paid"})


# --- a client like any other ------------------------------------------------------------------------------------------


def test_a_fixture_gives_each_test_a_fresh_runtime(kit: TestRuntime) -> None:
    assert kit.states() == {"note": {}, "brief": {}}
    kit.client.call(write, "a", "once")


def test_so_it_does_in_the_next_test(kit: TestRuntime) -> None:
    assert kit.state(note) == {}
    assert kit.now == START


def test_the_client_does_what_that_of_a_runtime_does(kit: TestRuntime) -> None:
    def story(runtime: Any) -> list[Any]:
        client = runtime.client
        seen = [client.call(bank.deposit, "a", amount=100), client.call("account.transfer", "a", "b", 30)]
        seen += [(reply.status, reply.result, reply.error) for reply in client.batch(CALLS)]
        seen += client.map(bank.deposit, ["a", "c"], [(1,), (2,)]).results
        seen += [asyncio.run(client.acall(bank.deposit, "d", 5)), list(asyncio.run(client.abatch(CALLS)).results)]
        once = client.options(request_id="once")
        seen += [once.call(bank.deposit, "a", 1), once.call(bank.deposit, "a", 1)]
        with pytest.raises(RequestIdReused):
            once.call(bank.deposit, "a", 2)
        with pytest.raises(BadArguments, match="wanted int"):
            client.call(bank.deposit, "a", "1")
        with pytest.raises(Aborted, match="a has"):
            client.call(bank.transfer, "a", "b", 10**6)
        return [*seen, runtime.state(bank.account), runtime.get(bank.account, "a"), runtime.get("account", "x", 7)]

    calls = [(bank.transfer, "a", "b", 1), (bank.transfer, "a", "b", 10_000), ("nobody.nothing", "a")]
    CALLS = calls  # noqa: N806
    with Runtime(bank.app) as real, TestRuntime(bank.app) as tested:
        assert story(tested) == story(real)


def test_nothing_runs_in_another_thread(kit: TestRuntime) -> None:
    before = set(threading.enumerate())
    kit.client.call(later, "a", 1, "later")
    kit.external("mail").returns("sent")
    kit.client.call(post, "a", "text")
    kit.advance(minutes=1)
    kit.crash()
    assert set(threading.enumerate()) == before


def test_the_same_calls_give_the_same_ids_and_random_numbers() -> None:
    def drawn(seed: int) -> Any:
        with TestRuntime(app, seed=seed) as runtime:
            return runtime.client.call(draw, "a"), runtime.client.call(draw, "a")

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_function_cannot_use_a_client_of_its_own_runtime(kit: TestRuntime) -> None:
    MACHINE["runtime"] = kit
    with pytest.raises(Aborted, match="cannot use a client of its own runtime"):
        kit.client.call(use_a_client, "a")
    assert kit.client.call(write, "a", "goes on") == ["goes on 0"]


def test_a_closed_runtime_says_so() -> None:
    with TestRuntime(app) as runtime:
        pass
    with pytest.raises(Stopped, match="closed"):
        runtime.client.call(write, "a", "x")


def test_an_epoch_does_not_wait_for_time_to_pass() -> None:
    with TestRuntime(app, Config(epoch_interval_us=1_000_000)) as runtime:
        assert runtime.client.call(write, "a", "x") == ["x 0"]


# --- time -------------------------------------------------------------------------------------------------------------


def test_each_timer_runs_at_its_own_time_also_those_set_on_the_way(kit: TestRuntime) -> None:
    kit.client.batch([(later, "a", 90, "timer"), (chain, "a", 40, 3), (later, "a", 10, "first")])
    assert kit.next_due == START + timedelta(seconds=10)
    kit.advance(minutes=1)
    assert kit.get(note, "a") == ["3 left 0", "first 10", "2 left 40"]
    kit.advance(timedelta(seconds=60), seconds=30)
    assert kit.get(note, "a") == ["3 left 0", "first 10", "2 left 40", "1 left 80", "timer 90", "0 left 120"]
    assert kit.now == START + timedelta(seconds=150)
    assert kit.next_due is None


def test_calls_in_between_are_ordered_by_the_virtual_time(kit: TestRuntime) -> None:
    kit.client.call(later, "a", 10, "timer")
    kit.advance(seconds=9)
    kit.client.call(write, "a", "before")
    kit.advance(seconds=1)
    kit.client.call(write, "a", "after")
    assert kit.get(note, "a") == ["before 9", "timer 10", "after 10"]


def test_schedules_run_at_their_times() -> None:
    timed = App("timed")
    log = timed.operator("log", state=list)

    @log.register
    def tick(ctx: Context[list]) -> None:
        ctx.put([*ctx.get([]), f"{ctx.now:%H:%M:%S}"])

    timed.every("*/2 * * * *", tick, "cron")
    timed.options(name="often").every(45, tick, "often")
    with TestRuntime(timed, start=datetime.datetime(2026, 3, 1, 8, 0, 30, tzinfo=datetime.UTC)) as runtime:
        runtime.advance(minutes=4)
        assert runtime.get(log, "cron") == ["08:02:00", "08:04:00"]
        assert runtime.get(log, "often") == ["08:00:45", "08:01:30", "08:02:15", "08:03:00", "08:03:45", "08:04:30"]
        runtime.advance_to(datetime.datetime(2026, 3, 1, 8, 6, tzinfo=datetime.UTC))
        assert runtime.get(log, "cron")[-1] == "08:06:00"


def test_state_with_a_time_to_live_ends(kit: TestRuntime) -> None:
    kit.client.call(touch, "a")
    kit.advance(seconds=59)
    assert kit.client.call(touch, "a") == 2
    kit.advance(seconds=60)
    assert kit.state(brief) == {}
    assert kit.client.call(touch, "a") == 1


def test_time_does_not_go_back(kit: TestRuntime) -> None:
    with pytest.raises(BadRequest, match="does not go back"):
        kit.advance(seconds=-1)
    with pytest.raises(BadRequest, match="does not go back"):
        kit.advance_to(START - timedelta(days=1))
    with pytest.raises(BadRequest, match="time zone"):
        TestRuntime(app, start=datetime.datetime(2026, 1, 1))


def test_a_timer_that_sets_itself_again_without_a_delay_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.testing.virtual_runtime.STEPS_MAX", 200)
    with TestRuntime(app) as runtime, pytest.raises(LimitReached, match="without a delay"):
        runtime.client.call(chain, "a", 0, 10**9)


# --- the outside world ------------------------------------------------------------------------------------------------


def test_a_fake_records_what_was_asked_and_answers(kit: TestRuntime) -> None:
    charge, mail = kit.external("charge"), kit.external("mail").runs(lambda key, text: f"sent {text}")
    charge.returns("first", "second")
    assert [kit.client.call(buy, "a", amount) for amount in (1, 2, 3)] == ["first", "second", "second"]
    kit.client.call(post, "b", "hello")
    assert (charge.args, mail.args) == ([(1,), (2,), (3,)], [("hello",)])
    assert len({call.key for call in charge.calls}) == 3
    assert kit.get(note, "b") == ["sent hello"]


def test_a_message_of_a_transaction_that_aborts_is_not_sent(kit: TestRuntime) -> None:
    reply = kit.client.batch([(refuse, "a")])[0]
    assert (reply.status, kit.external("mail").calls) == ("aborted", [])


def test_a_fake_fails_and_is_tried_again_with_the_same_key(kit: TestRuntime) -> None:
    charge = kit.external("charge").fails("busy", times=2)
    assert kit.client.call(buy, "a", 1) == "paid"
    assert len(charge.calls) == 3
    assert len({call.key for call in charge.calls}) == 1
    charge.fails("closed for good")
    assert kit.client.call(buy, "a", 1) == "charge: ConnectionError: closed for good, after 3 attempts"
    kit.external("mail").fails("lost")
    kit.client.call(post, "b", "x")
    assert kit.get(note, "b") == ["mail: ConnectionError: lost, after 2 attempts"]


def test_an_exception_as_an_answer_is_raised_by_the_fake() -> None:
    with TestRuntime(app, externals={"charge": ValueError("no card")}) as runtime:
        assert runtime.client.call(buy, "a", 1) == "charge: ValueError: no card, after 3 attempts"


def test_an_external_without_an_answer_is_named(kit: TestRuntime) -> None:
    with pytest.raises(MissingFake, match=r'runtime\.external\("mail"\)\.returns'):
        kit.client.call(post, "a", "x")


def test_a_fake_of_an_external_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="no external 'post'; it has: charge, mail"):
        TestRuntime(app, externals={"post": 1})


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_what_was_answered_is_there_after_a_crash(kit: TestRuntime) -> None:
    first = kit.client.options(request_id="r").call(write, "a", "kept")
    timer = kit.client.call(later, "a", 30, "timer")
    kit.crash()
    assert kit.client.options(request_id="r").call(write, "a", "kept") == first
    kit.advance(minutes=1)
    assert kit.get(note, "a") == ["kept 0", "timer 30"]
    assert (kit.crashes, type(timer)) == (1, str)


def test_a_restart_has_nothing_to_replay(kit: TestRuntime) -> None:
    kit.client.call(count_runs, "a")
    kit.restart()
    assert kit.get(note, "a") == [MACHINE["draws"]]


def test_a_crash_before_the_log_undoes_the_call_and_one_after_it_loses_only_the_answer(kit: TestRuntime) -> None:
    client = kit.client
    kit.crash_next("before_log")
    with pytest.raises(Stopped, match="ask again with the same request id"):
        client.options(request_id="1").call(write, "a", "one")
    assert kit.get(note, "a") is None
    assert client.options(request_id="1").call(write, "a", "one") == ["one 0"]
    kit.crash_next("after_log")
    with pytest.raises(Stopped):
        client.options(request_id="2").call(write, "a", "two")
    assert kit.get(note, "a") == ["one 0", "two 0"]
    assert client.options(request_id="2").call(write, "a", "two") == ["one 0", "two 0"]
    assert kit.crashes == 2


def test_an_external_whose_response_is_lost_is_called_again_with_the_same_key(kit: TestRuntime) -> None:
    charge = kit.external("charge").runs(lambda key, amount: f"payment {len(charge.calls)}")
    kit.crash_next("after_external")
    with pytest.raises(Stopped):
        kit.client.options(request_id="r").call(buy, "a", 5)
    assert kit.client.options(request_id="r").call(buy, "a", 5) == "payment 2"
    assert len(charge.calls) == 2
    assert len({call.key for call in charge.calls}) == 1


def test_a_timer_survives_a_crash_while_it_fires(kit: TestRuntime) -> None:
    for moment in ("before_log", "after_log"):
        kit.client.call(later, moment, 5, "timer")
        kit.crash_next(moment)  # type: ignore[arg-type]
        kit.advance(seconds=10)
        assert len(kit.get(note, moment) or []) == 1
    assert kit.crashes == 2


def test_a_function_that_is_not_deterministic_is_found_by_a_crash(kit: TestRuntime) -> None:
    kit.client.call(count_runs, "a")
    with pytest.raises(NotDeterministic, match="count_runs"):
        kit.crash()
    with pytest.raises(Stopped):
        kit.client.call(write, "a", "x")


def test_an_unknown_moment_is_refused(kit: TestRuntime) -> None:
    with pytest.raises(BadRequest, match="before_log, after_log, after_external"):
        kit.crash_next("sometime")  # type: ignore[arg-type]


steps = st.one_of(
    st.tuples(st.just(write), st.sampled_from("ab"), st.text("xyz", min_size=1, max_size=2)),
    st.tuples(st.just(later), st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 30.0]), st.just("t")),
    st.tuples(st.just(chain), st.sampled_from("ab"), st.sampled_from([1.0, 20.0]), st.integers(0, 3)),
    st.tuples(st.just(buy), st.sampled_from("ab"), st.integers(0, 9)),
    st.tuples(st.just(draw), st.sampled_from("ab")),
    st.tuples(st.just(refuse), st.just("a")),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 10.0, 45.0])),
)


@given(st.lists(steps, max_size=15), st.data())
def test_no_crash_changes_a_reply_or_the_state(given_steps: list[Any], data: st.DataObject) -> None:
    """The same steps, with and without crashes anywhere: a call whose answer was lost is asked for again."""
    moments = ["crash", "restart", "before_log", "after_log", "after_external", None, None]
    crashes = [data.draw(st.sampled_from(moments)) for _ in given_steps]

    def run(crashes: list[str | None]) -> Any:
        replies = []
        with TestRuntime(app, externals={"charge": "paid"}) as runtime:
            for number, step, crash in zip(itertools.count(), given_steps, crashes, strict=False):
                if crash in ("crash", "restart"):
                    getattr(runtime, crash)()
                elif crash is not None:
                    runtime.crash_next(crash)  # type: ignore[arg-type]
                if step[0] == "advance":
                    runtime.advance(seconds=step[1])
                    continue
                ask = runtime.client.options(request_id=f"step {number}")
                try:
                    replies.append(ask.batch([step])[0])
                except Stopped:
                    replies.append(ask.batch([step])[0])
            runtime.advance(minutes=5)
            return [(reply.status, reply.result, reply.error) for reply in replies], runtime.states()

    assert run(crashes) == run([None] * len(crashes))
