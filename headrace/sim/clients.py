"""The clients: they send batches, wait, time out, and send again with the same request ids."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from headrace.wire.messages import Answers, RequestIds, id_of

if TYPE_CHECKING:
    from headrace.sim.coordinator_process import CoordinatorProcess
    from headrace.sim.world import World

BAD_CALLS: tuple[tuple[Any, ...], ...] = (("nobody.nothing", "k"), ("no function", 1), (None, None))


class Request:
    """A pending batch of calls. It is sent again until the client has an answer to every row."""

    def __init__(self, ids: RequestIds, calls: list[tuple[Any, ...]], bad: set[int], source: tuple[str, int] | None):
        self.ids, self.calls, self.bad, self.source = ids, calls, bad, source
        self.missing = dict.fromkeys(range(len(calls)))  # rows without an answer
        self.attempts = 0


class SimClient:
    """Sends one batch after the other; if `waits` is not set, without waiting for the previous one."""

    def __init__(
        self,
        world: World,
        number: int,
        batches: list[list[tuple[Any, ...]]],
        rng: random.Random,
        is_source: bool | None = None,
    ) -> None:
        self.world, self.number, self.rng = world, number, rng
        self.faults = world.parameters.faults
        chance = rng.random()
        self.is_source = chance < 0.2 if is_source is None else is_source  # a streaming query: its batches are numbered
        self.waits = self.is_source or rng.random() < 0.7
        self.timeout_us = rng.choice((20_000, 100_000)) if self.faults.impatience else 300_000
        self.to_ask = [self._request(at, calls) for at, calls in enumerate(batches)]
        self.to_ask.reverse()
        self.open: dict[Request, None] = {}
        self.asked: list[Request] = []
        self.process: CoordinatorProcess | None = None  # the coordinator it talks to, perhaps a zombie

    @property
    def is_done(self) -> bool:
        return not self.to_ask and not self.open

    def _request(self, at: int, calls: list[tuple[Any, ...]]) -> Request:
        stem, source = f"c{self.number}-{at}", None
        if self.is_source:
            source = (f"query {self.number}", at)
        bad = {row for row in range(len(calls)) if self.rng.random() < 0.03}
        for row in bad:
            calls[row] = self.rng.choice(BAD_CALLS)
        if self.rng.random() < 0.5:
            return Request(stem, calls, bad, source)
        return Request([f"{stem}.{row}" for row in range(len(calls))], calls, bad, source)

    def begin(self) -> None:
        pause_us = self.world.parameters.chaos_us // (3 * (len(self.to_ask) or 1)) + 1
        for at in range(1 if self.waits else len(self.to_ask)):
            self.world.after(self.rng.randrange(pause_us) + at * pause_us, self.ask)

    def ask(self) -> None:
        if self.to_ask:
            request = self.to_ask.pop()
            self.open[request] = None
            self.asked.append(request)
            for row, call in enumerate(request.calls):
                self.world.history.ask(id_of(request.ids, row), call, row in request.bad)
            self._send(request)

    def _send(self, request: Request) -> None:
        request.attempts += 1
        if request.attempts > 1:
            self.world.fault("client retries")
        rows = list(range(len(request.calls)))
        ids: RequestIds = request.ids
        if request.attempts > 1 and self.faults.impatience and request.source is None and self.rng.random() < 0.5:
            rows = [row for row in request.missing if self.rng.random() < 0.7] or list(request.missing)
            self.rng.shuffle(rows)
            ids = [id_of(request.ids, row) for row in rows]
        self._carry(request, ids, rows)
        if self.faults.client_loss and self.rng.random() < self.faults.client_loss:
            self.world.fault("client requests doubled")
            self._carry(request, ids, rows)
        timeout_us = self.timeout_us << min(request.attempts - 1, 6)
        self.world.after(timeout_us + self.rng.randrange(timeout_us), self._lose_patience, request)

    def _carry(self, request: Request, ids: RequestIds, rows: list[int]) -> None:
        world = self.world
        if world.is_chaos and self.rng.random() < self.faults.client_loss:
            world.fault("client requests lost")
            return
        process = self._find_process(request)
        if process is None:
            world.fault("nobody to ask")
            return
        # A source's batch that is repeated after the next one was taken may be refused, or answered as expired; so may
        # one that is sent to a superseded coordinator, which knows less.
        token = world.new_token(
            process,
            lambda answers: self._answered(request, rows, answers),
            may_be_refused=lambda: (
                request.source is not None and (request not in self.open or process is not world.process)
            ),
        )
        calls = [request.calls[row] for row in rows]
        world.after(world.travel_us(self.rng), process.submit, token, ids, calls, request.source)

    def _find_process(self, request: Request) -> CoordinatorProcess | None:
        """After a timeout the same coordinator is asked again, or the newest one."""
        newest = self.world.process
        if self.process is None or not self.process.is_alive or (request.attempts > 1 and self.rng.random() < 0.5):
            self.process = newest if newest is not None and newest.is_alive else None
        elif self.process is not newest:
            self.world.probe("asked a coordinator that was superseded")
        return self.process

    def _lose_patience(self, request: Request) -> None:
        if request in self.open:
            self._send(request)

    def _answered(self, request: Request, rows: list[int], answers: Answers) -> None:
        """Answers have left the coordinator."""
        if self.world.is_chaos and self.rng.random() < self.faults.client_loss:
            self.world.fault("client replies lost")
        else:
            self.world.after(self.world.travel_us(self.rng), self._receive, request, rows)

    def _receive(self, request: Request, rows: list[int]) -> None:
        for row in rows:
            request.missing.pop(row, None)
        if request in self.open and not request.missing:
            del self.open[request]
            if self.waits and self.to_ask:
                self.world.after(1 + self.rng.randrange(5_000), self.ask)
            if self.faults.impatience and request.source is None and self.rng.random() < 0.2:
                self._ask_again(request)

    def ask_all_again(self) -> None:
        """Asks again for all answers that it got. Of a source only the last batch is kept."""
        process = self.world.process
        for request in self.asked[-1:] if self.is_source else self.asked:
            if process is not None:
                token = self.world.new_token(process, lambda answers: None)
                self.world.after(1, process.submit, token, request.ids, request.calls, request.source)

    def _ask_again(self, request: Request) -> None:
        """Asks again for an answer that it has; or uses the id for another call, which must be refused."""
        process = self._find_process(request)
        if process is None:
            return
        row = self.rng.randrange(len(request.calls))
        call, request_id = request.calls[row], id_of(request.ids, row)
        if self.rng.random() < 0.5 or row in request.bad:
            token = self.world.new_token(process, lambda answers: None)
            self.world.probe("asked again after the answer")
        else:
            other = self.world.workload.call(self.rng)
            if repr(other) == repr(call):
                return
            call, token = other, self.world.new_token(process, lambda answers: None, is_misuse=True)
            self.world.probe("request id used for another call")
        self.world.after(self.world.travel_us(self.rng), process.submit, token, [request_id], [call], None)
