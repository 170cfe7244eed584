"""A broken log stops the start, and a repair cuts it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import bank
from headrace import Runtime
from headrace.durability.log.log import read_log
from headrace.durability.log.records import EpochHeader, unpack
from headrace.durability.store import DirectoryStore
from headrace.errors import LogBroken
from tests.operations.stores import Said, files_in, refused, unchanged


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def place_of_record(store: Path, name: str, number: int) -> tuple[Path, int]:
    """A file, and a byte of it that belongs to this record."""
    data = next(record.data for record in read_log(DirectoryStore(store), name, None) if record.number == number)
    file = next(file for file in sorted((store / name).glob("*.seg")) if data in file.read_bytes())
    return file, file.read_bytes().index(data) + len(data) // 2


def record_of_epoch(store: Path, epoch: int) -> int:
    for record in read_log(DirectoryStore(store), "log", None):
        header, _ = unpack(record.data)
        if isinstance(header, EpochHeader) and header.number == epoch:
            return record.number
    raise AssertionError(epoch)


def test_a_broken_record_stops_the_start_and_is_cut_by_a_repair(headrace: Callable[..., Said], store: Path) -> None:
    number = record_of_epoch(store, 8)
    file, at = place_of_record(store, "log", number)
    flip(file, at)
    with unchanged(store):
        refused(store, LogBroken, str(file), f"record {number}", "headrace log repair")
        code, said, _ = headrace("log", "verify", "--store", store)
        assert code == 1
        assert "BROKEN" in said
        assert file.name in said
    code, said, _ = headrace("log", "repair", "--store", store, "--yes", "--json")
    assert (code, json.loads(said)["last_epoch"]) == (0, 7)
    assert any((store / "broken").rglob("*"))
    assert headrace("log", "verify", "--store", store)[0] == 0
    with Runtime(bank.app, store=store) as runtime:
        assert runtime.get("account", "alice") == 70
        assert runtime.client.options(request_id="r7").call(bank.deposit, "alice", 10) == 70
        assert runtime.client.options(request_id="r8").call(bank.deposit, "alice", 10) == 80  # it is gone: it runs anew
    with Runtime(bank.app, store=store) as runtime:
        assert runtime.client.options(request_id="r8").call(bank.deposit, "alice", 10) == 80
        assert runtime.client.call(bank.deposit, "alice", 10) == 90


def test_what_is_broken_before_a_snapshot_is_cut_out_and_nothing_is_lost(
    headrace: Callable[..., Said], store: Path
) -> None:
    flip(*place_of_record(store, "log", record_of_epoch(store, 2)))
    assert headrace("log", "verify", "--store", store)[0] == 1
    assert headrace("log", "repair", "--store", store, "--yes")[0] == 0
    with Runtime(bank.app, store=store) as runtime:
        assert runtime.get("account", "alice") == 100


@pytest.mark.parametrize("epoch", [2, 8])
def test_replies_that_are_broken_are_made_again_or_forgotten(
    headrace: Callable[..., Said], store: Path, epoch: int
) -> None:
    file, at = place_of_record(store, "replies", epoch)
    flip(file, at)
    if epoch == 2 or headrace("log", "verify", "--store", store)[0]:  # else it was written with the last ones: torn
        refused(store, LogBroken, str(file), "headrace log repair")
    code, said, _ = headrace("log", "repair", "--store", store, "--yes", "--json")
    assert (code, json.loads(said)["last_epoch"]) == (0, 10)
    for _ in range(2):
        with Runtime(bank.app, store=store) as runtime:
            assert runtime.get("account", "alice") == 100
            for n in range(1, 11):
                if n == 1 or n > 5 or epoch == 8:
                    assert runtime.client.options(request_id=f"r{n}").call(bank.deposit, "alice", 10) == 10 * n


def test_a_repair_of_what_is_sound_changes_nothing(headrace: Callable[..., Said], store: Path) -> None:
    before = files_in(store)
    code, said, _ = headrace("log", "repair", "--store", store, "--yes")
    assert code == 0
    assert "nothing to repair" in said
    assert files_in(store) == before


def test_a_repair_asks_first(headrace: Callable[..., Said], store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(*place_of_record(store, "log", record_of_epoch(store, 8)))
    before = files_in(store)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert headrace("log", "repair", "--store", store)[0] == 1
    assert files_in(store) == before
