"""Chains: for each entity, the calls of the unfinished epochs in the order of everything, with what each saw and left.

A record is read record and version in one. A chain is a list: the value before all of it, then its records by order,
which is (TID, place). `Call` is the record of a call's first part; a `Segment` is that of a part after an await.

Rules:
1. A record sees what its own transaction left on the entity, else what the newest transaction below left that did not
   abort.
2. Two values are the same if they are the same bytes: 1, 1.0 and True differ, a NaN equals itself.

Never here: how calls run, messages, workers.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from headrace.core.program import Args, Entry
from headrace.wire.messages import Failure
from headrace.wire.values import Key

Order = tuple[int, bytes]
Chain = list[Any]  # [base value, record, record, ...]

order_of = attrgetter("order")
encode = msgspec.msgpack.Encoder().encode

NOT_YET: Any = object()  # no result so far
NOTHING: Any = MappingProxyType({})  # stands for a dict that most never need


Caller = tuple[int, int, int, int]
"""Who awaits a call: on which worker, how long its place is, how many wait in all, and which try this is."""


class Call:
    """A call of a transaction, on the worker that owns its entity. Most calls run once, in their turn: what only others
    need has its default in the class."""

    __slots__ = ("__dict__", "args", "caller", "entry", "key", "made", "new", "order", "read", "result", "seen")

    deltas: tuple[Any, ...] = ()  # it only merged these: `new` follows from them and what it saw
    failure: Failure | None = None
    failed_at = b""
    frame: Frame | None = None  # of a coroutine that has awaited something
    answered: Any = NOT_YET  # what the caller was told
    is_linked = False  # is it in its entity's chain?
    is_queued = False  # is it going to be looked at?
    is_gone = False
    must_run = True

    def __init__(self, order: Order, entry: Entry, key: Key, args: Args) -> None:
        self.order, self.entry, self.key, self.args = order, entry, key, args
        self.caller: Caller | None = None  # if somebody awaits it
        self.seen: Any = None  # the entity's sealed state before
        self.new: Any = None  # and after
        self.read = True  # whether what it saw matters
        self.result: Any = NOT_YET
        self.made: Any = None  # the calls it made that are under way: by number; in a list if all are one-way

    @property
    def call(self) -> Call:
        return self


class Ran(Call):
    """A call that ran at once, when it was the last of its chain."""

    __slots__ = ()

    is_linked = True
    must_run = False

    def __init__(
        self, order: Order, entry: Entry, key: Key, args: Args, seen: Any, new: Any, read: bool, result: Any
    ) -> None:
        self.order, self.entry, self.key, self.args = order, entry, key, args
        self.seen, self.new, self.read, self.result = seen, new, read, result
        self.caller = self.made = None


class Segment:
    """What a call does after an await."""

    __slots__ = ("call", "deltas", "is_gone", "is_linked", "is_queued", "new", "order", "read", "seen")

    def __init__(self, order: Order, call: Call) -> None:
        self.order, self.call = order, call
        self.seen: Any = None
        self.new: Any = None
        self.deltas: tuple[Any, ...] = ()
        self.read = True
        self.is_linked = self.is_queued = self.is_gone = False


Record = Call | Segment
Made = tuple[bool, Entry, Key, Args]  # is it awaited?


class Frame:
    """A coroutine's run: what it awaited and was told, and where it stands."""

    __slots__ = (
        "answers",
        "attempts",
        "awaited",
        "context",
        "coroutine",
        "is_running",
        "queue",
        "segments",
        "unawaited",
        "waits_for",
    )

    def __init__(self) -> None:
        self.awaited: dict[int, None] = {}  # the numbers of the calls it awaited so far
        self.answers: dict[int, Any] = {}  # by the call's number; sealed
        self.attempts: dict[int, int] = NOTHING  # the right answer's, for calls made anew; else 1
        self.segments: dict[int, Segment] = NOTHING  # what it did after the answer to the call with this number
        self.coroutine: Any = None  # while it waits
        self.context: Any = None
        self.queue: list[Any] | None = None
        self.unawaited = NOTHING
        self.waits_for = 0
        self.is_running = False

    def attempt(self, n: int) -> int:
        return self.attempts.get(n, 1)

    def make_again(self, n: int) -> None:
        """The call with this number is made once more: answers to earlier tries do not count."""
        self.attempts = {**self.attempts, n: self.attempt(n) + 1}


def chain_of(call: Call) -> Chain:
    """The chain of a call's entity, which holds it. (A record that is alone stands there without a list.)"""
    chain = call.entry.chains[call.key]
    if type(chain) is not list:
        chain = call.entry.chains[call.key] = [chain.seen, chain]
    return chain


def locate(chain: Chain, order: Order) -> int:
    """Where a record of this order is, or would be."""
    return bisect_left(chain, order, 1, key=order_of)


def value_before(chain: Chain, at: int, tid: int, aborted: set[int]) -> Any:
    """What transaction `tid` sees at this index."""
    while at > 1:
        at -= 1
        record = chain[at]
        writer = record.order[0]
        if writer == tid or writer not in aborted:
            return record.new
    return chain[0]


def same(one: Any, other: Any) -> bool:
    """Of two sealed values."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return encode(one) == encode(other)
    return bool(one == other)


def same_args(one: Args, other: Args) -> bool:
    return one is other or (len(one) == len(other) and all(map(same, one, other)))


def same_call(one: Made, other: Made) -> bool:
    return same_target(one, other) and same_args(one[3], other[3])


def same_target(one: Made, other: Made) -> bool:
    """Calls of the same kind, function and entity: another one in its place needs only other arguments."""
    return one[0] == other[0] and one[1] is other[1] and type(one[2]) is type(other[2]) and one[2] == other[2]
