"""An engine, or a coordinator and its workers, with an outside world under a test's hand: time, and what external calls
give. What was logged is run again by the oracle, row by row."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from headrace import App, Config, Reply
from headrace.core.epoch import Epoch
from headrace.core.events import Lost, Perform, Read, Refuse, Rescale, Rescaled, Responded
from headrace.core.origin import FromClient
from headrace.sim.oracle import Oracle
from tests.cluster import exactly
from tests.driver import Driver

SECOND = 1_000_000
MOMENT = 10_000


def response(call: str, name: str, args: tuple[Any, ...]) -> tuple[Any, str | None]:
    """What the outside world gives, and always the same to the same call."""
    drawn = zlib.crc32(repr((call, name, args)).encode())
    return (None, f"{name} is closed") if drawn % 4 == 0 else ([name, drawn % 1_000], None)


def check_nothing_is_left(oracle: Oracle, epochs: Sequence[Epoch], now_us: int) -> None:
    """What is due has happened, once; what has expired is deleted."""
    rows = [(entry.name, key) for epoch in epochs for entry, key in zip(epoch.entries, epoch.keys, strict=True)]
    fired = [key for name, key in rows if name == "headrace.fire"]
    assert len(set(fired)) == len(fired), "something fired twice"
    assert oracle.app is not None
    assert oracle.visible(now_us, oracle.app) == oracle.state, "what has expired is still there"
    waiting = {key: state for (name, key), state in oracle.state.items() if name == "headrace"}
    overdue = [key for key, state in waiting.items() if type(state) is tuple and state[1] <= now_us]
    assert not overdue, f"still there: {[waiting[key] for key in overdue]}"


class World(Driver):
    """With an outside world that answers external calls, and time that passes."""

    def __init__(self, app: App, workers: int = 0, mode: str = "auto", seed: int = 0, **config: int) -> None:
        self.rng = random.Random(seed)
        self.performs: list[Perform] = []  # under way
        self.performed: list[Perform] = []
        self.epochs: list[Epoch] = []
        super().__init__(app, Config(**config), workers, mode, choose=self.rng.choice, seed=7)

    def prepare(self) -> None:
        """Watch which epochs are closed."""
        close = self.core.sequencing.close

        def closing(now_us: int) -> Epoch:
            self.epochs.append(close(now_us))
            return self.epochs[-1]

        self.core.sequencing.close = closing

    def send(self, calls: Sequence[Any]) -> int:
        return self.hand_over(self.admission.admit(FromClient(f"batch{self.submitted}"), calls))[0]

    def run(self, *calls: Any) -> list[Reply]:
        token = self.send(calls)
        while token not in self.replies:
            self.until(self.now_us + MOMENT)
        return self.replies[token]

    def call(self, *call: Any) -> Any:
        return self.run(call)[0].unwrap()

    def state(self) -> dict[Any, Any]:
        """All entities: (operator, key) -> state."""
        self.found = {}
        self.submit(Read("state"))
        while not self.found:
            self.until(self.now_us + MOMENT)
        return self.found["state"]

    def on_perform(self, perform: Perform) -> None:
        """For tests that look at the moment when an external call is made."""

    # --- what happens ---

    def deliver(self) -> bool:
        if not self.performs or (self.rng.random() < 0.8 and super().deliver()):
            return bool(self.performs) or super().deliver()
        perform = self.performs.pop(self.rng.randrange(len(self.performs)))
        self.performed.append(perform)
        self.submit(Responded(perform.call, *response(*perform)))
        return True

    def trouble(self) -> None:
        """A worker is lost, or there are more or fewer of them from now on."""
        if self.workers:
            is_lost = self.rng.random() < 0.7 or self.core.backend.forced == "serial"
            worker = self.rng.choice(sorted(self.workers))
            self.submit(Lost(worker) if is_lost else Rescale("rescaled", self.rng.randint(1, 4)))

    def happen(self) -> None:
        """All that can, while the clock stands still."""
        while self.deliver():
            pass

    def until(self, at_us: int) -> None:
        """Let time pass."""
        while True:
            self.happen()
            due = [due_us for due_us in self.timers.values() if due_us <= at_us]
            if not due:
                break
            self.now_us = max(self.now_us, min(due))
        self.now_us = max(self.now_us, at_us)

    def take(self, effect: Any) -> None:
        assert not isinstance(effect, Refuse), f"submission {effect.token} was refused: {effect.error}"
        if isinstance(effect, Perform):
            assert effect not in self.performs, f"{effect} is made twice at the same time"
            self.performs.append(effect)
            self.on_perform(effect)
        elif not isinstance(effect, Rescaled):
            super().take(effect)

    # --- the reference ---

    def check(self) -> Oracle:
        """Every row of the log, and the state, are what a loop over the log gives."""
        unseal, decode = self.program.values.unseal, self.program.values.decode
        oracle = Oracle(self.program.values, app=self.app, seed=7, respond=response)
        for epoch in self.epochs:
            oracle.now_us = epoch.closed_us
            for row, entry in enumerate(epoch.entries):
                args = decode(epoch.args[row][0]) if entry.sealed is entry else epoch.args[row]
                oracle.tid = epoch.tids[row] - 1
                expected = oracle.transact(entry.function, epoch.keys[row], *args)
                failure = epoch.failures.get(row)
                ran: tuple[Any, ...] = ("ok", unseal(epoch.results[row]))
                if failure is not None:
                    ran = ("aborted", failure.type, failure.message, failure.function, failure.key)
                assert repr(ran) == repr(expected), f"TID {epoch.tids[row]}, {entry.name} of {epoch.keys[row]!r}"
        assert exactly(self.state()) == exactly(oracle.visible(self.core.sequencing.last_us, self.app))
        check_nothing_is_left(oracle, self.epochs, self.now_us)
        for worker in self.workers.values():
            left = (worker.progress, worker.ordered.parts, worker.early, worker.ordered.aborted)
            assert not any(left), "an epoch was left behind"
        return oracle
