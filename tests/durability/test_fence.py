"""The fence of the log: however writers sleep, wake and race, one history is acknowledged, and all successors have it.

The writers' operations on the store are the steps; between any two of them all others may do anything. The log is
fenced by "write, then check; announce, then read". A planted log that checks before it writes must fail here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.durability.log.log import Log, read_log
from headrace.errors import Fenced, StoreError
from tests.durability.memory import BOTH, Disk, MemoryStore, Process


class CheckThenAppend(Log):
    """The planted fault: it looks for a successor before it writes, and not after."""

    def _check_fence(self) -> None:
        if self._is_before:
            super()._check_fence()

    _is_before = True

    def append(self, payloads: list[bytes]) -> int:
        self._check_fence()
        self._is_before = False
        try:
            return super().append(payloads)
        finally:
            self._is_before = True


class ReadThenAnnounce(Log):
    """The planted fault: it reads the log first and creates its marker later."""

    @classmethod
    def take_over(cls, store: Any, *args: Any, **kwargs: Any) -> Log:
        """With what the store showed before the marker was there."""
        return super().take_over(Frozen(store), *args, **kwargs)


class Frozen:
    """A store whose segments are read as they were at first."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.url, self.can_append = store.url, store.can_append
        self._old = {name: store.get(name) for name in store.list("log/")}

    def list(self, prefix: str) -> list[str]:
        return [name for name in self._store.list(prefix) if "terms" in name or name in self._old]

    def get_part(self, name: str, start: int, size: int) -> bytes:
        return self._old[name][start : start + size] if name in self._old else self._store.get_part(name, start, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Witness:
    """Remembers what was acknowledged and what each term found when it took over, and compares."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, tuple[int, bytes]] = {}  # by number: the term, and the record
        self.taken: dict[int, list[bytes]] = {}  # by term
        self.fenced = 0

    def writer(
        self, disk: Disk, label: str, groups: int = 2, kind: type[Log] = Log, segment_bytes: int = 250, lives: int = 1
    ) -> Process:
        """A process that takes over and appends, and takes over again if it was fenced."""

        def work(store: MemoryStore) -> None:
            for life in range(lives):
                try:
                    log = kind.take_over(store, segment_bytes=segment_bytes)
                    assert log.term not in self.taken, f"term {log.term} began twice"
                    self.taken[log.term] = [record.data for record in log.read(1)]
                    for n in range(groups):
                        payloads = [f"{label}{life}-{n}-{m}".encode() for m in range(1 + n % 2)]
                        self.acknowledge(log.append(payloads), log.term, payloads)
                    return
                except (Fenced, StoreError):
                    self.fenced += 1

        return Process(disk, work)

    def acknowledge(self, last: int, term: int, payloads: list[bytes]) -> None:
        for number, payload in enumerate(payloads, last - len(payloads) + 1):
            assert number not in self.acknowledged, f"{number} is acknowledged twice"
            self.acknowledged[number] = term, payload

    def check(self, found: list[bytes], term: int, who: str) -> None:
        """Whoever reads in this term has all that was acknowledged in earlier ones, at the same place."""
        for number, (before, payload) in self.acknowledged.items():
            if before < term:
                assert number <= len(found), f"{who}: record {number} is lost, {payload!r}"
                assert found[number - 1] == payload, f"{who}: record {number} is {found[number - 1]!r}, not {payload!r}"

    def check_terms(self) -> None:
        for term, found in self.taken.items():
            self.check(found, term, f"term {term}")


def is_bad(process: Process) -> bool:
    return isinstance(process.error, AssertionError)


def finish(disk: Disk, witness: Witness, *processes: Process) -> list[str]:
    """Lets all come to their end, then power is lost, then somebody reads. Gives what was violated."""
    for process in processes:
        process.finish()
    found = [str(process.error) for process in processes if is_bad(process)]
    unexpected = [process.error for process in processes if process.error is not None and not is_bad(process)]
    assert not unexpected, unexpected
    for left in (lambda unsynced: unsynced, lambda unsynced: unsynced[: len(unsynced) // 2], lambda unsynced: b""):
        twin = disk.copy()
        twin.lose_power(left)
        try:
            witness.check_terms()
            witness.check([record.data for record in read_log(twin.store())], 1000, "an onlooker")
            witness.check([record.data for record in Log.take_over(twin.store()).read(1)], 1000, "the last one")
        except AssertionError as error:
            found.append(str(error))
    return found


def pauses(
    can_append: bool, kind: type[Log] = Log, successor: type[Log] = Log, from_start: bool = False
) -> Iterator[list[str]]:
    """One writer sleeps before each of its operations in turn, while another takes over and appends."""
    for pause in itertools.count(0):
        disk, witness = Disk(can_append), Witness()
        if not from_start:
            witness.writer(disk, "z", groups=1).finish()
        sleeper = witness.writer(disk, "a", groups=3, kind=kind)
        for _ in range(pause):
            sleeper.step()
        was_over = sleeper.is_over
        other = witness.writer(disk, "b", groups=2, kind=successor).finish()
        yield finish(disk, witness, sleeper, other)
        if was_over:
            return


@BOTH
@pytest.mark.parametrize("from_start", [True, False], ids=["empty log", "old log"])
def test_a_writer_that_sleeps_anywhere_loses_nothing_acknowledged(can_append: bool, from_start: bool) -> None:
    found = list(pauses(can_append, from_start=from_start))
    assert len(found) > 12
    assert not any(found), [each for each in found if each]


@BOTH
def test_a_log_that_checks_before_it_writes_is_caught(can_append: bool) -> None:
    found = [each for each in pauses(can_append, kind=CheckThenAppend) if each]
    assert found
    assert any("lost" in text or "not b'a" in text or "twice" in text for each in found for text in each), found


@BOTH
def test_a_log_that_is_read_before_its_term_is_announced_is_caught(can_append: bool) -> None:
    found = []
    for pause in range(40):
        disk, witness = Disk(can_append), Witness()
        old = witness.writer(disk, "a", groups=3)
        for _ in range(12):
            old.step()
        new = witness.writer(disk, "b", groups=2, kind=ReadThenAnnounce)
        for _ in range(pause):
            new.step()
        old.finish()
        found += finish(disk, witness, new, old)
    assert found


@BOTH
def test_two_take_overs_may_race_in_any_order_of_their_steps(can_append: bool) -> None:
    """All interleavings of two that take over an empty log, each operation a step; then both append."""
    steps = Process(Disk(can_append), lambda store: Log.take_over(store) and None).finish().steps
    schedules = [turns for turns in itertools.combinations(range(2 * steps), steps) if 0 in turns]  # the others mirror
    assert len(schedules) > 400
    fenced = 0
    for turns in schedules:
        disk, witness = Disk(can_append), Witness()
        a, b = (witness.writer(disk, label, groups=1) for label in "ab")
        for turn in range(2 * steps):
            (a if turn in turns else b).step()
        assert not finish(disk, witness, a, b), turns
        assert witness.acknowledged, f"both lost: {turns}"
        fenced += witness.fenced
    assert fenced > 100


@BOTH
@given(
    schedule=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30),
    killed=st.sets(st.integers(0, 3), max_size=2),
    failing=st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_four_writers_in_any_schedule_acknowledge_one_history(
    can_append: bool, schedule: list[tuple[int, int]], killed: set[int], failing: int
) -> None:
    disk, witness = Disk(can_append), Witness()
    processes = [witness.writer(disk, label, groups=3, lives=2) for label in "abcd"]
    for turn, (which, count) in enumerate(schedule):
        if turn == len(schedule) // 2:
            disk.syncs_that_fail = failing
        for _ in range(count):
            processes[which].step()
    for which in killed:
        processes[which].kill()
        processes[which].error = None
    assert not finish(disk, witness, *processes)


@BOTH
@given(schedule=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), max_size=20), below=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_zombie_that_retires_deletes_nothing_that_its_successor_needs(
    can_append: bool, schedule: list[tuple[int, int]], below: int
) -> None:
    disk, witness = Disk(can_append), Witness()
    witness.writer(disk, "z", groups=5).finish()

    def retiring(store: MemoryStore) -> None:
        try:
            log = Log.take_over(store, segment_bytes=250)
            log.append([b"more"])
            log.retire(below)
        except Fenced:
            pass

    processes = [Process(disk, retiring) for _ in range(2)]
    for which, count in schedule:
        for _ in range(count):
            processes[which].step()
    for process in processes:
        process.finish()
        assert process.error is None or isinstance(process.error, StoreError), process.error
    found = {record.number: record.data for record in Log.take_over(disk.store()).read(below)}
    assert all(found[number] == data for number, (_, data) in witness.acknowledged.items() if number >= below)


@BOTH
def test_each_take_over_makes_a_new_term_and_a_loser_of_a_race_takes_the_next(can_append: bool) -> None:
    disk = Disk(can_append)
    terms = []

    def work(store: MemoryStore) -> None:
        terms.append(Log.take_over(store).term)

    processes = [Process(disk, work) for _ in range(5)]
    while not all(process.is_over for process in processes):
        for process in processes:
            process.step()
    markers = [name for name in disk.files if "terms" in name]
    assert len(markers) == 5
    assert len(set(terms)) == len(terms)
    assert 5 in terms  # the highest is not fenced by anybody


def hooked(disk: Disk, operation: str, action: Callable[[], None]) -> MemoryStore:
    """A store that does something else before the next operation of this kind."""
    done = []

    def hook(now: str, name: str) -> None:
        if now == operation and not done:
            done.append(now)
            action()

    return disk.store(hook)


def test_what_a_zombie_adds_to_its_segment_after_the_take_over_does_not_count() -> None:
    disk = Disk()
    zombie = Log.take_over(disk.store())
    zombie.append([b"one"])
    successor = Log.take_over(disk.store())
    with pytest.raises(Fenced, match="has taken over this store"):
        zombie.append([b"late"])
    with pytest.raises(Fenced, match="takes no more"):
        zombie.append([b"later"])
    assert [record.data for record in read_log(disk.store())] == [b"one"]
    assert successor.append([b"two"]) == 2
    assert [record.data for record in Log.take_over(disk.store()).read(1)] == [b"one", b"two"]


def test_a_writer_that_is_overtaken_between_its_sync_and_its_check_is_not_acknowledged_and_kept() -> None:
    disk = Disk()
    found: list[list[bytes]] = []

    def successor() -> None:
        found.append([record.data for record in Log.take_over(disk.store()).read(1)])

    log = Log.take_over(disk.store())
    log.append([b"one"])
    log.store = hooked(disk, "exists", successor)
    with pytest.raises(Fenced):
        log.append([b"two"])
    assert found == [[b"one", b"two"]]  # not acknowledged; it may be there, and then it stays
    assert [record.data for record in read_log(disk.store())] == [b"one", b"two"]
