"""The intake: batches that a source has closed in the store's inbox become submissions, in the order they are closed.

`InboxReader` looks at the inbox, reads what waits, and hands it over; the core logs it and runs it. When a batch is
final its name is taken away, which is what the source waits for before it goes far ahead. It has no thread; `Intake`
has one.

Rules:
1. The rows of a batch that the engine knows are not read: they may be gone.
2. Only who still has the log refuses a batch: an engine that was replaced has missed the one before, and would delete
   what its successor is about to take.
3. A batch that cannot be read is held: its name stays, and why is told. The next start tries again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from headrace.core.epoch import Batch
from headrace.core.ingress import Admission
from headrace.durability.inbox.batches import keep_dead, read_calls
from headrace.durability.inbox.inbox import (
    held,
    hold,
    last_taken,
    let_go,
    name_of,
    read_closed,
    refuse,
    take_away,
    waiting,
)
from headrace.durability.store import Store
from headrace.errors import LogBroken, ObjectMissing, Stopped, StoreError

LOG = logging.getLogger("headrace.intake")
BUSY_S = 10.0  # after a batch, more are expected for so long
BRISK_S, LAZY_S = 0.004, 0.05  # between two looks: when more are expected, and when not
FAR_S = 0.5  # at a bucket, where a look is a request that costs

Source = tuple[str, int]


class InboxReader:
    """What is done to the inbox for one engine."""

    def __init__(
        self,
        store: Store,
        admission: Admission,
        submit: Callable[[Batch], Future[Any]],
        last_of: Callable[[str], int],
        check: Callable[[], Any],
    ) -> None:
        """`last_of(query)` is the last batch that the engine knows, -1 if none; `check()` raises `Stopped` if another
        engine has the log by now."""
        self.store, self.admission = store, admission
        self._submit, self._last_of, self._check = submit, last_of, check
        self.batches = self.rows = self.refused = 0  # so far
        self.under_way: set[Source] = set()
        self._handed: dict[str, int] = {}  # the last batch of each query that was handed over
        self._unreadable: set[Source] = set()  # since this engine began
        self._found: set[Source] | None = None  # those that were there with the first look: another may have begun them
        with contextlib.suppress(StoreError):
            for source in held(store) & set(waiting(store)):  # what another could not read may be mended by now
                let_go(store, source)

    def look(self, done: Callable[[Source, Future[Any]], None]) -> int:
        """Hand over what waits; `done` is called when a batch is final. Returns how many there were. `Stopped` if the
        engine takes no more."""
        before = self.batches
        sources = waiting(self.store)
        if self._found is None:
            self._found = set(sources)
        for source in sources:
            if source not in self.under_way and source not in self._unreadable:
                try:
                    self._take(source, done)
                except ObjectMissing:  # another engine has taken it away
                    continue
        return self.batches - before

    def finish(self, source: Source, future: Future[Any]) -> None:
        """What was handed over is final, or refused."""
        self.under_way.discard(source)
        error = future.exception()
        if error is None:
            take_away(self.store, source)
        elif not isinstance(error, Stopped):
            self._handed.pop(source[0], None)
            self._check()
            refuse(self.store, source, str(error))
            LOG.warning("batch %s of query %s was refused: %s", source[1], source[0], error)

    def _take(self, source: Source, done: Callable[[Source, Future[Any]], None]) -> None:
        query, number = source
        last = self._last_before(query)
        if number > last + 1 and self.store.exists(name_of((query, number - 1))):
            return  # a list may show a batch and not yet the one before it
        batch = Batch(query, [], [], [], source=source) if number <= last else self._read(source)
        if batch is None:
            return
        batch.after = last
        future = self._submit(batch)
        self.under_way.add(source)
        self._handed[query] = max(last, number)
        self.batches += 1
        self.rows += len(batch)
        self.refused += len(batch.refused)
        future.add_done_callback(lambda future: done(source, future))

    def _last_before(self, query: str) -> int:
        """The last batch that was taken or handed over. Of a query that the engine has forgotten the store knows it."""
        last = max(self._last_of(query), self._handed.get(query, -1))
        return last if last >= 0 else last_taken(self.store, query)

    def _read(self, source: Source) -> Batch | None:
        """None if it is held."""
        assert self._found is not None
        try:
            closed = read_closed(self.store, source)
            batch = read_calls(self.store, closed, self.admission)
            keep_dead(self.store, closed, batch, source in self._found)
        except LogBroken as error:
            self._hold(source, error)
            return None
        except StoreError:
            raise
        except Exception as error:
            LOG.exception("batch %s of query %s", source[1], source[0])
            self._hold(source, error)
            return None
        return batch

    def _hold(self, source: Source, error: Exception) -> None:
        self._check()
        query, number = source
        hold(self.store, source, f"batch {number} of query {query} in {self.store.url} is blocked: {error}")
        self._unreadable.add(source)
        LOG.error("batch %s of query %s cannot be taken: %s", number, query, error)


class Intake:
    """A taker, and the thread that makes it look."""

    def __init__(self, taker: InboxReader) -> None:
        self.taker = taker
        self._done: queue.SimpleQueue[tuple[Source, Future[Any]] | None] = queue.SimpleQueue()
        self._busy_until_s = 0.0
        self._is_taking = True  # until the runtime takes no more
        self._thread = threading.Thread(target=self._serve, name="headrace-intake", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the runtime has finished what was handed over."""
        self._done.put(None)
        self._thread.join()

    def metrics(self) -> dict[str, int]:
        taker = self.taker
        return {
            "source_batches": taker.batches,
            "source_rows": taker.rows,
            "source_rows_refused": taker.refused,
            "source_batches_under_way": len(taker.under_way),
        }

    def _serve(self) -> None:
        is_open = True
        while is_open:
            with self._trying():
                if self._is_taking and self.taker.look(lambda *item: self._done.put(item)):
                    self._busy_until_s = time.monotonic() + BUSY_S
            is_open = self._see_to_done()

    def _see_to_done(self) -> bool:
        """What has become final, within the time between two looks. False if this is the end."""
        patience_s = LAZY_S if time.monotonic() > self._busy_until_s else BRISK_S
        if not self.taker.store.can_append:
            patience_s = FAR_S
        until_s = time.monotonic() + patience_s
        while True:
            try:
                item = self._done.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return True
            if item is None:
                return False
            with self._trying():
                self.taker.finish(*item)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """What fails is tried again with the next look, as long as the runtime runs."""
        try:
            yield
        except Stopped:
            self._is_taking = False
        except StoreError as error:
            LOG.warning("the inbox of %s cannot be used; will try again: %s", self.taker.store.url, error)
