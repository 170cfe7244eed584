"""The reference: a loop over the log. Slow, plain, and so short that it can be seen to be right.

State is one dict; a transaction that fails gets the copy back that was made before it. Nothing of `headrace.core`.
With `values` it refuses what cannot be carried, and with limits it counts; without, it takes anything.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator
from typing import Any

from headrace.errors import BadCall, LimitReached
from headrace.wire.values import Values

Entity = tuple[str, Any]
Where = tuple[str, Any]  # function and key of a call


class Oracle:
    def __init__(self, values: Values | None = None, calls_max: int = 1 << 62, depth_max: int = 1 << 62) -> None:
        self.state: dict[Entity, Any] = {}  # values are replaced, never changed
        self.values, self.calls_max, self.depth_max = values, calls_max, depth_max
        self.tid = 0
        self.begin([])

    def begin(self, queue: list[tuple[Any, Any, tuple[Any, ...]]]) -> None:
        self.queue = queue
        self.calls = 0  # those that were awaited, and those in the queue behind the root
        self.unawaited: dict[OracleCall, None] = {}
        self.failure: tuple[str, str, str, Any] | None = None  # the first: type, message, function, key

    def transact(self, function: Any, key: Any, *args: Any) -> tuple[Any, ...]:
        """("ok", result), or ("aborted", type, message, function, key)."""
        before, results = dict(self.state), []
        self.tid += 1
        self.begin([(function, key, args)])
        for call in self.queue:  # which grows: asynchronous calls come after the root, in the order they were made
            results.append(finish(self.run(*call, 0, call is self.queue[0])))
            if self.failure is not None:
                break
        for forgotten in self.unawaited:
            where = forgotten.made_at
            self.fail(
                BadCall(f"{where[0]} made a ctx.call(...) that it did not await: await it, or use call_async"), where
            )
        if self.failure is not None:
            self.state = before
            return ("aborted", *self.failure)
        return "ok", results[0]

    async def run(self, function: Any, key: Any, args: tuple[Any, ...], depth: int, is_seen: bool) -> Any:
        where = (function.full_name, key)
        try:
            result = function.body(OracleContext(self, function, key, depth), *copy.deepcopy(args))
            result = await result if inspect.iscoroutine(result) else result
            return self.carry(result) if is_seen else None
        except BaseException as error:
            self.fail(error, where)
            raise

    def carry(self, value: Any) -> Any:
        if self.values is None:
            return copy.deepcopy(value)
        return self.values.unseal(self.values.seal(value))

    def count(self, where: Where) -> None:
        """One call more."""
        self.calls += 1
        if self.calls > self.calls_max:
            self.fail(LimitReached(f"more than {self.calls_max} calls in one transaction"), where)

    def fail(self, error: BaseException, where: Where) -> None:
        self.failure = self.failure or (type(error).__name__, str(error), *where)


class OracleCall:
    """A call that waits to be awaited."""

    def __init__(self, made_by: OracleContext, function: Any, key: Any, args: tuple[Any, ...]) -> None:
        self.made_by, self.made_at = made_by, made_by.where
        self.call = (function, key, args)
        made_by.oracle.unawaited[self] = None

    def __await__(self) -> Generator[Any, Any, Any]:
        oracle, depth = self.made_by.oracle, self.made_by.depth
        del oracle.unawaited[self]
        if depth >= oracle.depth_max:
            oracle.fail(LimitReached(f"calls nested deeper than {oracle.depth_max}"), self.made_at)
        oracle.count(self.made_at)
        if oracle.failure is not None:
            raise Undone
        return (yield from oracle.run(*self.call, depth + 1, True).__await__())


class Undone(BaseException):
    """What goes on after a failure is in vain."""


class OracleContext:
    def __init__(self, oracle: Oracle, function: Any, key: Any, depth: int) -> None:
        self.oracle, self.key, self.depth = oracle, key, depth
        self.where = (function.full_name, key)
        self.combine, self.entity = function.operator.combine, (function.operator.name, key)

    @property
    def tid(self) -> int:
        return self.oracle.tid

    def get(self, default: Any = None) -> Any:
        return copy.deepcopy(self.oracle.state.get(self.entity, default))

    def put(self, value: Any) -> None:
        self.oracle.state[self.entity] = self.oracle.carry(value)

    def delete(self) -> None:
        self.oracle.state.pop(self.entity, None)

    def merge(self, delta: Any) -> None:
        delta = self.oracle.carry(delta)
        self.put(self.combine(self.get(), delta) if self.entity in self.oracle.state else delta)

    def call(self, function: Any, key: Any, *args: Any) -> OracleCall:
        return OracleCall(self, function, key, copy.deepcopy(args))

    def call_async(self, function: Any, key: Any, *args: Any) -> None:
        self.oracle.count(self.where)
        if self.oracle.failure is not None:
            raise Undone
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
