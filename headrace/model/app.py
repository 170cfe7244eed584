"""An app: the operators of one Python module, and the types their values are made of."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from headrace.errors import ModelError
from headrace.model.operator import NAME, Function, Operator

Class = TypeVar("Class", bound=type)


class App:
    """`app = App("bank")`, then `app.operator("account")`, then functions registered on it."""

    def __init__(self, name: str) -> None:
        if type(name) is not str or not NAME.match(name):
            raise ModelError(f"{name!r} cannot name an app: letters, digits and _ can, not starting with a digit")
        self.name = name
        self.operators: dict[str, Operator] = {}
        self._records: list[type] = []

    def operator(
        self,
        name: str,
        *,
        state: Any = None,
        combine: Callable[[Any, Any], Any] | None = None,
        partition_by: Callable[[Any], Any] | None = None,
    ) -> Operator:
        """An entity type. `state` names the type of its state (needed for a dataclass or struct that no function's
        annotation names), `combine(state, delta)` allows `ctx.merge`, and `partition_by(key)` keeps entities with
        equal parts on one worker."""
        if name in self.operators:
            raise ModelError(f"operator {name} is defined twice in app {self.name}")
        operator = self.operators[name] = Operator(name, state=state, combine=combine, partition_by=partition_by)
        return operator

    def record(self, cls: Class) -> Class:
        """Make a dataclass or msgspec struct known that stands in no annotation; usable as a decorator."""
        if not is_record(cls):
            raise ModelError(f"{cls!r} is neither a dataclass nor a msgspec struct")
        self._records.append(cls)
        return cls

    @property
    def functions(self) -> Iterator[Function]:
        for operator in self.operators.values():
            yield from operator.functions.values()

    def records(self) -> list[type]:
        """Every dataclass and struct that this app's values may hold, found through its annotations."""
        found: dict[type, None] = {}
        for cls in self._records:
            collect(cls, found)
        for operator in self.operators.values():
            collect(operator.state, found)
        for function in self.functions:
            for hint in hints_of(function).values():
                collect(hint, found)
        names: dict[str, type] = {}
        for cls in found:
            if names.setdefault(cls.__qualname__, cls) is not cls:
                raise ModelError(f"app {self.name} has two types named {cls.__qualname__}; rename one")
        return list(found)

    def __repr__(self) -> str:
        return f"<app {self.name}: {', '.join(self.operators) or 'no operators'}>"


def hints_of(function: Function) -> dict[str, Any]:
    """The annotations of a function, resolved; those of the context left out."""
    first = next(iter(inspect.signature(function.body).parameters))
    names = {name: hint for name, hint in function.body.__annotations__.items() if name != first}
    bare = type("annotations", (), {"__annotations__": names, "__module__": function.body.__module__})
    scope = dict(inspect.getclosurevars(function.body).nonlocals)
    try:
        return typing.get_type_hints(bare, function.body.__globals__, scope, include_extras=True)
    except Exception as error:  # an annotation as text may be anything
        raise ModelError(f"{function.full_name}: an annotation cannot be resolved: {error}") from None


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct))


def collect(hint: Any, found: dict[type, None]) -> None:
    """Add the records inside a type hint, and inside their fields."""
    for part in typing.get_args(hint):
        collect(part, found)
    if is_record(hint) and hint not in found:
        found[hint] = None
        try:
            fields = typing.get_type_hints(hint, include_extras=True).values()
        except Exception as error:
            raise ModelError(f"{hint.__qualname__}: an annotation cannot be resolved: {error}") from None
        for field in fields:
            collect(field, found)
