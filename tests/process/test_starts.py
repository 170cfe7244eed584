"""A cluster that says it is up is up: whoever knocks is known, however slowly news travel."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time

import pytest

from headrace.bench import starts
from headrace.runtime.cluster import Cluster
from headrace.runtime.pipe import Job, WorkerPipe
from headrace.runtime.process import Processes, WorkerProcess
from tests.process import bank
from tests.process.bank import account, deposit, move
from tests.process.test_cluster import SMALL
from tests.waiting import eventually

LATE_S = 0.3
KEYS = [f"k{i}" for i in range(30)]


class Remote(WorkerProcess):
    """A worker whose line is relayed, as over a network; what is said on it arrives late."""

    def __init__(self, job: Job, up_s: float, down_s: float) -> None:
        super().__init__(job)
        ours, theirs = map(WorkerPipe, socket.socketpair())
        near, self.pipe, self.fd = self.pipe, ours, ours.fileno()
        for words in ((near, theirs, up_s), (theirs, near, down_s)):
            threading.Thread(target=relay, args=words, daemon=True).start()


def relay(source: WorkerPipe, sink: WorkerPipe, late_s: float) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed by the other direction
        while not source.is_dead:
            source.can_receive(0.1)
            messages = source.receive()
            time.sleep(late_s if messages else 0)
            for message in messages:
                sink.send(message)
    sink.close()


class Far(Processes):
    """One of the workers is far away."""

    def __init__(self, number: int, up_s: float, down_s: float) -> None:
        self.number, self.late_s = number, (up_s, down_s)

    def start(self, job: Job) -> WorkerProcess:
        return Remote(job, *self.late_s) if job.number == self.number else super().start(job)


def strangers(cluster: Cluster) -> int:
    """How many were turned away so far, by what each worker says from now on."""
    before = {worker: worker.heartbeat for worker in cluster._workers.values()}
    eventually(lambda: all(worker.heartbeat is not heartbeat for worker, heartbeat in before.items()))
    return int(cluster.metrics()["strangers_refused"])


def check(cluster: Cluster) -> None:
    replies = cluster.client.batch(
        [
            *((deposit, key, 10) for key in KEYS),
            *((move, key, other, 1) for key, other in itertools.pairwise(KEYS)),
        ]
    )
    assert all(reply.status == "ok" for reply in replies)
    assert sum(cluster.state(account).values()) % (10 * len(KEYS)) == 0
    assert strangers(cluster) == 0


@pytest.mark.parametrize(("up_s", "down_s"), [(LATE_S, 0.0), (0.0, LATE_S)])
@pytest.mark.parametrize("number", [1, 3])
def test_a_worker_that_hears_or_is_heard_late_takes_nobody_for_a_stranger(
    number: int, up_s: float, down_s: float
) -> None:
    with Cluster(bank.app, 3, SMALL, hosts=Far(number, up_s, down_s)) as cluster:
        assert cluster._is_linked()
        check(cluster)


def test_nor_does_one_that_comes_later_or_takes_the_place_of_another() -> None:
    with Cluster(bank.app, 2, SMALL, hosts=Far(1, 0.0, LATE_S)) as cluster:
        cluster.rescale(3)
        check(cluster)
        lost = cluster.processes()[2]
        os.kill(lost, signal.SIGKILL)
        eventually(lambda: cluster.processes().get(2, lost) != lost)
        check(cluster)
        assert eventually(cluster._is_linked)


def test_many_starts_are_measured() -> None:
    told: list[int] = []
    result = starts.measure(3, 3, told.append)
    assert (len(told), result["starts"], result["strangers_refused"]) == (3, 3, 0)
    assert 0 < result["first_reply_ms_p50"] <= result["first_reply_ms_max"]
    assert starts.summary(result).row_count == 2
