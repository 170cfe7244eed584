"""A durable engine under a test's hand: what is written to the store, when, and where everything ends.

Nothing reaches the store before the test says so. Whoever makes a second `Hand` on the same store has killed the first:
what it had not written is lost.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from headrace import Abort, App, Config, Context, Reply
from headrace.core.events import (
    Append,
    Check,
    Keep,
    Perform,
    Read,
    Rescale,
    Rescaled,
    Responded,
    Save,
    SnapshotTaken,
    TakeSnapshot,
)
from headrace.core.origin import FromClient, FromSource
from headrace.durability import recovery
from headrace.durability.keeper import PendingRecord, StoreWork
from headrace.durability.recovery import OpenedStore
from headrace.durability.store import Store
from headrace.errors import StoreError
from headrace.model.fingerprint import fingerprint
from headrace.sim.disk import Disk, SimStore
from headrace.sim.oracle import Oracle
from headrace.wire.messages import RequestIds
from tests.cluster import at_random, outcome
from tests.driver import Driver

PATIENCE_US = 10_000_000  # that `settle` lets pass

app = App("hand")
item = app.operator("item")
MACHINE: dict[str, Any] = {"scarce": False, "weather": "fine"}  # what functions should not depend on, and some do


@contextmanager
def exhausted() -> Iterator[None]:
    MACHINE["scarce"] = True
    try:
        yield
    finally:
        MACHINE["scarce"] = False


@contextmanager
def turned(weather: Any) -> Iterator[None]:
    MACHINE["weather"] = weather
    try:
        yield
    finally:
        MACHINE["weather"] = "fine"


@item.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@item.register
def move(ctx: Context, to: str, amount: int) -> int:
    """Fails in the callee."""
    ctx.put(ctx.get(0) - amount)
    ctx.call_async(take_in, to, amount)
    return int(ctx.get())


@item.register
def take_in(ctx: Context, amount: int) -> None:
    if amount > 100:
        raise Abort("too much")
    ctx.put(ctx.get(0) + amount)


@item.register
async def ask(ctx: Context, of: str) -> int:
    return int(await ctx.call(add, of, 1))


@item.register
def put(ctx: Context, value: Any) -> Any:
    ctx.put(value)
    return value


@item.register
def exhaust(ctx: Context, what: str) -> str:
    """Runs out of something, if it is scarce."""
    if MACHINE["scarce"]:
        raise RecursionError("too deep") if what == "stack" else MemoryError("too much")
    ctx.put("ran")
    return "ran"


@item.register
async def ask_exhausted(ctx: Context, of: str) -> str:
    return str(await ctx.call(exhaust, of, "stack"))


@item.register
def weather(ctx: Context) -> str:
    """Depends on what is not in the log."""
    ctx.put(MACHINE["weather"])
    return str(MACHINE["weather"])


@item.register
def drop(ctx: Context) -> Any:
    before = ctx.get()
    ctx.delete()
    return before


def memory(can_append: bool = True) -> SimStore:
    """A store in memory: a directory, or one of objects."""
    return SimStore(Disk(random.Random(0), can_append=can_append), "memory")


class NoSnapshots(SimStore):
    """Refuses snapshots, while told to."""

    refuses = False

    def put(self, name: str, data: bytes) -> None:
        self._check(name)
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._check(name)
        return super().create(name, data)

    def _check(self, name: str) -> None:
        if self.refuses and name.startswith(("state/", "snapshots/")):
            raise StoreError(f"no room for {name}")


def after_power_loss(store: SimStore) -> SimStore:
    """What another process finds when all that was not synced is gone."""
    return type(store)(store.disk.after_worst_power_loss(), store.who)


print_of = functools.cache(fingerprint)  # the code of an app does not change while tests run


class Hand(Driver):
    """With a store, to which records, replies and snapshots go when the test says so."""

    def __init__(
        self,
        store: Store,
        app: App,
        workers: int = 0,
        now_us: int = 0,
        seed: int | None = None,
        mode: str = "auto",
        **config: int,
    ) -> None:
        settings = Config(**{"snapshot_interval_us": 1 << 60} | config)  # none by themselves
        with patch.object(recovery, "fingerprint", print_of):
            self.opened_store = OpenedStore(store, app, settings)
        self.records: deque[PendingRecord | Check] = deque()  # on their way to the log
        self.rest: deque[Any] = deque()  # replies, snapshots, retirements
        self.snapshots: dict[Any, int] = {}
        self.performs: deque[Perform] = deque()  # the outside world has not answered these
        self.outside: Callable[[Perform], Responded] | None = None
        choose = (lambda ready: ready[0]) if seed is None else at_random(seed)
        core: dict[str, Any] = {"is_durable": True, "seed": self.opened_store.seed}
        if workers:
            core["term"] = self.opened_store.log.term
        super().__init__(app, settings, workers, mode, choose=choose, now_us=now_us, **core)

    def prepare(self) -> None:
        self.opened_store.restore(self.core)
        self.store_work = StoreWork(self.opened_store)

    # --- clients ---

    def send(self, ids: RequestIds, calls: Sequence[Any]) -> int:
        return self._submit(self.admission.admit(FromClient(ids), calls))

    def send_source(self, source: str, number: int, function: Any, rows: Sequence[Sequence[Any]]) -> int:
        """A batch of a source: each row is the key and the arguments."""
        keys, args = [row[0] for row in rows], [tuple(row[1:]) for row in rows]
        origin = FromSource(f"{source}/{number}", source, number)
        return self._submit(self.admission.admit_columns(origin, function, keys, args))

    def _submit(self, batch: Any) -> int:
        return self.hand_over(batch)[0]

    def run(self, ids: RequestIds, calls: Sequence[Any]) -> list[Reply]:
        """Send, and let everything happen."""
        token = self.send(ids, calls)
        self.settle()
        return self.replies[token]

    def state(self) -> dict[Any, Any]:
        """All entities: (operator, key) -> state."""
        self.submit(Read("state"))
        self.settle()
        return self.found.pop("state")

    def take_snapshot(self) -> int | None:
        """Its epoch, if it could be saved; else the reason is among the refusals."""
        token = ("snapshot", len(self.snapshots) + len(self.refusals))
        self.submit(TakeSnapshot(token))
        self.settle()
        return self.snapshots.get(token)

    def rescale(self, workers: int) -> None:
        self.submit(Rescale("rescale", workers))
        self.settle()

    # --- the store ---

    def sync(self, count: int | None = None) -> bool:
        """The first records that wait become durable, together."""
        group = [self.records.popleft() for _ in range(len(self.records) if count is None else count)]
        if not group:
            return False
        for news in self.store_work.append(group):
            self.submit(news)
        self.rest.extend(item for item in group if isinstance(item, PendingRecord) and item.retired)
        return True

    def work(self) -> bool:
        """One thing in the background: replies of an epoch, a snapshot, or what is not needed any more."""
        if not self.rest:
            return False
        first = self.rest.popleft()
        if isinstance(first, Keep):
            self.store_work.prepare(first.epoch, first.changes)
            self.store_work.keep([first.epoch])
        elif isinstance(first, Save):
            for news in self.store_work.save(first.snapshot):
                self.submit(news)
            self.store_work.compact()
        else:
            self.store_work.retire(first.retired)
        return True

    def hold_save(self) -> Save:
        """The snapshot that is wanted is taken, and not written: put it back into `rest`."""
        while not any(isinstance(item, Save) for item in self.rest):
            assert self.deliver() or self.sync(), "nobody wants one"
        save = next(item for item in self.rest if isinstance(item, Save))
        self.rest.remove(save)
        return save

    def perform(self) -> bool:
        """The outside world does the first thing that it was asked for."""
        if not self.performs or self.outside is None:
            return False
        self.submit(self.outside(self.performs.popleft()))
        return True

    def compute(self) -> None:
        """All that needs no store, and no time."""
        while self.deliver():
            pass

    def settle(self) -> list[Any]:
        """Let everything happen, also what is due within the next ten seconds."""
        until_us = self.now_us + PATIENCE_US
        while True:
            self.compute()
            if self.sync() or self.work() or self.perform():
                continue
            due = min(self.timers.values(), default=until_us)
            if due >= until_us:
                return []
            self.now_us = max(self.now_us, due)

    def happen(self, rng: random.Random, sync_chance: float = 1.0) -> bool:
        """One thing happens, whichever. False if nothing can. With a small `sync_chance` the log is slow."""

        def sync_some() -> bool:
            return bool(self.records) and rng.random() < sync_chance and self.sync(rng.randint(1, len(self.records)))

        ready = [self.deliver, self.work, self.perform, sync_some]
        rng.shuffle(ready)
        return any(one() for one in ready)

    def take(self, effect: Any) -> None:
        if isinstance(effect, Append):
            self.records.append(self.store_work.encode(effect))
        elif isinstance(effect, Check):
            self.records.append(effect)
        elif isinstance(effect, Keep | Save):
            self.rest.append(effect)
        elif isinstance(effect, SnapshotTaken):
            self.snapshots[effect.token] = effect.epoch
        elif isinstance(effect, Perform):
            self.performs.append(effect)
        elif not isinstance(effect, Rescaled):
            super().take(effect)


SEVEN: list[Any] = [(add, "a", 1), (add, "b", 1)] * 3 + [(add, "a", 1)]


def loop(calls: Sequence[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """What a loop over these calls gives: outcomes, and the state."""
    oracle = Oracle()
    return [oracle.transact(*call) for call in calls], oracle.state


def check_by_tid(called: dict[int, Any], replies: dict[int, Reply], state: dict[Any, Any]) -> None:
    """These calls, by TID, one after the other, give these replies and this state."""
    outcomes, expected = loop([called[tid] for tid in sorted(called)])
    assert list(map(repr, outcomes)) == [repr(outcome(replies[tid])) for tid in sorted(called)]
    assert sorted(map(repr, state.items())) == sorted(map(repr, expected.items()))
