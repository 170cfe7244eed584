"""State as a table, on a local Spark session, against the runtime's own state."""

from __future__ import annotations

import dataclasses
import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headrace import App, Config, Context, Runtime
from headrace.core.placement import shard_of
from headrace.errors import HeadraceError
from headrace.spark.sources.state_table import StateSource
from tests.waiting import eventually

pytestmark = pytest.mark.spark

NEVER = Config(snapshot_interval_us=1 << 60, replay_transactions_max=1 << 60)


@dataclasses.dataclass
class Profile:
    name: str
    joined: datetime.date
    spent: Decimal
    tags: list[str]
    note: str | None


app = App("shop")
stock = app.operator("stock")
cart = app.operator("cart")
user = app.operator("user", state=Profile)
mixed = app.operator("mixed")
account = app.operator("account", state=int, changes=True)
lane = app.operator("lane", partition_by=lambda key: key.partition("/")[0])
nobody = app.operator("nobody", state=Profile)


@stock.register
def put_stock(ctx: Context, count: int) -> None:
    ctx.put(count)


@stock.register
def sell_out(ctx: Context) -> None:
    ctx.delete()


@cart.register
def fill(ctx: Context, items: dict[str, int]) -> None:
    ctx.put(items)


@user.register
def join(ctx: Context, profile: Profile) -> None:
    ctx.put(profile)


@mixed.register
def put_any(ctx: Context, value: Any) -> None:
    ctx.put(value)


@account.register
def deposit(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get(0))


@lane.register
def drive(ctx: Context, speed: float) -> None:
    ctx.put(speed)


def profile(number: int) -> Profile:
    day = datetime.date(2026, 1, 1) + datetime.timedelta(number)
    return Profile(f"user {number}", day, Decimal(number) / 4, ["new"] * (number % 3), None if number % 2 else "hm")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[Any, Any]]]:
    """A store, and what is in it."""
    where = str(tmp_path_factory.mktemp("shop"))
    with Runtime(app, NEVER, store=where) as runtime:
        batch = runtime.client.batch
        batch([(put_stock, number, number * 10) for number in range(300)])
        batch([(drive, f"{number % 7}/{number}", number / 2) for number in range(300)])
        batch([(fill, f"cart{number}", {f"item{at}": at for at in range(number % 4)}) for number in range(20)])
        batch([(join, f"u{number}", profile(number)) for number in range(20)])
        batch([(put_any, key, [key] if isinstance(key, int) else str(key)) for key in (1, "1", b"1", 1 << 63)])
        runtime.snapshot()
        batch([(put_stock, number, -1) for number in range(0, 300, 3)])
        batch([(sell_out, number) for number in range(0, 300, 9)])
        state = {name: dict(runtime.state(name)) for name in app.operators}
    return where, state


def table(spark: Any, where: str, operator: str, **options: Any) -> Any:
    reader = spark.read.format("headrace.state").option("operator", operator)
    for name, value in options.items():
        reader = reader.option(name.rstrip("_"), str(value))
    return reader.load(where)


def test_an_undeclared_state_of_ints_is_a_column_of_longs(spark: Any, shop: Any) -> None:
    where, state = shop
    df = table(spark, where, "stock", partitions=3)
    assert df.dtypes == [("key", "bigint"), ("value", "bigint")]
    assert sorted(map(tuple, df.collect())) == sorted(state["stock"].items())


def test_a_dataclass_is_one_typed_column_per_field(spark: Any, shop: Any) -> None:
    where, state = shop
    df = table(spark, where, "user")
    assert df.dtypes == [
        ("key", "string"),
        ("name", "string"),
        ("joined", "date"),
        ("spent", "decimal(38,18)"),
        ("tags", "array<string>"),
        ("note", "string"),
    ]
    found = {row[0]: Profile(*row[1:]) for row in map(tuple, df.collect())}
    assert found == state["user"]


def test_dicts_of_several_keys_are_maps_and_anything_is_json(spark: Any, shop: Any) -> None:
    where, state = shop
    df = table(spark, where, "cart")
    assert df.dtypes == [("key", "string"), ("value", "map<string,bigint>")]
    assert {row.key: row.value for row in df.collect()} == state["cart"]
    rows = sorted(map(tuple, table(spark, where, "mixed", as_="json").collect()))
    assert rows == [("1", '"1"'), ("1", "[1]"), ("31", "\"b'1'\""), (str(1 << 63), f"[{1 << 63}]")]


def test_keys_are_looked_up_in_their_shards(spark: Any, shop: Any) -> None:
    where, state = shop
    df = table(spark, where, "stock", keys="[5, 6, 7, 12345]")
    assert {row.key: row.value for row in df.collect()} == {key: state["stock"][key] for key in (5, 6, 7)}
    homes = {shard_of(stock, key, 64) for key in (5, 6, 7, 12345)}
    assert df.rdd.getNumPartitions() <= len(homes)
    df = table(spark, where, "lane", keys='["3/3", "4/11"]')  # nobody knows their shards: all are read
    assert {row.key: row.value for row in df.collect()} == {"3/3": 1.5, "4/11": 5.5}
    df = table(spark, where, "lane", keys='["3/3"]', app="tests.spark.test_state:app")
    assert [tuple(row) for row in df.collect()] == [("3/3", 1.5)]


def test_filters_are_pushed_down_to_the_keys(spark: Any, shop: Any) -> None:
    where, state = shop

    def pushed(operator: str = "stock") -> Any:
        return table(spark, where, operator, pushdown="true")

    df = pushed().where("key in (5, 7, 9) and key > 5 and value > 0")
    assert sorted(map(tuple, df.collect())) == [
        (key, state["stock"][key]) for key in (7, 9) if state["stock"].get(key, 0) > 0
    ]
    assert [tuple(row) for row in pushed().where("key = 8").collect()] == [(8, 80)]
    assert pushed().where("key = 8").rdd.getNumPartitions() == 1
    assert pushed().where("key = 8 and key = 7").count() == 0
    assert pushed("user").where("key = 'u3'").first().name == "user 3"
    assert pushed("user").where("key is not null and name = 'user 4'").first().key == "u4"


def test_without_being_asked_a_filter_leaves_the_table_whole(spark: Any, shop: Any) -> None:
    """Spark 4.3 would keep the filtered plan for all that is done with the DataFrame later."""
    where, state = shop
    df = table(spark, where, "stock")
    one, other = df.where("key = 5"), df.where("key = 7")
    assert sorted(row.key for row in one.union(other).collect()) == [5, 7]
    assert df.count() == len(state["stock"])


def test_a_schema_of_ones_own(spark: Any, shop: Any) -> None:
    where, state = shop
    read = spark.read.format("headrace.state").option("operator", "user")
    df = read.schema("spent decimal(20,2), key string").load(where)
    assert {row.key: row.spent for row in df.collect()} == {key: each.spent for key, each in state["user"].items()}
    with pytest.raises(Exception, match="have no age; they have: name, joined, spent, tags, note"):
        read.schema("key string, age int").load(where).collect()


def test_an_operator_without_entities_is_an_empty_table_of_its_type(spark: Any, shop: Any) -> None:
    df = table(spark, shop[0], "nobody")
    assert df.columns == ["key", "name", "joined", "spent", "tags", "note"]
    assert df.collect() == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"operator": "stok"}, "no operator 'stok'; it has: stock, cart, user"),
        ({"operator": "mixed"}, r"do not have one type.*option\(\"as\", \"json\"\)"),
        ({"operator": "stock", "keys": "5"}, "must be a JSON list"),
        ({"operator": "stock", "as": "xml"}, "must be columns or json"),
        ({"operator": "stock", "asOfEpoch": "x"}, "asOfEpoch is 'x'; it must be a whole number"),
        ({"operator": "stock", "asOfEpoch": "1"}, "older than the oldest snapshot"),
        ({"operator": "stock", "live": "true", "asOfEpoch": "3"}, "a live table is the newest state"),
        ({"operator": "stock", "live": "perhaps"}, "must be true or false"),
        ({"operator": "user", "keyColumn": "name"}, r"already has a field 'name'.*keyColumn"),
        ({"operator": "stock", "path": "/nowhere/at/all"}, "no Headrace store at"),
        ({}, "the option operator is needed"),
    ],
)
def test_wrong_options_say_what_to_change(shop: Any, options: dict[str, str], says: str) -> None:
    with pytest.raises(HeadraceError, match=says):
        StateSource({"path": shop[0]} | options).schema()


def test_any_epoch_since_the_oldest_snapshot(spark: Any, tmp_path: Path) -> None:
    """With a changelog by folding it, without one by running the log again."""
    where = str(tmp_path)
    seen: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
    with Runtime(app, NEVER, store=where) as runtime:
        for number in range(6):
            runtime.client.call(deposit, f"a{number % 2}", number)
            runtime.client.call(put_stock, number, number)
            seen[runtime.metrics()["epochs"]] = (dict(runtime.state(account)), dict(runtime.state(stock)))
            if number == 1:
                runtime.snapshot()
    first, *_, last = seen
    for epoch in (4, 6, last):
        balances = table(spark, where, "account", asOfEpoch=epoch).collect()
        assert dict(map(tuple, balances)) == seen[epoch][0]
    rows = table(spark, where, "stock", asOfEpoch=8, app="tests.spark.test_state:app").collect()
    assert dict(map(tuple, rows)) == seen[8][1]
    for operator, epoch, says in (
        ("stock", 8, "no snapshot of epoch 8; it has snapshots of epochs 4, 12"),
        ("stock", 13, "no epoch 13"),
        ("account", first, "older than the oldest snapshot .* of epoch 4"),
    ):
        with pytest.raises(HeadraceError, match=says):
            StateSource({"path": where, "operator": operator, "asOfEpoch": str(epoch)}).schema()


def test_a_table_is_one_epoch_and_a_live_one_the_newest(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, NEVER, store=tmp_path) as runtime:
        runtime.client.call(deposit, "alice", 5)
        runtime.snapshot()
        fixed = table(spark, str(tmp_path), "account")
        live = table(spark, str(tmp_path), "account", live="true")
        assert fixed.collect() == live.collect() == [("alice", 5)]
        runtime.client.call(deposit, "bob", 6)
        eventually(lambda: live.count() == 2, pause_s=0.05)
        assert sorted(map(tuple, live.collect())) == [("alice", 5), ("bob", 6)]
        assert fixed.collect() == [("alice", 5)]
        assert table(spark, str(tmp_path), "account").where("key = 'bob'").first().value == 6


def test_sql_joins_the_live_state_with_a_stream(spark: Any, tmp_path: Path) -> None:
    """Orders come as a stream; what their customers have is as of each micro-batch."""
    (tmp_path / "orders").mkdir()
    write = (tmp_path / "orders" / "1.json").write_text
    write('{"customer": "alice", "amount": 3}\n{"customer": "bob", "amount": 4}\n')
    with Runtime(app, NEVER, store=tmp_path / "store") as runtime:
        runtime.client.call(deposit, "alice", 5)
        runtime.snapshot()
        spark.readStream.schema("customer string, amount long").json(str(tmp_path / "orders")).createOrReplaceTempView(
            "orders"
        )
        table(spark, str(tmp_path / "store"), "account", live="true").createOrReplaceTempView("balances")
        joined = spark.sql(
            "SELECT customer, amount, coalesce(value, 0) >= amount AS can_pay "
            "FROM orders LEFT JOIN balances ON customer = key"
        )
        query = joined.writeStream.format("memory").queryName("checked").start()
        try:
            query.processAllAvailable()
            rows = spark.sql("SELECT customer, amount, can_pay FROM checked").collect()
            assert sorted(map(tuple, rows)) == [("alice", 3, True), ("bob", 4, False)]
            runtime.client.call(deposit, "bob", 100)
            runtime.snapshot()
            (tmp_path / "orders" / "2.json").write_text('{"customer": "bob", "amount": 50}\n')
            query.processAllAvailable()
            rows = spark.sql("SELECT customer, amount, can_pay FROM checked WHERE amount = 50").collect()
            assert [tuple(row) for row in rows] == [("bob", 50, True)]
        finally:
            query.stop()
