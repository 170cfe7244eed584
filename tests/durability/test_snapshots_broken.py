"""Snapshots in pieces: crashes at every step, broken objects, zombies."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.core.events import Snapshot
from headrace.core.snapshot_metadata import INITIAL
from headrace.durability.snapshots.manifests import (
    Manifest,
    SnapshotId,
    StoredObject,
    compressed,
    encode_manifest,
    parse_snapshot_id,
)
from headrace.durability.snapshots.snapshots import Snapshots
from headrace.errors import Fenced, SnapshotBroken, StoreError, WrongStore
from headrace.wire.values import MISSING
from tests.durability.snapshot_world import (
    IDENTITY,
    Died,
    MemoryStore,
    dying,
    loaded_epoch,
    metadata_of,
    named,
    new,
    same,
    save,
    shards,
    small_limits,
    tables_at,
    without_empty,
)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_limits():
        yield


# --- crashes ----------------------------------------------------------------------------------------------------------


def life(store: MemoryStore, said: list[int], kind: type[Snapshots] = Snapshots) -> None:
    """Saves, compactions and retirements; `said` gets each epoch that is said to be durable."""
    made = new(store, kind, fold_layers_min=3)
    assert made.load() is None
    for epoch in range(1, 8):
        save(made, epoch, epoch - 1, is_full=epoch == 5)
        said.append(epoch)
        made.compact(1, "f")
        if epoch % 3 == 0:
            kept = [each for each in made.manifests() if each.epoch == epoch - 1]
            for name in made.retire(kept[-1]):
                store.delete(name)


def deaths(kind: type[Snapshots]) -> int:
    """A crash at any step leaves the last snapshot or the next. Returns the number of steps."""
    steps = 0
    for is_done in (False, True):
        for operations in range(1000):
            store, said = MemoryStore(), [0]
            try:
                with dying(store, operations, is_done):
                    life(store, said, kind)
            except Died:
                steps += 1
            else:
                break
            assert loaded_epoch(store) in (said[-1], said[-1] + 1)
            made = new(store)  # and it goes on from there
            loaded = made.load()
            before = loaded.manifest.epoch if loaded is not None else 0
            newest = save(made, 9, before, term=2)
            made.compact(2, "f")
            for name in made.retire(newest):
                store.delete(name)
            assert loaded_epoch(store) == 9
            assert not [
                name
                for name in store.objects
                if parse_snapshot_id(name) < SnapshotId(2, 0, 0) and not named(store, name)
            ]
    return steps


def test_a_crash_at_any_step_leaves_the_last_snapshot_or_the_next() -> None:
    assert deaths(Snapshots) > 60


def test_a_save_that_fails_changes_nothing_and_the_next_one_may_succeed() -> None:
    store = MemoryStore()
    made = new(store)
    save(made, 1, 0)

    for failing in ("state/", "snapshots/"):

        def refuse(operation: str, name: str, failing: str = failing) -> None:
            if name.startswith(failing):
                raise StoreError(f"no {operation} of {name} today")

        store.hook = refuse
        with pytest.raises(StoreError, match="today"):
            save(made, 2, 1)
        store.hook = lambda operation, name: None
        assert loaded_epoch(store) == 1
    save(made, 3, 1)
    assert loaded_epoch(store) == 3
    newest = made.manifests()[-1]
    for name in made.retire(newest):  # and what was left behind goes
        store.delete(name)
    assert all(named(store, name) for name in store.list("state/"))


def in_common(made: type[Snapshots]) -> None:
    """What older snapshots have in common with newer ones stays."""
    store = MemoryStore()
    some = new(store, made)
    manifests = [save(some, epoch, epoch - 1) for epoch in (1, 2, 3)]
    gone = some.retire(manifests[1])
    assert gone[0] == manifests[0].name
    for name in gone:
        store.delete(name)
    assert [loaded_epoch(store, epoch) for epoch in (2, 3)] == [2, 3]
    for name in some.retire(manifests[2]):
        store.delete(name)
    assert loaded_epoch(store) == 3


def test_what_older_snapshots_have_in_common_with_newer_ones_stays() -> None:
    in_common(Snapshots)


def unanswered(made: type[Snapshots]) -> None:
    """The manifest of a fold is created, and the answer is lost. The writer goes on from the layers it knows of."""
    store = MemoryStore()
    some = new(store, made)
    for epoch in (1, 2, 3):
        save(some, epoch, epoch - 1)
    operations = [0]
    store.after = lambda operation, name: operations.__setitem__(0, operations[0] + 1)
    copied = copy.deepcopy(store.objects)
    assert some.compact(1, "f") is not None
    store = MemoryStore()
    store.objects = copied
    some = new(store, made)
    some.load()
    with pytest.raises(StoreError), dying(store, operations[0] - 1, True, StoreError):
        some.compact(2, "f")
    newest = some.manifests()[-1]
    assert (newest.term, newest.is_complete) == (2, True)
    for name in some.retire(newest):
        store.delete(name)
    save(some, 4, 3, term=2)
    assert loaded_epoch(store) == 4


def test_a_manifest_whose_answer_got_lost_does_not_pull_the_ground_away() -> None:
    unanswered(Snapshots)


# --- what is broken ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> MemoryStore:
    """Three snapshots: a base and two layers over it."""
    store = MemoryStore()
    made = new(store)
    for epoch in (1, 2, 3):
        save(made, epoch, epoch - 1)
    return store


def objects_of(store: Any) -> list[str]:
    return [stored.name for stored in new(store).manifests()[-1].body.objects()]


@pytest.mark.parametrize("how", ["missing", "cut short", "a bit"])
def test_a_complete_manifest_whose_object_is_broken_is_an_error_that_names_it(store: MemoryStore, how: str) -> None:
    for name in objects_of(store):
        before = store.objects[name]
        if how == "missing":
            del store.objects[name]
        else:
            store.objects[name] = before[:-1] if how == "cut short" else before[:40] + b"?" + before[41:]
        with pytest.raises(SnapshotBroken, match=re.escape(name)) as caught:
            new(store).load()
        assert "headrace restore --epoch" in str(caught.value)
        assert "memory" in str(caught.value)
        store.objects[name] = before
    assert loaded_epoch(store) == 3


def test_an_older_snapshot_can_be_asked_for(store: MemoryStore) -> None:
    assert [loaded_epoch(store, epoch) for epoch in (1, 2, 3, 4)] == [1, 2, 3, 3]
    only_in_the_last = set(objects_of(store)) - {
        stored.name for each in new(store).manifests()[:-1] for stored in each.body.objects()
    }
    for name in only_in_the_last:
        del store.objects[name]
    with pytest.raises(SnapshotBroken):
        new(store).load()
    assert loaded_epoch(store, 2) == 2
    with pytest.raises(StoreError, match=r"no snapshot of epoch 0 or before; the oldest is of epoch 1"):
        new(store).load(0)


@pytest.mark.parametrize("length", [0, 1, 30, -2, -1])
def test_a_manifest_cut_short_at_the_end_was_never_finished(store: MemoryStore, length: int) -> None:
    name = new(store).manifests()[-1].name
    store.objects[name] = store.objects[name][:length]
    manifests = new(store).manifests()
    assert [each.is_complete for each in manifests] == [True, True, False]
    assert (manifests[-1].epoch, manifests[-1].term) == (3, 1)
    assert "truncated" in manifests[-1].trouble
    assert loaded_epoch(store) == 2
    made = new(store)
    made.load()
    save(made, 3, 2, term=2)
    assert loaded_epoch(store) == 3
    assert [each.is_complete for each in made.manifests()] == [True, True, False, True]
    assert name in made.retire(made.manifests()[-1])


def test_every_flipped_bit_of_a_manifest_is_noticed(store: MemoryStore) -> None:
    name = new(store).manifests()[-1].name
    whole = store.objects[name]
    for i in range(len(whole)):
        store.objects[name] = whole[:i] + bytes((whole[i] ^ 1 << i % 8,)) + whole[i + 1 :]
        assert not new(store).manifests()[-1].is_complete
    assert loaded_epoch(store) == 2


def test_a_broken_manifest_after_which_its_writer_went_on_is_an_error(store: MemoryStore) -> None:
    name = new(store).manifests()[1].name
    store.objects[name] = store.objects[name][:-5]
    assert loaded_epoch(store) == 3
    with pytest.raises(SnapshotBroken, match=re.escape(name)):
        new(store).load(2)
    assert loaded_epoch(store, 1) == 1


def test_a_store_with_nothing_but_a_broken_manifest_is_not_an_empty_one() -> None:
    store = MemoryStore()
    save(new(store), 1, 0)
    (name,) = store.list("snapshots/")
    store.objects[name] = store.objects[name][:-5]
    with pytest.raises(SnapshotBroken, match=re.escape(name)):
        new(store).load()


def test_a_manifest_under_another_name_is_none(store: MemoryStore) -> None:
    name = new(store).manifests()[-1].name
    store.objects[SnapshotId(1, 99, 99).manifest()] = store.objects[name]
    assert not new(store).manifests()[-1].is_complete
    assert loaded_epoch(store) == 3


def test_what_is_read_wrongly_once_is_read_again(store: MemoryStore) -> None:
    wrong: set[str] = set()
    get = store.get

    def get_wrongly_first(name: str) -> bytes:
        if name in wrong:
            return get(name)
        wrong.add(name)
        return b"\0" + get(name)[1:]

    store.get = get_wrongly_first  # type: ignore[method-assign]
    assert loaded_epoch(store) == 3
    assert len(wrong) > 3


def test_snapshots_of_others_are_refused_and_both_are_named(store: MemoryStore) -> None:
    for other in ({"app": "shop"}, {"cluster": "c2"}, {"format": 2}):
        with pytest.raises(WrongStore) as caught:
            Snapshots(store, IDENTITY | other, shards, 8).load()
        ((name, value),) = other.items()
        assert f"{name} {value}" in str(caught.value)
        assert f"{name} {IDENTITY[name]}" in str(caught.value)


def with_body(store: MemoryStore, **changes: Any) -> Manifest:
    """The newest snapshot, after its manifest was written differently, as if by another version."""
    newest = new(store).manifests()[-1]
    store.objects[newest.name] = encode_manifest(msgspec.structs.replace(newest.body, **changes))
    return new(store).manifests()[-1]


@pytest.mark.parametrize("format_number", [1, 99])
def test_a_snapshot_of_another_format_is_refused_by_its_name(store: MemoryStore, format_number: int) -> None:
    described = msgspec.msgpack.encode({"lc": 3, "row": 3, "closed_us": 7, "oldest": 1, "sources": {}})
    manifest = with_body(store, format=format_number, meta=described)
    assert manifest.is_complete
    for read in (lambda: manifest.metadata, new(store).load):
        with pytest.raises(WrongStore) as caught:
            read()
        assert manifest.name in str(caught.value)
        assert f"format {format_number}" in str(caught.value)


@pytest.mark.parametrize(
    "described",
    [
        b"",
        b"\xc1 not msgpack",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"lc": 3, "row": 3, "closed_us": 7}),
        msgspec.msgpack.encode(metadata_of(3))[:-1],
        msgspec.msgpack.encode(msgspec.to_builtins(metadata_of(3)) | {"counts": {"committed": "3", "aborted": 0}}),
    ],
)
@pytest.mark.parametrize("is_inline", [True, False])
def test_metadata_that_cannot_be_read_is_an_error_that_names_it(
    store: MemoryStore, described: bytes, is_inline: bool
) -> None:
    meta: bytes | StoredObject = described
    name = new(store).manifests()[-1].name
    if not is_inline:
        name = new(store).manifests()[-1].snapshot_id.meta()
        store.objects[name] = data = compressed(described)
        meta = StoredObject(name, len(data), zlib.crc32(data))
    with_body(store, meta=meta)
    with pytest.raises(SnapshotBroken, match="metadata") as caught:
        new(store).load()
    assert name in str(caught.value)


def test_what_changed_is_not_saved_over_what_was_not_loaded(store: MemoryStore) -> None:
    with pytest.raises(StoreError, match="load one"):
        save(new(store), 4, 3, term=2)
    made = new(store)
    made.load()
    with pytest.raises(StoreError, match="cannot follow"):
        save(made, 2, 1, term=2)
    save(new(store), 4, 0, term=2, is_full=True)
    assert loaded_epoch(store) == 4


def test_a_look_at_the_past_does_not_change_what_is_continued(store: MemoryStore) -> None:
    made = new(store)
    made.load()
    save(made, 4, 3, term=2)
    made.load(1)
    save(made, 5, 4, term=2)
    assert loaded_epoch(store) == 5


# --- two at a time ----------------------------------------------------------------------------------------------------


def test_a_snapshot_may_be_saved_while_layers_are_folded(store: MemoryStore) -> None:
    made = new(store)
    made.load()

    def save_one(operation: str, name: str) -> None:
        store.hook = lambda operation, name: None
        save(made, 4, 3, term=2)

    store.hook = save_one
    compacted = made.compact(2, "f")
    assert compacted is not None
    assert compacted.epoch == 4
    assert len(compacted.layers) == 2
    assert compacted.snapshot_id == max(each.snapshot_id for each in made.manifests())
    for name in made.retire(compacted):
        store.delete(name)
    assert loaded_epoch(store) == 4
    save(made, 5, 4, term=2)
    assert loaded_epoch(store) == 5


def test_a_full_snapshot_makes_the_fold_it_overtakes_void(store: MemoryStore) -> None:
    made = new(store)
    made.load()

    def save_one(operation: str, name: str) -> None:
        store.hook = lambda operation, name: None
        save(made, 4, 3, term=2, is_full=True)

    store.hook = save_one
    assert made.compact(2, "f") is None
    assert loaded_epoch(store) == 4


def test_what_is_being_written_is_not_retired(store: MemoryStore) -> None:
    made = new(store)
    made.load()
    retired: list[str] = []

    def save_and_retire(operation: str, name: str) -> None:
        store.after = lambda operation, name: None
        retired.extend(made.retire(save(made, 4, 3, term=2)))
        assert name not in retired
        for each in retired:
            store.delete(each)

    store.after = save_and_retire
    assert made.compact(2, "f") is not None
    assert retired
    assert loaded_epoch(store) == 4


def test_a_snapshot_that_is_retired_while_it_is_loaded_gives_way_to_the_newer_one(store: MemoryStore) -> None:
    onlooker = new(store)
    get = store.get

    def get_late(name: str) -> bytes:
        if name.startswith("state/"):
            store.get = get  # type: ignore[method-assign]
            made = new(store)
            made.load()
            for each in made.retire(save(made, 4, 0, term=2, is_full=True)):
                store.delete(each)
        return get(name)

    store.get = get_late  # type: ignore[method-assign]
    loaded = onlooker.load()
    assert loaded is not None
    assert loaded.manifest.epoch == 4
    assert same(loaded.tables, without_empty(tables_at(4)))


# --- zombies ----------------------------------------------------------------------------------------------------------


def asleep(made: type[Snapshots]) -> None:
    """A writer goes on after its successor has folded and retired what it builds upon."""
    store = MemoryStore()
    zombie, successor = new(store, made), new(store, made)
    for epoch in (1, 2, 3, 4):
        save(zombie, epoch, epoch - 1, term=2)
    successor.load()
    folded = successor.compact(3, "f")
    assert folded is not None
    for name in successor.retire(folded):
        store.delete(name)
    save(zombie, 6, 4, term=2)
    with pytest.raises(SnapshotBroken):
        zombie.compact(2, "f")
    assert loaded_epoch(store, made=made) == 4
    save(successor, 5, 4, term=3)
    assert loaded_epoch(store, made=made) == 5


def test_what_a_superseded_writer_still_writes_is_older_than_all_its_successor_wrote() -> None:
    asleep(Snapshots)


def test_a_term_that_is_over_begins_nothing(store: MemoryStore) -> None:
    late, successor = new(store), new(store)
    late.load()
    successor.load()
    save(successor, 4, 3, term=3)
    with pytest.raises(Fenced, match="term 3"):
        save(late, 4, 3, term=2)


def test_two_writers_of_one_term_are_noticed(store: MemoryStore) -> None:
    twins = new(store), new(store)
    for each in twins:
        each.load()
        each._next_id(2, 3, False)  # both have looked at what there is before one of them writes
    save(twins[0], 4, 3, term=2)
    with pytest.raises(Fenced, match="term 2"):
        save(twins[1], 4, 2, term=2)
    assert loaded_epoch(store) == 4


# --- planted mistakes -------------------------------------------------------------------------------------------------


def nine_and_ten(made: type[Snapshots]) -> None:
    """Epochs 1 to 12, in each of which one entity changes, folded at the end into one layer or over a base."""
    for base in (0, 400):
        store = MemoryStore()
        some = new(store, made, fold_layers_min=12, fold_ratio=0.12)
        state: dict[Any, Any] = dict.fromkeys(range(base), 0)
        some.save(Snapshot(0, 1, [("stock", *each) for each in state.items()], INITIAL), 1, "f")
        for epoch in range(1, 13):
            delta = [("stock", "a", epoch), ("stock", epoch, MISSING if epoch in (5, 10) and base else epoch)]
            for _, key, value in delta:
                state[key] = value
                if value == MISSING:
                    del state[key]
            some.save(Snapshot(epoch, epoch + 1, delta, INITIAL), 1, "f")
            delta[:] = [("stock", "b", "changed later")]
        folded = some.compact(1, "f")
        assert folded is not None
        assert len(folded.layers) == (2 if base else 1)
        loaded = new(store).load()
        assert loaded is not None
        assert loaded.tables == {"stock": state}


def test_layers_are_folded_in_the_order_of_their_epochs() -> None:
    nine_and_ten(Snapshots)


def other_code(made: type[Snapshots]) -> None:
    """New code has other shards; an entity of the old shards is deleted, another changes; all is folded."""
    store = MemoryStore()
    code = ["f"]

    def turned(operator: str, keys: Any) -> Any:
        return [shard if code[0] == "f" else 7 - shard for shard in shards(operator, keys)]

    some = new(store, made, shards=turned)
    some.save(Snapshot(1, 2, [("stock", i, i) for i in range(40)], INITIAL), 1, "f")
    code[0] = "g"
    some.save(Snapshot(2, 3, [("stock", i, MISSING if i % 2 else -i) for i in range(40)], INITIAL), 1, "g")
    assert some.compact(1, "g") is not None
    loaded = new(store).load()
    assert loaded is not None
    assert loaded.tables == {"stock": {i: -i for i in range(0, 40, 2)}}


def test_layers_of_other_code_are_folded_by_the_shards_of_today() -> None:
    other_code(Snapshots)
