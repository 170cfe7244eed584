"""A served app as a user runs it: killed, superseded, and without a store."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import bank
from headrace import Runtime
from headrace.errors import HeadraceError
from tests.operations.stores import BANK, ROOT, Said


@contextlib.contextmanager
def served(store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the bank from this store, and its address."""
    command = [sys.executable, "-u", "-m", "headrace.cli", "run", BANK, "--store", str(store), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None, process.communicate()[1]
        yield process, found.group()
    finally:
        process.kill()
        process.communicate()


def test_what_was_answered_is_there_after_a_kill(headrace: Callable[..., Said], tmp_path: Path) -> None:
    def deposit(url: str, request_id: str) -> int:
        code, said, _ = headrace("call", "account.deposit", "alice", "10", "--url", url, "--request-id", request_id)
        assert code == 0
        return int(said)

    with served(tmp_path / "store") as (process, url):
        assert [deposit(url, "a"), deposit(url, "b")] == [10, 20]
        code, said, _ = headrace("snapshot", "now", "--url", url)
        assert (code, json.loads(said)) == (0, {"status": "ok", "epoch": 2})
        assert deposit(url, "c") == 30
        process.kill()
    with served(tmp_path / "store") as (process, url):
        assert [deposit(url, "c"), deposit(url, "a"), deposit(url, "d")] == [30, 10, 40]
        process.terminate()
        assert process.wait(30) == 0  # in peace: with a snapshot at its end
    assert headrace("log", "verify", "--store", tmp_path / "store")[0] == 0
    _, said, _ = headrace("state", "get", "account", "alice", "--store", tmp_path / "store", "--json")
    assert json.loads(said) == {"epoch": 4, "exists": True, "state": 40}


def test_who_was_superseded_answers_nothing_more_and_ends(headrace: Callable[..., Said], tmp_path: Path) -> None:
    with served(tmp_path) as (first, old), served(tmp_path) as (_, new):
        code, _, _ = headrace("call", "account.deposit", "alice", "10", "--url", old, "--request-id", "a")
        assert code == 2
        _, said, _ = headrace("call", "account.deposit", "alice", "10", "--url", new, "--request-id", "a")
        assert int(said) == 10
        _, complaints = first.communicate(timeout=120)
        assert first.returncode == 2
        assert "fenced" in complaints
        assert str(tmp_path) in complaints


def test_an_app_without_a_store_takes_no_snapshot() -> None:
    with Runtime(bank.app) as runtime, pytest.raises(HeadraceError, match="--store"):
        runtime.snapshot()
