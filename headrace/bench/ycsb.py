"""YCSB-T: transfers of one unit between accounts. Each is two calls, two reads and two writes.

The debtor is drawn uniformly, the creditor by Zipf's law as Gray et al. draw it (not scrambled: rank r is key r), and
again while it is the debtor. The engine is driven in this thread, from the arguments to the answers, in slices that
alternate with the reference loop, so that both see the same machine; and once more through a runtime's client, whose
engine has its own thread.
"""

from __future__ import annotations

import gc
import operator
import random
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import reference
from headrace.bench.senders import Stopwatch
from headrace.core.admission import Admission
from headrace.core.engine import Engine
from headrace.core.events import Answer, Submit
from headrace.core.origin import FromClient
from headrace.errors import Abort
from headrace.model.app import App
from headrace.model.context import Context
from headrace.model.operator import Function
from headrace.runtime.inprocess import Runtime
from headrace.wire.messages import Answers

BALANCE = 1_000_000
SLICE = 10_000  # transactions per batch: ten epochs


RATES = ("committed_per_s", "reference_per_s", "through_client_per_s")


class NotEnoughCredit(Abort):
    pass


app = App("ycsb")
account = app.operator("account")


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
def transfer_in_vain(ctx: Context, to: int) -> int:
    """A transfer that aborts at the end of its function."""
    balance: int = ctx.get(0)
    ctx.call_async(credit, to)
    balance -= 1
    ctx.put(balance)
    raise NotEnoughCredit(ctx.key)


@account.register
async def credit_coroutine(ctx: Context) -> None:
    ctx.put(ctx.get(0) + 1)


@account.register
async def transfer_coroutine(ctx: Context, to: int) -> int:
    balance: int = ctx.get(0)
    ctx.call_async(credit_coroutine, to)
    balance -= 1
    if balance < 0:
        raise NotEnoughCredit(ctx.key)
    ctx.put(balance)
    return balance


@account.register
def open_account(ctx: Context, balance: int) -> None:
    ctx.put(balance)


# --- further forms, for several workers -------------------------------------------------------------------------------


@account.register
def credit_and_tell(ctx: Context) -> int:
    balance: int = ctx.get(0) + 1
    ctx.put(balance)
    return balance


@account.register
async def transfer_awaited(ctx: Context, to: int) -> int:
    balance: int = ctx.get(0) - 1
    if balance < 0:
        raise NotEnoughCredit(ctx.key)
    ctx.put(balance)
    await ctx.call(credit_and_tell, to)
    return balance


counter = app.operator("counter", combine=operator.add)


@counter.register
def count(ctx: Context) -> None:
    ctx.merge(1)


@account.register
def transfer_counted(ctx: Context, to: int) -> int:
    balance: int = ctx.get(0) - 1
    if balance < 0:
        raise NotEnoughCredit(ctx.key)
    ctx.put(balance)
    ctx.call_async(count, to)
    return balance


@account.register
def credit_costly(ctx: Context, spins: int) -> None:
    spin(spins)
    ctx.put(ctx.get(0) + 1)


@account.register
def transfer_costly(ctx: Context, to: int, spins: int) -> int:
    spin(spins)
    balance: int = ctx.get(0) - 1
    if balance < 0:
        raise NotEnoughCredit(ctx.key)
    ctx.put(balance)
    ctx.call_async(credit_costly, to, spins)
    return balance


def spin(spins: int) -> None:
    """Work that does nothing but take time."""
    for _ in range(spins):
        pass


class LoopForm(NamedTuple):
    """One way to write the functions, and the loop that is its reference."""

    name: str
    function: Function
    loop: Callable[[dict[Any, Any], reference.Work], list[Any]]


FORMS = (
    LoopForm("plain", transfer, reference.run_plain),
    LoopForm("coroutine", transfer_coroutine, reference.run_coroutines),
)


class SerialFigures(NamedTuple):
    committed_per_s: float
    reference_per_s: float
    ratio: float
    through_client_per_s: float
    through_client_ratio: float
    aborted: int
    p50_ms: float
    p99_ms: float
    conserved: bool
    same_as_reference: bool


def zipf(keys: int, theta: float, rng: random.Random) -> Iterator[int]:
    """Ranks by Zipf's law (Gray et al., 1994); theta 0 is uniform."""
    if theta == 0:
        while True:
            yield rng.randrange(keys)
    zeta = sum(1 / rank**theta for rank in range(1, keys + 1))
    alpha, zeta_2 = 1 / (1 - theta), 1 + 0.5**theta
    eta = (1 - (2 / keys) ** (1 - theta)) / (1 - zeta_2 / zeta)
    while True:
        u = rng.random()
        if u * zeta < 1:
            yield 0
        elif u * zeta < zeta_2:
            yield 1
        else:
            yield min(keys - 1, int(keys * (eta * u - eta + 1) ** alpha))


def transfers(keys: int, theta: float, count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    creditors = zipf(keys, theta, rng)
    pairs = []
    for _ in range(count):
        debtor, creditor = rng.randrange(keys), next(creditors)
        while creditor == debtor:
            creditor = next(creditors)
        pairs.append((debtor, creditor))
    return pairs


def run(form: LoopForm, pairs: list[tuple[int, int]], keys: int, progress: Callable[[int], None]) -> SerialFigures:
    """Reference, engine and client, slice by slice. Their input is made before, so that none of them finds it in the
    cache."""
    parts = [pairs[start : start + SLICE] for start in range(0, len(pairs), SLICE)]
    prepared = [
        (
            [(form.function.body, debtor, (creditor,)) for debtor, creditor in part],
            [debtor for debtor, _ in part],
            [(creditor,) for _, creditor in part],
        )
        for part in parts
    ]
    gc.collect()
    gc.freeze()  # the workload is not garbage
    state = dict.fromkeys(range(keys), BALANCE)
    bare, engine = Stopwatch(), Stopwatch()
    expected: list[Any] = []
    got: list[Any] = []
    aborted = 0
    driver = EngineInThread()
    everybody, opening = list(range(keys)), [(BALANCE,)] * keys
    driver.map("open", open_account, everybody, opening)
    with Runtime(app) as runtime:
        runtime.client.map(open_account, everybody, opening)
        client = Stopwatch()
        for number, (calls, debtors, args) in enumerate(prepared):
            with bare:
                expected += form.loop(state, calls)
            with engine:
                answers = driver.map(f"slice-{number}", form.function, debtors, args)
            with client:
                runtime.client.map(form.function, debtors, args)
            aborted += len(answers.failures)
            got += answers.results
            progress(len(debtors))
        same_in_both = runtime.state(account) == driver.tables["account"]
    final = driver.tables["account"]
    return SerialFigures(
        committed_per_s=(len(pairs) - aborted) / sum(engine.laps_s),
        reference_per_s=len(pairs) / sum(bare.laps_s),
        ratio=median(one / other for one, other in zip(bare.laps_s, engine.laps_s, strict=True)),
        through_client_per_s=(len(pairs) - aborted) / sum(client.laps_s),
        through_client_ratio=median(one / other for one, other in zip(bare.laps_s, client.laps_s, strict=True)),
        aborted=aborted,
        p50_ms=engine.percentile_ms(50),
        p99_ms=engine.percentile_ms(99),
        conserved=sum(final.values()) == keys * BALANCE,
        same_as_reference=same_in_both
        and final == state
        and got == [None if isinstance(result, Exception) else result for result in expected],
    )


class EngineInThread:
    """The engine in this thread, like the reference: from the arguments to the answers, without a runtime."""

    def __init__(self, app: App = app) -> None:
        self._engine = Engine(app)
        self._admission = Admission(self._engine.program)
        self.tables = {name: table.states for name, table in self._engine.state.tables.items()}

    def states(self, operator: str) -> dict[Any, Any]:
        unseal = self._engine.program.values.unseal
        return {key: unseal(state) for key, state in self.tables[operator].items()}

    def map(self, request_id: str, function: Function, keys: list[Any], args: list[tuple[Any, ...]]) -> Answers:
        batch = self._admission.admit_columns(FromClient(request_id), function, keys, args)
        (answer,) = self._engine.step(time.time_ns() // 1_000, Submit([(None, batch)]))
        assert isinstance(answer, Answer)
        return answer.answers


def cost_of_failing(keys: int, theta: float, slices: int) -> dict[str, float]:
    """What a transfer costs that aborts, and one that is refused, against one that commits, in alternating slices."""
    driver = EngineInThread()
    driver.map("open", open_account, list(range(keys)), [(BALANCE,)] * keys)
    watches = {name: Stopwatch() for name in ("ok", "aborted", "refused")}
    for number in range(slices):
        pairs = transfers(keys, theta, SLICE, number)
        debtors, creditors = [debtor for debtor, _ in pairs], [(creditor,) for _, creditor in pairs]
        wrong = [(str(creditor),) for _, creditor in pairs]
        found: dict[str, int] = {}
        for name, function, args in (
            ("ok", transfer, creditors),
            ("aborted", transfer_in_vain, creditors),
            ("refused", transfer, wrong),
        ):
            with watches[name]:
                answers = driver.map(f"{name}-{number}", function, debtors, args)
            found[name] = len(answers.failures)
        assert found == {"ok": 0, "aborted": SLICE, "refused": SLICE}, f"not what was to be measured: {found}"
    assert sum(driver.tables["account"].values()) == keys * BALANCE
    return {
        f"{name}_of_ok": median(
            one / other for one, other in zip(watches[name].laps_s, watches["ok"].laps_s, strict=True)
        )
        for name in ("aborted", "refused")
    }


def bytes_per_entity(keys: int) -> float:
    """What an account costs in the engine's memory: its entry in the table, its key, its state."""
    with Runtime(app) as runtime:
        runtime.client.map(open_account, list(range(keys)), [(BALANCE + key,) for key in range(keys)])
        table = runtime.engine.state.tables["account"].states
        return (sys.getsizeof(table) + sum(map(sys.getsizeof, table)) + sum(map(sys.getsizeof, table.values()))) / keys


def ycsb(keys: int, theta: float, transactions: int, repeats: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """The whole benchmark: each form several times, the median of each figure."""
    result: dict[str, Any] = {"workload": "ycsb-t", "keys": keys, "zipf": theta, "transactions": transactions}
    result |= {
        "repeats": repeats,
        "workers": 1,
        "mode": "serial",
        "durable": False,
        "latency_of": f"a batch of {SLICE}",
    }
    for form in FORMS:
        runs = [run(form, transfers(keys, theta, transactions, seed), keys, progress) for seed in range(1, repeats + 1)]
        figures: dict[str, Any] = {
            name: round(median(getattr(one, name) for one in runs), 3)
            for name in (*RATES, "ratio", "through_client_ratio", "p50_ms", "p99_ms")
        }
        for name in RATES:
            figures[name] = round(figures[name])
        figures["aborted"] = sum(one.aborted for one in runs)
        figures["conserved"] = all(one.conserved for one in runs)
        figures["same_as_reference"] = all(one.same_as_reference for one in runs)
        if form.name == "plain":
            result |= figures
        else:
            result[form.name] = figures
    slices = max(5, transactions * repeats // SLICE // 5)
    result |= {name: round(figure, 2) for name, figure in cost_of_failing(keys, theta, slices).items()}
    result["bytes_per_entity"] = round(bytes_per_entity(keys), 1)
    return result


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"YCSB-T, {result['keys']:,} accounts, zipf {result['zipf']}, one worker, serial, in memory")
    for column in ("", "plain def", "async def"):
        table.add_column(column, justify="right" if column else "left")
    forms = (result, result["coroutine"])
    for title, name, shape in (
        ("committed per second", "committed_per_s", ",.0f"),
        ("a bare loop with undo", "reference_per_s", ",.0f"),
        ("of the bare loop", "ratio", ".0%"),
        ("through a client", "through_client_per_s", ",.0f"),
        ("of the bare loop", "through_client_ratio", ".0%"),
        (f"batches of {SLICE:,}: p50 ms", "p50_ms", ".1f"),
        ("p99 ms", "p99_ms", ".1f"),
        ("aborted", "aborted", ",d"),
    ):
        table.add_row(title, *(format(form[name], shape) for form in forms))
    table.add_row("conserved", *("yes" if form["conserved"] else "NO" for form in forms))
    table.add_row("same as the bare loop", *("yes" if form["same_as_reference"] else "NO" for form in forms))
    for title, name in (("aborted", "aborted_of_ok"), ("refused", "refused_of_ok")):
        table.add_row(f"cost of a call that is {title}, of one that commits", f"{result[name]:.2f}", "")
    table.caption = f"{result['bytes_per_entity']} bytes of memory per account"
    return table
