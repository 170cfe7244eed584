"""What is fetched or made once and kept: Java, Java archives, Spark's classes.

If two processes want the same thing at once, one does the work under a lock; the other waits and then finds it there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def maven_cache() -> Path:
    """Where jgo and Maven keep Java archives."""
    return Path(os.environ.get("M2_REPO") or Path.home() / ".m2" / "repository")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock for this folder: no other process gets in. The lock ends with its holder."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where no lock can be written, nothing can be fetched either
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / ".lock").open("a"))
            if sys.platform != "win32":
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def jars_of(artifacts: Iterable[Any]) -> list[Path]:
    """The files of jgo's artifacts, fetched if missing; call it under `alone`. jgo takes existing files for complete;
    files that a kill left incomplete are fetched again."""
    return [_jar_of(artifact) for artifact in artifacts]


def _jar_of(artifact: Any) -> Path:
    for _ in range(2):
        jar: Path = artifact.resolve()
        if zipfile.is_zipfile(jar):
            return jar
        jar.unlink()
    raise RuntimeError(f"{jar.name} was truncated in two downloads")
