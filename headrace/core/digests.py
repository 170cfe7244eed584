"""Digests of what an epoch wrote: two runs with the same digest have written the same.

There are two kinds, since each executor can make only one of them without much work:

    SERIAL  all writes that changed a value, in the order of the log. The serial mode makes it.
    NET     a sum over all entities that have another state at the epoch's end than at its start: the order does not
            matter, and workers can add up theirs. The ordered mode makes it; the serial mode can, in a replay.

Rules:
1. A digest follows from the log, and from nothing else: not from which object holds a value, from calls that were tried
   and undone, or from the number of workers.
2. Digests of different kinds cannot be compared.

Never here: when a digest is taken, what happens if it differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.core.epoch_changes import Changes
from headrace.wire.values import Key, same

SERIAL, NET = b"s", b"n"  # the first byte of a digest says of which kind it is
SERIAL_BYTES, NET_BYTES = 16, 8
NET_MODULUS = 1 << 8 * NET_BYTES
UNCHANGED: Any = object()  # instead of the new state: a write that did not change the value
NOT_FINITE = (b"\xcb\x7f", b"\xcb\xff")  # how msgpack begins a float that is not a number, and some others
Writes = tuple[list[Key], list[Any]]  # the keys, and the new sealed states

_encode = msgspec.msgpack.Encoder().encode


def serial_digest(written: Iterable[tuple[str, Writes]]) -> bytes:
    """Of the writes of each operator, in order. The operators are sorted."""
    digest = hashlib.blake2b(digest_size=SERIAL_BYTES)
    for name, writes in written:
        data = _encoded(*writes)
        if data:
            digest.update(_encode((name, len(data))))
            digest.update(data)
    return SERIAL + digest.digest()


def _encoded(keys: list[Key], news: list[Any]) -> bytes:
    """Floats that are not a number are left out: whether one replaces another cannot be seen."""
    try:
        data = _encode((keys, news))
        if NOT_FINITE[0] not in data and NOT_FINITE[1] not in data:
            return data
    except TypeError:  # of UNCHANGED
        pass
    kept = [at for at, state in enumerate(news) if state is not UNCHANGED and state == state]
    return _encode(([keys[at] for at in kept], [news[at] for at in kept])) if kept else b""


def net_sum(changes: Changes) -> int:
    """Of these entities. Sums of disjoint sets of entities can be added."""
    total = 0
    for name, (keys, befores, afters) in changes.items():
        for key, before, after in zip(keys, befores, afters, strict=True):
            if not same(before, after):
                data = hashlib.blake2b(_encode((name, key, after)), digest_size=NET_BYTES).digest()
                total += int.from_bytes(data, "little")
    return total % NET_MODULUS


def net_digest(sums: Iterable[int]) -> bytes:
    return NET + (sum(sums) % NET_MODULUS).to_bytes(NET_BYTES, "little")


def is_comparable(one: bytes | None, other: bytes | None) -> bool:
    return one is not None and other is not None and one[:1] == other[:1]
