"""Reading the log: bits that flip are noticed, and onlookers are never misled by what is being written."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durability.log import frames
from headrace.durability.log.log import Log, bounds, read_log
from headrace.durability.log.segments import BrokenAt, find_chain
from headrace.errors import LogBroken, ObjectMissing, StoreError
from tests.durability.memory import BOTH, Disk, MemoryStore, Process, data_of, list_or_error, written

# --- bits that flip ---------------------------------------------------------------------------------------------------


@BOTH
def test_a_flipped_bit_is_a_named_breakage_or_it_concerns_only_the_last_group(can_append: bool) -> None:
    """No evidence says that the very last group was ever durable; for all others there is some."""
    disk = written(can_append)
    expected = list(read_log(disk.store()))
    kinds = set()
    for name, file in disk.files.items():
        if name.startswith("log/terms/"):
            continue
        for place in range(len(file.data)):
            twin = disk.copy()
            twin.files[name].data[place] ^= 1 << place % 8
            found, broken = list_or_error(twin)
            if broken is not None:
                assert broken.file == name
                assert f"{name} is broken at byte {broken.offset}" in str(broken)
                assert "headrace log repair" in str(broken)
                assert broken.offset <= place
                kinds.add("broken")
                continue
            if found != expected:
                assert can_append
                assert found in (expected[:-1], expected[:-2])
            kinds.add(len(expected) - len(found))
    assert kinds == ({"broken", 0, 1, 2} if can_append else {"broken"})  # 0: bytes that were written again elsewhere


def test_in_a_log_that_was_closed_every_flipped_bit_is_noticed() -> None:
    disk = Disk()
    log = Log.take_over(disk.store())
    log.append([b"one", b"two"])
    log.append([b"three"])
    log.close()
    (name,) = (name for name in disk.files if name.endswith(".seg"))
    end = len(disk.files[name].data) - frames.HEAD_BYTES  # the mark itself may be lost
    for place in range(end):
        twin = disk.copy()
        twin.files[name].data[place] ^= 4
        with pytest.raises(LogBroken):
            list(Log.take_over(twin.store()).read(1))


def test_what_is_read_wrong_once_is_read_again() -> None:
    disk = written()
    expected = list(read_log(disk.store()))
    reads = 0

    class Flipping(MemoryStore):
        """One read of all gives one wrong bit, at this part of what is read."""

        def __init__(self, wrong: int, part: float) -> None:
            super().__init__(disk.copy())
            self.wrong, self.part, self.reads = wrong, part, 0

        def get_part(self, name: str, start: int, size: int) -> bytes:
            nonlocal reads
            raw = bytearray(super().get_part(name, start, size))
            self.reads = reads = self.reads + 1
            if self.reads == self.wrong and raw:
                raw[int(len(raw) * self.part)] ^= 8
            return bytes(raw)

    for part in (0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99):
        wrong = 0
        while wrong <= reads:
            wrong += 1
            assert list(Log.take_over(Flipping(wrong, part)).read(1)) == expected, (wrong, part)
        assert wrong > 10


def test_a_record_that_holds_the_picture_of_a_frame_does_not_confuse_the_reader() -> None:
    """A log in a record of a log: after a crash in the middle of it, its inner frames prove nothing."""
    inner = Disk()
    log = Log.take_over(inner.store())
    for n in range(5):
        log.append([b"inner %d" % n])
    (name,) = (name for name in inner.files if name.endswith(".seg"))
    picture = bytes(inner.files[name].data)
    disk = Disk()
    outer = Log.take_over(disk.store())
    outer.append([b"one"])
    outer.append([picture[frames.HEADER_BYTES :], picture])
    (name,) = (name for name in disk.files if name.endswith(".seg"))
    raw = disk.files[name].data
    raw[frames.HEADER_BYTES + frames.HEAD_BYTES + 3 + 5] ^= 255  # the head of the second record
    assert data_of(Log.take_over(disk.store()).read(1)) == [b"one"]


def test_lost_records_keep_their_numbers_and_are_no_matter_to_who_does_not_need_them() -> None:
    """Whatever record is broken: who asks for it is told, who begins after it (from a snapshot) goes on."""
    disk = Disk()
    log = Log.take_over(disk.store(), segment_bytes=400)
    for n in range(8):
        log.append([b"first of %d" % n, b"second of %d" % n])
    log.close()
    records = list(read_log(disk.store()))
    for name in [name for name in disk.files if name.endswith(".seg")]:
        size = len(disk.files[name].data)
        for place in range(frames.HEADER_BYTES, size - frames.HEAD_BYTES, 5):
            twin = disk.copy()
            twin.files[name].data[place] ^= 2
            _, broken = list_or_error(twin)
            assert broken is not None
            again = Log.take_over(twin.store())
            assert again.last == 16
            assert list(again.read(broken.number + 1)) == records[broken.number :]
            assert list(read_log(twin.store(), first=broken.number + 1)) == records[broken.number :]
            with pytest.raises(BrokenAt):
                list(again.read(broken.number))
            assert again.append([b"more"]) == 17
            assert data_of(Log.take_over(twin.store()).read(17)) == [b"more"]
            assert bounds(twin.store()) == (1, 17)


def test_a_missing_segment_in_the_middle_is_named() -> None:
    disk = written()
    refs = find_chain(disk.store(), "log").refs
    assert len({ref.term for ref in refs}) == 2
    for ref in refs[:-1]:
        twin = disk.copy()
        del twin.files[f"log/{ref.name}"]
        log = Log.take_over(twin.store())
        with pytest.raises(StoreError, match=f"{ref.name}.* missing"):
            list(log.read(1))
        assert list(log.read(16))


# --- onlookers --------------------------------------------------------------------------------------------------------


@BOTH
@given(pace=st.lists(st.integers(0, 8), max_size=40))
@settings(max_examples=200, deadline=None)
def test_an_onlooker_reads_a_prefix_while_the_log_is_written_and_never_finds_it_broken(
    can_append: bool, pace: list[int]
) -> None:
    disk = Disk(can_append)
    payloads = [[b"%d-%d" % (n, m) + bytes(60) for m in range(2)] for n in range(6)]
    flat = [payload for group in payloads for payload in group]

    def write(store: MemoryStore) -> None:
        for group in (payloads[:3], payloads[3:]):
            log = Log.take_over(store, segment_bytes=500)
            for payload in group:
                log.append(payload)

    writer = Process(disk, write)
    reader = Process(disk, lambda store: data_of(read_log(store)))
    for count in pace:  # of the writer's steps before each of the reader's
        for _ in range(count):
            writer.step()
        reader.step()
    reader.finish()
    assert reader.error is None, reader.error
    assert reader.result == flat[: len(reader.result)]
    writer.finish()
    assert data_of(read_log(disk.store())) == flat


@BOTH
def test_an_onlooker_that_saw_half_a_record_is_not_misled_by_what_it_sees_later(can_append: bool) -> None:
    """The writer stops anywhere, the onlooker reads up to anywhere, the writer comes to its end, then the onlooker."""

    def write(store: MemoryStore) -> None:
        log = Log.take_over(store, segment_bytes=400)
        for n in range(4):
            log.append([b"%d" % n * 30])

    expected = [b"%d" % n * 30 for n in range(4)]
    steps = Process(Disk(can_append), write).finish().steps
    for before in range(steps + 1):
        for seen in itertools.count():
            disk = Disk(can_append)
            writer = Process(disk, write)
            for _ in range(before):
                writer.step()
            reader = Process(disk, lambda store: data_of(read_log(store)))
            for _ in range(seen):
                reader.step()
            is_over = reader.is_over
            writer.finish()
            reader.finish()
            assert reader.error is None, (before, seen, reader.error)
            assert reader.result == expected[: len(reader.result)]
            if is_over:
                break


def test_an_onlooker_goes_on_when_segments_are_retired_under_its_eyes() -> None:
    disk = written(groups=6)
    log = Log.take_over(disk.store())
    reader = read_log(disk.store(), first=1)
    got = [next(reader).number]
    log.retire(below=14)
    with pytest.raises(StoreError, match=r"starts with record|missing"):
        got += [record.number for record in reader]
    assert got == list(range(1, len(got) + 1))
    with pytest.raises(ObjectMissing):
        disk.store().get("log/none")
