"""Random programs: an app whose functions are data. A body is a list of steps, run by a few generic functions; what was
read decides whom a function calls, whether it aborts, and what it writes.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Generator
from typing import Any

from headrace.errors import Abort
from headrace.model.app import App
from headrace.sim.workload import Hooks, Workload


class Trouble(Exception):
    """An ordinary exception of the app's own."""


RAISED: tuple[type[BaseException], ...] = (Abort, Trouble, ValueError, KeyError, SystemExit)
KEYS: tuple[Any, ...] = (*"abcdefgh1", *range(0, 64, 3), b"a", b"1")
TWINS: tuple[Any, ...] = (1, True, 1.0, 0, False, 0.0, -0.0)  # equal in Python, and yet not the same
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, -1, 1 << 40, 0.0, -0.0, 1.0, "", "a", "é", b"", b"a")
CALLS = ("call", "send", "guard")
PLAIN_STEPS = ("get", "get", "put", "put what was read", "append", "delete", "merge", "merge", "raise", "return", "tid")
SELF = object()  # the key of the entity that calls
TWIN_STEPS = ("get", "put", "put", "return the state")
ODD_STEPS = ("spin", "dawdle", "forget", "return a set", "put a set")


def concatenate(state: Any, delta: Any) -> Any:
    return ((state if type(state) is list else [state]) + [delta])[-4:]


def add_or_refuse(state: Any, delta: Any) -> Any:
    if type(state) is not int or type(delta) is not int:
        raise Trouble(f"cannot add {delta!r} to {state!r}")
    return state + delta


def mix(acc: int, value: Any) -> int:
    return zlib.crc32(repr((acc, value)).encode())


def value_of(rng: random.Random, scalars: tuple[Any, ...]) -> Any:
    kind = rng.randrange(6 if scalars is SCALARS else 20)
    if kind == 0:
        return [rng.choice(scalars) for _ in range(rng.randint(0, 2))]
    if kind == 1:
        return (rng.choice(scalars), [rng.choice(scalars)])
    if kind == 2:
        return {rng.choice(("x", 1, b"x")): rng.choice(scalars)}
    return rng.choice(scalars)


def step_of(
    rng: random.Random, keys: list[Any], scalars: tuple[Any, ...], bodies: int, is_odd: bool
) -> tuple[Any, ...]:
    if is_odd and rng.random() < 0.06:
        return rng.choice(ODD_STEPS), rng.randint(2, 5)
    if rng.random() < 0.15:  # by its own arguments, so that it can be predicted; where the last is not 0, not always
        key = rng.choice(keys) if rng.random() < 0.8 else SELF
        form = rng.choice((0, 2))
        return (
            "relay",
            rng.choice(("call", "send")),
            rng.randrange(3),
            form,
            key,
            rng.randrange(bodies),
            rng.choice((0, 0, 5)),
        )
    if rng.random() < 0.4:
        targets = [
            (rng.randrange(3), rng.randrange(4), rng.choice(keys), rng.randrange(bodies))
            for _ in range(rng.randint(1, 3))
        ]
        return rng.choice(CALLS), *targets
    kind = rng.choice(PLAIN_STEPS if scalars is SCALARS else TWIN_STEPS)
    if kind == "get":
        return (kind, rng.choice(scalars)) if rng.random() < 0.5 else (kind,)
    if kind == "merge":
        return kind, rng.randint(-2, 2) if rng.random() < 0.7 else value_of(rng, scalars)
    if kind == "raise":
        return kind, rng.randint(3, 9)
    if kind == "return":
        return kind, rng.randint(2, 5), value_of(rng, scalars)
    return kind, value_of(rng, scalars)


class Interpreter:
    """The app: three operators, four forms of function on each, and the bodies that they run."""

    def __init__(self, name: str) -> None:
        self.app, self.hooks = App(name), Hooks()
        self.bodies: list[list[tuple[Any, ...]]] = []
        self.keys: list[Any] = []
        operators = (
            self.app.operator("plain"),
            self.app.operator("lists", combine=concatenate),
            self.app.operator("sums", combine=add_or_refuse),
        )
        self.forms = [self.register(operator) for operator in operators]

    def register(self, operator: Any) -> tuple[Any, ...]:
        combines, steps = operator.combine is not None, self.steps

        def narrow(ctx: Any, body: int, acc: int, fuel: int) -> Any:
            return drive_plain(ctx, steps(ctx, combines, body, acc, fuel))

        def wide(ctx: Any, body, acc, fuel, payload) -> Any:  # type: ignore[no-untyped-def]
            return drive_plain(ctx, steps(ctx, combines, body, mix(acc, payload), fuel))

        async def narrow_async(ctx: Any, body: int, acc: int, fuel: int) -> Any:
            return await drive_async(ctx, steps(ctx, combines, body, acc, fuel))

        async def wide_async(ctx: Any, body, acc, fuel, payload) -> Any:  # type: ignore[no-untyped-def]
            return await drive_async(ctx, steps(ctx, combines, body, mix(acc, payload), fuel))

        return tuple(map(operator.register, (narrow, wide, narrow_async, wide_async)))

    def steps(self, ctx: Any, combines: bool, body: int, acc: int, fuel: int) -> Generator[Any, Any, Any]:
        """Run a body; yields the calls it wants to make, and is sent their results."""
        given_acc = acc
        for kind, *given in self.bodies[body]:
            if kind == "get":
                acc = mix(acc, ctx.get(*given))
            elif kind == "put":
                ctx.put(given[0])
            elif kind == "put what was read":
                ctx.put(acc)
            elif kind == "append":
                state = ctx.get([])
                if type(state) is list:
                    state.append(given[0])
                    ctx.put(state[-4:])
            elif kind == "delete":
                ctx.delete()
            elif kind == "merge" and combines:
                ctx.merge(given[0])
            elif kind == "tid":
                acc = mix(acc, ctx.tid)
            elif kind == "raise" and acc % given[0] == 0:
                raise RAISED[acc % len(RAISED)](f"{ctx.key} at {acc}")
            elif kind in CALLS and fuel:
                operator, form, key, called = given[acc % len(given)]
                acc = mix(acc, (yield kind, self.forms[operator][form], key, (called, acc, fuel - 1)))
            elif kind == "relay" and fuel and (not given[5] or acc % given[5]):
                how, operator, form, key, called, _ = given
                key = ctx.key if key is SELF else key
                acc = mix(acc, (yield how, self.forms[operator][form], key, (called, given_acc, 0)))
            elif kind == "forget" and fuel and acc % given[0] == 0:
                yield kind, self.forms[0][0], self.keys[0], (0, acc, 0)
            elif kind == "spin" and acc % given[0] == 0:
                self.hooks.spin()
            elif kind == "dawdle" and acc % given[0] == 0:
                self.hooks.dawdle()
            elif kind == "put a set" and acc % given[0] == 0:
                ctx.put({acc})
            elif kind == "return a set" and acc % given[0] == 0:
                return {acc}
            elif kind == "end":  # without a look at the state: so merges alone do not depend on it
                return acc
            elif kind == "return the state":
                return ctx.get("nothing")
            elif kind == "return" and acc % given[0] == 0:
                return given[1]
        return acc, ctx.get("nothing")


class Programs(Workload):
    name = "programs"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        self.runs = runs = Interpreter("programs")
        super().__init__(runs.app)
        self.hooks = runs.hooks
        count, scalars = rng.randint(1, 4), TWINS if rng.random() < 0.3 else SCALARS
        runs.keys = rng.sample(KEYS, rng.randint(2, 7 if scalars is SCALARS else 3))
        runs.bodies = [
            [step_of(rng, runs.keys, scalars, count, is_odd) for _ in range(rng.randint(1, 5))] for _ in range(count)
        ]
        for body in runs.bodies:
            if scalars is SCALARS and rng.random() < 0.4:
                body += [("merge", rng.choice((1, 2))), ("merge", rng.choice((3, 4))), ("end",)]

    def call(self, rng: random.Random) -> tuple[Any, ...]:
        function = self.runs.forms[rng.randrange(3)][rng.randrange(4)]
        args = (rng.randrange(len(self.runs.bodies)), rng.randrange(10), rng.randrange(4))
        return (function, rng.choice(self.runs.keys), *arguments(function, args))


def drive_plain(ctx: Any, running: Generator[Any, Any, Any]) -> Any:
    try:
        while True:
            kind, function, key, args = running.send(None)
            if kind != "forget":
                ctx.call_async(function, key, *arguments(function, args))
    except StopIteration as stop:
        return stop.value


async def drive_async(ctx: Any, running: Generator[Any, Any, Any]) -> Any:
    answer = None
    while True:
        try:
            kind, function, key, args = running.send(answer)
        except StopIteration as stop:
            return stop.value
        args, answer = arguments(function, args), None
        if kind == "send":
            ctx.call_async(function, key, *args)
        elif kind == "call":
            answer = await ctx.call(function, key, *args)
        elif kind == "forget":
            ctx.call(function, key, *args)
        else:
            try:
                answer = await ctx.call(function, key, *args)
            except BaseException:  # what another function raised cannot be caught: all this comes to nothing
                with contextlib.suppress(BaseException):
                    ctx.put("caught")
                    ctx.call_async(function, key, *args)
                return "caught"
            finally:
                ctx.put(["at last", key])


def arguments(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The wide forms take a value more, which is encoded."""
    return (*args, [args[0], (args[1],)]) if function.name.startswith("wide") else args
