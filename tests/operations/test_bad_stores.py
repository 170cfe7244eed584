"""A store that is not what it should be is refused with the file and the next step, and nothing begins empty."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import bank
from headrace import App, Config, Runtime
from headrace.durability import store as stores
from headrace.durability.identity import IDENTITY, with_checksum
from headrace.errors import HeadraceError, LogBroken, SnapshotBroken, StoreError, StoreFull, WrongStore
from tests.operations.stores import BANK, ROOT, Said, refused, unchanged


def test_a_store_of_another_app_is_refused(headrace: Callable[..., Said], store: Path) -> None:
    with unchanged(store):
        refused(store, WrongStore, str(store), "'bank'", "'shop'", "its own store", app=App("shop"))
        words = ["run", "examples.shopping_cart:app", "--store", str(store), "--port", "0"]
        said = subprocess.run([sys.executable, "-m", "headrace.cli", *words], capture_output=True, text=True, cwd=ROOT)
        assert said.returncode == 2
        assert "wrong_store" in said.stderr
        assert headrace("verify", "examples.shopping_cart:app", "--store", store)[0] == 2


@pytest.mark.parametrize("other", [1, 99])
def test_a_store_of_another_format_is_refused(headrace: Callable[..., Said], store: Path, other: int) -> None:
    rewrite_identity(store, format=other)
    with unchanged(store):
        refused(store, WrongStore, f"{store}/{IDENTITY}", f"format {other}", "use the version that wrote it")
        code, _, complaints = headrace("log", "show", "--store", store)
    assert code == 2
    assert f"format {other}" in complaints


def test_a_store_of_another_cluster_is_refused(store: Path) -> None:
    rewrite_identity(store, cluster="another")
    with unchanged(store):
        refused(store, WrongStore, str(store), "cluster another")


def test_an_identity_that_was_tampered_with_is_refused(store: Path) -> None:
    file = store / IDENTITY
    file.write_text(file.read_text().replace('"shards": 64', '"shards": 32'))
    with unchanged(store):
        refused(store, WrongStore, f"{store}/{IDENTITY}", "checksum", "backup")


def test_another_number_of_shards_is_refused(store: Path) -> None:
    with pytest.raises(WrongStore, match="64 shards, but the configuration has 32"):
        Runtime(bank.app, Config(shards=32), store=store).close()


def test_a_directory_with_something_else_in_it_is_refused(headrace: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with unchanged(tmp_path):
        refused(tmp_path, WrongStore, str(tmp_path), IDENTITY, "letter.txt", "another path")
        for words in (("log", "show"), ("log", "verify"), ("snapshot", "list"), ("state", "scan", "account")):
            code, _, complaints = headrace(*words, "--store", tmp_path)
            assert code == 2
            assert "wrong_store" in complaints


def test_an_empty_place_has_nothing_to_show(headrace: Callable[..., Said], tmp_path: Path) -> None:
    for words in (("log", "show"), ("snapshot", "list"), ("state", "scan", "account"), ("upgrade", BANK)):
        code, _, complaints = headrace(*words, "--store", tmp_path / "nothing")
        assert code == 2
        assert "is empty" in complaints
    assert not (tmp_path / "nothing").exists()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", WrongStore, "is a file")


def test_a_store_of_an_unknown_kind_is_refused() -> None:
    refused("ftp://somewhere/else", HeadraceError, "ftp://", "s3://")


def rewrite_identity(store: Path, **changes: Any) -> None:
    file = store / IDENTITY
    found = json.loads(file.read_text())
    del found["checksum"]
    file.write_bytes(with_checksum(found | changes))


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
def test_a_snapshot_whose_object_is_not_as_it_was_is_refused(
    headrace: Callable[..., Said], store: Path, harm: str
) -> None:
    (file,) = (store / "state").iterdir()
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-9] if harm == "cut" else data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with unchanged(store):
        refused(store, SnapshotBroken, f"state/{file.name}", str(store), "backup", "headrace restore")
        code, _, complaints = headrace("snapshot", "show", "--store", store)
        assert code == 2
        assert file.name in complaints
    # The log still reaches back to the beginning: time travel before the snapshot does not need it.
    assert headrace("restore", BANK, "--store", store, "--epoch", 4, "--into", store.parent / "new")[0] == 0
    with Runtime(bank.app, store=store.parent / "new") as runtime:
        assert runtime.get("account", "alice") == 40


def test_a_manifest_that_is_broken_is_refused(store: Path) -> None:
    (file,) = (store / "snapshots").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    with unchanged(store):
        refused(store, SnapshotBroken, f"snapshots/{file.name}", "backup")


def test_a_log_that_is_gone_is_no_empty_log(store: Path) -> None:
    for file in (store / "log").glob("*.seg"):
        file.unlink()
    refused(store, StoreError, str(store))


def test_a_store_in_which_only_answers_are_left_is_refused(store: Path) -> None:
    for file in (store / "log").glob("*.seg"):
        file.unlink()
    shutil.rmtree(store / "snapshots")
    refused(store, LogBroken, str(store), "10 was answered", "backup")


def test_a_directory_that_may_not_be_written_is_refused(store: Path) -> None:
    for folder in [store, *(path for path in store.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)
    for folder in store.parents:
        if str(folder).startswith(tempfile.gettempdir() + "/"):
            folder.chmod(0o755)
    with without_privileges(), unchanged(store):
        refused(store, StoreError, str(store), "Permission denied", "write permission")


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """For root nothing is forbidden."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_full_disk_stops_the_app_and_loses_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(bank.app, store=store)
    assert runtime.client.call(bank.deposit, "alice", 1) == 101
    write = stores._write

    def full(file: int, data: bytes) -> None:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(stores, "_write", full)
        with pytest.raises(HeadraceError, match="No space left on device"):
            runtime.client.call(bank.deposit, "alice", 1000)
        with pytest.raises(StoreFull, match=f"{store}.*Free some space"):
            runtime.wait()
        runtime.close()
    with Runtime(bank.app, store=store) as again:
        assert again.get("account", "alice") == 101
