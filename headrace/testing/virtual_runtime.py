"""The test runtime: one engine, stepped in the thread of the test, on a virtual clock and over a store in memory.

Rules:
1. A call returns when nothing is left to do at the current time. Time passes only in `advance`.
2. `advance` stops at each time at which something is due, so every timer and schedule runs at its own time, also those
   that were set on the way.
3. The log, the snapshots and the recovery are those of production. The disk (`sim/disk.py`) forgets in a crash what
   was not synced.
4. The same calls give the same results in every run: ids and random numbers follow from `seed`.

Never here: threads, sockets, files, the machine's clock.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, get_args

from headrace.config import Config
from headrace.core.engine import Engine
from headrace.core.epoch import Batch, Epoch
from headrace.core.events import Append, Check, Keep, Perform, Responded, Save, Submit, TakeSnapshot, Tick
from headrace.core.program import Program
from headrace.durability.identity import create_identity
from headrace.durability.keeper import StoreWork
from headrace.durability.recovery import OpenedStore
from headrace.errors import BadCall, BadRequest, LimitReached, ModelError, Stopped
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint
from headrace.runtime.driver import Driver
from headrace.runtime.failure_log import FailureLog
from headrace.sim.disk import Disk, SimStore
from headrace.testing.fakes import FakeExternal, FakeExternals
from headrace.wire.values import shown

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
US = datetime.timedelta(microseconds=1)
STEPS_MAX = 100_000  # without time passing: then a timer sets itself again without a delay

Moment = Literal["before_log", "after_log", "after_external"]


class CrashNow(BaseException):
    """The test wants a crash at this point."""


class TestRuntime(Driver):
    """`with TestRuntime(app) as runtime: runtime.client.call(transfer, "a", "b", 5)`. It has the client and the state
    of a `Runtime`, and `advance`, `external`, `crash` and `crash_next` besides."""

    __test__ = False  # pytest: not a class of tests

    engine: Engine
    MOMENTS: ClassVar[tuple[str, ...]] = get_args(Moment)

    def __init__(
        self,
        app: App,
        config: Config | None = None,
        *,
        start: datetime.datetime = START,
        seed: int = 0,
        externals: Mapping[str, Any] | None = None,
    ) -> None:
        """`start` is the time at which it begins. `externals` gives the answers of external functions by their names:
        a value, a function `f(idempotency_key, *args)`, or an exception; or use `external(name)` later."""
        if not isinstance(app, App):
            raise ModelError(f"TestRuntime takes an App, not {shown(app)}")
        if start.tzinfo is None:
            raise BadRequest(f"start must have a time zone, as in datetime(2026, 1, 1, tzinfo=UTC), not {start}")
        config = dataclasses.replace(config or Config(), epoch_interval_us=0)  # nobody waits for an epoch to fill
        self._now_us = (start - EPOCH) // US
        self._disk = Disk(random.Random(seed))
        self._disk.fate = "lost"
        create_identity(SimStore(self._disk), app, config, cluster="test", seed=seed)
        self._program = Program(app, config)
        self._events: deque[Any] = deque()
        self._is_stepping = False
        self._crash_at: Moment | None = None
        self._steps = 0
        self.crashes = 0
        opened, engine = self._open_engine(app, config)
        super().__init__(app, config, engine, lambda: self._now_us)
        self._failure_log = FailureLog(lambda: self._now_us / 1e6)
        self._work = StoreWork(opened)
        self._fakes = FakeExternals(app, self._program.values, externals or {}, self._events.append)
        self._begin()

    def _open_engine(self, app: App, config: Config) -> tuple[OpenedStore, Engine]:
        opened = OpenedStore(SimStore(self._disk), app, config, Fingerprint(app.name, {}, {}, {}))
        engine = Engine(app, config, is_durable=True, seed=opened.seed, program=self._program)
        opened.restore(engine)
        return opened, engine

    def _begin(self) -> None:
        """The first steps: what a recovery left, and what is due."""
        self._run(lambda: self._follow(self.engine.start(self._now_us)))
        self._do(Tick())

    # --- time ---

    @property
    def now(self) -> datetime.datetime:
        """The virtual time. Only `advance` changes it."""
        return EPOCH + self._now_us * US

    @property
    def next_due(self) -> datetime.datetime | None:
        """When the next timer or schedule is due, or an entity expires; None if nothing is."""
        due_us = self.engine.deferred.next_due_us(self._now_us)
        return None if due_us is None else EPOCH + due_us * US

    def advance(
        self,
        by: datetime.timedelta | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass: `advance(minutes=5)`, or a timedelta. Everything that is due on the way runs at its own time,
        in order."""
        span = (by or datetime.timedelta()) + datetime.timedelta(
            days=days, hours=hours, minutes=minutes, seconds=seconds
        )
        if span < datetime.timedelta():
            raise BadRequest(f"time does not go back: advance takes no negative time, but got {span}")
        self.advance_to(self.now + span)

    def advance_to(self, when: datetime.datetime) -> None:
        """Let time pass until `when`."""
        self._check_alive()
        until_us = (when - EPOCH) // US
        if until_us < self._now_us:
            raise BadRequest(f"time does not go back: it is {self.now}, which is later than {when}")
        while self._timer_us is not None and self._timer_us <= until_us:
            self._now_us = max(self._now_us, self._timer_us)
            self._do(Tick())
        self._now_us = until_us
        self._do(Tick())

    # --- the outside world ---

    def external(self, name: str) -> FakeExternal:
        """The fake of an external function: what it was asked, and what it answers."""
        return self._fakes.find(name)

    # --- crashes ---

    def crash(self) -> None:
        """Kill the app and start it again from its store. What was answered is there; all else is gone. The start
        replays the log: a function that gives another result than before raises `NotDeterministic`."""
        self._check_alive()
        self._recover("the test crashed the app")

    def restart(self) -> None:
        """Stop the app and start it again: there is a snapshot at the end, and nothing to replay."""
        self.snapshot()
        self._recover("the test stopped the app")

    def crash_next(self, moment: Moment) -> None:
        """Crash in the middle of what is logged next: a call, a batch, or a timer. Who waits for it gets `Stopped`, and
        the app is started again. "before_log": it has not happened. "after_log": it is durable, but the answer is lost.
        "after_external": the external was called, and its response is lost."""
        if moment not in self.MOMENTS:
            raise BadRequest(f"crash_next takes one of {', '.join(self.MOMENTS)}, not {shown(moment)}")
        self._crash_at = moment

    def _recover(self, why: str) -> None:
        self.crashes += 1
        lost, self._unanswered = list(self._unanswered), {}
        self._events.clear()
        self._disk.lose_power()
        for future in lost:
            future.set_exception(Stopped(f"{why}: it may or may not have run; ask again with the same request id"))
        opened, self.engine = self._open_engine(self.app, self.config)
        self._work = StoreWork(opened)
        self._begin()

    # --- as in every runtime ---

    def states(self) -> dict[str, dict[Any, Any]]:
        """The state of all operators, {operator: {key: state}}: what an invariant takes."""
        return {name: self.state(name) for name in self.app.operators}

    def snapshot(self) -> dict[str, Any]:
        """Make a snapshot now. Returns its epoch."""
        return {"epoch": self._ask(TakeSnapshot)}

    def metrics(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "app": self.app.name,
            "mode": "serial",
            "workers": 1,
            "pending": self._pending,
            **engine.metrics(),
            **self._journal_metrics(),
            "entities": {name: len(engine.state.tables[name]) for name in self.app.operators},
        }

    def wait(self) -> None:
        """Nothing runs by itself: there is nothing to wait for."""

    def close(self, patience_s: float | None = None) -> None:
        if not self._closed:
            self._failure_log.sum_up()
        self._closed = True

    # --- steps ---

    def _serve_once(self) -> bool:
        raise AssertionError("no thread serves a TestRuntime")

    def _hand_over(self, work: Batch | Callable[..., Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._unanswered[future] = None
        self._do(Submit([(future, work)]) if isinstance(work, Batch) else work(future))
        return future

    def _check_alive(self) -> None:
        super()._check_alive()
        if self._is_stepping:
            raise BadCall("a function cannot use a client of its own runtime: use ctx.call or ctx.call_async")

    def _do(self, event: Any) -> None:
        """Step the engine with this event, and with all that follows from it at the current time."""
        self._events.append(event)
        self._steps = 0
        self._run(self._settle_now)

    def _settle_now(self) -> None:
        while self._events or (self._timer_us is not None and self._timer_us <= self._now_us):
            self._steps += 1
            if self._steps > STEPS_MAX:
                raise LimitReached(
                    f"{STEPS_MAX} steps at {self.now}, and there is still something to do: a timer may be setting "
                    "itself again without a delay"
                )
            self._step(self._events.popleft() if self._events else Tick())

    def _run(self, action: Callable[[], None]) -> None:
        self._is_stepping = True
        try:
            action()
        except CrashNow:
            self._is_stepping = False
            moment, self._crash_at = self._crash_at, None
            self._recover(f"the test crashed the app ({moment})")
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._is_stepping = False

    def _perform(self, effect: Perform) -> None:
        responded: Responded = self._fakes.respond(effect)
        if self._crash_at == "after_external":
            raise CrashNow
        self._events.append(responded)

    def _make_durable(self, effect: Append | Check | Keep | Save) -> None:
        work = self._work
        match effect:
            case Append(record=record):
                is_epoch = isinstance(record, Epoch)
                if is_epoch and self._crash_at == "before_log":
                    raise CrashNow
                written = work.encode(effect)
                self._events.extend(work.append([written]))
                if is_epoch and self._crash_at == "after_log":
                    raise CrashNow
                if written.retired:
                    work.retire(written.retired)
            case Check():
                self._events.extend(work.append([effect]))
            case Keep(epoch, changes):
                work.prepare(epoch, changes)
                work.keep([epoch])
            case Save(snapshot):
                self._events.extend(work.save(snapshot))
                work.compact()
