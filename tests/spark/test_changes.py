"""`headrace.changes`: one row per entity and epoch, before and after; folded they are the state."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headrace import App, Config, Runtime
from headrace.durability.columns import join, kinds_of
from headrace.durability.log.changelog import Changelog
from headrace.durability.log.log import read_log
from headrace.durability.reading.views import EpochEnd, View
from headrace.durability.snapshots.bulk import BulkLoad, BulkTarget, ColumnSealer, write
from headrace.durability.store import DirectoryStore, open_store
from headrace.errors import Abort, StoreError, StreamError
from headrace.model.context import Context
from headrace.spark.load import load
from headrace.spark.sources.changes import ChangesLog, key_types
from headrace.spark.sources.epoch_streams import EpochStream
from headrace.spark.sources.key_column import keys_as
from headrace.wire.values import Values, plain
from tests.waiting import eventually

pytestmark = pytest.mark.spark


@dataclasses.dataclass
class Room:
    guests: int
    price: Decimal
    day: datetime.date
    notes: tuple[str, ...]


app = App("changing")
account = app.operator("account", changes=True, state=int)
room = app.operator("room", changes=True, state=Room)
thing = app.operator("thing", changes=True)
silent = app.operator("silent")
VALUES = Values([Room])


@account.register
def add(ctx: Context, amount: int) -> int:
    if amount > 90:
        raise Abort("too much")
    ctx.put(ctx.get(0) + amount)
    ctx.call_async(count, ctx.key)
    return int(ctx.get())


@account.register
def close(ctx: Context) -> None:
    ctx.delete()


@silent.register
def count(ctx: Context) -> None:
    ctx.put(ctx.get(0) + 1)


@room.register
def book(ctx: Context, guests: int) -> None:
    ctx.put(Room(guests, Decimal(guests) / 4, datetime.date(2026, 3, 1 + guests % 28), (f"{guests} guests", "ü")))


@thing.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


@contextmanager
def logging(*operators: str) -> Iterator[None]:
    """For a while, only these log their changes."""
    was = {name: operator.changes for name, operator in app.operators.items()}
    for name, operator in app.operators.items():
        operator.changes = name in operators
    try:
        yield
    finally:
        for name, operator in app.operators.items():
            operator.changes = was[name]


KEYS = [3, -1, "a", "ü", b"\x00\xff", (1 << 64) - 1]


def busy(runtime: Runtime, rng: Random, calls: int) -> None:
    made: list[Any] = []
    for _ in range(calls):
        kind, key, amount = rng.randrange(10), rng.choice(KEYS), rng.randrange(100)
        if kind < 5:
            made.append((add, key, amount))
        elif kind < 6:
            made.append((close, key))
        elif kind < 8:
            made.append((book, key, amount))
        else:
            made.append((put, key, rng.choice([None, amount, [amount], {"x": (amount, b"\x01")}, 1.5, "text"])))
    runtime.client.batch(made)


def text_of(key: Any) -> tuple[str, str]:
    if isinstance(key, bytes):
        return key.hex(), "binary"
    return (key, "string") if isinstance(key, str) else (str(key), "long")


def state_of(runtime: Runtime) -> dict[tuple[str, str, str], Any]:
    """Of all operators that log their changes: as the rows have them."""
    return {
        (name, *text_of(key)): plain(VALUES.seal(value))
        for name in ("account", "room", "thing")
        for key, value in runtime.state(name).items()
    }


def folded(rows: list[Any]) -> dict[tuple[str, str, str], Any]:
    """The state that these rows lead to; each begins with what the one before it left."""
    state: dict[tuple[str, str, str], Any] = {}
    seen = set()
    for row in sorted(rows, key=lambda row: row.epoch):
        entity = (row.operator, row.key, row.key_type)
        assert (row.epoch, entity) not in seen
        seen.add((row.epoch, entity))
        before, after = (None if text is None else json.loads(text) for text in (row.before, row.after))
        assert row.kind == ("insert" if row.before is None else "delete" if row.after is None else "update")
        assert (row.before is not None) == (entity in state)
        assert row.before is None or before == state[entity]
        if row.after is None:
            del state[entity]
        else:
            state[entity] = after
    return state


def changes(spark: Any, store: Path, **options: Any) -> Any:
    return spark.read.format("headrace.changes").options(**options).load(str(store))


def test_folded_they_are_the_state(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, Config(epoch_transactions_max=7), store=tmp_path) as runtime:
        busy(runtime, Random(1), 300)
        expected = state_of(runtime)
    rows = changes(spark, tmp_path).collect()
    assert folded(rows) == expected
    assert {row.operator for row in rows} == {"account", "room", "thing"}
    assert all(row.time.year >= 2026 for row in rows)
    last = max(row.epoch for row in rows)
    some = changes(spark, tmp_path, operator="room", startingEpoch=5, endingEpoch=last - 5, partitions=3).collect()
    assert some
    assert sorted(some) == sorted(row for row in rows if row.operator == "room" and 5 <= row.epoch <= last - 5)


def test_a_stream_gives_each_row_once_whatever_is_restarted(spark: Any, tmp_path: Path) -> None:
    store, sink, checkpoint = tmp_path / "store", tmp_path / "sink", tmp_path / "checkpoint"
    for at in range(3):
        with Runtime(app, Config(epoch_transactions_max=5), store=store) as runtime:
            busy(runtime, Random(at), 60)
            runtime.snapshot()
            stream = spark.readStream.format("headrace.changes").option("maxEpochsPerBatch", 20).load(str(store))
            writer = stream.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
            writer.trigger(availableNow=True).start(str(sink)).awaitTermination()
            expected = state_of(runtime)
        assert folded(spark.read.parquet(str(sink)).collect()) == expected


def test_a_running_aggregate_over_the_stream_is_that_of_the_state(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        for amount in (5, 7, 80, 91):
            runtime.client.batch([(add, "a", amount), (add, amount, amount)])
        runtime.client.call(close, 7)
        total = sum(runtime.state(account).values())
    stream = (spark.readStream.format("headrace.changes").option("operator", "account").option("as", "columns")).load(
        str(tmp_path)
    )
    sums = stream.selectExpr("coalesce(after, 0) - coalesce(before, 0) as gained").groupBy().sum("gained")
    query = sums.writeStream.outputMode("complete").format("memory").queryName("gained").trigger(availableNow=True)
    query.start().awaitTermination()
    assert spark.table("gained").collect()[0][0] == total == 5 + 80 + 5 + 7 + 80


def test_a_declared_state_has_typed_columns(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(book, "a", 2)
        runtime.client.call(book, "a", 3)
        runtime.client.map(book, list(range(40)), [(n,) for n in range(40)])
        expected = runtime.state(room)
    table = changes(spark, tmp_path, operator="room", **{"as": "columns"})
    assert table.schema["after"].dataType.simpleString() == (
        "struct<guests:bigint,price:decimal(38,18),day:date,notes:array<string>>"
    )
    first, second = table.filter("key = 'a'").orderBy("epoch").collect()
    assert first.before is None
    assert second.before == first.after
    assert second.after.asDict() == dataclasses.asdict(expected["a"]) | {"notes": ["3 guests", "ü"]}
    assert table.selectExpr("sum(after.guests) - sum(coalesce(before.guests, 0))").collect()[0][0] == sum(
        each.guests for each in expected.values()
    )


# --- what is not there ------------------------------------------------------------------------------------------------


def test_without_a_changelog_the_error_says_how_to_turn_it_on(spark: Any, tmp_path: Path) -> None:
    with logging(), Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "a", 1)
    for how in (spark.read, spark.readStream):
        with pytest.raises(Exception, match="changes=True"):
            how.format("headrace.changes").load(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"operator": "silent"}, r"silent' does not log its changes; those that do: account, room, thing"),
        ({"operator": "nobody"}, r"'nobody' does not log"),
        ({"as": "columns"}, r"need one operator"),
        ({"as": "rows"}, r"must be json or columns"),
        ({"as": "columns", "operator": "thing"}, r"does not declare its state: declare it"),
        ({"startingEpoch": "0"}, r"startingEpoch is '0'"),
    ],
)
def test_a_wrong_option_says_what_to_change(spark: Any, tmp_path: Path, options: dict[str, str], says: str) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "a", 1)
    with pytest.raises(Exception, match=says):
        changes(spark, tmp_path, **options)


def test_one_that_began_late_begins_there_and_says_so_to_who_wants_more(spark: Any, tmp_path: Path) -> None:
    with logging(), Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "a", 1)
        runtime.client.call(add, "a", 2)
    with logging("account"), Runtime(app, store=tmp_path) as runtime:
        assert changes(spark, tmp_path).collect() == []
        runtime.client.call(add, "a", 3)
    with logging("account", "room"), Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "a", 4)
        runtime.client.call(book, "a", 5)
    rows = changes(spark, tmp_path).collect()
    assert [(row.epoch, row.operator, row.before) for row in sorted(rows)] == [
        (3, "account", "3"),
        (4, "account", "6"),
        (5, "room", None),
    ]
    with pytest.raises(Exception, match=r"epoch 2 are not available: those of epoch 3 are the oldest.*asOfEpoch\", 2"):
        changes(spark, tmp_path, startingEpoch=2).collect()
    with pytest.raises(Exception, match=r"epoch 3 of operator 'room' are not available: those of epoch 4"):
        changes(spark, tmp_path, startingEpoch=3, operator="room").collect()
    assert [row.epoch for row in changes(spark, tmp_path, operator="room").collect()] == [5]


def rows_of(store: Any, origin: int, **options: str) -> list[dict[str, Any]]:
    """As somebody reads them for whom the epoch of a record was its number and this. The first record has none."""
    logged = ChangesLog({"path": store.url, **options})
    records = ((record.number + origin, record.data) for record in read_log(store, "changes", 2))
    return [row for batch in logged.batches(records) for row in batch.to_pylist()]


@pytest.mark.parametrize("epochs", [1, 3])
def test_who_reads_on_when_they_were_off_for_a_while_is_told(tmp_path: Path, epochs: int) -> None:
    store = open_store(str(tmp_path))
    for operators in (("account",), *[()] * epochs, ("account",)):
        with logging(*operators), Runtime(app, store=tmp_path) as runtime:
            runtime.client.call(add, "a", 1)
    with pytest.raises(StreamError, match=rf'epochs 2 to {epochs + 1} were not logged.*"startingEpoch", {epochs + 2}'):
        rows_of(store, -1)
    assert [each.epoch for each in Changelog(store).read(epochs + 2)] == [epochs + 2]
    with pytest.raises(StoreError, match="not all in"):
        list(Changelog(store).read(1))


def test_who_reads_on_when_the_operator_ceased_to_log_is_told(tmp_path: Path) -> None:
    for operators in (("account", "room"), ("account",)):
        with logging(*operators), Runtime(app, store=tmp_path) as runtime:
            runtime.client.call(add, "a", 1)
            runtime.client.call(book, "a", 1)
    store = open_store(str(tmp_path))
    assert len(rows_of(store, -1)) == 3
    with pytest.raises(StreamError, match=r"'room' stopped logging its changes before epoch 3"):
        rows_of(store, -1, operator="room")


def test_a_stream_that_began_before_a_load_stops_there(spark: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def read_on(**options: str) -> None:
        name = options.get("operator", "all")
        stream = spark.readStream.format("headrace.changes").options(**options).load(str(store))
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / f"{name}-checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / name)).awaitTermination()

    def run() -> None:
        with Runtime(app, store=store) as runtime:
            runtime.client.call(add, "a", 1)
            runtime.client.call(book, "a", 1)

    run()
    for options in ({}, {"operator": "account"}, {"operator": "room"}):
        read_on(**options)  # and all of them have seen all there is
    rows = spark.createDataFrame([("a", 70), ("b", 80)], "name string, balance long")
    load(rows, account, key="name", state="balance", app=app, store=store, replace=True)
    for _ in range(2):
        with Runtime(app, store=store) as runtime:
            runtime.snapshot()  # no epoch, and no record of the changelog: the snapshots have to remember it
    run()
    for options in ({}, {"operator": "account"}):
        with pytest.raises(Exception, match=r'before epoch 3 states were loaded.*"startingEpoch", 3.*"asOfEpoch", 2'):
            read_on(**options)
    read_on(operator="room")
    assert folded(spark.read.parquet(str(tmp_path / "room")).collect())
    now = changes(spark, store).collect()  # a table begins behind it, and so does a new stream
    assert [(row.epoch, row.operator, row.before, row.after) for row in sorted(now) if row.operator == "account"] == [
        (3, "account", "70", "71")
    ]
    with pytest.raises(Exception, match="before epoch 3 states were loaded"):
        changes(spark, store, startingEpoch=1).collect()
    past = changes(spark, store, startingEpoch=1, endingEpoch=2).collect()  # which one may still look at
    assert {(row.epoch, row.operator) for row in past} == {(1, "account"), (2, "room")}


class Follower:
    """A stream without Spark."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.options = {"path": str(store)} | {name: str(value) for name, value in options.items()}
        self.offset = self._planner().initialOffset()

    def follow(self) -> list[tuple[int, str, str, str | None]]:
        planner = self._planner()  # each time it is started again
        end = planner.latestOffset(self.offset, ReadAllAvailable())
        rows = [
            (row["epoch"], row["operator"], row["key"], row["after"])
            for part in planner.partitions(self.offset, end)
            for batch in planner.read(part)
            for row in batch.to_pylist()
        ]
        self.offset = end
        return rows

    def _planner(self) -> EpochStream:
        return EpochStream(ChangesLog(self.options))


def run_once(store: Path, *calls: Any, of: App = app) -> None:
    with Runtime(of, store=store) as runtime:
        for call in calls:
            runtime.client.call(*call)


def load_by_hand(store: Path, balance: int) -> None:
    """What load.py does, without Spark: one account."""
    bulk = BulkLoad(DirectoryStore(store), app, Config())
    sealing = ColumnSealer(Config())
    keys, states = sealing.keys(pa.array(["loaded"])), sealing.states({"n": pa.array([balance])}, lambda row: "loaded")
    target = BulkTarget(bulk.snapshot_id, account, Config().shards)
    bulk.publish("account", [write(bulk.store, target, 0, iter([(keys, states)]))])
    bulk.close()


@pytest.mark.parametrize("epochs", [0, 2])
def test_also_if_no_epoch_ran_between_its_beginning_and_the_load(tmp_path: Path, epochs: int) -> None:
    store = tmp_path / "store"
    run_once(store, *[(add, "a", 1)] * epochs)
    for at in (1, 2):  # and a second load at the same place
        followers = [Follower(store, startingEpoch=epochs + 1), Follower(store, operator="account")]
        if at == 1:
            assert [len(each.follow()) for each in followers] == [0, epochs]
        load_by_hand(store, 10 * at)
        late = [Follower(store), Follower(store, operator="account", startingEpoch=epochs + 1)]
        assert late[0].follow() == []
        copy = tmp_path / f"copy{at}"
        shutil.copytree(store, copy)
        run_once(copy, (add, "loaded", 1))
        for each in (*followers, *late):
            each.options["path"] = str(copy)
        for each in followers:
            with pytest.raises(StreamError, match=f"before epoch {epochs + 1} states were loaded"):
                each.follow()
        for each in late:
            assert each.follow() == [(epochs + 1, "account", "loaded", str(10 * at + 1))]


def test_a_stream_of_all_is_told_of_an_operator_that_was_off_for_a_while(tmp_path: Path) -> None:
    with logging("account", "room"):
        run_once(tmp_path, (book, "r", 1))
        everything, accounts = Follower(tmp_path), Follower(tmp_path, operator="account")
        assert len(everything.follow()) == 1
    with logging("account"):
        run_once(tmp_path, (book, "r", 2), (add, "a", 1))
        assert everything.follow() == [(3, "account", "a", "1")]
    with logging("account", "room", "thing"):
        run_once(tmp_path, (book, "r", 3), (put, "t", 1))
    with pytest.raises(StreamError, match=r"before epoch 4 .* changed without being logged.*startingEpoch\", 4"):
        everything.follow()
    assert [row[0] for row in accounts.follow()] == [3]
    anew = Follower(tmp_path)
    assert [row[:2] for row in anew.follow()] == [(4, "room"), (5, "thing")]
    run_once(tmp_path, (add, "a", 1))
    assert [row[:2] for row in anew.follow()] == [(6, "account")]


def test_an_offset_without_a_mark_gets_one(tmp_path: Path) -> None:
    run_once(tmp_path, (add, "a", 1), (add, "a", 1))
    follower = Follower(tmp_path)
    del follower.offset["mark"]
    follower.follow()
    load_by_hand(tmp_path, 7)
    run_once(tmp_path, (add, "a", 1))
    with pytest.raises(StreamError, match="before epoch 3 states were loaded"):
        follower.follow()


def versions() -> list[App]:
    """An app before and after its states have changed, from a number to its name."""
    made = []
    for state, migrate in ((int, None), (str, lambda key, old: f"v2:{old}")):
        each = App("versions")
        item = each.operator("item", state=state, changes=True, migrate=migrate)
        empty = each.operator("empty", state=state, changes=True, migrate=migrate)

        for operator in (item, empty):

            @operator.register
            def change(ctx: Context, value: Any) -> None:
                ctx.put(value)

        made.append(each)
    return made


def test_behind_a_migration_a_stream_begins_anew_with_the_migrated_state(tmp_path: Path) -> None:
    old, new = versions()
    run_once(tmp_path, ("item.change", "a", 1), ("item.change", "b", 1), of=old)
    everything, empties = Follower(tmp_path), Follower(tmp_path, operator="empty")
    everything.follow()
    with Runtime(new, Config(snapshot_interval_us=1 << 60), store=tmp_path) as runtime:
        runtime.client.call("item.change", "a", "new")
        runtime.client.call("empty.change", "e", "new")
        eventually(lambda: View(open_store(str(tmp_path)), "item").newest().epoch == 4)
        with pytest.raises(StreamError, match=r"before epoch 3 .*migrated.*\"asOfEpoch\", 2"):
            everything.follow()
        assert [row[0] for row in empties.follow()] == [4], "it had no state to migrate"
        state = states(tmp_path, View(open_store(str(tmp_path)), "item").at(2))
        assert state == {"a": "v2:1", "b": "v2:1"}
        anew = Follower(tmp_path, operator="item")
        assert [row[2:] for row in anew.follow()] == [("a", '"new"')]
        assert states(tmp_path) == {"a": "new", "b": "v2:1"}


def states(where: Path, moment: EpochEnd | None = None) -> dict[Any, Any]:
    view = View(open_store(str(where)), "item")
    moment = moment or view.newest()
    found = list(view.read(moment, view.app_fingerprint(moment)))
    return {
        key: VALUES.unseal(state)
        for each in found
        for key, state in zip(join(each.keys), join(each.states), strict=True)
    }


def test_keys_are_texts_and_say_what_they_were() -> None:
    from headrace.durability.columns import keys_to_arrow

    for keys in (KEYS, [1, 2], ["a", ""], [b"a"], [(1 << 64) - 1], [1, "1"]):
        kinds = kinds_of(keys_to_arrow(keys))
        texts, types = keys_as(kinds, pa.string(), "an operator"), key_types(kinds)
        assert list(zip(texts.to_pylist(), types.to_pylist(), strict=True)) == [text_of(key) for key in keys]
