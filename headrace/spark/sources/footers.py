"""Footers: which columns the files of a snapshot have, and which operators. For the columns, only their ends are
read."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from headrace.durability.snapshots.layers import OPERATOR
from headrace.durability.snapshots.manifests import Layer
from headrace.durability.store import Store

END_BYTES = 64 << 10


def file_columns(store: Store, layers: Iterable[Layer]) -> set[str]:
    """The names of the columns of all files."""
    names: set[str] = set()
    for layer in layers:
        for stored in layer.objects:
            size = min(stored.bytes, END_BYTES)
            names.update(columns_in(store, stored.name, stored.bytes, size))
    return names


def operators_in(data: bytes) -> set[str]:
    """The operators that have rows in a file: all its batches have the same dictionary."""
    file = pa.ipc.open_file(pa.BufferReader(data))
    return {*file.get_batch(0).column(OPERATOR).dictionary.to_pylist()} if file.num_record_batches else set()


def columns_in(store: Store, name: str, total: int, size: int) -> list[str]:
    """From the footer of an Arrow file: its length is just before the last six bytes."""
    end = store.get_part(name, total - size, size)
    footer = int.from_bytes(end[-10:-6], "little")
    if footer + 10 > size < total:
        return columns_in(store, name, total, min(total, footer + 10))
    file = PartialFile(total, {0: b"ARROW1\0\0", total - size: end})
    return list(pa.ipc.open_file(pa.PythonFile(file, mode="r")).schema.names)


class PartialFile:
    """A file of which only some parts are available."""

    closed = False

    def __init__(self, total: int, parts: dict[int, bytes]) -> None:
        self.total, self.parts, self.at = total, parts, 0

    def read(self, size: int = -1) -> bytes:
        size = self.total - self.at if size < 0 else size
        for begin, data in self.parts.items():
            if begin <= self.at and self.at + size <= begin + len(data):
                found = data[self.at - begin : self.at - begin + size]
                self.at += len(found)
                return found
        raise OSError(f"bytes {self.at} to {self.at + size} are not at hand")

    def seek(self, at: int, whence: int = 0) -> int:
        self.at = at + (0, self.at, self.total)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def size(self) -> int:
        return self.total

    def close(self) -> None:
        pass

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True
