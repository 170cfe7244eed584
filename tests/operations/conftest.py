"""The command line, a store of the bank, and apps made from source."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import bank
from headrace import App, Runtime
from headrace.cli import main
from tests.operations.stores import Said, crash


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command, as a user types it; returns exit code, output and complaints."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        code = ended.value.code
        return 0 if code is None else int(code), said.out, said.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store in which alice got 10 in each of ten epochs; after the fifth there is a snapshot; it ended by a crash."""
    place = tmp_path / "store"
    runtime = Runtime(bank.app, store=place)
    for n in range(1, 11):
        runtime.client.options(request_id=f"r{n}").call(bank.deposit, "alice", 10)
        if n == 5:
            assert runtime.snapshot() == {"epoch": 5}
    crash(runtime)
    return place


@pytest.fixture
def app_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[str, App]]]:
    """Apps from source, each in a module of its own; with the name by which a command finds it."""
    numbers, known, folder = itertools.count(1), set(sys.modules), tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(source: str) -> tuple[str, App]:
        name = f"operated_{next(numbers)}"
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"{name}:app", importlib.import_module(name).app

    yield make
    for name in set(sys.modules) - known:
        if name.startswith("operated_"):
            del sys.modules[name]
