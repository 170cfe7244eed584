"""Commands that look at a store: its log, its snapshots, its state, and its state at an earlier epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples import bank
from headrace import Runtime
from headrace.durability.reading.store_reader import StoreReader
from tests.operations.stores import BANK, Said, unchanged

# --- looking ----------------------------------------------------------------------------------------------------------


def test_the_log_is_shown_record_by_record(headrace: Callable[..., Said], store: Path) -> None:
    code, said, _ = headrace("log", "show", "--store", store, "--json", "--calls")
    rows = [json.loads(line) for line in said.splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert (code, [row["epoch"] for row in epochs]) == (0, list(range(1, 11)))
    assert [row["record"] for row in rows] == list(range(1, len(rows) + 1))
    assert epochs[3]["calls"] == [{"tid": 4, "function": "account.deposit", "key": "alice", "args": [10]}]
    code, said, _ = headrace("log", "show", "--store", store, "--first", 3, "--last", 4)
    assert (code, len(said.splitlines())) == (0, 2)
    assert "account.deposit" in said
    code, _, complaints = headrace("log", "show", "--store", store, "--first", 1000)
    assert code == 2
    assert "there is no record 1000" in complaints


def test_the_replies_are_shown_with_what_was_answered(headrace: Callable[..., Said], store: Path) -> None:
    _, said, _ = headrace("log", "show", "--store", store, "--replies", "--calls", "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert [call["result"] for row in rows for call in row["calls"]] == list(range(10, 101, 10))
    _, said, _ = headrace("log", "show", "--store", store, "--replies", "--calls")
    assert "account.deposit('alice', 10)  →  50" in said


def test_a_sound_log_is_said_to_be_sound(headrace: Callable[..., Said], store: Path) -> None:
    with unchanged(store):
        code, said, _ = headrace("log", "verify", "--store", store)
        assert code == 0
        assert "sound" in said
        code, said, _ = headrace("log", "verify", "--store", store, "--json")
    figures = json.loads(said)
    assert (code, figures["sound"], figures["replies"]["records"]) == (0, True, 10)


def test_snapshots_are_listed_and_shown(headrace: Callable[..., Said], store: Path) -> None:
    _, said, _ = headrace("snapshot", "list", "--store", store, "--json")
    listed = json.loads(said)["snapshots"]
    assert [(row["epoch"], row["complete"]) for row in listed] == [(5, True)]
    assert "snapshots/" in headrace("snapshot", "list", "--store", store)[1].replace("\n", "")
    _, said, _ = headrace("snapshot", "show", "--store", store, "--json")
    shown = json.loads(said)
    assert (shown["epoch"], shown["entities"], shown["meta"]["committed"]) == (5, {"account": 1}, 5)
    assert "1 entities of account" in headrace("snapshot", "show", "--store", store)[1]


def test_state_is_that_of_the_newest_snapshot_or_with_code_of_any_epoch(
    headrace: Callable[..., Said], store: Path
) -> None:
    def state(*words: object) -> Any:
        code, said, _ = headrace("state", "get", "account", "alice", "--store", store, "--json", *words)
        assert code == 0
        found = json.loads(said)
        return found["epoch"], found["state"]

    with unchanged(store):
        assert state() == (5, 50)
        assert state("--app", BANK) == (10, 100)
        for epoch in range(1, 11):
            assert state("--app", BANK, "--epoch", epoch) == (epoch, 10 * epoch)
    assert headrace("state", "get", "account", "bob", "--store", store)[0] == 1
    _, said, _ = headrace("state", "scan", "account", "--store", store, "--app", BANK, "--json")
    assert json.loads(said) == {"key": "alice", "state": 100}
    code, _, complaints = headrace("state", "get", "account", "alice", "--store", store, "--app", BANK, "--epoch", 11)
    assert code == 2
    assert "the last one is 10" in complaints
    assert headrace("state", "scan", "accounts", "--store", store, "--app", BANK)[0] == 2


def test_one_may_look_while_the_app_runs(headrace: Callable[..., Said], tmp_path: Path) -> None:
    with Runtime(bank.app, store=tmp_path) as runtime:
        for n in range(1, 4):
            runtime.client.call(bank.deposit, "alice", 1)
            _, said, _ = headrace("state", "get", "account", "alice", "--store", tmp_path, "--app", BANK, "--json")
            assert json.loads(said)["state"] == n
            assert headrace("log", "verify", "--store", tmp_path)[0] == 0
        assert runtime.client.call(bank.deposit, "alice", 1) == 4  # nobody has taken over


# --- time travel ------------------------------------------------------------------------------------------------------


def test_a_restored_store_goes_on_from_its_epoch_and_knows_its_request_ids(
    headrace: Callable[..., Said], store: Path, tmp_path: Path
) -> None:
    for epoch in (7, 5, 2, 10):
        new = tmp_path / f"at-{epoch}"
        with unchanged(store):
            code, said, _ = headrace("restore", BANK, "--store", store, "--epoch", epoch, "--into", new, "--json")
        assert (code, json.loads(said)["epoch"]) == (0, epoch)
        for more in (1, 2):  # also after a restart
            with Runtime(bank.app, store=new) as runtime:
                assert runtime.client.options(request_id=f"r{epoch}").call(bank.deposit, "alice", 10) == 10 * epoch
                assert runtime.client.call(bank.deposit, "alice", 1) == 10 * epoch + more
        assert StoreReader(new, bank.app).replay().state()["account"] == {"alice": 10 * epoch + 2}


def test_a_store_is_restored_only_into_an_empty_place(
    headrace: Callable[..., Said], store: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    for place in (tmp_path / "full", store):
        with unchanged(place):
            code, _, complaints = headrace("restore", BANK, "--store", store, "--epoch", 3, "--into", place)
        assert code == 2
        assert "wrong_store" in complaints
        assert str(place) in complaints


def test_an_epoch_that_is_not_there_is_not_restored(headrace: Callable[..., Said], store: Path, tmp_path: Path) -> None:
    code, _, complaints = headrace("restore", BANK, "--store", store, "--epoch", 11, "--into", tmp_path / "new")
    assert code == 2
    assert "the last one is 10" in complaints
    assert not (tmp_path / "new").exists()
