"""`headrace chaos`: starts servers and clients, causes faults, stops them, asks for all replies again, and checks."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.chaos import tested_app
from headrace.chaos.killer import Killer
from headrace.chaos.servers import ChaosFailed, Servers
from headrace.chaos.traffic import (
    ACCOUNTS,
    BankClient,
    ChaosClient,
    ClientPool,
    Connections,
    ListClient,
    SentRequest,
    ask_patiently,
)
from headrace.chaos.verdict import AT_ONCE, ChaosVerdict, expected_appends, expected_receipts, judge
from headrace.durability.store import open_store
from headrace.model.operator import Function

CLIENTS: tuple[type[ChaosClient], ...] = (BankClient, ListClient, BankClient, ListClient, BankClient, ListClient)
SHORT_S = 20.0
SETTLE_S_MAX = 60.0  # for clients that wait for an answer when the faults are over
PATIENCE_S = 30.0
FOUND_MAX = 20  # texts of what is wrong
Say = Callable[[str], None]


def chaos(
    seconds: float, seed: int, workers: int, store: str | None, folder: Path, say: Say = lambda _: None
) -> tuple[dict[str, Any], ChaosVerdict]:
    """Returns the figures and what is wrong. Without a store the coordinator is not killed: it would lose its state."""
    began_s = time.monotonic()
    options = ["--workers", str(workers), *([] if store is None else ["--store", store])]
    servers = Servers(folder, options)
    traffic = ClientPool(servers.addresses)
    shared_store = None if store is None else open_store(store)
    killer = Killer(servers, traffic, random.Random(seed), shared_store, seconds < SHORT_S)
    clients = [kind(traffic, f"client{n}", f"{seed} {n}") for n, kind in enumerate(CLIENTS)]
    with ended_by_signals():
        try:
            verdict = run_under_faults(seconds, servers, traffic, killer, clients, say)
        finally:
            traffic.is_over.set()
            traffic.give_up.set()
            left = servers.end()
            for client in clients:
                if client.is_alive():
                    client.join(PATIENCE_S)
    verdict.violations += killer.wrong
    verdict.violations += [f"process {process.pid} is still running" for process in left]
    return figures(seed, time.monotonic() - began_s, traffic, killer, verdict), verdict


def run_under_faults(
    seconds: float, servers: Servers, traffic: ClientPool, killer: Killer, clients: list[ChaosClient], say: Say
) -> ChaosVerdict:
    servers.await_service(servers.start())
    for client in clients:
        client.start()
    stuck: list[str] = []
    try:
        killer.begin()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            killer.step()
            say(f"{traffic.acknowledged:,} acknowledged, {sum(killer.counts.values())} faults")
        killer.heal()
    except ChaosFailed as error:
        stuck.append(str(error))
    say("healing")
    traffic.is_over.set()
    settle_s = time.monotonic() + (0 if stuck else SETTLE_S_MAX)
    for client in clients:
        client.join(max(0.1, settle_s - time.monotonic()))
    traffic.give_up.set()
    verdict = judge_all(servers, traffic, say) if not stuck else ChaosVerdict()
    verdict.violations += stuck
    return verdict


def judge_all(servers: Servers, traffic: ClientPool, say: Say) -> ChaosVerdict:
    """Reads the state before anything is asked again; then asks for all ids again, after which it must be the same."""
    history = list(traffic.history)
    last = SentRequest("audit-at-the-end", (tested_app.audit, ACCOUNTS[0], ACCOUNTS), 0)
    reader = Reader(servers)
    try:
        reader.ask([asked for asked in history if not asked.answered])
        say("reading the final state")
        there = reader.receipts(history), reader.lists(history)
        say(f"repeating all {len(history):,} requests")
        differing = reader.ask(history)
        then = reader.receipts(history), reader.lists(history)
        reader.ask([last])
    finally:
        reader.connections.close()
    say("judging")
    verdict = judge([*history, last], *there)
    for text in [
        *traffic.wrong,
        *(f"{asked.request_id} got a different answer when it was repeated" for asked in differing),
    ]:
        verdict.duplicated[text.split()[0]] = text
    if then != there and not differing:
        verdict.violations.append("repeating answered requests changed the state")
    return verdict


class Reader:
    """Asks the servers when the faults are over."""

    def __init__(self, servers: Servers) -> None:
        self.servers, self.connections, self._reads = servers, Connections(PATIENCE_S), 0

    def ask(self, requests: list[SentRequest]) -> list[SentRequest]:
        """Asks all of them. Returns those that were answered before, and differently."""
        differing = []
        for at in range(0, len(requests), AT_ONCE):
            batch = requests[at : at + AT_ONCE]
            now_ns = time.monotonic_ns()
            for asked in batch:
                asked.sent = asked.sent or now_ns
            replies = ask_patiently(self.connections, self.servers.addresses, batch, time.monotonic() + SETTLE_S_MAX)
            if replies is None:
                raise ChaosFailed(f"no answer in {SETTLE_S_MAX:.0f} s, though the faults are over")
            differing += [asked for at, asked in enumerate(batch) if not asked.take(replies, at)]
        return differing

    def receipts(self, history: list[SentRequest]) -> dict[str, list[int]]:
        return self._read(tested_app.page, {key for asked in history for key, _ in expected_receipts(asked)})

    def lists(self, history: list[SentRequest]) -> dict[str, list[int]]:
        return self._read(tested_app.look, {key for asked in history for key, _ in expected_appends(asked)})

    def _read(self, function: Function, keys: set[str]) -> dict[str, list[int]]:
        self._reads += 1
        wanted = [SentRequest(f"read-{self._reads}-{key}", (function, key), 0) for key in sorted(keys)]
        self.ask(wanted)
        return {asked.call[1]: asked.result for asked in wanted}


def figures(seed: int, seconds: float, traffic: ClientPool, killer: Killer, verdict: ChaosVerdict) -> dict[str, Any]:
    answered = [asked for asked in traffic.history if asked.answered]
    return {
        "acknowledged": len(answered),
        "aborted": sum(asked.failure is not None for asked in answered),
        "retries": traffic.retries,
        "answered_by_zombies": traffic.from_zombies,
        **killer.figures(),
        "lost": len(verdict.lost),
        "duplicated": len(verdict.duplicated),
        "violations": len(verdict.violations),
        "found": verdict.found()[:FOUND_MAX],
        "seed": seed,
        "seconds": round(seconds, 1),
    }


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treats SIGTERM and SIGHUP like Ctrl-C, so that everything is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
