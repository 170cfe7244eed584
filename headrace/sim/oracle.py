"""The reference: a loop over the log. It is slow, plain, and so short that one can see that it is right.

State is one dict; after a failed transaction the copy from before it is restored. It uses nothing of `headrace.core`
except the functions of the built-in operator. With `values` it refuses values that cannot be encoded, and with limits
it counts calls; without them, it accepts anything. Set `now_us` before a transaction to the time of its epoch; with an
`app`, functions are also found by name, and `respond(call, name, args)` returns the response to an external call: a
result, and None or the reason why there is none.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import random
import uuid
from collections.abc import Callable, Generator
from typing import Any

from headrace.core.later import builtin
from headrace.errors import BadCall, ExternalFailed, LimitReached
from headrace.model.app import App
from headrace.model.chance import Chance
from headrace.wire.values import Values

Entity = tuple[str, Any]
Where = tuple[str, Any]  # function and key of a call
Hops = tuple[tuple[int, bool], ...]  # the path to a call: the number of each call on it, and whether it is one-way


class Oracle:
    def __init__(
        self,
        values: Values | None = None,
        calls_max: int = 1 << 62,
        depth_max: int = 1 << 62,
        *,
        app: App | None = None,
        seed: int = 0,
        respond: Callable[[str, str, tuple[Any, ...]], tuple[Any, str | None]] | None = None,
    ) -> None:
        self.state: dict[Entity, Any] = {}  # values are replaced, never changed
        self.written: dict[Entity, int] = {}  # when states with a time to live were written
        self.values, self.calls_max, self.depth_max = values, calls_max, depth_max
        self.app, self.seed, self.respond = app, seed, respond
        self.tid = self.now_us = 0
        self.begin([])

    def begin(self, queue: list[tuple[Any, Any, tuple[Any, ...], Hops]]) -> None:
        self.queue = queue
        self.calls = 0  # those that were awaited, and those in the queue after the root
        self.unawaited: dict[OracleCall | OracleExternal, None] = {}
        self.failure: tuple[str, str, str, Any] | None = None  # the first: type, message, function, key

    def transact(self, function: Any, key: Any, *args: Any) -> tuple[Any, ...]:
        """("ok", result), or ("aborted", type, message, function, key)."""
        before, written, results = dict(self.state), dict(self.written), []
        self.tid += 1
        self.begin([(self.find(function), key, args, ())])
        for call in self.queue:  # which grows: asynchronous calls come after the root, in the order they were made
            results.append(finish(self.run(*call, 0, call is self.queue[0])))
            if self.failure is not None:
                break
        for forgotten in self.unawaited:
            where = forgotten.made_at
            verb, instead = forgotten.words
            why = f"{where[0]} made a ctx.{verb}(...) that it did not await: await it, or use {instead}"
            self.fail(BadCall(why), where)
        if self.failure is not None:
            self.state, self.written = before, written
            return ("aborted", *self.failure)
        return "ok", results[0]

    def find(self, function: Any) -> Any:
        if type(function) is not str:
            return function
        assert self.app is not None
        operator, _, name = function.partition(".")
        return self.app.operators[operator].functions[name]

    async def run(self, function: Any, key: Any, args: tuple[Any, ...], hops: Hops, depth: int, is_seen: bool) -> Any:
        where = (function.full_name, key)
        try:
            context = self.context_of(function, key, hops, depth)
            result = function.by_position(context, *copied(args))
            result = await result if inspect.iscoroutine(result) else result
            return self.carry_result(function, result) if is_seen else None
        except BaseException as error:
            self.fail(error, where)
            raise

    def context_of(self, function: Any, key: Any, hops: Hops, depth: int) -> OracleContext:
        return OracleContext(self, function, key, hops, depth)

    def carry_result(self, function: Any, result: Any) -> Any:
        return self.carry(result)

    def visible(self, now_us: int, app: App) -> dict[Entity, Any]:
        """The state, without what has expired but is not deleted yet."""
        lives = {name: operator.ttl_us for name, operator in app.operators.items() if operator.ttl_us is not None}
        return {
            entity: state
            for entity, state in self.state.items()
            if entity[0] not in lives or now_us < self.written[entity] + lives[entity[0]]
        }

    def carry(self, value: Any) -> Any:
        if self.values is None:
            return copied(value)
        return self.values.unseal(self.values.seal(value))

    def count(self, where: Where) -> None:
        """Counts one more call."""
        self.calls += 1
        if self.calls > self.calls_max:
            self.fail(LimitReached(f"more than {self.calls_max} calls in one transaction (calls_max)"), where)

    def fail(self, error: BaseException, where: Where) -> None:
        self.failure = self.failure or (type(error).__name__, str(error), *where)


class OracleCall:
    """A call that is not awaited yet."""

    words = ("call", "call_async")

    def __init__(self, made_by: OracleContext, function: Any, key: Any, args: tuple[Any, ...]) -> None:
        self.made_by, self.made_at = made_by, made_by.where
        self.call = (made_by.oracle.find(function), key, args)
        made_by.oracle.unawaited[self] = None

    def __await__(self) -> Generator[Any, Any, Any]:
        oracle, depth = self.made_by.oracle, self.made_by.depth
        del oracle.unawaited[self]
        if depth >= oracle.depth_max:
            oracle.fail(LimitReached(f"calls nested deeper than {oracle.depth_max} (depth_max)"), self.made_at)
        oracle.count(self.made_at)
        if oracle.failure is not None:
            raise Undone
        return (yield from oracle.run(*self.call, self.made_by.hop(False), depth + 1, True).__await__())


class OracleExternal:
    words = ("call_external", "send_external")

    def __init__(self, made_by: OracleContext, name: str, args: tuple[Any, ...]) -> None:
        self.made_by, self.made_at, self.name, self.args = made_by, made_by.where, name, args
        self.call = made_by.chance.id("external")
        made_by.oracle.unawaited[self] = None

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()
        oracle = self.made_by.oracle
        del oracle.unawaited[self]
        if oracle.failure is not None:
            raise Undone
        assert oracle.respond is not None
        result, failure = oracle.respond(self.call, self.name, copied(self.args))
        if failure is not None:
            raise ExternalFailed(failure)
        return copied(result)


ATOMS = frozenset((int, bool, float, str, bytes, type(None)))  # immutable


def copied(value: Any) -> Any:
    if type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value))):
        return value
    return copy.deepcopy(value)


class Undone(BaseException):
    """Stops a function after the transaction has failed."""


class OracleContext:
    def __init__(self, oracle: Oracle, function: Any, key: Any, hops: Hops, depth: int) -> None:
        self.oracle, self.key, self.hops, self.depth = oracle, key, hops, depth
        self.function = function
        self.made = 0  # calls
        self.where = (function.full_name, key)
        self.combine, self.entity = function.operator.combine, (function.operator.name, key)
        self.ttl_us = function.operator.ttl_us
        self.chance = Chance(oracle.seed, oracle.tid, path(hops))

    def hop(self, is_one_way: bool) -> Hops:
        self.made += 1
        return (*self.hops, (self.made, is_one_way))

    @property
    def tid(self) -> int:
        return self.oracle.tid

    @property
    def now(self) -> datetime.datetime:
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=self.oracle.now_us)

    @property
    def random(self) -> random.Random:
        return self.chance.random

    def uuid(self) -> uuid.UUID:
        return self.chance.uuid()

    def is_there(self) -> bool:
        if self.entity not in self.oracle.state:
            return False
        return self.ttl_us is None or self.oracle.now_us < self.oracle.written[self.entity] + self.ttl_us

    def get(self, default: Any = None) -> Any:
        return copied(self.oracle.state[self.entity] if self.is_there() else default)

    def put(self, value: Any) -> None:
        self.oracle.state[self.entity] = self.carry(value)
        if self.ttl_us is not None:
            self.oracle.written[self.entity] = self.oracle.now_us

    def carry(self, state: Any) -> Any:
        return self.oracle.carry(state)

    def expire(self) -> bool:
        is_over = self.entity in self.oracle.state and not self.is_there()
        if is_over:
            self.delete()
        return is_over

    def delete(self) -> None:
        self.oracle.state.pop(self.entity, None)

    def merge(self, delta: Any) -> None:
        delta = self.carry(delta)
        self.put(self.combine(self.get(), delta) if self.is_there() else delta)

    def call(self, function: Any, key: Any, /, *args: Any) -> OracleCall:
        return OracleCall(self, function, key, copied(args))

    def call_async(self, function: Any, key: Any, /, *args: Any) -> None:
        self.oracle.count(self.where)
        if self.oracle.failure is not None:
            raise Undone
        self.oracle.queue.append((self.oracle.find(function), key, copied(args), self.hop(True)))

    def call_later(self, delay: Any, function: Any, key: Any, /, *args: Any) -> str:
        seconds = delay if isinstance(delay, datetime.timedelta) else datetime.timedelta(seconds=delay)
        due_us = self.oracle.now_us + seconds // datetime.timedelta(microseconds=1)
        timer = self.chance.id("later")
        name = self.oracle.find(function).full_name
        self.call_async(builtin.set, timer, builtin.TIMER, due_us, None, args, name, key)
        return timer

    def cancel(self, timer: str) -> None:
        self.call_async(builtin.drop, timer)

    def call_external(self, name: str, *args: Any) -> OracleExternal:
        return OracleExternal(self, name, copied(args))

    def send_external(self, name: str, *args: Any, then: Any = None, key: Any = None) -> str:
        function = None if then is None else self.oracle.find(then).full_name
        message = self.chance.id("later")
        of = self.key if key is None else key
        self.call_async(builtin.set, message, builtin.SEND, 0, name, args, function, of)
        return message


def path(hops: Hops) -> bytes:
    """The number of one-way calls on the path, plus one; then the number of each call on it, one-way ones marked."""
    one_way = sum(is_one_way for _, is_one_way in hops)
    return number(1 + one_way) + b"".join(number(n) + b"\x00" * is_one_way for n, is_one_way in hops)


def number(n: int) -> bytes:
    size = (n.bit_length() + 7) // 8
    return bytes((n,)) if n < 0xF0 else bytes((0xF0 + size,)) + n.to_bytes(size, "big")


def finish(coroutine: Any) -> Any:
    """The coroutine never really waits, so one `send` runs it to its end."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    except BaseException:
        return None  # the failure is recorded already
    raise AssertionError("a function awaited something else than ctx.call")
