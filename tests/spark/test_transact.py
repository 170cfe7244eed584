"""Streams and tables into transactions, on a local Spark session: `transact`, and Spark's own way, `headrace.calls`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import Abort, App, Config, Context, Runtime
from headrace.durability.inbox import sign_of_life
from headrace.durability.inbox.inbox import waiting
from headrace.durability.log.log import bounds
from headrace.durability.store import DirectoryStore
from headrace.errors import StreamError, UnknownFunction
from headrace.runtime.intake import InboxReader
from headrace.spark.sources.registry import register
from tests.waiting import eventually

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


@account.register
def send(ctx: Context, to: str, amount: int = 1, *, note: str = "", tip: int = 0) -> str:
    ctx.call_async(deposit, to, amount + tip)
    return f"{to} {amount} {note} {tip}"


@journal.register
def append(ctx: Context, number: int) -> int:
    numbers = [*ctx.get([]), number]
    ctx.put(numbers)
    return len(numbers)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime(app, store=tmp_path / "store") as made:
        yield made


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f".{name}").rename(folder / name)


def stream(spark: Any, folder: Path, schema: str = "src string, dst string, amount long") -> Any:
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


def run(query: Any) -> None:
    query.awaitTermination(120)
    assert not query.isActive


def replies(spark: Any, runtime: Runtime) -> list[Any]:
    """In the order of the log."""
    runtime.drain()
    runtime.snapshot()  # which comes after the replies of its epochs
    return spark.read.format("headrace.replies").load(runtime.store_url).orderBy("tid").collect()


def dead(spark: Any, runtime: Runtime) -> list[Any]:
    runtime.drain()
    return spark.read.format("headrace.dead").load(runtime.store_url).orderBy("query", "batch", "row").collect()


AVAILABLE = {"availableNow": True}
TRANSFERS = {"key": "src", "args": ["dst", "amount"], "trigger": AVAILABLE}


def test_every_row_is_a_transaction_and_the_total_is_conserved(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    runtime.client.map(deposit, ["a", "b"], [(100,), (100,)])
    rows = [{"src": "ab"[i % 2], "dst": "ba"[i % 2], "amount": i % 90} for i in range(300)]
    for part in range(3):
        write(tmp_path / "in", f"{part}.json", rows[part * 100 : part * 100 + 100])
    query = transact(stream(spark, tmp_path / "in"), transfer, runtime=runtime, name="transfers", **TRANSFERS)
    assert query.name == "transfers"
    run(query)
    found = replies(spark, runtime)[2:]
    assert [row.tid for row in found] == list(range(3, 303))
    assert [row.request_id for row in found] == [f"{query.id}/{n // 100}/{n % 100}" for n in range(300)]
    balances, statuses = {"a": 100, "b": 100}, []
    for row in rows:
        statuses.append("ok" if balances[row["src"]] >= row["amount"] else "aborted")
        if statuses[-1] == "ok":
            balances[row["src"]] -= row["amount"]
            balances[row["dst"]] += row["amount"]
    assert [row.status for row in found] == statuses
    assert "aborted" in statuses
    assert runtime.state(account) == balances
    aborted = [row for row in found if row.status == "aborted"]
    assert all(row.error_type == "Abort" and row.raised_in.function == "account.transfer" for row in aborted)
    assert runtime.metrics()["source_rows"] == 300


def test_the_rows_of_a_partition_keep_their_order(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    write(tmp_path / "in", "0.json", [{"src": "j", "dst": "", "amount": i} for i in range(500)])
    df = stream(spark, tmp_path / "in")
    run(transact(df, append, key="src", args=["amount"], runtime=runtime, name="it", trigger=AVAILABLE))
    runtime.drain()
    assert runtime.get(journal, "j") == list(range(500))


def test_a_micro_batch_without_rows_or_partitions_counts_too(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    files = [[1], [], [2], []]  # a file of no bytes has no partition
    for part, amounts in enumerate(files):
        write(tmp_path / "in", f"{part}.json", [{"src": "j", "amount": amount} for amount in amounts])
    rows = stream(spark, tmp_path / "in")
    query = transact(rows, append, key="src", args=["amount"], trigger=AVAILABLE, runtime=runtime, name="j")
    run(query)
    assert [progress["batchId"] for progress in query.recentProgress] == [0, 1, 2, 3]
    assert sorted(progress["numInputRows"] for progress in query.recentProgress) == [0, 0, 1, 1]
    write(tmp_path / "in", "4.json", [{"src": "j", "amount": 3}])
    run(transact(rows, append, key="src", args=["amount"], trigger=AVAILABLE, runtime=runtime, name="j"))
    runtime.drain()
    transact(spark.createDataFrame([], "src string, amount long"), append, key="src", args=["amount"], runtime=runtime)
    (numbers,) = runtime.state(journal).values()
    assert sorted(numbers) == [1, 2, 3]


def test_a_batch_that_spark_repeats_runs_once(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    """Spark forgets that a batch was committed, and does it again: in other partitions, too."""
    from headrace.spark import transact

    for part in range(3):
        write(tmp_path / "in", f"{part}.json", [{"src": "a", "dst": "b", "amount": i} for i in range(20)])

    def start(partitions: int) -> Any:
        df = stream(spark, tmp_path / "in").repartition(partitions)
        checkpoint = str(tmp_path / "checkpoint")
        return transact(
            df, "account.deposit", key="src", args=["amount"], runtime=runtime, checkpoint=checkpoint, trigger=AVAILABLE
        )

    run(start(1))
    assert len(replies(spark, runtime)) == 60
    (tmp_path / "checkpoint" / "commits" / "2").unlink()
    (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    write(tmp_path / "in", "3.json", [{"src": "a", "dst": "b", "amount": 1000}])
    run(start(3))
    found = replies(spark, runtime)
    assert len(found) == len({row.request_id for row in found}) == 61
    assert runtime.get(account, "a") == 3 * sum(range(20)) + 1000


def test_a_query_goes_on_after_a_restart_of_the_app(spark: Any, tmp_path: Path) -> None:
    from headrace.spark import transact

    def once() -> Any:
        with Runtime(app, store=tmp_path / "store") as runtime:
            df, checkpoint = stream(spark, tmp_path / "in"), str(tmp_path / "checkpoint")
            run(
                transact(
                    df, deposit, key="src", args=["amount"], runtime=runtime, checkpoint=checkpoint, trigger=AVAILABLE
                )
            )
            runtime.drain()
            return runtime.get(account, "a")

    write(tmp_path / "in", "0.json", [{"src": "a", "dst": "b", "amount": 1}])
    assert once() == 1
    write(tmp_path / "in", "1.json", [{"src": "a", "dst": "b", "amount": 2}])
    assert once() == 3
    assert once() == 3


def test_a_checkpoint_of_another_run_is_refused(spark: Any, tmp_path: Path) -> None:
    from headrace.spark import transact

    def start(runtime: Runtime) -> Any:
        df, checkpoint = stream(spark, tmp_path / "in"), str(tmp_path / "checkpoint")
        return transact(
            df, deposit, key="src", args=["amount"], runtime=runtime, checkpoint=checkpoint, trigger=AVAILABLE
        )

    write(tmp_path / "in", "0.json", [{"src": "a", "dst": "b", "amount": 1}])
    with Runtime(app, store=tmp_path / "one") as first:
        run(start(first))
    write(tmp_path / "in", "1.json", [{"src": "a", "dst": "b", "amount": 1}])
    with Runtime(app, store=tmp_path / "two") as second:
        with pytest.raises(Exception, match="new checkpoint location"):
            run(start(second))
        assert second.state(account) == {}


def test_a_row_that_cannot_be_a_call_is_a_dead_letter_and_the_stream_goes_on(
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
    df = stream(spark, tmp_path / "in")
    query = transact(df, deposit, key="src", args=["amount"], runtime=runtime, name="it", trigger=AVAILABLE)
    run(query)
    assert [(row.request_id, row.tid) for row in replies(spark, runtime)] == [
        (f"{query.id}/0/0", 1),
        (f"{query.id}/0/4", 2),
    ]
    letters = dead(spark, runtime)
    assert [(row.row, row.error_type, row.args) for row in letters] == [
        (1, "BadKey", "[1]"),
        (2, "BadArguments", "[null]"),
        (3, "BadKey", "[1]"),
    ]
    assert [json.loads(row.key) for row in letters] == [None, "a", "x" * 1000]
    assert all(row.query == str(query.id) and row.function == "account.deposit" and row.error for row in letters)
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
    df = stream(spark, tmp_path / "in", schema)
    run(transact(df, place, key="id", args=["lines", "at", "tags"], runtime=runtime, name="it", trigger=AVAILABLE))
    found = replies(spark, runtime)
    assert [(row.status, row.error) for row in found] == [("ok", None)]
    lines, at, tags = runtime.get(order, 7)
    assert lines == [Line("pen", Decimal("1.50")), Line("ink", Decimal("2.25"))]
    assert at == datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    assert tags == {"gift": 1}
    assert json.loads(found[0].result) == "3.75"


def test_columns_may_have_any_name_and_keys_may_be_zero(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    write(tmp_path / "in", "0.json", [{"from.id": 0, "the `to`": "b", "n": 5}])
    df = stream(spark, tmp_path / "in", "`from.id` long, `the ``to``` string, n long")
    run(transact(df, transfer, key="from.id", args=["the `to`", "n"], runtime=runtime, name="it", trigger=AVAILABLE))
    assert [(row.status, row.key, row.error) for row in replies(spark, runtime)] == [("aborted", "0", "0 lacks 5")]


def test_a_table_is_a_batch_that_has_run_when_it_is_written(
    spark: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.spark import transact

    look = InboxReader.look

    def look_late(reader: InboxReader, done: Callable[..., None]) -> int:
        """A new batch waits for a second, so that a writer that does not wait for it is seen."""
        if not set(waiting(reader.store)) - reader.under_way:
            return 0
        time.sleep(1)
        return look(reader, done)

    monkeypatch.setattr(InboxReader, "look", look_late)
    table = spark.createDataFrame([(f"k{i % 5}", i) for i in range(50)], "who string, n long")
    expected = {f"k{i}": sum(range(i, 50, 5)) for i in range(5)}
    assert transact(table, deposit, key="who", args=["n"], runtime=runtime) is None
    assert runtime.state(account) == expected
    for _ in range(2):  # with a name it runs once
        transact(table, deposit, key="who", args=["n"], runtime=runtime, name="monday")
    assert runtime.state(account) == {key: 2 * total for key, total in expected.items()}


def test_columns_are_named_by_parameters_and_those_without_take_their_defaults(spark: Any, runtime: Runtime) -> None:
    from headrace.spark import transact

    table = spark.createDataFrame([("a", "b", 5), ("a", "c", 6)], "src string, dst string, n long").coalesce(1)
    for args, expected in (
        ({"to": "dst"}, ["b 1  0", "c 1  0"]),
        ({"tip": "n", "to": "dst"}, ["b 1  5", "c 1  6"]),
        ({"to": "dst", "amount": "n", "note": "src"}, ["b 5 a 0", "c 6 a 0"]),
    ):
        before = len(replies(spark, runtime))
        transact(table, send, key="src", args=args, runtime=runtime)
        assert [json.loads(row.result) for row in replies(spark, runtime)[before:]] == expected
    where = runtime.store_url
    own = table.write.format("headrace.calls").mode("append").option("key", "src").option("function", "account.send")
    own.option("args", '{"to": "dst", "tip": "n"}').save(where)
    assert [json.loads(row.result) for row in replies(spark, runtime)[-2:]] == ["b 1  5", "c 1  6"]
    signature = r"account.send\(to: str, amount: int, note: str, tip: int\)"
    for wrong, message in (({"dst": "dst"}, "has no parameter 'dst'"), ({"tip": "n"}, "needs 'to'")):
        with pytest.raises(StreamError, match=f"{signature} {message}"):
            transact(table, send, key="src", args=wrong, runtime=runtime)
        with pytest.raises(Exception, match=f"account.send\\(to.* {message}"):
            transact(table, "account.send", key="src", args=wrong, store=where)
    with pytest.raises(StreamError, match="no column there; it has: src, dst, n"):
        transact(table, send, key="src", args={"to": "there"}, runtime=runtime)
    with pytest.raises(Exception, match="comma-separated names, a JSON list or a JSON object"):
        own.option("args", '{"to"').save(where)


def test_rows_may_name_their_functions_and_have_ids_of_their_own(spark: Any, runtime: Runtime) -> None:
    from headrace.spark import transact

    rows = [
        ("account.deposit", "a", "[10]", "one"),
        ("account.transfer", "a", '["b", 4]', "two"),
        ("journal.append", "j", "[1]", None),
        ("account.nothing", "a", "[1]", "three"),
        ("account.deposit", "a", "{", "four"),
        ("account.deposit", "a", '["x"]', "five"),
    ]
    calls = spark.createDataFrame(rows, "function string, key string, args string, id string").coalesce(1)
    transact(calls, key="key", args_json="args", request_id="id", runtime=runtime)
    ids = [row.request_id for row in replies(spark, runtime)]
    assert ids[:2] == ["one", "two"]
    assert ids[2].endswith("/0/2")
    letters = [(row.request_id, row.error_type) for row in dead(spark, runtime)]
    assert letters == [("three", "UnknownFunction"), ("four", "BadArguments"), ("five", "BadArguments")]
    assert runtime.state(account) == {"a": 6, "b": 4}
    assert runtime.state(journal) == {"j": [1]}
    two = [("account", "deposit", "c", 5, None), ("account", "transfer", "c", None, None)]
    split = spark.createDataFrame(two, "operator string, function string, key string, first long, second long")
    transact(split, key="key", args=["first", "second"], runtime=runtime)
    assert runtime.get(account, "c") == 5
    assert "account.transfer" in {row.function for row in dead(spark, runtime)}


def test_sparks_own_way_needs_nothing_but_the_store(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    table = spark.createDataFrame([("a", 1), ("b", 2)], "who string, n long")
    writer = table.write.format("headrace.calls").mode("append").option("key", "who").option("args", "n")
    writer.option("function", "account.deposit").save(runtime.store_url)
    assert runtime.state(account) == {"a": 1, "b": 2}
    table.createOrReplaceTempView("deposits")
    write(tmp_path / "in", "0.json", [{"src": "a", "dst": "b", "amount": 1}])
    df = stream(spark, tmp_path / "in").writeStream.format("headrace.calls").option("function", "account.transfer")
    df = df.option("key", "src").option("args", "dst, amount").option("checkpointLocation", str(tmp_path / "ck"))
    run(df.trigger(availableNow=True).start(runtime.store_url))
    runtime.drain()
    assert runtime.state(account) == {"a": 0, "b": 3}
    for options, message in (
        (
            {"function": "account.pay", "key": "who"},
            "no function account.pay in the app that runs on .* account.deposit",
        ),
        ({"function": "account.deposit", "key": "who"}, "cannot be called with the 0 columns"),
        ({"function": "account.deposit", "key": "x", "args": "n"}, "no column x; it has: who, n"),
        ({"key": "who"}, "no function to call"),
        ({"function": "account.deposit", "key": "who", "args": "n", "argsJson": "n"}, "not both"),
    ):
        with pytest.raises(Exception, match=message):
            table.write.format("headrace.calls").mode("append").options(**options).save(runtime.store_url)
    with pytest.raises(Exception, match="no Headrace store"):
        writer.save(str(tmp_path / "nothing"))


def test_nobody_takes_the_calls_of_an_app_that_is_not_running_and_nothing_is_lost(spark: Any, tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path / "store"):
        pass
    table = spark.createDataFrame([("a", 1)], "who string, n long")
    writer = table.write.format("headrace.calls").mode("append").option("key", "who").option("args", "n")
    with pytest.raises(Exception, match="Do not write the table again"):
        writer.option("function", "account.deposit").option("patience", 1).save(str(tmp_path / "store"))
    with Runtime(app, store=tmp_path / "store") as runtime:
        runtime.drain()
        assert runtime.state(account) == {"a": 1}


def test_a_stream_that_no_app_takes_is_warned_of_and_goes_on_when_one_starts(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.spark import transact

    monkeypatch.setattr(sign_of_life, "PATIENCE_S", 0.1)
    with Runtime(app, store=tmp_path / "store"):
        pass
    for part in range(2):
        write(tmp_path / "in", f"{part}.json", [{"src": "a", "dst": "", "amount": 1}])
    df = stream(spark, tmp_path / "in")
    query = transact(
        df, deposit, key="src", args=["amount"], store=str(tmp_path / "store"), name="it", trigger=AVAILABLE
    )
    eventually(lambda: "no app seems to run" in caplog.text)
    with Runtime(app, store=tmp_path / "store") as runtime:
        run(query)
        runtime.drain()
        assert runtime.state(account) == {"a": 2}


def test_replies_tell_what_was_called_and_carry_columns_of_their_rows(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined by a column of the input; the same after a crash that has lost the replies."""
    from pyspark.sql import functions as F  # noqa: N812

    from headrace.spark import transact

    rows = [
        {
            "src": None if n == 5 else f"k{n % 3}",
            "dst": f"k{(n + 1) % 3}",
            "amount": n % 4,
            "order": f"o-{n}",
            "day": None,
        }
        for n in range(40)
    ]
    write(tmp_path / "in", "0.json", rows)
    schema = "src string, dst string, amount long, order string, day date"
    store, copy = tmp_path / "store", tmp_path / "copy"
    with Runtime(app, Config(reply_interval_us=1 << 60, snapshot_interval_us=1 << 60), store=store) as runtime:
        runtime.client.map(deposit, ["k0", "k1"], [(5,), (5,)])
        eventually(lambda: bounds(DirectoryStore(store), "replies")[1] == 1)  # the next ones wait for the interval
        df = stream(spark, tmp_path / "in", schema)
        run(transact(df, transfer, runtime=runtime, name="orders", carry=["order", "day", "amount"], **TRANSFERS))
        runtime.drain()
        shutil.copytree(store, copy)
    assert bounds(DirectoryStore(copy), "replies")[1] == 1, "they were not written yet"
    with Runtime(app, store=copy):
        pass
    for where in (store, copy):
        read = spark.read.format("headrace.replies").load(str(where)).orderBy("tid")
        clients, streams = read.limit(2).collect(), read.where("tid > 2")
        assert [(row.function, row.key, row.carried) for row in clients] == [
            ("account.deposit", "k0", None),
            ("account.deposit", "k1", None),
        ]
        found = streams.select("*", F.from_json("carried", "order string, day date, amount long").alias("of")).collect()
        taken = [row for row in rows if row["src"] is not None]
        assert [(row.function, row.key) for row in found] == [("account.transfer", row["src"]) for row in taken]
        assert [row.of.asDict() for row in found] == [
            {name: row[name] for name in ("order", "day", "amount")} for row in taken
        ]
        assert {row.status for row in found} == {"ok", "aborted"}
        for row in found:
            assert row.raised_in == (None if row.status == "ok" else (row.function, row.key, None))


def test_an_option_that_does_not_exist_is_refused(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    register(spark)
    where = str(runtime.store_url)
    for source, options, message in (
        ("headrace.replies", {"startingepochs": 1}, "no option startingepochs. Did you mean startingEpoch?"),
        ("headrace.replies", {"startingEPOCH": 1, "zzz": 1}, "no option zzz. The options are: "),
        ("headrace.state", {"operator": "account", "keyColum": "id"}, "Did you mean keyColumn?"),
        ("headrace.changes", {"operators": "account"}, "Did you mean operator?"),
        ("headrace.dead", {"query": "q"}, "no option query"),
    ):
        with pytest.raises(Exception, match=re.escape(message)):
            spark.read.format(source).options(**options).load(where).collect()
    table = spark.createDataFrame([("a", 1)], "who string, n long")
    calls = table.write.format("headrace.calls").mode("append").option("key", "who").option("arguments", "n")
    with pytest.raises(Exception, match=re.escape("no option arguments")):
        calls.option("function", "account.deposit").save(where)
    assert runtime.state(account) == {}


def test_what_is_wrong_with_a_stream_is_said_before_it_starts(spark: Any, runtime: Runtime, tmp_path: Path) -> None:
    from headrace.spark import transact

    (tmp_path / "in").mkdir()
    df = stream(spark, tmp_path / "in")
    for keywords, message in (
        ({"key": "source", "args": ["dst", "amount"]}, "no column source; it has: src, dst, amount"),
        ({"key": "src", "args": ["dst"]}, r"account.transfer\(to: str, amount: int\) cannot be called with the 1"),
        ({"key": "src", "args": "dst"}, "list of column names"),
        (
            {"key": "src", "args": ["dst", "amount"], "carry": "dst"},
            r"carry must be a list of column names: carry=\['dst'\]",
        ),
        ({"key": "src", "args": ["dst", "amount"], "carry": ["day"]}, "no column day"),
        ({"key": "src", "args": ["dst", "amount"], "store": "elsewhere"}, "not both"),
    ):
        with pytest.raises(StreamError, match=message):
            transact(df, transfer, runtime=runtime, **keywords)
    with pytest.raises(UnknownFunction, match="no function 'pay'"):
        transact(df, "account.pay", key="src", args=[], runtime=runtime)
    with pytest.raises(StreamError, match="is not a stream"):
        transact(spark.range(3), deposit, key="id", args=["id"], runtime=runtime, trigger=AVAILABLE)
    with pytest.raises(StreamError, match="give it a name"):
        transact(df, transfer, key="src", args=["dst", "amount"], runtime=runtime)
    with pytest.raises(StreamError, match="pass runtime=, or store="):
        transact(df, transfer, key="src", args=["dst", "amount"])
    with Runtime(app) as fleeting, pytest.raises(StreamError, match="needs a store"):
        transact(df, transfer, key="src", args=["dst", "amount"], runtime=fleeting)


def test_a_session_that_the_user_made_is_left_alone(spark: Any) -> None:
    from headrace.spark import session

    before = dict(spark.sparkContext.getConf().getAll())
    assert session("another", master="local[1]").sparkContext is spark.sparkContext
    assert dict(spark.sparkContext.getConf().getAll()) == before


def test_a_spark_that_is_too_old_is_told_so() -> None:
    from headrace.spark import register

    with pytest.raises(StreamError, match=r"this is Spark 3.5.1, but Headrace needs 4.1 or later.*install pyspark"):
        register(SimpleNamespace(version="3.5.1"))
