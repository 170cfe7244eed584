"""A workload with several versions of its app: each adds fields or functions to the one before.

A coordinator that starts may run a newer version than its predecessors. It replays what they logged, and nobody may
notice: the reference runs the whole log by the newest version.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec

from headrace.errors import Abort
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, OperatorPrint, TypePrint, defaults_in, fields_of
from headrace.model.operator import Operator
from headrace.sim.workload import Call, Workload

VERSIONS = 3
COINS = 50  # of a purse, at first


class RecordTypes:
    """The record types of one version."""

    def __init__(self, version: int) -> None:
        def since(first: int, *fields: Any) -> list[Any]:
            return list(fields) if version >= first else []

        made, fresh = dataclasses.make_dataclass, dataclasses.field
        self.pocket = made("Pocket", [("depth", int), *since(1, ("lining", str, "silk"))], frozen=True)
        self.order: Any = msgspec.defstruct(
            "Order", [("to", Any), ("amount", int), *since(2, ("tags", list[str], msgspec.field(default_factory=list)))]
        )
        pocket: Any = self.pocket
        self.purse = made(
            "Purse",
            [
                ("coins", int),
                ("last", list[Any], fresh(default_factory=list)),
                *since(1, ("owner", str | None, None)),
                *since(2, ("spare", pocket, fresh(default_factory=lambda: pocket(9)))),
            ],
        )
        self.receipt = made(
            "Receipt", [("left", int), ("order", Any), ("pockets", Any), *since(1, ("fee", float, 0.5))]
        )

    def all(self) -> list[type]:
        return [self.pocket, self.order, self.purse, self.receipt]


class Versions(Workload):
    """Payments between purses: records are arguments, results, state, and what timers wait for."""

    name = "versions"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        self.types = [RecordTypes(version) for version in range(VERSIONS)]
        self.made = [make_app(version, types) for version, types in enumerate(self.types)]
        super().__init__(self.made[-1])
        self.keys = rng.sample([*range(16), *(f"purse {i}" for i in range(16))], rng.randint(2, 6))

    @property
    def apps(self) -> list[App]:
        return self.made

    def print_of(self, version: int) -> Fingerprint:
        return fingerprint_of(self.made[version], self.types[version])

    def for_version(self, version: int, calls: list[Call]) -> list[Call]:
        """The same calls with the types of this version. Fields that it does not have are at their defaults."""
        order, newest = self.types[version].order, self.types[-1].order
        return [
            tuple(order(part.to, part.amount) if isinstance(part, newest) else part for part in call) for call in calls
        ]

    def call(self, rng: random.Random) -> Call:
        key, to = rng.choice(self.keys), rng.choice(self.keys)
        name = rng.choice(("pay", "pay", "pay", "look", "touch", "remind"))
        args = () if name in ("look", "touch") else (self.types[-1].order(to, rng.randint(1, 30)),)
        return f"purse.{name}", key, *args

    def last_calls(self) -> list[Call]:
        return [("purse.look", key) for key in self.keys]


def make_app(version: int, types: RecordTypes) -> App:
    app = App("versions")
    purse: Operator = app.operator("purse", state=types.purse)
    diary = app.operator("diary")
    for each in types.all():
        app.record(each)

    @diary.register
    def write(ctx: Any, order: Any) -> int:
        known = ctx.get([])
        ctx.put([*known, order][-3:])
        return len(known)

    @purse.register
    def earn(ctx: Any, order: Any) -> None:
        found = ctx.get() or types.purse(COINS)
        found.coins += order.amount
        ctx.put(found)

    @purse.register
    async def pay(ctx: Any, order: Any) -> Any:
        found = ctx.get() or types.purse(COINS)
        if found.coins < order.amount:
            raise Abort(f"{ctx.key} lacks {order.amount - found.coins}")
        found.coins -= order.amount
        found.last = [*found.last, types.pocket(order.amount)][-2:]
        ctx.put(found)
        count = await ctx.call(write, order.to, order)
        ctx.call_async(earn, order.to, order)
        return types.receipt(found.coins, order, {"pocket": types.pocket(count)})

    @purse.register
    def look(ctx: Any) -> Any:
        return ctx.get()

    @purse.register
    def touch(ctx: Any) -> bool:
        """Puts back what is there: nothing changes."""
        found = ctx.get()
        if found is not None:
            ctx.put(found)
        return found is not None

    @purse.register
    def remind(ctx: Any, order: Any) -> None:
        ctx.call_later(0.02, write, ctx.key, order)

    if version:

        @purse.register
        def pay_twice(ctx: Any, order: Any) -> None:
            ctx.call_async(pay, ctx.key, order)
            ctx.call_async(pay, ctx.key, order)

    return app


def fingerprint_of(app: App, types: RecordTypes) -> Fingerprint:
    """Not made from source: these types have none."""
    prints = {
        each.__qualname__: TypePrint(fields_of(each), "", dict.fromkeys(defaults_in(each), "default"))
        for each in types.all()
    }
    operators = {
        name: OperatorPrint("", ["*"]) if operator.state is None else OperatorPrint("Purse", ["Pocket", "Purse"])
        for name, operator in app.operators.items()
    }
    return Fingerprint(app.name, {each.full_name: "" for each in app.functions}, operators, prints)
