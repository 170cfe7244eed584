"""The operator that every app has: what happens later, as entities with state like any other.

A timer, or a message to the outside world, is an entity of `headrace`; its key is its id. A call of the transaction
that wants it sets it, so it exists if and only if that transaction commits, in every mode. It is in snapshots and
replays because all state is. A row of the log that `core/later/deferred.py` adds ends it: `fire` removes it and makes
the call, in one transaction. If that aborts, everything is undone, and the next row, `drop`, only removes it.

A schedule is also an entity, under its name: its state is the time at which it was last due.
"""

from __future__ import annotations

from headrace.model.context import Context
from headrace.model.operator import RESERVED, Operator

BUILT_IN = Operator(RESERVED)

TIMER, SEND = "timer", "send"


@BUILT_IN.register
def set(ctx: Context, kind, due_us, name, args, function, key) -> None:  # type: ignore[no-untyped-def]
    """A timer: call `function` of `key` with `args` when it is due. A message: call the external `name` with `args`,
    then call `function` of `key` with its response."""
    ctx.put((kind, due_us, name, args, function, key))


@BUILT_IN.register
def drop(ctx: Context) -> bool:
    """Remove it: cancelled, or its call aborted. Was it there?"""
    is_there = ctx.get() is not None
    ctx.delete()
    return is_there


@BUILT_IN.register
def fire(ctx: Context, *given) -> bool:  # type: ignore[no-untyped-def]
    """Remove it and make its call, unless an earlier transaction dropped it. `given` has the arguments of a message's
    call; a timer has its own."""
    found = ctx.get()
    if found is None:
        return False
    ctx.delete()
    kind, _, _, args, function, key = found
    if function is not None:
        ctx.call_async(function, key, *(given if kind == SEND else args))
    return True


@BUILT_IN.register
def tick(ctx: Context, due_us: int, function, key, args) -> bool:  # type: ignore[no-untyped-def]
    """Make a schedule's call, unless it was already made for this time."""
    if due_us <= ctx.get(0):
        return False
    ctx.put(due_us)
    ctx.call_async(function, key, *args)
    return True


@BUILT_IN.register
def skip(ctx: Context, due_us: int) -> None:
    """A schedule's call at this time aborted: it waits for the next time."""
    ctx.put(max(due_us, ctx.get(0)))
