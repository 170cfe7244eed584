"""A context is for one call: used after it, it raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace import App, Runtime
from headrace.core.lent import may_keep
from headrace.errors import BadCall
from tests.core.test_failures import run_on_workers
from tests.driver import Driver

app = App("keepers")
box = app.operator("box")
brief = app.operator("brief", ttl=3_600)
record = app.operator("record", state=list[int])
kept: list[Any] = []


def keep(ctx: Any) -> None:
    kept.append(ctx)


@box.register
def plain(ctx: Any) -> int:
    keep(ctx)
    ctx.put(1)
    return 1


@box.register
async def waiting(ctx: Any) -> int:
    kept.append(ctx)
    return await ctx.call(plain, "callee")


@box.register
def with_chance(ctx: Any) -> float:
    kept.append(ctx)
    return ctx.random.random()


@box.register
def failing(ctx: Any) -> None:
    kept.append(ctx)
    raise ValueError


@brief.register
def expiring(ctx: Any) -> None:
    kept.append(ctx)
    ctx.put(1)


@record.register
def typed(ctx: Any) -> None:
    kept.append(ctx)
    ctx.put([1])


@box.register
def method_only(ctx: Any) -> None:
    kept.extend([ctx.put, ctx.call_async])


@box.register
def with_locals(ctx: Any) -> None:
    kept.append(locals()["ctx"])


@box.register
def honest(ctx: Any, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    ctx.call_async(honest, "other", 0) if amount else None
    return ctx.tid + len(ctx.key)


@box.register
def use_kept(ctx: Any) -> Any:
    return kept[0].get()


USES = {
    "get": lambda ctx: ctx.get(),
    "put": lambda ctx: ctx.put(1),
    "delete": lambda ctx: ctx.delete(),
    "merge": lambda ctx: ctx.merge(1),
    "call": lambda ctx: ctx.call(plain, "a"),
    "call_async": lambda ctx: ctx.call_async(plain, "a"),
    "call_later": lambda ctx: ctx.call_later(1, plain, "a"),
    "cancel": lambda ctx: ctx.cancel("timer"),
    "call_external": lambda ctx: ctx.call_external("name"),
    "send_external": lambda ctx: ctx.send_external("name"),
    "uuid": lambda ctx: ctx.uuid(),
    "random": lambda ctx: ctx.random,
    "now": lambda ctx: ctx.now,
    "tid": lambda ctx: ctx.tid,
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    kept.clear()


@pytest.mark.parametrize("function", [plain, waiting, with_chance, failing, expiring, typed, with_locals])
@pytest.mark.parametrize("use", USES)
def test_a_context_that_is_used_after_its_call_raises(use: str, function: Any) -> None:
    with Runtime(app) as runtime:
        runtime.client.batch([(function, "a")])
        state = runtime.state(box)
        assert kept
        for ctx in kept:
            with pytest.raises(BadCall, match="is used after the call"):
                USES[use](ctx)
            assert ctx.key in ("a", "callee")
        assert runtime.state(box) == state


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_another_transaction_that_uses_it_aborts(workers: int) -> None:
    driver = Driver(app, workers=workers)
    run_on_workers(driver, [(plain, "a")])
    (token,) = driver.submit_at(driver.now_us, ("again", [(use_kept, "b"), (honest, "c", 1)]))
    driver.settle()
    failed, fine = driver.replies[token]
    assert failed.failure is not None
    assert failed.failure.code == "bad_call"
    assert "box.plain is used after the call" in failed.failure.message
    assert fine.ok


@pytest.mark.parametrize("function", [plain, waiting, with_chance, failing, expiring, typed, with_locals])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_on_workers_all_kept_contexts_raise(workers: int, function: Any) -> None:
    driver = Driver(app, workers=workers)
    run_on_workers(driver, [(function, key) for key in "abcdef"])
    assert len(kept) >= 6
    for ctx in kept:
        for use in USES.values():
            with pytest.raises(BadCall, match="is used after the call"):
                use(ctx)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_raises_as_soon_as_the_call_has_ended(workers: int) -> None:
    """Also in the same epoch."""
    driver = Driver(app, workers=workers)
    (token,) = driver.submit_at(driver.now_us, ("both", [(plain, "a"), (use_kept, "b")]))
    driver.settle()
    fine, failed = driver.replies[token]
    assert fine.ok
    assert failed.failure is not None
    assert failed.failure.code == "bad_call"


def test_a_method_that_is_kept_raises_and_no_call_gets_into_another_transaction() -> None:
    with Runtime(app) as runtime:
        runtime.client.call(method_only, "a")
        put, call_async = kept
        for use in (lambda: put(1), lambda: call_async(honest, "stray", 1)):
            with pytest.raises(BadCall, match="is used after the call"):
                use()
        runtime.client.call(honest, "b", 0)
        assert runtime.state(box) == {"b": 0}


def test_a_thread_that_a_function_left_behind_gets_an_error() -> None:
    go, raised = threading.Event(), list[BaseException]()
    left = App("left")
    shelf = left.operator("shelf")

    @shelf.register
    def leave(ctx: Any) -> None:
        def later() -> None:
            go.wait(60)
            try:
                ctx.put("late")
            except BadCall as error:
                raised.append(error)

        threads.append(threading.Thread(target=later))
        threads[0].start()

    threads: list[threading.Thread] = []
    with Runtime(left) as runtime:
        runtime.client.call(leave, "a")
        go.set()
        threads[0].join(60)
        assert len(raised) == 1
        assert runtime.state(shelf) == {}


def test_which_functions_could_keep_their_context_is_read_from_their_code() -> None:
    assert [may_keep(each.body) for each in (plain, waiting, with_chance, failing, expiring, typed)] == [True] * 6
    assert may_keep(method_only.body)
    assert may_keep(with_locals.body)
    assert not may_keep(honest.body)
    assert not may_keep(use_kept.body)
    assert may_keep(print)


def test_functions_that_keep_nothing_pay_nothing() -> None:
    """They get the same context again."""
    driver = Driver(app)
    executor = driver.core.backend.executor
    binding = executor.bindings.functions[honest]
    context = binding.context
    for n in range(3):
        driver.call_at(n, f"r{n}", honest, "a", 1)
    assert binding.context is context
