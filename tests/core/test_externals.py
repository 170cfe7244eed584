"""External calls and messages: made when all before them is final, answered once, and asked again when they fail."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from headrace import Abort, App, Context, Runtime
from headrace.core.events import Perform, Responded
from headrace.errors import ExternalFailed, ModelError
from tests.outside import SECOND, World, response
from tests.waiting import eventually

# --- external calls ---------------------------------------------------------------------------------------------------

shop = App("shop")
order_of = shop.operator("order")
shop.external("charge", lambda key, amount: None)


@order_of.register
async def pay(ctx: Context, amount: Any) -> Any:
    ctx.put(["paying", amount])
    paid = await ctx.call_external("charge", amount)
    ctx.put(["paid", paid])
    return paid


@order_of.register
async def try_to_pay(ctx: Context, amount: int) -> str:
    try:
        return f"paid {await ctx.call_external('charge', amount)}"
    except ExternalFailed as error:
        return f"not paid: {error}"


@order_of.register
async def pay_for(ctx: Context, other: str, amount: int) -> Any:
    before = ctx.get(0)
    paid = await ctx.call(try_to_pay, other, amount)
    ctx.put(before + 1)
    return paid


@order_of.register
def bump(ctx: Context) -> int:
    ctx.put(ctx.get(0) + 1)
    return ctx.get(0)


@order_of.register
async def misuse(ctx: Context, how: str) -> Any:
    if how == "unknown":
        await ctx.call_external("refund", 1)
    elif how == "no name":
        await ctx.call_external(5, 1)  # type: ignore[arg-type]
    elif how == "value":
        await ctx.call_external("charge", {1, 2})
    elif how == "forgotten":
        ctx.call_external("charge", 1)
    elif how == "twice":
        call = ctx.call_external("charge", 1)
        with contextlib.suppress(ExternalFailed):
            await call
        await call
    elif how == "then unknown":
        ctx.send_external("charge", 1, then="order.none")
    elif how == "then of one argument":
        ctx.send_external("charge", 1, then=pay)
    elif how == "message unknown":
        ctx.send_external("refund", 1)


@order_of.register
def misuse_plainly(ctx: Context) -> None:
    ctx.call_external("charge", 1)


MISUSES = {
    "unknown": ("BadCall", "no external 'refund' in app 'shop'; it has: charge"),
    "no name": ("BadCall", "no external 5 in app 'shop'; it has: charge"),
    "value": ("BadValue", "a set has no order to carry"),
    "forgotten": ("BadCall", "did not await: await it, or use send_external"),
    "twice": ("BadCall", "order.misuse awaits a ctx.call_external(...) for the second time"),
    "then unknown": ("UnknownFunction", "no function 'none' on operator 'order'"),
    "then of one argument": ("BadCall", "a result and an error"),
    "message unknown": ("BadCall", "no external 'refund'"),
}


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("how", MISUSES)
def test_a_misuse_of_the_outside_world_aborts_and_says_why(how: str, workers: int) -> None:
    (reply,) = World(shop, workers).run((misuse, "a", how))
    assert reply.failure is not None
    assert reply.failure.type == MISUSES[how][0]
    assert MISUSES[how][1] in reply.failure.message
    (reply,) = World(shop, workers).run((misuse_plainly, "a"))
    assert reply.failure is not None
    assert "make it async def, or use send_external" in reply.failure.message


@pytest.mark.parametrize("workers", range(5))
def test_a_failed_external_call_is_raised_in_the_function_and_may_be_caught(workers: int) -> None:
    world = World(shop, workers, epoch_transactions_max=3)
    replies = world.run(*[(try_to_pay, f"k{n}", n) for n in range(12)], *[(pay, f"p{n}", n) for n in range(12)])
    texts = [reply.unwrap() for reply in replies[:12]]
    assert {text.split(" [")[0] for text in texts} == {"paid", "not paid: charge is closed"}
    failures = [reply.failure for reply in replies[12:] if reply.failure is not None]
    assert {(failure.code, failure.message) for failure in failures} == {("external_failed", "charge is closed")}
    world.check()


@pytest.mark.parametrize("workers", range(5))
def test_an_external_call_waits_until_all_before_it_is_final(workers: int) -> None:
    world = World(shop, workers, seed=workers)
    calls = [(bump, "a"), (pay_for, "a", "b", 1), (bump, "a"), (try_to_pay, "a", 2), (bump, "b")]
    seen: list[int] = []

    def look(perform: Perform) -> None:
        seen.append(int(perform.call.partition("-")[0]))
        epoch = next(epoch for epoch in world.epochs if seen[-1] in epoch.tids)
        final = epoch.final_rows if workers else len(epoch.results)
        assert final == epoch.tids.index(seen[-1]), "it is made when all before it is final, and nothing after it"

    world.on_perform = look  # type: ignore[method-assign]
    world.run(*calls)
    assert seen == [2, 4]
    assert len(world.performed) == 2
    world.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_worker_does_not_repeat_what_was_answered(seed: int) -> None:
    world = World(shop, 3, seed=seed)
    world.send([(pay_for, f"k{n}", f"k{n + 1}", n) for n in range(6)])
    for _ in range(40):
        world.deliver()
        if world.rng.random() < 0.05:
            world.trouble()
    world.happen()
    world.until(10 * SECOND)
    calls = [perform.call for perform in world.performed]
    assert len(set(calls)) == len(calls) == 6
    world.check()


def test_a_message_brings_its_response_as_a_transaction_of_its_own() -> None:
    box = App("box")
    letters = box.operator("letter")
    box.external("post", lambda key, *args: None)

    @letters.register
    def note(ctx: Context, result: Any, error: Any) -> None:
        ctx.put([*ctx.get([]), [result, error]])

    @letters.register
    def post(ctx: Context, text: str, aborts: bool) -> str:
        message = ctx.send_external("post", text, then=note, key="answers")
        ctx.put("posted")
        if aborts:
            raise Abort("changed my mind")
        return message

    for workers in range(4):
        world = World(box, workers)
        texts = [f"text {n}" for n in range(8)]
        replies = world.run(*[(post, text, text, False) for text in texts], (post, "z", "never", True))
        world.until(SECOND)
        ids = [reply.unwrap() for reply in replies[:8]]
        assert sorted((perform.call, perform.args) for perform in world.performed) == sorted(
            (message, (text,)) for message, text in zip(ids, texts, strict=True)
        )
        expected = [list(response(*perform)) for perform in world.performed]
        assert world.state()["letter", "answers"] == expected
        assert not any(name == "headrace" for name, _ in world.state())
        world.check()


def test_what_is_headraces_own_cannot_be_called_from_outside() -> None:
    brief = App("brief")
    brief.operator("session", ttl=5)
    world = World(brief)
    for name in ("headrace.set", "headrace.fire", "headrace.drop", "headrace.tick", "session.headrace_expire"):
        (reply,) = world.run((name, "1-" + "0" * 32))
        assert reply.failure is not None
        assert reply.failure.code == "unknown_function"
    with pytest.raises(ModelError, match="reserved"):
        brief.operator("headrace")

    def headrace_expire(ctx: Context) -> None: ...

    with pytest.raises(ModelError, match="reserved"):
        brief.operators["session"].register(headrace_expire)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "charge"}, "is already used"),
        ({"name": "no name"}, "not a plain name"),
        ({"function": 5}, "must be a function"),
        ({"timeout": 0}, "timeout"),
        ({"tries": 0}, "tries"),
        ({"backoff": -1}, "backoff"),
    ],
)
def test_an_external_function_is_checked_when_it_is_made_known(given: dict[str, Any], why: str) -> None:
    app = App("checks")
    app.external("charge", print)
    with pytest.raises(ModelError, match=why):
        app.external(**{"name": "other", "function": print, **given})


# --- with threads and clocks ------------------------------------------------------------------------------------------

real = App("real")
desk = real.operator("desk")
asked: list[tuple[str, Any]] = []


def ask(key: str, what: Any) -> Any:
    asked.append((key, what))
    if what == "sleep":
        threading.Event().wait(5)
    if what == "odd text":
        raise ValueError("\udc80 is no text")
    if what == "silent":
        raise KeyError
    if what == "exit":
        raise SystemExit(3)
    if what == "second try" and sum(each == (key, what) for each in asked) < 2:
        raise OSError("not now")
    return {1} if what == "a set" else [what, "done"]


real.external("ask", ask, timeout=20, tries=2, backoff=0.01)
real.external("nap", ask, timeout=0.2, tries=2, backoff=0.01)


def named(what: str) -> str:
    """Who is asked: only one who sleeps has little time."""
    return "nap" if what == "sleep" else "ask"


@desk.register
async def inquire(ctx: Context, what: str) -> Any:
    return await ctx.call_external(named(what), what)


@desk.register
def write(ctx: Context, what: str) -> None:
    ctx.send_external(named(what), what, then=filed)


@desk.register
def filed(ctx: Context, result: Any, error: Any) -> None:
    ctx.put([result, error])


TEXTS = {
    "odd text": "ask: ValueError: ? is no text, after 2 attempts",
    "silent": "ask: KeyError, after 2 attempts",
    "exit": "ask: SystemExit: 3, after 2 attempts",
    "sleep": "nap: no answer within 0.2 seconds, after 2 attempts",
    "a set": "a set has no order to carry",
}


@pytest.mark.parametrize("what", ["plain", "second try", *TEXTS])
def test_the_outside_world_is_asked_again_with_the_same_key_and_then_given_up(what: str) -> None:
    asked.clear()
    with Runtime(real) as runtime:
        (reply,) = runtime.client.batch([(inquire, "a", what)])
        runtime.client.call(write, "b", what)
        eventually(lambda: runtime.get(desk, "b") is not None or runtime.client.call(filed, "waiting", None, None))
        result, error = runtime.get(desk, "b")
    if what in TEXTS:
        assert reply.failure is not None
        assert reply.failure.code == "external_failed"
        assert TEXTS[what] in reply.failure.message
        assert result is None
        assert TEXTS[what] in error
    else:
        assert reply.unwrap() == result == [what, "done"]
        assert error is None
    keys = [key for key, _ in asked]
    assert len(set(keys)) == 2, "one for the call, one for the message"
    assert len(keys) == (2 if what in ("plain", "a set") else 4)


@pytest.mark.parametrize("size", [50, 90, 97, 98, 99, 100, 200])
def test_a_response_that_has_no_room_in_a_row_comes_back_as_a_failure(size: int) -> None:
    world = World(real, value_bytes_max=100)
    world.run((write, "a", "anything"))
    world.performs.clear()
    (message,) = world.core.deferred.sends
    world.submit(Responded(message, "x" * size))
    world.until(SECOND)
    result, error = world.state()["desk", "a"]
    if error is None:
        assert result == "x" * size
    else:
        assert "over the limit" in error or "a str of 200 characters" in error
    assert (error is None) == (size <= 90)
