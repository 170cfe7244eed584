"""The reference for a user's app: the loop of `oracle.py`, with the checks of declared types and of calls.

The other workloads make no mistakes with types, except on purpose. A user's app may: a call with a wrong argument, or a
state of another type, must abort here as it does in production, with the same words. The checks are those of the
compiled app (`core/program.py`); the loop is not.
"""

from __future__ import annotations

from typing import Any

from headrace.core.later.deferring import THEN_ARGS
from headrace.core.program import Program
from headrace.errors import BadCall, HeadraceError, ModelError, TooLarge
from headrace.model.chance import is_id
from headrace.model.cron import duration_us
from headrace.sim.oracle import Hops, Oracle, OracleCall, OracleContext, OracleExternal
from headrace.wire.values import shown


class CheckedOracle(Oracle):
    def __init__(self, program: Program, seed: int) -> None:
        config = program.config
        super().__init__(program.values, config.calls_max, config.depth_max, app=program.app, seed=seed)
        self.program = program

    def context_of(self, function: Any, key: Any, hops: Hops, depth: int) -> OracleContext:
        return CheckedContext(self, function, key, hops, depth)

    def carry_result(self, function: Any, result: Any) -> Any:
        return self.program.values.unseal(self.program.functions[function].result.seal(result))


class CheckedContext(OracleContext):
    oracle: CheckedOracle

    @property
    def program(self) -> Program:
        return self.oracle.program

    def carry(self, state: Any) -> Any:
        try:
            return self.program.values.unseal(self.program.states[self.entity[0]].seal(state))
        except TooLarge as error:
            raise self.doomed(error) from None

    def doomed(self, error: HeadraceError) -> HeadraceError:
        self.oracle.fail(error, self.where)
        return error

    def merge(self, delta: Any) -> None:
        if self.combine is None:
            raise BadCall(f"operator {self.entity[0]!r} has no combine, so {self.where[0]} cannot merge")
        super().merge(delta)

    def call(self, function: Any, key: Any, /, *args: Any, **kwargs: Any) -> OracleCall:
        self._must_be_async("call_async")
        return super().call(function, key, *self._placed(function, key, args, kwargs))

    def call_async(self, function: Any, key: Any, /, *args: Any, **kwargs: Any) -> None:
        super().call_async(function, key, *self._placed(function, key, args, kwargs))

    def call_later(self, delay: Any, function: Any, key: Any, /, *args: Any, **kwargs: Any) -> str:
        try:
            duration_us(delay, "call_later")
        except ModelError as error:
            raise BadCall(str(error)) from None
        return super().call_later(delay, function, key, *self._placed(function, key, args, kwargs))

    def cancel(self, timer: str) -> None:
        if not is_id(timer):
            raise BadCall(f"cancel takes what call_later or send_external returned, not {shown(timer)}")
        super().cancel(timer)

    def call_external(self, name: str, /, *args: Any) -> OracleExternal:
        self._must_be_async("send_external")
        self._check_external(name)
        return super().call_external(name, *args)

    def send_external(self, name: str, /, *args: Any, then: Any = None, key: Any = None) -> str:
        self._check_external(name)
        if then is not None:
            entry = self.program.find(then)
            self.program.check_key(self.key if key is None else key, entry)
            if not entry.signature.takes(THEN_ARGS):
                raise BadCall(f"{entry.signature} must take two arguments, a result and an error, one of which is None")
        return super().send_external(name, *args, then=then, key=key)

    def _placed(self, function: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        entry = self.program.find(function)
        if kwargs:
            args = entry.signature.bind(args, kwargs)
        self.program.check_key(key, entry)
        try:
            if not entry.fits(args):
                entry.admit(args)
        except TooLarge as error:
            raise self.doomed(error) from None
        return args

    def _must_be_async(self, instead: str) -> None:
        if not self.function.is_async:
            raise BadCall(f"{self.where[0]} is a plain def and cannot await: make it async def, or use {instead}")

    def _check_external(self, name: str) -> None:
        app = self.program.app
        if type(name) is not str or name not in app.externals:
            known = ", ".join(app.externals) or "none"
            raise BadCall(f"no external {shown(name)} in app {app.name!r}; it has: {known}")
