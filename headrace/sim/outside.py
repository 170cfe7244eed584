"""A workload that uses more than state: time, randomness, timers, schedules, external calls, state that expires."""

from __future__ import annotations

import random
from typing import Any

from headrace.errors import Abort, ExternalFailed
from headrace.model.app import App
from headrace.model.chance import is_id
from headrace.sim.timer_check import Ending
from headrace.sim.workload import Call, Workload

KEYS = ("a", "b", "c", 1, 2, 3)
TTL_S = 0.05
BEGIN_US = 1_000_000  # when a world begins


class Outside(Workload):
    """Each call does one thing with the outside world, and stores the result in its entity's state."""

    name = "outside"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        app = App("outside")
        super().__init__(app)
        self.keys = rng.sample(KEYS, rng.randint(2, len(KEYS)))
        self.functions = register(app)
        self.kinds = rng.sample(sorted(KINDS), rng.randint(2, len(KINDS)))
        self.failures = rng.choice((0.2, 0.7))  # how many of the timers abort when they fire
        for number in range(rng.choice((0, 1, 1, 3))):
            self._chime(rng, f"chime {number}")

    def _chime(self, rng: random.Random, name: str) -> None:
        every_us, last_us = rng.choice((20_000, 50_000, 200_000)), BEGIN_US + rng.choice((100_000, 300_000, 800_000))
        chimed, failures = self.functions["chimed"], rng.choice((0.0, 0.3, 1.0))
        schedule = self.app.options(name=name).every(every_us / 1_000_000, chimed, rng.choice(self.keys), failures)
        self.app.schedules[name] = schedule._replace(when=Ending(every_us, last_us))

    def call(self, rng: random.Random) -> Call:
        key, other = rng.choice(self.keys), rng.choice(self.keys)
        name = rng.choice(self.kinds)
        delay_s = rng.choice((0.0, 0.001, 0.02, 0.1))
        args = {"delay": delay_s, "key": other, "amount": rng.randint(1, 9), "fails": rng.random() < self.failures}
        return self.functions[name], key, *(args[each] for each in KINDS[name])

    def last_calls(self) -> list[Call]:
        return [(self.functions["look"], key) for key in self.keys]


KINDS: dict[str, tuple[str, ...]] = {  # functions, and their arguments
    "stamp": (),
    "choose": ("amount",),
    "remind": ("delay", "key", "amount", "fails"),
    "forget": (),
    "buy": ("amount", "fails"),
    "buy_for": ("key", "amount"),
    "post": ("key", "amount"),
    "touch": ("amount",),
    "look": (),
}


def register(app: App) -> dict[str, Any]:
    app.external("charge", lambda key, *args: None)  # never called: the world answers
    app.external("mail", lambda key, *args: None)
    thing = app.operator("thing")
    brief = app.operator("brief", ttl=TTL_S)

    def add(ctx: Any, what: Any) -> None:
        ctx.put([*ctx.get([])[-4:], what])

    @thing.register
    def look(ctx: Any) -> Any:
        return ctx.get([])

    @thing.register
    def reminded(ctx: Any, amount: int, fails: bool) -> None:
        if fails:
            raise Abort(f"reminded of {amount}")
        add(ctx, ["reminded", amount, ctx.now.timestamp(), ctx.tid])

    @thing.register
    def chimed(ctx: Any, failures: float) -> None:
        if ctx.random.random() < failures:
            raise Abort(f"no chime at {ctx.now}")
        add(ctx, ["chimed", ctx.now.timestamp(), ctx.tid])

    @thing.register
    def posted(ctx: Any, result: Any, error: Any) -> None:
        add(ctx, ["posted", result, error])

    @thing.register
    def stamp(ctx: Any) -> Any:
        what = [ctx.now.timestamp(), ctx.random.randrange(1_000_000), str(ctx.uuid()), ctx.tid]
        add(ctx, what)
        return what

    @thing.register
    def choose(ctx: Any, amount: int) -> int:
        """Calls an entity that is drawn at random."""
        key: int = ctx.random.randrange(1, 4)
        ctx.call_async(reminded, key, amount, ctx.random.random() < 0.2)
        return key

    @thing.register
    def remind(ctx: Any, delay: float, key: Any, amount: int, fails: bool) -> str:
        timer: str = ctx.call_later(delay, reminded, key, amount, fails)
        ctx.put([*ctx.get([])[-4:], timer])
        return timer

    @thing.register
    def forget(ctx: Any) -> int:
        """Cancels all timers and messages that it knows of."""
        known = [each for each in ctx.get([]) if is_id(each)]
        for each in known:
            ctx.cancel(each)
        return len(known)

    @thing.register
    async def buy(ctx: Any, amount: int, fails: bool) -> Any:
        try:
            got = await ctx.call_external("charge", amount)
        except ExternalFailed as error:
            got = str(error)
        add(ctx, ["bought", got])
        if fails:
            raise Abort(f"paid {got}, and does not want it")
        return got

    @thing.register
    async def buy_for(ctx: Any, key: Any, amount: int) -> Any:
        first = await ctx.call(buy, key, amount, False)
        add(ctx, first)
        return [first, await ctx.call_external("charge", -amount)]

    @thing.register
    def post(ctx: Any, key: Any, amount: int) -> str:
        message: str = ctx.send_external("mail", amount, then=posted, key=key)
        ctx.put([*ctx.get([])[-4:], message])
        return message

    @brief.register
    def touch(ctx: Any, amount: int) -> int:
        count: int = ctx.get(0) + amount
        ctx.put(count)
        return count

    found = {"look": look, "stamp": stamp, "choose": choose, "remind": remind, "forget": forget, "buy": buy}
    return found | {"buy_for": buy_for, "post": post, "touch": touch, "chimed": chimed}
