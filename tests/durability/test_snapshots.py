"""Snapshots against plain dicts: whatever was saved, compacted, retired or cut short, a load gives what was there."""

from __future__ import annotations

import copy
import itertools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from headrace.core.events import Snapshot
from headrace.core.placement import shard_of, shards_of
from headrace.core.snapshot_metadata import INITIAL
from headrace.durability import columns
from headrace.durability.snapshots import layers
from headrace.durability.snapshots.snapshots import Snapshots, first_to_fold
from headrace.durability.store import DirectoryStore
from headrace.errors import BadKey, BadValue, Fenced, SnapshotBroken, StoreError
from headrace.model.operator import Operator
from headrace.wire.values import MISSING, Values
from tests.durability.snapshot_world import (
    IDENTITY,
    OPERATORS,
    SHARDS,
    Died,
    MemoryStore,
    Tables,
    changes,
    dying,
    metadata_of,
    new,
    same,
    shards,
    small_limits,
    without_empty,
)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_limits():
        yield


ints = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-3, 3), st.sampled_from([(1 << 63) - 1, 1 << 63, -(1 << 63)])
)
keys = st.one_of(ints, st.text(max_size=5), st.binary(max_size=5))
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), ints, st.floats(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
sealed = plain.map(Values().seal)
encoded = plain.map(Values().encode)  # scalars too
lists = st.one_of(*(st.lists(some, max_size=40) for some in (sealed, ints, st.text(), st.floats(), encoded, st.none())))


# --- columns and shards -----------------------------------------------------------------------------------------------


@given(lists, st.integers(0, 3))
def test_a_column_gives_back_what_went_in_exactly(values: list[Any], first: int) -> None:
    array = columns.sealed_to_arrow(values)
    assert len(array) == len(values)
    assert same(list(map(_boxed, columns.sealed_from_arrow(array))), list(map(_boxed, values)))
    part = columns.sealed_from_arrow(array[first:])  # also from the middle of a larger one
    assert list(map(_boxed, part)) == list(map(_boxed, values[first:]))


def _boxed(value: Any) -> tuple[str, bytes]:
    return type(value).__name__, struct.pack("d", value) if type(value) is float else repr(value).encode()


@given(st.lists(keys, max_size=40))
def test_keys_survive_and_equal_cells_are_equal_keys(some: list[Any]) -> None:
    array = columns.keys_to_arrow(some)
    assert list(map(_boxed, columns.keys_from_arrow(array))) == list(map(_boxed, some))
    cells = array.to_pylist()
    for (a, left), (b, right) in itertools.combinations(zip(some, cells, strict=True), 2):
        assert (left == right) == (type(a) is type(b) and a == b)


@given(lists)
def test_columns_survive_a_file(values: list[Any]) -> None:
    batch = pa.record_batch({"value": columns.sealed_to_arrow(values)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    found = columns.sealed_from_arrow(pa.ipc.open_file(sink.getvalue()).get_batch(0).column("value"))
    assert list(map(_boxed, found)) == list(map(_boxed, values))


def test_what_is_neither_key_nor_sealed_is_refused() -> None:
    for wrong in (1.5, None, True, (1, 2)):
        with pytest.raises(BadKey):
            columns.keys_to_arrow([1, wrong])
    with pytest.raises(BadValue):
        columns.sealed_to_arrow([[1]])
    with pytest.raises(BadValue):
        columns.sealed_from_arrow(pa.array([1], pa.int32()))


@given(
    st.one_of(st.lists(ints), st.lists(st.text(max_size=90)), st.lists(keys)),
    st.integers(0, 60),
    st.sampled_from([1, 2, 7, 64, 1000]),
)
def test_many_keys_have_the_shards_that_each_has(some: list[Any], more: int, count: int) -> None:
    some = [*some, *(f"user{i}" if some and type(some[0]) is str else i - 30 for i in range(more))]
    operator = OPERATORS["accounts"]
    expected = [shard_of(operator, key, count) for key in some]
    assert list(shards_of(operator, some, count)) == expected
    halved = Operator("halved", partition_by=lambda key: str(key)[:2])
    assert list(shards_of(halved, some, count)) == [shard_of(halved, key, count) for key in some]


def test_keys_that_stand_in_an_array_have_the_same_shards() -> None:
    some = [-(1 << 63), -1, 0, 1, 255, 256, (1 << 63) - 1, *range(-100, 100)]
    for operator in (OPERATORS["accounts"], Operator("halved", partition_by=lambda key: key // 2)):
        column = columns.keys_to_arrow(some).to_numpy()
        assert list(shards_of(operator, column, 64)) == [shard_of(operator, key, 64) for key in some]


# --- saved is saved ---------------------------------------------------------------------------------------------------

ODD: Tables = {
    "accounts": {
        0: 0,
        -1: True,
        1 << 63: False,
        (1 << 64) - 1: None,
        -(1 << 63): -0.0,
        5: math.nan,
        6: math.inf,
        7: 1,
        8: 1.0,
        9: (1 << 64) - 1,
        10: "",
        11: "ä\0€",
        "7": Values().encode((1, [2], "x")),
        b"7": Values().encode(b"raw"),
        "": Values().encode({"a": 1}),
        b"": Values().encode(b""),
        b"\xc1": Values().encode([]),
        b"\xc0": "c0",
        b"\xcf\xff": 3,
    },
    "stock": {"a": "x", 1: 2},
}


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_odd_keys_and_values_survive_exactly(kind: str, is_full: bool, tmp_path: Path) -> None:
    store = MemoryStore() if kind == "memory" else DirectoryStore(tmp_path / "store")
    new(store).save(Snapshot(1, 2, changes({}, ODD), metadata_of(6), is_full), 1, "f")
    loaded = new(store).load()
    assert loaded is not None
    assert same(loaded.tables, ODD)
    manifest = loaded.manifest
    assert (manifest.epoch, manifest.term, manifest.position, manifest.fingerprint) == (1, 1, 2, "f")
    assert manifest.metadata == metadata_of(6)
    assert manifest.identity == IDENTITY
    assert Values().decode(loaded.tables["accounts"]["7"]) == (1, [2], "x")


def test_changes_by_operator_and_key_are_the_same_changes() -> None:
    stores = MemoryStore(), MemoryStore()
    new(stores[0]).save(Snapshot(1, 1, changes({}, ODD), INITIAL), 1, "f")
    new(stores[1]).save(Snapshot(1, 1, copy.deepcopy(ODD), INITIAL), 1, "f")  # type: ignore[arg-type]
    a, b = (new(store).load() for store in stores)
    assert a is not None
    assert b is not None
    assert same(a.tables, b.tables)


def test_an_empty_store_has_no_snapshot_and_an_empty_snapshot_is_one() -> None:
    store = MemoryStore()
    assert new(store).load() is None
    assert new(store).manifests() == []
    new(store).save(Snapshot(3, 4, [], metadata_of(3)), 1, "f")
    loaded = new(store).load()
    assert loaded is not None
    assert (loaded.tables, loaded.manifest.metadata, loaded.manifest.position) == ({}, metadata_of(3), 4)


def test_the_last_of_several_changes_of_an_entity_counts() -> None:
    store = MemoryStore()
    delta = [("stock", "a", 1), ("stock", "b", 1), ("stock", "a", MISSING), ("stock", "b", MISSING), ("stock", "b", 2)]
    new(store).save(Snapshot(1, 1, delta, INITIAL), 1, "f")
    loaded = new(store).load()
    assert loaded is not None
    assert loaded.tables == {"stock": {"b": 2}}


def test_a_full_snapshot_starts_anew() -> None:
    store = MemoryStore()
    made = new(store)
    made.save(Snapshot(1, 1, [("stock", "a", 1), ("stock", "b", 1)], INITIAL), 1, "f")
    full = made.save(Snapshot(2, 2, [("stock", "b", 2)], INITIAL, is_full=True), 1, "f")
    assert len(full.layers) == 1
    for epoch, tables in ((1, {"a": 1, "b": 1}), (2, {"b": 2})):
        loaded = new(store).load(epoch)
        assert loaded is not None
        assert loaded.tables == {"stock": tables}


def test_a_snapshot_costs_what_changed() -> None:
    """Of 20,000 entities ten change: a snapshot and the fold after it write a few kilobytes, and name few objects."""
    store = MemoryStore()
    made = Snapshots(store, IDENTITY, shards, SHARDS)
    with mock.patch.multiple(layers, BATCH_ROWS=8192, FOLD_ROWS=1 << 17):
        made.save(Snapshot(1, 1, [("stock", i, i * i) for i in range(20_000)], INITIAL), 1, "f")
        for epoch in range(2, 40):
            before = store.written_bytes
            manifest = made.save(Snapshot(epoch, 1, [("stock", i, epoch) for i in range(10)], INITIAL), 1, "f")
            made.compact(1, "f")
            assert store.written_bytes - before < 10_000
            assert len(manifest.layers) < 12


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_an_entity_is_written_again_a_logarithmic_number_of_times(ratio: float) -> None:
    weights: list[int] = []
    rewritten = longest = 0
    for _ in range(4096):
        weights.append(1)
        first = first_to_fold(weights, ratio)
        if len(weights) - first >= 4:
            rewritten += sum(weights[first:])
            weights[first:] = [sum(weights[first:])]
        longest = max(longest, len(weights))
    assert sum(weights) == 4096
    assert rewritten <= 4096 * math.log2(4096) * (1 + ratio)
    assert longest <= 4 * math.log2(4096)


# --- the oracle -------------------------------------------------------------------------------------------------------

KEYS = [0, 1, 2, -5, 1 << 40, (1 << 64) - 1, "a", "b", "0", "\0", b"a", b"", b"\xc1"]
VALUES: list[Any] = [0, 1, True, None, -0.0, 1.5, math.nan, "x", "", (1 << 64) - 1, Values().encode((1,)), b"\x90"]
moves = st.lists(
    st.tuples(
        st.sampled_from(["stock", "stock", "orders", "accounts"]),
        st.sampled_from(KEYS),
        st.one_of(st.just(MISSING), st.sampled_from(VALUES)),
    ),
    min_size=1,
    max_size=6,
)


class Writer:
    """A coordinator, as far as snapshots are concerned: the state it knows, and of which epoch it was saved last."""

    def __init__(self, made: Snapshots, term: int, saved: int, until: int) -> None:
        self.snapshots, self.term, self.saved = made, term, saved
        self.until = until  # the last epoch it knows of
        self.to_delete: list[str] = []


class Oracle(RuleBasedStateMachine):
    """Whatever happens, a load gives the state of its epoch, which is not before the last one that was saved."""

    made: type[Snapshots] = Snapshots

    @initialize(
        fold_min=st.integers(2, 3),
        ratio=st.sampled_from([0.5, 0.5, 2.0]),
        part=st.sampled_from([500, 2000]),
        entities=st.sampled_from([40, 0]),
    )
    def begin(self, fold_min: int, ratio: float, part: int, entities: int) -> None:
        self.store = MemoryStore()
        self.code = "f"
        self.options = {"fold_layers_min": fold_min, "fold_ratio": ratio, "part_bytes": part, "shards": self.shards}
        self.states: list[Tables] = [{}]  # by epoch
        self.acknowledged = 0  # the last epoch whose snapshot was said to be durable
        self.kept = 0  # snapshots from this epoch on are still there
        self.term = 0
        self.zombies: list[Writer] = []
        self.writer: Writer
        self.take_over()
        self.run([("stock", i, i) for i in range(entities)])
        self.save(False, "f")

    def shards(self, operator: str, keys: Any) -> Any:
        """Other code has other shards."""
        return [shard if self.code == "f" else SHARDS - 1 - shard for shard in shards(operator, keys)]

    def take_over(self) -> None:
        self.term += 1
        made = new(self.store, self.made, **self.options)
        loaded = made.load()
        if loaded is not None:
            self.check(loaded)
        epoch = loaded.manifest.epoch if loaded is not None else 0
        assert epoch >= self.acknowledged
        self.writer = Writer(made, self.term, epoch, len(self.states) - 1)

    def check(self, loaded: Any) -> None:
        epoch = loaded.manifest.epoch
        assert same(loaded.tables, without_empty(self.states[epoch]))
        assert loaded.manifest.metadata == metadata_of(epoch)
        assert loaded.manifest.position == epoch + 1

    def snapshot(self, writer: Writer, epoch: int, is_full: bool) -> Snapshot:
        before = {} if is_full else self.states[writer.saved]
        return Snapshot(epoch, epoch + 1, changes(before, self.states[epoch]), metadata_of(epoch), is_full)

    @rule(some=moves)
    def run_and_save(self, some: list[tuple[str, Any, Any]]) -> None:
        self.run(some)
        self.save(False, "f")

    @rule(some=st.lists(moves, min_size=2, max_size=4))
    def run_save_and_compact(self, some: list[list[tuple[str, Any, Any]]]) -> None:
        for each in some:
            self.run_and_save(each)
        self.compact("f")

    @rule(some=moves)
    def run(self, some: list[tuple[str, Any, Any]]) -> None:
        tables = copy.deepcopy(self.states[-1])
        for operator, key, value in some:
            if value == MISSING and type(value) is bytes:
                tables.setdefault(operator, {}).pop(key, None)
            else:
                tables.setdefault(operator, {})[key] = value
        self.states.append(tables)
        self.writer.until = len(self.states) - 1

    @rule(is_full=st.sampled_from([False, False, False, True]), fingerprint=st.sampled_from(["f", "f", "g"]))
    def save(self, is_full: bool, fingerprint: str) -> None:
        self.code, epoch = fingerprint, self.writer.until
        taken = self.snapshot(self.writer, epoch, is_full)
        manifest = self.writer.snapshots.save(taken, self.term, fingerprint)
        taken.delta.append(("stock", "a", "changed later"))
        taken.metadata.sources.last.clear()
        assert manifest.epoch == epoch
        self.writer.saved = self.acknowledged = epoch

    @rule(fingerprint=st.sampled_from(["f", "f", "g"]))
    def compact(self, fingerprint: str) -> None:
        self.code = fingerprint
        self.writer.snapshots.compact(self.term, fingerprint)

    @rule(back=st.integers(0, 3))
    def retire(self, back: int) -> None:
        self._retire(self.writer, back)
        self._delete(self.writer)

    def _retire(self, writer: Writer, back: int) -> None:
        epochs = sorted({each.epoch for each in writer.snapshots.manifests() if each.is_complete})
        if epochs:
            epoch = epochs[max(0, len(epochs) - 1 - back)]
            found = [each for each in writer.snapshots.manifests() if each.epoch == epoch and each.is_complete]
            writer.to_delete = writer.snapshots.retire(found[-1])
            self.kept = max(self.kept, epoch)

    def _delete(self, writer: Writer) -> None:
        while writer.to_delete:
            self.store.delete(writer.to_delete[0])
            writer.to_delete.pop(0)

    @rule(
        operations=st.integers(0, 4),
        is_done=st.booleans(),
        what=st.sampled_from(["save", "full", "compact", "retire"]),
        is_zombie=st.booleans(),
    )
    def die(self, operations: int, is_done: bool, what: str, is_zombie: bool) -> None:
        """At any moment; and perhaps it was only asleep, and goes on later."""
        if is_zombie:
            self.zombies.append(self.writer)
        self._try(what, operations, is_done, Died)
        self.take_over()

    @rule(operations=st.integers(0, 4), is_done=st.booleans(), what=st.sampled_from(["save", "full", "compact"]))
    def fail(self, operations: int, is_done: bool, what: str) -> None:
        """The store refuses, or has done it and its answer is lost. The writer goes on."""
        self._try(what, operations, is_done, StoreError)

    def _try(self, what: str, operations: int, is_done: bool, error: type[Exception]) -> None:
        self.run([("orders", "a", len(self.states))])
        try:
            with dying(self.store, operations, is_done, error):
                if what == "compact":
                    self.compact("f")
                elif what == "retire":
                    self.retire(1)
                else:
                    self.save(what == "full", "f")
        except error:
            pass

    @precondition(lambda self: bool(self.zombies))
    @rule(data=st.data(), what=st.sampled_from(["save", "compact", "delete"]))
    def wake(self, data: st.DataObject, what: str) -> None:
        """A coordinator that was superseded goes on with what it had begun."""
        zombie, self.code = data.draw(st.sampled_from(self.zombies)), "f"
        try:
            if what == "save":
                epoch = data.draw(st.integers(zombie.saved, zombie.until))
                zombie.snapshots.save(self.snapshot(zombie, epoch, False), zombie.term, "f")
                zombie.saved = epoch
            elif what == "compact":
                zombie.snapshots.compact(zombie.term, "f")
            else:
                self._delete(zombie)
        except (Fenced, SnapshotBroken):
            pass

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """At any epoch that is kept."""
        loaded = new(self.store, self.made, **self.options).load()
        assert (loaded.manifest.epoch if loaded is not None else 0) >= self.acknowledged
        if loaded is not None:
            self.check(loaded)
            epoch = data.draw(st.integers(min(self.kept, loaded.manifest.epoch), len(self.states) - 1))
            try:
                earlier = new(self.store, self.made, **self.options).load(epoch)
            except SnapshotBroken:
                assert self.zombies  # only what one of them wrote may be in pieces
            except StoreError as error:
                if "no snapshot of epoch" not in str(error):
                    raise
            else:
                assert earlier is not None
                assert earlier.manifest.epoch <= epoch
                self.check(earlier)


def run_oracle(machine: type[Oracle], times: float = 1, **more: Any) -> None:
    limits = settings(max_examples=int(settings().max_examples * times), stateful_step_count=20, **more)
    run_state_machine_as_test(machine, settings=limits)


def test_whatever_happens_a_load_gives_the_state_of_its_epoch() -> None:
    run_oracle(Oracle)
