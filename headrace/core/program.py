"""An app made ready to run: every function with its argument check. It never changes; state is in `core/state.py`.

Decides whether a call may be made (names, keys, arguments), for calls from outside and between functions alike.

Rules:
1. If all arguments are scalars, they are passed on as they are; otherwise the whole tuple is encoded.
2. Declared types are enforced, never coerced: an argument has its annotated type or the call is refused; a result or
   a state of another type than the declared one aborts. Records are checked with all their fields.

Never here: state, which transaction calls, or when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from headrace.config import Config
from headrace.core.later.builtin import BUILT_IN
from headrace.core.lent import lending, may_keep, uses_keywords
from headrace.core.placement import CACHE_MAX, shard_of
from headrace.core.signature import Args as Args
from headrace.core.signature import Signature, declared_codec, never
from headrace.errors import BadRequest, BadValue, ModelError, UnknownFunction
from headrace.model.app import App, Schedule
from headrace.model.operator import RESERVED, Function, Operator
from headrace.wire.messages import Entities
from headrace.wire.typed_values import Codec
from headrace.wire.values import Key, Values, check_key, shown, written_us


class Program:
    """The app, compiled. `functions` finds an entry by reference (`transfer`) and by name ("account.transfer")."""

    def __init__(self, app: App, config: Config) -> None:
        self.app, self.config = app, config
        self.operators = {**app.operators, BUILT_IN.name: BUILT_IN}
        self.ttls_us = {name: each.ttl_us for name, each in app.operators.items() if each.ttl_us is not None}
        self.deferring = (BUILT_IN.name, *self.ttls_us)  # operators whose changes make something happen later
        self.values: Values
        try:
            self.values = values_of(app, config)
        except BadValue as error:
            raise ModelError(f"app {app.name}: {error}") from None
        self.states = {name: state_codec(each, self.values) for name, each in self.operators.items()}
        self.placed: dict[str, set[Key]] = {  # keys for which `partition_by` gave a key: it is asked once
            name: set() for name, each in app.operators.items() if each.partition_by is not None
        }
        self.functions: dict[Function | str, Entry] = {}  # Headrace's own functions only by reference
        self.named: dict[str, Entry] = {}  # all of them
        self.entries: list[Entry] = []  # by number, as they are named in messages
        sweeps = [operator.expire for operator in app.operators.values() if operator.expire is not None]
        for function in (*app.functions, *BUILT_IN.functions.values(), *sweeps):
            entry = Entry(function, self.values, len(self.entries))
            self.entries += [entry, entry.sealed]
            self.functions[function] = self.named[function.full_name] = entry
            if function in function.operator.functions.values() and function.operator is not BUILT_IN:
                self.functions[function.full_name] = entry
        for schedule in app.schedules.values():
            self._check_schedule(schedule)

    def _check_schedule(self, schedule: Schedule) -> None:
        try:
            entry = self.find(schedule.function)
            self.check_key(schedule.of, entry)
            entry.admit(schedule.args)
            tick = BUILT_IN.functions["tick"]
            self.functions[tick].admit((0, schedule.function, schedule.of, schedule.args))
        except BadRequest as error:
            raise ModelError(f"app {self.app.name}: schedule {schedule.name}: {error}") from None

    def under(self, config: Config) -> Program:
        """The same app with another configuration. What is compiled is shared, if the limits of values are the same."""
        if value_limits(config) != value_limits(self.config):
            return Program(self.app, config)
        program = copy.copy(self)
        program.config = config
        return program

    def visible(self, entities: Entities, now_us: int) -> Entities:
        """Without expired entities that are not deleted yet."""
        ttls_us = self.ttls_us
        if not ttls_us:
            return entities
        return [
            (name, key, state)
            for name, key, state in entities
            if name not in ttls_us or now_us < written_us(state) + ttls_us[name]
        ]

    def find(self, function: object) -> Entry:
        """The entry of a function; raises UnknownFunction, with the reason, if there is none."""
        if isinstance(function, Function | str):
            entry = self.functions.get(function)
            if entry is not None:
                return entry
        name = function.full_name if isinstance(function, Function) else function
        if type(name) is not str:
            what = getattr(function, "__name__", None) or shown(function)
            registered = next((each for each in self.app.functions if each.body is function), None)
            if registered is not None:
                register = f"{registered.operator.name}.register"
                raise UnknownFunction(
                    f"{what} is the plain function; {register} returned the registered one. Keep it: write @{register} "
                    f"above the def, or {what} = {register}({what})"
                )
            raise UnknownFunction(
                f"{what} is not registered: pass a registered function, or its name as 'operator.function'"
            )
        of, _, member = name.partition(".")
        if of not in self.app.operators:
            known = ", ".join(self.app.operators) or "none"
            raise UnknownFunction(f"no operator {shown(of)} in app {self.app.name!r}; it has: {known}")
        if member in self.app.operators[of].functions:
            if name is not function and self.app.operators[of].functions[member] is not function:
                raise UnknownFunction(f"{name} belongs to another app, not to app {self.app.name!r}")
            raise UnknownFunction(f"{name} was registered after this runtime started: restart the runtime")
        known = ", ".join(self.app.operators[of].functions) or "none"
        raise UnknownFunction(f"no function {shown(member)} on operator {of!r}; it has: {known}")

    def check_keys(self, keys: list[Any], entry: Entry) -> bool:
        """Check many keys at once; after False, check them one by one."""
        limit, kinds = self.config.key_bytes_max, set(map(type, keys))
        placed = self.placed.get(entry.operator.name)
        if placed is not None and kinds in ({str}, {int}):  # what is not a key may not be hashable
            return placed.issuperset(keys)
        if kinds == {str}:
            return all(map(str.isascii, keys)) and max(map(len, keys)) <= limit
        try:
            return kinds == {int} and bool(self.values.encode_plain(keys))  # fails over 64 bits
        except OverflowError:
            return False

    def check_key(self, key: Any, entry: Entry | None = None) -> None:
        """Check that it is a key and has a shard. In every mode: refusals must not depend on the mode."""
        check_key(key, self.config.key_bytes_max)
        placed = None if entry is None else self.placed.get(entry.operator.name)
        if placed is not None and key not in placed:
            assert entry is not None
            shard_of(entry.operator, key, self.config.shards)
            if len(placed) >= CACHE_MAX:
                placed.clear()
            placed.add(key)


def value_limits(config: Config) -> tuple[int, int]:
    return config.value_bytes_max, config.value_depth_max


def state_codec(operator: Operator, values: Values) -> Codec:
    """The codec of an operator's states."""
    hint = Any if operator.state is None else operator.state
    return declared_codec(hint, values, f"operator {operator.name}: state")


def values_of(app: App, config: Config) -> Values:
    return Values(app.records(), bytes_max=config.value_bytes_max, depth_max=config.value_depth_max)


class Entry:
    """One function, ready to run. Its twin, `sealed`, runs arguments that are not all scalars: it takes them encoded as
    one value."""

    __slots__ = (
        "body",
        "fits",
        "function",
        "is_plain",
        "is_positional",
        "name",
        "number",
        "operator",
        "result",
        "sealed",
        "signature",
    )

    def __init__(self, function: Function, values: Values, number: int, twin: Entry | None = None) -> None:
        self.function, self.operator, self.number = function, function.operator, number
        self.name, self.is_plain = function.full_name, not function.is_async
        self.body: Callable[..., Any]
        self.fits: Callable[[Args], bool]
        if twin is None:
            self.body, self.signature = function.by_position, Signature(function, values)
            self.is_positional = not may_keep(function.body) and not uses_keywords(function.body)
            if function.operator.name != RESERVED and may_keep(function.body):
                self.body = lending(self.body, self.name, function.is_async)
            self.result = self.signature.result
            self.fits = self.signature.compile_fits()
            self.sealed = Entry(function, values, number + 1, twin=self)
        else:
            self.signature, self.sealed, self.fits, self.result = twin.signature, self, never, twin.result
            body, decode, self.is_positional = twin.body, values.decode, twin.is_positional
            self.body = lambda context, data: body(context, *decode(data))

    def admit(self, args: Args, is_checked: bool = False) -> tuple[Entry, Args]:
        """The slow path: the entry that runs these arguments, and their form; raises if they do not fit."""
        packed = self.signature.admit(args, is_checked)
        return (self.sealed, (packed,)) if isinstance(packed, bytes) else (self, packed)

    def __repr__(self) -> str:
        return f"<entry {self.name}>"
