"""Streams into transactions, on a local Spark session."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headrace import Abort, App, Context, Runtime
from headrace.errors import StreamError, UnknownFunction

pytestmark = pytest.mark.spark

app = App("bank")
account = app.operator("account")
order = app.operator("order")
journal = app.operator("journal")


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@account.register
def deposit(ctx: Context, amount: int) -> int:
    balance: int = ctx.get(0) + amount
    ctx.put(balance)
    return balance


@account.register
def transfer(ctx: Context, to: str, amount: int) -> int:
    balance: int = ctx.get(0) - amount
    if balance < 0:
        raise Abort(f"{ctx.key} lacks {-balance}")
    ctx.put(balance)
    ctx.call_async(deposit, to, amount)
    return balance


@order.register
def place(ctx: Context, lines: list[Line], at: datetime.datetime, tags: dict[str, int]) -> Decimal:
    ctx.put((lines, at, tags))
    return sum((line.price for line in lines), Decimal(0))


@journal.register
def append(ctx: Context, number: int) -> int:
    numbers = [*ctx.get([]), number]
    ctx.put(numbers)
    return len(numbers)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from headrace.spark import session

    made = session(spark_driver_memory="1g")
    yield made
    made.stop()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(app) as made:
        yield made


class Collect:
    """A sink that keeps the replies, and fails where it is told to."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.rows: list[Any] = []
        self.batches: list[int] = []
        self.fail_on = fail_on

    def __call__(self, df: Any, batch_id: int) -> None:
        self.batches.append(batch_id)
        if batch_id == self.fail_on:
            raise RuntimeError("the sink is full")
        self.rows += df.collect()


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f".{name}").rename(folder / name)


def stream(spark: Any, folder: Path, schema: str = "src string, dst string, amount long") -> Any:
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


def run(query: Any) -> None:
    query.awaitTermination(120)
    assert not query.isActive


AVAILABLE = {"availableNow": True}


def test_every_row_is_a_transaction_and_the_total_is_conserved(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    runtime.client.map(deposit, ["a", "b"], [(100,), (100,)])
    rows = [{"src": "ab"[i % 2], "dst": "ba"[i % 2], "amount": i % 90} for i in range(300)]
    for part in range(3):
        write(tmp_path / "in", f"{part}.json", rows[part * 100 : part * 100 + 100])
    sink = Collect()
    df = stream(spark, tmp_path / "in")
    run(
        transact(df, transfer, key="src", args=["dst", "amount"], runtime=runtime, replies=sink, trigger=AVAILABLE),
    )
    assert sink.batches == [0, 1, 2]
    assert len(sink.rows) == 300
    assert [row.tid for row in sink.rows] == list(range(3, 303))
    assert sum(runtime.state(account).values()) == 200
    aborted = [row for row in sink.rows if row.status == "aborted"]
    assert aborted
    assert all(row.error_type == "Abort" and row.function == "account.transfer" for row in aborted)
    assert runtime.metrics()["aborted"] == len(aborted)


def test_the_rows_of_a_partition_keep_their_order(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    write(tmp_path / "in", "0.json", [{"src": "j", "dst": "", "amount": i} for i in range(500)])
    run(
        transact(stream(spark, tmp_path / "in"), append, key="src", args=["amount"], runtime=runtime, trigger=AVAILABLE)
    )
    assert runtime.get(journal, "j") == list(range(500))


def test_a_batch_that_spark_repeats_runs_once_and_gets_the_same_replies(
    spark: Any, runtime: Runtime, tmp_path: Path
) -> None:
    from headrace.spark import transact

    rows = [{"src": "a", "dst": "b", "amount": i} for i in range(20)] + [{"src": None, "dst": "b", "amount": 1}]
    for part in range(3):
        write(tmp_path / "in", f"{part}.json", rows)

    def start(sink: Collect) -> Any:
        return transact(
            stream(spark, tmp_path / "in"),
            "account.deposit",
            key="src",
            args=["amount"],
            runtime=runtime,
            replies=sink,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger=AVAILABLE,
        )

    first = Collect(fail_on=1)
    with pytest.raises(Exception, match="the sink is full"):
        run(start(first))
    committed = runtime.metrics()["committed"]
    assert committed == 40  # batch 1 ran, only its replies were not taken
    second = Collect()
    run(start(second))
    assert second.batches == [1, 2]
    assert runtime.get(account, "a") == 3 * sum(range(20))
    assert runtime.metrics()["committed"] == 60
    assert [row.tid for row in second.rows[:20]] == list(range(21, 41))
    assert second.rows[20].status == "refused"
    assert len({row.request_id for row in first.rows + second.rows}) == 63


def test_a_checkpoint_of_another_run_is_refused(spark: Any, tmp_path: Path) -> None:
    from headrace.spark import transact

    def start(runtime: Runtime) -> Any:
        return transact(
            stream(spark, tmp_path / "in"),
            deposit,
            key="src",
            args=["amount"],
            runtime=runtime,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger=AVAILABLE,
        )

    write(tmp_path / "in", "0.json", [{"src": "a", "dst": "b", "amount": 1}])
    with Runtime(app) as first:
        run(start(first))
    write(tmp_path / "in", "1.json", [{"src": "a", "dst": "b", "amount": 1}])
    with Runtime(app) as second:
        with pytest.raises(Exception, match="new checkpoint location"):
            run(start(second))
        assert second.state(account) == {}


def test_a_row_that_cannot_be_a_call_is_refused_and_the_stream_goes_on(
    spark: Any, runtime: Runtime, tmp_path: Path
) -> None:
    from headrace.spark import transact

    rows = [
        {"src": "a", "amount": 1},
        {"src": None, "amount": 1},
        {"src": "a", "amount": None},
        {"src": "x" * 1000, "amount": 1},
        {"src": "a", "amount": 2},
    ]
    write(tmp_path / "in", "0.json", rows)
    sink = Collect()
    run(
        transact(
            stream(spark, tmp_path / "in"),
            deposit,
            key="src",
            args=["amount"],
            runtime=runtime,
            replies=sink,
            trigger=AVAILABLE,
        )
    )
    assert [row.status for row in sink.rows] == ["ok", "refused", "refused", "refused", "ok"]
    assert [row.error_type for row in sink.rows] == [None, "BadKey", "BadArguments", "BadKey", None]
    assert [row.tid for row in sink.rows] == [1, None, None, None, 2]
    assert runtime.state(account) == {"a": 3}


def test_structs_maps_decimals_and_timestamps_arrive_as_the_annotated_types(
    spark: Any, runtime: Runtime, tmp_path: Path
) -> None:
    from headrace.spark import transact

    row = {
        "id": 7,
        "lines": [{"sku": "pen", "price": "1.50"}, {"sku": "ink", "price": "2.25"}],
        "at": "2026-01-02T03:04:05.000006Z",
        "tags": {"gift": 1},
    }
    write(tmp_path / "in", "0.json", [row])
    schema = "id long, lines array<struct<sku: string, price: decimal(10,2)>>, at timestamp, tags map<string, int>"
    sink = Collect()
    df = stream(spark, tmp_path / "in", schema)
    run(transact(df, place, key="id", args=["lines", "at", "tags"], runtime=runtime, replies=sink, trigger=AVAILABLE))
    assert [(row.status, row.error) for row in sink.rows] == [("ok", None)]
    lines, at, tags = runtime.get(order, 7)
    assert lines == [Line("pen", Decimal("1.50")), Line("ink", Decimal("2.25"))]
    assert at == datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    assert tags == {"gift": 1}
    assert json.loads(sink.rows[0].result) == "3.75"


def test_columns_may_have_any_name_and_keys_may_be_zero(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    write(tmp_path / "in", "0.json", [{"from.id": 0, "the `to`": "b", "n": 5}])
    df = stream(spark, tmp_path / "in", "`from.id` long, `the ``to``` string, n long")
    sink = Collect()
    columns = ["the `to`", "n"]
    run(transact(df, transfer, key="from.id", args=columns, runtime=runtime, replies=sink, trigger=AVAILABLE))
    assert [(row.status, row.key, row.error) for row in sink.rows] == [("aborted", "0", "0 lacks 5")]


def test_what_is_wrong_with_a_stream_is_said_before_it_starts(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    (tmp_path / "in").mkdir()
    df = stream(spark, tmp_path / "in")
    for keywords, message in (
        ({"key": "source", "args": ["dst", "amount"]}, "no column source; it has: src, dst, amount"),
        ({"key": "src", "args": ["dst"]}, r"account.transfer\(to: str, amount: int\) cannot be called with the 1"),
        ({"key": "src", "args": "dst"}, "list of column names"),
    ):
        with pytest.raises(StreamError, match=message):
            transact(df, transfer, runtime=runtime, **keywords)
    with pytest.raises(UnknownFunction, match="no function 'pay'"):
        transact(df, "account.pay", key="src", args=[], runtime=runtime)
    with pytest.raises(StreamError, match="streaming DataFrame"):
        transact(spark.range(3), deposit, key="id", args=["id"], runtime=runtime)


def test_a_session_that_the_user_made_is_left_alone(spark: Any) -> None:
    from headrace.spark import session

    before = dict(spark.sparkContext.getConf().getAll())
    assert session("another", master="local[1]").sparkContext is spark.sparkContext
    assert dict(spark.sparkContext.getConf().getAll()) == before
