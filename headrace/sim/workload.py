"""A workload: an app, a stream of calls, and what must hold for the replies besides matching the oracle."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from headrace.core.decrees import Interrupt, decree, is_known
from headrace.core.local import LocalBackend
from headrace.core.program import Program
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint
from headrace.sim.oracle import Oracle
from headrace.wire.messages import Failure

Call = tuple[Any, ...]  # (function, key, *args)


class Spin(BaseException):
    """Stands for a function that never returns."""


class Hooks:
    """How a function tells the world that it overruns. On a worker, that is the end of the worker. In an engine, it is
    interrupted, or it is the end of the process."""

    def __init__(self) -> None:
        self.worker: Any = None  # the worker of this step; None while the oracle or an engine runs functions
        self.engine: LocalBackend | None = None  # the engine of this step, if it runs functions itself
        self.may_end = False  # whether the engine's process may end: there is a store
        self.decree: Failure | None = None  # that ends the function which overran in an engine
        self.interrupted = 0  # functions, in engines
        self.spun: int | None = None  # the TID of the function that overran in this step
        self.is_stuck = False  # a function overran, and there was no worker to stop
        self.has_dawdled = False  # a function might have overrun
        self.chance = random.Random(0)
        self.patience = 6  # how often functions overrun in a run: each time all since the last copy is run again

    def watch(self, worker: Any, engine: LocalBackend | None = None, may_end: bool = False) -> None:
        self.worker, self.spun, self.is_stuck = worker, None, False
        self.engine, self.may_end = engine, may_end

    def spin(self) -> None:
        running = None if self.engine is None else self.engine.running()
        if running is not None and self.spun is None:
            if not is_known(running.epoch, running.row) and not (self.may_end and self.chance.random() < 0.4):
                self.interrupted += 1
                assert running.executor.doom_running(running.tid)
                raise Interrupt
            self.spun, self.decree = running.tid, decree(running.epoch, running.row)
        elif self.worker is not None and self.spun is None:
            self.spun = self.worker.running
        self.is_stuck = self.worker is None and self.engine is None
        raise Spin

    def dawdle(self) -> None:
        """The same call overruns only sometimes: the decree that aborts it must be remembered."""
        self.has_dawdled = True
        running = None if self.engine is None else self.engine.running()
        # In a replay an engine waits for seven times the limit, and a worker gets seven chances. That is more than
        # this patience: what may have been answered always returns in time.
        is_watched = self.worker is not None or (running is not None and not running.epoch.is_replayed)
        if is_watched and self.patience and self.chance.random() < 0.6:
            self.patience -= 1
            self.spin()


class Workload(ABC):
    name = "nothing"
    is_timeless = False  # its timers may be due in days, or never end: the clocks of coordinators jump to some of them

    def __init__(self, app: App) -> None:
        self.app, self.hooks = app, Hooks()

    @property
    def apps(self) -> list[App]:
        """The versions of the app, oldest first; `app` is the newest."""
        return [self.app]

    def print_of(self, version: int) -> Fingerprint:
        return Fingerprint(self.app.name, {}, {}, {})

    def for_version(self, version: int, calls: list[Call]) -> list[Call]:
        """The calls as a client of this version makes them."""
        return calls

    @abstractmethod
    def call(self, rng: random.Random) -> Call:
        """The next request."""

    def last_calls(self) -> list[Call]:
        """Sent when all other requests have been answered."""
        return []

    def respond(self, name: str, args: tuple[Any, ...], rng: random.Random) -> tuple[Any, str | None]:
        """The response of the outside world: a result, or why there is none. It differs each time."""
        failure = "refused" if rng.random() < 0.2 else None
        return None if failure else [name, *args, rng.randrange(1_000)], failure

    def oracle(self, program: Program, seed: int) -> Oracle:
        """The reference for this app."""
        config = program.config
        return Oracle(program.values, config.calls_max, config.depth_max, app=self.app, seed=seed)

    def check_state(self, oracle: Oracle, tid: int) -> list[str]:
        """What is wrong with the state after a transaction."""
        return []

    def check(self, history: Any) -> list[str]:
        """What is wrong with the rows of a history."""
        return []
