"""An operator: an entity type, its functions, and how its state behaves."""

from __future__ import annotations

import datetime
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

from headrace.errors import ModelError
from headrace.model.cron import duration_us
from headrace.model.function_parameters import by_position, parameters_of
from headrace.model.type_variables import P, Plain, R, Result, S

if TYPE_CHECKING:
    from headrace.model.context import Context

RESERVED = "headrace"  # the operator that every app has: see core/later/builtin.py
IN_A_NOTEBOOK = ". If this is a notebook, run the cell with App(...) first, and then start a new Runtime"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
Body = Callable[..., Any]


class Function(Generic[P, R, Plain]):
    """A registered function: a reference to call it by, and still callable as the plain function that was decorated.
    `P` are the parameters after the context, `R` is the result of a call."""

    def __init__(self, operator: Operator[Any], body: Body) -> None:
        self.operator, self.body, self.__wrapped__ = operator, body, body
        self.name = body.__name__
        self.full_name = f"{operator.name}.{self.name}"
        self.__doc__ = body.__doc__
        self.is_async = inspect.iscoroutinefunction(body)
        if not NAME.match(self.name):
            raise ModelError(f"{self.full_name}: a function needs a plain name, so that it can be called")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise ModelError(f"{self.full_name} yields; a function must return its result")
        self.parameters = parameters_of(self.full_name, body)  # without the context
        self.by_position = by_position(body, self.parameters)  # the body, for arguments from the log

    def __call__(self, ctx: Context[Any], /, *args: P.args, **kwargs: P.kwargs) -> Plain:
        result: Plain = self.body(ctx, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<function {self.full_name}>"


def headrace_expire(ctx: Any) -> bool:
    """A function of every operator with a time to live: delete the state if it has expired. Returns whether it had."""
    return bool(ctx.expire())


class Operator(Generic[S]):
    """Made by `app.operator(...)`. An entity is `(operator, key)` and has its own state, an `S`."""

    def __init__(
        self,
        name: str,
        *,
        state: Any = None,
        combine: Callable[[Any, Any], Any] | None = None,
        partition_by: Callable[[Any], Any] | None = None,
        ttl: float | datetime.timedelta | None = None,
        migrate: Callable[..., Any] | None = None,
        changes: bool = False,
    ) -> None:
        if type(name) is not str or not NAME.match(name):
            raise ModelError(
                f"{name!r} is not a valid name for an operator: use letters, digits and _, not starting with a digit"
            )
        for given, what in ((combine, "combine"), (partition_by, "partition_by"), (migrate, "migrate")):
            if given is not None and not callable(given):
                raise ModelError(f"operator {name}: {what} is {given!r}; it must be a function")
        if type(changes) is not bool:
            raise ModelError(f"operator {name}: changes is {changes!r}; it must be True or False")
        self.ttl_us = None if ttl is None else duration_us(ttl, f"operator {name}: ttl")
        if self.ttl_us == 0:
            raise ModelError(f"operator {name}: with a ttl of 0 no state would ever be visible")
        self.name, self.state, self.combine, self.partition_by = name, state, combine, partition_by
        self.migrate = migrate  # from the state of an older version of the app
        self.changes = changes  # whether what epochs change is logged; it does not affect results
        self.functions: dict[str, Function] = {}
        self.expire = None if ttl is None else Function(self, headrace_expire)

    @overload
    def register(
        self, body: Callable[Concatenate[Context[S], P], Coroutine[Any, Any, Result]]
    ) -> Function[P, Result, Coroutine[Any, Any, Result]]: ...
    @overload
    def register(self, body: Callable[Concatenate[Context[S], P], Result]) -> Function[P, Result, Result]: ...
    def register(self, body: Body) -> Function[Any, Any, Any]:
        """Register a function of this operator, as a decorator; the name remains a reference to it."""
        if not inspect.isfunction(body):
            raise ModelError(f"operator {self.name}: {body!r} is not a function; register takes a def or an async def")
        function: Function = Function(self, body)
        if function.name == headrace_expire.__name__:
            raise ModelError(f"{function.full_name}: this name is reserved")
        if function.name in self.functions:
            raise ModelError(f"{function.full_name} is registered twice{IN_A_NOTEBOOK}")
        self.functions[function.name] = function
        return function

    def __repr__(self) -> str:
        return f"<operator {self.name}>"
