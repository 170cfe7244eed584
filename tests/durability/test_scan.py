"""Scans against dicts: whatever the layers, some readers together see each entity once, as it was written last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.events import Snapshot
from headrace.core.placement import shard_of, shards_of
from headrace.core.snapshot_metadata import INITIAL
from headrace.durability.columns import join
from headrace.durability.reading.scan import LaterStates, Scan
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.model.operator import Operator
from headrace.wire.values import MISSING, Values, wrap
from tests.durability.snapshot_world import IDENTITY, MemoryStore

SHARDS = 8
OPERATORS = {name: Operator(name) for name in ("account", "order")}

KEYS = st.one_of(
    st.integers(-5, 5), st.sampled_from(["", "a", "b", "ü"]), st.sampled_from([b"", b"a", b"\xc1", b"\xcf12345678"])
) | st.sampled_from([1 << 63, -(1 << 63)])
STATES = st.one_of(
    st.just(MISSING),
    st.integers(-3, 3),
    st.sampled_from(["x", "", 1.5, None, True, 1 << 63]),
    st.lists(st.integers(0, 3), max_size=2).map(Values().seal),
)
DELTA = st.dictionaries(st.sampled_from(list(OPERATORS)), st.dictionaries(KEYS, STATES, max_size=12), max_size=2)


def made(deltas: list[dict[str, dict[Any, Any]]], compacts: bool, part_bytes: int) -> tuple[MemoryStore, Any]:
    store = MemoryStore()
    snapshots = Snapshots(
        store,
        IDENTITY,
        lambda name, keys: shards_of(OPERATORS[name], keys, SHARDS),
        SHARDS,
        fold_layers_min=2,
        part_bytes=part_bytes,
    )
    for epoch, delta in enumerate(deltas, 1):
        snapshots.save(Snapshot(epoch, 1, delta, INITIAL), 1, "print")
        if compacts:
            snapshots.compact(1, "print")
    return store, snapshots.manifests()[-1]


def folded(deltas: list[dict[str, dict[Any, Any]]], name: str) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for delta in deltas:
        state.update(delta.get(name, {}))
    return {key: value for key, value in state.items() if value != MISSING}


def read(scan: Scan, count: int, **given: Any) -> list[tuple[Any, Any]]:
    rows = []
    for within in scan.ranges(count, given.get("keys")):
        for found in scan.read(within, **given):
            keys = join(found.keys)
            assert len(keys) == len(found)
            assert all(column.null_count < len(column) for column in (*found.keys.values(), *found.states.values()))
            if scan.operator is not None:
                assert all(within[0] <= shard_of(scan.operator, key, SHARDS) <= within[1] for key in keys)
            rows += zip(keys, join(found.states), strict=True)
    return rows


def exactly(rows: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """By key and type: True is 1 to a dict. No entity is there twice."""
    found = {(type(key), key): (type(state), state) for key, state in rows}
    assert len(found) == len(rows)
    return found


@given(st.lists(DELTA, min_size=1, max_size=5), st.booleans(), st.sampled_from([1, 1 << 20]), st.integers(1, 5))
def test_readers_together_see_each_entity_once(
    deltas: list[dict[str, dict[Any, Any]]], compacts: bool, part_bytes: int, count: int
) -> None:
    store, manifest = made(deltas, compacts, part_bytes)
    for name, operator in OPERATORS.items():
        state = folded(deltas, name)
        scan = Scan(store, manifest, name, SHARDS, operator)
        assert len(scan.ranges(count)) <= count
        assert exactly(read(scan, count)) == exactly(list(state.items()))


@given(st.lists(DELTA, min_size=1, max_size=4), st.lists(KEYS, max_size=6), st.booleans())
def test_who_wants_some_keys_sees_those(
    deltas: list[dict[str, dict[Any, Any]]], keys: list[Any], is_known: bool
) -> None:
    store, manifest = made(deltas, False, 1)
    scan = Scan(store, manifest, "account", SHARDS, OPERATORS["account"] if is_known else None)
    wanted = {(type(key), key) for key in keys}
    state = {key: value for key, value in folded(deltas, "account").items() if (type(key), key) in wanted}
    assert exactly(read(scan, 3, keys=keys)) == exactly(list(state.items()))


@given(st.lists(DELTA, max_size=3), st.dictionaries(KEYS, STATES, max_size=10), st.lists(KEYS, max_size=4) | st.none())
def test_what_changed_later_lies_over_the_snapshot(
    deltas: list[dict[str, dict[Any, Any]]], later: dict[Any, Any], keys: list[Any] | None
) -> None:
    store, manifest = made(deltas, False, 1 << 20) if deltas else (MemoryStore(), None)
    scan = Scan(store, manifest, "account", SHARDS, OPERATORS["account"])
    state = folded([*deltas, {"account": later}], "account")
    if keys is not None:
        wanted = {(type(key), key) for key in keys}
        state = {key: value for key, value in state.items() if (type(key), key) in wanted}
    assert exactly(read(scan, 2, keys=keys, later=LaterStates(later))) == exactly(list(state.items()))


def test_a_state_whose_time_is_over_is_not_there() -> None:
    states = {"old": wrap(5, 100), "new": wrap(Values().seal([1, 2]), 200)}
    store, manifest = made([{"account": states}], False, 1 << 20)
    scan = Scan(store, manifest, "account", SHARDS, OPERATORS["account"])
    assert {key for key, _ in read(scan, 2, ttl=(50, 149))} == {"old", "new"}
    assert {key for key, _ in read(scan, 2, ttl=(50, 150))} == {"new"}
    assert read(scan, 2, ttl=(50, 250)) == []


def test_only_files_with_the_wanted_shards_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["account"]
    state = {key: key for key in range(100_000)}
    store, manifest = made([{"account": state}], False, 1)
    assert len(manifest.layers[0].objects) == SHARDS
    scan = Scan(store, manifest, "account", SHARDS, operator)
    seen: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda name: (seen.append(name), get(name))[1])
    assert read(scan, 4, keys=[77]) == [(77, 77)]
    home = shard_of(operator, 77, SHARDS)
    assert seen == [each.name for each in manifest.layers[0].objects if each.shards == (home, home)]
    seen.clear()
    first, *_ = scan.ranges(4)
    assert sum(map(len, scan.read(first))) == sum(shard_of(operator, key, SHARDS) <= first[1] for key in state)
    assert len(seen) == first[1] - first[0] + 1


def test_layers_of_other_code_are_read_as_one() -> None:
    """Two layers may have an entity in different shards if `partition_by` changed: nobody may read a part of them."""
    store = MemoryStore()
    other = Operator("account", partition_by=lambda key: key % 3)
    first = Snapshots(store, IDENTITY, lambda name, keys: shards_of(other, keys, SHARDS), SHARDS)
    first.save(Snapshot(1, 1, {"account": dict.fromkeys(range(50), 1)}, INITIAL), 1, "old")
    second = Snapshots(store, IDENTITY, lambda name, keys: shards_of(OPERATORS[name], keys, SHARDS), SHARDS)
    second.load()
    manifest = second.save(Snapshot(2, 1, {"account": dict.fromkeys(range(0, 50, 2), 2)}, INITIAL), 2, "new")
    scan = Scan(store, manifest, "account", SHARDS, OPERATORS["account"])
    assert scan.ranges(4) == [(0, SHARDS - 1)]
    (within,) = scan.ranges(4)
    rows = [row for found in scan.read(within) for row in zip(join(found.keys), join(found.states), strict=True)]
    assert dict(rows) == {key: 1 if key % 2 else 2 for key in range(50)}
    assert len(rows) == 50
