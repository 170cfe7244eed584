"""A store after a crash, and what a command leaves unchanged."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import bank
from headrace import App, Runtime
from headrace.durability.log.log import bounds
from headrace.durability.store import DirectoryStore
from headrace.errors import HeadraceError
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
BANK = "examples.bank:app"
Said = tuple[int, str, str]


def crash(runtime: Runtime) -> None:
    """Once all replies are kept, the store stays as it is: what the runtime does when it closes goes elsewhere. What it
    does in other threads meanwhile, deletions above all, is in the copy as a whole or not at all."""
    keeper = runtime._keeper
    assert keeper is not None
    epochs, folder = runtime.metrics()["epochs"], Path(keeper.store_work.opened_store.store.url)
    eventually(lambda: bounds(DirectoryStore(folder), "replies")[1] >= epochs)
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / "copy"
    eventually(lambda: is_copied(folder, copy))
    runtime.close()
    shutil.rmtree(folder)
    copy.rename(folder)


def is_copied(folder: Path, copy: Path) -> bool:
    """False if files came or went meanwhile."""
    shutil.rmtree(copy, ignore_errors=True)
    before = sorted(folder.rglob("*"))
    try:
        shutil.copytree(folder, copy)
    except shutil.Error:
        return False
    return sorted(folder.rglob("*")) == before


def files_in(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def unchanged(place: Path) -> Iterator[None]:
    """But for the marks of terms and new empty segments, which a start makes before it looks further."""
    before = files_in(place)
    yield
    after = files_in(place)
    assert {name: after.get(name) for name in before} == before
    new = [name for name in after if name not in before]
    assert [name for name in new if not name.startswith(("log/", "replies/", "apps/"))] == []


def refused(place: Path | str, kind: type[HeadraceError], *words: str, app: App = bank.app) -> str:
    """It does not start, and says why; and it does not start the second time either."""
    said = ""
    for _ in range(2):
        with pytest.raises(kind) as error:
            Runtime(app, store=place).close()
        said = str(error.value)
        assert [word for word in words if word not in said] == [], said
    return said
