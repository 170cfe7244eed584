"""The log with one writer: what was acknowledged survives, whatever the disk leaves of the rest."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durability.log import frames
from headrace.durability.log.log import Log, LogRecord, bounds, highest_term, read_log
from headrace.durability.log.segments import find_chain
from headrace.durability.store import DirectoryStore
from headrace.errors import Fenced, LogBroken, StoreError, StoreFull, TooLarge, WrongStore
from headrace.sim import disk as sim_disk
from tests.durability.memory import BOTH, Disk, MemoryStore, Process, data_of, written

# --- without trouble --------------------------------------------------------------------------------------------------


@BOTH
def test_records_are_read_back_in_their_order_with_their_numbers_and_terms(can_append: bool) -> None:
    disk = Disk(can_append)
    log = Log.take_over(disk.store())
    assert (log.term, log.last, log.first) == (1, 0, 1)
    assert log.append([b"one", b"two"]) == 2
    assert log.append([b""]) == 3
    again = Log.take_over(disk.store())
    assert (again.term, again.last) == (2, 3)
    assert list(again.read(1)) == [LogRecord(1, 1, b"one"), LogRecord(2, 1, b"two"), LogRecord(3, 1, b"")]
    assert again.append([b"four"]) == 4
    assert data_of(again.read(2)) == [b"two", b""]  # as found at take-over
    assert list(read_log(disk.store(), first=3)) == [LogRecord(3, 1, b""), LogRecord(4, 2, b"four")]


def test_it_does_the_same_on_a_real_disk(tmp_path) -> None:
    store = DirectoryStore(tmp_path / "bank")
    for term in range(1, 4):
        log = Log.take_over(store, segment_bytes=2000)
        for n in range(20):
            log.append([f"{term} {n}".encode() * 10])
        log.close()
        store.close()
    assert [record.data for record in read_log(DirectoryStore(tmp_path / "bank"))] == [
        f"{term} {n}".encode() * 10 for term in range(1, 4) for n in range(20)
    ]
    assert bounds(store) == (1, 60)
    assert highest_term(store) == 3


@BOTH
def test_an_empty_group_changes_nothing(can_append: bool) -> None:
    disk = Disk(can_append)
    log = Log.take_over(disk.store())
    size = disk.size()
    assert log.append([]) == 0
    assert disk.size() == size


@BOTH
def test_segments_end_at_their_size_and_when_told(can_append: bool) -> None:
    disk = Disk(can_append)
    log = Log.take_over(disk.store(), segment_bytes=1000)
    for _ in range(5):
        log.append([bytes(600)])
    log.roll()
    log.roll()
    log.append([b"x"])
    log.append([b"y"])
    segments = [name for name in disk.files if not name.startswith("log/terms/")]
    assert len(segments) == (6 if can_append else 8)
    assert [record.number for record in Log.take_over(disk.store()).read(1)] == [1, 2, 3, 4, 5, 6, 7]


@BOTH
def test_retired_segments_are_gone_and_asking_for_them_is_an_error(can_append: bool) -> None:
    disk = written(can_append)
    log = Log.take_over(disk.store())
    whole = list(log.read(1))
    names = log.retire(below=8)
    assert names
    assert not set(names) & set(disk.files)
    assert 1 < log.first <= 8
    assert list(log.read(8)) == [record for record in whole if record.number >= 8]
    with pytest.raises(StoreError, match="starts with record"):
        log.read(1)
    with pytest.raises(StoreError, match="starts with record"):
        list(read_log(disk.store(), first=1))
    assert next(read_log(disk.store(), first=None)).number == log.first == bounds(disk.store())[0]
    again = Log.take_over(disk.store())
    assert again.last == 16
    assert list(again.read(8)) == list(log.read(8))
    assert again.append([b"more"]) == 17


@BOTH
def test_what_could_not_be_deleted_is_deleted_by_the_next_call(can_append: bool) -> None:
    disk = written(can_append)
    store = Failing(disk, "delete", StoreError("refused"))
    log = Log.take_over(store)
    for _ in range(3):
        store.is_armed = True
        with pytest.raises(StoreError, match="refused"):
            log.retire(below=12)
    assert log.retire(below=12)
    assert bounds(disk.store())[0] == log.first > 8
    left = {name for name in disk.files if name.startswith("log/0")}
    assert left == {f"log/{ref.name}" for ref in find_chain(disk.store(), "log").refs}


def test_on_a_full_disk_segments_can_be_retired() -> None:
    disk = written()
    store = Failing(disk, "create", StoreFull("full"))
    log = Log.take_over(store)
    store.is_armed = True
    assert log.retire(below=12)
    assert [record.number for record in Log.take_over(disk.store()).read(12)] == [12, 13, 14, 15, 16]


@pytest.mark.parametrize("writers_before", [0, 1])
@pytest.mark.parametrize("room_after", range(8))
def test_on_a_full_disk_no_loss_of_power_leaves_a_hole_whichever_deletions_it_undoes(
    room_after: int, writers_before: int
) -> None:
    """Each of three writers retires a little more, and at each of its operations all ways are looked at in which
    deletions may be undone. `writers_before` of them find room; then the disk is full until `room_after` deletions."""
    disk = sim_disk.Disk(random.Random(0))
    below, room_at = 0, room_after if not writers_before else 0

    def before(store: sim_disk.SimStore, operation: str, name: str) -> None:
        disk.is_full = below > 0 and len(disk.deleted) < room_at
        for twin in after_any_loss_of_power(disk) if below else ():
            found = [record.number for record in read_log(sim_disk.SimStore(twin), first=None)]
            assert found == list(range(found[0], 9)), f"{found} before the {operation} of {name}"
            assert found[0] <= below
            assert Log.take_over(sim_disk.SimStore(twin)).last == 8

    log = Log.take_over(sim_disk.SimStore(disk, before=before), segment_bytes=1)
    for n in range(8):
        log.append([b"%d" % n])
    names = []
    for writer, limit in enumerate((3, 6, 7)):
        below, room_at = limit, room_after + len(disk.deleted) if writer == writers_before else room_at
        names += [log.retire(below), log.retire(below)]
        below, disk.is_full = 0, False
        log = Log.take_over(sim_disk.SimStore(disk, before=before), segment_bytes=1)
    assert names[0], "deleting is what makes room"
    assert log.retire(7) or log.first == 7
    assert bounds(sim_disk.SimStore(disk)) == (7, 8)


def after_any_loss_of_power(disk: sim_disk.Disk) -> Iterator[sim_disk.Disk]:
    gone = sorted(disk.deleted)
    for back in (back for count in range(len(gone) + 1) for back in itertools.combinations(gone, count)):
        twin = sim_disk.Disk(random.Random(0))
        twin.files = {name: file.copy() for name, file in disk.files.items()}
        twin.files |= {name: disk.deleted[name].copy() for name in back}
        yield twin


@BOTH
def test_a_create_that_says_no_although_the_object_is_ours_counts(can_append: bool) -> None:
    """The answer was lost, and the client sent the request again."""

    class Forgetful(MemoryStore):
        def create(self, name: str, data: bytes) -> bool:
            return super().create(name, data) and "terms" in name

    disk = Disk(can_append)
    log = Log.take_over(Forgetful(disk), segment_bytes=1)
    assert [log.append([b"x"]), log.append([b"y"])] == [1, 2]
    assert data_of(read_log(disk.store())) == [b"x", b"y"]


@BOTH
def test_the_newest_segment_is_never_retired(can_append: bool) -> None:
    disk = written(can_append)
    log = Log.take_over(disk.store())
    log.retire(below=1000)
    assert bounds(disk.store()) == ((15, 16) if can_append else (17, 16))  # the last group was written again
    again = Log.take_over(disk.store())
    assert again.last == 16
    assert again.append([b"x"]) == 17


@BOTH
def test_a_deletion_that_a_crash_undoes_does_no_harm(can_append: bool) -> None:
    disk = written(can_append)
    before = dict(disk.files)
    log = Log.take_over(disk.store())
    names = log.retire(below=12)
    for back in names:
        twin = disk.copy()
        twin.files[back] = before[back]
        again = Log.take_over(twin.store())
        assert [record.number for record in again.read(12)] == [12, 13, 14, 15, 16]
        assert again.append([b"x"]) == 17


def test_records_of_any_size_are_streamed_over_the_edges_of_what_is_read_at_once(monkeypatch) -> None:
    monkeypatch.setattr("headrace.durability.log.segments.CHUNK_BYTES", 257)
    disk = Disk()
    log = Log.take_over(disk.store())
    rng = random.Random(5)
    payloads = [rng.randbytes(rng.choice([0, 1, 36, 220, 221, 222, 257, 258, 1000])) for _ in range(200)]
    for payload in payloads:
        log.append([payload])
    assert data_of(read_log(disk.store())) == payloads
    assert Log.take_over(disk.store()).last == 200


def test_reading_holds_a_few_megabytes_and_not_the_log() -> None:
    disk = Disk()
    asked = []

    class Watching(MemoryStore):
        def get(self, name: str) -> bytes:
            raise AssertionError("the whole file")

        def get_part(self, name: str, start: int, size: int) -> bytes:
            asked.append(size)
            return super().get_part(name, start, size)

    log = Log.take_over(disk.store())
    for _ in range(20):
        log.append([bytes(1 << 20)])
    assert sum(len(record.data) for record in Log.take_over(Watching(disk)).read(1)) == 20 << 20
    assert max(asked) <= 4 << 20


def test_a_record_over_the_limit_is_refused_before_anything_is_written(monkeypatch) -> None:
    monkeypatch.setattr("headrace.durability.log.log.RECORD_BYTES_MAX", 100)
    disk = Disk()
    log = Log.take_over(disk.store())
    with pytest.raises(TooLarge, match="smaller"):
        log.append([b"fine", bytes(101)])
    assert log.append([bytes(100)]) == 1


def test_the_replies_are_a_log_of_their_own_fenced_by_the_terms_of_the_log() -> None:
    disk = Disk()
    log = Log.take_over(disk.store())
    replies = Log.take_over(disk.store(), "replies", term=log.term)
    replies.append([b"r1"])
    assert not [name for name in disk.files if name.startswith("replies/terms")]
    second = Log.take_over(disk.store())
    with pytest.raises(Fenced):
        replies.append([b"r2 of a zombie"])
    taken = Log.take_over(disk.store(), "replies", term=second.term)
    assert data_of(taken.read(1))[0] == b"r1"
    with pytest.raises(Fenced):
        Log.take_over(disk.store(), "replies", term=log.term)


def test_terms_go_on_even_if_somebody_removed_the_markers() -> None:
    disk = written()
    for name in [name for name in disk.files if name.startswith("log/terms/")]:
        del disk.files[name]
    assert Log.take_over(disk.store()).term == 3


# --- asking for what is not there -------------------------------------------------------------------------------------


@BOTH
def test_a_log_that_ends_before_what_is_asked_for_is_broken_not_empty(can_append: bool) -> None:
    log = Log.take_over(Disk(can_append).store())
    assert list(log.read(1)) == []
    with pytest.raises(LogBroken, match="ends with record 0, but record 7"):
        log.read(7)
    with pytest.raises(LogBroken, match="ends with record 0"):
        list(read_log(Disk(can_append).store(), first=7))
    disk = written(can_append)
    assert list(read_log(disk.store(), first=17)) == []
    with pytest.raises(LogBroken, match="ends with record 16"):
        list(read_log(disk.store(), first=18))


def test_a_segment_of_a_newer_format_is_named_and_refused() -> None:
    disk = written(groups=1)
    name = find_chain(disk.store(), "log").refs[-1].name
    raw = bytearray(disk.files[f"log/{name}"].data)
    raw[4] = 9  # a sound header of format 9
    head = bytes(raw[: frames.HEADER_BYTES])
    crc = zlib.crc32(head[36:], zlib.crc32(head[:32], zlib.crc32(bytes(8), frames.seed_of(name))))
    raw[32:36] = crc.to_bytes(4, "little")
    disk.files[f"log/{name}"].data = raw
    with pytest.raises(WrongStore, match="format 9"):
        Log.take_over(disk.store())


# --- errors of the store ----------------------------------------------------------------------------------------------


class Failing(MemoryStore):
    """Fails once, at the operation of this name, with this error."""

    def __init__(self, disk: Disk, operation: str, error: BaseException) -> None:
        super().__init__(disk, self._fail)
        self._operation, self._error, self.count = operation, error, 0
        self.is_armed = False

    def _fail(self, operation: str, name: str) -> None:
        if self.is_armed:
            self.count += 1
            if operation == self._operation:
                self.is_armed = False
                raise self._error


@pytest.mark.parametrize("error", [StoreFull("full"), StoreError("refused"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ("can_append", "operation"),
    [(True, "append"), (True, "append more"), (True, "sync"), (True, "exists"), (False, "create"), (False, "exists")],
)
def test_after_any_failure_nothing_more_is_appended(can_append: bool, operation: str, error: BaseException) -> None:
    disk = Disk(can_append)
    store = Failing(disk, operation, error)
    log = Log.take_over(store)
    log.append([b"kept"])
    store.is_armed = True
    with pytest.raises(type(error)):
        log.append([b"uncertain"])
    assert log.last == 1
    store.is_armed, store._operation, store.count = True, "never", 0
    for _ in range(2):
        with pytest.raises(StoreError, match="takes no more records"):
            log.append([b"more"])
        with pytest.raises(StoreError, match="takes no more records"):
            log.check()
    assert store.count == 0  # no write and no sync was tried again
    assert data_of(Log.take_over(disk.store()).read(1)) in ([b"kept"], [b"kept", b"uncertain"])


@BOTH
def test_a_check_or_an_empty_append_of_a_zombie_is_fenced(can_append: bool) -> None:
    disk = Disk(can_append)
    log = Log.take_over(disk.store())
    log.append([b"x"])
    log.check()
    assert log.append([]) == 1
    Log.take_over(disk.store())
    for ask in (log.check, lambda: log.append([]), lambda: log.retire(1)):
        with pytest.raises(Fenced):
            ask()


def test_a_zombie_does_not_bring_a_retired_segment_back() -> None:
    disk = Disk()
    zombie = Log.take_over(disk.store())
    zombie.append([b"one"])
    successor = Log.take_over(disk.store())
    successor.append([b"two"])
    successor.append([b"three"])
    names = successor.retire(below=2)
    assert names
    with pytest.raises(Fenced):
        zombie.append([b"late"])
    assert not set(names) & set(disk.files)
    for garbage in (b"", b"late" * 100):  # not even if it had
        disk.store().put(names[0], garbage)
        assert data_of(Log.take_over(disk.store()).read(2)) == [b"two", b"three"]


def test_a_closed_log_takes_nothing_more() -> None:
    log = Log.take_over(Disk().store())
    log.append([b"x"])
    log.close()
    log.close()
    with pytest.raises(StoreError, match="closed"):
        log.append([b"y"])


def test_what_a_failed_sync_left_in_the_cache_is_written_again_by_the_successor() -> None:
    """The kernel shows the bytes, calls them clean, and has not written them: a later sync says yes and lies."""
    disk = Disk()
    log = Log.take_over(disk.store())
    log.append([b"safe"])
    disk.syncs_that_fail = 1
    with pytest.raises(StoreError):
        log.append([b"in the cache only"])
    successor = Log.take_over(disk.store())
    assert data_of(successor.read(1)) == [b"safe", b"in the cache only"]
    successor.append([b"depends on it"])
    disk.lose_power(lambda unsynced: b"")
    assert data_of(Log.take_over(disk.store()).read(1)) == [b"safe", b"in the cache only", b"depends on it"]


# --- crashes ----------------------------------------------------------------------------------------------------------


def _cut_with_holes(data: st.DataObject) -> Callable[[bytes], bytes]:
    def left(unsynced: bytes) -> bytes:
        if not unsynced:
            return b""
        kind = data.draw(st.sampled_from(["kept", "lost", "cut", "hole", "cut hole", "zeros", "noise"]))
        cut = data.draw(st.integers(0, len(unsynced)))
        start = data.draw(st.integers(0, len(unsynced)))
        hole = unsynced[: min(start, cut)] + bytes(abs(cut - start)) + unsynced[max(start, cut) :]
        return {
            "kept": unsynced,
            "lost": b"",
            "cut": unsynced[:cut],
            "hole": hole,
            "cut hole": hole[: data.draw(st.integers(0, len(unsynced)))],
            "zeros": bytes(len(unsynced)),
            "noise": random.Random(cut).randbytes(len(unsynced)),
        }[kind]

    return left


@BOTH
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_acknowledged_records_survive_any_crash_and_the_others_as_a_prefix(can_append: bool, data) -> None:
    disk = Disk(can_append)
    promised: list[bytes] = []  # acknowledged, or read by a writer after its take-over
    pending: list[bytes] = []  # of the append that did not return
    count = 0
    for _ in range(data.draw(st.integers(1, 6), label="lives")):
        stop_after = data.draw(st.integers(0, 40), label="operations before the crash")
        fails = data.draw(st.sampled_from([0, 0, 0, 1]), label="failing syncs")
        groups = data.draw(st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=4), max_size=8), label="groups")
        named = [[b"%d " % (count := count + 1) + bytes(size) for size in group] for group in groups]
        rolls = data.draw(st.integers(100, 900), label="segment size")
        below = data.draw(st.integers(0, 1), label="retire")
        in_flight: list[list[bytes]] = []

        def live(store: MemoryStore, named=named, rolls=rolls, below=below, in_flight=in_flight, fails=fails) -> None:
            log = Log.take_over(store, segment_bytes=rolls)
            found = list(log.read(log.first))
            whole = [*promised[: log.first - 1], *data_of(found)]
            assert whole[: len(promised)] == promised
            assert whole in [promised + pending[:n] for n in range(len(pending) + 1)]
            assert [record.number for record in found] == list(range(log.first, log.first + len(found)))
            promised[:], pending[:] = whole, []
            disk.syncs_that_fail = fails
            for group in named:
                pending[:] = group
                log.append(group)
                promised.extend(group)
                pending.clear()
            if below and promised:
                log.retire(len(promised) // 2)
            log.close()

        process = Process(disk, live)
        for _ in range(stop_after):
            process.step()
        process.kill()
        if isinstance(process.error, AssertionError):
            raise process.error
        disk.syncs_that_fail = 0
        if data.draw(st.booleans(), label="power is lost"):
            disk.lose_power(_cut_with_holes(data))
    last = Log.take_over(disk.store())
    whole = promised[: last.first - 1] + data_of(last.read(last.first))
    assert whole in [promised + pending[:n] for n in range(len(pending) + 1)]


def test_a_tail_cut_at_any_byte_leaves_whole_records_only() -> None:
    disk = Disk()
    log = Log.take_over(disk.store())
    log.append([b"one"])
    log.append([b"two", b"three"])
    (name,) = (name for name in disk.files if name.endswith(".seg"))
    whole = bytes(disk.files[name].data)
    lengths = set()
    for size in range(frames.HEADER_BYTES, len(whole) + 1):
        twin = disk.copy()
        twin.files[name].data = bytearray(whole[:size])
        found = len(list(read_log(twin.store())))
        assert data_of(read_log(twin.store())) == [b"one", b"two", b"three"][:found]
        again = Log.take_over(twin.store())
        assert again.last == found
        assert again.append([b"next"]) == found + 1
        assert len(data_of(Log.take_over(twin.store()).read(1))) == found + 1
        lengths.add(found)
    assert lengths == {0, 1, 2, 3}


def test_a_newest_segment_with_a_torn_header_is_as_if_it_were_not_there() -> None:
    disk = written(groups=2)
    expected = data_of(read_log(disk.store()))
    before = set(disk.files)
    Log.take_over(disk.store())
    (name,) = (name for name in set(disk.files) - before if name.endswith(".seg"))
    header = bytes(disk.files[name].data[: frames.HEADER_BYTES])
    for torn in (b"", header[:20], header[:-1], bytes(len(header)), bytes([header[0] ^ 1]) + header[1:]):
        twin = disk.copy()
        twin.files[name].data = bytearray(torn)
        assert data_of(read_log(twin.store())) == expected[: len(expected)]
        log = Log.take_over(twin.store())
        assert data_of(log.read(1)) == expected
        assert log.append([b"x"]) == len(expected) + 1
