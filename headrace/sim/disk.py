"""The disk: a store in memory that loses data, fails, fills up and lies as real disks do.

A `Disk` is the machine's disk; a `SimStore` is one process's handle of it, with the interface of every store. A
coordinator that woke up too late and its successor have two handles of one disk.

Rules:
1. Readers see what was written (the page cache); only what was synced survives a loss of power. Of the rest anything
   may remain: all, nothing, a part cut at any byte, or one with holes. A killed process loses nothing but what it had
   not written yet.
2. A failed sync may have worked, fully or in part; or the pages are marked clean though they are not on disk: then the
   next sync succeeds, and the bytes are gone when power is lost.
3. Objects are put whole or not at all. In a store of objects a failed request may have been done, or be done later.
4. A bit flips only while it is read: reading again gives the right data.
5. Before each operation the world may stop the process: it is paused there while others run, or it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import ObjectMissing, StoreError, StoreFull

BEFORE, MIDDLE, AFTER = "before", "middle", "after"  # where in an operation a process dies
RIGHT_READS = 3  # how many correct reads follow a wrong one
NEEDS_ROOM = frozenset(("append", "put", "create"))


class Crashed(BaseException):
    """The process is dead. None of its code may run any more, so only the world may catch this."""


@dataclasses.dataclass(frozen=True)
class DiskFaults:
    """Probabilities per operation; 0 if a class of faults is off."""

    errors: float = 0.0  # the operation fails; a store of objects may have done it, or do it later
    sync_errors: float = 0.0
    flips: float = 0.0  # of a bit, on a read
    splits: float = 0.0  # of a write that others may see half done


class DiskFile:
    """One file, or one object."""

    __slots__ = ("data", "dropped", "synced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = len(data)  # objects are durable when created; appended bytes only when synced
        self.dropped: list[tuple[int, int]] = []  # bytes that a failed sync marked clean without writing them

    def copy(self) -> DiskFile:
        twin = DiskFile(bytes(self.data))
        twin.synced, twin.dropped = self.synced, list(self.dropped)
        return twin


class Disk:
    """What processes share: files, and what happens to them."""

    def __init__(
        self,
        rng: random.Random,
        faults: DiskFaults | None = None,
        can_append: bool = True,
        later: Callable[[Callable[[], None]], None] = lambda action: None,
        fault: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """`later` is called with what a store of objects does after it has reported a failure."""
        self.rng, self.faults, self.can_append = rng, faults or DiskFaults(), can_append
        self.later, self.fault = later, fault
        self.files: dict[str, DiskFile] = {}
        self.deleted: dict[str, DiskFile] = {}  # a loss of power may bring them back
        self.fate: str | None = None  # what happens to unsynced data at a loss of power; None: drawn at random
        self.is_full = False
        self.is_calm = False  # no random faults
        self.is_inspected = False

    def hits(self, probability: float) -> bool:
        return probability > 0 and not (self.is_calm or self.is_inspected) and self.rng.random() < probability

    @contextlib.contextmanager
    def without_faults(self) -> Iterator[None]:
        """For checks from outside of the world: nothing happens meanwhile, and operations are not counted."""
        self.is_inspected = True
        try:
            yield
        finally:
            self.is_inspected = False

    def lose_power(self) -> None:
        """What was not synced is kept, lost or damaged. The world ends the processes that used the disk."""
        self.fault("power lost")
        for name, file in sorted(self.deleted.items()):
            if name not in self.files and self.rng.random() < 0.5:
                self.fault("deletions undone")
                self.files[name] = file
        self.deleted.clear()
        for _, file in sorted(self.files.items()):
            self._spoil(file)

    def after_worst_power_loss(self) -> Disk:
        """A copy of the disk as if power were lost now, with everything that was not synced."""
        left = Disk(self.rng, can_append=self.can_append)
        left.is_calm = True
        for name, file in self.files.items():
            twin = left.files[name] = file.copy()
            for start, stop in file.dropped:
                twin.data[start:stop] = bytes(stop - start)
            del twin.data[file.synced :]
        return left

    def _spoil(self, file: DiskFile) -> None:
        for start, stop in file.dropped:
            self._lose(file, start, stop)
        rng, synced, length = self.rng, file.synced, len(file.data)
        if synced < length:
            fate = self.fate or rng.choice(("kept", "lost", "cut", "holes"))
            self.fault(f"unsynced {fate}")
            if fate == "lost":
                del file.data[synced:]
            elif fate in ("cut", "holes"):
                del file.data[rng.randint(synced, length) :]
            if fate == "holes":
                self._make_holes(file, synced)
        file.synced, file.dropped = len(file.data), []

    def _lose(self, file: DiskFile, start: int, stop: int) -> None:
        """These bytes were never written: if they are the last ones, the file may end before them."""
        if stop == len(file.data) and self.rng.random() < 0.5:
            del file.data[start:]
        else:
            file.data[start:stop] = bytes(stop - start)

    def _make_holes(self, file: DiskFile, start: int) -> None:
        block = self.rng.choice((1, 8, 64, 512))
        for at in range(start, len(file.data), block):
            if self.rng.random() < 0.5:
                stop = min(at + block, len(file.data))
                junk = self.rng.randbytes(stop - at) if self.rng.random() < 0.3 else bytes(stop - at)
                file.data[at:stop] = junk

    # --- what stores do ---

    def write(self, name: str, data: bytes) -> None:
        self.files[name].data.extend(data)

    def put(self, name: str, data: bytes) -> None:
        self.deleted.pop(name, None)
        self.files[name] = DiskFile(data)

    def delete(self, name: str) -> None:
        file = self.files.pop(name, None)
        if file is not None and self.can_append:
            self.deleted[name] = file

    def sync(self, name: str) -> None:
        file = self.files[name]
        file.synced = len(file.data)

    def fail_to_sync(self, name: str) -> None:
        """A failed sync: draws what has really happened."""
        file, rng = self.files[name], self.rng
        truth = rng.choice(("done", "nothing", "part", "hidden"))
        self.fault(f"sync failed, {truth} done" if truth != "done" else "sync failed, all done")
        if truth == "done":
            self.sync(name)
        elif truth == "part":
            file.synced = rng.randint(file.synced, len(file.data))
        elif truth == "hidden" and file.synced < len(file.data):
            file.dropped.append((file.synced, len(file.data)))
            self.sync(name)


class SimStore:
    """One process's handle of a disk."""

    def __init__(self, disk: Disk, who: str = "", before: Callable[[SimStore, str, str], None] | None = None) -> None:
        """`before` is called before each operation: the world may let others run, or end the process there."""
        self.disk, self.who, self.before = disk, who, before
        self.url = f"sim:{who}"
        self.can_append = disk.can_append
        self.is_alive = True
        self.operations = 0
        self.dies_at: tuple[int, str] | None = None  # the number of an operation, and where in it
        self.right: dict[str, int] = {}  # after a wrong read of an object: how many of its next reads are correct

    # --- the interface of a store ---

    def put(self, name: str, data: bytes) -> None:
        self._operate("put", name, lambda: self.disk.put(name, bytes(data)))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._operate("create", name, lambda: self._create(name, bytes(data))))

    def get(self, name: str) -> bytes:
        return bytes(self._operate("get", name, lambda: self._get(name)))

    def get_part(self, name: str, start: int, size: int) -> bytes:
        return bytes(self._operate("get", name, lambda: self._get(name, start, start + size)))

    def exists(self, name: str) -> bool:
        return bool(self._operate("exists", name, lambda: name in self.disk.files))

    def list(self, prefix: str) -> list[str]:
        found = self._operate("list", prefix, lambda: [name for name in self.disk.files if name.startswith(prefix)])
        return sorted(found)

    def delete(self, name: str) -> None:
        self._operate("delete", name, lambda: self.disk.delete(name))

    def append(self, name: str, data: bytes) -> None:
        self._only_files("append")
        if len(data) > 1 and self.disk.hits(self.disk.faults.splits):
            self.disk.fault("writes seen half done")
            at = self.disk.rng.randrange(1, len(data))
            self._append(name, bytes(data[:at]))
            data = data[at:]
        self._append(name, bytes(data))

    def _append(self, name: str, data: bytes) -> None:
        disk = self.disk

        def write(data: bytes) -> None:
            if name not in disk.files:
                raise ObjectMissing(f"{name} is not in {self.url}")
            disk.write(name, data)

        def write_part() -> None:
            write(data[: disk.rng.randrange(len(data))] if data else data)

        self._operate("append", name, lambda: write(data), write_part)

    def sync(self, name: str) -> None:
        self._only_files("sync")
        self._operate("sync", name, lambda: self._sync(name))

    # --- one operation ---

    def _only_files(self, op: str) -> None:
        if not self.can_append:
            raise AssertionError(f"{op} on a store of objects")

    def _operate(self, op: str, name: str, action: Callable[[], Any], part: Callable[[], None] = lambda: None) -> Any:
        """`part` does what remains of the operation if the process dies in the middle; most operations are atomic."""
        self._check_alive()
        if self.disk.is_inspected:
            return action()
        self.operations += 1
        number = self.operations
        if self.before is not None:
            self.before(self, op, name)
            self._check_alive()
        where = self.dies_at[1] if self.dies_at is not None and self.dies_at[0] <= number else None
        if where == MIDDLE:
            part()
        if where in (BEFORE, MIDDLE):
            self.die()
        result = self._try(op, name, action, part)
        if where is not None:
            self.die()
        return result

    def _try(self, op: str, name: str, action: Callable[[], Any], part: Callable[[], None]) -> Any:
        disk = self.disk
        if disk.is_full and op in NEEDS_ROOM:
            disk.fault("store full")
            if disk.rng.random() < 0.5:
                part()
            raise StoreFull(f"no room is left in {self.url} for {name}: free some and start again")
        if disk.hits(disk.faults.errors):
            disk.fault("store errors")
            if op in NEEDS_ROOM or op == "delete":
                self._fail(op, action, part)
            raise StoreError(f"{self.url} does not answer: {op} of {name}; try again")
        return action()

    def _fail(self, op: str, action: Callable[[], Any], part: Callable[[], None]) -> None:
        """The operation reports a failure. It was not done, or done, or done in part, or is done later."""
        truth = self.disk.rng.choice(("nothing", "done", "part", "later"))
        if truth == "done":
            action()
        elif truth == "part":
            part()
        elif truth == "later" and not self.can_append:
            self.disk.fault("done after it failed")
            self.disk.later(action)

    def die(self) -> None:
        self.is_alive = False
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise Crashed(self.who)

    def _sync(self, name: str) -> None:
        if name not in self.disk.files:
            raise ObjectMissing(f"{name} is not in {self.url}")
        if self.disk.hits(self.disk.faults.sync_errors):
            self.disk.fail_to_sync(name)
            raise StoreError(f"{self.url} could not make {name} durable: look at the disk and start again")
        self.disk.sync(name)

    def _create(self, name: str, data: bytes) -> bool:
        if name in self.disk.files:
            return False
        self.disk.put(name, data)
        if not self.can_append and self.disk.hits(self.disk.faults.errors):
            self.disk.fault("created, and told that it was there")
            return False  # the first answer got lost, and the request was repeated
        return True

    def _get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        file = self.disk.files.get(name)
        if file is None:
            raise ObjectMissing(f"{name} is not in {self.url}")
        data = bytes(file.data[start:stop])
        if self.right.get(name):
            self.right[name] -= 1
            return data
        if not data or not self.disk.hits(self.disk.faults.flips):
            return data
        self.disk.fault("flipped bits")
        self.right[name] = RIGHT_READS
        wrong = bytearray(data)
        wrong[self.disk.rng.randrange(len(wrong))] ^= 1 << self.disk.rng.randrange(8)
        return bytes(wrong)
