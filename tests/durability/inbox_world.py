"""A small world around an inbox: a model of Spark that repeats and recuts its batches, engines that take them, and a
scheduler that lets one of them do one operation on the store at a time, kills them, and lets the power fail.

Spark keeps which rows each batch has and how many batches are done; nothing else survives it. An engine that is
replaced may go on for a while without knowing. What must hold in the end is in `World.check`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import msgspec
import pyarrow as pa

from headrace import Abort, App, Context
from headrace.core.events import Read, TakeSnapshot
from headrace.core.origin import BatchId
from headrace.durability.inbox import inbox
from headrace.durability.inbox.dead_letters import dead_letter_names, read_dead_letters
from headrace.durability.inbox.inbox import ClosedBatch, close_batch, write_segment
from headrace.durability.log.log import read_log
from headrace.durability.store import Store
from headrace.errors import Fenced, LogBroken, SnapshotBroken, StoreError, StreamError, WrongStore
from headrace.runtime.intake import InboxReader
from headrace.sim.disk import Disk, DiskFaults, SimStore
from headrace.spark.sources import calls
from tests.durability.hand import Hand
from tests.durability.memory import Killed, Process

app = App("inbox")
item = app.operator("item")


@item.register
def note(ctx: Context, uid: int) -> list[int]:
    """The order matters."""
    ctx.put([*ctx.get([]), uid])
    return [uid, len(ctx.get())]


@item.register
def both(ctx: Context, uid: int) -> list[int]:
    if uid % 5 == 0:
        raise Abort(f"not {uid}")
    ctx.put([*ctx.get([]), uid])
    ctx.call_async(note, "all", uid)
    return [uid, len(ctx.get())]


@dataclasses.dataclass(frozen=True)
class Row:
    uid: int
    function: str
    key: str | None


FUNCTIONS = ("item.note", "item.both")
LONG = "k" * 20  # too long a key under some limits
FIELDS = {"key": pa.string(), "n": pa.int64(), "f": pa.string(), "i": pa.string()}


def loop(rows: list[Row]) -> tuple[dict[int, Any], dict[str, list[int]]]:
    """What one after the other gives: results by uid, None where it aborts, and the state."""
    state: dict[str, list[int]] = {}
    results: dict[int, Any] = {}
    for row in rows:
        assert row.key is not None
        results[row.uid] = None
        if row.function == "item.both" and row.uid % 5 == 0:
            continue
        state.setdefault(row.key, []).append(row.uid)
        results[row.uid] = [row.uid, len(state[row.key])]
        if row.function == "item.both":
            state.setdefault("all", []).append(row.uid)
    return results, state


class Spark:
    """One query. What it has planned and committed is its checkpoint; all else is gone when it is killed."""

    def __init__(self, query: str, rng: random.Random, first_uid: int) -> None:
        self.query, self.rng = query, rng
        self.is_mixed = rng.random() < 0.5
        self.has_ids = rng.random() < 0.5
        self.batches: list[list[Row]] = []
        for _ in range(rng.randint(2, 6)):
            count = rng.choice((0, 1, 3, 7))
            self.batches.append([self._row(uid) for uid in range(first_uid, first_uid + count)])
            first_uid += count
        self.committed = 0
        self.orders: dict[int, list[list[int]]] = {number: [] for number in range(len(self.batches))}
        self.repeats = 0

    def _row(self, uid: int) -> Row:
        function = self.rng.choice(FUNCTIONS) if self.is_mixed else "item.both"
        return Row(uid, function, self.rng.choices(("a", "b", "c", None, LONG), (8, 8, 8, 1, 1))[0])

    @property
    def is_done(self) -> bool:
        return self.committed == len(self.batches)

    def writer(self, path: str) -> calls.StreamWriter:
        options = {"path": path, "key": "key", "args": "n", "function": "" if self.is_mixed else "item.both"}
        if self.has_ids:
            options["requestId"] = "i"
        columns = ["key", "n", *(["function"] if self.is_mixed else []), *(["i"] if self.has_ids else [])]
        schema = types.SimpleNamespace(fieldNames=lambda: columns)
        return calls.StreamWriter(options, schema)  # type: ignore[arg-type]

    def run(self, path: str, is_current: Callable[[], bool]) -> None:
        """What its driver does, until it is killed or something fails; one that was replaced commits nothing."""
        while not self.is_done and is_current():
            number = self.committed
            writer = self.writer(path)
            messages = self._write(writer, number)
            writer = self.writer(path)  # it is made again for the commit
            if self.rng.random() < 0.1:
                writer.patience_s = 0
            try:
                writer.commit(list(messages), number)
            except (StreamError, StoreError) as error:
                writer.abort(list(messages), number)
                if isinstance(error, StreamError) and (writer.patience_s or "has not finished after" not in str(error)):
                    raise
                return
            if is_current():
                self.committed = max(self.committed, number + 1)

    def _write(self, writer: calls.StreamWriter, number: int) -> list[calls.TaskCommit]:
        """The tasks: the rows are cut at random, each part keeps its order; some attempts are lost."""
        rng, parts = self.rng, self.rng.randint(1, 3)
        where = [rng.randrange(parts) for _ in self.batches[number]]
        written = []
        for part in range(parts):
            rows = [row for row, at in zip(self.batches[number], where, strict=True) if at == part]
            for _ in range(rng.choice((1, 1, 1, 2))):  # only the last attempt of a task tells
                done = writer._write(self._arrow(rows), self.query, number, part)
            written.append((done, [row.uid for row in rows]))
        self.orders[number].append([uid for _, uids in written for uid in uids])
        messages = [done for done, _ in written]
        rng.shuffle(messages)
        return messages

    def _arrow(self, rows: list[Row]) -> Iterator[pa.RecordBatch]:
        columns: dict[str, list[Any]] = {"key": [row.key for row in rows], "n": [row.uid for row in rows]}
        if self.is_mixed:
            columns["function"] = [row.function for row in rows]
        if self.has_ids:
            columns["i"] = [f"own/{row.uid}" for row in rows]
        types = [pa.int64() if name == "n" else pa.string() for name in columns]
        arrays = [pa.array(values, kind) for values, kind in zip(columns.values(), types, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        cut = self.rng.randint(0, len(rows))
        return iter([batch.slice(0, cut), batch.slice(cut)])


class Engine:
    """A hand, and an inbox reader that submits to it."""

    def __init__(
        self,
        store: Any,
        rng: random.Random,
        config: dict[str, int],
        workers: int = 0,
        app: App = app,
        snapshots: float = 0.0,
    ) -> None:
        """`snapshots` is how likely one is asked for, with each turn."""
        self.hand = Hand(store, app, workers, **config)  # type: ignore[arg-type]
        self.rng, self.snapshots = rng, snapshots
        self.futures: dict[int, Future[Any]] = {}
        self.done: list[tuple[BatchId, Future[Any]]] = []
        self.reader = InboxReader(store, self.hand.admission, self._submit, self.hand.core.sources.last_of, self._check)

    def _submit(self, batch: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures[self.hand._submit(batch)] = future
        return future

    def _check(self) -> None:
        self.hand.submit(Read("check", ""))
        self.hand.settle()

    def turn(self) -> bool:
        """A look, and some of what is to be done. False if there is nothing."""
        hand, rng = self.hand, self.rng
        looked = 0
        with contextlib.suppress(StoreError):  # as `Intake` does
            looked = self.reader.look(lambda *item: self.done.append(item))
        hand.now_us += 1_000
        if rng.random() < self.snapshots:
            hand.submit(TakeSnapshot(("snapshot", hand.now_us)))
        happened = [hand.happen(rng) for _ in range(rng.randint(0, 9))]
        for token in [token for token in self.futures if token in hand.replies or token in hand.refusals]:
            future = self.futures.pop(token)
            if token in hand.replies:
                future.set_result(hand.replies[token])
            else:
                future.set_exception(hand.refusals[token])
        rng.shuffle(self.done)
        for _ in range(rng.randint(0, len(self.done))):
            with contextlib.suppress(StoreError):
                self.reader.finish(*self.done.pop())
        return bool(looked or self.futures or self.done or any(happened))


class Machine:
    """A disk, for processes that stop before each operation."""

    def __init__(self, disk: Disk, stores: dict[str, Any]) -> None:
        self.disk, self.stores, self.count = disk, stores, 0

    def store(self, hook: Callable[[str, str], None]) -> SimStore:
        self.count += 1
        made = SimStore(self.disk, str(self.count), lambda _, op, name: hook(op, name))
        self.stores[str(self.count)] = made
        return made


class World:
    def __init__(self, seed: int, can_append: bool = True, disturbances: int = 8, faults: float = 0.0) -> None:
        """`faults` is how often an operation on the store fails, though it may have been done, or reads wrong."""
        self.rng = random.Random(seed)
        self.belated: list[Callable[[], None]] = []  # what a store of objects does after it has failed
        disk_faults = DiskFaults(errors=faults, flips=faults, sync_errors=faults / 4 if can_append else 0)
        self.disk = Disk(random.Random(seed + 1), disk_faults, can_append, self.belated.append)
        self.trouble: tuple[type[BaseException], ...] = (Killed, Fenced)  # what a process may end with
        if faults:
            self.trouble += (StoreError,)
        self.stores: dict[str, Any] = {}
        self.machine = Machine(self.disk, self.stores)
        self.sparks = [Spark("q", self.rng, 1)]
        if self.rng.random() < 0.4:
            self.sparks.append(Spark("r", self.rng, 1_001))
        self.workers = self.rng.choice((0, 0, 0, 2))
        self.key_bytes_max = 100
        self.left = disturbances  # before it becomes quiet
        self.drivers: dict[Spark, Process | None] = dict.fromkeys(self.sparks)
        self.engine: Process | None = None
        self.zombies: dict[Process, int] = {}  # each sleeps for so many turns
        self.story: list[str] = []

    # --- processes ---

    def _config(self) -> dict[str, int]:
        rng = self.rng
        if not self.zombies:  # or dead letters might be those of one
            self.key_bytes_max = rng.choice((10, 100))
        return {
            "epoch_transactions_max": rng.choice((1, 2, 3, 1_000)),
            "snapshot_interval_us": rng.choice((1, 5_000, 1 << 60)),
            "snapshots_kept": rng.choice((1, 2)),
            "key_bytes_max": self.key_bytes_max,
            "segment_bytes_max": rng.choice((1, 1 << 20)),
        }

    def _start_engine(self) -> None:
        config, rng = self._config(), random.Random(self.rng.random())

        def work(store: Any) -> None:
            engine = Engine(store, rng, config, self.workers, snapshots=0.1)
            while True:
                engine.turn()

        self.engine = Process(self.machine, work)  # type: ignore[arg-type]

    def _start_driver(self, spark: Spark) -> None:
        box: list[Process] = []

        def work(store: Any) -> None:
            spark.run(store.who, lambda: not box or self.drivers[spark] is box[0])

        box.append(Process(self.machine, work))  # type: ignore[arg-type]
        self.drivers[spark] = box[0]

    def _judge(self, process: Process, may: tuple[type[BaseException], ...] = (Killed,)) -> None:
        """It is over: was that to be expected?"""
        error = process.error
        is_grave = isinstance(error, LogBroken | SnapshotBroken | WrongStore) and process not in self.zombies
        if error is not None and (is_grave or not isinstance(error, may)):
            raise AssertionError(f"{self.story}") from process.error

    # --- what happens ---

    def run(self) -> World:
        quick = types.SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
        store_of = lambda options: self.stores[options["path"].rpartition("/")[2]]  # noqa: E731
        with patch.object(inbox, "time", quick), patch.object(calls, "store_of", store_of):
            try:
                self._run()
            finally:
                for process in [*self.zombies, self.engine, *self.drivers.values()]:
                    if process is not None:
                        process.kill()
        return self

    def _run(self) -> None:
        self._start_engine()
        steps = 0
        favourite: Any = None
        while not self._is_over():
            steps += 1
            assert steps < 60_000, f"nothing goes on: {self.story}"
            self.disk.is_calm = steps > 30_000
            if self.rng.random() < 0.02:
                favourite = self.rng.choice([None, "engine", *self.sparks])  # it runs while others hardly do
            if self.belated and self.rng.random() < 0.01:
                self.belated.pop(self.rng.randrange(len(self.belated)))()
            if self.left and self.rng.random() < 0.01:
                self.left -= 1
                self._disturb()
            if self.engine is None or self.engine.is_over:
                if self.engine is not None:
                    self._judge(self.engine, self.trouble)  # by one that was late to take over
                self._start_engine()
            elif favourite == "engine" or self.rng.random() < 0.6:
                self.engine.step()
            self._step_zombies()
            for spark in self.sparks:
                driver = self.drivers[spark]
                if driver is None or driver.is_over:
                    if driver is not None:
                        self._judge(driver, self.trouble)
                    if not spark.is_done and self._has_app():
                        self._start_driver(spark)
                elif spark is favourite or self.rng.random() < 0.3:
                    driver.step()
        self.disk.is_calm = True
        for _ in range(3_000):  # who wakes up when all is over does no harm
            self._step_zombies()

    def _step_zombies(self) -> None:
        for zombie in list(self.zombies):
            self.zombies[zombie] -= 1
            if self.zombies[zombie] <= 0 and self.rng.random() < 0.5:
                zombie.step()
            if zombie.is_over:
                self._judge(zombie, (Killed, Fenced, StoreError))  # what it reads may be gone
                del self.zombies[zombie]

    def _has_app(self) -> bool:
        return "apps/current.json" in self.disk.files

    def _is_over(self) -> bool:
        return all(spark.is_done for spark in self.sparks) and not any(
            name.startswith("inbox/") for name in self.disk.files
        )

    def _disturb(self) -> None:
        kind = self.rng.choice(("engine", "engine", "driver", "driver", "both", "power", "zombie", "zombie driver"))
        self.story.append(kind)
        if kind == "zombie" and self.engine is not None:
            self.zombies[self.engine] = self.rng.choice((0, 500, 2_000))
            self.engine = None
        if kind in ("engine", "both", "power") and self.engine is not None:
            self.engine.kill()
            self.engine = None
        for spark, driver in self.drivers.items():
            if driver is None or (kind != "power" and self.rng.random() < 0.3):
                continue
            if kind in ("driver", "both", "power"):
                driver.kill()
                self.drivers[spark] = None
            elif kind == "zombie driver":
                self.zombies[driver] = self.rng.choice((0, 500, 2_000))
                self.drivers[spark] = None
        if kind == "power":
            for zombie in self.zombies:
                zombie.kill()
            self.zombies.clear()
            self.disk.lose_power()

    # --- what must hold in the end ---

    def check(self) -> None:
        store = SimStore(self.disk, "judge")
        engine = Engine(store, random.Random(0), {"snapshots_kept": 1})
        hand = settle(engine).hand  # a driver that was late may have closed a batch again
        assert not store.list("refused/"), store.list("refused/")
        rows = {row.uid: row for spark in self.sparks for batch in spark.batches for row in batch}
        order, told = self._replies(store, hand)
        dead = self._dead(store)
        assert Counter(order) + dead == Counter(rows.keys()), "each row ran once, or is among the dead letters once"
        for uid, row in rows.items():
            assert uid in (dead if row.key is None else order) or row.key == LONG
        results, state = loop([rows[uid] for uid in order])
        assert told == results
        assert {key: value for (_, key), value in hand.state().items()} == state
        self._check_order(order)
        self._check_leftovers(hand, store)

    def _replies(self, store: Any, hand: Hand) -> tuple[list[int], dict[int, Any]]:
        """The rows in the order of their TIDs, and what they gave."""
        order, told, ids, last = [], {}, [], 0
        for record in read_log(store, "replies"):
            epoch = hand.store_work.records.decode_replies(record.data)
            for piece, start in zip(epoch.pieces, epoch.starts(), strict=True):
                for at in range(piece.size):
                    row = start + at
                    failure = epoch.failures.get(row)
                    result = None if failure else hand.core.program.values.unseal(epoch.results[row])
                    uid = int(failure.message.split()[1]) if failure else int(result[0])  # type: ignore[index]
                    assert epoch.tids[row] > last
                    last = epoch.tids[row]
                    order.append(uid)
                    told[uid] = result
                    ids.append((piece.id_at(at), uid))
        assert len(dict(ids)) == len(ids), "a request id stands for one row"
        for request_id, uid in ids:
            spark = self.sparks[uid > 1_000]
            number = next(at for at, batch in enumerate(spark.batches) if any(row.uid == uid for row in batch))
            if spark.has_ids:
                assert request_id == f"own/{uid}"
            else:
                query, batch, place = request_id.rsplit("/", 2)
                assert (query, int(batch)) == (spark.query, number)
                assert any(one[int(place)] == uid for one in spark.orders[number])
        return order, told

    def _dead(self, store: Any) -> Counter[int]:
        return Counter(
            msgspec.json.decode(letter["args"])[0]
            for name in dead_letter_names(store)
            for letter in read_dead_letters(store, name).to_pylist()
        )

    def _check_order(self, order: list[int]) -> None:
        """Batches come one after the other, and each as one of its attempts had it."""
        for spark in self.sparks:
            mine = [uid for uid in order if (uid > 1_000) == (spark.query == "r")]
            at = 0
            for number, batch in enumerate(spark.batches):
                size = sum(row.uid in mine for row in batch)
                ran = mine[at : at + size]
                attempts = [[uid for uid in one if uid in ran] for one in spark.orders[number]]
                assert ran in attempts, (spark.query, number, ran, spark.orders[number])
                at += size

    def _check_leftovers(self, hand: Hand, store: Any) -> None:
        """Once snapshots have moved on, nothing is left of the batches but their numbers."""
        for number in range(3):
            hand.run(f"more{number}", [(note, "z", 1)])
            hand.take_snapshot()
        hand.settle()
        assert store.list("calls/") == []
        assert store.list("inbox/") == []
        for spark in self.sparks:
            assert inbox.last_finished(store, spark.query) == len(spark.batches) - 1


# --- by hand ----------------------------------------------------------------------------------------------------------


def table(uids: list[int], key: str | None = "a", **more: Any) -> pa.Table:
    return pa.table({"key": pa.array([key] * len(uids), pa.string()), "arg0": pa.array(uids, pa.int64()), **more})


def close(store: Store, number: int, *tables: pa.Table, source: str = "q", function: str = "item.note") -> ClosedBatch:
    segments = [write_segment(store, source, number, part, each) for part, each in enumerate(tables)]
    closed = ClosedBatch(source, number, function, segments)
    close_batch(store, closed)
    return closed


def start(store: Store, app: App = app, /, **config: int) -> Engine:
    return Engine(store, random.Random(1), config, app=app)


def settle(engine: Engine) -> Engine:
    """Until nothing happens any more."""
    while engine.turn():
        pass
    engine.hand.settle()
    return engine


def log_batch(engine: Engine, epochs: int) -> None:
    """The batch that waits is in the log, and so many epochs of it; nothing is taken away."""
    engine.reader.look(lambda *item: engine.done.append(item))
    engine.hand.compute()
    engine.hand.sync(min(1 + epochs, len(engine.hand.records)))
    engine.hand.compute()


def notes(engine: Engine, key: str = "a") -> list[int]:
    return list(engine.hand.state().get(("item", key), []))


def dead_rows(store: Store) -> list[tuple[str, int, int]]:
    return [
        (each["query"], each["batch"], each["row"])
        for name in dead_letter_names(store, is_final=False)
        for each in read_dead_letters(store, name).to_pylist()
    ]
