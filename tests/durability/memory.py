"""A store in memory that forgets like a disk, writers that take turns, and a log to look at: for tests of the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.durability.log.log import BrokenAt, Log, LogRecord
from headrace.errors import ObjectMissing, StoreError

Hook = Callable[[str, str], None]
BOTH = pytest.mark.parametrize("can_append", [True, False], ids=["directory", "objects"])


def nothing(operation: str, name: str) -> None:
    """The hook that does nothing."""


class File:
    def __init__(self, data: bytes = b"", is_durable: bool = False) -> None:
        self.data = bytearray(data)
        self.synced = len(data) if is_durable else 0
        self.holes: list[tuple[int, int]] = []  # of failed syncs: clean for the kernel, and not on the disk


class Disk:
    """What all processes of a machine see, and what a loss of power leaves of it."""

    def __init__(self, can_append: bool = True) -> None:
        self.can_append = can_append
        self.files: dict[str, File] = {}
        self.syncs_that_fail = 0

    def store(self, hook: Hook = nothing) -> MemoryStore:
        return MemoryStore(self, hook)

    def lose_power(self, left: Callable[[bytes], bytes]) -> None:
        """`left` says what becomes of the unsynced end of a file: any bytes that are not longer."""
        for file in self.files.values():
            data = bytes(file.data[: file.synced]) + left(bytes(file.data[file.synced :]))
            file.data = bytearray(data)
            for start, end in file.holes:
                file.data[start:end] = bytes(len(file.data[start:end]))
            file.holes, file.synced = [], len(data)

    def size(self) -> int:
        return sum(len(file.data) for file in self.files.values())

    def copy(self) -> Disk:
        twin = Disk(self.can_append)
        for name, file in self.files.items():
            twin.files[name] = File(bytes(file.data))
            twin.files[name].synced, twin.files[name].holes = file.synced, list(file.holes)
        return twin


class MemoryStore:
    """The interface of every store. The hook is called before each operation, and in the middle of an append."""

    url = "memory"

    def __init__(self, disk: Disk, hook: Hook = nothing) -> None:
        self.disk, self.hook = disk, hook
        self.can_append = disk.can_append

    def put(self, name: str, data: bytes) -> None:
        self.hook("put", name)
        self.disk.files[name] = File(data, is_durable=True)

    def create(self, name: str, data: bytes) -> bool:
        self.hook("create", name)
        if name in self.disk.files:
            return False
        self.disk.files[name] = File(data, is_durable=True)
        return True

    def get(self, name: str) -> bytes:
        self.hook("get", name)
        return bytes(self._file(name).data)

    def get_part(self, name: str, start: int, size: int) -> bytes:
        self.hook("get_part", name)
        return bytes(self._file(name).data[start : start + size])

    def exists(self, name: str) -> bool:
        self.hook("exists", name)
        return name in self.disk.files

    def list(self, prefix: str) -> list[str]:
        self.hook("list", prefix)
        return sorted(name for name in self.disk.files if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.hook("delete", name)
        self.disk.files.pop(name, None)

    def append(self, name: str, data: bytes) -> None:
        assert self.can_append
        self.hook("append", name)
        file = self._file(name)
        file.data += data[: len(data) // 2]
        self.hook("append more", name)
        file.data += data[len(data) // 2 :]

    def sync(self, name: str) -> None:
        assert self.can_append
        self.hook("sync", name)
        file = self._file(name)
        if self.disk.syncs_that_fail > 0:
            self.disk.syncs_that_fail -= 1
            file.holes.append((file.synced, len(file.data)))
            file.synced = len(file.data)
            raise StoreError(f"{name}: input/output error")
        file.synced = len(file.data)

    def _file(self, name: str) -> File:
        if name not in self.disk.files:
            raise ObjectMissing(f"{name} is missing")
        return self.disk.files[name]


class Killed(BaseException):
    """The process is gone."""


class Process:
    """A thread that stops before each operation on its store, until it is told to go on."""

    def __init__(self, disk: Disk, work: Callable[[MemoryStore], Any]) -> None:
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.steps = 0
        self.next = ("", "")  # the operation before which it stands, and the name
        self._is_killed = False
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        store = disk.store(self._stop)
        self._thread = threading.Thread(target=self._run, args=(work, store), daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Lets it do one operation on its store, and all it does until the next."""
        if not self.is_over:
            self.steps += 1
            self._go.release()
            self._wait()

    def finish(self) -> Process:
        while not self.is_over:
            self.step()
        return self

    def kill(self) -> None:
        self._is_killed = True
        self.finish()

    def _wait(self) -> None:
        assert self._back.acquire(timeout=60)
        if self.is_over:
            self._thread.join()

    def _run(self, work: Callable[[MemoryStore], Any], store: MemoryStore) -> None:
        try:
            self.result = work(store)
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._back.release()

    def _stop(self, operation: str, name: str) -> None:
        self.next = operation, name
        self._back.release()
        self._go.acquire()
        if self._is_killed:
            raise Killed


def data_of(records: Iterable[LogRecord]) -> list[bytes]:
    return [record.data for record in records]


def written(can_append: bool = True, groups: int = 4, segment_bytes: int = 300) -> Disk:
    """A log of several segments and two terms, with two records in each group; the last one was not closed."""
    disk = Disk(can_append)
    for half in (0, 1):
        log = Log.take_over(disk.store(), segment_bytes=segment_bytes)
        for n in range(half * groups, half * groups + groups):
            log.append([b"first of group %d" % n, b"second of group %d" % n])
    return disk


def list_or_error(disk: Disk) -> tuple[list[LogRecord], BrokenAt | None]:
    try:
        return list(Log.take_over(disk.store()).read(1)), None
    except BrokenAt as error:
        return [], error
