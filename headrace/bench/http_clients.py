"""The clients of `headrace bench http`: a process of their own, with kept-alive connections over plain sockets.

Each step is run in turn and reported: single calls as fast as they are answered, JSON batches as fast as they are
answered, and single calls at a fixed rate, each when it is due, whether or not earlier ones were answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from headrace.bench.senders import Stopwatch
from headrace.errors import HeadraceError

OK_HEAD, OK_REPLY = b"HTTP/1.1 200", b'"status":"ok"'


class Plan(NamedTuple):
    """What to do, from the command line."""

    host: str
    port: int
    server: int  # its process
    connections: int
    keys: int
    batch: int
    per_s: int
    seconds: float
    repeats: int


class Connection(asyncio.Protocol):
    """A kept-alive connection: one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._received = b""
        self._waiting: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """The whole response."""
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        head = received.find(b"\r\n\r\n")
        if head < 0:
            return
        at = received.find(b"content-length: ") + len(b"content-length: ")
        length = int(received[at : received.find(b"\r\n", at)])
        if len(received) >= head + 4 + length and self._waiting is not None:
            self._received = b""
            self._waiting.set_result(received)

    def connection_lost(self, error: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(HeadraceError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


class Clients:
    """All connections."""

    def __init__(self, plan: Plan, connections: list[Connection]) -> None:
        self.plan, self.connections = plan, connections
        self.answered = 0  # calls
        self._random = random.Random(16)
        self._head = f"Host: {plan.host}:{plan.port}\r\nContent-Type: application/json\r\nContent-Length: "

    def call(self) -> bytes:
        return self._post("/v1/call", self._transfer())

    def batch(self) -> bytes:
        calls = ",".join(self._transfer() for _ in range(self.plan.batch))
        return self._post("/v1/batch", f'{{"calls":[{calls}]}}')

    def opening(self, keys: range) -> bytes:
        calls = ",".join(f'{{"function":"account.open_account","key":{key},"args":[1000000]}}' for key in keys)
        return self._post("/v1/batch", f'{{"calls":[{calls}]}}')

    def _transfer(self) -> str:
        debtor, creditor = self._random.sample(range(self.plan.keys), 2)
        return f'{{"function":"account.transfer","key":{debtor},"args":[{creditor}]}}'

    def _post(self, path: str, body: str) -> bytes:
        return f"POST {path} HTTP/1.1\r\n{self._head}{len(body)}\r\n\r\n{body}".encode()

    async def ask(self, connection: Connection, request: bytes, calls: int) -> None:
        response = await connection.ask(request)
        if not response.startswith(OK_HEAD) or response.count(OK_REPLY) != calls:
            raise HeadraceError(f"a call failed: {response[-500:].decode(errors='replace')}")
        self.answered += calls

    async def open_accounts(self) -> None:
        keys = range(self.plan.keys)
        for at in range(0, len(keys), 1_000):
            part = keys[at : at + 1_000]
            await self.ask(self.connections[0], self.opening(part), len(part))

    async def as_fast_as_possible(self, request: Callable[[], bytes], calls: int) -> tuple[float, float]:
        """Calls per second, and the server's CPU time per call in microseconds."""
        until = time.perf_counter() + self.plan.seconds

        async def go_on(connection: Connection) -> None:
            while time.perf_counter() < until:
                await self.ask(connection, request(), calls)

        before, cpu_s, began = self.answered, cpu_s_of(self.plan.server), time.perf_counter()
        await asyncio.gather(*map(go_on, self.connections))
        elapsed_s, done = time.perf_counter() - began, self.answered - before
        return done / elapsed_s, 1e6 * (cpu_s_of(self.plan.server) - cpu_s) / done

    async def at_a_rate(self) -> Stopwatch:
        """The time of each call runs from when it was due."""
        stopwatch = Stopwatch()
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for connection in self.connections:
            free.put_nowait(connection)

        async def ask_when_due(due: float) -> None:
            connection = await free.get()
            await self.ask(connection, self.call(), 1)
            stopwatch.laps_s.append(time.perf_counter() - due)
            free.put_nowait(connection)

        began, tasks = time.perf_counter(), []
        for number in range(max(1, round(self.plan.per_s * self.plan.seconds))):
            due = began + number / self.plan.per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(ask_when_due(due)))
        await asyncio.gather(*tasks)
        return stopwatch


def cpu_s_of(process: int) -> float:
    """The CPU time of all threads of a process; 0 where there is no /proc."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def run(plan: Plan) -> None:
    """Each lap is reported on a line of its own."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Connection, plan.host, plan.port) for _ in range(plan.connections)]
    clients = Clients(plan, [connection for _, connection in made])
    await clients.open_accounts()
    await clients.ask(clients.connections[0], clients.call(), 1)
    for _ in range(plan.repeats):
        calls_per_s, server_us = await clients.as_fast_as_possible(clients.call, 1)
        batched_per_s, batched_us = await clients.as_fast_as_possible(clients.batch, plan.batch)
        watched = await clients.at_a_rate()
        lap = {
            "calls_per_s": calls_per_s,
            "batched_per_s": batched_per_s,
            "server_us_per_call": server_us,
            "server_us_per_batched_call": batched_us,
            "p50_ms": watched.percentile_ms(50),
            "p99_ms": watched.percentile_ms(99),
            "answered": clients.answered,
        }
        print(json.dumps(lap), flush=True)
    for connection in clients.connections:
        connection.close()


def main(host: str, *numbers: str) -> None:
    port, server, connections, keys, batch, per_s, repeats = map(int, numbers[:7])
    plan = Plan(host, port, server, connections, keys, batch, per_s, float(numbers[7]), repeats)
    uvloop.run(run(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
