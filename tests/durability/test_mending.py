"""Looking into a broken log, and repairing it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durability.log.examine import cut
from headrace.durability.log.frames import HEADER_BYTES
from headrace.durability.log.log import Log, LogRecord, examine, highest_term, read_log, repair
from headrace.durability.log.segments import find_chain
from headrace.durability.store import DirectoryStore
from headrace.errors import Fenced, LogBroken
from tests.durability.memory import BOTH, Disk, Process


def written(can_append: bool = True) -> tuple[Disk, list[LogRecord]]:
    """Three terms, several segments in each, two records in a group, closed at the end."""
    disk = Disk(can_append)
    for term in range(3):
        log = Log.take_over(disk.store(), segment_bytes=300)
        for n in range(3):
            log.append([b"first of %d %d" % (term, n), b"second of %d %d" % (term, n)])
    log.close()
    return disk, list(read_log(disk.store()))


def segments(disk: Disk) -> list[str]:
    return [f"log/{ref.name}" for ref in find_chain(disk.store(), "log").refs]


@BOTH
def test_a_sound_log_is_reported_with_its_segments_terms_and_records(can_append: bool) -> None:
    disk, records = written(can_append)
    report = examine(disk.store())
    assert report.is_sound
    assert (report.first, report.last, report.records, report.terms) == (1, 18, 18, [1, 2, 3])
    assert [part.file for part in report.segments] == segments(disk)
    assert all(part.is_sound for part in report.segments)
    assert report.orphans == []
    assert "18 records, 1 to 18" in report.lines()[0]
    assert len(records) == 18


def test_an_empty_store_has_an_empty_sound_log() -> None:
    report = examine(Disk().store())
    assert report.is_sound
    assert (report.first, report.last, report.records) == (1, 0, 0)


def test_a_torn_tail_is_reported_and_is_no_breakage() -> None:
    disk, _ = written()
    log = Log.take_over(disk.store())
    log.append([b"x" * 100])
    name = segments(disk)[-1]
    del disk.files[name].data[-10:]
    report = examine(disk.store())
    assert report.is_sound
    (torn,) = (each for each in report.ignored if each.file == name)
    assert torn.offset + torn.bytes == len(disk.files[name].data)
    assert "torn tail" in torn.why
    assert report.last == 18
    assert repair(disk.store()).lost is None
    assert highest_term(disk.store()) == 4  # nobody was fenced for it


def test_what_a_zombie_wrote_is_reported_as_ignored_and_losers_as_orphans() -> None:
    disk = Disk()
    zombie = Log.take_over(disk.store())
    zombie.append([b"one"])
    loser = Process(disk, lambda store: Log.take_over(store))
    while not (loser.next[0] == "create" and loser.next[1].endswith(".seg")):
        loser.step()
    Log.take_over(disk.store()).append([b"two"])
    loser.finish()
    with pytest.raises(Fenced):
        zombie.append([b"late"])
    report = examine(disk.store())
    assert report.is_sound
    assert len(report.orphans) == 1
    assert ["another segment" in each.why for each in report.ignored] == [True]
    assert any("not part of the log" in line for line in report.lines())


@BOTH
def test_every_flipped_bit_of_a_closed_log_is_reported_where_it_is(can_append: bool) -> None:
    disk, records = written(can_append)
    silent = 0
    for name in segments(disk):
        for place in range(0, len(disk.files[name].data), 3):
            twin = disk.copy()
            twin.files[name].data[place] ^= 16
            report = examine(twin.store())
            if report.is_sound:
                silent += 1
                assert list(read_log(twin.store())) == records
                continue
            trouble = report.broken[0]
            assert trouble.file == name
            assert trouble.offset <= place
            assert any(f"{name} at byte {trouble.offset}" in line for line in report.lines())
            if report.broken[0].offset:
                assert report.records == 17
    assert silent < (100 if can_append else 1)  # the mark, and what was written again by a successor


@BOTH
def test_a_repair_cuts_before_the_first_broken_record_and_keeps_the_rest(can_append: bool) -> None:
    disk, records = written(can_append)
    for name in segments(disk):
        for place in range(0, len(disk.files[name].data), 7):
            twin = disk.copy()
            twin.files[name].data[place] ^= 16
            try:
                assert list(Log.take_over(twin.store()).read(1)) == records
                continue
            except LogBroken as error:
                broken = error
            before = {key: bytes(file.data) for key, file in twin.files.items()}
            report = repair(twin.store())
            kept = list(Log.take_over(twin.store()).read(1))
            assert kept == records[: len(kept)]
            if place < HEADER_BYTES:
                assert kept == records  # a header is made anew, and nothing is lost
                assert report.lost is None
            else:
                assert len(kept) == broken.number - 1  # type: ignore[attr-defined]
                assert report.lost == (len(kept) + 1, 18)
            cut = {name: before[name]}  # of the broken header's file all, else all from the broken record on
            if place >= HEADER_BYTES:
                cut = {name: before[name][broken.offset :]}  # type: ignore[attr-defined]
                stays = segments(disk)[: segments(disk).index(name)]
                cut = {key: data for key, data in before.items() if key.startswith("log/0") and key not in stays} | cut
            assert {_origin(saved): bytes(twin.files[saved].data) for saved in report.saved} == cut
            assert examine(twin.store()).is_sound
            log = Log.take_over(twin.store())
            assert log.append([b"goes on"]) == len(kept) + 1


def _origin(saved: str) -> str:
    return saved.split("/", 2)[2].split(".from-")[0]


def test_a_repair_looks_only_at_what_a_snapshot_still_needs() -> None:
    disk, records = written()
    part = next(part for part in examine(disk.store()).segments if part.first > 1 and part.records > 1)
    disk.files[part.file].data[HEADER_BYTES + 40] ^= 1
    broken = examine(disk.store()).broken[0]
    needed = broken.number + 1
    assert repair(disk.store(), first=needed).lost is None
    assert highest_term(disk.store()) == 3
    assert list(Log.take_over(disk.store()).read(needed)) == records[needed - 1 :]


def test_a_repair_of_a_hole_that_a_snapshot_reaches_into_begins_with_the_next_record() -> None:
    """The snapshot holds all up to record 3; of the log's records 2 to 18, those from 4 on are lost."""
    disk = Disk()
    log = Log.take_over(disk.store())
    log.append([b"%d" % n for n in range(1, 7)])
    log.append([b"7"])
    (name,) = segments(disk)
    start = examine(disk.store()).segments[0].bytes
    raw = disk.files[name].data
    frame = (start - HEADER_BYTES) // 7
    raw[HEADER_BYTES + frame + 3 : HEADER_BYTES + 5 * frame] = bytes(4 * frame - 3)  # records 2 to 5
    report = repair(disk.store(), first=4)
    assert report.lost == (4, 7)
    log = Log.take_over(disk.store())
    assert list(log.read(4)) == []
    assert log.append([b"new"]) == 4


def test_a_repair_fences_the_writer_that_still_runs() -> None:
    disk, _ = written()
    log = Log.take_over(disk.store())
    log.append([b"x"])
    log.append([b"y"])
    disk.files[segments(disk)[0]].data[-5] ^= 1
    repair(disk.store())
    with pytest.raises(Fenced):
        log.append([b"z"])


def test_a_log_of_replies_is_repaired_under_the_terms_of_the_log() -> None:
    disk = Disk()
    log = Log.take_over(disk.store())
    replies = Log.take_over(disk.store(), "replies", term=log.term)
    replies.append([b"one"])
    replies.append([b"two"])
    replies.append([b"three"])
    name = next(name for name in disk.files if name.startswith("replies/"))
    disk.files[name].data[HEADER_BYTES + 45] ^= 1
    assert repair(disk.store(), "replies").lost == (2, 3)
    log = Log.take_over(disk.store())
    replies = Log.take_over(disk.store(), "replies", term=log.term)
    assert [record.data for record in replies.read(1)] == [b"one"]


@BOTH
@given(
    flips=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.tuples(st.integers(0, 100), st.integers(0, 400)),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_broken_a_repair_leaves_a_log_that_can_be_read_and_written(
    can_append: bool, flips: list[tuple[int, int, int]], cut: tuple[int, int]
) -> None:
    disk, records = written(can_append)
    names = segments(disk)
    for which, place, bits in flips:
        data = disk.files[names[which % len(names)]].data
        data[place % len(data)] ^= bits
    shortened = disk.files[names[cut[0] % len(names)]].data
    del shortened[max(0, len(shortened) - cut[1]) :]
    repair(disk.store())
    log = Log.take_over(disk.store())
    found = list(log.read(log.first))
    assert found == records[log.first - 1 : log.first - 1 + len(found)]
    assert log.append([b"more"]) == log.last
    assert examine(disk.store()).is_sound


@BOTH
def test_a_log_that_ends_before_what_was_retired_is_broken_and_a_repair_lets_it_go_on(can_append: bool) -> None:
    """The newest files are gone. That records below 13 were retired says that there were such."""
    disk, _ = written(can_append)
    Log.take_over(disk.store()).retire(below=13)
    for ref in find_chain(disk.store(), "log").refs:
        del disk.files[f"log/{ref.name}"]
    with pytest.raises(LogBroken, match="ends with record 0, but record 13"):
        Log.take_over(disk.store())
    assert not examine(disk.store()).is_sound
    assert repair(disk.store(), first=15).lost is None
    log = Log.take_over(disk.store())
    assert list(log.read(15)) == []
    assert log.append([b"x"]) == 15
    assert examine(disk.store()).is_sound


def test_a_log_that_ends_before_what_a_snapshot_holds_goes_on_after_it() -> None:
    disk, _ = written()
    assert repair(disk.store(), first=19).lost is None
    assert highest_term(disk.store()) == 3  # nothing to do
    repair(disk.store(), first=25)
    log = Log.take_over(disk.store())
    assert log.append([b"x"]) == 25
    assert [record.number for record in Log.take_over(disk.store()).read(25)] == [25]


def test_a_log_that_is_cut_below_what_was_retired_keeps_what_is_written_then() -> None:
    disk, _ = written()
    Log.take_over(disk.store()).retire(below=16)
    cut(disk.store(), "log", 5)
    log = Log.take_over(disk.store(), segment_bytes=1)
    for n in range(5, 20):
        assert log.append([b"%d" % n]) == n
    assert [record.number for record in Log.take_over(disk.store()).read(5)] == list(range(5, 20))


@BOTH
def test_a_sound_log_can_be_cut_before_any_record(can_append: bool) -> None:
    disk, records = written(can_append)
    for before in range(1, 20):
        twin = disk.copy()
        report = cut(twin.store(), "log", before)
        assert report.lost == ((before, 18) if before < 19 else None)
        log = Log.take_over(twin.store())
        assert list(log.read(1)) == records[: before - 1]
        assert log.append([b"new"]) == before


def test_it_works_on_a_real_disk(tmp_path) -> None:
    store = DirectoryStore(tmp_path)
    log = Log.take_over(store)
    for n in range(5):
        log.append([b"record %d" % n])
    log.close()
    (path,) = tmp_path.glob("log/*.seg")
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 3 * 44 + 40] ^= 255
    path.write_bytes(raw)
    with pytest.raises(LogBroken, match=rf"{path} is broken at byte {HEADER_BYTES + 3 * 44}: .*headrace log repair"):
        list(Log.take_over(store).read(1))
    report = repair(store)
    assert report.lost == (4, 5)
    assert report.saved
    assert all((tmp_path / saved).exists() for saved in report.saved)
    assert Log.take_over(store).last == 3
