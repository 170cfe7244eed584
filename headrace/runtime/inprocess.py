"""The in-process runtime: one engine, and the thread that drives it."""

from __future__ import annotations

import functools
import queue
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.core.checked import CheckedExecutor
from headrace.core.engine import Engine
from headrace.core.events import Submit, Tick
from headrace.core.local import LocalBackend
from headrace.core.serial import SerialExecutor
from headrace.errors import ModelError
from headrace.model.app import App
from headrace.runtime.clock import Clock
from headrace.runtime.driver import PATIENCE_S_MAX, Driver, open_store
from headrace.wire.values import shown

if TYPE_CHECKING:
    from headrace.durability.store import Store


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
        self._begin()

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
