"""A Kafka broker of its own: one node that is broker and controller (KRaft), on loopback, on free ports, in a folder.

Its archives are resolved by jgo, from Maven Central or the cache it keeps. `python -m tests.kafka.broker` fetches them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.spark.jvm.caches import alone, jars_of, maven_cache
from headrace.spark.jvm.java import find_java

KAFKA = "org.apache.kafka:kafka_2.13:4.1.0"
PLACE = "org/apache/kafka/kafka_2.13/4.1.0"  # in the cache
CLUSTER = "aGVhZHJhY2UtdGVzdHMtMQ"  # 16 bytes in base64
START_S_MAX = 300
QUIET = logging.getLogger("tests.kafka")  # librdkafka tells of every connection that is refused while a broker starts
QUIET.setLevel(logging.CRITICAL)
JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
log.dirs={folder}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=2
log.cleaner.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


class CannotResolve(Exception):
    """The archives are neither cached nor to be had: the tests that need them are skipped, with this reason."""


def archives(coordinates: str = KAFKA) -> list[Path]:
    import jgo

    try:
        with alone(maven_cache()):
            return jars_of(jgo.resolve(coordinates))
    except (RuntimeError, OSError) as error:  # what requests raises is an OSError
        raise CannotResolve(f"{coordinates} cannot be resolved: {error}") from error


class Broker:
    """`address` is what `kafka.bootstrap.servers` wants. It is stopped and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.classpath = os.pathsep.join(map(str, archives()))
        self.java = find_java()[0] / "bin" / "java"
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = folder / "server.properties"
        self.settings.write_text(
            PROPERTIES.format(port=self.port, controller_port=free_port(), folder=folder), encoding="utf-8"
        )
        words = ("format", "--standalone", "--cluster-id", CLUSTER, "--config", str(self.settings))
        if self._run("kafka.tools.StorageTool", *words).wait(START_S_MAX):
            raise RuntimeError(f"the broker's folder cannot be made ready:\n{self.said()}")

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [self.java, *JVM, "-cp", self.classpath, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
                cwd=self.folder,
            )

    def start(self) -> None:
        from confluent_kafka import KafkaException

        self.process = self._run("kafka.Kafka", str(self.settings))
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(KafkaException, OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                self.admin().list_topics(timeout=1)
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the broker does not start:\n{self.said()}")

    def said(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-2_000:]

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    # --- what tests do with it ----------------------------------------------------------------------------------------

    def _settings(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "logger": QUIET, **more}

    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient(self._settings())

    def create(self, *topics: str, partitions: int = 1) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import NewTopic

        admin = self.admin()  # what it promises is dropped with it
        for future in admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
            future.result(60)
        deadline_s = time.monotonic() + START_S_MAX
        for topic in topics:  # it is there, but has no leader yet
            while time.monotonic() < deadline_s:
                with contextlib.suppress(KafkaException):
                    self.count(topic)
                    break

    def produce(self, topic: str, messages: Iterable[bytes | tuple[bytes | None, bytes]]) -> None:
        """Values, or keys and values; durable when this returns."""
        from confluent_kafka import Producer

        producer = Producer(self._settings(**{"linger.ms": 5}))
        failed = []
        for message in messages:
            key, value = message if isinstance(message, tuple) else (None, message)
            while True:
                try:
                    producer.produce(
                        topic, value, key, on_delivery=lambda error, _: failed.append(error) if error else None
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(60) == 0
        assert not failed, failed

    def count(self, topic: str) -> int:
        """How many messages it has."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(self._settings(**{"group.id": "count"}))
        try:
            partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
            spans = [consumer.get_watermark_offsets(TopicPartition(topic, each), timeout=60) for each in partitions]
            return sum(end - first for first, end in spans)
        finally:
            consumer.close()

    def read(self, topic: str) -> list[Any]:
        """Every message of a topic, partition by partition, in order."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(self._settings(**{"group.id": str(uuid.uuid4()), "enable.auto.commit": False}))
        found = []
        try:
            for partition in sorted(consumer.list_topics(topic, timeout=60).topics[topic].partitions):
                first, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=60)
                consumer.assign([TopicPartition(topic, partition, first)])
                while first < end:
                    for message in consumer.consume(min(end - first, 10_000), timeout=60):
                        assert message.error() is None, message.error()
                        found.append(message)
                        first = message.offset() + 1
        finally:
            consumer.close()
        return found


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[Broker]:
    made = Broker(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch() -> None:
    """Before tests of several processes want them."""
    if not (maven_cache() / PLACE).exists():
        print(f"Fetching a Kafka broker for the tests (44 MB) from Maven Central into {maven_cache()} ...", flush=True)
    try:
        archives()
    except CannotResolve as error:
        print(f"{error}\nTests of Kafka will be skipped.")


def die_with_parent() -> None:
    """A test run that is killed leaves no broker behind. Linux only; elsewhere it is stopped at the end."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    fetch()
