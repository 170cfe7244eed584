"""Contexts: what a call may do, and the transaction it belongs to.

Rules:
1. A context holds its entity's state, sealed. Effects on other entities are only noted: calls in the transaction's
   queue, marks on the transaction. The executor does the rest.
2. Random numbers and ids derive from a call's path in its transaction, so only executors that track paths can give
   them. The plain serial mode does not track them: it gets `Untracked`, and a tracking executor reruns the
   transaction.

Never here: how and when calls run, other workers.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import msgspec

from headrace.core import order
from headrace.core.bindings import Binding, Bindings
from headrace.core.epoch import Epoch
from headrace.core.later.deferring import Deferring
from headrace.core.program import Program
from headrace.core.signature import Args
from headrace.errors import BadCall, ExternalFailed, HeadraceError, LimitReached, TooLarge
from headrace.model.chance import Chance, Random
from headrace.model.operator import Function
from headrace.wire.messages import Need
from headrace.wire.typed_values import Codec
from headrace.wire.values import HIGH, LOW, MISSING, Key, shown, size_of

NO_ASYNCIO = (
    "a function has no event loop, since a transaction waits for nothing but its own calls, one after the other. "
    "Instead of asyncio.sleep use ctx.call_later, instead of asyncio.gather await each ctx.call or use ctx.call_async, "
    "and for the outside world ctx.call_external"
)
UNAWAITED = "{} made a ctx.{}(...) that it did not await: await it, or use {}"
START = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Untracked(BaseException):
    """A signal: this run cannot give what was asked for. Also noted in the transaction: a function may catch it."""


class Transaction:
    """The running transaction. Reused: a serial worker has only one at a time."""

    __slots__ = (
        "bytes_left",
        "calls_left",
        "doom",
        "epoch",
        "is_marked",
        "limits",
        "needs",
        "queue",
        "unawaited",
        "undo",
    )

    def __init__(self, calls_max: int, bytes_max: int) -> None:
        self.limits = (calls_max, bytes_max)
        self.epoch: Epoch
        self.undo: list[tuple[Binding, Key, Any]] = []  # with the entity's earlier sealed state
        self.queue: list[Any] = []  # asynchronous calls, in the order they were made
        self.reset()

    def reset(self) -> None:
        self.calls_left, self.bytes_left = self.limits  # calls_left: without the queue, whose length counts too
        self.unawaited: dict[Awaitable | ExternalCall, None] = {}  # made but not awaited yet
        self.doom: Doom | None = None  # a limit was reached: it aborts, whatever the function does
        self.needs: Any = None  # what this run lacks (True: a call's path); if set, the run is void
        self.is_marked = False  # whether any of the above was touched (bytes_left: only by calls)

    def close(self) -> None:
        """End a marked transaction."""
        if self.needs is not None:
            raise Untracked
        for call in self.unawaited:
            error = BadCall(UNAWAITED.format(call.made_by._binding.name, *call.words))
            self.doom = self.doom or Doom(error, call.made_by._binding, call.made_at)
        if self.doom is not None:
            raise self.doom.error
        self.calls_left, self.bytes_left = self.limits  # nothing else was touched, or it is as it was
        self.is_marked = False


def dead_transaction() -> Transaction:
    """One for contexts of calls that have failed."""
    return Transaction(1 << 62, 1 << 62)


class Doom(NamedTuple):
    """Why a transaction must abort, and which call caused it."""

    error: HeadraceError
    binding: Binding
    key: Key


class Awaitable:
    """An awaited call: yielded to the executor, which answers with the result."""

    __slots__ = ("args", "binding", "key", "made_at", "made_by")
    words = ("call", "call_async")

    def __init__(self, made_by: SerialContext, binding: Binding, key: Key, args: Args) -> None:
        self.made_by, self.made_at = made_by, made_by.key
        self.binding, self.key, self.args = binding, key, args

    def __await__(self) -> Generator[Awaitable, Any, Any]:
        return (yield self)


class ExternalCall:
    """An awaited external call. It is answered at once if the response is known; otherwise the run is void."""

    __slots__ = ("args", "call", "made_at", "made_by", "name")
    words = ("call_external", "send_external")

    def __init__(self, made_by: TrackedContext, call: str, name: str, args: bytes) -> None:
        self.made_by, self.made_at = made_by, made_by.key
        self.call, self.name, self.args = call, name, args

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()
        return self.made_by.response_to(self)


class SerialContext(Deferring):
    """A call's access to its entity. The next call of the function reuses it, unless this one waits."""

    __slots__ = (
        "_binding",
        "_bindings",
        "_decode",
        "_functions",
        "_program",
        "_queue",
        "_quick",
        "_seal_state",
        "_state",
        "_transaction",
        "_values",
        "key",
    )

    def __init__(self, bindings: Bindings[Any], transaction: Transaction, binding: Binding) -> None:
        self._binding, self._bindings = binding, bindings
        self.key: Any = None
        self._state: Any = MISSING  # sealed
        self._transaction, self._queue = transaction, transaction.queue
        self._program, self._functions, self._values = bindings.program, bindings.functions, bindings.program.values
        codec = binding.codec
        self._quick, self._seal_state, self._decode = codec.quick, codec.seal, codec.decode

    @property
    def tid(self) -> int:
        epoch = self._transaction.epoch
        return epoch.tids[len(epoch.results)]

    @property
    def _now_us(self) -> int:
        return self._transaction.epoch.closed_us

    @property
    def now(self) -> datetime.datetime:
        return START + datetime.timedelta(microseconds=self._now_us)

    @property
    def _chance(self) -> Chance:
        raise self.void(True)

    @property
    def random(self) -> Random:
        return self._chance.random

    def uuid(self) -> uuid.UUID:
        return self._chance.uuid()

    def _new_id(self) -> str:
        return self._chance.id("later")

    def get(self, default: Any = None) -> Any:
        state = self._state
        if type(state) is bytes:
            if state is MISSING:
                return default
            try:
                return self._decode(state)
            except msgspec.DecodeError:  # not in the usual form of its type
                return self._values.decode(state)
        return state

    def put(self, value: Any) -> None:
        if type(value) is self._quick and value < HIGH and value > LOW:
            self._state = value
        else:
            self._state = self._seal(value)

    def delete(self) -> None:
        self._state = MISSING

    def _combine(self) -> Callable[[Any, Any], Any]:
        combine = self._binding.operator.combine
        if combine is None:
            raise BadCall(
                f"operator {self._binding.operator.name!r} has no combine, so {self._binding.name} cannot merge"
            )
        return combine

    def merge(self, delta: Any) -> None:
        combine = self._combine()
        delta = self._seal(delta)
        if self._state is not MISSING:
            unseal = self._values.unseal
            delta = self._seal(combine(unseal(self._state), unseal(delta)))
        self._state = delta

    def call(self, function: Function | str, key: Any, /, *args: Any, **kwargs: Any) -> Awaitable:
        if self._binding.is_plain:
            raise BadCall(f"{self._binding.name} is a plain def and cannot await: make it async def, or use call_async")
        if kwargs:
            args = self._bind(function, args, kwargs)
        binding = self._functions.get(function) if type(function) is Function else None
        if (
            binding is None
            or type(key) is not int
            or key >= HIGH
            or key <= LOW
            or not binding.fits(args)
            or (binding.placed is not None and key not in binding.placed)
        ):
            binding, key, args = self._admit(function, key, args)
        call = Awaitable(self, binding, key, args)
        self._transaction.is_marked = True
        self._transaction.unawaited[call] = None
        return call

    def call_async(self, function: Function | str, key: Any, /, *args: Any, **kwargs: Any) -> None:
        self.call_by_position(function, key, *(self._bind(function, args, kwargs) if kwargs else args))

    def call_by_position(self, function: Function | str, key: Any, /, *args: Any) -> None:
        """`call_async` without keyword arguments. (To take them costs every call a dict.)"""
        try:
            binding = self._functions[function]
            fits, kind = binding.fits, type(key)
            is_key = key < HIGH and key > LOW if kind is int else kind is str and key in binding.states
            if not is_key or not fits(args) or (binding.placed is not None and key not in binding.placed):
                binding, key, args = self._admit(function, key, args)
        except (KeyError, TypeError):
            binding, key, args = self._admit(function, key, args)
        queue = self._queue
        if len(queue) >= self._transaction.calls_left:
            raise self.doomed(too_many_calls(self._program))
        queue.append((binding, key, args))

    def call_external(self, name: str, /, *args: Any) -> ExternalCall:
        if self._binding.is_plain:
            raise BadCall(
                f"{self._binding.name} is a plain def and cannot await: make it async def, or use send_external"
            )
        self._check_external(name)
        try:
            packed = self._values.encode(args)
        except TooLarge as error:
            raise self.doomed(error) from None
        self._count(len(packed))
        return self._reach_out(name, packed)

    def _reach_out(self, name: str, args: bytes) -> ExternalCall:
        raise self.void(True)

    def _admit(self, function: Function | str, key: Any, args: Args) -> tuple[Binding, Key, Args]:
        """The slow path for a call: check everything, and report what is wrong."""
        entry = self._program.find(function)
        self._program.check_key(key, entry)
        if not entry.fits(args):
            try:
                entry, args = entry.admit(args)
            except TooLarge as error:
                raise self.doomed(error) from None
            self._count(sum(map(size_of, args)))
        return self._bindings.by_number[entry.number], key, args

    def _seal(self, value: Any) -> Any:
        try:
            sealed = self._seal_state(value)
        except TooLarge as error:
            raise self.doomed(error) from None
        transaction = self._transaction
        transaction.bytes_left -= len(sealed) if type(sealed) is bytes else size_of(sealed)
        if transaction.bytes_left < 0:
            raise self._too_much()
        return sealed

    def _count(self, size: int) -> None:
        transaction = self._transaction
        transaction.is_marked = True
        transaction.bytes_left -= size
        if transaction.bytes_left < 0:
            raise self._too_much()

    def _too_much(self) -> HeadraceError:
        limit = self._program.config.transaction_bytes_max
        size = limit - self._transaction.bytes_left
        return self.doomed(
            LimitReached(f"values of {size} bytes in one transaction; the limit is {limit} (transaction_bytes_max)")
        )

    def doomed(self, error: HeadraceError) -> HeadraceError:
        """A limit was reached: the transaction aborts with this error, even if the function catches it."""
        transaction = self._transaction
        transaction.is_marked = True
        transaction.doom = transaction.doom or Doom(error, self._binding, self.key)
        return transaction.doom.error

    def void(self, needs: Any) -> Untracked:
        """This run is void."""
        transaction = self._transaction
        transaction.is_marked = True
        transaction.needs = transaction.needs or needs
        return Untracked()

    def retire(self, dead: Transaction) -> None:
        """From now on, this context has no effect but on a transaction that nobody runs."""
        if dead.queue or dead.is_marked:
            dead.queue.clear()
            dead.reset()
        self._transaction, self._queue = dead, dead.queue


# `get` and `put` of an operator whose states are records. They do what those of SerialContext do, with the decoding,
# the check and the encoding in them: three calls less for each state that is read and written.
GET = """
def get(self, default=None):
    try:
        v = typed(self._state)
    except (DecodeError, TypeError):  # there is no state, or it has the other form
        return get_any(self, default)
"""
PUT = """
def put(self, v):
    try:
        if {test}:
            data = head + {written}
            transaction, size = self._transaction, len(data)
            if size <= bytes_max and size <= transaction.bytes_left{whole}:
                transaction.bytes_left -= size
                self._state = data
                return
    except FAILURES:
        pass
    put_any(self, v)
"""


def serial_context(codec: Codec) -> type[SerialContext]:
    """The class of contexts for an operator with this codec."""
    if codec.native is None or codec.type.is_immutable:  # of values that cannot change, the codec remembers the last
        return SerialContext
    put = codec.compile_natively(codec.native, PUT, "put", put_any=SerialContext.put)
    names = {"DecodeError": msgspec.DecodeError, "get_any": SerialContext.get}
    get = codec.native.compile_reading(GET, "get", **names)
    return type("RecordContext", (SerialContext,), {"__slots__": (), "get": get, "put": put})


def positional(kind: type[SerialContext]) -> type[SerialContext]:
    """The same class of contexts, for functions that make no call with keyword arguments."""
    return type(kind.__name__, (kind,), {"__slots__": (), "call_async": SerialContext.call_by_position})


class TrackedContext(SerialContext):
    """Knows the path of its call, numbers the calls it makes, and is never reused."""

    __slots__ = ("_drawn", "_made", "_path", "_paths")

    def __init__(
        self, bindings: Bindings[Any], transaction: Transaction, binding: Binding, path: bytes, paths: list[bytes]
    ) -> None:
        super().__init__(bindings, transaction, binding)
        self._path, self._made = path, 0
        self._paths = paths  # of the calls in the queue
        self._drawn: Chance | None = None

    @property
    def _chance(self) -> Chance:
        if self._drawn is None:
            self._drawn = Chance(self._bindings.state.seed, self.tid, self._path)
        return self._drawn

    def call_async(self, function: Function | str, key: Any, /, *args: Any, **kwargs: Any) -> None:
        super().call_async(function, key, *args, **kwargs)
        self._made += 1
        self._paths.append(order.path_sent(self._path, self._made))

    def path_of_awaited(self) -> bytes:
        """The path of the call that is awaited now."""
        self._made += 1
        return order.path_awaited(self._path, self._made)

    def _reach_out(self, name: str, args: bytes) -> ExternalCall:
        call = ExternalCall(self, self._chance.id("external"), name, args)
        self._transaction.unawaited[call] = None
        return call

    def response_to(self, call: ExternalCall) -> Any:
        transaction = self._transaction
        if call not in transaction.unawaited:
            raise BadCall(f"{self._binding.name} awaits a ctx.call_external(...) for the second time")
        del transaction.unawaited[call]
        if transaction.doom is not None:
            raise transaction.doom.error
        response = transaction.epoch.responses.get((self.tid, call.call))
        if response is None:
            raise self.void(Need(self.tid, call.call, call.name, call.args))
        if response.failure is not None:
            raise ExternalFailed(response.failure)
        return self._values.unseal(response.result)


class OrderedContext(SerialContext):
    """Notes whether the state was read, and keeps merges separate."""

    __slots__ = ("_deltas", "_drawn", "_order", "_read", "_time_of")

    _deltas: tuple[Any, ...] | None
    _read: bool
    _order: tuple[int, bytes]  # TID and place: a new tuple for each run of a call

    def __init__(
        self, bindings: Bindings[Any], transaction: Transaction, binding: Binding, time_of: Callable[[int], int]
    ) -> None:
        super().__init__(bindings, transaction, binding)
        self._read, self._deltas, self._order = False, (), (0, b"")
        self._drawn: tuple[Any, Chance] | None = None  # with the run that drew them
        self._time_of = time_of

    @property
    def tid(self) -> int:
        return self._order[0]

    @property
    def _now_us(self) -> int:
        return self._time_of(self._order[0])

    @property
    def _chance(self) -> Chance:
        if self._drawn is None or self._drawn[0] is not self._order:
            tid, place = self._order
            self._drawn = (self._order, Chance(self._bindings.state.seed, tid, order.path_of(place)))
        return self._drawn[1]

    def _reach_out(self, name: str, args: bytes) -> ExternalCall:
        raise self.doomed(BadCall("an external call is made by a transaction that runs alone"))

    def get(self, default: Any = None) -> Any:
        self._read = True
        state = self._state
        if type(state) is bytes:
            if state is MISSING:
                return default
            try:
                return self._decode(state)
            except msgspec.DecodeError:  # not in the usual form of its type
                return self._values.decode(state)
        return state

    def put(self, value: Any) -> None:
        if self._deltas:
            self._read = True  # whether a merge before it failed depends on the state
        self._deltas = None
        if type(value) is self._quick and value < HIGH and value > LOW:
            self._state = value
        else:
            self._state = self._seal(value)

    def delete(self) -> None:
        self._read |= bool(self._deltas)
        self._deltas = None
        self._state = MISSING

    def _seal(self, value: Any) -> Any:
        self._transaction.is_marked = True  # what it puts is added to what the transaction puts on other workers
        return super()._seal(value)

    def merge(self, delta: Any) -> None:
        try:
            super().merge(delta)
        except BaseException:
            self._read = True  # whether it fails depends on the state
            raise
        if self._deltas is not None and not self._read:
            self._deltas = (*self._deltas, self._seal_state(delta))


def too_many_calls(program: Program) -> LimitReached:
    return LimitReached(f"more than {program.config.calls_max} calls in one transaction (calls_max)")


def too_deep(depth_max: int) -> LimitReached:
    return LimitReached(f"calls nested deeper than {depth_max} (depth_max)")


def cannot_await(name: str, awaited: Any) -> BadCall:
    return BadCall(f"{name} awaits {shown(awaited)}; it may await its own ctx.call(...), once: {NO_ASYNCIO}")
