"""Two workloads with invariants: a bank whose total stays the same, and lists for the history checker (elle.py)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from headrace.errors import Abort
from headrace.model.app import App
from headrace.sim import elle
from headrace.sim.outside import Outside
from headrace.sim.programs import Programs
from headrace.sim.versions import Versions
from headrace.sim.workload import Call, Workload

START, MOST = 100, 160  # balance of an account: at first, and at most


class Bank(Workload):
    """Transfers, awaited and one-way, in one hop and in two; fees that are merged; accounts that may be full."""

    name = "bank"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        app = App("bank")
        super().__init__(app)
        self.accounts = rng.sample([*range(64), *(f"account {i}" for i in range(64))], rng.randint(2, 8))
        self.functions = register_bank(app)

    def call(self, rng: random.Random) -> Call:
        first, second, third = (rng.choice(self.accounts) for _ in range(3))
        amount = rng.randint(1, 40)
        kind = rng.randrange(10)
        if kind < 4:
            return self.functions["transfer"], first, second, amount
        if kind < 6:
            return self.functions["transfer_awaited"], first, second, amount
        if kind < 8:
            return self.functions["transfer_over"], first, second, third, amount
        if kind < 9:
            return self.functions["pay_fee"], first, amount
        return self.functions["audit"], first, list(self.accounts)

    def last_calls(self) -> list[Call]:
        return [(self.functions["audit"], self.accounts[0], list(self.accounts))]

    def check(self, history: Any) -> list[str]:
        total = START * len(self.accounts)
        wrong = []
        for row in history:
            if row.call[0] is self.functions["audit"] and row.status == "ok" and row.result != total:
                wrong.append(f"bank: TID {row.tid} counted {row.result}, not {total}")
            if row.call[0] is not self.functions["audit"] and row.status == "ok" and row.result < 0:
                wrong.append(f"bank: TID {row.tid} left a balance of {row.result}")
        return wrong


def register_bank(app: App) -> dict[str, Any]:
    account = app.operator("account")
    till = app.operator("till", combine=lambda state, delta: state + delta)

    @account.register
    def deposit(ctx: Any, amount: int) -> int:
        balance: int = ctx.get(START) + amount
        if balance > MOST:
            raise Abort(f"{ctx.key} is full")
        ctx.put(balance)
        return balance

    def take(ctx: Any, amount: int) -> int:
        balance: int = ctx.get(START) - amount
        if balance < 0:
            raise Abort(f"{ctx.key} lacks {-balance}")
        if balance == START:
            ctx.delete()
        else:
            ctx.put(balance)
        return balance

    @account.register
    def transfer(ctx: Any, to: Any, amount: int) -> int:
        balance = take(ctx, amount)
        ctx.call_async(deposit, to, amount)
        return balance

    @account.register
    async def transfer_awaited(ctx: Any, to: Any, amount: int) -> int:
        take(ctx, amount)
        await ctx.call(deposit, to, amount)
        return ctx.get(START)  # type: ignore[no-any-return]

    @account.register
    async def transfer_over(ctx: Any, over: Any, to: Any, amount: int) -> int:
        take(ctx, amount)
        await ctx.call(deposit, over, amount)
        await ctx.call(transfer, over, to, amount)
        return ctx.get(START)  # type: ignore[no-any-return]

    @till.register
    def collect(ctx: Any, amount: int) -> None:
        ctx.merge(amount)

    @account.register
    def pay_fee(ctx: Any, amount: int) -> int:
        balance = take(ctx, amount)
        ctx.call_async(collect, "till", amount)
        return balance

    @account.register
    def balance(ctx: Any) -> int:
        return ctx.get(START)  # type: ignore[no-any-return]

    @till.register
    def collected(ctx: Any) -> int:
        return ctx.get(0)  # type: ignore[no-any-return]

    @account.register
    async def audit(ctx: Any, accounts: list[Any]) -> int:
        total: int = await ctx.call(collected, "till")
        for key in accounts:
            total += await ctx.call(balance, key)
        return total

    return {"transfer": transfer, "transfer_awaited": transfer_awaited, "transfer_over": transfer_over} | {
        "pay_fee": pay_fee,
        "audit": audit,
    }


class ListAppends(Workload):
    """Transactions of appends and reads over a few lists. Their histories are checked from outside only."""

    name = "append"

    def __init__(self, rng: random.Random, is_odd: bool) -> None:
        app = App("append")
        super().__init__(app)
        self.keys = [f"list {i}" for i in range(rng.randint(1, 6))]
        self.values = itertools.count(1)
        self.abort_rate = rng.choice((0.0, 0.2))
        self.functions = register_append(app)

    def call(self, rng: random.Random) -> Call:
        ops: list[list[Any]] = []
        is_blind = rng.random() < 0.25
        for _ in range(rng.randint(1, 4)):
            key = rng.choice(self.keys)
            if is_blind or rng.random() < 0.5:
                ops.append([elle.APPEND, key, next(self.values)])
            else:
                ops.append([elle.READ, key, 0])
        aborts = rng.randint(2, 4) if rng.random() < self.abort_rate else 0
        if is_blind:
            return self.functions["send_all"], rng.choice(self.keys), ops
        return self.functions["run_all"], rng.choice(self.keys), ops, aborts

    def last_calls(self) -> list[Call]:
        return [(self.functions["run_all"], self.keys[0], [[elle.READ, key, 0] for key in self.keys], 0)]

    def check(self, history: Any) -> list[str]:
        rows = [
            elle.ElleTransaction(number, list(ops_of(row)), row.status, row.sent, row.answered)
            for number, row in enumerate(history)
            if row.status in (elle.OK, elle.ABORTED)
        ]
        return [f"elle: {anomaly.name}: {anomaly.explanation}" for anomaly in elle.check(rows)]


def ops_of(row: Any) -> Iterator[elle.Op]:
    seen = iter(row.result or ())
    for kind, key, value in row.call[2]:
        if kind == elle.APPEND:
            yield kind, key, value
        elif row.status == elle.OK:
            yield kind, key, next(seen, None)


def register_append(app: App) -> dict[str, Any]:
    lists = app.operator("list")

    @lists.register
    def push(ctx: Any, value: int) -> None:
        ctx.put([*ctx.get([]), value])

    @lists.register
    def look(ctx: Any) -> list[int]:
        return ctx.get([])  # type: ignore[no-any-return]

    @lists.register
    async def run_all(ctx: Any, ops: list[Any], aborts: int) -> list[Any]:
        seen = []
        for kind, key, value in ops:
            if kind == elle.APPEND:
                await ctx.call(push, key, value)
            else:
                seen.append(await ctx.call(look, key))
        if aborts and sum(map(len, seen)) % aborts == 0:
            raise Abort(f"saw {seen}")
        return seen

    @lists.register
    def send_all(ctx: Any, ops: list[Any]) -> list[Any]:
        for _, key, value in ops:
            ctx.call_async(push, key, value)
        return []

    return {"run_all": run_all, "send_all": send_all}


WORKLOADS: dict[str, type[Bank] | type[ListAppends] | type[Outside] | type[Programs] | type[Versions]] = {
    "bank": Bank,
    "append": ListAppends,
    "outside": Outside,
    "programs": Programs,
    "versions": Versions,
}
