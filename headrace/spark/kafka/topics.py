"""Kafka's topics, as Spark's connector reaches them: whether they exist, and which messages are at the end of one.

Spark's sink writes at least once: a micro-batch that it repeats after a crash may be in the topic already, completely
or in part. So every message has its identity (`tid`, or `refused` for a request that never got one) and its micro-batch
(`batch`). `written` reads a topic backwards from its end, as far as there may be messages of this micro-batch, and
returns those it finds: earlier micro-batches were complete before this one began. TIDs alone would not suffice: a store
that is started again from nothing, or restored from a backup, gives the same TIDs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from headrace.errors import BadRequest, Unreachable

ANSWER_S_MAX = 20  # a broker that does not answer in this time counts as unreachable
Span = tuple[int, int]  # offsets: the first, and the one after the last
TAIL_MESSAGES = 2_000  # read at first from each partition; then four times as many, and so on


@dataclasses.dataclass(frozen=True)
class Kafka:
    """Brokers, the topics that requests come from, and the topic for replies. `client` has settings of Kafka's own
    clients, as in its properties files: `security.protocol`, `sasl.mechanism`..."""

    brokers: str
    requests: tuple[str, ...]
    replies: str
    client: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.requests or not all(self.requests) or not self.replies:
            raise BadRequest("Kafka needs topics: give --requests TOPIC[,TOPIC...] and --replies TOPIC")
        if self.replies in self.requests:
            raise BadRequest(
                f"replies cannot go to {self.replies!r}, where requests come from: they would be read again"
            )

    def settings(self) -> dict[str, str]:
        return {"bootstrap.servers": self.brokers, **self.client}

    def options(self) -> dict[str, str]:
        """The settings as options of Spark's source and sink."""
        return {f"kafka.{name}": value for name, value in self.settings().items()}


def read_properties(path: str) -> dict[str, str]:
    """Read a properties file, as Kafka's own tools use it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read the properties in {path}: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        name, mark, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith(("#", "!")):
            continue
        if not mark or not name.strip():
            raise BadRequest(
                f"{path}, line {number} is not a property: {line.strip()!r}; write it like security.protocol=SSL"
            )
        found[name.strip()] = value.strip()
    return found


# --- what only a broker knows -----------------------------------------------------------------------------------------


class Admin:
    """Kafka's own client, in Spark's JVM."""

    def __init__(self, spark: SparkSession, kafka: Kafka, client: Any) -> None:
        self.kafka, self._jvm, self._client = kafka, spark._jvm, client

    def check_topics(self) -> None:
        there = set(self._get(self._client.listTopics().names()))
        missing = [topic for topic in (*self.kafka.requests, self.kafka.replies) if topic not in there]
        if missing:
            raise BadRequest(
                f"{self.kafka.brokers} has no topic {', '.join(missing)}, or this user may not see it. To create it: "
                f"kafka-topics.sh --bootstrap-server {self.kafka.brokers} --create --topic {missing[0]}"
            )

    def bounds(self, topic: str) -> dict[int, Span]:
        """The first offset of each partition, and the next one to be written."""
        jvm = self._jvm
        described = self._get(self._client.describeTopics([topic]).allTopicNames())[topic]
        partitions = [int(each.partition()) for each in described.partitions()]
        spec = jvm.org.apache.kafka.clients.admin.OffsetSpec
        ends = [
            self._offsets(topic, partitions, when)
            for when in (spec.earliest, spec.latest)  # in this order: the first may only grow
        ]
        return {partition: (ends[0][partition], ends[1][partition]) for partition in partitions}

    def _offsets(self, topic: str, partitions: Iterable[int], when: Any) -> dict[int, int]:
        named = {
            partition: self._jvm.org.apache.kafka.common.TopicPartition(topic, partition) for partition in partitions
        }
        wanted = self._jvm.java.util.HashMap()
        for each in named.values():
            wanted.put(each, when())
        found = self._client.listOffsets(wanted)
        return {partition: int(self._get(found.partitionResult(each)).offset()) for partition, each in named.items()}

    def _get(self, future: Any) -> Any:
        try:
            return future.get(ANSWER_S_MAX, self._jvm.java.util.concurrent.TimeUnit.SECONDS)
        except Py4JJavaError as error:
            said = said_in_java(error)
            raise Unreachable(
                f"Kafka at {self.kafka.brokers} does not answer: {said}. Is the address right, is the broker up?"
            ) from None


@contextlib.contextmanager
def admin(spark: SparkSession, kafka: Kafka) -> Iterator[Admin]:
    jvm = spark._jvm
    assert jvm is not None
    settings = {"default.api.timeout.ms": str(ANSWER_S_MAX * 500), "request.timeout.ms": str(ANSWER_S_MAX * 500)}
    given = jvm.java.util.HashMap()
    for name, value in (settings | kafka.settings()).items():
        given.put(name, value)
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(given)
    except Py4JJavaError as error:
        raise BadRequest(f"Kafka's client rejects the settings for {kafka.brokers}: {said_in_java(error)}") from None
    try:
        yield Admin(spark, kafka, client)
    finally:
        client.close()


def said_in_java(error: Py4JJavaError) -> str:
    """The message of a Java exception and of its causes, without the stack traces."""
    said, cause = [], error.java_exception
    while cause is not None and len(said) < 5:
        text = (cause.getMessage() or cause.toString()).partition("\n")[0]
        if not any(text in earlier for earlier in said):
            said.append(text)
        cause = cause.getCause()
    return ": ".join(said)


# --- the end of a topic -----------------------------------------------------------------------------------------------


class MessageIdentity(NamedTuple):
    """The identity of a message: key and headers, as in the reply topic."""

    partition: int
    offset: int
    key: str | None
    tid: int | None
    refused: str | None
    batch: str | None  # "<query>/<number>"

    @property
    def who(self) -> str:
        named = self.refused if self.tid is None else str(self.tid)
        return "|".join(part for part in (named, self.key) if part is not None)


def written(spark: SparkSession, kafka: Kafka, since: Mapping[int, int], query: str, batch: int) -> set[str]:
    """The messages of this micro-batch that are in the reply topic already. Messages before the offsets `since` are not
    ours."""
    with admin(spark, kafka) as client:
        bounds = client.bounds(kafka.replies)
    bounds = {each: (max(first, since.get(each, 0)), end) for each, (first, end) in bounds.items()}
    return at_the_end(bounds, lambda spans: read_marks(spark, kafka, spans), query, batch)


def at_the_end(
    bounds: Mapping[int, Span],
    read: Callable[[Mapping[int, Span]], Iterable[MessageIdentity]],
    query: str,
    batch: int,
    count: int = TAIL_MESSAGES,
) -> set[str]:
    left = {partition: span for partition, span in bounds.items() if span[0] < span[1]}
    found: set[str] = set()
    while left:
        spans = {partition: (max(first, end - count), end) for partition, (first, end) in left.items()}
        is_done = dict.fromkeys(spans, False)
        for mark in read(spans):
            whose, _, number = (mark.batch or "").rpartition("/")
            if whose == query and number.isdecimal():  # otherwise it is foreign
                if int(number) == batch:
                    found.add(mark.who)
                is_done[mark.partition] |= int(number) < batch
        begins = {partition: (left[partition][0], span[0]) for partition, span in spans.items()}
        left = {each: span for each, span in begins.items() if not is_done[each] and span[0] < span[1]}
        count *= 4
    return found


def read_marks(spark: SparkSession, kafka: Kafka, spans: Mapping[int, Span]) -> list[MessageIdentity]:
    topic = kafka.replies
    rows = (
        spark.read.format("kafka")
        .options(**kafka.options())
        .option("assign", json.dumps({topic: list(spans)}))
        .option("startingOffsets", json.dumps({topic: {str(each): span[0] for each, span in spans.items()}}))
        .option("endingOffsets", json.dumps({topic: {str(each): span[1] for each, span in spans.items()}}))
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "false")  # messages that are deleted by now because of their age do not matter
        .load()
        .selectExpr(
            "partition",
            "offset",
            text_of("key", "key"),
            f"try_cast({header('tid')} as long)",
            text_of(header("refused"), "refused"),
            text_of(header("batch"), "batch"),
        )
        .toArrow()
    )
    return [MessageIdentity(*row) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)]


def header(name: str) -> str:
    return f"cast(get(filter(headers, h -> h.key = '{name}'), 0).value as string)"


def text_of(expression: str, name: str) -> str:
    """Null where it is missing or not valid text: other writers may write anything."""
    return f"try_validate_utf8(cast({expression} as string)) as {name}"


def without(rows: DataFrame, who: Iterable[str]) -> DataFrame:
    """The rows without these messages."""
    import pyarrow as pa

    known = rows.sparkSession.createDataFrame(pa.table({"who": pa.array(sorted(who), pa.string())}))
    return rows.join(known, "who", "left_anti")
