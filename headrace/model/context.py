"""What a function may do: the context it is handed as its first argument.

This is the face the user sees. The engine's modes implement it (`core/execution.py`); a function never makes one, and
a context is good only while the call that it was made for runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from headrace.model.operator import Function

Value = TypeVar("Value")


class Context(ABC):
    """One call of one transaction on one entity."""

    __slots__ = ()

    key: Any
    """The key of this entity."""

    @property
    @abstractmethod
    def tid(self) -> int:
        """The transaction's place in the serial order."""

    @overload
    def get(self) -> Any: ...
    @overload
    def get(self, default: Value) -> Value: ...
    @abstractmethod
    def get(self, default: Any = None) -> Any:
        """This entity's state, a copy of it; `default` where it has none."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """Set this entity's state."""

    @abstractmethod
    def delete(self) -> None:
        """Remove this entity's state; no error where it has none."""

    @abstractmethod
    def merge(self, delta: Any) -> None:
        """Combine `delta` into the state with the operator's `combine`; where there is no state, `delta` becomes it."""

    @abstractmethod
    def call(self, function: Function | str, key: Any, /, *args: Any) -> Awaitable[Any]:
        """Call a function of another entity (or this one) now and await its result: only in an `async def`."""

    @abstractmethod
    def call_async(self, function: Function | str, key: Any, /, *args: Any) -> None:
        """Call one-way, in this transaction: runs after the root has returned, in the order the calls were made."""
