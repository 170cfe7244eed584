"""Declared types as columns of Spark's tables and streams, and what happens to values that do not fit."""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import Abort, App, Config, Context, Places, Runtime
from headrace.errors import HeadraceError, StreamError
from headrace.spark import load
from headrace.spark.sources.changes import ChangesSource
from headrace.spark.sources.replies import RepliesSource
from headrace.spark.sources.state_table import StateSource
from tests.durability.declared_types import DrawnType, drawn_records

pytestmark = pytest.mark.spark

UTC = datetime.UTC
Money = Annotated[Decimal, Places(18, 2)]


@dataclasses.dataclass
class Address:
    street: str
    since: datetime.date


@dataclasses.dataclass
class Customer:
    credit: Money
    rate: Decimal
    seen: datetime.datetime
    opens: Annotated[datetime.datetime, msgspec.Meta(tz=False)]
    token: uuid.UUID
    home: Address
    work: Address | None
    limits: dict[str, Money]
    pair: tuple[int, str]
    visits: list[datetime.date]
    nickname: str | None


class Receipt(msgspec.Struct, frozen=True):
    total: Money
    items: int


app = App("columns")
customer = app.operator("customer", state=Customer, changes=True)
counter = app.operator("counter", state=int, changes=True)
free = app.operator("free")


@customer.register
def enter(ctx: Context, state: Customer) -> None:
    ctx.put(state)


@counter.register
def buy(ctx: Context, items: int) -> Receipt:
    if items < 0:
        raise Abort("nothing to buy")
    ctx.put(ctx.get(0) + items)
    return Receipt(Decimal(items) / 4, items)


@counter.register
def look(ctx: Context) -> int | None:
    found: int | None = ctx.get()
    return found


@counter.register
def anything(ctx: Context, value: Any):  # type: ignore[no-untyped-def]
    return value


@free.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


def somebody(number: int) -> Customer:
    home = Address(f"street {number}", datetime.date(2020, 1, 1 + number))
    return Customer(
        Decimal(number) / 4,
        Decimal("0.000000000000000001"),
        datetime.datetime(2026, 1, 1, 12, number, 0, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=number - 2))),
        datetime.datetime(2026, 3, 29, 2, 30, number),  # no such time in some zones
        uuid.UUID(int=number),
        home,
        None if number % 2 else home,
        {"day": Decimal("1.5"), "week": Decimal(number)},
        (number, "x"),
        [datetime.date(2026, 1, 1)] * number,
        None if number % 2 else "nick",
    )


def row_of(each: Customer) -> dict[str, Any]:
    """As Spark's Python shows it."""
    home = dataclasses.asdict(each.home)
    return dataclasses.asdict(each) | {
        "seen": each.seen.astimezone(UTC),
        "token": str(each.token),
        "home": home,
        "pair": {"_1": each.pair[0], "_2": each.pair[1]},
    }


def as_dict(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = row.asDict(recursive=True)
    return found | {"seen": found["seen"].astimezone(UTC)}


COLUMNS = {
    "credit": "decimal(18,2)",
    "rate": "decimal(38,18)",
    "seen": "timestamp",
    "opens": "timestamp_ntz",
    "token": "string",
    "home": "struct<street:string,since:date>",
    "work": "struct<street:string,since:date>",
    "limits": "map<string,decimal(18,2)>",
    "pair": "struct<_1:bigint,_2:string>",
    "visits": "array<date>",
    "nickname": "string",
}


def table(spark: Any, source: str, where: Any, **options: Any) -> Any:
    return spark.read.format(f"headrace.{source}").options(**options).load(str(where))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("columns")
    with Runtime(app, store=where) as runtime:
        for number in range(5):
            runtime.client.call(enter, number, somebody(number))
        runtime.client.batch([(buy, number, number) for number in range(40)])
        runtime.client.batch([(buy, 7, -1), (look, 7), (look, 99), (anything, 7, "x"), (anything, 8, 5)])
        runtime.client.call(put, 1, 1)
    return where


def test_declared_types_decide_the_columns_of_the_state(spark: Any, shop: Path) -> None:
    df = table(spark, "state", shop, operator="customer")
    assert df.dtypes == [("key", "bigint"), *COLUMNS.items()]
    assert all(field.nullable for field in df.schema.fields[1:])
    found = {row.key: as_dict(row) for row in df.collect()}
    assert found == {number: {"key": number} | row_of(somebody(number)) for number in range(5)}


def test_declared_types_decide_the_columns_of_changes(spark: Any, shop: Path) -> None:
    df = table(spark, "changes", shop, operator="customer", **{"as": "columns"})
    inside = ",".join(f"{name}:{type}" for name, type in COLUMNS.items())
    assert dict(df.dtypes)["after"] == dict(df.dtypes)["before"] == f"struct<{inside}>"
    assert dict(df.dtypes)["key"] == "bigint"
    rows = {row.key: row for row in df.collect()}
    assert {key: as_dict(row.after) for key, row in rows.items()} == {
        number: row_of(somebody(number)) for number in range(5)
    }
    assert all(row.before is None for row in rows.values())


def test_a_functions_declared_result_decides_the_column_of_its_replies(spark: Any, shop: Path) -> None:
    named = {"app": "tests.spark.test_columns:app", "as": "columns"}
    df = table(spark, "replies", shop, function="counter.buy", **named).orderBy("tid")
    assert dict(df.dtypes)["result"] == "struct<total:decimal(18,2),items:bigint>"
    *rows, failed = df.collect()
    assert [tuple(row.result) for row in rows] == [(Decimal(number) / 4, number) for number in range(40)]
    assert (failed.result, failed.status, failed.function, failed.key) == (None, "aborted", "counter.buy", 7)
    found = table(spark, "replies", shop, function="counter.look", **named).orderBy("tid")
    assert dict(found.dtypes)["result"] == "bigint"
    assert [row.result for row in found.collect()] == [7, None]
    rest = table(spark, "replies", shop, function="counter.anything").collect()
    assert sorted(row.result for row in rest) == ['"x"', "5"]


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (RepliesSource, {"function": "counter.bye"}, "no function 'counter.bye'; there are: customer.enter, counter"),
        (RepliesSource, {"as": "columns"}, "typed results need one function and its app"),
        (RepliesSource, {"as": "columns", "function": "counter.buy"}, "typed results need one function and its app"),
        (RepliesSource, {"as": "xml"}, "\"as\" is 'xml'; it must be json or columns"),
        (
            RepliesSource,
            {"as": "columns", "function": "counter.anything", "app": "tests.spark.test_columns:app"},
            "counter.anything does not declare its result: declare it",
        ),
        (RepliesSource, {"keyType": "int"}, "\"keyType\" is 'int'; it must be auto, long, string or binary"),
        (ChangesSource, {"keyType": "int"}, "\"keyType\" is 'int'; it must be auto, long, string or binary"),
        (ChangesSource, {"badRows": "drop"}, "\"badRows\" is 'drop'; it must be fail or null"),
        (StateSource, {"operator": "free", "badRows": "NULL"}, "\"badRows\" is 'NULL'; it must be fail or null"),
        (StateSource, {"operator": "free", "decimals": "18"}, "decimals is '18'; it must be .*as in \"18,2\""),
        (StateSource, {"operator": "free", "decimals": "2,18"}, r'as in "18,2" \(Places\(2, 18\): the scale must'),
    ],
)
def test_wrong_options_say_what_to_write(shop: Path, source: Any, options: dict[str, str], says: str) -> None:
    with pytest.raises(HeadraceError, match=says):
        source({"path": str(shop)} | options).schema()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_that_is_an_int_is_a_long_in_changes_and_replies(spark: Any, shop: Path) -> None:
    for source, wanted in (("changes", set(range(40))), ("replies", {*range(40), 99})):
        assert dict(table(spark, source, shop).dtypes)["key"] == "bigint"
        assert {row.key for row in table(spark, source, shop).collect()} == wanted
        text = table(spark, source, shop, keyType="string")
        assert {row.key for row in text.collect()} == set(map(str, wanted))
    failed = table(spark, "replies", shop).where("status = 'aborted'").selectExpr("raised_in.key")
    assert (dict(failed.dtypes), {row.key for row in failed.collect()}) == ({"key": "bigint"}, {7})


def test_keys_of_several_types_are_strings_and_one_that_does_not_fit_is_named(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.batch([(buy, 1, 1), (buy, 2, -1)])
        ints = table(spark, "changes", tmp_path, operator="counter")
        runtime.client.batch([(buy, "one", 1), (buy, "two", -1)])
    assert dict(ints.dtypes)["key"] == "bigint"
    with pytest.raises(Exception, match=r"'counter' has the key 'one', but the column is int64.*keyType.*string"):
        ints.collect()
    for source, keys in (("changes", {"1", "one"}), ("replies", {"1", "2", "one", "two"})):
        assert {row.key for row in table(spark, source, tmp_path).collect()} == keys
        with pytest.raises(Exception, match=r"has the key '\w+', but the column is int64"):
            table(spark, source, tmp_path, keyType="long").collect()
    state = table(spark, "state", tmp_path, operator="counter", keyType="string")
    assert sorted(map(tuple, state.collect())) == [("1", 1), ("one", 1)]


def test_while_an_operator_has_no_keys_they_are_strings_unless_asked_for(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.batch([(buy, 1, 1), (buy, 2, -1)])
    for source in ("changes", "replies"):
        assert dict(table(spark, source, tmp_path).dtypes)["key"] == "string"
        assert dict(table(spark, source, tmp_path, keyType="long").dtypes)["key"] == "bigint"
    assert dict(table(spark, "changes", tmp_path, operator="counter").dtypes)["key"] == "bigint"
    assert dict(table(spark, "changes", tmp_path, operator="customer").dtypes)["key"] == "string"


def test_a_stream_keeps_the_type_of_keys_that_it_was_loaded_with(spark: Any, tmp_path: Path) -> None:
    store, sink, checkpoint = tmp_path / "store", tmp_path / "sink", tmp_path / "checkpoint"

    def follow() -> None:
        stream = spark.readStream.format("headrace.changes").option("keyType", "long").load(str(store))
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
        writer.trigger(availableNow=True).start(str(sink)).awaitTermination()

    for number in range(2):
        with Runtime(app, store=store) as runtime:
            follow()  # also before there is any key
            runtime.client.batch([(buy, number, 1)])
    follow()
    assert sorted(row.key for row in spark.read.parquet(str(sink)).collect()) == [0, 1]


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store where one entity of an undeclared operator is not like the others."""
    where = tmp_path_factory.mktemp("odd")
    with Runtime(app, store=where) as runtime:
        runtime.client.batch([(put, f"k{number}", {"n": number, "price": Decimal("1.25")}) for number in range(50)])
        runtime.client.call(put, "bad", {"n": "far", "price": Decimal("1.25")})
    return where


def test_one_bad_entity_is_named_and_with_nulls_does_not_stop_the_scan(spark: Any, odd: Path) -> None:
    says = r"n of free 'bad': 'far' is not of type int64.*option\(\"badRows\", \"null\"\)"
    with pytest.raises(HeadraceError, match=says):
        StateSource({"path": str(odd), "operator": "free"}).schema()
    df = table(spark, "state", odd, operator="free", badRows="null", decimals="10,2")
    assert df.dtypes == [("key", "string"), ("n", "bigint"), ("price", "decimal(10,2)")]
    found = {row.key: (row.n, row.price) for row in df.collect()}
    assert found == {f"k{number}": (number, Decimal("1.25")) for number in range(50)} | {"bad": (None, None)}
    own = spark.read.format("headrace.state").schema("key string, n long").option("operator", "free")
    with pytest.raises(Exception, match=r"n of free 'bad': 'far' is not of type int64"):
        own.load(str(odd)).collect()
    assert own.option("badRows", "null").load(str(odd)).where("n is null").collect()[0].key == "bad"


def test_a_decimal_is_never_rounded(spark: Any, odd: Path) -> None:
    own = table(spark, "state", odd, operator="free", badRows="null", decimals="10,1")
    assert {row.price for row in own.collect()} == {None}
    read = spark.read.format("headrace.state").schema("key string, price decimal(10,1)").option("operator", "free")
    with pytest.raises(Exception, match=r"price of free '\w+': Decimal\('1.25'\) is not of type decimal128\(10, 1\)"):
        read.load(str(odd)).collect()


def test_a_row_that_does_not_have_the_declared_type_is_refused_before_anything_is_loaded(
    spark: Any, tmp_path: Path
) -> None:
    where = tmp_path / "store"
    with Runtime(app, store=where) as runtime:
        runtime.client.call(enter, 1, somebody(1))
        runtime.client.call(enter, 2, somebody(2))
    rows = table(spark, "state", where, operator="customer")
    load(rows, "customer", key="key", app=app, store=tmp_path / "new")
    with Runtime(app, store=tmp_path / "new") as runtime:
        assert runtime.get(customer, 2) == dataclasses.replace(somebody(2), seen=somebody(2).seen.astimezone(UTC))
    wrong = rows.withColumn("credit", rows.credit.cast("decimal(20,3)") + Decimal("0.001"))
    with pytest.raises(StreamError, match=r"credit of the row with key \d does not fit: wanted .*Places\(18, 2\)"):
        load(wrong, "customer", key="key", app=app, store=tmp_path / "none")
    with Runtime(app, store=tmp_path / "none") as runtime:
        assert runtime.state(customer) == {}


# --- any type ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_records, st.data())
def test_values_of_any_declared_type_come_back_equal_through_spark(
    spark: Any, drawn: DrawnType, data: st.DataObject
) -> None:
    values = dict(enumerate(data.draw(st.lists(drawn.values, min_size=1, max_size=3))))
    made = App("drawn")
    thing = made.operator("thing", state=drawn.hint, changes=True)

    @thing.register
    def store(ctx: Context, value: Any) -> None:
        ctx.put(value)

    with tempfile.TemporaryDirectory() as where:
        with Runtime(made, Config(), store=where) as runtime:
            runtime.client.batch([(store, key, value) for key, value in values.items()])
            assert runtime.state(thing) == values
        state = table(spark, "state", where, operator="thing").toArrow().to_pylist()
        changes = table(spark, "changes", where, operator="thing", **{"as": "columns"}).toArrow().to_pylist()
    assert {row["key"]: row["after"] for row in changes} == {key: drawn.shown(value) for key, value in values.items()}
    assert {row.pop("key"): row for row in state} == {key: drawn.shown(value) for key, value in values.items()}
