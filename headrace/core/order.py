"""The order inside a transaction: the place of each call, and of each part of a call that awaits others.

A *place* is a byte string. Places compare as their calls are ordered when the transaction runs alone. A TID and a place
give the position of a call in the order of everything.

Rules:
1. Asynchronous calls run after the root, as one queue, in the order they were made. So a place begins with the
   generation (0 for the root, 1 for what it sends, ...), then the call that sent it, and so on.
2. A frame numbers all calls it makes, awaited or not, with one counter. An awaited call runs inside its caller: its
   place is the caller's place, the number, and the worker that makes it.
3. What a frame does after an awaited call comes after everything that the call did.
4. A *path* is a place without the workers: it is the same in every mode, with any number of workers.

Never here: keys, state, what a call does.
"""

from __future__ import annotations

END = b"\x00"  # ends one hop; lower than any number, so that shorter paths come first
AFTER = b"\xff"  # higher than any number
ROOT = b"\x01"  # generation 0, which is written as 1: no number is 0


def number(n: int) -> bytes:
    """Encode a number from 1 on; the bytes compare as the numbers do."""
    if n < 0xF0:
        return bytes((n,))
    size = (n.bit_length() + 7) // 8
    return bytes((0xF0 + size,)) + n.to_bytes(size, "big")


SMALL = [number(n) if n else b"" for n in range(256)]


def awaited(place: bytes, n: int, worker: int) -> bytes:
    """The place of the n-th call that is made at `place`, if it is awaited. `worker` makes it: during a repair, two
    workers may have made it, and one of them will cancel it."""
    if n < 256 and worker < 256:
        return place + SMALL[n] + SMALL[worker]
    return place + number(n) + number(worker)


def after(place: bytes, n: int) -> bytes:
    """Where a frame continues when its n-th call has been answered."""
    return place + (SMALL[n] if n < 256 else number(n)) + AFTER


def sent(place: bytes, n: int, worker: int) -> bytes:
    """The place of the n-th call made at `place`, if it is one-way: one generation later."""
    if place is ROOT and n < 256 and worker < 256:
        return b"\x02" + SMALL[n] + SMALL[worker] + END
    generation, at = read_number(place, 0)
    return number(generation + 1) + place[at:] + number(n) + number(worker) + END


def read_number(place: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where the next one begins."""
    first = place[at]
    if first < 0xF0:
        return first, at + 1
    size = first - 0xF0
    return int.from_bytes(place[at + 1 : at + 1 + size], "big"), at + 1 + size


def path_of(place: bytes) -> bytes:
    """The place without the workers."""
    if place is ROOT:
        return place
    generation, at = read_number(place, 0)
    path = number(generation)
    while at < len(place):
        if place[at] == END[0]:
            path += END
            at += 1
        else:
            n, at = read_number(place, at)
            path += number(n)
            _, at = read_number(place, at)
    return path


def path_awaited(path: bytes, n: int) -> bytes:
    """The path of the n-th call that is made at `path`, if it is awaited."""
    return path + number(n)


def path_sent(path: bytes, n: int) -> bytes:
    """The same if it is one-way."""
    generation, at = read_number(path, 0)
    return number(generation + 1) + path[at:] + number(n) + END
