"""Functions that never return, in one process: interrupted and aborted by decree, or the runtime ends without them."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from headrace import Abort, Aborted, App, Config, Runtime
from headrace.core.contexts import SerialContext
from headrace.core.decrees import DECREE, REPLAY_CHANCES, Interrupt
from headrace.core.epoch import Epoch
from headrace.errors import Fenced, NotDeterministic, Stopped, Stuck
from headrace.runtime import watchdog
from tests.waiting import eventually

LIMIT = Config(wall_limit_us=300_000)
PATIENCE_S = 60.0  # only a hang takes this long

app = App("stuck")
thing = app.operator("thing")
summed = app.operator("summed", combine=lambda one, other: spin() if other == 13 else one + other)
forever = threading.Event()


@thing.register
def add(ctx: Any, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return ctx.get()


def spin() -> Any:
    while True:
        pass


def stubborn() -> Any:
    """Catches whatever stops it, a few times."""
    for _ in range(5):
        with contextlib.suppress(BaseException):
            spin()
    return 5


def nap() -> Any:
    while True:
        time.sleep(0.01)


def read() -> Any:
    while True:
        sum(range(100))


WAYS = {"spin": spin, "stubborn": stubborn, "nap": nap, "read": read}


@thing.register
def hang(ctx: Any, way: str) -> Any:
    ctx.put("written")
    ctx.call_async(add, "other", 1)
    return WAYS[way]()


@thing.register
async def hang_awaited(ctx: Any, way: str) -> Any:
    ctx.put("written")
    return await ctx.call(hang, "callee", way)


@thing.register
def hang_one_way(ctx: Any, way: str) -> None:
    ctx.put("written")
    ctx.call_async(hang, "callee", way)


@thing.register
def hang_with_chance(ctx: Any, way: str) -> Any:
    ctx.put(ctx.random.random())  # such transactions run in an executor of their own
    return WAYS[way]()


@thing.register
async def hang_at_the_end(ctx: Any, way: str) -> Any:
    try:
        return await ctx.call(fail, "callee")
    finally:
        WAYS[way]()


@thing.register
def fail(ctx: Any) -> None:
    raise Abort("no")


@summed.register
def merge(ctx: Any, amount: int) -> None:
    ctx.merge(amount)


@thing.register
def hold_on(ctx: Any) -> int:
    """Waits in C code, which Python cannot interrupt."""
    ctx.put("written")
    forever.wait(PATIENCE_S)
    return 1


@thing.register
def work(ctx: Any, milliseconds: int) -> int:
    ctx.put(ctx.get(0) + 1)
    until_s = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until_s:
        pass
    return ctx.get()


@thing.register
def hang_with_a_list(ctx: Any, ways: list[str]) -> Any:
    ctx.put("written")
    return WAYS[ways[0]]()


@thing.register
def hang_by_name(ctx: Any, *, way: str) -> Any:
    ctx.put("written")
    return WAYS[way]()


HANGS = [(function, way) for function in (hang, hang_awaited, hang_one_way, hang_with_chance) for way in WAYS]


@pytest.mark.parametrize(
    ("function", "way", "is_durable"),
    [(*each, False) for each in HANGS] + [(*each, True) for each in HANGS if each[1] == "spin"],
)
def test_a_function_that_never_returns_is_interrupted_and_its_transaction_aborts_by_decree(
    function: Any, way: str, is_durable: bool, tmp_path: Path
) -> None:
    store = str(tmp_path / "store") if is_durable else None
    with Runtime(app, LIMIT, store=store) as runtime:
        client = runtime.client
        assert client.call(add, "a", 1) == 1
        with pytest.raises(Aborted) as caught:
            client.options(request_id="mine").call(function, "a", way)
        assert (caught.value.type, caught.value.message, caught.value.cause_code) == ("Poisoned", DECREE, "poisoned")
        assert (caught.value.function, caught.value.key) == (function.full_name, "a")
        if way != "stubborn":
            assert caught.value.where is not None
            assert caught.value.where.startswith("tests/test_stuck.py:")
        assert runtime.state(thing) == {"a": 1}, "all of it is undone"
        assert client.call(add, "a", 1) == 2
        assert runtime.health() == {"status": "ok"}
    if store is not None:
        with Runtime(app, LIMIT, store=store) as runtime:
            assert runtime.state(thing) == {"a": 2}


@pytest.mark.parametrize("function", [hang, hang_awaited, hang_one_way, hang_with_chance])
@pytest.mark.parametrize("way", ["spin", "stubborn"])
def test_with_a_check_it_aborts_by_decree_too_and_is_reported_once(
    function: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="headrace.functions"), Runtime(app, LIMIT, check=True) as runtime:
        assert runtime.client.call(add, "a", 1) == 1
        with pytest.raises(Aborted) as caught:
            runtime.client.call(function, "a", way)
        assert (caught.value.message, caught.value.cause_code) == (DECREE, "poisoned")
        assert runtime.state(thing) == {"a": 1}, "all of it is undone"
        assert runtime.client.call(add, "a", 1) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("hangs_in", [1, 2])
def test_with_a_check_a_function_that_is_stopped_in_one_run_aborts_by_decree(hangs_in: int) -> None:
    """How long a function takes is no difference between two runs of it."""
    runs = 0
    erratic = App("erratic")

    @erratic.operator("thing").register
    def act(ctx: Any) -> int:
        nonlocal runs
        runs += 1
        ctx.put("written")
        return int(spin()) if runs == hangs_in else 1

    with Runtime(erratic, LIMIT, check=True) as runtime:
        with pytest.raises(Aborted) as caught:
            runtime.client.call(act, "a")
        assert (caught.value.message, runs) == (DECREE, hangs_in)
        assert runtime.state("thing") == {}
        assert runtime.client.call(act, "a") == 1


@pytest.mark.parametrize(
    "call",
    [(hang_at_the_end, "a", "spin"), (merge, "a", 13), (hang_with_a_list, "a", ["spin"]), (hang_by_name, "a", "spin")],
    ids=["finally", "combine", "encoded", "by name"],
)
def test_it_is_interrupted_wherever_the_engine_calls_the_apps_code(call: Any) -> None:
    with Runtime(app, LIMIT) as runtime:
        runtime.client.call(merge, "a", 1)
        with pytest.raises(Aborted) as caught:
            runtime.client.call(*call)
        assert caught.value.type == "Poisoned"
        assert runtime.client.call(add, "b", 1) == 1
        assert runtime.get(summed, "a") == 1


def crash(runtime: Runtime) -> None:
    """Leave a runtime as a crash would: nothing more is written, and there is no last snapshot."""
    runtime._settle = lambda: None  # type: ignore[method-assign]


def test_the_decree_is_in_the_log_before_its_answer_leaves(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Runtime(app, LIMIT, store=store) as runtime:
        with pytest.raises(Aborted):
            runtime.client.options(request_id="mine").call(hang, "a", "spin")
        crash(runtime)
    began_s = time.monotonic()
    with Runtime(app, Config(wall_limit_us=2_000_000), store=store) as runtime:  # a second run would take 14 seconds
        with pytest.raises(Aborted) as caught:
            runtime.client.options(request_id="mine").call(hang, "a", "spin")
        assert caught.value.cause_code == "poisoned"
    assert time.monotonic() - began_s < 8


def test_what_cannot_be_interrupted_ends_the_runtime_and_the_next_start_goes_on_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = str(tmp_path / "store")
    runtime = Runtime(app, LIMIT, store=store)
    client = runtime.client
    assert client.call(add, "a", 1) == 1
    with caplog.at_level(logging.CRITICAL, logger="headrace.runtime"):
        with pytest.raises(Stopped, match=r"TID 2 \(thing.hold_on of 'a'"):
            client.options(request_id="mine").call(hold_on, "a")
        with pytest.raises(Stuck, match=r"did not return within 0\.3 s, and could not be interrupted"):
            runtime.wait()
    assert "forever.wait" in caplog.text, "it says where it stands"
    assert runtime.health()["status"] == "stopped"
    with pytest.raises(Stopped):
        client.call(add, "a", 1)
    runtime.close()
    forever.set()  # it returns after all: too late
    eventually(lambda: not runtime._thread.is_alive())
    with Runtime(app, LIMIT, store=store) as runtime:
        with pytest.raises(Aborted) as caught:
            runtime.client.options(request_id="mine").call(hold_on, "a")
        assert (caught.value.message, caught.value.cause_code, caught.value.tid) == (DECREE, "poisoned", 2)
        assert runtime.client.call(add, "a", 1) == 2
    forever.clear()


def test_without_a_store_the_runtime_ends_with_that_error() -> None:
    runtime = Runtime(app, LIMIT)
    with pytest.raises(Stopped, match="the state is lost"):
        runtime.client.call(hold_on, "a")
    with pytest.raises(Stuck):
        runtime.wait()
    forever.set()
    eventually(lambda: not runtime._thread.is_alive())
    forever.clear()


def test_a_loop_that_is_in_the_log_without_its_decree_is_stopped_in_the_replay(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    runtime = Runtime(app, store=store)  # with the usual limit
    runtime.client.call(add, "a", 1)
    waiting = runtime.client.submit(["mine"], [(hang, "a", "spin")], wait=True)
    eventually(lambda: runtime._backend.running() is not None)
    eventually(lambda: runtime.engine.journal.last == runtime._keeper.store_work.opened_store.log.last)  # type: ignore[union-attr]
    runtime.close(patience_s=0.1)  # as if it were killed: without a decree
    with pytest.raises(Stopped):
        waiting.result(PATIENCE_S)
    began_s = time.monotonic()
    with Runtime(app, LIMIT, store=store) as runtime:
        replies = runtime.client.submit(["mine"], [(hang, "a", "spin")], wait=True).result(PATIENCE_S)
        assert replies[0].failure is not None
        assert replies[0].failure.message == DECREE
        assert runtime.state(thing) == {"a": 1}
        crash(runtime)
    assert time.monotonic() - began_s >= REPLAY_CHANCES * 0.3, "it may have been answered before: it gets more time"
    with Runtime(app, store=store) as runtime:  # and its decree is durable now
        assert runtime.client.submit(["mine"], [(hang, "a", "spin")], wait=True).result(5)[0].failure is not None


@pytest.mark.parametrize("way", ["spin", "hold on"])
def test_a_function_that_had_returned_before_a_recovery_gets_no_decree(way: str, tmp_path: Path) -> None:
    """Its reply has left. If it never returns now, it is not deterministic, and the runtime says so."""
    hangs: list[str] = []
    erratic = App("erratic")
    operator = erratic.operator("thing")

    @operator.register
    def act(ctx: Any) -> int:
        if hangs:
            spin() if hangs[0] == "spin" else forever.wait(PATIENCE_S)
        return 1

    store = str(tmp_path / "store")
    with Runtime(erratic, LIMIT, store=store) as runtime:
        assert runtime.client.call(act, "a") == 1
        crash(runtime)
    hangs.append(way)
    runtime = Runtime(erratic, Config(wall_limit_us=50_000), store=store)
    with pytest.raises(NotDeterministic):
        runtime.wait()
    forever.set()
    eventually(lambda: not runtime._thread.is_alive())
    forever.clear()
    hangs.clear()
    with Runtime(erratic, LIMIT, store=store) as runtime:
        assert runtime.client.call(act, "a") == 1, "nothing is lost"
        assert runtime.metrics()["aborted"] == 0


def test_a_function_that_returns_just_at_the_limit_commits_or_aborts_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interruption races with the end of the function, hundreds of times: the engine itself is never hit, and a
    replay finds in the log's digests what it writes itself."""
    store = str(tmp_path / "store")
    rng, outcomes = random.Random(1), {"ok": 0, "aborted": 0}
    monkeypatch.setattr(watchdog, "STRIKE_S", 0.002)
    monkeypatch.setattr(watchdog, "HOLD_S", 0.005)
    with Runtime(app, Config(wall_limit_us=20_000), store=store) as runtime:
        for n in range(200):
            reply = runtime.client.batch([(work, "a", rng.randint(15, 50)), (add, "b", 1)])
            assert reply[1].result == n + 1
            outcomes[reply[0].status] += 1
            if reply[0].ok:
                assert reply[0].result == outcomes["ok"]
            else:
                assert reply[0].failure is not None
                assert reply[0].failure.code == "poisoned"
        assert runtime.get(thing, "a") == outcomes["ok"]
        assert runtime.health()["status"] == "ok"
        crash(runtime)
    assert min(outcomes.values()) > 10, outcomes
    with Runtime(app, store=store) as runtime:
        assert runtime.state(thing) == {"a": outcomes["ok"], "b": 200}
        assert runtime.metrics()["aborted"] == outcomes["aborted"], "it has replayed them all"


def test_health_tells_that_a_function_is_stuck_and_that_a_runtime_has_stopped() -> None:
    runtime = Runtime(app, LIMIT)
    assert runtime.health() == {"status": "ok"}
    waiting = runtime.client.submit(["mine"], [(hold_on, "a")], wait=True)
    eventually(lambda: runtime.health()["status"] == "stuck")
    assert "thing.hold_on" in str(runtime.health())
    with pytest.raises(Stopped):
        waiting.result(PATIENCE_S)
    eventually(lambda: runtime.health()["status"] == "stopped")
    forever.set()
    eventually(lambda: not runtime._thread.is_alive())
    forever.clear()


def test_a_function_in_a_debugger_may_take_its_time() -> None:
    debugged = App("debugged")
    debugger: dict[str, Any] = {"__name__": "pdb", "time": time}
    exec("def wait_for_the_user():\n    time.sleep(1.0)\n", debugger)  # noqa: S102

    @debugged.operator("thing").register
    def stop_here(ctx: Any) -> int:
        debugger["wait_for_the_user"]()
        return 1

    with Runtime(debugged, Config(wall_limit_us=100_000)) as runtime:
        assert runtime.client.call(stop_here, "a") == 1


def test_the_watchdog_leaves_the_interpreter_as_it_was() -> None:
    before_s = sys.getswitchinterval()
    for _ in range(3):
        runtimes = [Runtime(app, LIMIT) for _ in range(2)]
        hung = [runtime.client.submit("r", [(hang, "a", "spin")], True) for runtime in runtimes]
        for each in hung:
            with contextlib.suppress(Stopped):  # two loops in one process are slow to stop
                assert each.result(PATIENCE_S).failures[0].code == "poisoned"
        for runtime in runtimes:
            with contextlib.suppress(Stopped):
                runtime.close()
    eventually(lambda: sys.getswitchinterval() == before_s)
    eventually(lambda: not any(each.name == "headrace-watchdog" for each in threading.enumerate()))


def test_an_interruption_never_leaves_a_lock_of_a_library_held() -> None:
    """A function that logs all the time often waits for the lock of a handler that all threads use."""
    log, handler = logging.getLogger("tests.stuck.busy"), logging.StreamHandler(io.StringIO())
    log.addHandler(handler)
    log.propagate, log.level = False, logging.INFO
    busy = App("busy")
    desk = busy.operator("desk")

    @desk.register
    def chat(ctx: Any) -> None:
        while True:
            log.info("again")

    done = threading.Event()

    def log_too() -> None:
        while not done.is_set():
            log.info("too")

    other = threading.Thread(target=log_too)
    other.start()
    try:
        for _ in range(3):
            with contextlib.suppress(Aborted, Stopped), Runtime(busy, Config(wall_limit_us=100_000)) as runtime:
                runtime.client.call(chat, "a")
            free = threading.Thread(target=lambda: handler.acquire() or handler.release(), daemon=True)
            free.start()
            free.join(PATIENCE_S)
            assert not free.is_alive(), "the handler's lock is held for ever"
    finally:
        done.set()
        other.join()
        log.removeHandler(handler)


def test_an_interruption_that_is_raised_in_the_engine_stops_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never is. But if it were, what the engine was doing would be half done."""
    source = "def get(self, default=None):\n    strike()\n"
    names: dict[str, Any] = {"__name__": "headrace.core.contexts"}
    exec(source, names)  # noqa: S102
    with Runtime(app, LIMIT) as runtime:

        def strike() -> None:
            assert runtime._backend.executor.doom_running(runtime._backend.executor.running)
            names["raise_here"]()

        exec("def raise_here():\n    raise Interrupt\n", names)  # noqa: S102
        names |= {"strike": strike, "Interrupt": Interrupt}
        monkeypatch.setattr(SerialContext, "get", names["get"])
        with pytest.raises(Stopped, match="an interruption was raised in the engine"):
            runtime.client.call(add, "a", 1)
        assert runtime.health()["status"] == "stopped"
        runtime._broken = None  # as expected


def test_a_look_between_two_epochs_sees_nothing_and_the_watchdog_survives_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Runtime(app, LIMIT) as runtime:
        assert runtime.client.call(add, "a", 1) == 1
        backend = runtime._backend
        ran = Epoch(1, 0, 0)
        ran.tids = range(1, 2)
        later = types.SimpleNamespace(running=7)  # the executor has begun the next epoch meanwhile
        monkeypatch.setattr(backend, "busy", (ran, later))
        assert backend.running() is None
        assert runtime.health()["status"] == "ok"
        monkeypatch.undo()
        looks = iter([ValueError("a look that fails")])
        look = runtime._watchdog._look

        def fails_once(passed_s: float) -> None:
            for error in looks:
                raise error
            look(passed_s)

        monkeypatch.setattr(runtime._watchdog, "_look", fails_once)
        with pytest.raises(Aborted, match="did not return in time"):
            runtime.client.call(hang, "a", "spin")
    assert "the watchdog failed" in caplog.text


def test_a_runtime_that_was_superseded_while_it_was_stuck_says_so(tmp_path: Path) -> None:
    """It must not start again: it would take the store from its successor."""
    store, waits, release = str(tmp_path / "store"), [True], threading.Event()
    hotel = App("hotel")
    room = hotel.operator("room")

    @room.register
    def book(ctx: Any) -> int:
        if waits:
            waits.pop()
            release.wait(PATIENCE_S)
        ctx.put(ctx.get(0) + 1)
        return ctx.get()

    stuck = Runtime(hotel, Config(wall_limit_us=2_000_000), store=store)
    stuck.client.submit("mine", [(book, "a")], True)
    eventually(lambda: not waits)
    with Runtime(hotel, store=store) as successor:
        booked = successor.client.call(book, "a")
        with pytest.raises(Fenced):
            stuck.wait()
        assert successor.client.call(book, "a") == booked + 1
    release.set()
    eventually(lambda: not stuck._thread.is_alive())
