"""The test kit: an app in memory, on a virtual clock, with fake externals and a store that crashes on demand.

    from headrace.testing import TestRuntime

    def test_a_transfer_is_paid_once() -> None:
        with TestRuntime(app) as runtime:
            runtime.client.call(deposit, "alice", 100)
            runtime.advance(minutes=5)
            runtime.crash()
            assert runtime.state(account) == {"alice": 100}

`docs/testing.md` shows all of it.
"""

from headrace.testing.fakes import FakeCall, FakeExternal, MissingFake
from headrace.testing.fixtures import fixture
from headrace.testing.virtual_runtime import START, TestRuntime

__all__ = ["START", "FakeCall", "FakeExternal", "MissingFake", "TestRuntime", "fixture"]
