"""Topics: what is wrong with them is said, and what stands at the end of one is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BadRequest, Unreachable
from tests.kafka.broker import Broker, free_port


def test_topics_that_make_no_sense_are_refused_at_once() -> None:
    from headrace.spark.kafka.topics import Kafka

    with pytest.raises(BadRequest, match="--requests TOPIC"):
        Kafka("b:9092", ("",), "replies")
    with pytest.raises(BadRequest, match="would be read again"):
        Kafka("b:9092", ("a", "b"), "b")


def test_a_file_of_properties_is_read_as_kafka_reads_it(tmp_path: Path) -> None:
    from headrace.spark.kafka.topics import Kafka, read_properties

    file = tmp_path / "client.properties"
    file.write_text('# who we are\n\nsecurity.protocol = SASL_SSL\nsasl.jaas.config=a.Module user="x=y";\n')
    found = read_properties(str(file))
    assert found == {"security.protocol": "SASL_SSL", "sasl.jaas.config": 'a.Module user="x=y";'}
    options = Kafka("b:9092", ("a",), "c", found).options()
    assert options == {"kafka.bootstrap.servers": "b:9092", **{f"kafka.{name}": value for name, value in found.items()}}
    file.write_text("security.protocol=SSL\nnonsense\n")
    with pytest.raises(BadRequest, match="line 2 is not a property: 'nonsense'"):
        read_properties(str(file))
    with pytest.raises(BadRequest, match="cannot read"):
        read_properties(str(tmp_path / "missing"))


@pytest.mark.spark
def test_missing_topics_and_silent_brokers_are_named(
    kafka: Broker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.spark.kafka import topics

    kafka.create("there")
    with topics.admin(spark, topics.Kafka(kafka.address, ("there", "gone"), "lost")) as client:
        with pytest.raises(BadRequest, match=rf"{kafka.address} has no topic gone, lost.*--create --topic gone"):
            client.check_topics()
        assert client.bounds("there") == {0: (0, 0)}
    monkeypatch.setattr(topics, "ANSWER_S_MAX", 2)
    nobody = f"127.0.0.1:{free_port()}"
    with (
        topics.admin(spark, topics.Kafka(nobody, ("there",), "lost")) as client,
        pytest.raises(Unreachable, match=f"{nobody} does not answer.*is the broker up"),
    ):
        client.check_topics()
    wrong = topics.Kafka(kafka.address, ("there",), "lost", {"security.protocol": "NONSENSE"})
    with pytest.raises(BadRequest, match=r"rejects the settings.*NONSENSE"), topics.admin(spark, wrong):
        pass


class Topic:
    """A reply topic, as a list of marks per partition, and who of the last micro-batch is in it."""

    def __init__(self, chance: random.Random) -> None:
        from headrace.spark.kafka.topics import MessageIdentity

        self.partitions: dict[int, list[MessageIdentity]] = {partition: [] for partition in range(chance.randint(1, 3))}
        self.deleted = {partition: chance.choice((0, 0, 5)) for partition in self.partitions}
        self.batches = chance.randint(1, 4)
        self.last: set[str] = set()
        tid = 0
        for batch in range(self.batches):
            is_last = batch == self.batches - 1
            share = chance.choice((0, 0.5, 1)) if is_last else 1  # how much of it was written
            for row in range(chance.choice((1, 3, 40))):
                is_refused = chance.random() < 0.2
                tid += not is_refused
                named = (None, f"q/{batch}/{row}") if is_refused else (tid, None)
                if chance.random() < share:
                    self.add(chance, f"k{row}", *named, f"query/{batch}")
                    if is_last:
                        self.last.add(f"{named[1] or tid}|k{row}")
                if chance.random() < 0.1:
                    self.add(chance, None, None, None, chance.choice((None, "nonsense", "query/x", "/")))
                if chance.random() < 0.1:  # of another store, before this one
                    self.add(chance, f"k{row}", tid + chance.randint(0, 5), None, f"another/{batch}")

    def add(self, chance: random.Random, *mark: Any) -> None:
        from headrace.spark.kafka.topics import MessageIdentity

        partition = chance.choice(list(self.partitions))
        there = self.partitions[partition]
        there.append(MessageIdentity(partition, self.deleted[partition] + len(there), *mark))

    def bounds(self) -> dict[int, tuple[int, int]]:
        return {each: (self.deleted[each], self.deleted[each] + len(marks)) for each, marks in self.partitions.items()}

    def read(self, spans: Any) -> list[Any]:
        return [
            mark
            for partition, (first, end) in spans.items()
            for mark in self.partitions[partition]
            if first <= mark.offset < end
        ]


@pytest.mark.parametrize("seed", range(100))
def test_what_was_written_of_the_last_batch_is_found_however_far_it_reaches_back(seed: int) -> None:
    from headrace.spark.kafka.topics import at_the_end

    topic = Topic(random.Random(seed))
    for count in (1, 2, 1_000):
        assert at_the_end(topic.bounds(), topic.read, "query", topic.batches - 1, count) == topic.last
    assert at_the_end(topic.bounds(), topic.read, "query", topic.batches, 2) == set()  # of the next one nothing is
    assert at_the_end(topic.bounds(), topic.read, "new", 0, 2) == set()


def test_no_more_is_read_than_the_last_batch_needs() -> None:
    from headrace.spark.kafka.topics import MessageIdentity, at_the_end

    marks = [
        MessageIdentity(0, offset, None, offset + 1, None, f"query/{offset // 1_000}") for offset in range(100_000)
    ]
    asked: list[tuple[int, int]] = []

    def read(spans: Any) -> list[MessageIdentity]:
        asked.append(spans[0])
        return marks[slice(*spans[0])]

    assert at_the_end({0: (0, 100_000)}, read, "query", 100, 100) == set()
    assert asked == [(99_900, 100_000)]
    assert at_the_end({0: (0, 100_000)}, read, "query", 99, 100) == {str(tid) for tid in range(99_001, 100_001)}
    assert asked[1:] == [(99_900, 100_000), (99_500, 99_900), (97_900, 99_500)]


@pytest.mark.spark
def test_headers_are_read_back_from_a_topic(kafka: Broker, spark: Any) -> None:
    from confluent_kafka import Producer

    from headrace.spark.kafka.topics import Kafka, MessageIdentity, read_marks, written

    kafka.create("tail", partitions=2)
    producer = Producer({"bootstrap.servers": kafka.address})
    sent = [
        (0, [("batch", b"query/6"), ("tid", b"70")]),
        (0, [("status", b"ok"), ("tid", b"71"), ("batch", b"query/7")]),
        (1, [("tid", b"\xff"), ("refused", b"\xff"), ("batch", b"\xff")]),
        (1, None),
        (1, [("refused", b"q/7/1"), ("batch", b"query/7")]),
    ]
    for partition, headers in sent:
        producer.produce("tail", b"{}", b"k", partition=partition, headers=headers)
    assert producer.flush(20) == 0
    wanted = Kafka(kafka.address, ("there",), "tail")
    found = read_marks(spark, wanted, {0: (0, 2), 1: (0, 3)})
    assert sorted(found, key=lambda mark: mark[:2]) == [
        MessageIdentity(0, 0, "k", 70, None, "query/6"),
        MessageIdentity(0, 1, "k", 71, None, "query/7"),
        MessageIdentity(1, 0, "k", None, None, None),
        MessageIdentity(1, 1, "k", None, None, None),
        MessageIdentity(1, 2, "k", None, "q/7/1", "query/7"),
    ]
    assert written(spark, wanted, {}, "query", 7) == {"71|k", "q/7/1|k"}
    assert written(spark, wanted, {0: 2}, "query", 7) == {"q/7/1|k"}
