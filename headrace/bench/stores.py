"""What the benchmarks of durable apps share: a store that is measured, where it is, and when everything is in it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.bench import ycsb
from headrace.bench.senders import send
from headrace.durability.store import DirectoryStore
from headrace.runtime.driver import Driver

NEVER_US = 1 << 60
LOAD_BATCH = 50_000
IN_MEMORY = ("tmpfs", "ramfs")


class WatchedStore(DirectoryStore):
    """A directory with stopwatches."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.forget()

    def forget(self) -> None:
        """Reset all counts."""
        self.syncs_s: list[float] = []  # of the log
        self.bytes: dict[str, int] = {}  # written, by the first part of the name
        self.state_bytes: list[int] = []  # of each object of a snapshot
        self.snapshots: set[str] = set()  # by epoch: a compaction makes a second one of the same epoch

    def append(self, name: str, data: bytes) -> None:
        self._count_bytes(name, data)
        super().append(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._count_object(name, data)
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._count_object(name, data)
        return super().create(name, data)

    def sync(self, name: str) -> None:
        began = time.perf_counter()
        super().sync(name)
        if name.startswith("log/"):
            self.syncs_s.append(time.perf_counter() - began)

    def _count_bytes(self, name: str, data: bytes) -> None:
        first = name.partition("/")[0]
        self.bytes[first] = self.bytes.get(first, 0) + len(data)

    def _count_object(self, name: str, data: bytes) -> None:
        self._count_bytes(name, data)
        if name.startswith("state/"):
            self.state_bytes.append(len(data))
        elif name.startswith("snapshots/"):
            self.snapshots.add(name.partition("-")[0])


@contextlib.contextmanager
def folder_on_disk(where: Path | None) -> Iterator[Path]:
    """A temporary folder: in `where`, or among temporary files, or here if those are only in memory."""
    if where is None:
        where = Path(tempfile.gettempdir())
        if file_system(where) in IN_MEMORY:
            where = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=where, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def file_system(path: Path) -> str:
    """The kind of file system: the cost of a sync depends on it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    found = {line.split()[1]: line.split()[2] for line in mounts.read_text().splitlines()}
    resolved = path.resolve()
    return next((found[str(each)] for each in (resolved, *resolved.parents) if str(each) in found), "unknown")


def wait_until_kept(runtime: Driver) -> None:
    """Everything was answered: wait until the replies are in the store, too."""
    keeper, last = runtime._keeper, runtime.engine.sequencing.open.number - 1
    while keeper is not None and keeper.store_work.kept < last:
        runtime._check_alive()
        time.sleep(0.000_5)


def load(runtime: Driver, entities: int) -> None:
    """Create this many accounts, as fast as possible."""
    parts = [list(range(at, min(at + LOAD_BATCH, entities))) for at in range(0, entities, LOAD_BATCH)]
    send(runtime, ycsb.open_account, [(keys, [(ycsb.BALANCE,)] * len(keys)) for keys in parts])
