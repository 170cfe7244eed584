"""The in-process runtime: one engine, the thread that drives it, and one that stops functions that never return."""

from __future__ import annotations

import functools
import logging
import queue
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.core.checked import CheckedExecutor
from headrace.core.decrees import decree, is_known
from headrace.core.engine import Engine
from headrace.core.events import Submit, Tick
from headrace.core.local import LocalBackend
from headrace.core.log_records import Decree
from headrace.core.serial import SerialExecutor
from headrace.errors import ModelError, NotDeterministic, Stuck
from headrace.model.app import App
from headrace.runtime.clock import Clock
from headrace.runtime.driver import PATIENCE_S_MAX, Driver, GivenUp, open_store
from headrace.runtime.watchdog import Watchdog
from headrace.wire.values import shown

if TYPE_CHECKING:
    from headrace.durability.store import Store

LOG = logging.getLogger("headrace.runtime")
CLOSE_LOOK_S = 0.05  # between two looks at what still runs
STACK_MAX = 20  # frames


class Runtime(Driver):
    """Runs an app in this process: `with Runtime(app) as runtime: runtime.client.call(transfer, "a", "b", 5)`."""

    engine: Engine

    def __init__(
        self,
        app: App,
        config: Config | None = None,
        clock: Clock | None = None,
        store: str | Path | Store | None = None,
        *,
        check: bool = False,
        accept_logged: bool = False,
    ) -> None:
        """With a `store`, a directory or "s3://bucket/prefix", everything that was answered is there again after a
        crash. Without one, the state is in memory only.

        With `check`, every transaction runs twice; one that is not deterministic aborts, and its function is named.
        With `accept_logged`, a recovery goes on where a function gives another reply than before the crash, if it
        writes the same: the logged reply stands."""
        if not isinstance(app, App):
            raise ModelError(f"Runtime takes an App, not {shown(app)}")
        config = config or Config()
        opened = open_store(store, app, config)
        seed = secrets.randbits(63) if opened is None else opened.seed
        backend = functools.partial(LocalBackend, executor=CheckedExecutor if check else SerialExecutor)
        engine = Engine(app, config, is_durable=opened is not None, seed=seed, backend=backend)
        engine.accepts = accept_logged
        if opened is not None:
            opened.restore(engine)
        super().__init__(app, config, engine, clock, opened)
        self._backend: LocalBackend = engine.backend  # type: ignore[assignment]
        self._outlet = threading.Lock()  # held while effects leave
        self._is_given_up = False
        self._watchdog = Watchdog(
            engine.program, self._backend.running, self._give_up, config.wall_limit_us, self._thread
        )
        self._begin()
        self._watchdog.start()

    def health(self) -> dict[str, Any]:
        health, running = super().health(), self._backend.running()
        if health["status"] != "ok" or running is None or self._watchdog.ran_s <= self._watchdog.limit_s:
            return health
        name, ran_s = running.epoch.entries[running.row].name, round(self._watchdog.ran_s, 1)
        return {"status": "stuck", "error": f"TID {running.tid} ({name}) has been running for {ran_s} s"}

    def metrics(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "app": self.app.name,
            "mode": "serial",
            "workers": 1,
            "epochs": engine.sequencing.open.number - 1,
            "committed": engine.committed,
            "aborted": engine.aborted,
            "pending": self._pending,
            **self._journal_metrics(),
            "entities": {name: len(engine.state.tables[name]) for name in self.app.operators},
        }

    # --- functions that do not return ---

    def _follow(self, effects: Iterable[Any]) -> None:
        with self._outlet:
            if self._is_given_up:
                raise GivenUp
            super()._follow(effects)

    def _wait_for_end(self, patience_s: float | None) -> None:
        if patience_s is None:
            self._ended.wait()
            return
        tid, since_s = 0, 0.0
        while not self._ended.wait(CLOSE_LOOK_S):
            running, now_s = self._backend.running(), time.monotonic()
            if running is None or running.tid != tid:
                tid, since_s = 0 if running is None else running.tid, now_s
            elif now_s - since_s > patience_s:
                why = "was still running when the runtime was closed"
                self._leave_behind(tid, why, "A new start runs it again", is_decreed=False)

    def _give_up(self, tid: int) -> bool:
        """A function does not return and cannot be interrupted: end the runtime without it. With a store, the decree
        that aborts its transaction is durable before anybody could replay it."""
        why = f"did not return within {self._watchdog.limit_s:g} s, and could not be interrupted"
        then = "It aborts by decree, which is in the log: start the app again"
        if self._keeper is None:
            then = "There is no store, so the state is lost with this runtime"
        return self._leave_behind(tid, why, then, is_decreed=True)

    def _leave_behind(self, tid: int, why: str, then: str, *, is_decreed: bool) -> bool:
        """End the runtime while a function runs. False if that transaction has ended meanwhile."""
        with self._outlet:
            running = self._backend.running()
            if running is None or running.tid != tid or self._is_given_up:
                return False
            self._is_given_up = True  # from now on nothing leaves the engine, whatever its thread still does
        epoch, row = running.epoch, running.row
        known, lost = is_known(epoch, row), None
        name = f"TID {tid} ({epoch.entries[row].name} of {shown(epoch.keys[row])}, request id {epoch.id_at(row)})"
        if is_decreed and known:
            then = "It had returned before a recovery: its functions depend on something other than arguments and state"
        elif is_decreed and self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            lost = keeper.close_with(Decree({tid: decree(epoch, row)}))
            if lost is not None:
                then = f"The decree that aborts it could not be written to the log: {lost}"
        text = f"{name} {why}. {then}"
        LOG.critical("%s\n%s", text, self._stack())
        if is_decreed:
            self._broken = lost or (NotDeterministic(text) if known else Stuck(text))
        self._end()
        return True

    def _stack(self) -> str:
        """Where the engine's thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=STACK_MAX)).rstrip()

    def _clean_up(self) -> None:
        self._watchdog.close()

    def _serve_once(self) -> bool:
        """Handle everything that waits in one step."""
        patience_s = (
            None if self._timer_us is None else min(max(0, self._timer_us - self._clock()) / 1e6, PATIENCE_S_MAX)
        )
        try:
            item = self._queue.get(timeout=patience_s)
        except queue.Empty:
            self._step(Tick())
            return True
        batches, asked, is_open = self._collect_batches(item)
        if batches:
            self._step(Submit(batches))
        if asked is not None:
            future, question = asked
            if future is None:
                self._handle_report(question)
            else:
                self._step(question(future))
        return is_open
