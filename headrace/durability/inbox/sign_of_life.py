"""Signs of life: whether an engine runs on a store, for sources that wait for one.

    alive    an engine writes it again and again, with a count that grows; one that stops cleanly deletes it

A reader compares what it finds with what it found before, so the clocks of two machines need not agree. Nothing depends
on it but a warning.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time

import msgspec

from headrace.durability.store import Store
from headrace.errors import ObjectMissing, StoreError

LOG = logging.getLogger("headrace.inbox")
ALIVE = "alive"
EVERY_S, BUCKET_EVERY_S = 2.0, 20.0  # between two signs; in a bucket each one is a request that costs money
PATIENCE_S = 5.0


class Sign(msgspec.Struct, frozen=True):
    engine: str
    count: int
    every_s: float


class SignOfLife:
    """Of one engine."""

    def __init__(self, store: Store) -> None:
        self._store, self._due_s = store, 0.0
        self._last = Sign(secrets.token_hex(8), 0, EVERY_S if store.can_append else BUCKET_EVERY_S)

    def give(self) -> None:
        """Call it again and again: it does something when the next sign is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._last.every_s
            self._last = msgspec.structs.replace(self._last, count=self._last.count + 1)
            self._store.put(ALIVE, msgspec.json.encode(self._last))

    def end(self) -> None:
        """The engine stops. If another one has taken over, its sign stays."""
        with contextlib.suppress(StoreError):
            found = sign_in(self._store)
            if found is not None and found.engine == self._last.engine:
                self._store.delete(ALIVE)


def sign_in(store: Store) -> Sign | None:
    try:
        return msgspec.json.decode(store.get(ALIVE), type=Sign)
    except (ObjectMissing, msgspec.DecodeError):
        return None


class Watch:
    """Warns once if no engine shows a sign of life while somebody waits."""

    def __init__(self, store: Store) -> None:
        self._store, self._has_ended = store, False
        self._first: Sign | None = None
        self._until_s = time.monotonic() + PATIENCE_S
        self._has_begun = False

    def look(self) -> None:
        """Call it while you wait."""
        now_s = time.monotonic()
        if not self._has_begun:
            self._has_begun, self._first = True, sign_in(self._store)
            if self._first is not None:  # it was given before now
                self._until_s = now_s + max(PATIENCE_S, 2.5 * self._first.every_s)
        if self._has_ended or now_s < self._until_s:
            return
        self._has_ended = True
        found = sign_in(self._store)
        if found is None or found == self._first:
            LOG.warning(
                "no app seems to run on %s: calls wait there until one does. Start it with this store, as in "
                "`headrace run module:app --store ...`, or Runtime(app, store=...)",
                self._store.url,
            )

    def wait(self) -> None:
        """Look until it is known."""
        while not self._has_ended:
            self.look()
            time.sleep(max(0.0, min(0.2, self._until_s - time.monotonic())))
