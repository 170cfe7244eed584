"""The clients: threads that send each request, with the same id, until a coordinator answers it.

A client knows the address of the current server and, for a while, of one that was replaced and may have been resumed:
sometimes it asks there first, like a client that has not heard of the change. It accepts every answer it gets.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.chaos import tested_app
from headrace.errors import HeadraceError
from headrace.runtime.client import Replies
from headrace.runtime.remote import RemoteClient
from headrace.wire.messages import Failure

ACCOUNTS = [f"account {number}" for number in range(12)]
LISTS, APPENDS_PER_LIST = 4, 60  # lists at a time; after this many appends new ones are used
PATIENCE_S = 2.0  # for an answer
PAUSE_S = 0.03  # before asking again
ZOMBIE_SHARE = 0.3  # share of the requests that are sent to a zombie first, if there is one

Call = tuple[Any, ...]
Addresses = tuple[str | None, list[str]]  # of the current server; of replaced ones
encode = msgspec.msgpack.Encoder().encode


class SentRequest:
    """One request. Times are of the monotonic clock, in nanoseconds."""

    __slots__ = ("answered", "call", "data", "failure", "number", "request_id", "result", "sent", "tid")

    def __init__(self, request_id: str, call: Call, number: int) -> None:
        self.request_id, self.call, self.number = request_id, call, number
        self.sent = self.answered = 0
        self.data = b""
        self.tid: int | None = None
        self.result: Any = None
        self.failure: Failure | None = None

    @property
    def name(self) -> str:
        name: str = self.call[0].full_name
        return name

    @property
    def is_ok(self) -> bool:
        return bool(self.answered) and self.failure is None

    def take(self, replies: Replies, at: int) -> bool:
        """Stores the answer; False if an earlier answer was different."""
        answers, reply = replies.answers, replies[at]
        data = encode((reply.tid, reply.epoch, answers.results[at], reply.failure))
        if self.answered:
            return data == self.data
        self.tid, self.failure, self.result = reply.tid, reply.failure, reply.result
        self.data, self.answered = data, time.monotonic_ns()
        return True


class ClientPool:
    """What all clients share: addresses, request numbers, the history, and when to stop."""

    def __init__(self, addresses: Callable[[], Addresses]) -> None:
        self.addresses = addresses
        self.numbers = itertools.count(1)
        self.history: list[SentRequest] = []
        self.wrong: list[str] = []  # requests that got two different answers
        self.is_over = threading.Event()
        self.give_up = threading.Event()
        self.retries = self.from_zombies = 0
        self.last_success = (0, 0)  # when the last answered request was sent, and when it was answered; not by zombies
        self.lock = threading.Lock()

    @property
    def acknowledged(self) -> int:
        return sum(1 for asked in list(self.history) if asked.answered)


class Connections:
    """The remote clients of one thread, one per address."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._clients: dict[str, RemoteClient] = {}

    def ask(self, url: str, batch: list[SentRequest]) -> Replies | None:
        """None if there is no answer. A temporary refusal (of a runtime that stops) does not count as one."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = RemoteClient(url, tested_app.app, timeout_s=self._patience_s, connections=1)
        ids = [asked.request_id for asked in batch]
        try:
            replies = client.submit(ids, [asked.call for asked in batch], wait=True).result()
        except (HeadraceError, OSError):
            return None
        return None if any(tid is None for tid in replies.answers.tids) else replies

    def keep(self, urls: list[str]) -> None:
        """Closes all clients except those for these addresses."""
        for url in [url for url in self._clients if url not in urls]:
            self._clients.pop(url).close()

    def close(self) -> None:
        self.keep([])


class ChaosClient(threading.Thread, ABC):
    """Sends one batch after the other."""

    def __init__(self, traffic: ClientPool, name: str, seed: str) -> None:
        super().__init__(name=f"chaos-{name}", daemon=True)
        self.traffic, self.client, self.rng = traffic, name, random.Random(seed)
        self.connections = Connections()

    def run(self) -> None:
        try:
            while not self.traffic.is_over.is_set():
                batch = [self._request() for _ in range(self.rng.choice((1, 1, 1, 4, 16)))]
                self.traffic.history.extend(batch)
                self._ask_until_answered(batch)
        finally:
            self.connections.close()

    def _request(self) -> SentRequest:
        number = next(self.traffic.numbers)
        return SentRequest(f"{self.client}-{number}", self.call(number), number)

    @abstractmethod
    def call(self, number: int) -> Call:
        """The next call of this workload."""

    def _ask_until_answered(self, batch: list[SentRequest]) -> None:
        now_ns = time.monotonic_ns()
        for asked in batch:
            asked.sent = now_ns
        while not self.traffic.give_up.is_set():
            if any(self._try(url, is_zombie, batch) for url, is_zombie in self._addresses()):
                return
            self.traffic.retries += 1
            time.sleep(PAUSE_S * (0.5 + self.rng.random()))

    def _addresses(self) -> Iterator[tuple[str, bool]]:
        current, zombies = self.traffic.addresses()
        self.connections.keep([*zombies, *([current] if current else [])])
        if zombies and self.rng.random() < ZOMBIE_SHARE:
            yield self.rng.choice(zombies), True
        if current is not None:
            yield current, False

    def _try(self, url: str, is_zombie: bool, batch: list[SentRequest]) -> bool:
        """True if all were answered."""
        began_ns = time.monotonic_ns()
        replies = self.connections.ask(url, batch)
        if replies is None:
            return False
        for at, asked in enumerate(batch):
            if not asked.take(replies, at):
                self.traffic.wrong.append(f"{asked.request_id} was answered in two ways")
        with self.traffic.lock:
            if is_zombie:
                self.traffic.from_zombies += len(batch)
            elif began_ns > self.traffic.last_success[0]:
                self.traffic.last_success = began_ns, time.monotonic_ns()
        return True


class BankClient(ChaosClient):
    """Transfers money, and sometimes audits the total."""

    def call(self, number: int) -> Call:
        rng = self.rng
        first, second = rng.choice(ACCOUNTS), rng.choice(ACCOUNTS)
        kind = rng.random()
        if kind < 0.05:
            return tested_app.audit, first, ACCOUNTS
        function = tested_app.transfer if kind < 0.55 else tested_app.transfer_awaited
        return function, first, second, rng.randint(1, 30), self.client, number


class ListClient(ChaosClient):
    """Appends and reads. The appended values are the request's number followed by a digit."""

    def call(self, number: int) -> Call:
        rng = self.rng
        is_blind = rng.random() < 0.25
        generation = number // (LISTS * APPENDS_PER_LIST)
        ops: list[list[Any]] = []
        for digit in range(rng.randint(1, 4)):
            key = f"list {generation}.{rng.randrange(LISTS)}"
            if is_blind or rng.random() < 0.5:
                ops.append([tested_app.APPEND, key, number * 10 + digit])
            else:
                ops.append([tested_app.READ, key, 0])
        return tested_app.send_all if is_blind else tested_app.run_all, ops[0][1], ops


def ask_patiently(
    connections: Connections, addresses: Callable[[], Addresses], batch: list[SentRequest], until_s: float
) -> Replies | None:
    """Asks the current server until it answers or the time is over."""
    while time.monotonic() < until_s:
        url = addresses()[0]
        replies = None if url is None else connections.ask(url, batch)
        if replies is not None:
            return replies
        time.sleep(PAUSE_S)
    return None
