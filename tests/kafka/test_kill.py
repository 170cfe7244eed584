"""`headrace run --kafka`, killed in the middle and started again: each request is answered once, and the state is what
a loop over the requests gives."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.bank import BALANCE_MAX, app
from headrace import Runtime
from tests.kafka.broker import Broker, die_with_parent
from tests.process.test_cluster import is_alive
from tests.waiting import LONG_PATIENCE_S, eventually

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("HEADRACE_KILLS", "1"))  # more take half a minute each
ACCOUNTS = 20


class Server:
    """The command, as a user types it."""

    def __init__(self, kafka: Broker, store: Path) -> None:
        words = ["run", "examples.bank:app", "--port", "0", "--store", str(store)]
        words += ["--kafka", kafka.address, "--requests", "kill-in", "--replies", "kill-out"]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "headrace.cli", *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        self.said = ""
        while "writing replies to" not in self.said:
            line = self.process.stdout.readline()
            assert line, f"it ended: {self.said}"
            self.said += line
        self.children = descendants(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


def descendants(pid: int) -> list[int]:
    children = [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]
    return children + [below for child in children for below in descendants(child)]


class Clients:
    """They send requests all the time, some of them no good, until they are told to end."""

    def __init__(self, kafka: Broker, seed: int) -> None:
        self.kafka, self.chance = kafka, random.Random(seed)
        self.sent: dict[str, dict[str, Any]] = {}
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.send_all, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.is_over.set()
        self.thread.join()

    def send_all(self) -> None:
        while not self.is_over.is_set():
            some = [self.request() for _ in range(self.chance.randint(1, 100))]
            self.kafka.produce("kill-in", [(each["key"].encode(), json.dumps(each).encode()) for each in some])
            time.sleep(0.3)

    def request(self) -> dict[str, Any]:
        chance, name = self.chance, f"r{len(self.sent)}"
        key = f"a{chance.randrange(ACCOUNTS)}"
        amount = chance.choice((1, 5, 40, -3))
        call: dict[str, Any] = {"function": "account.deposit", "key": key, "args": [amount]}
        if chance.random() < 0.6:
            call = {"function": "account.transfer", "key": key, "args": [f"a{chance.randrange(ACCOUNTS)}", amount]}
        elif chance.random() < 0.1:
            call = {"function": "account.nothing", "key": key}
        self.sent[name] = call | {"request_id": name}
        return self.sent[name]


def run(call: dict[str, Any], balances: dict[str, int]) -> tuple[str, int | None]:
    """What the bank does, in a few lines: the balance of the one who called, or nothing."""
    key, (*to, amount) = call["key"], call["args"]
    after = balances | {key: balances.get(key, 0) + (-amount if to else amount)}
    left = after[key]
    if to:
        after[to[0]] = after.get(to[0], 0) + amount
    if amount <= 0 or left < 0 or max(after.values()) > BALANCE_MAX:
        return "aborted", None
    balances |= after
    return "ok", left


@pytest.mark.timeout(1_800)
def test_each_request_is_answered_once_though_it_is_killed_in_the_middle(kafka: Broker, tmp_path: Path) -> None:
    store, chance = tmp_path / "store", random.Random(os.environ.get("HEADRACE_SEED", "6"))
    kafka.create("kill-in", "kill-out", partitions=2)
    clients = Clients(kafka, 11)
    server = Server(kafka, store)
    try:
        for _ in range(KILLS):
            before = kafka.count("kill-out")
            eventually(lambda before=before: kafka.count("kill-out") > before, LONG_PATIENCE_S, pause_s=0.2)
            time.sleep(chance.uniform(0, 2))
            server.kill()
            eventually(lambda dead=server: not any(map(is_alive, dead.children)), LONG_PATIENCE_S, pause_s=0.2)
            server = Server(kafka, store)
        clients.end()
        eventually(lambda: kafka.count("kill-out") >= len(clients.sent), LONG_PATIENCE_S, pause_s=0.2)
        server.stop()
    finally:
        clients.is_over.set()
        server.kill()
    assert not any(map(is_alive, server.children))

    replies = kafka.read("kill-out")
    assert Counter(reply.key().decode() for reply in replies) == Counter(list(clients.sent))
    told = {reply.key().decode(): json.loads(reply.value()) for reply in replies}
    refused = {name for name, reply in told.items() if reply["status"] == "refused"}
    assert refused == {name for name, call in clients.sent.items() if call["function"] == "account.nothing"}
    balances: dict[str, int] = {}
    for name in sorted(told.keys() - refused, key=lambda name: told[name]["tid"]):
        assert (told[name]["status"], told[name].get("result")) == run(clients.sent[name], balances), name
    with Runtime(app, store=store) as runtime:
        assert runtime.state("account") == balances
    order: dict[int, list[int]] = {}
    for request in kafka.read("kill-in"):  # partition by partition, in order
        name = json.loads(request.value())["request_id"]
        if name not in refused:
            order.setdefault(request.partition(), []).append(told[name]["tid"])
    assert all(tids == sorted(tids) for tids in order.values())
    assert re.search("Reading requests from kill-in", server.said)
