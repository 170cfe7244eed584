"""What a function may do: the context that it gets as its first argument.

This is the interface for users. The engine's modes implement it (`core/contexts.py`). A function never makes one, and a
context is valid only while its call runs.
"""

from __future__ import annotations

import datetime
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Generic, overload

from headrace.model.type_variables import Default, P, R, S

if TYPE_CHECKING:
    from headrace.model.chance import Random
    from headrace.model.operator import Function


class Context(ABC, Generic[S]):
    """One call of one transaction on one entity, whose state is an `S`: write `ctx: Context[Account]`, and the type
    checker knows what `get` returns and what `put` takes."""

    __slots__ = ()

    key: Any
    """The key of this entity."""

    @property
    @abstractmethod
    def tid(self) -> int:
        """The transaction's place in the serial order."""

    @property
    @abstractmethod
    def now(self) -> datetime.datetime:
        """The logged time of the transaction's epoch, in UTC: the same for all transactions of an epoch, and when it is
        run again. It never goes back."""

    @property
    @abstractmethod
    def random(self) -> Random:
        """Random numbers for this call: the same when it is run again, and different in every other call."""

    @abstractmethod
    def uuid(self) -> uuid.UUID:
        """A new UUID, which is the same when this call is run again."""

    @overload
    def get(self) -> S | None: ...
    @overload
    def get(self, default: Default) -> S | Default: ...
    @abstractmethod
    def get(self, default: Any = None) -> Any:
        """A copy of this entity's state; `default` if it has none."""

    @abstractmethod
    def put(self, value: S) -> None:
        """Set this entity's state."""

    @abstractmethod
    def delete(self) -> None:
        """Remove this entity's state; no error if it has none."""

    @abstractmethod
    def merge(self, delta: S) -> None:
        """Combine `delta` into the state with the operator's `combine`; without a state, `delta` becomes the state."""

    @abstractmethod
    def call(self, function: Function[P, R] | str, key: Any, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Call a function of another entity (or this one) now and await its result: only in an `async def`."""

    @abstractmethod
    def call_async(self, function: Function[P, R] | str, key: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call one-way, in this transaction: runs after the root has returned, in the order the calls were made."""

    @abstractmethod
    def call_later(
        self,
        delay: float | datetime.timedelta,
        function: Function[P, R] | str,
        key: Any,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> str:
        """Call one-way, in a separate transaction, once `delay` (seconds, or a timedelta) has passed after `now`. If
        that transaction aborts, it is not tried again. Returns an id for `cancel`."""

    @abstractmethod
    def cancel(self, timer: str) -> None:
        """Cancel what `call_later` or `send_external` has scheduled, if it has not happened yet."""

    @abstractmethod
    def call_external(self, name: str, /, *args: Any) -> Awaitable[Any]:
        """Call a function of the outside world (`app.external`) and await its result, once no earlier transaction can
        change any more: only in an `async def`. It is called at least once, always with the same idempotency key, even
        if this transaction aborts afterwards. If it fails, this raises `ExternalFailed`."""

    @abstractmethod
    def send_external(self, name: str, /, *args: Any, then: Function | str | None = None, key: Any = None) -> str:
        """Have a function of the outside world called once this transaction is final, if it commits. Its result comes
        back in a separate transaction: `then(ctx, result, error)` of the entity `key` (default: this one), where
        `error` is None or says why there is no result. Returns an id for `cancel`."""
