"""Bulk load, on a local Spark session, against dicts and against what functions would have put."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.functions import lit

from headrace import App, Config, Context, Runtime
from headrace.bench import bulk_tables
from headrace.core.placement import shard_of
from headrace.durability.reading.store_reader import StoreReader
from headrace.errors import HeadraceError, StreamError, UnknownFunction
from headrace.spark import load
from headrace.spark.sources.state_table import StateSource

pytestmark = pytest.mark.spark


@dataclasses.dataclass
class Account:
    owner: str
    balance: int
    rate: float | None
    is_open: bool


@dataclasses.dataclass
class Order:
    lines: list[tuple[str, int]]
    total: Decimal
    at: datetime.datetime
    token: uuid.UUID
    notes: dict[str, str]


app = App("bank")
account = app.operator("account", state=Account)
count = app.operator("count", state=int, changes=True)
order = app.operator("order", state=Order)
lane = app.operator("lane", partition_by=lambda key: key.partition("/")[0])
visit = app.operator("visit", ttl=1_000_000)
free = app.operator("free")


@account.register
def open_account(ctx: Context, state: Account) -> None:
    ctx.put(state)


@count.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get(0))


@lane.register
def speed(ctx: Context) -> Any:
    return ctx.get()


@visit.register
def see(ctx: Context) -> Any:
    return ctx.get()


def accounts(spark: Any, numbers: range) -> Any:
    rows = [
        (number, f"owner {number}", number * 7, None if number % 3 else number / 2, number % 2 == 0)
        for number in numbers
    ]
    return spark.createDataFrame(rows, "id long, owner string, balance long, rate double, is_open boolean")


def state_of(where: Path, operator: Any) -> dict[Any, Any]:
    with Runtime(app, store=where) as runtime:
        return dict(runtime.state(operator))


def sealed(where: Path, name: str) -> dict[Any, Any]:
    loaded = StoreReader(where).load(None)
    assert loaded is not None
    return loaded.tables.get(name, {})


def test_rows_become_entities_just_as_functions_put_them(spark: Any, tmp_path: Path) -> None:
    found = load(accounts(spark, range(500)), account, key="id", app=app, store=tmp_path / "loaded")
    assert found["entities"] == 500
    expected = {
        number: Account(f"owner {number}", number * 7, None if number % 3 else number / 2, number % 2 == 0)
        for number in range(500)
    }
    with Runtime(app, store=tmp_path / "called") as runtime:
        runtime.client.batch([(open_account, key, value) for key, value in expected.items()])
    assert sealed(tmp_path / "loaded", "account") == sealed(tmp_path / "called", "account")
    assert state_of(tmp_path / "loaded", account) == expected
    for manifest in StoreReader(tmp_path / "loaded").snapshots.manifests()[-1:]:
        for stored in manifest.layers[0].objects:
            homes = [shard_of(account, key, 64) for key in expected]
            assert stored.rows == sum(stored.shards[0] <= home <= stored.shards[1] for home in homes)


def test_the_app_goes_on_with_what_was_loaded(spark: Any, tmp_path: Path) -> None:
    """Beside what was there, also what is only in the log; and again after a crash."""
    config = Config(snapshot_interval_us=1 << 60)
    with Runtime(app, config, store=tmp_path) as runtime:
        runtime.client.call(open_account, 7, Account("me", 1, None, True))
    killed = Runtime(app, config, store=tmp_path)
    killed.client.call(open_account, 8, Account("you", 2, None, True))  # in the log, and in no snapshot
    rows = spark.range(1000).selectExpr("concat('k', id) AS name", "id AS n")
    assert load(rows, "count", key="name", state="n", app=app, store=tmp_path)["entities"] == 1000
    with pytest.raises(HeadraceError):
        killed.client.call(add, "k1", 1)  # it was taken over
    after = Runtime(app, config, store=tmp_path)
    assert after.client.call(add, "k5", 100) == 105
    assert after.client.call(add, "new", 1) == 1
    expected = {f"k{number}": number for number in range(1000)} | {"k5": 105, "new": 1}
    assert after.state(count) == expected
    with Runtime(app, config, store=tmp_path) as again:  # the other one is as good as dead
        assert again.state(count) == expected
        assert set(again.state(account)) == {7, 8}
    for runtime in (killed, after):
        with contextlib.suppress(HeadraceError):
            runtime.close()


def test_a_load_is_seen_at_once_and_the_changelog_begins_anew(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "old", 1)
    load(
        spark.range(5).selectExpr("string(id) AS k", "id"),
        "count",
        key="k",
        state="id",
        app=app,
        store=tmp_path,
        replace=True,
    )
    read = spark.read.format("headrace.state").option("operator", "count")
    assert {row.key: row.value for row in read.load(str(tmp_path)).collect()} == {
        str(number): number for number in range(5)
    }
    with Runtime(app, store=tmp_path) as runtime:
        runtime.client.call(add, "3", 10)
        runtime.client.call(add, "9", 9)
    expected = {str(number): number for number in range(5)} | {"3": 13, "9": 9}
    assert {row.key: row.value for row in read.load(str(tmp_path)).collect()} == expected
    with pytest.raises(HeadraceError, match="older than the oldest snapshot"):
        StateSource({"path": str(tmp_path), "operator": "count", "asOfEpoch": "0"}).schema()


def test_replace_takes_the_place_of_what_was_there(spark: Any, tmp_path: Path) -> None:
    load(accounts(spark, range(300)), account, key="id", app=app, store=tmp_path)
    load(spark.range(50), "free", key="id", state="id", app=app, store=tmp_path)
    with pytest.raises(StreamError, match=r"already has entities: load\(\.\.\., replace=True\)"):
        load(accounts(spark, range(5)), account, key="id", app=app, store=tmp_path)
    found = load(accounts(spark, range(250, 400)), account, key="id", app=app, store=tmp_path, replace=True)
    assert (found["entities"], found["replaced"]) == (150, 300)
    assert set(state_of(tmp_path, account)) == set(range(250, 400))
    assert state_of(tmp_path, free) == {number: number for number in range(50)}


def test_states_that_are_no_scalars(spark: Any, tmp_path: Path) -> None:
    at = datetime.datetime(2026, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    token = uuid.UUID(int=5)
    lines = [("a", 1), ("b", 2)]
    rows = [(b"key", lines, Decimal("12.50"), at, str(token), {"x": "y"})]
    pairs = "array<struct<_1:string,_2:int>>"
    schema = f"id binary, lines {pairs}, total decimal(10,2), at timestamp, token string, notes map<string,string>"
    df = spark.createDataFrame(rows, schema)
    with pytest.raises(StreamError, match=r"token of the row with key b'key' does not fit: wanted UUID, found 'noth"):
        load(df.withColumn("token", lit("nothing")), order, key="id", app=app, store=tmp_path)
    load(df, order, key="id", app=app, store=tmp_path)
    assert state_of(tmp_path, order) == {b"key": Order(lines, Decimal("12.50"), at, token, {"x": "y"})}
    found = (
        spark.read.format("headrace.state").option("operator", "order").load(str(tmp_path)).toDF("id", *df.columns[1:])
    )
    assert found.collect() == df.collect()
    df = spark.sql("SELECT 'c' AS id, map('a', array(1, 2)) AS state")
    load(df, free, key="id", state="state", app=app, store=tmp_path)
    assert state_of(tmp_path, free) == {"c": {"a": [1, 2]}}


def test_operators_with_a_partition_or_a_time_to_live(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(200).selectExpr("concat(id % 5, '/', id) AS k", "double(id) AS speed")
    load(rows, lane, key="k", state="speed", app=app, store=tmp_path)
    load(rows, visit, key="k", state="speed", app=app, store=tmp_path)
    with Runtime(app, store=tmp_path) as runtime:
        assert runtime.client.call(speed, "3/8") == 8.0
        assert runtime.client.call(see, "3/8") == 8.0
        assert runtime.state(lane) == runtime.state(visit) == {f"{n % 5}/{n}": float(n) for n in range(200)}


WRONG_ROWS = [
    ("SELECT * FROM VALUES (1, 2), (NULL, 3) AS t(k, n)", "a row has no key"),
    ("SELECT * FROM VALUES (1, 2), (5, NULL) AS t(k, n)", "n of the row with key 5 is null"),
    ("SELECT * FROM VALUES (1, 2), (5, 3), (5, 3) AS t(k, n)", "the key 5 occurs twice"),
    ("SELECT repeat('x', 1000) AS k, 5 AS n", "a key of 1000 bytes is over the limit of 512"),
]


def test_a_wrong_row_stops_the_load_and_changes_nothing(spark: Any, tmp_path: Path) -> None:
    load(spark.range(10).selectExpr("id AS k", "id AS n"), "count", key="k", state="n", app=app, store=tmp_path)
    before = (sealed(tmp_path, "count"), sorted(path.name for path in (tmp_path / "state").iterdir()))
    for query, says in WRONG_ROWS:
        with pytest.raises(StreamError, match=f"nothing was loaded into count: .*{says}"):
            load(spark.sql(query), "count", key="k", state="n", app=app, store=tmp_path, replace=True)
    assert (sealed(tmp_path, "count"), sorted(path.name for path in (tmp_path / "state").iterdir())) == before
    assert state_of(tmp_path, count) == {number: number for number in range(10)}


ONE = {"key": "k", "state": "n"}


@pytest.mark.parametrize(
    ("query", "operator", "given", "says"),
    [
        ("SELECT 1 AS k", "cont", {"key": "k"}, "no operator 'cont' in app 'bank'; it has: account"),
        ("SELECT 1 AS k", "count", {"key": "id", "state": "n"}, "no column id, n; it has: k"),
        ("SELECT 1.5D AS k, 1 AS n", "count", ONE, "the key k is a double"),
        ("SELECT 1 AS k, 'x' AS n", "count", ONE, "the column n is string, and the state is int64: cast"),
        ("SELECT 1 AS k, 1 AS n", "free", {"key": "k"}, "name the column that holds the state of free"),
        (
            "SELECT 1 AS k, 'x' AS owner, 1L AS money",
            "account",
            {"key": "k"},
            "Missing: balance, is_open, rate; too many: money",
        ),
        (
            "SELECT 1 AS k, 'x' AS owner, '1' AS balance, 1D AS rate, true AS is_open",
            "account",
            {"key": "k"},
            "the column balance is string, and the field balance is int64: cast",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_anything_is_touched(
    spark: Any, tmp_path: Path, query: str, operator: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises((StreamError, UnknownFunction), match=says):
        load(spark.sql(query), operator, app=app, store=tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_the_benchmark_checks_what_it_measures(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_tables, "WARM_UPS", 0)
    done: list[int] = []
    found = bulk_tables.measure(2_000, 1, tmp_path, done.append)
    assert found["exact"]
    assert found["load_per_s"] > 0
    assert found["state_per_s"] > 0
    assert found["record_load_of_int"] > 0
    assert found["record_state_of_int"] > 0
    assert sum(done) == bulk_tables.total(2_000, 1)
    assert bulk_tables.summary(found).row_count == 8
