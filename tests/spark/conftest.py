"""One Spark session for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from headrace.spark import connector, session

    found = connector.find()  # tests/kafka may come later, and get this session
    made = session(spark_driver_memory="1g", **(found.settings if found else {}))
    yield made
    made.stop()
