"""`headrace run` in one process, with functions that never return: it goes on, and it can be ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.core.decrees import DECREE
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 120.0
ENDS_S = 20.0  # a busy machine takes its time; without an end it would be for ever


class Served:
    def __init__(self, server: subprocess.Popen[str], url: str) -> None:
        self.server, self.url = server, url

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The HTTP status and the answer; 0 if there was none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def call(self, request_id: str, function: str, key: str, *args: Any) -> tuple[int, Any]:
        body = {"function": function, "key": key, "args": list(args), "request_id": request_id}
        return self.ask("/v1/call", body)

    def send(self, request_id: str, function: str, key: str, *args: Any) -> subprocess.Popen[bytes]:
        """The same in another process, whose answer nobody waits for."""
        body = json.dumps({"function": function, "key": key, "args": list(args), "request_id": request_id})
        script = (
            "import sys, urllib.request as u\n"
            "u.urlopen(u.Request(sys.argv[1] + '/v1/call', sys.argv[2].encode(), {'Content-Type': 'application/json'}))"
        )
        return subprocess.Popen([sys.executable, "-c", script, self.url, body], stderr=subprocess.DEVNULL)


@contextmanager
def served(tmp_path: Path, *words: str) -> Iterator[Served]:
    command = [sys.executable, "-u", "-m", "headrace.cli", "run", "tests.process.bank:app", "--port", "0"]
    with open(tmp_path / "errors", "a") as errors:
        server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None, (tmp_path / "errors").read_text()
        yield Served(server, found.group())
    finally:
        server.kill()
        server.communicate(timeout=PATIENCE_S)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def runs_epochs(server: Served) -> bool:
    return bool(server.ask("/metrics")[1]["epochs"] >= 2)


def test_a_loop_aborts_and_the_app_is_served_on(tmp_path: Path, store: str) -> None:
    with served(tmp_path, "--store", store, "--wall-limit", "0.5") as server:
        assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5
        status, answer = server.call("loop", "account.spin", "k")
        assert status >= 400
        assert (answer["status"], answer["code"], answer["error"]) == ("aborted", "poisoned", DECREE)
        assert answer["raised_in"]["where"].startswith("tests/process/bank.py:")
        assert server.call("second", "account.deposit", "k", 5)[1]["result"] == 10
        assert server.ask("/health") == (200, {"status": "ok"})
    told = (tmp_path / "errors").read_text()
    for part in ("account.spin of 'k' failed at tests/process/bank.py:", "request id loop", "in spin"):
        assert part in told


def test_what_cannot_be_interrupted_has_the_command_start_itself_again_and_go_on(tmp_path: Path, store: str) -> None:
    with served(tmp_path, "--store", store, "--wall-limit", "0.5") as server:
        assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5
        waits = server.send("sleeps", "account.doze", "k", 3_600)
        eventually(lambda: server.ask("/health")[0] == 503, what="a health that is not ok")
        eventually(lambda: server.ask("/health") == (200, {"status": "ok"}), what="a health that is ok again")
        assert waits.wait(PATIENCE_S) != 0
        _, answer = server.call("sleeps", "account.doze", "k", 3_600)
        assert (answer["status"], answer["code"], answer["error"]) == ("aborted", "poisoned", DECREE)
        assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5, "the same reply as before"
        assert server.call("second", "account.deposit", "k", 5)[1]["result"] == 10
        assert server.server.poll() is None, "it is the same process"
        server.server.send_signal(signal.SIGTERM)
        assert server.server.wait(PATIENCE_S) == 0
    assert "Starting again" in (tmp_path / "errors").read_text()


def test_without_a_store_it_ends_with_that_error(tmp_path: Path) -> None:
    with served(tmp_path, "--wall-limit", "0.5") as server:
        assert server.call("sleeps", "account.doze", "k", 3_600)[0] == 503
        assert server.server.wait(PATIENCE_S) == 2
    assert "stuck: TID 1 (account.doze of 'k'" in (tmp_path / "errors").read_text()


@pytest.mark.parametrize(
    ("function", "args", "signal_sent"),
    [("account.spin", (), signal.SIGTERM), ("account.doze", (3_600,), signal.SIGINT)],
)
def test_a_signal_ends_it_within_seconds_while_a_function_loops_and_the_next_start_aborts_that_one(
    function: str, args: tuple[Any, ...], signal_sent: signal.Signals, tmp_path: Path, store: str
) -> None:
    with served(tmp_path, "--store", store, "--wall-limit", "600") as server:
        assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5
        waits = server.send("loop", function, "k", *args)
        eventually(lambda: runs_epochs(server))
        began_s = time.monotonic()
        server.server.send_signal(signal_sent)
        assert server.server.wait(2 * ENDS_S) == (0 if signal_sent == signal.SIGTERM else 130)
        assert time.monotonic() - began_s < ENDS_S
        assert waits.wait(PATIENCE_S) != 0
    with served(tmp_path, "--store", store, "--wall-limit", "0.2") as server:
        answer = eventually(lambda: server.call("loop", function, "k", *args)[1])
        eventually(lambda: server.call("loop", function, "k", *args)[1]["status"] == "aborted")
        assert server.call("loop", function, "k", *args)[1]["error"] == DECREE, answer
        assert server.call("second", "account.deposit", "k", 5)[1]["result"] == 10


def test_killed_in_a_loop_it_does_not_replay_the_loop_for_ever(tmp_path: Path, store: str) -> None:
    with served(tmp_path, "--store", store, "--wall-limit", "600") as server:
        assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5
        waits = server.send("loop", "account.spin", "k")
        eventually(lambda: runs_epochs(server))
        os.kill(server.server.pid, signal.SIGKILL)
        assert waits.wait(PATIENCE_S) != 0
    for limit in ("0.2", "600"):  # the second start finds the decree in the log
        with served(tmp_path, "--store", store, "--wall-limit", limit) as server:
            assert server.call("loop", "account.spin", "k")[1]["error"] == DECREE
            assert server.call("first", "account.deposit", "k", 5)[1]["result"] == 5
            os.kill(server.server.pid, signal.SIGKILL)
