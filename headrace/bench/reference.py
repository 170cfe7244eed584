"""What the engine is measured against: the same functions in a bare loop over a dict, with undo and nothing else.

No requests, ids, replies, checks, limits or isolation. It is what one would write by hand in an afternoon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MISSING = object()


class BareContext:
    __slots__ = ("key", "queue", "state", "undo")

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state, self.key = state, None
        self.undo: list[tuple[Any, Any]] = []
        self.queue: list[tuple[Callable[..., Any], Any, tuple[Any, ...]]] = []

    def get(self, default: Any = None) -> Any:
        return self.state.get(self.key, default)

    def put(self, value: Any) -> None:
        self.undo.append((self.key, self.state.get(self.key, MISSING)))
        self.state[self.key] = value

    def call_async(self, function: Any, key: Any, *args: Any) -> None:
        self.queue.append((function.body, key, args))

    def roll_back(self) -> None:
        for key, before in reversed(self.undo):
            if before is MISSING:
                del self.state[key]
            else:
                self.state[key] = before


Work = Sequence[tuple[Callable[..., Any], Any, tuple[Any, ...]]]


def run_plain(state: dict[Any, Any], calls: Work) -> list[Any]:
    """Plain functions."""
    context = BareContext(state)
    undo, queue, results = context.undo, context.queue, []
    for body, key, args in calls:
        try:
            context.key = key
            result = body(context, *args)
            for body, key, args in queue:
                context.key = key
                body(context, *args)
            results.append(result)
        except Exception as error:
            context.roll_back()
            results.append(error)
        undo.clear()
        queue.clear()
    return results


def run_coroutines(state: dict[Any, Any], calls: Work) -> list[Any]:
    """`async def` functions that await nothing, driven by `send`."""
    context = BareContext(state)
    undo, queue, results = context.undo, context.queue, []
    for body, key, args in calls:
        try:
            context.key = key
            try:
                body(context, *args).send(None)
            except StopIteration as stop:
                result = stop.value
            for body, key, args in queue:
                context.key = key
                try:
                    body(context, *args).send(None)
                except StopIteration:
                    continue
            results.append(result)
        except Exception as error:
            context.roll_back()
            results.append(error)
        undo.clear()
        queue.clear()
    return results
