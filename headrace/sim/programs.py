"""Random programs: an app whose functions are data. A body is a list of steps, run by a few generic functions; what was
read decides which function is called, whether it aborts, and what it writes.

A program has a shape, drawn first: how many entities there are, how deep and wide its calls go, how many of them are
awaited, how often it aborts, how few its values are. So programs differ in kind, and not only in detail. This is the
only generator: `sim/cases.py` runs programs on workers in every order, `sim/run.py` runs them under faults, property
tests run them alone. (Timers, external calls and the like have their own programs in `sim/outside.py` and
`tests/core/outside_programs.py`: small ones, where the order in time matters.)
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import Counter
from collections.abc import Generator
from typing import Any

import msgspec

from headrace.errors import Abort
from headrace.model.app import App
from headrace.sim.workload import Hooks, Workload


class AppError(Exception):
    """An ordinary exception of the app."""


class StopRaised(Exception):
    """Stands for a StopIteration of a plain function, which `steps` cannot raise."""


RAISED: tuple[type[BaseException], ...] = (Abort, AppError, ValueError, KeyError, SystemExit, StopRaised)
KEYS: tuple[Any, ...] = (*"abcdefgh1", *range(0, 64, 3), b"a", b"1", *(f"key {n}" for n in range(9)))
TWINS: tuple[Any, ...] = (1, True, 1.0, 0, False, 0.0, -0.0)  # equal in Python, but not the same
FEW: tuple[Any, ...] = (0, 1, 2)  # so few that equal values meet
NAN = float("nan")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, -1, 1 << 40, 0.0, -0.0, 1.0, NAN, "", "a", "é", b"", b"a")
VALUES = {"any": SCALARS, "twins": TWINS, "few": FEW}
PLAIN_STEPS = (
    "get",
    "get",
    "put",
    "put what was read",
    "put what was read",
    "append",
    "delete",
    "merge",
    "merge",
    "tid",
)
BLIND_STEPS = ("put", "put", "put", "put what was read", "put what was read", "merge", "merge", "merge", "delete")
TWIN_STEPS = ("get", "put", "put", "return the state")
ODD_STEPS = ("spin", "dawdle", "forget", "return a set", "put a set")
WRONG_STEPS = ODD_STEPS[2:]  # those that end
SELF = "the entity that calls"
GIVEN = "the entity that it was told"
BARE = 6  # the form of a function without arguments
NO_STATE = ...  # stays itself when it is copied

Step = tuple[Any, ...]
Body = list[Step]
Root = tuple[int, int, Any, tuple[int, int, int]]  # operator, form and key; body, accumulator, and fuel


class ProgramShape(msgspec.Struct, frozen=True):
    """The kind of a program. The defaults are those of a quiet one."""

    keys: int = 5
    values: str = "any"
    modulus: int = 0  # of a function's accumulator: with it, different reads may have the same effect
    bodies: int = 2
    depth: int = 2  # of calls
    calls: float = 1.0  # that a body makes, on average
    steps: int = 3  # besides the calls, at most
    reads: float = 0.5  # probability that a body begins with a read of the state
    targets: int = 2  # how many targets a read decides between, at most
    wavering: float = 0.2  # share of targets of another kind: one-way, awaited, or not called at all
    awaited: float = 0.5  # share of the calls
    aborts: float = 0.2  # probability that a body may abort
    skew: float = 0.0  # share of the calls that go to the first key
    relays: float = 0.2  # share of the calls that follow from the caller's arguments, and can be predicted
    odd: tuple[str, ...] = ()  # steps that a normal function does not have
    is_blind: bool = False  # most writes do not depend on the state that they replace
    kind: str = "mixed"  # or "tangled", or "relayed"
    is_uniform: bool = False  # all roots call one function


def draw_shape(rng: random.Random, odd: tuple[str, ...] = (), size_max: int = 120) -> ProgramShape:
    """Draws the shape of a program whose transactions make at most about `size_max` calls."""
    depth = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))
    size = min(rng.choice((2, 2, 3, 3, 3, 5, 5, 8, 12, 20, 40, 120)), size_max)
    shape = ProgramShape(
        keys=rng.choice((1, 2, 3, 5, 8, 8, 12, 20, 20, 40)),
        values=rng.choice(("any", "twins", "twins", "few", "few", "few")),
        modulus=rng.choice((0, 0, 2, 3, 5, 11, 101)),
        bodies=rng.choice((1, 2, 4, 8, 20)),
        depth=depth,
        calls=0.0 if not depth else min(size ** (1 / depth), 12.0),
        steps=rng.choice((1, 2, 3, 5)),
        reads=rng.choice((0.0, 0.3, 0.8, 1.0)),
        targets=rng.choice((1, 2, 3, 3, 4)),
        wavering=rng.choice((0.0, 0.2, 0.6)),
        awaited=rng.choice((0.0, 0.2, 0.5, 0.8, 0.9, 0.9)),
        aborts=rng.choice((0.0, 0.1, 0.3, 0.3, 0.6)),
        skew=rng.choice((0.0, 0.0, 0.3, 0.7, 0.95)),
        relays=rng.choice((0.0, 0.0, 0.0, 0.2, 0.5, 1.0, 1.0)),
        odd=odd,
        is_blind=rng.random() < 0.5,
    )
    kind = rng.random()
    return tangled(rng, shape) if kind < 0.75 else relayed(rng, shape) if kind < 0.83 else shape


def tangled(rng: random.Random, shape: ProgramShape) -> ProgramShape:
    """Narrow trees of awaited calls whose targets depend on what was read: many calls are not made after all, and few
    transactions are held."""
    return msgspec.structs.replace(
        shape,
        keys=rng.choice((4, 8, 16, 40)),
        values=rng.choice(("any", "few", "few")),
        modulus=rng.choice((0, 0, 3, 101, 101)),
        bodies=rng.choice((3, 8, 20)),
        depth=rng.choice((1, 2, 3, 3, 3)),
        calls=rng.choice((1.0, 1.4, 1.4, 1.8, 2.5)),
        reads=rng.choice((0.5, 1.0)),
        targets=rng.choice((2, 3, 4)),
        awaited=rng.choice((0.7, 0.9, 1.0)),
        aborts=rng.choice((0.0, 0.0, 0.3, 0.8)),
        skew=rng.choice((0.0, 0.0, 0.3)),
        relays=0.0,
        kind="tangled",
    )


def relayed(rng: random.Random, shape: ProgramShape) -> ProgramShape:
    """Calls that mostly follow from arguments: they are predicted, and now and then the prediction is wrong."""
    return msgspec.structs.replace(
        shape,
        keys=rng.choice((4, 8, 16, 40)),
        values=rng.choice(("twins", "twins", "few")),
        bodies=rng.choice((1, 1, 2)),
        depth=rng.choice((1, 1, 2)),
        calls=rng.choice((1.0, 2.0)),
        awaited=rng.choice((0.0, 0.5, 0.9)),
        relays=1.0,
        kind="relayed",
        is_uniform=rng.random() < 0.5,
    )


def size_of(shape: ProgramShape) -> float:
    """How many calls a transaction makes, roughly."""
    return sum(shape.calls**level for level in range(shape.depth + 1))


def draw_bodies(rng: random.Random, shape: ProgramShape, keys: list[Any]) -> list[Body]:
    return [draw_body(rng, shape, keys) for _ in range(shape.bodies)]


def draw_body(rng: random.Random, shape: ProgramShape, keys: list[Any]) -> Body:
    calls = int(shape.calls) + (rng.random() < shape.calls % 1)
    body = [draw_call(rng, shape, keys) for _ in range(calls)]
    for _ in range(rng.randint(0, shape.steps)):
        body.insert(rng.randint(0, len(body)), draw_step(rng, shape))
    if rng.random() < shape.aborts:
        at = rng.randint(0, len(body))
        body[at:at] = [("get", 0)] * (rng.random() < 0.7) + [("raise", rng.randint(2, 9))]
    if shape.odd and rng.random() < 0.3:
        body.insert(rng.randint(0, len(body)), (rng.choice(shape.odd), rng.randint(2, 5)))
    if shape.is_blind and rng.random() < 0.4:  # so that a put writes the value that is there already, unknowingly
        body = [("merge", rng.randint(0, 2)), *body, ("put", rng.choice(FEW)), ("end",)]
    if rng.random() < shape.reads:
        body.insert(0, ("get", 0))
    if rng.random() < 0.2:
        body += [("merge", rng.choice((1, 2))), ("merge", rng.choice((3, 4)))]
    if rng.random() < (0.9 if shape.is_blind else 0.5):
        body.append(("end",))
    return body


def draw_call(rng: random.Random, shape: ProgramShape, keys: list[Any]) -> Step:
    is_awaited = rng.random() < shape.awaited
    if (
        rng.random() < shape.relays
    ):  # by its own arguments, so that it can be predicted; where the last is not 0, not always
        key = rng.choice((draw_key(rng, shape, keys), draw_key(rng, shape, keys), SELF, GIVEN, GIVEN))
        forms: tuple[int, ...] = (0, 2) if shape.values != "twins" else (0, 2, 4, 5)
        forms += (BARE, BARE) if shape.kind == "relayed" else ()
        how, form, odds = "call" if is_awaited else "send", rng.choice(forms), rng.choice((0, 0, 5))
        return "relay", how, rng.randrange(3), form, key, rng.randrange(shape.bodies), odds
    if shape.kind == "tangled" and rng.random() < 0.2:  # here, nowhere or there
        here, there = (draw_target(rng, shape, keys, "call") for _ in range(2))
        return "call", here, draw_target(rng, shape, keys, "skip"), there
    kind = "send" if not is_awaited else "guard" if rng.random() < 0.1 else "call"
    targets = []
    for _ in range(rng.randint(1, shape.targets)):
        how = kind if rng.random() >= shape.wavering else rng.choice(("call", "send", "skip"))
        targets.append(draw_target(rng, shape, keys, how))
    return "call", *targets


def draw_target(rng: random.Random, shape: ProgramShape, keys: list[Any], how: str) -> tuple[Any, ...]:
    form, key = draw_form(rng, shape), draw_key(rng, shape, keys)
    return how, rng.randrange(3), form, key, rng.randrange(shape.bodies)


def draw_root(rng: random.Random, shape: ProgramShape, keys: list[Any]) -> Root:
    fuel = shape.depth if rng.random() < 0.7 or shape.kind == "relayed" else rng.randint(0, shape.depth)
    form, key = draw_form(rng, shape), draw_key(rng, shape, keys)
    operator = rng.randrange(3)
    if shape.is_uniform:
        operator, form = 0, 2
    return operator, form, key, (rng.randrange(shape.bodies), rng.randrange(10), fuel)


def draw_form(rng: random.Random, shape: ProgramShape) -> int:
    """Draws the form of a function: only coroutines can await; a few take an encoded value, or one that has twins."""
    is_wide = rng.random() < 0.2
    is_async = rng.random() < max(shape.awaited, 0.5)
    return 4 + is_async if shape.values == "twins" and rng.random() < 0.5 else is_wide + 2 * is_async


def draw_key(rng: random.Random, shape: ProgramShape, keys: list[Any]) -> Any:
    return keys[0] if rng.random() < shape.skew else rng.choice(keys)


def draw_step(rng: random.Random, shape: ProgramShape) -> Step:
    scalars = VALUES[shape.values]
    kind = rng.choice(TWIN_STEPS if scalars is TWINS else BLIND_STEPS if shape.is_blind else PLAIN_STEPS)
    if kind == "get":
        return (kind, rng.choice(scalars)) if rng.random() < 0.5 else (kind,)
    if kind == "put what was read":
        return kind, rng.choice((2, 3, 1 << 32))
    if kind == "merge":
        return kind, rng.randint(-2, 2) if rng.random() < 0.7 else draw_value(rng, scalars)
    if kind == "tid" and rng.random() < 0.5:
        return "return", rng.randint(2, 5), draw_value(rng, scalars)
    return kind, draw_value(rng, scalars)


def draw_value(rng: random.Random, scalars: tuple[Any, ...]) -> Any:
    kind = rng.randrange(6 if scalars is SCALARS else 20)
    if kind == 0:
        return [rng.choice(scalars) for _ in range(rng.randint(0, 2))]
    if kind == 1:
        return (rng.choice(scalars), [rng.choice(scalars)])
    if kind == 2:
        return {rng.choice(("x", 1, b"x")): rng.choice(scalars)}
    return rng.choice(scalars)


def concatenate(state: Any, delta: Any) -> Any:
    return ((state if type(state) is list else [state]) + [delta])[-4:]


def add_or_refuse(state: Any, delta: Any) -> Any:
    if type(state) is not int or type(delta) is not int:
        raise AppError(f"cannot add {delta!r} to {state!r}")
    return (state + delta) % 4  # few values, so that equal ones meet


def mix(acc: int, value: Any) -> int:
    return zlib.crc32(repr((acc, value)).encode())


class Interpreter:
    """The app: three operators, seven forms of function on each, and the bodies that they run."""

    def __init__(self, name: str) -> None:
        self.app, self.hooks = App(name), Hooks()
        self.bodies: list[Body] = []
        self.keys: list[Any] = []
        self.modulus = 0
        self.runs = 0  # how many bodies were started, by the reference or by workers
        self.seen: Counter[str] | None = None  # what they did; None: not counted
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

        def twin(ctx: Any, body, acc, fuel, like) -> Any:  # type: ignore[no-untyped-def]
            result = drive_plain(ctx, steps(ctx, combines, body, mix(acc, like), fuel, acc, like))
            return result if fuel else ctx.put(like)  # shows which of the twins it was

        async def twin_async(ctx: Any, body, acc, fuel, like) -> Any:  # type: ignore[no-untyped-def]
            result = await drive_async(ctx, steps(ctx, combines, body, mix(acc, like), fuel, acc, like))
            return result if fuel else ctx.put(like)

        def bare(ctx: Any) -> Any:
            self.runs += 1
            state = mix(0, ctx.get(0)) % 1_000
            ctx.put(state)
            return state

        return tuple(map(operator.register, (narrow, wide, narrow_async, wide_async, twin, twin_async, bare)))

    def load(self, bodies: list[Body], keys: list[Any], modulus: int = 0) -> None:
        """Makes the functions run these bodies from now on."""
        self.bodies, self.keys, self.modulus = bodies, keys, modulus

    def call(self, root: Root) -> tuple[Any, ...]:
        operator, form, key, args = root
        function = self.forms[operator][form]
        return (function, key, *arguments(function, args))

    def mix(self, acc: int, value: Any) -> int:
        mixed = mix(acc, value)
        return mixed % self.modulus if self.modulus else mixed

    def steps(
        self, ctx: Any, combines: bool, body: int, acc: int, fuel: int, given_acc: int | None = None, like: Any = None
    ) -> Generator[Any, Any, Any]:
        """Runs a body; yields the calls it makes, and receives their results. What it relays follows from its
        arguments: for a value with twins, one that equals it."""
        self.runs += 1
        mix, given_acc = self.mix, acc if given_acc is None else given_acc
        for kind, *given in self.bodies[body]:
            if self.seen is not None:
                self.note(ctx, kind, given, acc, fuel)
            if kind == "get":
                acc = mix(acc, ctx.get(*given))
            elif kind == "put":
                ctx.put(given[0])
            elif kind == "put what was read":
                ctx.put(acc % given[0])
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
            elif kind == "call" and fuel:
                how, operator, form, key, called = given[acc % len(given)]
                if how != "skip":
                    acc = mix(acc, (yield how, self.forms[operator][form], key, (called, acc, fuel - 1)))
            elif kind == "relay" and fuel and (not given[5] or acc % given[5]):
                how, operator, form, key, called, _ = given
                key = ctx.key if key is SELF else given_acc if key is GIVEN else key
                relayed: tuple[Any, ...] = (called, given_acc, 0) if form != BARE else ()
                if like is not None and form in (4, 5):
                    relayed = (called, given_acc, 0, bool(like))
                acc = mix(acc, (yield how, self.forms[operator][form], key, relayed))
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
            elif kind == "end":  # without reading the state: so merges alone do not depend on it
                return acc
            elif kind == "return the state":
                return ctx.get("nothing")
            elif kind == "return" and acc % given[0] == 0:
                return given[1]
        return acc, ctx.get("nothing")

    def note(self, ctx: Any, kind: str, given: list[Any], acc: int, fuel: int) -> None:
        """Counts what the reference is about to do: a generator that is too narrow would show here."""
        assert self.seen is not None
        if kind in ("call", "relay"):
            if not fuel:
                return
            target = given if kind == "relay" else given[acc % len(given)]
            self.seen["self-calls"] += target[3] is SELF or target[3] == ctx.key
            self.seen["twins relayed"] += kind == "relay" and target[2] in (4, 5)
            self.seen["relayed bare"] += kind == "relay" and target[2] == BARE
            self.seen[f"calls {target[0]}"] += 1
        elif kind in ("put", "put what was read"):
            new, old = given[0] if kind == "put" else acc % given[0], ctx.get(NO_STATE)
            self.seen["equal puts"] += type(old) is type(new) and old == new
        elif kind == "get":
            self.seen["missing state"] += ctx.get(NO_STATE) is NO_STATE
        self.seen[kind] += 1


class Programs(Workload):
    name = "programs"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        self.runs = runs = Interpreter("programs")
        super().__init__(runs.app)
        self.hooks, self.shape = runs.hooks, draw_shape(rng, ODD_STEPS if is_odd else (), size_max=20)
        keys = rng.sample(KEYS, self.shape.keys)
        runs.load(draw_bodies(rng, self.shape, keys), keys, self.shape.modulus)

    def call(self, rng: random.Random) -> tuple[Any, ...]:
        return self.runs.call(draw_root(rng, self.shape, self.runs.keys))


def drive_plain(ctx: Any, running: Generator[Any, Any, Any]) -> Any:
    try:
        while True:
            kind, function, key, args = running.send(None)
            if kind != "forget":
                ctx.call_async(function, key, *arguments(function, args))
    except StopIteration as stop:
        return stop.value
    except StopRaised as ended:
        raise StopIteration(str(ended)) from None


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
            except BaseException:  # an exception of another function cannot be caught: this is undone
                with contextlib.suppress(BaseException):
                    ctx.put("caught")
                    ctx.call_async(function, key, *args)
                return "caught"
            finally:
                ctx.put(["at last", key])


def arguments(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The wide forms take one more value, which is encoded; the twin forms take one that equals others."""
    if function.name.startswith("wide"):
        return (*args, [args[0], (args[1],)])
    return (*args, TWINS[args[1] % 7]) if function.name.startswith("twin") and len(args) == 3 else args
