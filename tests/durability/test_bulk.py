"""Bulk loads, without Spark: all or nothing, wherever they are cut short."""

from __future__ import annotations

import dataclasses
import math
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest

from headrace import App, Config, Context, Places, Runtime
from headrace.core.program import state_codec
from headrace.durability.columns import join
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.reading.views import EpochEnd, View
from headrace.durability.snapshots.bulk import BulkLoad, BulkTarget, ColumnSealer, deletions, duplicate, write
from headrace.durability.store import DirectoryStore
from headrace.errors import BadRequest, StoreError
from headrace.wire.values import Values

app = App("bank")
account = app.operator("account")
other = app.operator("other")


@account.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get(0))


@other.register
def touch(ctx: Context) -> None:
    ctx.put("touched")


class Crash(BaseException):
    """The process is gone."""


class Mortal(DirectoryStore):
    """Dies before, or after, the n-th thing it is asked to change."""

    def __init__(self, path: Path, lives: int, is_after: bool) -> None:
        super().__init__(path)
        self.lives, self.is_after = lives, is_after

    def _change(self, work: Any, *given: Any) -> Any:
        self.lives -= 1
        if self.lives < 0 or (self.lives == 0 and not self.is_after):
            raise Crash
        found = work(*given)
        if self.lives == 0:
            raise Crash
        return found

    def put(self, name: str, data: bytes) -> None:
        self._change(super().put, name, data)

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._change(super().create, name, data))

    def append(self, name: str, data: bytes) -> None:
        self._change(super().append, name, data)

    def delete(self, name: str) -> None:
        self._change(super().delete, name)


NEW = {key: key * 3 for key in range(40, 60)}


def load_new(store: DirectoryStore) -> None:
    """What load.py does, without Spark: 20 entities in the place of all there are."""
    bulk = BulkLoad(store, app, Config())
    target = BulkTarget(bulk.snapshot_id, account, 64)
    assert bulk.base is not None
    view = View(store, "account")
    moment = EpochEnd(bulk.base.epoch, bulk.base.snapshot_id)
    found = view.read(moment, view.app_fingerprint(moment))
    gone = write(store, target, 0, ((each.keys, deletions(each.keys)) for each in found))
    sealing = ColumnSealer(Config())
    keys = sealing.keys(pa.array(list(NEW)))
    states = sealing.states({"n": pa.array(list(NEW.values()))}, lambda row: list(NEW)[row])
    layer = write(store, target, 100, iter([(keys, states)]))
    bulk.publish("account", [gone, layer])
    bulk.close()


@pytest.mark.parametrize("is_after", [False, True])
def test_a_load_that_is_cut_short_anywhere_has_happened_or_not(tmp_path: Path, is_after: bool) -> None:
    config = Config(snapshot_interval_us=1 << 60)
    with Runtime(app, config, store=tmp_path / "before") as runtime:
        for number in range(3):
            runtime.client.batch([(add, key, 1 + number) for key in range(50)])
            runtime.client.call(touch, "x")
            runtime.snapshot()
    old = dict.fromkeys(range(50), 6)
    seen = []
    for lives in range(1, 100):
        where = tmp_path / f"store{lives}"
        shutil.copytree(tmp_path / "before", where)
        try:
            load_new(Mortal(where, lives, is_after))
            is_cut = False
        except Crash:
            is_cut = True
        with Runtime(app, config, store=where) as runtime:
            state = dict(runtime.state(account))
            assert state in (old, NEW), lives
            assert runtime.state(other) == {"x": "touched"}
            seen.append(state == NEW)
            assert runtime.client.call(add, 45, 100) == state[45] + 100
        replay = StoreReader(
            where, app
        ).replay()  # from whatever snapshot it begins, it meets the load or begins behind it
        assert dict(replay.engine.state.tables["account"].items()) == state | {45: state[45] + 100}
        shutil.rmtree(where)
        if not is_cut:
            break
    assert seen == sorted(seen)  # first it has not happened, then it has
    assert seen[0] is False
    assert seen[-1] is True


def test_before_a_load_nothing_of_the_past_is_left_that_could_be_run_again(tmp_path: Path) -> None:
    with Runtime(app, Config(snapshot_interval_us=1 << 60), store=tmp_path) as runtime:
        for number in range(3):
            runtime.client.batch([(add, key, 1 + number) for key in range(50)])
            runtime.snapshot()
    load_new(DirectoryStore(tmp_path))
    assert {manifest.epoch for manifest in StoreReader(tmp_path).snapshots.manifests()} == {3}
    assert StoreReader(tmp_path, app).replay(3).state()["account"] == NEW
    with pytest.raises(StoreError):
        StoreReader(tmp_path, app).replay(2)


def test_a_store_with_more_in_its_log_is_not_loaded(tmp_path: Path) -> None:
    runtime = Runtime(app, Config(snapshot_interval_us=1 << 60), store=tmp_path)
    runtime.client.call(add, 1, 1)
    with pytest.raises(StoreError, match="has epochs that are in no snapshot"):
        BulkLoad(DirectoryStore(tmp_path), app, Config())


def test_a_key_that_stands_twice_is_found() -> None:
    sealing = ColumnSealer(Config())
    assert duplicate(sealing.keys(pa.array([1, 2, 3]))) is None
    assert duplicate(sealing.keys(pa.array([1, 2, 1]))) == 1
    assert duplicate(sealing.keys(pa.array(["a", "b", "b"]))) == "b"
    assert duplicate(sealing.keys(pa.array([b"", b"\xc1", b""]))) is not None


def test_keys_keep_their_type_and_null_is_none() -> None:
    sealing = ColumnSealer(Config())
    for keys in ([1, -(1 << 63)], ["a", "ü"], [b"", b"\xc1", b"\xcf2345678"]):
        assert join(sealing.keys(pa.array(keys))) == keys
    with pytest.raises(BadRequest, match="a row has no key"):
        sealing.keys(pa.array([1, None]))


@dataclasses.dataclass
class Bill:
    number: int
    total: Annotated[Decimal, Places(6, 2)]
    note: str | None


def test_a_row_that_does_not_have_the_declared_type_is_refused_with_its_field() -> None:
    sealer = ColumnSealer(Config(), record="Bill", nullable=["note"], hint=Bill, records=[Bill])
    columns = {
        "number": pa.array([1, 2, 3]),
        "total": pa.array([Decimal("1.50"), Decimal("0.05"), Decimal("9999.99")]),
        "note": pa.array(["a", None, "c"]),
    }
    codec = state_codec(App("bills").operator("bill", state=Bill), Values([Bill]))
    sealed = join(sealer.states(columns, lambda row: f"k{row}"))
    assert sealed[1] == codec.seal(Bill(2, Decimal("0.05"), None))
    for name, wrong, says in (
        (
            "total",
            pa.array([Decimal("1.5"), Decimal("0.055"), Decimal(1)]),
            r"wanted .*Places\(6, 2\), found .*Decimal",
        ),
        ("number", pa.array(["1", "2", "x"]), r"wanted int, found '1' \(str\)"),
        ("note", pa.array([b"a", b"b", None]), r"wanted str \| None, found b'a' \(bytes\)"),
    ):
        with pytest.raises(BadRequest, match=rf"^{name} of the row with key 'k\d' does not fit: {says}"):
            sealer.states(columns | {name: wrong}, lambda row: f"k{row}")


@dataclasses.dataclass
class Flat:
    count: int
    name: str | None
    rate: float


def test_a_loaded_record_has_the_bytes_that_a_function_would_have_put() -> None:
    codec = state_codec(App("flat").operator("flat", state=Flat), Values([Flat]))
    assert codec.native is not None
    rows = [Flat(1, "a", 0.5), Flat(-(1 << 40), None, math.inf)]
    columns = {name: pa.array([getattr(row, name) for row in rows]) for name in ("count", "name", "rate")}
    sealer = ColumnSealer(Config(), record="Flat", head=codec.native.head, nullable=["name"])
    assert join(sealer.states(columns, str)) == [codec.seal(row) for row in rows]
