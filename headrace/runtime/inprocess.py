"""The in-process runtime: one engine, and the thread that drives it."""

from __future__ import annotations

import queue
from typing import Any

from headrace.config import Config
from headrace.core.channel import Tick
from headrace.core.engine import Engine, Submit
from headrace.core.program import MISSING
from headrace.errors import ModelError
from headrace.model.app import App
from headrace.model.operator import Operator
from headrace.runtime.clock import Clock
from headrace.runtime.driver import PATIENCE_S_MAX, Driver
from headrace.wire.values import shown


class Runtime(Driver):
    """Runs an app in this process: `with Runtime(app) as runtime: runtime.client.call(transfer, "a", "b", 5)`."""

    engine: Engine

    def __init__(self, app: App, config: Config | None = None, clock: Clock | None = None) -> None:
        if not isinstance(app, App):
            raise ModelError(f"Runtime takes an App, not {shown(app)}")
        config = config or Config()
        super().__init__(app, config, Engine(app, config), clock)
        self._begin()

    def state(self, operator: Operator | str) -> dict[Any, Any]:
        program = self.engine.program
        table, unseal = program.tables[self._name_of(operator)], program.values.unseal
        found: dict[Any, Any] = self._ask(lambda: {key: unseal(value) for key, value in table.items()})
        return found

    def get(self, operator: Operator | str, key: Any, default: Any = None) -> Any:
        program = self.engine.program
        table = program.tables[self._name_of(operator)]
        program.check_key(key)
        value = self._ask(lambda: table.get(key, MISSING))
        return default if value is MISSING else program.values.unseal(value)

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
            "entities": {name: len(table) for name, table in engine.program.tables.items()},
        }

    def _serve_once(self) -> bool:
        """Take what is there into one step."""
        patience_s = (
            None if self._timer_us is None else min(max(0, self._timer_us - self._clock()) / 1e6, PATIENCE_S_MAX)
        )
        try:
            item = self._inbox.get(timeout=patience_s)
        except queue.Empty:
            self._step(Tick())
            return True
        batches, asked, is_open = self._gather(item)
        if batches:
            self._step(Submit(batches))
        if asked is not None:
            future, question = asked
            try:
                result = question()
            except Exception as error:
                self._answer(future, error=error)
            else:
                self._answer(future, result)
        return is_open

    def _settle(self) -> None:
        if self._timer_us is not None:
            self._step(Tick(), self._timer_us)
