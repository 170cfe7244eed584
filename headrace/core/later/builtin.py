"""The operator that every app has: what is to happen later, as entities with state like any other.

A timer, and a message to the outside world, is an entity of `headrace`; its key is its id. It is set by a call of the
transaction that wants it, so it is there if and only if that transaction commits, in every mode; it is in snapshots and
replays because all state is. It ends by a row of the log that `core/later/deferred.py` adds: `fire` takes it away and
makes the call, in one transaction; if that aborts, all of it is undone, and the next row, `drop`, takes it away alone.

A schedule is an entity too, under its name: its state is the time at which it was last due.
"""

from __future__ import annotations

from headrace.model.context import Context
from headrace.model.operator import RESERVED, Operator

BUILT_IN = Operator(RESERVED)

TIMER, SEND = "timer", "send"


@BUILT_IN.register
def set(ctx: Context, kind, due_us, name, args, function, key) -> None:  # type: ignore[no-untyped-def]
    """A timer: call `function` of `key` with `args` when it is due. A message: perform the external `name` with `args`,
    then call `function` of `key` with what it gave."""
    ctx.put((kind, due_us, name, args, function, key))


@BUILT_IN.register
def drop(ctx: Context) -> bool:
    """It is not to happen, or not again. Was it there?"""
    is_there = ctx.get() is not None
    ctx.delete()
    return is_there


@BUILT_IN.register
def fire(ctx: Context, *given) -> bool:  # type: ignore[no-untyped-def]
    """It happens now, unless it was dropped by a transaction before this one. `given` comes before a timer's arguments
    and instead of a message's."""
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
    """A schedule is due, unless it has been already."""
    if due_us <= ctx.get(0):
        return False
    ctx.put(due_us)
    ctx.call_async(function, key, *args)
    return True


@BUILT_IN.register
def skip(ctx: Context, due_us: int) -> None:
    """What a schedule had to do at this time aborted: it waits for the next one."""
    ctx.put(max(due_us, ctx.get(0)))
