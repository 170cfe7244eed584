"""The log: numbered records, durable and fenced before anything that depends on them may leave.

Two rules. *Write, then check*: a record counts once it is synced and, after that, no later term has announced itself.
*Announce, then read*: a new writer first creates the marker of its term and then reads the log, so it reads everything
that was acknowledged to its predecessor. Neither needs a lock, and a writer that slept between any two of its steps
does no harm: it writes to a segment whose end its successor has already fixed, and then it sees the marker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from headrace.durability.log.examine import ExamineReport, cut, examine, repair
from headrace.durability.log.frames import (
    HEADER_BYTES,
    MARK,
    NUMBER_MAX,
    RECORD,
    RECORD_BYTES_MAX,
    LogFrame,
    SegmentRef,
    encode_frame,
    seed_of,
)
from headrace.durability.log.segments import (
    BrokenAt,
    LogRecord,
    SegmentChain,
    bounds,
    check_first,
    ends_early,
    find_chain_with_retry,
    read_chain,
    read_log,
    retired_mark,
)
from headrace.durability.log.takeover import LogEnd, announce, begin_segment, find_end, highest_term, term_marker
from headrace.durability.store import Store
from headrace.errors import Fenced, HeadraceError, ObjectMissing, StoreError, StoreFull, TooLarge

__all__ = [
    "BrokenAt",
    "ExamineReport",
    "Log",
    "LogRecord",
    "bounds",
    "cut",
    "examine",
    "highest_term",
    "read_log",
    "repair",
]

SEGMENT_BYTES = 64 << 20


class Log:
    """The writer of a log. One thread may call `append` while another calls `retire`.

    After any error in `append` nothing more can be appended: the next writer finds out whether the records are there.
    (A failed sync is never retried: the second one may succeed without having written anything.)
    """

    def __init__(
        self,
        store: Store,
        name: str,
        term: int,
        fence: str,
        chain: SegmentChain,
        current: SegmentRef,
        size: int,
        last: int,
        segment_bytes: int,
    ) -> None:
        self.store, self.name, self.term, self.last = store, name, term, last
        self._next_marker = term_marker(fence, term + 1)
        self._chain = chain
        self._last_at_takeover = last
        self._segment_bytes = segment_bytes
        self._current = current
        self._seed = seed_of(current.name)
        self._size = size  # of the current segment, in bytes
        self._must_roll = False
        self._failure: BaseException | None = None

    @classmethod
    def take_over(
        cls,
        store: Store,
        name: str = "log",
        segment_bytes: int = SEGMENT_BYTES,
        term: int | None = None,
        fence: str | None = None,
        owner: str = "",
    ) -> Log:
        """Fences all earlier writers, finds the end of the log, and begins a new segment at once.

        `term` is a term that was already announced in the log `fence` ("log" by default): its markers fence this log
        too, and no marker is created here. `owner` is written into the marker, for people.
        """
        if term is None:
            fence = fence or name
            term = announce(store, fence, owner)
        fence = fence or "log"
        chain = find_chain_with_retry(store, name)
        if chain.term >= term:
            raise Fenced(f"{store.url}/{name} has segments of term {chain.term}: term {term} is over")
        end = find_end(store, name, chain)
        current, size = begin_segment(store, name, term, end)
        last = end.last + len(end.loose)
        log = cls(store, name, term, fence, chain, current, size, last, segment_bytes)
        chain.refs.append(current)
        log._check_fence()
        return log

    @property
    def first(self) -> int:
        """The number of the oldest record that is kept (of the next one, if there is none)."""
        return self._chain.refs[0].first

    def read(self, first: int) -> Iterator[LogRecord]:
        """The records found at the take-over, from this number on. `LogBroken`; `StoreError` if it is retired."""
        check_first(self.store, self.name, self._chain, first)
        if first > self._last_at_takeover + 1:
            raise ends_early(self.store, self.name, self._last_at_takeover, first)
        return read_chain(self.store, self.name, self._chain, first, self._last_at_takeover)

    def append(self, payloads: list[bytes]) -> int:
        """Returns the last number once the records are durable and the log is still ours. Without payloads it only
        checks the fence."""
        if not payloads:
            self.check()
            return self.last
        if self._failure is not None:
            self._refuse(self._failure)
        _check_sizes(payloads, self.last)
        try:
            if self.store.can_append:
                self._grow(payloads)
            else:
                self._begin_segment(payloads)
            self._check_fence()
        except ObjectMissing as error:  # our segment: a successor has retired or repaired it away
            self._failure = error
            self._check_fence()
            raise
        except BaseException as error:
            self._failure = error
            raise
        self.last += len(payloads)
        return self.last

    def check(self) -> None:
        """Raises `Fenced` if the log is no longer ours."""
        if self._failure is not None:
            self._refuse(self._failure)
        self._check_fence()

    def roll(self) -> None:
        """Makes the next append begin a new segment (if the current one has any record)."""
        self._must_roll = True

    def retire(self, below: int) -> list[str]:
        """Deletes the segments whose records are all below this number, never the newest; returns their names.

        What could not be deleted, because the store is full or fails, is left for the next call."""
        self.check()
        chain = self._chain
        below = max(min(below, self.last + 1), chain.kept)
        strays = [ref for ref in (*chain.orphans, *chain.torn) if ref.first < below and ref.term < self.term]
        retired = [ref for ref, following in zip(chain.refs, chain.refs[1:], strict=False) if following.first <= below]
        names = []
        for ref in (*strays, *retired):
            # Write the mark first: without it a missing file could pass for retired, and one that comes back for sound.
            # If the store is too full for the mark, only the oldest segment may be deleted, to make room: if two were
            # deleted without a mark, a loss of power could undo the older deletion alone, and leave a hole.
            if not self._mark_retired(below) and ref in retired and chain.refs[0].first > max(chain.kept, 1):
                break
            names.append(f"{self.name}/{ref.name}")
            self.store.delete(names[-1])  # if this fails, the next call tries again
            for kind in (chain.refs, chain.orphans, chain.torn):
                if ref in kind:
                    kind.remove(ref)
        return names

    def close(self) -> None:
        """Writes a mark that all records are durable, so that a bit that flips in the last one later is noticed."""
        if self._failure is None and self.store.can_append and self._size > HEADER_BYTES:
            data = encode_frame(self._seed, self._size, MARK, self.last, self.term, self.last, b"")
            try:
                self.store.append(f"{self.name}/{self._current.name}", data)
                self.store.sync(f"{self.name}/{self._current.name}")
            except StoreError as error:
                self._failure = error
                return
        self._failure = self._failure or StoreError(f"{self.store.url}/{self.name} is closed")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _grow(self, payloads: list[bytes]) -> None:
        size = sum(map(len, payloads))
        if self._size > HEADER_BYTES and (self._must_roll or self._size + size > self._segment_bytes):
            self._begin_segment([])
        self._must_roll = False
        data = b"".join(_frames(self._seed, self._size, self.last, self.term, payloads))
        file = f"{self.name}/{self._current.name}"
        self.store.append(file, data)
        self.store.sync(file)
        self._size += len(data)

    def _begin_segment(self, payloads: list[bytes]) -> None:
        """Begins a new segment after the current one."""
        loose = [LogFrame(RECORD, self.last + 1 + n, self.term, 0, data, 0, 0) for n, data in enumerate(payloads)]
        end = LogEnd(self._current, self._size, self.last, loose)
        self._current, self._size = begin_segment(self.store, self.name, self.term, end, not self.store.can_append)
        self._seed = seed_of(self._current.name)
        self._chain.refs.append(self._current)

    def _mark_retired(self, below: int) -> bool:
        """Marks that records below this number may be gone. False if there is no room for the mark."""
        said = self._chain.kept
        if below > said:
            try:
                self.store.create(retired_mark(self.name, below), b"")
            except StoreFull:
                return False
            self._chain = self._chain._replace(kept=below)
            if said:
                self.store.delete(retired_mark(self.name, said))
        return True

    def _check_fence(self) -> None:
        """Raises `Fenced` if a later term has announced itself. Asks the store each time."""
        if self.store.exists(self._next_marker):
            raise Fenced(
                f"{self.store.url}/{self._next_marker} exists: another process has taken over this store from term "
                f"{self.term}. This process must stop; the other one answers requests"
            )

    def _refuse(self, failure: BaseException) -> NoReturn:
        reason = f"{self.store.url}/{self.name} takes no more records in term {self.term}: {failure}"
        if isinstance(failure, Fenced):
            raise Fenced(reason) from failure
        raise StoreError(f"{reason}. Start again") from failure


def _frames(seed: int, offset: int, last: int, term: int, payloads: list[bytes]) -> Iterator[bytes]:
    for number, data in enumerate(payloads, last + 1):
        frame = encode_frame(seed, offset, RECORD, number, term, last, data)
        offset += len(frame)
        yield frame


def _check_sizes(payloads: list[bytes], last: int) -> None:
    for data in payloads:
        if len(data) > RECORD_BYTES_MAX:
            raise TooLarge(
                f"a log record of {len(data)} bytes is over the limit of {RECORD_BYTES_MAX}: make smaller epochs"
            )
    if last + len(payloads) > NUMBER_MAX:
        raise HeadraceError(f"the log has used up all {NUMBER_MAX} numbers: start from a snapshot in a new store")
