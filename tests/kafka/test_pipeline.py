"""Requests from a topic, replies into another, against a broker: in one process, with failures made on purpose."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.bank import app
from headrace import Runtime
from tests.kafka.broker import Broker
from tests.waiting import LONG_PATIENCE_S, eventually

pytestmark = pytest.mark.spark


@contextmanager
def piped(kafka: Broker, spark: Any, store: Path, stem: str, **settings: Any) -> Iterator[tuple[Runtime, Any]]:
    """The bank on `store`, with topics <stem>-in and <stem>-out. Ends in peace."""
    from headrace.spark.kafka.pipeline import Pipeline
    from headrace.spark.kafka.topics import Kafka

    topics = Kafka(kafka.address, (f"{stem}-in",), f"{stem}-out")
    with Pipeline(topics, str(store), spark, **settings) as pipeline, Runtime(app, store=store) as runtime:
        pipeline.start(runtime.metrics()["epochs"])
        yield runtime, pipeline
        pipeline.stop_requests()


def call(function: str, key: Any, *args: Any, request_id: str | None = None) -> bytes:
    found = {"function": f"account.{function}", "key": key, "args": args}
    return json.dumps(found if request_id is None else found | {"request_id": request_id}).encode()


def headers_of(message: Any) -> dict[str, str]:
    return {name: value.decode() for name, value in message.headers()}


def test_each_message_is_answered_once_and_what_is_no_call_is_told_why(
    kafka: Broker, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.spark.kafka import pipeline as module

    monkeypatch.setattr(module, "DRAIN_S_MAX", LONG_PATIENCE_S)
    kafka.create("plain-in", "plain-out", partitions=1)
    with Runtime(app, store=tmp_path / "store") as runtime:
        runtime.client.call("account.deposit", "before", 1)  # not asked by Kafka, and before its time
    kafka.produce(
        "plain-in",
        [
            call("deposit", "a", 10, request_id="r0"),
            call("transfer", "a", "b", 4),
            call("transfer", "a", "b", 50, request_id="r2"),
            b"junk",
            (b"b", b'{"function": "account.deposit", "args": [1]}'),
            call("rob", "a", request_id="r5"),
            call("deposit", 7, 3),
        ],
    )
    with piped(kafka, spark, tmp_path / "store", "plain") as (runtime, _):
        eventually(lambda: len(kafka.read("plain-out")) >= 7, LONG_PATIENCE_S, pause_s=0.2)
        kafka.produce("plain-in", [b"more junk", call("deposit", "a", 1, request_id="r8")])
        eventually(lambda: runtime.get("account", "a") == 7, LONG_PATIENCE_S, pause_s=0.2)
        assert runtime.state("account") == {"before": 1, "a": 7, "b": 5, 7: 3}
    replies = {message.key().decode(): message for message in kafka.read("plain-out")}  # the last ones came at the end
    assert len(kafka.read("plain-out")) == len(replies) == 9
    told = {name: json.loads(message.value()) for name, message in replies.items()}
    assert told["r0"] == {"request_id": "r0", "status": "ok", "tid": 2, "epoch": told["r0"]["epoch"], "result": 10}
    assert told["plain-in/0/1"]["result"] == 6
    assert (told["r2"]["status"], told["r2"]["type"]) == ("aborted", "Abort")
    assert told["r2"]["raised_in"] == {"function": "account.transfer", "key": "a"}
    assert "result" not in told["r2"]
    assert told["plain-in/0/4"]["result"] == 5
    for name, kind in (("plain-in/0/3", "BadMessage"), ("r5", "UnknownFunction"), ("plain-in/0/7", "BadMessage")):
        assert (told[name]["status"], told[name]["type"]) == ("refused", kind)
        assert "tid" not in told[name]
        assert headers_of(replies[name])["status"] == "refused"
    tids = {name: headers_of(message).get("tid") for name, message in replies.items()}
    assert tids == {name: str(reply["tid"]) if "tid" in reply else None for name, reply in told.items()}
    dead = spark.read.format("headrace.dead").load(str(tmp_path / "store")).collect()
    assert sorted(row.request_id for row in dead) == ["plain-in/0/3", "plain-in/0/7", "r5"]
    assert {row.args for row in dead if row.error_type == "BadMessage"} == {"junk", "more junk"}


def test_a_batch_of_replies_that_was_written_in_part_is_completed_and_nothing_is_there_twice(
    kafka: Broker, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink fails three times in the middle of a batch, and the broker goes away for a while."""
    from headrace.spark.kafka import pipeline as module

    whole = module.ReplyTopic._write
    failures: list[int] = []

    def in_part(self: Any, rows: Any, batch: int) -> None:
        if len(failures) < 3 and not rows.isEmpty():  # Spark's very first batch is empty
            failures.append(batch)
            whole(self, rows.where(f"abs(hash(who)) % 4 = {len(failures)}"), batch)
            raise RuntimeError("it broke in the middle")
        whole(self, rows, batch)

    monkeypatch.setattr(module.ReplyTopic, "_write", in_part)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    kafka.create("parts-in", "parts-out", partitions=2)
    expected: Counter[str] = Counter()
    balances: dict[str, int] = {}

    def send(first: int, count: int) -> None:
        messages = []
        for number in range(first, first + count):
            name, key = f"m{number}", f"k{number % 7}"
            if number % 10 == 9:
                messages.append((key.encode(), json.dumps({"request_id": name}).encode()))
            else:
                messages.append((key.encode(), call("deposit", key, number + 1, request_id=name)))
                balances[key] = balances.get(key, 0) + number + 1
            expected[name] += 1
        kafka.produce("parts-in", messages)

    send(0, 400)
    with piped(kafka, spark, tmp_path / "store", "parts") as (runtime, pipeline):
        eventually(lambda: len(failures) == 3 and len(kafka.read("parts-out")) >= 400, LONG_PATIENCE_S, pause_s=0.2)
        assert len(set(failures)) == 1  # it was one batch, again and again
        assert pipeline.metrics()["replies"]["restarts"] == 3
        kafka.stop()
        time.sleep(1)
        kafka.start()
        send(400, 100)
        eventually(lambda: len(kafka.read("parts-out")) >= 500, LONG_PATIENCE_S, pause_s=0.2)
        assert runtime.state("account") == balances
    replies = kafka.read("parts-out")
    assert Counter(message.key().decode() for message in replies) == expected
    by_status = Counter(headers_of(message)["status"] for message in replies)
    assert by_status == {"ok": 450, "refused": 50}


def test_a_reply_has_the_result_to_the_letter_and_one_that_is_too_large_is_left_out(spark: Any) -> None:
    from headrace.spark.kafka.pipeline import RESULT_BYTES_MAX, reply_rows
    from headrace.spark.sources.dead import SCHEMA

    columns = "request_id string, tid long, epoch long, status string, result string"
    columns += ", error string, error_type string, raised_in struct<function: string, key: string, where: string>"
    results = [
        "1.0",
        "null",
        '{"a":[1e400,"\\u00e4 \\"}"]}',
        "12345678901234567890123",
        '"ä"',
        '"{}"',
        "x" * RESULT_BYTES_MAX,
    ]
    rows: list[tuple[Any, ...]] = [
        (f"r{tid}", tid, 1, "ok", result, None, None, None) for tid, result in enumerate(results)
    ]
    rows.append(("big", 98, 1, "ok", "x" * (RESULT_BYTES_MAX + 1), None, None, None))
    rows.append(("no", 99, 1, "aborted", None, "y" * 20_000, "Abort", ("account.f", "k", None)))
    rows.append(("bug", 100, 1, "aborted", None, "0", "KeyError", ("account.f", "k", "shop.py:4")))
    dead = [("q", 3, 4, "d", None, None, "junk", "BadMessage", 'not "a" call'), ("another", 1, 1, "e", *[None] * 5)]
    found = reply_rows(spark.createDataFrame(rows, columns), spark.createDataFrame(dead, SCHEMA), "q").collect()
    told = {row.key: row.value for row in found}
    for tid, result in enumerate(results):
        assert told[f"r{tid}"] == f'{{"request_id":"r{tid}","status":"ok","tid":{tid},"epoch":1,"result":{result}}}'
    assert json.loads(told["big"]) == {
        "request_id": "big",
        "status": "ok",
        "tid": 98,
        "epoch": 1,
        "error": f"its result has {RESULT_BYTES_MAX + 1} bytes: read it from headrace.replies",
    }
    assert json.loads(told["no"]) == {
        "request_id": "no",
        "status": "aborted",
        "tid": 99,
        "epoch": 1,
        "error": "y" * 10_000,
        "type": "Abort",
        "raised_in": {"function": "account.f", "key": "k"},
    }
    assert json.loads(told["bug"])["raised_in"] == {"function": "account.f", "key": "k", "where": "shop.py:4"}
    assert json.loads(told["d"]) == {
        "request_id": "d",
        "status": "refused",
        "error": 'not "a" call',
        "type": "BadMessage",
    }
    assert told.keys() == {*(f"r{tid}" for tid in range(len(results))), "big", "no", "bug", "d"}
    assert {row.key: row.who for row in found if row.key in ("no", "d")} == {"no": "99|no", "d": "q/3/4|d"}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"spark.master": "local"}, None),
        ({"spark.master": "local[*]"}, None),
        ({"spark.master": "local[2,4]"}, "maxFailures"),
        ({"spark.master": "local-cluster[2,1,1024]"}, "maxFailures"),
        ({"spark.master": "spark://host:7077"}, "maxFailures"),
        ({"spark.master": "spark://host:7077", "spark.task.maxFailures": "1"}, None),
        ({"spark.master": "local[2]", "spark.speculation": "true"}, "speculation"),
    ],
)
def test_a_spark_that_runs_tasks_twice_by_itself_is_refused(settings: dict[str, str], wrong: str | None) -> None:
    from headrace.errors import StreamError
    from headrace.spark.kafka.pipeline import check_tries

    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: settings))
    if wrong is None:
        check_tries(spark)
    else:
        with pytest.raises(StreamError, match=wrong):
            check_tries(spark)


class Query:
    """A stand-in for Spark's."""

    def __init__(self, batch: int | None = None, failed: str | None = None) -> None:
        self.lastProgress = None if batch is None else {"batchId": batch, "processedRowsPerSecond": 0.0}
        self.isActive = failed is None
        self.failed = failed

    def exception(self) -> Exception | None:
        return None if self.failed is None else RuntimeError(self.failed)


TRACEBACK = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "clientserver.py", line 644, in _call_proxy
headrace.errors.StreamError: batch 0 of the replies failed: RuntimeError: the sink is full
	at org.apache.spark.Somewhere.run(Somewhere.scala:5)"""


def test_a_query_that_fails_is_started_again_until_it_fails_without_having_done_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.errors import StreamError
    from headrace.spark.kafka import pipeline as module

    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(module, "TRIES_MAX", 3)
    made: list[Query] = []

    def make() -> Any:
        made.append(Query(batch=len(made) if len(made) < 5 else 4, failed=TRACEBACK))
        return made[-1]

    kept = module.KeptQuery("replies", make)
    kept.start()
    for _ in range(2 * (5 + 2)):  # five that do something and fail, then three that do nothing
        kept.restart_if_due()
    assert len(made) == 8
    with pytest.raises(StreamError, match=r"stream of replies failed 4 times in a row: batch 0 .* the sink is full$"):
        kept.restart_if_due()


def test_a_query_that_fails_pauses_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.spark.kafka import pipeline as module

    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    began: list[float] = []

    def make() -> Any:
        began.append(now_s)
        return Query(failed="no broker\nand a stack")

    kept = module.KeptQuery("requests", make)
    kept.start()
    while len(began) < 9:
        kept.restart_if_due()
        now_s += 0.25
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert [gap // 0.5 * 0.5 for gap in gaps] == [0.5, 1, 2, 4, 8, 16, 30, 30]
