"""Requests from Kafka topics, replies into one, through Spark's own connector.

    request topics ──► headrace.calls ──► store ──► headrace.replies, headrace.dead ──► reply topic

A message is a call in JSON, as the HTTP gateway takes it:

    {"function": "account.transfer", "key": "alice", "args": ["bob", 5], "request_id": "optional"}

Rules:
1. A request without an id gets one: "<topic>/<partition>/<offset>". One without a key uses the message's key.
2. The messages of one partition run in order. A micro-batch runs once, even if Spark repeats it: the store knows it by
   query and number.
3. Each reply is in the reply topic once: its key is the request's id, its headers have its TID and its micro-batch. The
   first micro-batch after a start may have been written before: the replies of it that are already there, by TID, are
   left out (topics.py).
4. A message that is not a valid call is a dead letter, and its reply says why. It never stops the stream.
5. A query that fails is started again, after a pause. If it keeps failing without any progress in between, the pipeline
   ends.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 the usual name
from pyspark.sql.streaming import StreamingQuery

from headrace.durability.store import Store, address_of, open_store
from headrace.errors import BadRequest, ConnectorMissing, HeadraceError, StreamError
from headrace.spark.kafka import connector
from headrace.spark.kafka.topics import Kafka, admin, said_in_java, without, written
from headrace.spark.sources.registry import register

LOG = logging.getLogger("headrace.kafka")
PLACE = "checkpoints/kafka"  # in the store: where Spark keeps its progress
BEGAN = f"{PLACE}/began.json"
MESSAGES_MAX = 100_000  # of one micro-batch
EPOCHS_MAX = 1_000
TRIGGER = "100 milliseconds"  # how often an idle query checks
DRAIN_S_MAX = 10.0
FIRST_TRIES_MAX, TRIES_MAX, PAUSE_S, PAUSE_S_MAX = 3, 20, 0.5, 30.0
OURS = re.compile(r"^headrace\.errors\.\w+: (.+)$", re.MULTILINE)  # in Spark's report of an error in Python
RESULT_BYTES_MAX, ERROR_CHARACTERS_MAX = 900_000, 10_000  # Kafka accepts messages of a megabyte by default
DELIVERY_S_MAX = 15  # what the broker did not accept in this time fails, and the micro-batch with it


# --- replies ----------------------------------------------------------------------------------------------------------


def reply_rows(replies: DataFrame, dead: DataFrame, query_id: str) -> DataFrame:
    """Replies and refusals as one stream: their identity, key and value, and all headers but one."""
    answered = replies.select(
        F.concat_ws("|", F.col("tid").cast("string"), "request_id").alias("who"),
        F.col("tid"),
        F.lit(None).cast("string").alias("refused"),
        F.col("request_id").alias("key"),
        F.col("status"),
        with_result(
            F.to_json(
                F.struct(
                    "request_id",
                    "status",
                    "tid",
                    "epoch",
                    F.coalesce(F.left("error", F.lit(ERROR_CHARACTERS_MAX)), too_large()).alias("error"),
                    F.col("error_type").alias("type"),
                    "raised_in",
                )
            )
        ).alias("value"),
    )
    place = F.concat_ws("/", "query", "batch", "row")
    refused = dead.where(F.col("query") == query_id).select(
        F.concat_ws("|", place, "request_id").alias("who"),
        F.lit(None).cast("long").alias("tid"),
        place.alias("refused"),
        F.col("request_id").alias("key"),
        F.lit("refused").alias("status"),
        F.to_json(
            F.struct(
                "request_id",
                F.lit("refused").alias("status"),
                F.left("error", F.lit(ERROR_CHARACTERS_MAX)).alias("error"),
                F.col("error_type").alias("type"),
            )
        ).alias("value"),
    )
    return answered.unionByName(refused)


def with_result(text: Column) -> Column:
    """The result is JSON already and is copied unchanged."""
    joined = F.concat(F.substring(text, 1, F.length(text) - 1), F.lit(',"result":'), F.col("result"), F.lit("}"))
    return F.when(F.col("result").isNotNull() & too_large().isNull(), joined).otherwise(text)


def too_large() -> Column:
    """Why a result is left out: one that the broker refuses would block all later ones."""
    size = F.octet_length("result")
    reason = F.concat(F.lit("its result has "), size.cast("string"), F.lit(" bytes: read it from headrace.replies"))
    return F.when(size > RESULT_BYTES_MAX, reason)


def headers(batch: str) -> Column:
    """The headers that `topics.written` reads."""
    named = {"status": F.col("status"), "tid": F.col("tid").cast("string"), "refused": F.col("refused")}
    pairs = [(name, value) for name, value in (named | {"batch": F.lit(batch)}).items()]
    made = F.array(
        *(F.struct(F.lit(name).alias("key"), F.encode(value, "UTF-8").alias("value")) for name, value in pairs)
    )
    return F.filter(made, lambda pair: pair["value"].isNotNull())


# --- the pipeline -----------------------------------------------------------------------------------------------------


class Pipeline:
    """Two streaming queries on the store of a running app: requests in, replies out.

    Make it before the app starts, so that problems with Kafka are reported first; call `start` after the app has
    started. For a clean end call `stop_requests`, close the app, then `close` this: all replies are then in their
    topic.
    """

    def __init__(
        self,
        kafka: Kafka,
        store: str,
        spark: SparkSession,
        *,
        checkpoint: str | None = None,
        messages_max: int = MESSAGES_MAX,
    ) -> None:
        """`checkpoint` is where Spark keeps its progress: by default in the store, if that is a folder."""
        if not connector.is_loaded(spark):
            raise ConnectorMissing(f"this Spark session has no Kafka connector. To install it, {connector.hint()}")
        check_tries(spark)
        self.kafka, self.spark, self.messages_max = kafka, register(spark), messages_max
        self.store = open_store(store)
        self.checkpoint = checkpoint or self._place()
        with admin(spark, kafka) as client:
            client.check_topics()
        self.requests = KeptQuery("requests", self._start_requests)
        self.replies = KeptQuery("replies", self._start_replies)
        self._began = StartPoint(0, kafka.replies, {})
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="headrace-kafka", daemon=True)

    def _place(self) -> str:
        if not self.store.can_append:
            raise BadRequest(
                f"Spark's checkpoint for Kafka cannot be in {self.store.url}: give a folder with --checkpoint, and "
                "keep it as long as the store"
            )
        return f"{self.store.url}/{PLACE}"

    def start(self, last_epoch: int) -> None:
        """Start the queries of a running app. If its store never had a pipeline, replies up to this epoch are not sent
        to Kafka."""
        with admin(self.spark, self.kafka) as client:
            ends = {partition: end for partition, (_, end) in client.bounds(self.kafka.replies).items()}
        self._began = begin(self.store, StartPoint(last_epoch, self.kafka.replies, ends))
        self.requests.start_first()
        self.replies.start_first()
        self._thread.start()

    def stop_requests(self) -> None:
        self._end_watch()
        self.requests.stop()

    def abandon(self) -> None:
        """The app has failed, and may run elsewhere by now: write no more."""
        self.replies.stop()
        self._end_watch()  # it may just have started the query again
        self.replies.stop()
        self.requests.stop()

    def close(self) -> None:
        """Stop it. Replies that do not reach their topic in time are written after the next start."""
        self._end_watch()
        self.requests.stop()
        self.replies.drain(DRAIN_S_MAX)
        self.replies.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until it ends; if it has failed for good, raise the reason."""
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def metrics(self) -> dict[str, Any]:
        return {kept.name: kept.metrics() for kept in (self.requests, self.replies)}

    def _end_watch(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._stop.wait(0.2):
                for kept in (self.requests, self.replies):
                    kept.restart_if_due()
        except StreamError as error:
            self._failed = error
        except Exception as error:
            self._failed = StreamError(f"Spark no longer answers: {type(error).__name__}: {first_line(error)}")

    # --- the queries ---

    def _start_requests(self) -> StreamingQuery:
        source = (
            self.spark.readStream.format("kafka")
            .options(**self.kafka.options())
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", ",".join(self.kafka.requests))
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.messages_max)
            .load()
        )
        return (
            source.select(
                F.col("value").alias("call"), F.col("key"), F.concat_ws("/", "topic", "partition", "offset").alias("id")
            )
            .writeStream.format("headrace.calls")
            .option("callJson", "call")
            .option("key", "key")
            .option("requestId", "id")
            .option("checkpointLocation", f"{self.checkpoint}/requests")
            .queryName("headrace-requests")
            .trigger(processingTime=TRIGGER)
            .start(address_of(self.store))
        )

    def _start_replies(self) -> StreamingQuery:
        replies = (
            self.spark.readStream.format("headrace.replies")
            .option("startingEpoch", self._began.epoch + 1)
            .option("maxEpochsPerBatch", EPOCHS_MAX)
            .option("keyType", "string")
            .load(address_of(self.store))
        )
        dead = self.spark.readStream.format("headrace.dead").load(address_of(self.store))  # a reader keeps its options
        rows = reply_rows(replies, dead, self.requests.id)
        sink = ReplyTopic(self.kafka, self._began.since(self.kafka.replies))
        query = (
            rows.writeStream.foreachBatch(sink.write)
            .option("checkpointLocation", f"{self.checkpoint}/replies")
            .queryName("headrace-replies")
            .trigger(processingTime=TRIGGER)
            .start()
        )
        sink.begin(query.id)
        return query


def check_tries(spark: SparkSession) -> None:
    """If Spark ran a task twice by itself, its replies would be written twice without notice."""
    conf = spark.sparkContext.getConf()
    has_one_try = re.fullmatch(r"local(\[[^,]*\])?", str(conf.get("spark.master", "")))
    if not has_one_try and conf.get("spark.task.maxFailures") != "1":
        raise StreamError("a task that Spark retries would write its replies again: set spark.task.maxFailures=1")
    if conf.get("spark.speculation", "false") == "true":
        raise StreamError("a task that Spark runs twice would write its replies twice: set spark.speculation=false")


class StartPoint(msgspec.Struct, frozen=True):
    """Where the pipeline started: replies of later epochs go to Kafka, and only later messages of the topic can be
    ours."""

    epoch: int
    topic: str
    offsets: dict[int, int]

    def since(self, topic: str) -> dict[int, int]:
        return self.offsets if topic == self.topic else {}


def begin(store: Store, now: StartPoint) -> StartPoint:
    """Written once, before the first request, so that a crash right after it loses no reply."""
    store.create(BEGAN, msgspec.json.encode(now))
    return msgspec.json.decode(store.get(BEGAN), type=StartPoint)


class ReplyTopic:
    """The sink of one run of the query. Only the first micro-batch of a run can have been written before."""

    def __init__(self, kafka: Kafka, since: Mapping[int, int]) -> None:
        self.kafka, self._since = kafka, since
        self._query = ""
        self._began = threading.Event()
        self._is_first = True

    def begin(self, query: str) -> None:
        self._query = query
        self._began.set()

    def write(self, rows: DataFrame, batch: int) -> None:
        self._began.wait()
        try:
            self._write(rows, batch)
        except HeadraceError:
            raise
        except Exception as error:
            # Spark matches the text of this exception against a pattern, and a long text overflows its stack.
            LOG.debug("batch %s of the replies failed", batch, exc_info=True)
            raise StreamError(
                f"batch {batch} of the replies failed: {type(error).__name__}: {first_line(error)}"
            ) from None

    def _write(self, rows: DataFrame, batch: int) -> None:
        if self._is_first:
            known = written(rows.sparkSession, self.kafka, self._since, self._query, batch)
            if known:
                LOG.info("%d replies are already in %s and are not written again", len(known), self.kafka.replies)
                rows = without(rows, known)
        writer = (
            rows.select(
                F.encode("key", "UTF-8").alias("key"),
                F.encode("value", "UTF-8").alias("value"),
                headers(f"{self._query}/{batch}").alias("headers"),
            )
            .write.format("kafka")
            .option("kafka.delivery.timeout.ms", DELIVERY_S_MAX * 1_000)
            .option("kafka.request.timeout.ms", DELIVERY_S_MAX * 500)
            .options(**self.kafka.options())
            .option("topic", self.kafka.replies)
            .option("includeHeaders", "true")
        )
        try:
            writer.save()
        except Exception:
            time.sleep(DELIVERY_S_MAX)  # messages that tasks left in Kafka's client may still arrive until then
            raise
        self._is_first = False


class KeptQuery:
    """A streaming query that is restarted when it fails."""

    def __init__(self, name: str, make: Callable[[], StreamingQuery]) -> None:
        self.name, self._make = name, make
        self._query: StreamingQuery | None = None
        self._why = ""  # why it could not be started
        self._batch: int | None = None  # the last one that is known to be done
        self._tries, self._again_s = 0, 0.0
        self.restarts = 0

    @property
    def id(self) -> str:
        assert self._query is not None
        return str(self._query.id)

    def start(self) -> None:
        self._query = self._make()

    def start_first(self) -> None:
        """Report errors at once. But on a busy machine, Spark may time out on its own Python processes: then try
        again."""
        for tries_left in reversed(range(FIRST_TRIES_MAX)):
            try:
                self.start()
                break
            except HeadraceError:
                raise
            except Exception as error:
                if OURS.search(str(error)) or not tries_left:
                    raise StreamError(f"the stream of {self.name} cannot be started: {gist(error)}") from None
                time.sleep(PAUSE_S)

    def stop(self) -> None:
        if self._query is not None:
            quietly(self._query.stop)

    def drain(self, seconds: float) -> None:
        """Wait until it has processed everything there is."""
        if self._query is not None and self._query.isActive:
            waiting = threading.Thread(target=quietly, args=(self._query.processAllAvailable,), daemon=True)
            waiting.start()
            waiting.join(seconds)

    def restart_if_due(self) -> None:
        """Start it again if it has failed and its pause is over. Raises an error that keeps coming back."""
        assert self._query is not None
        done = self._query.lastProgress
        if done is not None and done["batchId"] != self._batch:
            self._batch, self._tries = done["batchId"], 0
        if self._query.isActive:
            return
        if not self._again_s:
            self._pause(self._why or reason_of(self._query))
        elif time.monotonic() >= self._again_s:
            self._again_s, self._why = 0.0, ""
            self.restarts += 1
            try:
                self.start()
            except Exception as error:
                self._why = gist(error)

    def _pause(self, why: str) -> None:
        self._tries += 1
        if self._tries > TRIES_MAX:
            raise StreamError(f"the stream of {self.name} failed {self._tries} times in a row: {why}")
        pause_s = min(PAUSE_S * 2 ** (self._tries - 1), PAUSE_S_MAX)
        self._again_s = time.monotonic() + pause_s
        LOG.warning("the stream of %s failed and restarts in %.1f s: %s", self.name, pause_s, why)

    def metrics(self) -> dict[str, Any]:
        progress = None if self._query is None else self._query.lastProgress
        return {
            "restarts": self.restarts,
            "batch": None if progress is None else progress["batchId"],
            "rows_per_s": None if progress is None else progress["processedRowsPerSecond"],
        }


def quietly(do: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        do()


def reason_of(query: StreamingQuery) -> str:
    error = query.exception()
    return "it was stopped" if error is None else gist(error)


def gist(error: Exception) -> str:
    """The cause in Spark's report of an error: our own error, or else its first lines."""
    ours = OURS.findall(str(error))
    if ours:
        return str(ours[-1])
    return said_in_java(error)[:500] if isinstance(error, Py4JJavaError) else first_line(error)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]
