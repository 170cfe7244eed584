"""Deferred and external work: the part of a context that creates entities of `headrace`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from headrace.core.later import builtin
from headrace.core.program import Program
from headrace.errors import BadCall, ModelError
from headrace.model.chance import is_id
from headrace.model.context import Context
from headrace.model.cron import duration_us
from headrace.wire.values import shown

if TYPE_CHECKING:
    from headrace.model.operator import Function

THEN_ARGS = 2  # of the function that takes an external call's response


class Deferring(Context):
    """A mixin: its context gives the program, ids and the time."""

    __slots__ = ()

    _program: Program

    @abstractmethod
    def _new_id(self) -> str:
        """Unique, and the same whenever this call is run again."""

    @property
    @abstractmethod
    def _now_us(self) -> int:
        """The epoch's time."""

    def call_later(self, delay: Any, function: Function | str, key: Any, /, *args: Any, **kwargs: Any) -> str:
        try:
            due_us = self._now_us + duration_us(delay, "call_later")
        except ModelError as error:
            raise BadCall(str(error)) from None
        if kwargs:
            args = self._bind(function, args, kwargs)
        name = self._check_call(function, key, args)
        timer = self._new_id()
        self.call_async(builtin.set, timer, builtin.TIMER, due_us, None, args, name, key)
        return timer

    def cancel(self, timer: str) -> None:
        if not is_id(timer):
            raise BadCall(f"cancel takes what call_later or send_external returned, not {shown(timer)}")
        self.call_async(builtin.drop, timer)

    def send_external(self, name: str, /, *args: Any, then: Function | str | None = None, key: Any = None) -> str:
        self._check_external(name)
        key = self.key if key is None else key
        function = None if then is None else self._check_then(then, key)
        message = self._new_id()
        self.call_async(builtin.set, message, builtin.SEND, 0, name, args, function, key)
        return message

    def _check_external(self, name: str) -> None:
        app = self._program.app
        if type(name) is not str or name not in app.externals:
            known = ", ".join(app.externals) or "none"
            raise BadCall(f"no external {shown(name)} in app {app.name!r}; it has: {known}")

    def _check_then(self, then: Function | str, key: Any) -> str:
        entry = self._program.find(then)
        self._program.check_key(key, entry)
        if not entry.signature.takes(THEN_ARGS):
            raise BadCall(f"{entry.signature} must take two arguments, a result and an error, one of which is None")
        return entry.name

    def _bind(self, function: Function | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position."""
        return self._program.find(function).signature.bind(args, kwargs)

    def _check_call(self, function: Function | str, key: Any, args: tuple[Any, ...]) -> str:
        """Refuse now what could not be called later; returns the function's name."""
        entry = self._program.find(function)
        self._program.check_key(key, entry)
        if not entry.fits(args):
            entry.admit(args)
        return entry.name
