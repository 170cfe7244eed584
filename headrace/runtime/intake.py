"""The intake: submits the batches that sources have closed in the store's inbox. The batches of one source are
submitted in order.

`InboxReader` lists the inbox, reads the waiting batches and submits them; the core logs and runs them. When a batch is
final, its name is removed; a source waits for that before it gets far ahead. `InboxReader` has no thread; `Intake` has
one.

Rules:
1. The rows of a batch that the engine already knows are not read: they may be gone.
2. Only the engine that owns the log refuses a batch. An engine that was replaced does not know the batch before, and
   would delete what its successor is about to take.
3. A batch that cannot be read is held: its name stays, and the reason is recorded. The next start tries again.
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

from headrace.core.admission import Admission
from headrace.core.epoch import Batch
from headrace.core.origin import BatchId, FromSource
from headrace.durability.inbox.batch_calls import read_calls
from headrace.durability.inbox.dead_letters import write_dead_letters
from headrace.durability.inbox.inbox import (
    held,
    hold,
    last_finished,
    mark_finished,
    name_of,
    read_closed,
    refuse,
    release,
    waiting,
)
from headrace.durability.inbox.sign_of_life import SignOfLife
from headrace.durability.store import Store
from headrace.errors import LogBroken, ObjectMissing, Stopped, StoreError

LOG = logging.getLogger("headrace.intake")
BUSY_S = 10.0  # after a batch, more are expected for this long
BUSY_LOOK_S, IDLE_LOOK_S = 0.004, 0.05  # between two checks: when more batches are expected, and when not
BUCKET_LOOK_S = 0.5  # with a bucket, where each check is a request that costs money


class InboxReader:
    """Reads the inbox for one engine."""

    def __init__(
        self,
        store: Store,
        admission: Admission,
        submit: Callable[[Batch], Future[Any]],
        last_of: Callable[[str], int],
        check: Callable[[], Any],
    ) -> None:
        """`last_of(source)` returns the last batch that the engine knows, -1 if none; `check()` raises `Stopped` if
        another engine has taken over the log."""
        self.store, self.admission = store, admission
        self._submit, self._last_of, self._check = submit, last_of, check
        self.batches = self.rows = self.refused = 0  # so far
        self.under_way: set[BatchId] = set()
        self._submitted: dict[str, int] = {}  # the last submitted batch of each source
        self._unreadable: set[BatchId] = set()  # since this engine started
        self._first_listing: set[BatchId] | None = None  # another engine may have started on these batches
        with contextlib.suppress(StoreError):
            for batch in held(store) & set(waiting(store)):  # what an earlier engine could not read may be repaired
                release(store, batch)

    def look(self, done: Callable[[BatchId, Future[Any]], None]) -> int:
        """Submit the waiting batches; `done` is called when a batch is final. Returns how many were submitted. Raises
        `Stopped` if the engine accepts no more."""
        before = self.batches
        batches = waiting(self.store)
        if self._first_listing is None:
            self._first_listing = set(batches)
        for batch in batches:
            if batch not in self.under_way and batch not in self._unreadable:
                try:
                    self._take(batch, done)
                except ObjectMissing:  # another engine has removed it
                    continue
        return self.batches - before

    def finish(self, batch: BatchId, future: Future[Any]) -> None:
        """A submitted batch is final, or refused."""
        self.under_way.discard(batch)
        error = future.exception()
        if error is None:
            mark_finished(self.store, batch)
        elif not isinstance(error, Stopped):
            self._submitted.pop(batch.source, None)
            self._check()
            refuse(self.store, batch, str(error))
            LOG.warning("batch %s of query %s was refused: %s", batch.number, batch.source, error)

    def _take(self, batch: BatchId, done: Callable[[BatchId, Future[Any]], None]) -> None:
        source, number = batch
        last = self._last_before(source)
        if number > last + 1 and self.store.exists(name_of(BatchId(source, number - 1))):
            return  # a listing may show a batch before it shows its predecessor
        is_known = number <= last
        admitted = Batch(FromSource(source, source, number, last), [], [], []) if is_known else self._read(batch, last)
        if admitted is None:
            return
        future = self._submit(admitted)
        self.under_way.add(batch)
        self._submitted[source] = max(last, number)
        self.batches += 1
        self.rows += len(admitted)
        self.refused += len(admitted.refused)
        future.add_done_callback(lambda future: done(batch, future))

    def _last_before(self, source: str) -> int:
        """The last batch that the engine took, or that was submitted. If the engine has forgotten the source, the store
        knows the last one that finished."""
        last = max(self._last_of(source), self._submitted.get(source, -1))
        return last if last >= 0 else last_finished(self.store, source)

    def _read(self, batch: BatchId, last: int) -> Batch | None:
        """Read a batch. Returns None if it is held."""
        assert self._first_listing is not None
        try:
            closed = read_closed(self.store, batch)
            admitted = read_calls(self.store, closed, self.admission, last)
            write_dead_letters(self.store, closed, admitted, batch in self._first_listing)
        except LogBroken as error:
            self._hold(batch, error)
            return None
        except StoreError:
            raise
        except Exception as error:
            LOG.exception("batch %s of query %s", batch.number, batch.source)
            self._hold(batch, error)
            return None
        return admitted

    def _hold(self, batch: BatchId, error: Exception) -> None:
        self._check()
        source, number = batch
        hold(self.store, batch, f"batch {number} of query {source} in {self.store.url} is blocked: {error}")
        self._unreadable.add(batch)
        LOG.error("batch %s of query %s cannot be taken: %s", number, source, error)


class Intake:
    """A reader, and the thread that runs it."""

    def __init__(self, reader: InboxReader) -> None:
        self.reader = reader
        self._done: queue.SimpleQueue[tuple[BatchId, Future[Any]] | None] = queue.SimpleQueue()
        self._busy_until_s = 0.0
        self._is_accepting = True  # until the runtime accepts no more
        self._sign = SignOfLife(reader.store)
        self._thread = threading.Thread(target=self._serve, name="headrace-intake", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call this after the runtime has finished what was submitted."""
        self._done.put(None)
        self._thread.join()
        self._sign.end()

    def metrics(self) -> dict[str, int]:
        reader = self.reader
        return {
            "source_batches": reader.batches,
            "source_rows": reader.rows,
            "source_rows_refused": reader.refused,
            "source_batches_under_way": len(reader.under_way),
        }

    def _serve(self) -> None:
        is_open = True
        while is_open:
            with self._retrying():
                if self._is_accepting:
                    self._sign.give()
            with self._retrying():
                if self._is_accepting and self.reader.look(lambda *item: self._done.put(item)):
                    self._busy_until_s = time.monotonic() + BUSY_S
            is_open = self._finish_done()

    def _finish_done(self) -> bool:
        """Handle the batches that became final, until the next check. Returns False at the end."""
        patience_s = IDLE_LOOK_S if time.monotonic() > self._busy_until_s else BUSY_LOOK_S
        if not self.reader.store.can_append:
            patience_s = BUCKET_LOOK_S
        until_s = time.monotonic() + patience_s
        while True:
            try:
                item = self._done.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return True
            if item is None:
                return False
            with self._retrying():
                self.reader.finish(*item)

    @contextlib.contextmanager
    def _retrying(self) -> Iterator[None]:
        """What fails is tried again with the next check, as long as the runtime runs."""
        try:
            yield
        except Stopped:
            self._is_accepting = False
        except StoreError as error:
            LOG.warning("the inbox of %s cannot be used; will try again: %s", self.reader.store.url, error)
