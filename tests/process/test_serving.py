"""`headrace run --workers` and `headrace rescale`, as a user types them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.process.test_cluster import is_alive
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address of an app that is served. What it started ends with it."""
    command = [sys.executable, "-u", "-m", "headrace.cli", "run", "examples.bank:app", "--port", "0", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    children: list[int] = []
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        children = children_of(server.pid)
        yield found.group()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=120)
    eventually(lambda: not any(map(is_alive, children)))


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def metrics(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as response:
        found: dict[str, Any] = json.load(response)
        return found


def test_an_app_that_is_served_by_workers_can_be_called_and_rescaled() -> None:
    with served("--workers", "2") as url:
        made = headrace("call", "account.deposit", "alice", "100", "--url", url)
        assert (made.returncode, json.loads(made.stdout)) == (0, 100)
        assert (metrics(url)["workers"], metrics(url)["mode"]) == (2, "ordered")
        scaled = headrace("rescale", "3", "--url", url)
        assert scaled.returncode == 0, scaled.stdout
        assert json.loads(scaled.stdout)["workers"] == metrics(url)["workers"] == 3
        moved = headrace("call", "account.transfer", "alice", "bob", "30", "--url", url)
        assert (moved.returncode, json.loads(moved.stdout)) == (0, 70)
        refused = headrace("rescale", "1000", "--url", url)
        assert (refused.returncode, json.loads(refused.stdout)["code"]) == (2, "bad_request")


def test_an_app_in_one_process_says_how_it_could_be_rescaled() -> None:
    with served() as url:
        assert metrics(url)["workers"] == 1
        refused = headrace("rescale", "2", "--url", url)
        assert (refused.returncode, json.loads(refused.stdout)["code"]) == (2, "bad_request")
        assert "--workers 2" in refused.stdout


def test_modes_that_do_not_fit_the_workers_are_refused() -> None:
    for words, reason in ((("--workers", "2", "--mode", "serial"), "serial"), (("--mode", "ordered"), "--workers 2")):
        said = headrace("run", "examples.bank:app", "--port", "0", *words)
        assert said.returncode == 2
        assert reason in " ".join(said.stderr.split())
