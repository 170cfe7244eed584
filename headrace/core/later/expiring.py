"""State with a time to live: contexts for operators that have one.

The state is stored with the time of its write, which is the epoch's. Once `ttl` has passed, no function sees it. A row
of the log (`headrace_expire`) that `core/later/deferred.py` adds deletes it, so that memory and snapshots do not keep
it.
"""

from __future__ import annotations

from typing import Any

from headrace.core.contexts import OrderedContext, SerialContext, TrackedContext
from headrace.wire.values import MISSING, wrap, written_us


class Expiring(SerialContext):
    """A mixin."""

    __slots__ = ()

    def _is_there(self) -> bool:
        ttl_us = self._binding.operator.ttl_us
        assert ttl_us is not None
        return self._state is not MISSING and self._now_us < written_us(self._state) + ttl_us

    def get(self, default: Any = None) -> Any:
        return self._values.unseal(self._state) if self._is_there() else default

    def put(self, value: Any) -> None:
        self._state = wrap(self._seal(value), self._now_us)

    def merge(self, delta: Any) -> None:
        combine = self._combine()
        delta = self._seal(delta)
        if self._is_there():
            unseal = self._values.unseal
            delta = self._seal(combine(unseal(self._state), unseal(delta)))
        self._state = wrap(delta, self._now_us)

    def expire(self) -> bool:
        """Delete the state if it has expired."""
        is_over = self._state is not MISSING and not self._is_there()
        if is_over:
            self.delete()
        return is_over


class ExpiringTracked(Expiring, TrackedContext):
    __slots__ = ()


class ExpiringOrdered(Expiring, OrderedContext):
    """Merges are not kept separate: whether they find a state depends on when it was written."""

    __slots__ = ()

    def _is_there(self) -> bool:
        self._read = True
        return super()._is_there()

    def put(self, value: Any) -> None:
        super().put(value)
        self._deltas = None

    def merge(self, delta: Any) -> None:
        self._read, self._deltas = True, None
        super().merge(delta)

    def expire(self) -> bool:
        self._read = True
        return super().expire()
