"""YCSB-T with other states than an int: what a struct, a dataclass, Decimals or a wide record cost.

The transfers are those of `bench/ycsb.py`, with the balance in a field of the state. Batches on the shape and batches
on ints alternate in one app, so that both see the same machine: `of_int` is the median ratio of their rates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from headrace.bench.senders import BATCH, Parts, cut, send
from headrace.bench.stores import folder_on_disk
from headrace.bench.ycsb import BALANCE, EngineInThread, NotEnoughCredit, transfers
from headrace.model.app import App
from headrace.model.context import Context
from headrace.model.operator import Function, Operator
from headrace.runtime import gc_settings
from headrace.runtime.cluster import Cluster
from headrace.runtime.driver import Driver
from headrace.runtime.inprocess import Runtime

WANTED = {"int": 1.0, "struct": 0.5, "dataclass": 0.5, "decimal": 0.25, "wide": 0.2}

app = App("ycsb_states")


class StructAccount(msgspec.Struct):
    balance: int
    limit: int


@dataclasses.dataclass
class DataclassAccount:
    balance: int
    limit: int


@dataclasses.dataclass
class DecimalAccount:
    balance: Decimal
    limit: Decimal


@dataclasses.dataclass
class Owner:
    name: str
    country: str
    since: datetime.date


@dataclasses.dataclass
class Terms:
    limit: int
    rate: float
    is_joint: bool


@dataclasses.dataclass
class WideAccount:
    """Ten fields, two of them records."""

    balance: int
    number: str
    currency: str
    opened: datetime.datetime
    bookings: int
    interest: float
    is_open: bool
    note: str | None
    owner: Owner
    terms: Terms


class Shape(NamedTuple):
    """One kind of state, and the functions over it."""

    operator: Operator
    open: Function
    transfer: Function
    balance: Callable[[Any], Any]  # of an unsealed state


def shape_of_int() -> Shape:
    account = app.operator("int_account", state=int)

    @account.register
    def credit(ctx: Context) -> None:
        ctx.put(ctx.get(0) + 1)

    @account.register
    def transfer(ctx: Context, to: int) -> int:
        balance: int = ctx.get(0)
        ctx.call_async(credit, to)
        balance -= 1
        if balance < 0:
            raise NotEnoughCredit(ctx.key)
        ctx.put(balance)
        return balance

    @account.register
    def open_account(ctx: Context) -> None:
        ctx.put(BALANCE)

    return Shape(account, open_account, transfer, lambda state: state)


def shape_of_record(name: str, kind: Any, opened: Callable[[], Any]) -> Shape:
    account = app.operator(f"{name}_account", state=kind)
    is_int = name != "decimal"

    @account.register
    def credit(ctx: Context) -> None:
        state: Any = ctx.get()
        state.balance += 1
        ctx.put(state)

    @account.register
    def transfer(ctx: Context, to: int) -> int:
        state: Any = ctx.get()
        ctx.call_async(credit, to)
        state.balance -= 1
        if state.balance < 0:
            raise NotEnoughCredit(ctx.key)
        ctx.put(state)
        return state.balance if is_int else int(state.balance)

    @account.register
    def open_account(ctx: Context) -> None:
        ctx.put(opened())

    return Shape(account, open_account, transfer, lambda state: state.balance)


def wide() -> WideAccount:
    return WideAccount(
        BALANCE,
        "DE75512108001245126199",
        "EUR",
        datetime.datetime(2024, 2, 29, 12, 30, 45, 123456, tzinfo=datetime.UTC),
        4711,
        0.0175,
        True,
        None,
        Owner("Ada Lovelace", "GB", datetime.date(1815, 12, 10)),
        Terms(10_000, 0.03, False),
    )


SHAPES = {
    "int": shape_of_int(),
    "struct": shape_of_record("struct", StructAccount, lambda: StructAccount(BALANCE, 0)),
    "dataclass": shape_of_record("dataclass", DataclassAccount, lambda: DataclassAccount(BALANCE, 0)),
    "decimal": shape_of_record("decimal", DecimalAccount, lambda: DecimalAccount(Decimal(BALANCE), Decimal("0.00"))),
    "wide": shape_of_record("wide", WideAccount, wide),
}


class InThread:
    """The engine in this thread."""

    def __init__(self) -> None:
        self._engine, self._batches = EngineInThread(app), 0

    def run(self, function: Function, parts: Parts) -> float:
        began = time.perf_counter()
        for keys, args in parts:
            self._batches += 1
            self._engine.map(f"b{self._batches}", function, keys, args)
        return time.perf_counter() - began

    def states(self, shape: Shape) -> dict[Any, Any]:
        return self._engine.states(shape.operator.name)

    def sealed(self, shape: Shape) -> dict[Any, Any]:
        return self._engine.tables[shape.operator.name]


class OnRuntime:
    """A runtime: with a store, or over worker processes."""

    def __init__(self, runtime: Driver) -> None:
        self._runtime = runtime

    def run(self, function: Function, parts: Parts) -> float:
        _, elapsed_s, _ = send(self._runtime, function, parts)
        return elapsed_s

    def states(self, shape: Shape) -> dict[Any, Any]:
        return self._runtime.state(shape.operator)


@contextlib.contextmanager
def measured(workers: int, durable: bool, where: Path | None) -> Iterator[InThread | OnRuntime]:
    if workers == 1 and not durable:
        yield InThread()
        return
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(folder_on_disk(where)) / "store" if durable else None
        runtime: Driver
        if workers == 1:
            runtime = Runtime(app, store=store)
        else:
            runtime = Cluster("headrace.bench.typed_states:app", workers, mode="ordered", store=store)
        yield OnRuntime(stack.enter_context(runtime))


def compare(
    name: str,
    workers: int,
    durable: bool,
    keys: int,
    theta: float,
    transactions: int,
    repeats: int,
    where: Path | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Transfers per second on states of this shape, and on ints in the same run."""
    shape, ints = SHAPES[name], SHAPES["int"]
    everybody = [(list(range(keys)), [()] * keys)]
    laps: list[tuple[float, float]] = []  # seconds of a batch: on ints, on the shape
    with measured(workers, durable, where) as engine:
        for each in {ints, shape}:
            engine.run(each.open, everybody)
        for part in cut(transfers(keys, theta, BATCH, 0), BATCH):  # warm
            engine.run(ints.transfer, [part])
            engine.run(shape.transfer, [part])
        prepared = [cut(transfers(keys, theta, transactions, number), BATCH) for number in range(1, repeats + 1)]
        gc_settings.freeze_gc()  # as `headrace run` does
        for parts in prepared:
            for part in parts:
                pair = (ints, shape) if len(laps) % 2 else (shape, ints)
                took = [engine.run(each.transfer, [part]) for each in pair]
                laps.append((took[0], took[1]) if len(laps) % 2 else (took[1], took[0]))
                progress(len(part[0]))
        balances = {key: shape.balance(state) for key, state in engine.states(shape).items()}
        is_same = sum(balances.values()) == keys * BALANCE
        if name != "int":
            is_same = is_same and balances == engine.states(ints)
    return {
        "workload": "ycsb-t",
        "state": name,
        "keys": keys,
        "zipf": theta,
        "transactions": transactions,
        "repeats": repeats,
        "workers": workers,
        "durable": durable,
        "committed_per_s": round(median(BATCH / on_shape for _, on_shape in laps)),
        "int_per_s": round(median(BATCH / on_int for on_int, _ in laps)),
        "of_int": round(median(on_int / on_shape for on_int, on_shape in laps), 3),
        "wanted": WANTED[name],
        "bytes_per_entity": round(bytes_per_entity(shape, keys), 1),
        "same_balances": is_same,
    }


def bytes_per_entity(shape: Shape, keys: int) -> float:
    """What an account costs in the engine's memory: its entry in the table, its key, its state."""
    engine = InThread()
    engine.run(shape.open, [(list(range(keys)), [()] * keys)])
    table = engine.sealed(shape)
    return (sys.getsizeof(table) + sum(map(sys.getsizeof, table)) + sum(map(sys.getsizeof, table.values()))) / keys


def summary(result: dict[str, Any]) -> Table:
    who = "one worker, serial" if result["workers"] == 1 else f"{result['workers']} workers, ordered"
    with_log = ", durable" if result["durable"] else ""
    table = Table(title=f"YCSB-T, {result['keys']:,} accounts, state {result['state']}, {who}{with_log}")
    for column in ("", result["state"], "int", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("committed per second", f"{result['committed_per_s']:,}", f"{result['int_per_s']:,}", "")
    table.add_row("of int", f"{result['of_int']:.0%}", "", f"at least {result['wanted']:.0%}")
    table.add_row("bytes of memory per account", f"{result['bytes_per_entity']}", "", "")
    table.add_row("the same balances", "yes" if result["same_balances"] else "NO", "", "yes")
    return table
