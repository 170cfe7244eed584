"""Runs the app's external functions, in threads, with retries and time limits.

An external function may be called more than once for one request: after a time-out, an exception, or a restart. It gets
the same idempotency key each time, so it can detect a repeat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from headrace.core.events import Perform, Responded
from headrace.core.raised import describe
from headrace.errors import HeadraceError
from headrace.model.app import App, External
from headrace.wire.values import Values, shown

CALLS_MAX = 64  # at the same time; others wait
MESSAGE_CHARACTERS_MAX = 500


class Externals:
    """`tell(Responded)` is called from other threads."""

    def __init__(self, app: App, values: Values, name: str, tell: Callable[[Responded], None]) -> None:
        self.app, self.values, self.name, self._tell = app, values, name, tell
        self._waiting: queue.SimpleQueue[Perform | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._busy = 0
        self._lock = threading.Lock()

    def perform(self, effect: Perform) -> None:
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads) and len(self._threads) < CALLS_MAX:
                thread = threading.Thread(target=self._serve, name="headrace-external", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._waiting.put(effect)

    def close(self) -> None:
        """Calls that are still running are not awaited: they may never return."""
        self._closed.set()
        for _ in self._threads:
            self._waiting.put(None)

    def _serve(self) -> None:
        while (effect := self._waiting.get()) is not None and not self._closed.is_set():
            responded = self._respond(effect)
            with self._lock:
                self._busy -= 1
            if not self._closed.is_set():
                self._tell(responded)

    def _respond(self, effect: Perform) -> Responded:
        external = self.app.externals.get(effect.name)
        if external is None:
            return Responded(
                effect.call, None, f"app {self.app.name!r} no longer has an external function {effect.name!r}"
            )
        why = ""
        for attempt in range(external.tries):
            if attempt and self._pause(external.backoff_s * 2 ** (attempt - 1)):
                break
            outcome = self._try(external, f"{self.name}/{effect.call}", effect.args)
            if isinstance(outcome, Responded):
                return outcome._replace(call=effect.call)
            why = outcome
        return Responded(effect.call, None, f"{external.name}: {why}, after {external.tries} attempts")

    def _try(self, external: External, key: str, args: tuple[Any, ...]) -> Responded | str:
        """One call, in its own thread. A call that does not return in time is abandoned."""
        outcome: list[Responded | str] = []
        thread = threading.Thread(
            target=lambda: outcome.append(self._attempt(external, external.function, key, args)),
            name=f"headrace-{external.name}",
            daemon=True,
        )
        thread.start()
        thread.join(external.timeout_s)
        return outcome[0] if outcome else f"no answer within {shown(external.timeout_s)} seconds"

    def _attempt(
        self, external: External, function: Callable[..., Any], key: str, args: tuple[Any, ...]
    ) -> Responded | str:
        """The response, or why there is none yet."""
        try:
            result = function(key, *args)
            return Responded("", self.values.unseal(self.values.seal(result)))
        except HeadraceError as error:  # a value that cannot be carried fails every time: no retry
            return Responded("", None, f"{external.name}: {error}")
        except BaseException as error:
            _, name, text = describe(error)
            return f"{name}: {text[:MESSAGE_CHARACTERS_MAX]}" if text else name

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt. True if this is being closed."""
        return self._closed.wait(seconds)
