"""Random programs that reach out of the state: time, chance, timers and external calls."""

from __future__ import annotations

import contextlib
import datetime
import zlib
from collections.abc import Generator
from typing import Any

from hypothesis import strategies as st

from headrace import Abort, App
from headrace.errors import ExternalFailed


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
