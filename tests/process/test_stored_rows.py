"""Rows that a source has put into the store reach the workers from there: the coordinator only names them."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples import bank
from headrace import Cluster, Config, Runtime
from headrace.durability.inbox.inbox import ClosedBatch, close_batch, write_segment
from headrace.durability.store import open_store

ACCOUNTS = 50
SMALL = Config(epoch_transactions_max=200)


def transfers(seed: int, count: int) -> pa.Table:
    chance = random.Random(seed)
    names = [f"an account with quite a long name, number {number}" for number in range(ACCOUNTS)]
    return pa.table(
        {
            "key": [chance.choice(names) for _ in range(count)],
            "arg0": [chance.choice(names) for _ in range(count)],
            "arg1": pa.array([chance.randrange(1, 40) for _ in range(count)]),
        }
    )


def close(where: Path, batch: int, function: str, table: pa.Table, parts: int = 2) -> None:
    store = open_store(where)
    size = -(-table.num_rows // parts)
    segments = [write_segment(store, "q", batch, part, table.slice(part * size, size)) for part in range(parts)]
    assert close_batch(store, ClosedBatch("q", batch, function, segments))


def run(runtime: Any, where: Path, kill: bool = False) -> dict[Any, Any]:
    opening = transfers(0, 1_000).select(["key", "arg1"]).rename_columns(["key", "arg0"])
    close(where, 0, "account.deposit", opening)
    for batch in range(1, 4):
        close(where, batch, "account.transfer", transfers(batch, 1_500))
        if kill and batch == 2:
            os.kill(runtime.processes()[1], signal.SIGKILL)
    runtime.drain(60)
    found: dict[Any, Any] = runtime.state("account")
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    where = tmp_path_factory.mktemp("serial")
    with Runtime(bank.app, SMALL, store=where) as runtime:
        return run(runtime, where)


@pytest.mark.parametrize("kill", [False, True])
def test_workers_read_the_rows_themselves(tmp_path: Path, expected: dict[Any, Any], kill: bool) -> None:
    with Cluster(bank.app, 2, SMALL, store=tmp_path) as cluster:
        assert run(cluster, tmp_path, kill) == expected
        metrics = cluster.metrics()
        assert metrics["source_rows"] == 5_500
        assert (metrics["recoveries"] > 0) == kill


def test_the_coordinator_sends_names_and_not_rows(tmp_path: Path, expected: dict[Any, Any]) -> None:
    sent = []
    for names_rows in (True, False):
        where = tmp_path / str(names_rows)
        with Cluster(bank.app, 1, SMALL, store=where) as cluster:
            cluster.coordinator.names_rows = names_rows
            assert run(cluster, where) == expected
            sent.append(cluster.metrics()["bytes_sent"])
    assert sent[0] < sent[1] / 3
