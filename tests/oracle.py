"""The reference: a loop over the log. Slow, plain, and so short that it can be seen to be right.

State is one dict; a transaction that fails gets the copy back that was made before it. Nothing of `headrace.core`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

Entity = tuple[str, Any]


class Oracle:
    def __init__(self) -> None:
        self.state: dict[Entity, Any] = {}
        self.queue: list[tuple[Any, Any, tuple[Any, ...]]] = []
        self.failure: tuple[str, str, str, Any] | None = None  # the first: type, message, function, key

    def transact(self, function: Any, key: Any, *args: Any) -> tuple[Any, ...]:
        """("ok", result), or ("aborted", type, message, function, key)."""
        before = copy.deepcopy(self.state)
        self.queue, self.failure, results = [(function, key, args)], None, []
        for call in self.queue:  # which grows: asynchronous calls come after the root, in the order they were made
            results.append(finish(self.run(*call)))
            if self.failure is not None:
                self.state = before
                return ("aborted", *self.failure)
        return "ok", results[0]

    async def run(self, function: Any, key: Any, args: tuple[Any, ...]) -> Any:
        try:
            result = function.body(OracleContext(self, function, key), *copy.deepcopy(args))
            return copy.deepcopy(await result if inspect.iscoroutine(result) else result)
        except BaseException as error:
            self.failure = self.failure or (type(error).__name__, str(error), function.full_name, key)
            raise


class OracleContext:
    def __init__(self, oracle: Oracle, function: Any, key: Any) -> None:
        self.oracle, self.key = oracle, key
        self.combine, self.entity = function.operator.combine, (function.operator.name, key)

    def get(self, default: Any = None) -> Any:
        return copy.deepcopy(self.oracle.state.get(self.entity, default))

    def put(self, value: Any) -> None:
        self.oracle.state[self.entity] = copy.deepcopy(value)

    def delete(self) -> None:
        self.oracle.state.pop(self.entity, None)

    def merge(self, delta: Any) -> None:
        self.put(self.combine(self.get(), copy.deepcopy(delta)) if self.entity in self.oracle.state else delta)

    def call(self, function: Any, key: Any, *args: Any) -> Any:
        return self.oracle.run(function, key, copy.deepcopy(args))

    def call_async(self, function: Any, key: Any, *args: Any) -> None:
        self.oracle.queue.append((function, key, copy.deepcopy(args)))


def finish(coroutine: Any) -> Any:
    """Nothing in it ever waits, so one `send` runs it to its end."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    except BaseException:
        return None  # its failure has been noted
    raise AssertionError("a function awaited something else than ctx.call")
