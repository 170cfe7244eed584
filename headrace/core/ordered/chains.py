"""Chains: for each entity, the calls of unfinished epochs in order, with the state that each call read and wrote.

A record is both a read record and a version. A chain is a list: the value before all records, then the records by
order, which is (TID, place). `Call` is the record of a call's first part; `Continuation` that of a part after an await.

Rule: a record sees what its own transaction left on the entity; otherwise, what the newest transaction below it left
that did not abort.

Never here: how calls run, messages, workers.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from headrace.core.bindings import Binding
from headrace.core.program import Entry, Program
from headrace.core.signature import Args
from headrace.core.state import Table
from headrace.wire.messages import Failure
from headrace.wire.values import Key, same

Order = tuple[int, bytes]
Chain = list[Any]  # [base value, record, record, ...]

order_of = attrgetter("order")

NOT_YET: Any = object()  # no result yet
NOTHING: Any = MappingProxyType({})  # an empty dict, which most records never replace


class OrderedBinding(Binding):
    """A function as the ordered mode runs it."""

    __slots__ = ("chains", "lessons", "owners")

    def __init__(self, entry: Entry, table: Table, program: Program, chains: dict[Key, Any]) -> None:
        super().__init__(entry, table, program)
        self.chains = chains  # of the operator's entities
        self.owners: dict[Key, int] = {}  # the known workers of its keys
        self.lessons: Any = None  # what is being learned about its calls


Caller = tuple[int, int, int, int]
"""The caller that awaits a call: its worker, the length of its place, the depth of waiting callers, and the try."""

PREDICTED = 1  # the try of predicted calls: both sides know it without a message


class Call(msgspec.Struct, eq=False):
    """A call of a transaction, on the worker that owns its entity. A struct, because millions are made; the defaults
    are those of a call that ran in its turn and is done."""

    order: Order
    binding: OrderedBinding
    key: Key
    args: Args
    seen: Any = None  # the entity's sealed state before
    new: Any = None  # and after
    read: bool = True  # whether what it saw matters
    result: Any = NOT_YET
    made: Any = None  # its calls under way, by number; a list if all are one-way
    caller: Caller | None = None  # if it is awaited
    frame: AwaitFrame | None = None  # of a coroutine that has awaited something
    deltas: tuple[Any, ...] = ()  # if it only merged: `new` follows from these and `seen`
    failure: Failure | None = None
    failed_at: bytes = b""
    answered: Any = NOT_YET  # the answer that was sent to the caller
    is_linked: bool = True  # is it in its entity's chain?
    is_queued: bool = False  # is it in the heap?
    is_gone: bool = False
    must_run: bool = False

    @property
    def call(self) -> Call:
        return self


def new_call(order: Order, binding: OrderedBinding, key: Key, args: Args) -> Call:
    """A call that has not run and is not in a chain."""
    return Call(order, binding, key, args, is_linked=False, must_run=True)


class Continuation(msgspec.Struct, eq=False):
    """What a call does after an await."""

    order: Order
    call: Call
    seen: Any = None
    new: Any = None
    read: bool = True
    deltas: tuple[Any, ...] = ()
    is_linked: bool = False
    is_queued: bool = False
    is_gone: bool = False


Record = Call | Continuation
Made = tuple[bool, OrderedBinding, Key, Args]  # is it awaited?


class AwaitFrame(msgspec.Struct, eq=False):
    """A coroutine's run: what it awaited, the answers, and where it is. `first` and `attempts` say which answers count.
    A try's number is unique, also among earlier calls at this place."""

    first: int  # the try of each awaited call, unless `attempts` has another
    awaited: int = 0  # which calls it awaited so far: bit n is that of call number n
    answers: dict[int, Any] = {}  # by the call's number; sealed
    attempts: dict[int, int] = NOTHING  # of calls that were made again, or cancelled
    segments: dict[int, Continuation] = NOTHING  # what it did after the answer to this call number
    coroutine: Any = None  # while it waits
    context: Any = None
    queue: list[Any] | None = None
    unawaited: Any = NOTHING
    waits_for: int = 0
    is_running: bool = False

    def attempt(self, n: int) -> int:
        return self.attempts.get(n, self.first)

    def renew(self, n: int, number: int) -> None:
        """The call is made again, or cancelled: from now on, only answers to the try with this number count."""
        self.answers.pop(n, None)
        self.attempts = {**self.attempts, n: number}


def chain_of(call: Call) -> Chain:
    """The chain of a call's entity, which holds it. (A single record is stored without a list.)"""
    chain = call.binding.chains[call.key]
    if type(chain) is not list:
        chain = call.binding.chains[call.key] = [chain.seen, chain]
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


def same_args(one: Args, other: Args) -> bool:
    return one is other or (len(one) == len(other) and all(map(same, one, other)))


def same_call(one: Made, other: Made) -> bool:
    return same_target(one, other) and same_args(one[3], other[3])


def same_target(one: Made, other: Made) -> bool:
    """Calls of the same kind, function and entity: replacing one changes only the arguments."""
    return one[0] == other[0] and one[1] is other[1] and type(one[2]) is type(other[2]) and one[2] == other[2]
