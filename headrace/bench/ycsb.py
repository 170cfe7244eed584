"""YCSB-T: transfers of one unit between accounts. Each is two calls, two reads and two writes.

The debtor is drawn uniformly, the creditor by Zipf's law as Gray et al. draw it (not scrambled: rank r is key r), and
again while it is the debtor. The engine is driven through its client, from the arguments to the replies, in slices that
alternate with the reference loop, so that both see the same machine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.table import Table

from headrace.bench import reference
from headrace.model.app import App
from headrace.model.context import Context
from headrace.model.operator import Function
from headrace.runtime.inprocess import Runtime

BALANCE = 1_000_000
SLICE = 10_000  # transactions per batch: ten epochs


class NotEnoughCredit(Exception):
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


class Form(NamedTuple):
    """One way to write the functions, and the loop that is its reference."""

    name: str
    function: Function
    loop: Callable[[dict[Any, Any], reference.Work], list[Any]]


FORMS = (
    Form("plain", transfer, reference.run_plain),
    Form("coroutine", transfer_coroutine, reference.run_coroutines),
)


class Measured(NamedTuple):
    committed_per_s: float
    reference_per_s: float
    ratio: float
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


def run(form: Form, pairs: list[tuple[int, int]], keys: int, progress: Callable[[int], None]) -> Measured:
    """Both, slice by slice."""
    function, body = form.function, form.function.body
    state = dict.fromkeys(range(keys), BALANCE)
    engine_s: list[float] = []
    reference_s: list[float] = []
    expected: list[Any] = []
    got: list[Any] = []
    aborted = 0
    with Runtime(app) as runtime:
        client = runtime.client
        client.map(open_account, list(range(keys)), [(BALANCE,)] * keys)
        for start in range(0, len(pairs), SLICE):
            part = pairs[start : start + SLICE]
            calls = [(body, debtor, (creditor,)) for debtor, creditor in part]
            debtors, args = [debtor for debtor, _ in part], [(creditor,) for _, creditor in part]
            began = time.perf_counter()
            expected += form.loop(state, calls)
            between = time.perf_counter()
            replies = client.map(function, debtors, args)
            ended = time.perf_counter()
            reference_s.append(between - began)
            engine_s.append(ended - between)
            aborted += len(replies.failures)
            got += replies.results
            progress(len(part))
        final = runtime.state(account)
    cuts = quantiles(engine_s, n=100) if len(engine_s) > 1 else engine_s * 99
    return Measured(
        committed_per_s=(len(pairs) - aborted) / sum(engine_s),
        reference_per_s=len(pairs) / sum(reference_s),
        ratio=median(bare / engine for bare, engine in zip(reference_s, engine_s, strict=True)),
        aborted=aborted,
        p50_ms=1e3 * cuts[49],
        p99_ms=1e3 * cuts[98],
        conserved=sum(final.values()) == keys * BALANCE,
        same_as_reference=final == state
        and got == [None if isinstance(result, Exception) else result for result in expected],
    )


def bytes_per_entity(keys: int) -> float:
    """What an account costs in the engine's memory: its place in the table, its key, its state."""
    with Runtime(app) as runtime:
        runtime.client.map(open_account, list(range(keys)), [(BALANCE + key,) for key in range(keys)])
        table = runtime.engine.program.tables["account"]
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
            for name in ("committed_per_s", "reference_per_s", "ratio", "p50_ms", "p99_ms")
        }
        figures["committed_per_s"], figures["reference_per_s"] = (
            round(figures["committed_per_s"]),
            round(figures["reference_per_s"]),
        )
        figures["aborted"] = sum(one.aborted for one in runs)
        figures["conserved"] = all(one.conserved for one in runs)
        figures["same_as_reference"] = all(one.same_as_reference for one in runs)
        if form.name == "plain":
            result |= figures
        else:
            result[form.name] = figures
    result["bytes_per_entity"] = round(bytes_per_entity(keys), 1)
    return result


def summary(result: dict[str, Any]) -> Table:
    table = Table(title=f"YCSB-T, {result['keys']:,} accounts, zipf {result['zipf']}, one worker, serial, in memory")
    for column in ("functions", "committed/s", "bare loop/s", "ratio", "p50 ms", "p99 ms", "aborted", "conserved"):
        table.add_column(column, justify="left" if column == "functions" else "right")
    for name, row in (("plain def", result), ("async def", result["coroutine"])):
        table.add_row(
            name,
            f"{row['committed_per_s']:,}",
            f"{row['reference_per_s']:,}",
            f"{row['ratio']:.2f}",
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            f"{row['aborted']:,}",
            "yes" if row["conserved"] and row["same_as_reference"] else "NO",
        )
    table.caption = f"latency of a batch of {SLICE:,}; {result['bytes_per_entity']} bytes per account"
    return table
