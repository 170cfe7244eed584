"""An app: the operators of one Python module, and the types their values are made of."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Never, TypeVar, overload

import msgspec

from headrace.errors import BadArguments, ModelError
from headrace.model import cron
from headrace.model.keywords import Keywords
from headrace.model.operator import IN_A_NOTEBOOK, NAME, RESERVED, Function, Operator
from headrace.model.type_variables import P, R, State

if TYPE_CHECKING:
    from headrace.model.type_variables import TypeForm

Class = TypeVar("Class", bound=type)


class External(NamedTuple):
    """A function of the outside world. It gets an idempotency key before its arguments: if it is called again with the
    same key, it must not act twice."""

    name: str
    function: Callable[..., Any]
    timeout_s: float
    tries: int
    backoff_s: float


class Schedule(NamedTuple):
    """A call that is made repeatedly."""

    name: str
    when: cron.Cron | cron.Interval
    function: str
    of: Any  # the key of the entity
    args: tuple[Any, ...]

    @property
    def key(self) -> str:
        """The key of its own entity, among the timers."""
        return f"every/{self.name}"


class AppOptions:
    """Made by `app.options(...)`."""

    def __init__(self, app: App, name: str | None = None) -> None:
        self.app, self.name = app, name

    def every(
        self,
        when: str | int | float | datetime.timedelta,
        function: Function[P, R],
        key: Any,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Schedule:
        """`app.every`, with these options."""
        if not isinstance(function, Function):
            raise ModelError(
                f"app.every takes a registered function, not {function!r}: write @operator.register above its def, or "
                "keep what register returns"
            )
        name = self.name or function.name
        if name in self.app.schedules:
            raise ModelError(
                f"app {self.app.name} has two schedules named {name}: name one of them, as in "
                f'app.options(name="...").every(...)'
            )
        try:
            placed = Keywords(function.parameters).bind(args, kwargs, function.full_name) if kwargs else args
        except BadArguments as error:
            hint = '; to name the schedule, write app.options(name="...").every(...)' if "name" in kwargs else ""
            raise ModelError(f"app {self.app.name}: schedule {name}: {error}{hint}") from None
        schedule = Schedule(name, cron.parse(when), function.full_name, key, placed)
        self.app.schedules[name] = schedule
        return schedule


class App:
    """`app = App("bank")`, then `app.operator("account")`, then functions registered on it."""

    def __init__(self, name: str) -> None:
        if type(name) is not str or not NAME.match(name):
            raise ModelError(
                f"{name!r} is not a valid name for an app: use letters, digits and _, not starting with a digit"
            )
        self.name = name
        self.operators: dict[str, Operator] = {}
        self.externals: dict[str, External] = {}
        self.schedules: dict[str, Schedule] = {}
        self._records: list[type] = []

    @overload
    def operator(
        self,
        name: str,
        *,
        state: None = None,
        combine: Callable[[Any, Any], Any] | None = None,
        partition_by: Callable[[Any], Any] | None = None,
        ttl: float | datetime.timedelta | None = None,
        migrate: Callable[..., Any] | None = None,
        changes: bool = False,
    ) -> Operator[Any]: ...
    @overload
    def operator(
        self,
        name: str,
        *,
        state: TypeForm[State],
        combine: Callable[[State, State], State] | None = None,
        partition_by: Callable[[Any], Any] | None = None,
        ttl: float | datetime.timedelta | None = None,
        migrate: Callable[..., Any] | None = None,
        changes: bool = False,
    ) -> Operator[State]: ...
    def operator(
        self,
        name: str,
        *,
        state: Any = None,
        combine: Callable[[Any, Any], Any] | None = None,
        partition_by: Callable[[Any], Any] | None = None,
        ttl: float | datetime.timedelta | None = None,
        migrate: Callable[..., Any] | None = None,
        changes: bool = False,
    ) -> Operator[Any]:
        """Define an entity type. `state` is the type of its state (needed for a dataclass or struct that is in no
        function's annotations), `combine(state, delta)` allows `ctx.merge`, and `partition_by(key)` keeps entities with
        equal results on one worker. With a `ttl` (seconds, or a timedelta) an entity is deleted that long after it was
        last written, by the log's time. `migrate` converts states of an older version of the app. With `changes` a
        store keeps what each epoch changed, before and after, for `headrace.changes`."""
        if name in self.operators:
            raise ModelError(f"operator {name} is defined twice in app {self.name}{IN_A_NOTEBOOK}")
        if name == RESERVED:
            raise ModelError(f"the operator name {RESERVED!r} is reserved: choose another name")
        operator: Operator = Operator(
            name, state=state, combine=combine, partition_by=partition_by, ttl=ttl, migrate=migrate, changes=changes
        )
        self.operators[name] = operator
        return operator

    def external(
        self, name: str, function: Callable[..., Any], *, timeout: float = 10.0, tries: int = 3, backoff: float = 0.1
    ) -> External:
        """Register a function of the outside world: `function(idempotency_key, *args)`, for `ctx.call_external` and
        `ctx.send_external`. It runs in a thread beside the coordinator. Each try may take `timeout` seconds; between
        two tries it waits, `backoff` seconds at first and twice as long each time."""
        if not NAME.match(name) or name in self.externals:
            raise ModelError(f"{name!r} cannot name an external function: it is already used, or not a plain name")
        if not callable(function):
            raise ModelError(f"the external {name} is {function!r}; it must be a function")
        if timeout <= 0 or tries < 1 or backoff < 0:
            raise ModelError(f"the external {name}: timeout must be above 0, tries at least 1, and backoff not below 0")
        external = self.externals[name] = External(name, function, timeout, tries, backoff)
        return external

    def every(
        self,
        when: str | int | float | datetime.timedelta,
        function: Function[P, R],
        key: Any,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Schedule:
        """Call a function repeatedly: at cron times in UTC ("*/5 * * * *"), or at an interval. If several times were
        missed because the app was not running, it is called once. The schedule has the function's name; give it another
        one with `app.options(name="...").every(...)`."""
        return AppOptions(self).every(when, function, key, *args, **kwargs)

    def options(self, *, name: str | None = None, **unknown: Never) -> AppOptions:
        """Options for `every`, apart from the arguments, which belong to the function: `name` identifies the schedule,
        also in the next version."""
        for other in unknown:
            raise ModelError(f"an app has no option {other!r}; it has: name")
        return AppOptions(self, name)

    def record(self, cls: Class) -> Class:
        """Register a dataclass or msgspec struct that is in no annotation; usable as a decorator."""
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
    """The resolved annotations of a function, without that of the context."""
    first = next(iter(inspect.signature(function.body).parameters))
    names = {name: hint for name, hint in function.body.__annotations__.items() if name != first}
    bare = type("annotations", (), {"__annotations__": names, "__module__": function.body.__module__})
    scope = dict(inspect.getclosurevars(function.body).nonlocals)
    try:
        return typing.get_type_hints(bare, function.body.__globals__, scope, include_extras=True)
    except Exception as error:  # an annotation given as a string may be anything
        raise ModelError(f"{function.full_name}: an annotation cannot be resolved: {error}") from None


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct))


def collect(hint: Any, found: dict[type, None]) -> None:
    """Add the records inside a type hint, and inside their fields."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
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
