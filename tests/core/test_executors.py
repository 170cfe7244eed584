"""A third kind of executor needs no change in the core: a backend or a worker takes it as an argument."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings

from headrace.core.backend import Executor
from headrace.core.epoch import Epoch
from headrace.core.local import LocalBackend
from headrace.core.program import Program
from headrace.core.serial import SerialExecutor, TrackedExecutor
from headrace.core.state import State
from headrace.wire.messages import Need
from tests.cluster import Cluster, exactly, looped, outcome
from tests.driver import Driver
from tests.programs import PROGRAMS, app
from tests.programs import Program as Drawn


class Alternating:
    """Epochs with even numbers run row by row, on the paths of calls; the others by the fast loop."""

    def __init__(self, program: Program, state: State) -> None:
        self.fast, self.careful = SerialExecutor(program, state), TrackedExecutor(program, state)
        self.epochs: set[int] = set()

    @property
    def running(self) -> int:
        return self.fast.running

    def run(self, epoch: Epoch, start: int = 0, stop: int | None = None) -> Need | None:
        self.epochs.add(epoch.number)
        if epoch.number % 2:
            return self.fast.run(epoch, start, stop)
        for entry in epoch.entries[start:stop]:
            need = self.careful.run_row(epoch, entry.number)
            if need is not None:
                return need
        return None


class AlternatingCluster(Cluster):
    executor = Alternating


def expected(program: Drawn) -> tuple[str, list[str]]:
    replies, state = looped(program.calls())
    return repr(replies), exactly(state)  # as text: a NaN equals itself


@given(program=PROGRAMS)
@settings(max_examples=50)
def test_another_executor_in_one_process(program: Drawn) -> None:
    driver = Driver(app, backend=partial(LocalBackend, executor=Alternating))
    replies = []
    for at, call in enumerate(program.calls()):
        replies.append(outcome(driver.call_at(at * 1_000_000, f"call{at}", *call)))
    executor: Executor = driver.core.backend.executor
    assert isinstance(executor, Alternating)
    assert len(executor.epochs) == len(program.calls())
    assert (repr(replies), exactly(driver.state())) == expected(program)


@pytest.mark.parametrize("size", [1, 3])
@given(program=PROGRAMS)
@settings(max_examples=50)
def test_another_executor_on_a_worker(size: int, program: Drawn) -> None:
    cluster = AlternatingCluster(app, 1, epoch_transactions_max=size)
    replies = [outcome(reply) for reply in cluster.run(program.calls())]
    assert isinstance(cluster.workers[1].serial, Alternating)
    assert len(cluster.workers[1].serial.epochs) == -(-len(program.calls()) // size)
    assert (repr(replies), exactly(cluster.state())) == expected(program)
