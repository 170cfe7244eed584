"""Failures one can read: the file and the line in the reply, the traceback in the log, once, and of final runs only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import random
import re
import types
from pathlib import Path
from typing import Any

import pytest

from headrace import Abort, Aborted, App, Config, Runtime
from headrace.core import raised
from headrace.core.events import FailedRun, LogFailures
from headrace.core.outcome import same_outcome
from headrace.core.raised import TRACES_MAX, TRIED_TRACES_MAX, place_of, trace_of
from headrace.errors import BadArguments
from headrace.runtime.failure_log import FULL_MAX, INTERVAL_S, FailureLog
from headrace.wire.messages import Failure
from tests.driver import Driver
from tests.waiting import eventually

app = App("failures")
account = app.operator("account")
HERE = "tests/core/test_failures.py"
ANY_ID = re.compile(r"request id [^,]+")


class OutOfStock(Abort): ...


def parse(text: str) -> Any:
    return json.loads(text)  # the helper's line


@account.register
def open_with(ctx: Any, amount: int) -> None:
    ctx.put(amount)


@account.register
def spend(ctx: Any, amount: int) -> int:
    balance = ctx.get(0)
    if balance < amount:
        raise ValueError(f"{ctx.key} has {balance}, not {amount}")  # spend's line
    ctx.put(balance - amount)
    return balance - amount


@account.register
async def pay(ctx: Any, to: str, amount: int) -> int:
    left = await ctx.call(spend, ctx.key + "'s purse", amount)
    ctx.call_async(receive, to, amount)
    return left


@account.register
def receive(ctx: Any, amount: int) -> None:
    purse = ctx.key if ctx.key.endswith("purse") else ctx.key + "'s purse"
    if purse == ctx.key:
        ctx.put(ctx.get(0) + amount)
    else:
        ctx.call_async(receive, purse, amount)


@account.register
def read_json(ctx: Any, text: str) -> Any:
    return parse(text)


@account.register
def list_of(ctx: Any, items: list[Any]) -> Any:
    return items + 1  # type: ignore[operator]  # the list's line


def careful(body: Any) -> Any:
    @functools.wraps(body)
    def run(ctx: Any, text: str) -> Any:
        return body(ctx, text)

    return run


@account.register
@careful
def decorated(ctx: Any, text: str) -> Any:
    return {}[text]  # the wrapped line


@account.register
def named(ctx: Any, *, text: str) -> Any:
    return {}[text]  # the named line


@account.register
def return_a_set(ctx: Any) -> Any:  # its own line
    return {1, 2}


@account.register
def put_a_set(ctx: Any) -> None:
    ctx.put({1})  # the set's line


@account.register
def sell(ctx: Any, why: str) -> None:
    raise OutOfStock(why) if why != "plainly" else Abort(why)


@account.register
def chained(ctx: Any) -> None:
    try:
        parse("{")
    except ValueError as error:
        raise LookupError("no settings") from error  # the chain's line


@account.register
def deep(ctx: Any, depth: int) -> int:
    return descend(depth)


def descend(depth: int) -> int:
    if not depth:
        raise OSError("the bottom")
    return descend(depth - 1)


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return found


SPEND, HELPER = (f"{HERE}:{line_of(mark)}" for mark in ("spend's line", "the helper's line"))
CASES = {
    "arguments that are carried encoded": ((list_of, "a", [1]), "TypeError", "the list's line", "account.list_of", "a"),
    "a decorated function": ((decorated, "a", "x"), "KeyError", "the wrapped line", "account.decorated", "a"),
    "arguments by name only": ((named, "a", "x"), "KeyError", "the named line", "account.named", "a"),
    "a plain function": ((spend, "a", 5), "ValueError", "spend's line", "account.spend", "a"),
    "a helper": ((read_json, "a", "{"), "JSONDecodeError", "the helper's line", "account.read_json", "a"),
    "a value that cannot be kept": ((put_a_set, "a"), "BadValue", "the set's line", "account.put_a_set", "a"),
    "an awaited call": ((pay, "a", "b", 5), "ValueError", "spend's line", "account.spend", "a's purse"),
    "a chain": ((chained, "a"), "LookupError", "the chain's line", "account.chained", "a"),
}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_reply_says_in_which_file_and_line_of_the_app_it_failed(name: str, workers: int) -> None:
    call, kind, mark, function, key = CASES[name]
    driver = Driver(app, workers=workers)
    reply = driver.call_at(0, "r", *call) if not workers else run_on_workers(driver, [call])[0]
    failure = reply.failure
    assert failure is not None
    assert (failure.type, failure.function, failure.key) == (kind, function, key)
    assert failure.where == f"{HERE}:{line_of(mark)}"
    assert failure.trace is None, "clients get no frames"
    [run] = driver.failed
    assert (run.tid, run.failure.function, run.failure.key) == (reply.tid, function, key)
    assert run.request_id == reply.request_id
    last = run.failure.trace[-1] if run.failure.trace else None
    assert last is not None
    assert last.type == kind
    assert any(file == __file__ and line == line_of(mark) for file, line, _ in last.frames)


def run_on_workers(driver: Driver, calls: list[Any]) -> list[Any]:
    (token,) = driver.submit_at(0, ("r", calls))
    driver.settle()
    while driver.timer_us is not None and token not in driver.replies:
        driver.tick(driver.timer_us)
        driver.settle()
    return driver.replies[token]


def test_a_result_that_cannot_be_carried_is_placed_where_its_function_is_defined() -> None:
    failure = Driver(app).call_at(0, "r", return_a_set, "a").failure
    assert failure is not None
    assert failure.where == f"{HERE}:{line_of('its own line') - 1}"  # with its decorator


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("why", ["plainly", "of a child class"])
def test_the_apps_own_abort_has_no_place_and_is_not_reported(why: str, workers: int) -> None:
    driver = Driver(app, workers=workers)
    failure = run_on_workers(driver, [(sell, "a", why)])[0].failure
    assert failure is not None
    assert (failure.message, failure.where, failure.trace) == (why, None, None)
    assert driver.failed == []
    assert driver.failed_more == {}


def test_a_place_is_relative_to_the_folder_from_which_the_app_was_imported(tmp_path: Path) -> None:
    def place(module: str, file: str, is_main: bool = False) -> str:
        source = "def fail(ctx):\n    raise ValueError\n"
        names: dict[str, Any] = {"__name__": "__main__" if is_main else module}
        if is_main:
            names["__spec__"] = types.SimpleNamespace(name=module) if module else None
        exec(compile(source, file, "exec"), names)  # noqa: S102
        try:
            names["fail"](None)
        except ValueError as error:
            return place_of(error, names["fail"])
        raise AssertionError

    root = str(tmp_path)
    assert place("bank", f"{root}/bank.py") == "bank.py:2"
    assert place("shop.orders.late", f"{root}/shop/orders/late.py") == "shop/orders/late.py:2"
    assert place("shop.orders", f"{root}/shop/orders/__init__.py") == "shop/orders/__init__.py:2"
    assert place("", f"{root}/script.py", is_main=True) == "script.py:2"
    assert place("shop.orders", f"{root}/shop/orders.py", is_main=True) == "shop/orders.py:2"
    assert place("a.b.c.d.e.f", "/x.py") == "x.py:2"
    assert place("notebook", "<ipython-input-3>") == "<ipython-input-3>:2"
    assert place("bank", "/srv/caf\udce9.py") == "caf?.py:2"  # a name that is not UTF-8


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("<stdin>", "<stdin>:3"),
        ("app.py", "app.py:3"),
        ("/app.py", "app.py:3"),
        (f"{Path(json.__file__).parents[2]}/app.py", "app.py:3"),
        ("/srv/x/app.py", "app.py:3"),
    ],
)
def test_a_place_is_never_in_pythons_own_library(file: str, shown: str) -> None:
    names: dict[str, Any] = {"__name__": "app"}
    exec(compile("def fail(ctx):\n    import json\n    json.loads('x')\n", file, "exec"), names)  # noqa: S102
    with pytest.raises(json.JSONDecodeError) as caught:
        names["fail"](None)
    assert place_of(caught.value, names["fail"]) == shown


def test_a_place_may_be_in_another_module_of_an_installed_app() -> None:
    helper: dict[str, Any] = {"__name__": "shop.prices"}
    site = "/venv/lib/python3.11/site-packages"
    exec(compile("def price():\n    1 / 0\n", f"{site}/shop/prices.py", "exec"), helper)  # noqa: S102
    names: dict[str, Any] = {"__name__": "shop.orders", "price": helper["price"]}
    exec(compile("def fail(ctx):\n    price()\n", f"{site}/shop/orders.py", "exec"), names)  # noqa: S102
    with pytest.raises(ZeroDivisionError) as caught:
        names["fail"](None)
    assert place_of(caught.value, names["fail"]) == "shop/prices.py:2"


def test_a_file_whose_name_is_not_utf_8_and_a_broken_handler_do_not_stop_the_runtime(tmp_path: Path) -> None:
    odd = App("odd")
    shelf = odd.operator("shelf")
    names: dict[str, Any] = {"__name__": "odd"}
    exec(compile("def fail(ctx):\n    raise ValueError\n", "/srv/caf\udce9.py", "exec"), names)  # noqa: S102
    fail = shelf.register(names["fail"])

    def refuse(record: logging.LogRecord) -> bool:
        raise TypeError("a filter that fails")

    log = logging.getLogger("headrace.functions")
    with Runtime(odd, store=str(tmp_path / "store")) as runtime:
        for _ in range(2):
            assert runtime.client.batch([(fail, "a")]).failures[0].where == "caf?.py:2"
        log.addFilter(refuse)
        try:
            assert runtime.client.batch([(fail, "a")]).failures[0].where == "caf?.py:2"
            assert runtime.client.batch([(fail, "a")]).failures[0].where == "caf?.py:2"
        finally:
            log.removeFilter(refuse)
        assert runtime.health()["status"] == "ok"


def test_the_log_shows_what_is_in_a_group_and_notes() -> None:
    error = ExceptionGroup("several", [KeyError("one"), ValueError("two")])
    error.add_note("look at the orders")
    [traced] = trace_of(error, "ExceptionGroup", "several (2 sub-exceptions)")
    assert traced.message == "several (2 sub-exceptions) [KeyError: 'one'; ValueError: two]\nlook at the orders"


def test_a_deep_traceback_is_shortened() -> None:
    driver = Driver(app)
    driver.call_at(0, "r", deep, "a", 200)
    [run] = driver.failed
    assert run.failure.trace
    frames = run.failure.trace[-1].frames
    assert len(frames) <= 21
    assert sum(line for file, line, _ in frames if not file) + len(frames) - 1 == 202


def test_the_place_is_not_compared_in_a_replay() -> None:
    one = Failure("aborted", "ValueError", "no", "account.spend", "a", "bank.py:3")
    assert same_outcome(one, Failure("aborted", "ValueError", "no", "account.spend", "a", "bank.py:4"))
    assert not same_outcome(one, Failure("aborted", "KeyError", "no", "account.spend", "a", "bank.py:3"))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_of_many_failures_of_one_place_in_an_epoch_a_few_have_a_trace_and_the_rest_are_counted(
    workers: int,
) -> None:
    driver = Driver(app, workers=workers)
    replies = run_on_workers(driver, [(spend, f"{n}", 1) for n in range(50)])
    assert all(reply.failure.where == SPEND for reply in replies)
    least = TRACES_MAX * max(1, workers)
    assert TRACES_MAX <= len(driver.failed) <= least
    assert sum(driver.failed_more.values()) == 50 - len(driver.failed)


@pytest.mark.parametrize(("workers", "mode"), [(0, "auto"), (1, "serial"), (1, "ordered"), (3, "ordered")])
def test_however_many_fail_few_traces_are_taken(workers: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them fail in a call on another worker, which tells the root's worker."""
    taken: list[str] = []

    def take(error: BaseException, name: str, text: str) -> Any:
        taken.append(name)
        return trace_of(error, name, text)

    monkeypatch.setattr(raised, "trace_of", take)
    driver = Driver(app, Config(epoch_transactions_max=1_000), workers=workers, mode=mode)
    calls = [(pay, f"{n}", "b", 1) if n % 2 else (spend, f"{n}", 1) for n in range(400)]
    replies = run_on_workers(driver, calls)
    assert all(reply.failure.where == SPEND for reply in replies)
    assert driver.failed, "there is one to read"
    assert 0 < len(taken) <= max(1, workers) * TRIED_TRACES_MAX


def test_a_failure_that_is_taken_back_gives_its_trace_to_another() -> None:
    """Over random orders of delivery: if anything failed, there is a trace of it."""
    failed = 0
    for seed in range(70, 140):  # without it, there is none in some of these
        rng = random.Random(seed)
        driver = Driver(app, Config(epoch_transactions_max=200), workers=3, choose=rng.choice)
        calls: list[Any] = [(receive, name, 10) for name in "abc"]
        calls += [(pay, rng.choice("abc"), rng.choice("abc"), rng.randint(1, 8)) for _ in range(40)]
        replies = run_on_workers(driver, calls)
        if any(reply.failure is not None for reply in replies):
            failed += 1
            assert driver.failed
    assert failed > 60


def test_a_check_reports_each_failure_once_as_without_it(caplog: pytest.LogCaptureFixture) -> None:
    texts = []
    for check in (False, True):
        caplog.clear()
        with caplog.at_level(logging.ERROR, logger="headrace.functions"), Runtime(app, check=check) as runtime:
            for call in [(spend, "a", 5), (read_json, "a", "{"), (sell, "a", "plainly")]:
                runtime.client.batch([call] * 5)
        texts.append([ANY_ID.sub("request id", record.getMessage()) for record in caplog.records])
    assert texts[0] == texts[1]
    assert [text.count("Traceback") for text in texts[0]] == [1] * 2 * FULL_MAX + [0] * 2


def test_only_final_runs_are_reported_not_those_that_are_repaired() -> None:
    """Over random orders of delivery: what is reported is exactly what the replies say, and there were runs that
    failed and were repaired."""
    mended = 0
    for seed in range(25):
        rng = random.Random(seed)
        driver = Driver(app, Config(epoch_transactions_max=200), workers=3, choose=rng.choice)
        names = "abcdef"
        calls: list[Any] = [(receive, name, 20) for name in names]
        calls += [(pay, rng.choice(names), rng.choice(names), rng.randint(1, 15)) for _ in range(60)]
        replies = run_on_workers(driver, calls)
        failed = {reply.tid for reply in replies if reply.failure is not None}
        assert all(reply.failure.type == "ValueError" for reply in replies if reply.failure is not None)
        reported = [run.tid for run in driver.failed]
        assert len(set(reported)) == len(reported)
        assert set(reported) <= failed
        assert len(reported) + sum(driver.failed_more.values()) == len(failed)
        mended += sum(worker.ordered.repairs for worker in driver.workers.values())
    assert mended > 100


def test_a_replay_reports_no_failure_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = str(tmp_path / "store")
    with caplog.at_level(logging.ERROR, logger="headrace.functions"):
        with Runtime(app, store=store) as runtime:
            with pytest.raises(Aborted):
                runtime.client.options(request_id="mine").call(spend, "a", 5)
            text = caplog.text
            assert text.count("Traceback") == 1
            for part in ("account.spend of 'a'", "request id mine", "TID 1", "a has 0, not 5", "in spend"):
                assert part in text
            assert 'raise ValueError(f"{ctx.key} has {balance}, not {amount}")' in text, "the line's source"
            runtime._keeper.store_work.save = lambda snapshot: []  # type: ignore[union-attr, method-assign, assignment]
            runtime._settle = lambda: None  # type: ignore[method-assign] as if it were killed: no snapshot
        caplog.clear()
        with Runtime(app, store=store) as runtime:
            assert runtime.engine.last is None or runtime.engine.last.is_replayed
            with pytest.raises(Aborted) as again:
                runtime.client.options(request_id="mine").call(spend, "a", 5)
            assert again.value.where == SPEND
        assert not caplog.records


def test_an_aborted_error_names_the_file_and_the_line() -> None:
    with Runtime(app) as runtime, pytest.raises(Aborted) as caught:
        runtime.client.call(read_json, "a", "{")
    assert caught.value.where == HELPER
    assert caught.value.where in str(caught.value)


# --- the log of the process -------------------------------------------------------------------------------------------


def failed_run(tid: int, where: str = "bank.py:3", function: str = "account.spend") -> FailedRun:
    return FailedRun(f"r{tid}", tid, 1, Failure("aborted", "ValueError", "no", function, "a", where, []))


def test_tracebacks_of_one_place_are_limited_per_minute_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = FailureLog(lambda: now_s)
    for tid in range(FULL_MAX + 7):
        log.write(LogFailures([failed_run(tid)], {}))
    log.write(LogFailures([failed_run(100, "bank.py:9"), failed_run(101, function="account.pay")], {}))
    log.write(LogFailures([], {("account.spend", "bank.py:3"): 1_000}))
    assert len(caplog.records) == FULL_MAX + 2
    now_s = INTERVAL_S
    caplog.clear()
    log.write(LogFailures([failed_run(200)], {}))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "account.spend failed 1,007 more times at bank.py",
        "account.spend of 'a' failed at bank.py",
    ]
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    log.sum_up()


def test_the_rest_is_summed_up_though_nothing_more_fails(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog(interval_s=0.05)
    log.write(LogFailures([failed_run(tid) for tid in range(FULL_MAX + 7)], {}))
    eventually(lambda: "account.spend failed 7 more times at bank.py:3" in caplog.text)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_raise_any_raises_the_first_failure_with_its_row_function_and_key() -> None:
    with Runtime(app) as runtime:
        client = runtime.client
        fine = client.batch([(open_with, "a", 5), (spend, "a", 2)])
        assert fine.raise_any() is fine
        assert fine.raise_any().results == [None, 3]
        with pytest.raises(
            Aborted, match=r"^row 1 of 3, account.spend of 'a', and 1 more failed: ValueError"
        ) as caught:
            client.batch([(spend, "a", 1), (spend, "a", 9), (spend, "b", 9)]).raise_any()
        assert (caught.value.row, caught.value.function, caught.value.key) == (1, "account.spend", "a")
        with pytest.raises(BadArguments, match=r"^row 0 of 2, account.spend of 'k': ") as refused:
            client.batch([("account.spend", "k", "much"), (spend, "a", 1)]).raise_any()
        assert refused.value.row == 0
        with pytest.raises(Aborted, match=r"^row 1 of 2, account.spend of 'z': "):
            client.map(spend, ["a", "z"], [(0,), (7,)]).raise_any()
        with pytest.raises(Aborted, match=r"^row 0 of 1, account.spend of 'z': "):
            asyncio.run(client.abatch([(spend, "z", 7)])).raise_any()
        with pytest.raises(Aborted, match=r"^row 0 of 1, account.spend of 'z': "):
            client.batch((spend, "z", 7) for _ in range(1)).raise_any()  # type: ignore[arg-type]
        calls = [(spend, "y", 7), (spend, "z", 7)]
        replies = client.batch(calls)
        calls.clear()
        with pytest.raises(Aborted, match=r"^row 0 of 2, account.spend of 'y', and 1 more failed: "):
            replies.raise_any()


# --- limits -----------------------------------------------------------------------------------------------------------

limited = App("limited")
small = limited.operator("small")


@small.register
def put(ctx: Any, size: int, times: int) -> None:
    for _ in range(times):
        ctx.put("x" * size)


@small.register
def chatter(ctx: Any) -> None:
    ctx.call_async(chatter, ctx.key)


@small.register
async def descend_by_calls(ctx: Any) -> None:
    await ctx.call(descend_by_calls, ctx.key)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ((put, "a", 101, 1), ("101", "100", "value_bytes_max")),
        ((put, "a", 90, 3), ("270", "200", "transaction_bytes_max")),
        ((chatter, "a"), ("more than 20", "calls_max")),
        ((descend_by_calls, "a"), ("deeper than 5", "depth_max")),
        ((chatter, "k" * 60), ("60", "50", "key_bytes_max")),
    ],
)
def test_the_message_about_a_limit_names_the_size_and_the_setting(call: Any, parts: tuple[str, ...]) -> None:
    config = Config(value_bytes_max=100, transaction_bytes_max=200, calls_max=20, depth_max=5, key_bytes_max=50)
    failure = Driver(limited, config).call_at(0, "r", *call).failure
    assert failure is not None
    for part in parts:
        assert part in failure.message


# --- asyncio ----------------------------------------------------------------------------------------------------------

waiting = App("waiting")
waits = waiting.operator("waits")


@waits.register
async def sleep(ctx: Any, seconds: int) -> None:
    await asyncio.sleep(seconds)


@waits.register
async def gather(ctx: Any) -> None:
    with contextlib.suppress(DeprecationWarning):
        await asyncio.gather(ctx.call(sleep, "a", 1), ctx.call(sleep, "b", 1))


@waits.register
async def start_task(ctx: Any) -> None:
    asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("call", [(sleep, "a", 0), (sleep, "a", 1), (gather, "a"), (start_task, "a")])
def test_a_function_that_uses_asyncio_is_told_why_not(call: Any, workers: int) -> None:
    driver = Driver(waiting, workers=workers)
    failure = run_on_workers(driver, [call])[0].failure
    assert failure is not None
    for part in ("no event loop", "ctx.call_later", "ctx.call_external"):
        assert part in failure.message
