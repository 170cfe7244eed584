"""The runtime: threads, tasks, closing, back-pressure, time; and what the engine forgets, numbers and repeats."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Config, Runtime
from headrace.core.origin import FromClient, FromSource
from headrace.errors import BadCall, ModelError, Overloaded, Stopped, StreamError, TooLarge
from tests.driver import Driver
from tests.programs import MANY
from tests.waiting import eventually

PATIENCE_S = 60.0  # only a hang takes this long

bank = App("bank")
account = bank.operator("account")
gate = threading.Event()
entered = threading.Event()
running: list[Runtime] = []


@account.register
def deposit(ctx: Any, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get()


@account.register
def transfer(ctx: Any, to: str, amount: int) -> int:
    if ctx.get(0) < amount:
        raise Abort("not enough")
    ctx.put(ctx.get(0) - amount)
    ctx.call_async(deposit, to, amount)
    return ctx.get()


@account.register
def wait_at_the_gate(ctx: Any) -> None:
    entered.set()
    assert gate.wait(PATIENCE_S)


@account.register
def close_it(ctx: Any) -> None:
    running[0].close()


def in_thread(function: Any, *args: Any) -> Future[Any]:
    """Run it in a thread that nobody waits for: if it hangs, only its future does."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def hold(runtime: Runtime) -> Future[Any]:
    """Have the engine's thread wait, and return once it does."""
    gate.clear()
    entered.clear()
    waiting = runtime.client.submit(["gate"], [(wait_at_the_gate, "gate")], wait=True)
    assert entered.wait(PATIENCE_S)
    return waiting


# --- many clients -----------------------------------------------------------------------------------------------------


def test_threads_that_call_at_once_conserve_the_total() -> None:
    def work(seed: int) -> int:
        rng, sent = random.Random(seed), 0
        for _ in range(100):
            a, b = rng.sample("abcde", 2)
            calls = [(transfer, a, b, rng.randrange(30)), (transfer, b, a, rng.randrange(30))][: rng.randint(1, 2)]
            runtime.client.batch(calls)
            sent += len(calls)
        return sent

    with Runtime(bank, Config(epoch_transactions_max=7)) as runtime:
        runtime.client.batch([(deposit, key, 100) for key in "abcde"])
        with ThreadPoolExecutor(8) as pool:
            sent = 5 + sum(pool.map(work, range(8)))
        assert sum(runtime.state(account).values()) == 500
        assert min(runtime.state(account).values()) >= 0
        counted = runtime.metrics()
        assert (counted["committed"] + counted["aborted"], counted["pending"]) == (sent, 0), "each ran, and ran once"


def test_every_thread_gets_its_own_replies() -> None:
    def work(name: str) -> list[int]:
        return [runtime.client.call(deposit, name, 1) for _ in range(100)]

    with Runtime(bank) as runtime, ThreadPoolExecutor(8) as pool:
        for counted in pool.map(work, "abcdefgh"):
            assert counted == list(range(1, 101))


def test_one_request_id_from_many_threads_runs_once() -> None:
    def work(_: int) -> list[Any]:
        return list(runtime.client.options(request_id="same").batch([(deposit, "k", 1), (deposit, "k", 1)]))

    with Runtime(bank) as runtime, ThreadPoolExecutor(8) as pool:
        hold(runtime)  # until all threads have asked: the engine gets their requests at once
        asked = [pool.submit(work, number) for number in range(50)]
        eventually(lambda: runtime.metrics()["pending"] == 1 + 2 * 8)
        gate.set()
        replies = [each.result(PATIENCE_S) for each in asked]
        assert all(each == replies[0] for each in replies)
        assert runtime.state(account) == {"k": 2}


def test_tasks_that_are_gathered_get_their_replies() -> None:
    async def main(runtime: Runtime) -> tuple[list[int], Any]:
        counted = await asyncio.gather(*(runtime.client.acall(deposit, "k", 1) for _ in range(200)))
        return counted, await runtime.client.abatch([(deposit, "k", 1), (transfer, "k", "l", 1_000)])

    with Runtime(bank) as runtime:
        counted, replies = asyncio.run(main(runtime))
        assert sorted(counted) == list(range(1, 201))
        assert replies.results == [201, None]
        assert replies.committed == 1


def test_a_cancelled_task_neither_breaks_the_runtime_nor_takes_back_its_call() -> None:
    async def main(runtime: Runtime) -> None:
        task = asyncio.ensure_future(runtime.client.acall(deposit, "k", 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Runtime(bank) as runtime:
        waiting = hold(runtime)
        asyncio.run(main(runtime))
        gate.set()
        waiting.result(PATIENCE_S)
        assert runtime.client.call(deposit, "k", 1) == 2


def test_cancelling_a_submission_does_not_break_the_runtime() -> None:
    with Runtime(bank) as runtime:
        waiting = hold(runtime)
        submitted = runtime.submit(runtime.admission.admit(FromClient(["x"]), [(deposit, "k", 1)]))
        submitted.cancel()
        gate.set()
        waiting.result(PATIENCE_S)
        assert runtime.client.call(deposit, "k", 1) in (1, 2)


def test_a_callback_that_fails_does_not_break_the_runtime(caplog: pytest.LogCaptureFixture) -> None:
    with Runtime(bank) as runtime:
        waiting = hold(runtime)
        waiting.add_done_callback(lambda _: 1 / 0)
        gate.set()
        waiting.result(PATIENCE_S)
        assert runtime.client.call(deposit, "k", 1) == 1


def test_a_callback_of_a_client_cannot_stop_the_runtime() -> None:
    with Runtime(bank) as runtime:
        submitted = runtime.client.submit(["x"], [(deposit, "a", 1)], wait=True)
        submitted.add_done_callback(lambda _: sys.exit())
        again = runtime.client.submit(["y"], [(deposit, "a", 1)], wait=True)
        again.add_done_callback(lambda _: sys.exit())
        assert runtime.client.call(deposit, "a", 1) == 3


def test_clients_never_make_the_same_request_id() -> None:
    with Runtime(bank) as runtime, ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: runtime.client.new_id(), range(5_000)))
        assert len(set(ids)) == len(ids)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_finishes_what_was_handed_over_and_later_calls_raise_stopped() -> None:
    runtime = Runtime(bank, Config(epoch_transactions_max=3))
    waiting = hold(runtime)
    replies = [runtime.client.submit(f"{i}", [(deposit, "k", 1)] * 2, wait=True) for i in range(10)]
    closing = threading.Thread(target=runtime.close)
    closing.start()
    gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    waiting.result(PATIENCE_S)
    assert [reply.result(PATIENCE_S).results for reply in replies] == [[2 * i + 1, 2 * i + 2] for i in range(10)]
    for ask in (
        lambda: runtime.client.call(deposit, "k", 1),
        lambda: runtime.client.batch([(deposit, "k", 1)]),
        lambda: runtime.client.batch([]),
        lambda: runtime.client.map(deposit, ["k"], [(1,)]),
        lambda: runtime.state(account),
        lambda: runtime.get(account, "k"),
        lambda: asyncio.run(runtime.client.acall(deposit, "k", 1)),
    ):
        with pytest.raises(Stopped) as caught:
            ask()
        assert caught.value.code == "stopped"
    runtime.close()


def test_close_finishes_an_epoch_that_waits_for_its_time() -> None:
    runtime = Runtime(bank, Config(epoch_interval_us=3_600_000_000))
    reply = runtime.client.submit("x", [(deposit, "k", 1)], wait=True)
    runtime.close()
    assert reply.result(PATIENCE_S).results == [1]


def test_an_interval_of_centuries_is_only_a_long_time() -> None:
    runtime = Runtime(bank, Config(epoch_interval_us=1 << 61))
    first = runtime.client.submit("x", [(deposit, "k", 1)], wait=True)
    assert runtime.state(account) == {}  # answered after the thread has looked at its timer again
    runtime.close()
    assert first.result(PATIENCE_S).results == [1]


def test_a_call_that_meets_close_is_answered_or_stopped_but_never_left() -> None:
    """The runtime closes between the moment a call is let in and the moment it is handed over."""
    runtime = Runtime(bank)
    hand_over = runtime._hand_over

    def close_and_hand_over(work: Any) -> Any:
        closing.start()
        closing.join(0.5)  # it cannot end: letting in and handing over are one step
        return hand_over(work)

    closing = threading.Thread(target=runtime.close)
    runtime._hand_over = close_and_hand_over  # type: ignore[method-assign]
    submitted = runtime.client.submit(["x"], [(deposit, "k", 1)], wait=True)
    error = submitted.exception(PATIENCE_S)
    assert error is None or isinstance(error, Stopped)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_function_cannot_close_its_runtime() -> None:
    with Runtime(bank) as runtime:
        running[:] = [runtime]
        failure = runtime.client.batch([(close_it, "a")])[0].failure
        assert failure is not None
        assert failure.code == BadCall.code
        assert runtime.client.call(deposit, "a", 1) == 1


def test_an_engine_that_breaks_stops_the_runtime_and_everyone_who_waits() -> None:
    runtime = Runtime(bank, Config(pending_transactions_max=4))
    waiting = hold(runtime)
    handed_over = [runtime.client.submit([f"{i}"], [(deposit, "k", 1)], wait=True) for i in range(3)]
    blocked = [in_thread(runtime.client.call, deposit, "k", 1) for _ in range(2)]
    runtime.engine.step = lambda now_us, event: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    gate.set()
    waiting.result(PATIENCE_S)
    for future in (*handed_over, *blocked):
        with pytest.raises(Stopped, match="ZeroDivisionError"):
            future.result(PATIENCE_S)
    with pytest.raises(Stopped, match="ZeroDivisionError"):
        runtime.client.call(deposit, "k", 1)
    runtime.close()


def test_who_asks_for_state_while_the_engine_breaks_is_told() -> None:
    """The question comes right behind a batch, and both are taken from the queue together."""
    runtime = Runtime(bank)
    waiting = hold(runtime)
    handed_over = runtime.client.submit(["x"], [(deposit, "k", 1)], wait=True)
    asked = threading.Event()
    runtime._queue = SignallingQueue(runtime._queue, asked)  # type: ignore[assignment]
    asking = in_thread(runtime.state, account)
    assert asked.wait(PATIENCE_S)
    runtime.engine.step = lambda now_us, event: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    gate.set()
    waiting.result(PATIENCE_S)
    for future in (handed_over, asking):
        with pytest.raises(Stopped, match="ZeroDivisionError"):
            future.result(PATIENCE_S)


class SignallingQueue:
    """The queue of a runtime, telling when something was put into it."""

    def __init__(self, inner: Any, was_put: threading.Event) -> None:
        self.inner, self.was_put = inner, was_put
        self.get, self.empty = inner.get, inner.empty

    def put(self, item: Any) -> None:
        self.inner.put(item)
        self.was_put.set()


class Touchy(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("negative")


def test_a_state_that_cannot_be_shown_does_not_stop_the_runtime() -> None:
    app = App("touchy")
    operator = app.operator("touchy", state=Touchy)

    @operator.register
    def spoil(ctx: Any) -> None:
        value = Touchy(1)
        value.n = -1
        ctx.put(value)

    @operator.register
    def one(ctx: Any) -> int:
        return 1

    try:
        runtime = Runtime(app)
    except ModelError:
        return  # refused when it starts: as good
    assert runtime.client.batch([(spoil, "k")])[0].tid == 1
    shown = in_thread(runtime.state, operator).exception(PATIENCE_S / 2)
    assert not isinstance(shown, Stopped)
    assert runtime.client.call(one, "k") == 1
    runtime.close()


# --- back-pressure ----------------------------------------------------------------------------------------------------


def test_without_room_a_task_is_told_and_a_thread_waits() -> None:
    with Runtime(bank, Config(pending_transactions_max=3)) as runtime:
        waiting = hold(runtime)
        handed_over = runtime.client.submit("x", [(deposit, "k", 1)] * 2, wait=True)
        with pytest.raises(Overloaded) as caught:
            asyncio.run(runtime.client.acall(deposit, "k", 1))
        assert caught.value.retry
        with pytest.raises(Overloaded):
            asyncio.run(runtime.client.abatch([(deposit, "k", 1)]))
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(runtime.client.call, deposit, "k", 1)
            assert not blocked.done()
            gate.set()
            assert blocked.result(PATIENCE_S) == 3
        waiting.result(PATIENCE_S)
        assert handed_over.result(PATIENCE_S).results == [1, 2]
        assert asyncio.run(runtime.client.acall(deposit, "k", 1)) == 4


def test_a_batch_that_never_fits_is_refused_as_a_whole() -> None:
    with Runtime(bank, Config(pending_transactions_max=3)) as runtime:
        with pytest.raises(TooLarge):
            runtime.client.batch([(deposit, "k", 1)] * 4)
        assert runtime.client.batch([(deposit, "k", 1)] * 3).results == [1, 2, 3]


def test_who_is_refused_takes_no_room() -> None:
    with Runtime(bank, Config(pending_transactions_max=1)) as runtime:
        for _ in range(3):
            assert runtime.client.batch([("nobody.nothing", "k")])[0].status == "refused"
        assert runtime.client.call(deposit, "k", 1) == 1


# --- time -------------------------------------------------------------------------------------------------------------


class HandClock:
    def __init__(self) -> None:
        self.now_us = 1_000_000

    def __call__(self) -> int:
        return self.now_us


def test_an_epoch_is_closed_by_the_time_of_the_clock_it_was_given() -> None:
    clock = HandClock()
    with Runtime(bank, Config(epoch_interval_us=3_600_000_000), clock) as runtime:
        first = runtime.client.submit("a", [(deposit, "k", 1)], wait=True)
        assert runtime.state(account) == {}
        clock.now_us += 3_599_999_999
        second = runtime.client.submit("b", [(deposit, "k", 1)], wait=True)
        assert runtime.state(account) == {}
        assert not first.done()
        clock.now_us += 1
        replies = [future.result(PATIENCE_S)[0] for future in (first, second)]
        assert [(reply.result, reply.epoch) for reply in replies] == [(1, 1), (2, 1)]


def test_an_epoch_closes_by_itself_when_its_time_has_come() -> None:
    with Runtime(bank, Config(epoch_interval_us=1_000)) as runtime:
        assert runtime.client.submit("a", [(deposit, "k", 1)], wait=True).result(PATIENCE_S).results == [1]


def test_a_clock_that_is_set_back_does_not_hold_up_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(bank, Config(epoch_interval_us=50_000)) as runtime:
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now - 3_600_000_000_000)
        assert runtime.client.submit(["x"], [(deposit, "a", 1)], wait=True).result(30).results == [1]


def test_the_engine_asks_for_a_tick_when_the_epoch_is_due() -> None:
    driver = Driver(bank, Config(epoch_interval_us=100))
    driver.submit_at(1_000, ("a", [(deposit, "k", 1)]))
    assert driver.timer_us == 1_100
    driver.submit_at(1_050, ("b", [(deposit, "k", 1)]))
    assert driver.timer_us == 1_100
    driver.tick(1_099)
    assert driver.replies == {}
    assert driver.timer_us == 1_100
    driver.tick(1_100)
    assert [driver.replies[token][0].epoch for token in (0, 1)] == [1, 1]
    assert driver.timer_us is None


def test_a_full_epoch_does_not_wait_for_its_time() -> None:
    driver = Driver(bank, Config(epoch_interval_us=100, epoch_transactions_max=2))
    driver.submit_at(0, ("a", [(deposit, "k", 1)] * 5))
    assert driver.state() == {("account", "k"): 4}
    assert driver.timer_us == 100
    driver.finish()
    assert [reply.epoch for reply in driver.replies[0]] == [1, 1, 2, 2, 3]


# --- request ids are kept, and forgotten ------------------------------------------------------------------------------


def held(driver: Driver) -> int:
    ledger = driver.core.ledger
    return len(ledger.singles) + sum(map(len, ledger.runs.values())) + len(ledger.stems)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=MANY)
def test_a_request_id_is_kept_for_at_least_the_retention(arrivals: Any, epoch_max: int) -> None:
    driver = Driver(bank, Config(epoch_transactions_max=epoch_max, request_id_retention_us=100))
    sent: dict[str, tuple[int, int | None]] = {}  # id -> when, TID
    now_us = 0
    for number, (later_us, rows, as_stem) in enumerate(arrivals):
        now_us += later_us
        ids: Any = f"s{number}" if as_stem else [f"s{number}/{row}" for row in range(rows)]
        (token,) = driver.submit_at(now_us, (ids, [(deposit, "k", 1)] * rows))
        sent.update((reply.request_id, (now_us, reply.tid)) for reply in driver.replies[token])
        for request_id, (when_us, tid) in sent.items():
            if now_us - when_us <= 100:
                assert driver.call_at(now_us, request_id, deposit, "k", 1).tid == tid


def test_a_request_id_that_came_late_in_its_epoch_is_kept_as_long_as_the_others() -> None:
    driver = Driver(bank, Config(epoch_interval_us=50, request_id_retention_us=100))
    driver.submit_at(0, (["first"], [(deposit, "k", 1)]))
    driver.submit_at(49, (["late"], [(deposit, "k", 1)]))
    driver.tick(50)
    driver.submit_at(80, (["next"], [(deposit, "k", 1)]))
    driver.tick(130)
    driver.submit_at(140, (["late"], [(deposit, "k", 1)]))
    driver.finish()
    assert driver.replies[3][0].tid == driver.replies[1][0].tid


def test_memory_for_request_ids_is_bounded_by_their_number() -> None:
    driver = Driver(bank, Config(request_ids_max=50))
    for number in range(1_000):
        driver.submit_at(number, (f"run{number}", [(deposit, "k", 1)] * 2), ([f"one/{number}"], [(deposit, "k", 1)]))
        assert held(driver) <= 120
    assert len(driver.core.ledger.epochs) <= 60


def test_memory_for_request_ids_is_bounded_by_their_age() -> None:
    driver = Driver(bank, Config(request_id_retention_us=100))
    for number in range(1_000):
        driver.submit_at(10 * number, (f"run{number}", [(deposit, "k", 1)]), ([f"one/{number}"], [(deposit, "k", 1)]))
        assert held(driver) <= 60


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_memory_for_request_ids_is_bounded_under_steady_load(rows: int) -> None:
    """Epochs that fill up before their time: the next one is never empty, and batches lie across their ends."""
    driver = Driver(bank, Config(request_ids_max=50, epoch_transactions_max=2, epoch_interval_us=1_000_000))
    driver.submit_at(0, ("first", [(deposit, "k", 1)]))
    for number in range(500):
        driver.submit_at(number, (f"run{number}", [(deposit, "k", 1)] * rows))
    assert held(driver) <= 200
    assert len(driver.core.ledger.epochs) <= 200


def test_a_forgotten_request_id_runs_again() -> None:
    driver = Driver(bank, Config(request_id_retention_us=100))
    assert driver.call_at(0, "x", deposit, "k", 1).tid == 1
    assert driver.call_at(50, "x", deposit, "k", 1).tid == 1
    driver.call_at(1_000, "y", deposit, "k", 1)
    assert driver.call_at(2_000, "x", deposit, "k", 1).tid == 3


def test_an_empty_batch_leaves_nothing_behind() -> None:
    driver = Driver(bank, Config(request_ids_max=1))
    for number in range(100):
        driver.submit_at(number, (f"{number}", []))
    assert [driver.replies[token] for token in range(100)] == [[]] * 100
    assert len(driver.core.ledger.runs) <= 10


# --- batches of a source ----------------------------------------------------------------------------------------------


def source_batch(driver: Driver, number: int, rows: int = 2, source: str = "q") -> Any:
    origin = FromSource(f"{source}/{number}", source, number)
    return driver.admission.admit(origin, [(deposit, "k", 1)] * rows)


@pytest.mark.parametrize("interval_us", [0, 100])
def test_a_repeated_source_batch_runs_once_and_each_submission_is_answered_once(interval_us: int) -> None:
    driver = Driver(bank, Config(epoch_interval_us=interval_us))
    for _ in range(3):
        driver.hand_over(source_batch(driver, 0), now_us=0)
    driver.finish()
    assert driver.replies[0] == driver.replies[1] == driver.replies[2]
    assert [reply.result for reply in driver.replies[0]] == [1, 2]
    driver.hand_over(source_batch(driver, 0), source_batch(driver, 1), now_us=1_000)
    driver.finish()
    assert driver.replies[3] == driver.replies[0]
    assert [reply.result for reply in driver.replies[4]] == [3, 4]


@pytest.mark.parametrize("number", [1, 5])
def test_a_source_batch_that_is_not_the_next_is_refused_and_changes_nothing(number: int) -> None:
    driver = Driver(bank)
    driver.hand_over(source_batch(driver, number), now_us=0)
    assert isinstance(driver.refusals[0], StreamError)
    assert driver.state() == {}
    driver.hand_over(source_batch(driver, 0), now_us=0)
    assert [reply.tid for reply in driver.replies[1]] == [1, 2]


def test_epochs_of_source_batches_are_not_kept() -> None:
    driver = Driver(bank)
    for number in range(100):
        driver.hand_over(source_batch(driver, number), now_us=number)
    assert len(driver.core.ledger.epochs) <= 2
    assert driver.core.ledger.kept == 0
