"""Time, chance and the outside world in functions: the same in every mode, with any number of workers, whenever it is
run again."""

from __future__ import annotations

import contextlib
import datetime
import random
import threading
import uuid
import zlib
from collections.abc import Generator
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Context, Runtime
from headrace.core import order
from headrace.core.later.deferred import Perform, Responded
from headrace.errors import ExternalFailed, ModelError
from headrace.model.chance import Chance, is_id
from headrace.sim.oracle import path
from tests.outside import SECOND, World, response
from tests.test_serializability import MANY
from tests.waiting import eventually

# --- random programs --------------------------------------------------------------------------------------------------


def mix(acc: int, value: Any) -> int:
    return zlib.crc32(repr((acc, value)).encode())


class Outside:
    """An app whose functions are data, like `sim/programs.py`, with steps that reach out of the state."""

    def __init__(self) -> None:
        self.app = App("outside")
        self.bodies: list[list[tuple[Any, ...]]] = []
        for name in ("charge", "tell"):
            self.app.external(name, lambda key, *args: None)
        operators = (
            self.app.operator("plain"),
            self.app.operator("sums", combine=lambda state, delta: state + delta),
            self.app.operator("brief", ttl=2, combine=lambda state, delta: [state, delta][-1]),
        )
        self.forms = [self.register(operator) for operator in operators]

    def register(self, operator: Any) -> tuple[Any, ...]:
        combines = operator.combine is not None

        def steps(*given: Any) -> Generator[Any, Any, Any]:
            ctx, body, acc, fuel = given
            return self.steps(ctx, body, acc, fuel, combines)

        def narrow(ctx: Any, body: int, acc: int, fuel: int) -> Any:
            running = steps(ctx, body, acc, fuel)
            with contextlib.suppress(StopIteration):
                while True:
                    kind, *given = next(running)
                    if kind in ("send", "call"):
                        ctx.call_async(*given)
            return ctx.get("nothing")

        async def wide(ctx: Any, body: int, acc: int, fuel: int) -> Any:
            running, answer = steps(ctx, body, acc, fuel), None
            while True:
                try:
                    kind, *given = running.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = None
                if kind == "send":
                    ctx.call_async(*given)
                elif kind == "call":
                    answer = await ctx.call(*given)
                elif kind == "forget":
                    ctx.call_external(*given)
                else:
                    try:
                        answer = await ctx.call_external(*given)
                    except ExternalFailed as error:
                        answer = str(error)

        def after(ctx: Any, result: Any, error: Any) -> Any:
            ctx.put([result, error, ctx.now, ctx.random.random()])
            if result is not None and result[1] % 3 == 0:
                raise Abort(f"unwanted: {result}")

        return tuple(map(operator.register, (narrow, wide, after)))

    def steps(self, ctx: Any, body: int, acc: int, fuel: int, combines: bool) -> Generator[Any, Any, Any]:
        for kind, *more in self.bodies[body]:
            if kind == "get":
                acc = mix(acc, ctx.get(0))
            elif kind == "put":
                ctx.put(acc % 100)
            elif kind == "delete":
                ctx.delete()
            elif kind == "merge" and combines:
                with contextlib.suppress(TypeError):
                    ctx.merge(acc % 7)
            elif kind == "now":
                acc = mix(acc, ctx.now)
            elif kind == "random":
                acc = mix(acc, [ctx.random.random(), ctx.random.randrange(9)])
            elif kind == "uuid":
                acc = mix(acc, ctx.uuid())
            elif kind == "raise" and acc % more[0] == 0:
                raise Abort(f"{ctx.key} at {acc}")
            elif kind in ("send", "call") and fuel:
                operator, form, key, called = more[acc % len(more)]
                acc = mix(acc, (yield kind, self.forms[operator][form], key, called, acc, fuel - 1))
            elif kind == "later" and fuel:
                delay, (operator, form, key, called) = more
                timer = ctx.call_later(delay, self.forms[operator][form], key, called, acc, fuel - 1)
                acc = mix(acc, timer)
                if acc % 3 == 0:
                    ctx.cancel(timer)
                elif acc % 3 == 1:
                    ctx.put(timer)
            elif kind == "cancel":
                timer = ctx.get("")
                if type(timer) is str and "-" in timer:
                    ctx.cancel(timer)
            elif kind == "external":
                acc = mix(acc, (yield kind, more[0], acc % 10, [more[1]]))
            elif kind == "forget" and acc % more[2] == 0:
                yield kind, more[0], acc
            elif kind == "message" and fuel:
                name, operator, key = more
                then = self.forms[operator][2] if acc % 5 else None
                message = ctx.send_external(name, acc % 10, then=then, key=key)
                acc = mix(acc, message)
                if acc % 7 == 0:
                    ctx.put(message)
        return acc, ctx.get("nothing")


outside = Outside()

KEYS = st.sampled_from(["a", "b", 1])
TARGETS = st.tuples(st.integers(0, 2), st.integers(0, 1), KEYS, st.integers(0, 2))
NAMES = st.sampled_from(["charge", "tell"])
STEPS = st.one_of(
    *[st.tuples(st.just(kind)) for kind in ("get", "put", "delete", "merge", "now", "random", "uuid", "cancel")],
    *[st.tuples(st.just(kind)) for kind in ("get", "put", "merge")],
    st.tuples(st.just("raise"), st.integers(2, 6)),
    st.tuples(st.just("external"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("forget"), NAMES, st.just(0), st.integers(2, 4)),
    st.tuples(st.just("message"), NAMES, st.integers(0, 2), KEYS | st.none()),
    st.tuples(st.just("later"), st.sampled_from([0, 1, 2.5, datetime.timedelta(seconds=3)]), TARGETS),
    *[
        st.tuples(st.just(kind), st.lists(TARGETS, min_size=1, max_size=3)).map(lambda pair: (pair[0], *pair[1]))
        for kind in ("call", "send")
    ]
    * 2,
)
BODIES = st.lists(st.lists(STEPS, min_size=1, max_size=5), min_size=1, max_size=3)
ROOTS = st.tuples(st.integers(0, 2), st.integers(0, 1), KEYS, st.integers(0, 2), st.integers(0, 9), st.integers(0, 3))
LOGS = st.lists(ROOTS, min_size=1, max_size=20)


class Way(NamedTuple):
    workers: int
    mode: str
    transactions_max: int
    in_flight_max: int
    slice_calls: int
    predict_after: int
    batches: int
    troubles: int  # workers that are lost, and changes of their number
    seed: int


WAYS = st.builds(
    Way,
    st.integers(0, 5),
    st.sampled_from(["auto", "ordered"]),
    st.sampled_from([1, 3, 12, 30]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 500]),
    st.sampled_from([1, 2, 1000]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 1 << 32),
)


def play(bodies: Any, log: Any, way: Way) -> World:
    outside.bodies = [bodies[body % len(bodies)] for body in range(3)]
    calls = [(outside.forms[operator][form], key, *args) for operator, form, key, *args in log]
    world = World(
        outside.app,
        way.workers,
        way.mode,
        way.seed,
        epoch_transactions_max=way.transactions_max,
        epochs_in_flight_max=way.in_flight_max,
        slice_calls_max=way.slice_calls,
        predict_after_runs=way.predict_after,
    )
    size = -(-len(calls) // way.batches)
    rng = random.Random(way.seed)
    for at in range(0, len(calls), size):
        world.send(calls[at : at + size])
        for _ in range(rng.randrange(30)):
            world.deliver()
        for _ in range(rng.randint(0, way.troubles)):
            world.trouble()
            for _ in range(rng.randrange(60)):
                world.deliver()
        if rng.random() < 0.5:
            world.until(world.now_us + rng.choice([1, SECOND, 2 * SECOND + 1]))
    world.until(world.now_us + 20 * SECOND)
    return world


@given(BODIES, LOGS, WAYS)
@settings(max_examples=5 * MANY)
def test_what_was_logged_gives_the_same_in_a_loop(bodies: Any, log: Any, way: Way) -> None:
    world = play(bodies, log, way)
    assert set(world.replies) == set(range(world.submitted)), "something was not answered"
    world.check()
    rows = [entry.name for epoch in world.epochs for entry in epoch.entries]
    event(f"{way.workers} workers, timers: {'headrace.fire' in rows}, external: {bool(world.performed)}")


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
    "then of one argument": ("BadCall", "is called with a result and an error"),
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
    with pytest.raises(ModelError, match="Headrace's own"):
        brief.operator("headrace")

    def headrace_expire(ctx: Context) -> None: ...

    with pytest.raises(ModelError, match="Headrace's own"):
        brief.operators["session"].register(headrace_expire)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "charge"}, "is taken"),
        ({"name": "no name"}, "no plain name"),
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
    "odd text": "ask: ValueError: ? is no text, after 2 tries",
    "silent": "ask: KeyError, after 2 tries",
    "exit": "ask: SystemExit: 3, after 2 tries",
    "sleep": "nap: no answer within 0.2 seconds, after 2 tries",
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
    assert (result, error) == ("x" * size, None) if error is None else "over the limit" in error
    assert (error is None) == (size <= 90)
