"""One broker and one Spark session for all tests of a process. A machine that cannot get the archives skips them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import ConnectorMissing
from tests.kafka.broker import Broker, CannotResolve, broker


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    from headrace.spark.kafka import connector

    try:
        connector.fetch()
        running = broker(tmp_path_factory.mktemp("kafka") / "broker")
        made = running.__enter__()
    except (ConnectorMissing, CannotResolve) as error:
        pytest.skip(str(error))
    yield made
    running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def spark(kafka: Broker) -> Iterator[Any]:
    from headrace.spark import session
    from headrace.spark.kafka import connector

    made = session(spark_driver_memory="1g", **connector.require().settings)
    if not connector.is_loaded(made):
        pytest.fail("another test's Spark session runs without the connector: tests/spark/conftest.py makes it with it")
    yield made
    made.stop()
