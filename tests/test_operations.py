"""The commands that look after a store, and what is said when a store is not what it should be."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import bank
from headrace import App, Config, Runtime
from headrace.cli import main
from headrace.durability import store as stores
from headrace.durability.identity import IDENTITY, with_checksum
from headrace.durability.log.log import bounds, read_log
from headrace.durability.log.records import EpochHeader, unpack
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.store import DirectoryStore
from headrace.errors import AppChanged, HeadraceError, LogBroken, SnapshotBroken, StoreError, StoreFull, WrongStore
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent
BANK = "examples.bank:app"
Said = tuple[int, str, str]


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
        runtime.client.call(bank.deposit, "alice", 10, request_id=f"r{n}")
        if n == 5:
            assert runtime.snapshot() == {"epoch": 5}
    crash(runtime)
    return place


def crash(runtime: Runtime) -> None:
    """Once all replies are kept, the store stays as it is: what the runtime does when it closes goes elsewhere. What it
    does in other threads meanwhile, deletions above all, is in the copy as a whole or not at all."""
    keeper = runtime._keeper
    assert keeper is not None
    epochs, folder = runtime.metrics()["epochs"], Path(keeper.desk.opened.store.url)
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
                assert runtime.client.call(bank.deposit, "alice", 10, request_id=f"r{epoch}") == 10 * epoch
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


# --- verify -----------------------------------------------------------------------------------------------------------


def test_functions_that_depend_on_the_log_alone_are_verified(headrace: Callable[..., Said], store: Path) -> None:
    with unchanged(store):
        code, said, _ = headrace("verify", BANK, "--store", store, "--first", 1, "--json")
    found = json.loads(said)
    assert (code, found["differences"], found["epochs"]) == (0, [], [1, 10])
    assert (found["compared_with_replies"], found["compared_with_a_second_replay"]) == (10, 0)
    code, said, _ = headrace("verify", BANK, "--store", store, "--first", 7, "--last", 8, "--twice", "--json")
    found = json.loads(said)
    assert (code, found["epochs"], found["compared_with_a_second_replay"]) == (0, [7, 8], 2)


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


FICKLE = """
    import itertools
    from headrace import App
    app = App("fickle")
    thing = app.operator("thing")
    counter = itertools.count()

    @thing.register
    def count(ctx) -> int:
        return next(counter)

    @thing.register
    def first_of(ctx) -> str:
        return next(iter({"a", "b", "c", "d", "e", "f", "g", "h"}))

    @thing.register
    def same(ctx) -> int:
        ctx.put(ctx.get(0) + 1)
        return ctx.get()
"""


def test_a_function_whose_results_differ_from_what_was_answered_is_named(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(FICKLE)
    runtime = Runtime(app, store=tmp_path / "store")
    for _ in range(3):
        runtime.client.call("thing.same", "x")
        runtime.client.call("thing.count", "x")
    crash(runtime)
    code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--json")
    (found,) = json.loads(said)["differences"]
    assert (code, found["function"], found["tid"], found["count"], found["was"]) == (1, "thing.count", 2, 3, "0")
    assert "thing.count of 'x' (TID 2" in headrace("verify", target, "--store", tmp_path / "store")[1]


OUTSIDE = """
    import itertools
    from headrace import App
    app = App("outside")
    thing = app.operator("thing")
    numbers = itertools.count(100)
    app.external("ask", lambda key, word: [word, next(numbers)])

    @thing.register
    def draw(ctx) -> list:
        ctx.put([ctx.random.random(), ctx.now.isoformat(), str(ctx.uuid())])
        return ctx.get()

    @thing.register
    async def ask(ctx, word: str) -> list:
        ctx.put(await ctx.call_external("ask", word))
        return ctx.get()

    @thing.register
    def later(ctx) -> str:
        return ctx.call_later(0.001, draw, f"{ctx.key} later")
"""


def test_what_comes_from_chance_time_and_outside_is_the_same_in_a_replay(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(OUTSIDE)
    runtime = Runtime(app, store=tmp_path / "store")
    for n in range(5):
        runtime.client.call("thing.draw", f"draw {n}")
        runtime.client.call("thing.ask", f"ask {n}", "word")
        runtime.client.call("thing.later", f"later {n}")
        eventually(lambda n=n: f"later {n} later" in runtime.state("thing"))
    there = runtime.state("thing")
    crash(runtime)
    code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--first", 1, "--twice", "--json")
    found = json.loads(said)
    assert (code, found["differences"]) == (0, [])
    assert found["compared_with_replies"] == found["compared_with_a_second_replay"] == found["epochs"][1] >= 20
    _, said, _ = headrace("state", "scan", "thing", "--store", tmp_path / "store", "--app", target, "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert {row["key"]: row["state"] for row in rows} == there
    assert len(rows) == 15
    code, _, _ = headrace("restore", target, "--store", tmp_path / "store", "--epoch", 9, "--into", tmp_path / "new")
    assert code == 0
    with Runtime(app, store=tmp_path / "new") as runtime:
        assert runtime.get("thing", "ask 0") == there["ask 0"]
        assert runtime.get("thing", "ask 4") is None


def test_where_no_replies_are_kept_two_replays_are_compared(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(FICKLE)
    runtime = Runtime(app, store=tmp_path / "store")
    runtime.client.call("thing.same", "x")
    runtime.client.call("thing.first_of", "x")
    crash(runtime)
    for file in (tmp_path / "store" / "replies").glob("*.seg"):
        file.unlink()
    names = set()
    for _ in range(6):  # the order of a set depends on the hash seed, which is ours by chance
        code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--json")
        found = json.loads(said)
        assert found["compared_with_a_second_replay"] == 2
        names |= {each["function"] for each in found["differences"]}
        assert code == bool(found["differences"])
    assert names <= {"thing.first_of"}


# --- bad input: each is refused with the file and the next step, and nothing begins empty -----------------------------


def refused(place: Path | str, kind: type[HeadraceError], *words: str, app: App = bank.app) -> str:
    """It does not start, and says why; and it does not start the second time either."""
    said = ""
    for _ in range(2):
        with pytest.raises(kind) as error:
            Runtime(app, store=place).close()
        said = str(error.value)
        assert [word for word in words if word not in said] == [], said
    return said


def test_a_store_of_another_app_is_refused(headrace: Callable[..., Said], store: Path) -> None:
    with unchanged(store):
        refused(store, WrongStore, str(store), "'bank'", "'shop'", "a place of its own", app=App("shop"))
        words = ["run", "examples.shopping_cart:app", "--store", str(store), "--port", "0"]
        said = subprocess.run([sys.executable, "-m", "headrace.cli", *words], capture_output=True, text=True, cwd=ROOT)
        assert said.returncode == 2
        assert "wrong_store" in said.stderr
        assert headrace("verify", "examples.shopping_cart:app", "--store", store)[0] == 2


def test_a_store_of_another_format_is_refused(headrace: Callable[..., Said], store: Path) -> None:
    rewrite_identity(store, format=99)
    with unchanged(store):
        refused(store, WrongStore, f"{store}/{IDENTITY}", "format 99", "use the version that wrote it")
        code, _, complaints = headrace("log", "show", "--store", store)
    assert code == 2
    assert "format 99" in complaints


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
    with pytest.raises(WrongStore, match="64 shards, the configuration 32"):
        Runtime(bank.app, Config(shards=32), store=store).close()


def test_a_directory_with_something_else_in_it_is_refused(headrace: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with unchanged(tmp_path):
        refused(tmp_path, WrongStore, str(tmp_path), IDENTITY, "letter.txt", "another place")
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
        refused(store, StoreError, str(store), "Permission denied", "right to write")


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


# --- changed code -----------------------------------------------------------------------------------------------------

SHOP = """
    import dataclasses
    from headrace import App

    FEE = 1

    @dataclasses.dataclass
    class Wallet:
        money: int = 0

    app = App("shop")
    wallet = app.operator("wallet", state=Wallet)

    @wallet.register
    def pay_in(ctx, amount: int) -> int:
        found = ctx.get(Wallet())
        found.money += amount - FEE
        ctx.put(found)
        return found.money
"""


@pytest.fixture
def shop(app_of: Callable[[str], tuple[str, App]], tmp_path: Path) -> tuple[str, Path]:
    """The name of the old code, and its store; it crashed after two epochs."""
    target, app = app_of(SHOP)
    runtime = Runtime(app, store=tmp_path / "shop")
    for _ in range(2):
        runtime.client.call("wallet.pay_in", "ada", 11)
    crash(runtime)
    return target, tmp_path / "shop"


def test_changed_code_starts_only_after_an_upgrade(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    target, app = app_of(SHOP.replace("FEE = 1", "FEE = 2"))
    with unchanged(store):
        refused(store, AppChanged, str(store), "function wallet.pay_in changed", "`headrace upgrade`", app=app)
        code, _, complaints = headrace("upgrade", target, "--store", store)  # with the new code: no
        assert code == 2
        assert "With the old code" in complaints
        assert headrace("state", "get", "wallet", "ada", "--store", store, "--app", target)[0] == 2
    code, said, _ = headrace("upgrade", old, "--store", store, "--json")
    assert (code, json.loads(said)) == (0, {"epoch": 2, "is_new": True})
    code, said, _ = headrace("upgrade", old, "--store", store, "--json")
    assert (code, json.loads(said)) == (0, {"epoch": 2, "is_new": False})
    with Runtime(app, store=store) as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 30
    with Runtime(app, store=store) as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 40


def test_code_that_was_closed_in_peace_may_be_changed_at_once(
    app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    with Runtime(app_of(SHOP)[1], store=tmp_path / "shop") as runtime:
        runtime.client.call("wallet.pay_in", "ada", 11)
    with Runtime(app_of(SHOP.replace("FEE = 1", "FEE = 2"))[1], store=tmp_path / "shop") as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 20


WIDER = SHOP.replace("money: int = 0", 'money: int = 0\n        owner: str = "nobody"')


def test_a_changed_state_type_needs_a_migration(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, wider = app_of(WIDER)
    with unchanged(store):
        refused(store, AppChanged, "'wallet'", "field owner is new", "migrate=function", app=wider)
    hooked = WIDER.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100, key)")
    _, with_migration = app_of(hooked)
    for money in (2010, 2020):
        with Runtime(with_migration, store=store) as runtime:
            assert runtime.client.call("wallet.pay_in", "ada", 11) == money
            assert runtime.get("wallet", "ada").owner == "ada"


def test_an_operator_that_is_gone_needs_a_word(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, renamed = app_of(SHOP.replace('operator("wallet"', 'operator("purse"'))
    with unchanged(store):
        refused(store, AppChanged, "1 entities of operator 'wallet'", "migrate", app=renamed)
    _, emptied = app_of(SHOP.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: None"))
    for _ in range(2):
        with Runtime(emptied, store=store) as runtime:
            assert runtime.state("wallet") == {}
    Runtime(renamed, store=store).close()


def test_a_migration_runs_once_also_where_the_type_stays_the_same(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, in_cents = app_of(
        SHOP.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100)")
    )
    for _ in range(2):
        with Runtime(in_cents, store=store) as runtime:
            assert runtime.get("wallet", "ada").money == 2000


def test_time_travel_over_a_migration_needs_the_code_of_its_epoch(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    source = WIDER.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100, key)")
    new, app = app_of(source + "    @wallet.register\n    def look(ctx) -> int:\n        return ctx.get().money\n")
    runtime = Runtime(app, store=store)
    runtime.client.call("wallet.pay_in", "ada", 11)
    runtime.client.call("wallet.look", "ada")
    crash(runtime)

    def money(target: str, epoch: int) -> Any:
        code, said, _ = headrace(
            "state", "get", "wallet", "ada", "--store", store, "--app", target, "--epoch", epoch, "--json"
        )
        return json.loads(said)["state"]["money"] if code == 0 else code

    assert [money(old, epoch) for epoch in (2, 3)] == [2_000, 2]  # refused: other code has logged it
    assert [money(new, epoch) for epoch in (2, 3, 4)] == [2_000, 2_010, 2_010]  # 2 is what 3 began with
    assert headrace("verify", new, "--store", store)[0] == 0
    assert headrace("restore", new, "--store", store, "--epoch", 3, "--into", store.parent / "three")[0] == 0
    with Runtime(app, store=store.parent / "three") as runtime:
        assert runtime.client.call("wallet.look", "ada") == 2010


def test_new_code_can_be_verified_against_the_old_log(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    _, store = shop
    same, _ = app_of(SHOP.replace("amount - FEE", "amount - FEE * 1"))
    other, _ = app_of(SHOP.replace("FEE = 1", "FEE = 2"))
    code, said, _ = headrace("verify", same, "--store", store, "--json")
    assert (code, json.loads(said)["other_code"]) == (0, ["function wallet.pay_in changed"])
    code, said, _ = headrace("verify", other, "--store", store, "--json")
    (found,) = json.loads(said)["differences"]
    assert (code, found["function"], found["tid"], found["was"], found["now"]) == (1, "wallet.pay_in", 1, "10", "9")


# --- a broken log -----------------------------------------------------------------------------------------------------


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
        assert runtime.client.call(bank.deposit, "alice", 10, request_id="r7") == 70
        assert runtime.client.call(bank.deposit, "alice", 10, request_id="r8") == 80  # it is gone: it runs anew
    with Runtime(bank.app, store=store) as runtime:
        assert runtime.client.call(bank.deposit, "alice", 10, request_id="r8") == 80
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
                    assert runtime.client.call(bank.deposit, "alice", 10, request_id=f"r{n}") == 10 * n


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


# --- as a user runs it ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the bank from this store, and its address."""
    command = [sys.executable, "-u", "-m", "headrace.cli", "run", BANK, "--store", str(store), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None, process.communicate()[1]
        yield process, found.group()
    finally:
        process.kill()
        process.communicate()


def test_what_was_answered_is_there_after_a_kill(headrace: Callable[..., Said], tmp_path: Path) -> None:
    def deposit(url: str, request_id: str) -> int:
        code, said, _ = headrace("call", "account.deposit", "alice", "10", "--url", url, "--request-id", request_id)
        assert code == 0
        return int(said)

    with served(tmp_path / "store") as (process, url):
        assert [deposit(url, "a"), deposit(url, "b")] == [10, 20]
        code, said, _ = headrace("snapshot", "now", "--url", url)
        assert (code, json.loads(said)) == (0, {"status": "ok", "epoch": 2})
        assert deposit(url, "c") == 30
        process.kill()
    with served(tmp_path / "store") as (process, url):
        assert [deposit(url, "c"), deposit(url, "a"), deposit(url, "d")] == [30, 10, 40]
        process.terminate()
        assert process.wait(30) == 0  # in peace: with a snapshot at its end
    assert headrace("log", "verify", "--store", tmp_path / "store")[0] == 0
    _, said, _ = headrace("state", "get", "account", "alice", "--store", tmp_path / "store", "--json")
    assert json.loads(said) == {"epoch": 4, "exists": True, "state": 40}


def test_who_was_superseded_answers_nothing_more_and_ends(headrace: Callable[..., Said], tmp_path: Path) -> None:
    with served(tmp_path) as (first, old), served(tmp_path) as (_, new):
        code, _, _ = headrace("call", "account.deposit", "alice", "10", "--url", old, "--request-id", "a")
        assert code == 2
        _, said, _ = headrace("call", "account.deposit", "alice", "10", "--url", new, "--request-id", "a")
        assert int(said) == 10
        _, complaints = first.communicate(timeout=120)
        assert first.returncode == 2
        assert "fenced" in complaints
        assert str(tmp_path) in complaints


def test_an_app_without_a_store_takes_no_snapshot() -> None:
    with Runtime(bank.app) as runtime, pytest.raises(HeadraceError, match="--store"):
        runtime.snapshot()
