"""A pytest fixture for an app: `bank = fixture(app)` at the top of a test module, then `def test_it(bank): ...`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.errors import ModelError
from headrace.model.app import App
from headrace.testing.virtual_runtime import TestRuntime


def fixture(app: App, **options: Any) -> Any:
    """A pytest fixture: each test gets a fresh `TestRuntime(app, **options)`. The name that it is assigned to is the
    name of the fixture."""
    try:
        import pytest
    except ImportError:
        raise ModelError("headrace.testing.fixture needs pytest: pip install pytest, or use TestRuntime") from None

    @pytest.fixture
    def headrace_runtime() -> Iterator[TestRuntime]:
        with TestRuntime(app, **options) as runtime:
            yield runtime

    return headrace_runtime
