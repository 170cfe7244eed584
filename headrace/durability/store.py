"""Stores: objects by name, in a directory or in a bucket. Everything durable goes through one of these.

Two rules. What `put`, `create` and `sync` have done survives a loss of power once they return; readers never see half
an object under a name made by `put` or `create`. And `create` is exclusive: of many callers, one gets True.
A store does not know what is in its objects. The directory must be on a file system that shows every process the same
files at once (a local disk does; NFS with caching does not): the fence of the log relies on names.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from headrace.errors import ConfigError, ObjectMissing, StoreError, StoreFull, WrongStore

if sys.platform != "win32":
    import fcntl

NAME_BYTES_MAX = 200  # of one part; file names have 255 bytes, and temporary ones need a prefix
OPEN_FILES_MAX = 16  # appended files kept open
STALE_SECONDS = 3600  # the writer of an unfinished file this old is gone

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]*")
_TEMPORARY = ".new-"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}


class Store(Protocol):
    """The operations that the log and the snapshots need. Names are slash-separated; see `check_name`."""

    url: str  # for people: "/data/bank" or "s3://bucket/prefix"
    can_append: bool  # directories can; object stores cannot

    def put(self, name: str, data: bytes) -> None:
        """Durable and atomic when it returns; replaces what was there."""

    def create(self, name: str, data: bytes) -> bool:
        """Put if absent: durable, atomic and exclusive. False if the name is taken."""

    def get(self, name: str) -> bytes:
        """The whole object; `ObjectMissing` if there is none."""

    def get_part(self, name: str, start: int, size: int) -> bytes:
        """At most `size` bytes from `start` on: fewer, or none, at its end. `ObjectMissing` if it is not there."""

    def exists(self, name: str) -> bool:
        """Asks the store itself each time; nothing is cached."""

    def list(self, prefix: str) -> list[str]:
        """The full names that begin with the prefix, sorted."""

    def delete(self, name: str) -> None:
        """No error if it is missing. After a crash it may be there again."""

    def append(self, name: str, data: bytes) -> None:
        """Only if `can_append`, and only to an object made by `create`; else `ObjectMissing`: a file that a successor
        has deleted is not created again. Not durable yet: a crash may leave any part of it, or holes."""

    def sync(self, name: str) -> None:
        """Only if `can_append`. What was appended is durable when it returns. Never call it again after it failed."""


def open_store(where: str | Path) -> Store:
    """A path is a directory (created by the first write); `s3://bucket/prefix?endpoint=..&region=..` is a bucket."""
    text = str(where)
    if text.startswith("s3://"):
        from headrace.durability.s3 import S3Store

        return S3Store(text)
    scheme, mark, _ = text.partition("://")
    if mark:
        raise ConfigError(f"unknown kind of store: {scheme}:// (give the path of a directory, or s3://bucket/prefix)")
    return DirectoryStore(where)


def address_of(store: Store) -> str:
    """The address that opens the same store in another process."""
    return str(getattr(store, "address", store.url))


@lru_cache(4096)
def check_name(name: str) -> str:
    """Refuses names that could leave the store or hide in it: empty parts, "..", leading dots, unusual characters."""
    for part in name.split("/"):
        if not _PART.fullmatch(part) or len(part) > NAME_BYTES_MAX:
            raise StoreError(
                f"{name!r} is not a valid object name: use letters, digits and _.=+@- in parts between slashes"
            )
    return name


class DirectoryStore:
    """Objects are files below one folder. Files are synced with fsync, and folders too when a name is new."""

    can_append = True

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}  # descriptors of appended files
        self._dirty: set[str] = set()  # in use, or not synced yet: not to be closed
        self._failed: dict[str, str] = {}  # those whose sync failed, and why
        self._count = 0
        if self.root.exists() and not self.root.is_dir():
            raise WrongStore(f"{self.root} is a file: give the path of a directory")

    def __repr__(self) -> str:
        return f"DirectoryStore({self.url!r})"

    # --- whole objects ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._explained("write", path):
            temporary = self._write_aside(path, data)
            try:
                os.replace(temporary, path)
            except BaseException:
                _unlink(temporary)
                raise
            _sync_folder(path.parent)
        self._forget(name)

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with self._explained("create", path):
            if path.exists():  # a shortcut; the link decides
                return False
            temporary = self._write_aside(path, data)
            try:
                created = _link(temporary, path)
            finally:
                _unlink(temporary)
            if created:
                _sync_folder(path.parent)
            return created

    def get(self, name: str) -> bytes:
        path = self._path(name)
        with self._explained("read", path):
            return path.read_bytes()

    def get_part(self, name: str, start: int, size: int) -> bytes:
        path = self._path(name)
        with self._explained("read", path), open(path, "rb", buffering=0) as file:
            parts: list[bytes] = []
            while size > 0:
                part = os.pread(file.fileno(), size, start)
                if not part:
                    break
                parts.append(part)
                start, size = start + len(part), size - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def exists(self, name: str) -> bool:
        path = f"{self.url}/{check_name(name)}"
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._error("look at", Path(path), error) from error
        return True

    def list(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder)
        top = self.root / folder
        with self._explained("list", top):
            found = (f"{folder}/{name}" if folder else name for name in self._walk(top))
            return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._forget(name)
        with self._explained("delete", path):
            path.unlink(missing_ok=True)

    # --- files that grow ----------------------------------------------------------------------------------------------

    def append(self, name: str, data: bytes) -> None:
        try:
            _write(self._file(name), data)
        except OSError as error:
            raise self._error("append to", self._path(name), error) from error

    def sync(self, name: str) -> None:
        try:
            file = self._file(name)
            try:
                _sync_data(file)
            except OSError as error:
                self._failed[name] = str(error)  # the next sync may succeed without having written anything
                raise
            self._dirty.discard(name)
        except OSError as error:
            raise self._error("sync", self._path(name), error) from error

    def close(self) -> None:
        """Closes the files that are kept open. The store can be used again."""
        for name in list(self._files):
            self._forget(name)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _file(self, name: str) -> int:
        """The descriptor of an appended file, which stays open until it is synced."""
        with self._lock:  # else another thread could close the file before we use it
            if name in self._failed:
                raise StoreError(
                    f"{self._path(name)} was not synced ({self._failed[name]}): its contents are uncertain"
                )
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = os.open(self._path(name), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
                idle = [other for other in self._files if other not in self._dirty and other != name]
                for other in idle[: max(0, len(self._files) - OPEN_FILES_MAX)]:
                    os.close(self._files.pop(other))
            self._dirty.add(name)
            return file

    def _forget(self, name: str) -> None:
        with self._lock:
            file = self._files.pop(name, None)
            self._dirty.discard(name)
            self._failed.pop(name, None)
            if file is not None:
                os.close(file)

    def _write_aside(self, path: Path, data: bytes) -> Path:
        """Writes and syncs the data to a file in the folder of `path`, under a name that `list` leaves out."""
        _make_folders(path.parent)
        while True:
            self._count += 1
            temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{self._count}-{path.name}"
            try:
                file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                break
            except FileExistsError:
                continue  # left by a dead process with our pid, or made by another store object in this process
        try:
            try:
                _write(file, data)
                _sync_all(file)
            finally:
                os.close(file)
        except BaseException:
            _unlink(temporary)
            raise
        return temporary

    def _walk(self, folder: Path) -> Iterator[str]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith("."):
                if entry.name.startswith(_TEMPORARY):
                    _clean(entry)
            elif entry.is_dir():
                for name in self._walk(folder / entry.name):
                    yield f"{entry.name}/{name}"
            else:
                yield entry.name

    @contextmanager
    def _explained(self, doing: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(doing, path, error) from error

    def _error(self, doing: str, path: Path, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError | NotADirectoryError) and doing in ("read", "append to", "sync"):
            return ObjectMissing(
                f"{path} is missing: restore it from a backup, or check that {self.url} is the right store"
            )
        if error.errno in _FULL:
            return StoreFull(
                f"cannot {doing} {path}: {reason}. Free some space there (see `df {self.url}`) and start again"
            )
        if error.errno in _FORBIDDEN:
            return StoreError(
                f"cannot {doing} {path}: {reason}. Give this user write permission for {self.url} and start again"
            )
        return StoreError(
            f"cannot {doing} {path}: {reason}. Check the disk and the mount of {self.url}, then start again"
        )


def _write(file: int, data: bytes) -> None:
    written = os.write(file, data)
    if written < len(data):
        rest = memoryview(data)[written:]
        while rest:
            rest = rest[os.write(file, rest) :]


def _link(temporary: Path, path: Path) -> bool:
    """Gives the file its name, unless the name is taken."""
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return os.stat(temporary).st_nlink > 1  # it was us: a network file system repeated the call
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    return _rename_under_lock(temporary, path)


def _rename_under_lock(temporary: Path, path: Path) -> bool:
    """For file systems without links: creates the name under the folder's lock, which is freed if its holder dies."""
    lock = os.open(path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return False
        os.rename(temporary, path)
        return True
    finally:
        os.close(lock)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _clean(entry: os.DirEntry[str]) -> None:
    """Removes the file of a crashed writer. A writer that sleeps for longer than this gets an error, and no object."""
    with suppress(OSError):
        if time.time() - entry.stat().st_mtime > STALE_SECONDS:
            os.unlink(entry.path)


def _make_folders(folder: Path) -> None:
    """Like mkdir -p, but makes every new name durable."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_all(file: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves it in the drive's memory
    if full is None:
        os.fsync(file)
        return
    try:
        fcntl.fcntl(file, full)
    except OSError:
        os.fsync(file)


def _sync_data(file: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(file)
    else:
        _sync_all(file)
