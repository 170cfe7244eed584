"""Versions of one app, made from source with known edits: what must happen when one follows another is known, too."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

SOURCE = '''
from __future__ import annotations

import dataclasses
from dataclasses import field
from decimal import Decimal

import msgspec

from headrace import Abort, App, Context

FEE = 1


@dataclasses.dataclass(frozen=True)
class Part:
    size: int = 1
    # more of Part


@dataclasses.dataclass
class Account:
    owner: str
    balance: int = 0
    parts: list[Part] = field(default_factory=list)
    # more of Account

    def is_rich(self) -> bool:
        return self.balance > 1_000


class Note(msgspec.Struct):
    text: str
    part: Part | None = None
    # more of Note


@dataclasses.dataclass
class Order:
    to: str
    amount: int
    # more of Order


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    balance: int
    order: Order
    found: dict[str, Part]
    # more of Receipt


app = App("shop")
account = app.operator("account", state=Account, changes=True)
notes = app.operator("notes")
totals = app.operator("totals", state=int, combine=lambda total, more: total + more)
# more operators


@account.register
async def order(ctx: Context, asked: Order, part: Part) -> Receipt:
    """Puts, calls, sends later, and may abort."""
    found = ctx.get() or Account(str(ctx.key))
    if asked.amount > 90:
        raise Abort("too much")
    found.balance += asked.amount - FEE
    found.parts = [*found.parts, part][-3:]
    ctx.put(found)
    count = await ctx.call(note, asked.to, Note(f"{asked.amount}", part))
    ctx.call_async(add, "all", asked.amount)
    if asked.amount % 7 == 0:
        ctx.call_later(5, later, f"late {ctx.key}", asked)
    return Receipt(found.balance, asked, {f"part {count}": part})


@account.register
def later(ctx: Context, asked: Order) -> Order:
    found = ctx.get() or Account(str(ctx.key))
    found.balance += asked.amount
    ctx.put(found)
    return asked


@notes.register
def note(ctx: Context, said: Note) -> int:
    known = ctx.get([])
    ctx.put([*known, said][-4:])
    return len(known)


@totals.register
def add(ctx: Context, amount: int) -> None:
    ctx.merge(amount)


@totals.register
def total(ctx: Context) -> int:
    return ctx.get(0)


# more functions
# more schedules
'''

ADDS, CHANGES, BREAKS = "adds", "changes code", "breaks state"


class Edit(NamedTuple):
    """`kind` is what the rule says: it only adds; the state still fits; or the state does not fit any more."""

    name: str
    kind: str
    old: str
    new: str


def more(what: str, line: str, name: str) -> Edit:
    return Edit(name, ADDS, f"# more {what}\n", f"{line}\n# more {what}\n")


def new_field(kind: str, declared: str) -> Edit:
    old = f"    # more of {kind}\n"
    return Edit(f"{kind}.{declared.partition(':')[0]}", ADDS, old, f"    {declared}\n{old}")


EDITS = [
    new_field("Part", "colour: str = 'red'"),
    new_field("Part", "price: Decimal = Decimal('1.50')"),
    new_field("Account", "limit: int | None = None"),
    new_field("Account", "tags: list[str] = field(default_factory=list)"),
    new_field("Account", "best: Part = Part(7)"),
    new_field("Account", "remarks: list[Note] = field(default_factory=lambda: [Note('first')])"),
    new_field("Note", "by: str = 'nobody'"),
    new_field("Note", "seen: list[int] = msgspec.field(default_factory=list)"),
    new_field("Order", "urgent: bool = False"),
    new_field("Order", "weight: float = field(default=0.5, kw_only=True)"),
    new_field("Receipt", "rest: tuple[int, ...] = ()"),
    more("functions", "@account.register\ndef owner(ctx: Context) -> str:\n    return ctx.get().owner", "a function"),
    more("functions", "@notes.register\ndef size(ctx: Context, of: Part) -> int:\n    return of.size", "another one"),
    more("operators", "shelf = app.operator('shelf', state=Part, ttl=60)", "an operator"),
    more("schedules", "app.every(3_600, total, 'all', name='hourly')", "a schedule"),
    Edit("a comment", ADDS, "FEE = 1\n", "FEE = 1  # each time\n"),
    Edit("a changed function", CHANGES, "return asked\n", "return Order(asked.to, asked.amount)\n"),
    Edit("a changed constant", CHANGES, "FEE = 1\n", "FEE = 2\n"),
    Edit("a changed method", CHANGES, "> 1_000\n", "> 2_000\n"),
    Edit(
        "a new method",
        CHANGES,
        "    def is_rich",
        "    def is_poor(self) -> bool:\n        return False\n\n    def is_rich",
    ),
    Edit("a changed default", CHANGES, "size: int = 1\n", "size: int = 2\n"),
    Edit("a default that is gone", CHANGES, "size: int = 1\n", "size: int\n"),
    Edit("a field before others", CHANGES, "    balance: int = 0\n", "    limits: int = 3\n    balance: int = 0\n"),
    Edit("another combine", CHANGES, "total + more", "max(total, more)"),
    Edit("a time to live", CHANGES, 'app.operator("notes")', 'app.operator("notes", ttl=3_600)'),
    Edit("a function that is gone", CHANGES, "@totals.register\ndef total", "def total"),
    Edit("a field without a default", BREAKS, "    amount: int\n", "    amount: int\n    extra: int\n"),
    Edit("a field of another type", BREAKS, "    amount: int\n", "    amount: float\n"),
    Edit("a renamed field", BREAKS, "    owner: str\n", "    holder: str\n"),
    Edit("a renamed field with a default", BREAKS, "    balance: int = 0\n", "    cents: int = 0\n"),
    Edit("a field that is gone", BREAKS, "    part: Part | None = None\n", ""),
    Edit("an operator that is gone", BREAKS, 'operator("notes"', 'operator("remarks"'),
]
BY_NAME = {edit.name: edit for edit in EDITS}


def source_of(edits: tuple[Edit, ...]) -> str:
    made = SOURCE
    for edit in edits:
        assert edit.old in made, f"{edit.name} is not possible any more"
        made = made.replace(edit.old, edit.new)
    return made


def kind_of(edits: tuple[Edit, ...]) -> str:
    """What the rule says about all of them together."""
    kinds = {edit.kind for edit in edits}
    return BREAKS if BREAKS in kinds else CHANGES if CHANGES in kinds else ADDS


@contextmanager
def workshop(folder: Path) -> Iterator[Any]:
    """Makes modules from source, each in a folder of its own."""
    numbers, made = itertools.count(1), []

    def make(source: str) -> ModuleType:
        place = folder / f"version_{next(numbers)}"
        place.mkdir()
        name = f"shop_{folder.name}_{place.name}"
        (place / f"{name}.py").write_text(source)
        sys.path.insert(0, str(place))
        importlib.invalidate_caches()
        try:
            made.append(name)
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(place))

    yield make
    for name in made:
        sys.modules.pop(name, None)


def draw_edits(rng: random.Random) -> tuple[Edit, ...]:
    """One to four edits; half of the time only additions."""
    pool = [edit for edit in EDITS if edit.kind == ADDS] if rng.random() < 0.5 else EDITS
    drawn: list[Edit] = []
    for edit in rng.sample(pool, rng.randint(1, 4)):
        try:
            source_of((*drawn, edit))
        except AssertionError:
            continue
        drawn.append(edit)
    return tuple(drawn)
