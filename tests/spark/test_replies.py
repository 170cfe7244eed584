"""`headrace.replies`: each request that ran is one row, with its id and what became of it, once and for all."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headrace import App, Config, Runtime
from headrace.core.epoch import Piece
from headrace.core.origin import FromSource
from headrace.durability.inbox.batch_calls import with_carried
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.records import EpochHeader, unpack, unpack_results
from headrace.durability.store import DirectoryStore
from headrace.errors import Abort, StreamError
from headrace.model.context import Context
from headrace.spark.sources import replies
from headrace.spark.sources.replies import Ids, ReplyLog, ReplyRows, column_texts, schema_of, texts_of
from headrace.wire.messages import Answers, Failure, id_of
from headrace.wire.values import Values, plain

app = App("replying")
teller = app.operator("teller")


@app.record
@dataclasses.dataclass
class Receipt:
    owner: str
    amount: Decimal
    day: datetime.date
    parts: tuple[int, ...]


VALUES = Values([Receipt])


@teller.register
def add(ctx: Context, amount: int) -> int:
    if amount < 0:
        raise Abort(f"{amount} is too little")
    balance: int = (ctx.get() or 0) + amount
    ctx.put(balance)
    return balance


@teller.register
def note(ctx: Context, amount: int) -> None:
    ctx.put((ctx.get() or 0) + amount)


@teller.register
def receipt(ctx: Context, amount: int) -> Receipt:
    share = 100 // (amount + 1)  # a bug: it fails for -1
    return Receipt(str(ctx.key), Decimal(amount) / 4, datetime.date(2026, 1, 1 + amount % 28), (amount, share))


@teller.register
def echo(ctx: Context, value: Any) -> Any:
    return value


@teller.register
def remind(ctx: Context, amount: int) -> str:
    ctx.call_later(0, note, ctx.key, amount)
    return 'a "reminder"\n'


FUNCTIONS = (add, note, receipt, remind)
VALUES_OF_ALL_KINDS = [
    0, -1, 1 << 62, (1 << 64) - 1, True, False, None, 1.5, float("inf"), "", 'a "b"\n\\', "ü€\u2028", b"", b"\xc0",
    b"\xff\n", [1, [2, b"x"]], {"a": (1, 2), 3: None}, (),
    Receipt("x", Decimal("1.50"), datetime.date(2026, 2, 3), (1,)),
]  # fmt: skip


class Told:
    """The oracle: what the engine itself answered, a row for each that ran, by TID."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def add(self, answers: Answers, calls: list[Any], carried: list[str | None] | None = None) -> None:
        """`calls` are `(function, key, ...)`, with a row each."""
        for at, tid in enumerate(answers.tids):
            if tid is None:
                continue
            failure, value = answers.failures.get(at), answers.results[at]
            function, key, *_ = calls[at]
            self.rows[tid] = {
                "request_id": id_of(answers.ids, at),
                "tid": tid,
                "epoch": answers.epochs[at],
                "function": function.full_name,
                "key": shown_key(key),
                "status": "ok" if failure is None else "aborted",
                "result": None if failure is not None else json.dumps(as_told(plain(value))),
                "error": failure.message if failure is not None else None,
                "error_type": failure.type if failure is not None else None,
                "raised_in": None if failure is None else raised(failure),
                "carried": None if carried is None else carried[at],
            }

    def in_order(self) -> list[dict[str, Any]]:
        return [self.rows[tid] for tid in sorted(self.rows)]


def raised(failure: Failure) -> dict[str, Any]:
    return {"function": failure.function, "key": shown_key(failure.key), "where": failure.where}


def shown_key(key: Any) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def as_told(value: Any) -> Any:
    return None if value == float("inf") else value


def again(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the JSON as everybody writes it, and without the time, which the oracle does not know."""
    return [
        {name: cell for name, cell in row.items() if name != "time"}
        | {"result": None if row["result"] is None else json.dumps(json.loads(row["result"]))}
        for row in rows
    ]


def from_stream(
    runtime: Runtime,
    batch_id: int,
    ids: Any,
    rows: list[tuple[Any, Any, tuple[Any, ...]]],
    carried: list[str | None] | None = None,
) -> Answers:
    """As Spark's micro-batches come."""
    calls: list[Any] = [*rows]
    batch = runtime.admission.admit_rows(FromSource(ids, "query", batch_id), calls)
    if carried is not None:
        batch = with_carried(batch, pa.table({"carried": carried}))
    return runtime.submit(batch).result()


def fill(where: Path, seed: int, batches: int = 40, **settings: Any) -> Told:
    """A store with epochs of all sizes and kinds: of clients, streams, with aborts, timers, own ids, refused rows."""
    random, told, sent = Random(seed), Told(), 0
    config = Config(epoch_transactions_max=random.choice([7, 50, 1_000]), **settings)
    with Runtime(app, config, store=where) as runtime:
        for number in range(batches):
            count = random.choice([1, 1, 2, 15, 40, 300])
            function = random.choice(FUNCTIONS)
            rows: list[tuple[Any, Any, tuple[Any, ...]]] = [
                (function, random.choice([1, "two", b"\x03"]), (random.randrange(-1, 20),)) for _ in range(count)
            ]
            match random.choice(["client", "mixed", "stream", "stream", "own ids", "refused", "values"]):
                case "client":
                    told.add(runtime.client.batch([(f, key, *args) for f, key, args in rows]).answers, rows)
                case "mixed":
                    mixed = [(random.choice(FUNCTIONS), key, *args) for _, key, args in rows]
                    told.add(runtime.client.batch(mixed).answers, mixed)
                case "values":
                    calls = [(echo, "k", random.choice(VALUES_OF_ALL_KINDS)) for _ in rows]
                    told.add(runtime.client.options(request_id=f"values{number}").batch(calls).answers, calls)
                case "stream":
                    carried = random.choice([None, [random.choice([None, f'{{"n": {at}}}']) for at in range(count)]])
                    told.add(from_stream(runtime, sent, f"query/{sent}", rows, carried), rows, carried)
                    sent += 1
                case "own ids":
                    told.add(from_stream(runtime, sent, [f"own-{number}-{at}" for at in range(count)], rows), rows)
                    sent += 1
                case "refused":
                    rows[count // 2] = (function, None, (1,))  # no key
                    carried = [f"row {at}" for at in range(count)]
                    answers = from_stream(runtime, sent, f"query/{sent}", rows, carried)
                    assert answers.tids[count // 2] is None
                    told.add(answers, rows, carried)
                    sent += 1
    return told


def rows_in(where: Path) -> list[dict[str, Any]]:
    kept = ReplyLog({"path": str(where)})
    records = ((record.number, record.data) for record in read_log(DirectoryStore(where), "replies"))
    return [row for batch in kept.batches(records) for row in batch.to_pylist()]


def times_of(where: Path) -> dict[int, datetime.datetime]:
    """When each epoch was closed, as the log says."""
    headers = (unpack(record.data)[0] for record in read_log(DirectoryStore(where), "log"))
    return {
        header.number: datetime.datetime.fromtimestamp(header.closed_us / 1e6, datetime.UTC)
        for header in headers
        if isinstance(header, EpochHeader)
    }


# --- the rows, without Spark ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_rows_are_what_was_answered(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = fill(tmp_path / "store", seed)
    assert again(rows_in(tmp_path / "store")) == told.in_order()
    assert len(told.rows) > 100
    times = times_of(tmp_path / "store")
    assert all(row["time"] == times[row["epoch"]] for row in rows_in(tmp_path / "store"))
    monkeypatch.setattr(replies, "ROWS_MAX", 37)
    monkeypatch.setattr(replies, "BYTES_MAX", 100)
    assert again(rows_in(tmp_path / "store")) == told.in_order()


def test_the_log_does_not_repeat_the_ids_of_streams(tmp_path: Path) -> None:
    fill(tmp_path / "store", 1)
    store = DirectoryStore(tmp_path / "store")
    headers = [unpack(record.data)[0] for record in read_log(store, "log")]
    in_log = [piece for each in headers if isinstance(each, EpochHeader) for piece in each.pieces if piece.position]
    kept = [unpack_results(record.data)[0].epoch.pieces for record in read_log(store, "replies")]
    in_replies = [piece for pieces in kept for piece in pieces if piece.position]
    assert in_log == [piece._replace(ids="") for piece in in_replies]
    assert all(piece.ids for piece in in_replies)
    assert in_replies


def test_what_nobody_outside_asked_for_is_left_out(tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path / "store") as runtime:
        asked = runtime.client.batch([(remind, key, 5) for key in range(40)])
        while sum(runtime.state(teller).values()) < 200:  # the timers have fired
            runtime.client.call(add, "other", 0)
        last = runtime.client.batch([(add, "last", 1)])[0]
    rows = rows_in(tmp_path / "store")
    assert {row["tid"] for row in rows} >= {reply.tid for reply in asked}
    assert rows[-1]["tid"] == last.tid
    assert last.tid is not None
    assert last.tid - len(rows) >= 40  # the timers' own TIDs
    assert not any(row["result"] == "null" for row in rows)


@pytest.mark.parametrize("values", [VALUES_OF_ALL_KINDS, [None] * 50, [True, False] * 20, [1.5, 2.5], ["a"] * 40, [7]])
def test_columns_and_lists_of_sealed_values_become_the_same_json(values: list[Any]) -> None:
    from headrace.durability.columns import sealed_to_arrow

    sealed = list(map(VALUES.seal, values))
    want = [json.dumps(as_told(plain(value))) for value in sealed]
    for texts in (texts_of(sealed), column_texts(sealed_to_arrow(sealed)), column_texts(sealed_to_arrow(sealed)[0:])):
        assert texts.type == pa.string()
        assert [json.dumps(json.loads(text)) for text in texts.to_pylist()] == want
    if len(values) > 3:
        part = column_texts(sealed_to_arrow(sealed)[2:-1])
        assert [json.dumps(json.loads(text)) for text in part.to_pylist()] == want[2:-1]


@pytest.mark.parametrize("seed", range(10))
def test_ids_of_pieces_in_any_order_are_those_of_their_rows(seed: int) -> None:
    """Streams and clients come between each other, and rows of one batch go on in a later epoch."""
    random, ids, want, reached = Random(seed), Ids(), [], {"a": 0, "b": 0, "": 0}
    for _ in range(60):
        size, stem = random.choice([1, 3, 20, 100]), random.choice(["a", "a", "a", "b", "", None])
        if stem is None:
            piece = Piece([f"own{random.random()}" for _ in range(size)], random.choice([0, 7]), size, 1)
        else:
            reached[stem] = random.choice([reached[stem], reached[stem], 0, 500])
            piece = Piece(stem, reached[stem], size)
            reached[stem] += size
        first = random.randrange(size)
        last = random.choice([size, random.randint(first, size)])
        ids.add(piece, first, last)
        want += [piece.id_at(row) for row in range(first, last)]
    ids.add(Piece("", 5, 2, position=9), 0, 2)  # of a stream, by a version that did not keep them
    assert ids.array().to_pylist() == [*want, None, None]


def test_a_large_epoch_is_several_record_batches(tmp_path: Path) -> None:
    with Runtime(app, store=tmp_path / "store") as runtime:
        values = ["x" * 900_000 + str(number) for number in range(45)]
        runtime.client.batch([(echo, "k", value) for value in values])
    kept = ReplyLog({"path": str(tmp_path / "store")})
    records = ((record.number, record.data) for record in read_log(DirectoryStore(tmp_path / "store"), "replies"))
    made = [*kept.batches(records)]
    assert len(made) >= 3
    assert all(batch.nbytes < 40 << 20 for batch in made)
    assert [json.loads(text) for batch in made for text in batch["result"].to_pylist()] == values


def test_an_empty_piece_of_nothing_is_no_batch() -> None:
    assert [*ReplyLog({"path": "x"}).batches(iter(()))] == []
    assert ReplyRows(schema_of(pa.string(), pa.string())).rows == 0


@pytest.mark.parametrize("seed", range(4))
def test_replies_that_a_crash_has_lost_come_again_with_the_same_ids(tmp_path: Path, seed: int) -> None:
    """The store is copied while the runtime lives, and before its replies are written: as if power had failed."""
    random, where, copy = Random(seed), tmp_path / "store", tmp_path / "copy"
    told = Told()
    config = Config(reply_interval_us=1 << 60, epoch_transactions_max=random.choice([20, 1_000]))
    with Runtime(app, config, store=where) as runtime:
        told.add(runtime.client.batch([(add, 1, 1)]).answers, [(add, 1)])
        for number in range(12):
            count = random.choice([1, 40, 90])
            ids: Any = random.choice([f"query/{number}", [f"own-{number}-{at}" for at in range(count)]])
            rows: list[Any] = [(random.choice(FUNCTIONS[:3]), at % 7, (at,)) for at in range(count)]
            if random.random() < 0.5:
                rows[0] = (add, None, (1,))
            told.add(from_stream(runtime, number, ids, rows), rows)
        shutil.copytree(where, copy)
        assert bounds(DirectoryStore(copy), "replies")[1] <= 3
    with Runtime(app, store=copy):
        pass
    original, remade = (
        {record.number: record.data for record in read_log(DirectoryStore(path), "replies")} for path in (where, copy)
    )
    assert remade == original
    assert again(rows_in(copy)) == told.in_order()


# --- through Spark ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    where = tmp_path_factory.mktemp("filled") / "store"
    return where, fill(where, 5, 60)


@pytest.fixture
def source(spark: Any) -> Iterator[Any]:
    spark.dataSource.register(replies.RepliesSource)
    yield spark
    for query in spark.streams.active:
        query.stop()


class Sink:
    """Keeps the rows of each micro-batch, by its number; a repeat must bring the same."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self.repeats = 0
        self.fails_at = fails_at

    def __call__(self, df: Any, batch_id: int) -> None:
        rows = [row.asDict(recursive=True) for row in df.collect()]
        if batch_id in self.batches:
            self.repeats += 1
            assert by_tid(rows) == by_tid(self.batches[batch_id])
        self.batches[batch_id] = rows
        if batch_id == self.fails_at:
            self.fails_at = None
            raise OSError("the sink is full")

    def rows(self) -> list[dict[str, Any]]:
        return by_tid([row for batch in self.batches.values() for row in batch])


def by_tid(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["tid"])


def run(spark: Any, where: Path, checkpoint: Path, sink: Sink, **options: Any) -> list[Any]:
    """A query over all there is now; its progress."""
    stream = spark.readStream.format("headrace.replies").options(**options).load(str(where))
    writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return list(query.recentProgress)


@pytest.mark.spark
def test_a_table_of_replies_is_what_was_answered(source: Any, filled: tuple[Path, Told]) -> None:
    where, told = filled
    read = source.read.format("headrace.replies").option("partitions", 3)
    rows = [row.asDict(recursive=True) for row in read.load(str(where)).collect()]
    assert again(by_tid(rows)) == told.in_order()
    some = read.option("startingEpoch", 5).option("endingEpoch", 9).load(str(where)).collect()
    want = [row["tid"] for row in told.in_order() if 5 <= row["epoch"] <= 9]
    assert sorted(row.tid for row in some) == want
    first = read.load(str(where)).selectExpr("min(unix_micros(time))").collect()[0][0]
    assert first == round(times_of(where)[5].timestamp() * 1e6)
    assert want


@pytest.mark.spark
def test_a_stream_brings_each_reply_once_and_goes_on_where_it_stopped(source: Any, tmp_path: Path) -> None:
    where, sink = tmp_path / "store", Sink()
    told = fill(where, 11, 30)
    progress = run(source, where, tmp_path / "checkpoint", sink, maxEpochsPerBatch=9)
    assert again(sink.rows()) == told.in_order()
    ends = [json.loads(each.sources[0].endOffset)["epoch"] for each in progress if each.numInputRows]
    assert [end - start for start, end in zip([0, *ends], ends, strict=False)][:-1] == [9] * (len(ends) - 1)
    with Runtime(app, store=where) as runtime:
        told.add(runtime.client.batch([(add, "more", 1)] * 500).answers, [(add, "more")] * 500)
    run(source, where, tmp_path / "checkpoint", sink)
    assert again(sink.rows()) == told.in_order()
    assert sum(map(len, sink.batches.values())) == len(told.rows)
    fill(tmp_path / "another", 11, 40)
    with pytest.raises(Exception, match="the checkpoint belongs to another store"):
        run(source, tmp_path / "another", tmp_path / "checkpoint", sink)


@pytest.mark.spark
def test_a_batch_that_spark_repeats_has_the_same_rows(source: Any, tmp_path: Path) -> None:
    where, sink = tmp_path / "store", Sink(fails_at=1)
    told = fill(where, 12, 20)
    with pytest.raises(Exception, match="the sink is full"):
        run(source, where, tmp_path / "checkpoint", sink, maxEpochsPerBatch=10)
    with Runtime(app, store=where) as runtime:  # more has come when it goes on
        told.add(runtime.client.batch([(add, "more", 1)] * 50).answers, [(add, "more")] * 50)
    run(source, where, tmp_path / "checkpoint", sink, partitions=3)
    assert sink.repeats == 1
    assert again(sink.rows()) == told.in_order()
    assert sum(map(len, sink.batches.values())) == len(told.rows)


@pytest.mark.spark
def test_a_stream_follows_an_app_that_is_running(source: Any, tmp_path: Path) -> None:
    where, sink, told = tmp_path / "store", Sink(), Told()
    with Runtime(app, store=where) as runtime:
        stream = source.readStream.format("headrace.replies").load(str(where))
        writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.start()
        for number in range(15):
            rows: list[Any] = [(add, at, (1,)) for at in range(200)]
            told.add(from_stream(runtime, number, f"{query.id}/{number}", rows), rows)
        runtime.snapshot()  # the replies are in the store before it
        query.processAllAvailable()
        query.stop()
    assert again(sink.rows()) == told.in_order()
    assert sink.rows()[203]["request_id"] == f"{query.id}/1/3"


# --- what is wrong is told --------------------------------------------------------------------------------------------


def reason(spark: Any, where: Any, **options: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 Spark wraps what a source raises
        spark.read.format("headrace.replies").options(**options).load(str(where)).collect()
    return str(caught.value)


@pytest.mark.spark
def test_bad_options_say_what_to_change(source: Any, filled: tuple[Path, Told], tmp_path: Path) -> None:
    where, told = filled
    last = max(row["epoch"] for row in told.rows.values())
    assert "no Headrace store" in reason(source, tmp_path / "nothing")
    assert "startingEpoch is 'soon'; it must be a whole number" in reason(source, where, startingEpoch="soon")
    assert "partitions is '0'; it must be a whole number, at least 1" in reason(source, where, partitions=0)
    assert "endingEpoch is 99999, but the last epoch so far is" in reason(source, where, endingEpoch=99_999)
    assert f"startingEpoch is {last + 99}" in reason(source, where, startingEpoch=last + 99)
    with pytest.raises(Exception, match=r"endingEpoch is for spark\.read"):
        run(source, where, tmp_path / "checkpoint", Sink(), endingEpoch=3)


def retired(where: Path) -> tuple[int, int]:
    """A store whose first replies are not kept any more: the oldest epoch and the last one."""
    config = Config(
        segment_bytes_max=1,
        snapshots_kept=1,
        request_ids_max=0,
        request_id_retention_us=0,
        reply_retention_us=1,
        epoch_transactions_max=5,
    )
    with Runtime(app, config, store=where) as runtime:
        for _ in range(6):
            runtime.client.batch([(add, "k", 1)] * 20)
            runtime.snapshot()
    return bounds(DirectoryStore(where), "replies")


@pytest.mark.spark
def test_an_epoch_that_is_not_kept_any_more_is_refused_with_the_oldest_one(source: Any, tmp_path: Path) -> None:
    oldest, last = retired(tmp_path / "store")
    assert 3 < oldest < last
    text = f"the replies of epoch 2 are no longer kept: those of epoch {oldest} are the oldest"
    assert text in reason(source, tmp_path / "store", startingEpoch=2)
    with pytest.raises(Exception, match=text):
        run(source, tmp_path / "store", tmp_path / "checkpoint", Sink(), startingEpoch=2)
    sink = Sink()
    run(source, tmp_path / "store", tmp_path / "another", sink)
    assert sorted({row["epoch"] for row in sink.rows()}) == list(range(oldest, last + 1))
    assert all(row["request_id"] for row in sink.rows())


def test_what_is_retired_or_lost_between_planning_and_reading_is_told(tmp_path: Path) -> None:
    from headrace.spark.sources.epoch_streams import RecordRange

    oldest, last = retired(tmp_path / "store")
    kept = ReplyLog({"path": str(tmp_path / "store")})
    with pytest.raises(StreamError, match=f"epoch 2 are no longer kept: those of epoch {oldest} are the oldest"):
        list(kept.read(RecordRange(2, last, 0)))
    for first in (last, last + 1, last + 5):
        with pytest.raises(StreamError, match=f"of epoch {max(first, last + 1)} were there and are now missing"):
            list(kept.read(RecordRange(first, last + 6, 0)))
    assert sum(batch.num_rows for batch in kept.read(RecordRange(oldest, last, 0))) > 0
