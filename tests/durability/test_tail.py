"""Who looks at a log again and again sees what one sees who reads it from its beginning, and reads each byte once."""

from __future__ import annotations

from random import Random

import pytest

from headrace.durability.log.frames import RECORD, encode_frame
from headrace.durability.log.log import Log, bounds, read_log
from headrace.durability.log.segments import read_chain
from headrace.durability.reading.tail import Tail
from headrace.errors import Fenced
from tests.durability.memory import BOTH, Disk


def same_as_read(disk: Disk, tail: Tail) -> None:
    """The oracle is `bounds` and `read_log`, which begin anew each time."""
    store = disk.store()
    assert tail.look() == bounds(store, "replies")
    for record in read_log(store, "replies", None):
        spot = tail.position_of(record.number)
        if spot is not None:
            rest = [*read_log(store, "replies", record.number, spot)]
            assert rest == [*read_log(store, "replies", record.number)]


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_what_is_seen_is_what_is_there_whatever_the_writers_do(can_append: bool, seed: int) -> None:
    random, disk = Random(seed), Disk(can_append)
    tails = [Tail(disk.store(), "replies") for _ in range(3)]  # some look more often than others
    assert tails[0].look() == (1, 0)
    log = Log.take_over(disk.store(), "replies", segment_bytes=random.choice([1, 300, 1 << 20]))
    zombies: list[Log] = []
    for step in range(60):
        match random.choice(["append"] * 6 + ["roll", "retire", "take over", "power", "zombie", "close"]):
            case "append":
                log.append([random.randbytes(random.randrange(120)) for _ in range(random.randrange(1, 5))])
            case "roll":
                log.roll()
            case "retire":
                log.retire(random.randint(1, log.last + 1))
            case "zombie":
                for zombie in zombies:
                    with pytest.raises(Fenced):
                        zombie.append([b"too late"])
                zombies = []
            case "power":  # a record was written, in part or whole, and not synced: it is seen, and some of it is lost
                if can_append:
                    frame = encode_frame(log._seed, log._size, RECORD, log.last + 1, log.term, log.last, bytes(50))
                    frame = frame[: random.choice([20, 60, len(frame)])]
                    disk.store().append(f"replies/{log._current.name}", frame)
                    same_as_read(disk, tails[0])
                    left = random.choice([0, 10, len(frame)])
                    disk.lose_power(lambda end, left=left: end[:left])
                log = Log.take_over(disk.store(), "replies")
            case "close" | "take over" as how:
                if how == "close":
                    log.close()
                elif random.random() < 0.5:
                    zombies.append(log)
                log = Log.take_over(disk.store(), "replies", segment_bytes=random.choice([1, 300, 1 << 20]))
        for number, tail in enumerate(tails):
            if step % (1 + 4 * number) == 0:
                same_as_read(disk, tail)
        if random.random() < 0.1:
            tails[0].forget(random.randint(1, log.last + 2))
    for tail in tails:
        same_as_read(disk, tail)


@BOTH
def test_a_look_reads_only_what_is_new(can_append: bool) -> None:
    disk, read = Disk(can_append), [0]
    log = Log.take_over(disk.store(), "replies")
    log.append([bytes(1000)] * 1000)

    store = disk.store()
    get_part = store.get_part

    def counted(name: str, start: int, size: int) -> bytes:
        data = get_part(name, start, size)
        read[0] += len(data)
        return data

    store.get_part = counted  # type: ignore[method-assign]
    tail = Tail(store, "replies")
    assert tail.look() == (1, 1000)
    for number in range(1001, 1011):
        log.append([bytes(1000)])
        read[0] = 0
        assert tail.look() == (1, number)
        assert read[0] < 2500
        read[0] = 0
        assert tail.look() == (1, number)
        assert read[0] < 1000  # a header


def test_who_begins_at_a_spot_does_not_read_what_is_before_it() -> None:
    disk = Disk()
    log = Log.take_over(disk.store(), "replies")
    log.append([bytes(10_000)] * 2_000)
    tail = Tail(disk.store(), "replies")
    tail.look()
    read = []
    store = disk.store(lambda operation, name: read.append(operation))
    get_part, sizes = store.get_part, []
    store.get_part = lambda *given: sizes.append(got := get_part(*given)) or got  # type: ignore[method-assign, func-returns-value]
    assert [record.number for record in read_log(store, "replies", 1_999, tail.position_of(1_999))] == [1_999, 2_000]
    assert sum(map(len, sizes)) < 25_000


def test_a_record_that_was_seen_and_then_lost_is_read_where_its_successor_stands() -> None:
    """A writer died before its sync, an onlooker had seen its record; who took over wrote it again elsewhere."""
    disk = Disk()
    log = Log.take_over(disk.store(), "replies")
    log.append([b"one", b"two"])
    tail = Tail(disk.store(), "replies")
    assert tail.look() == (1, 2)
    seen = tail.position_of(2)
    again = Log.take_over(disk.store(), "replies")
    again.append([b"three"])
    assert [record.data for record in read_log(disk.store(), "replies", 2, seen)] == [b"two", b"three"]
    assert tail.look() == (1, 3)
    assert tail.position_of(2) != seen
    assert [record.data for record in read_log(disk.store(), "replies", 2, tail.position_of(2))] == [b"two", b"three"]
    assert [record.data for record in read_chain(disk.store(), "replies", again._chain, 1, 2, seen)] == [b"one", b"two"]


@pytest.mark.parametrize("seed", range(20))
def test_stretches_hold_each_record_once_and_are_about_as_large(seed: int) -> None:
    random, disk = Random(seed), Disk()
    log = Log.take_over(disk.store(), "replies")
    tail = Tail(disk.store(), "replies")
    tail.look()
    sizes = [random.randrange(2_000) for _ in range(random.randrange(1, 300))]
    log.append(list(map(bytes, sizes)))
    tail.look()
    first = random.randint(1, len(sizes))
    last = random.randint(first, len(sizes))
    tail.forget(random.randint(0, first))
    parts = random.randint(1, 8)
    stretches = tail.cut(first, last, parts, 1)
    assert [number for low, high in stretches for number in range(low, high + 1)] == list(range(first, last + 1))
    assert 1 <= len(stretches) <= parts
    assert all(low <= high for low, high in stretches)
    share = sum(36 + sizes[number - 1] for number in range(first, last + 1)) / parts
    for low, high in stretches:
        assert sum(36 + sizes[number - 1] for number in range(low, high + 1)) <= share + 2 * 2_036
    assert tail.cut(first, last, 8, 1 << 30) == [(first, last)]
    unseen = Tail(disk.store(), "replies").cut(first, last, parts, 1)
    assert [number for low, high in unseen for number in range(low, high + 1)] == list(range(first, last + 1))
    assert len({high - low for low, high in unseen}) <= 2
