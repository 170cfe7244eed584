"""One Spark session for all tests of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import ConnectorMissing


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from headrace.spark import session
    from headrace.spark.kafka import connector

    settings = {}
    with contextlib.suppress(ConnectorMissing):  # tests/kafka may come later, and get this session
        settings = connector.fetch().settings
    made = session(spark_driver_memory="1g", **settings)
    yield made
    made.stop()
