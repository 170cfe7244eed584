"""An app made ready to run: every function with its argument check, its operator's table and its contexts.

Decides whether a call may be made (names, keys, arguments), for calls from outside and between functions alike.

Rules:
1. If all arguments are scalars, they are passed on as they are; otherwise the whole tuple is encoded.
2. Annotations are enforced, never coerced: an argument fits or the call is refused. Of a record only the class is
   checked; its fields are its author's responsibility.
3. State has two layers. `tables` holds what changed since the last `take_written`, with MISSING where an entity of the
   lower layer was deleted; `bases` holds the rest. If changes are never taken, `tables` holds everything and never a
   MISSING. So tracking changes costs nothing; they are folded into the lower layer when they are taken. With a large
   state folding would be slow (the entities are no longer in the processor's cache), so from `LARGE` on functions run
   on the lower layer itself, and changes are also noted in the upper one.
4. For a watched operator, whose changes are logged, the upper layer holds the changes of one epoch. `take_changes`
   folds them at its end; until then the lower layer has the earlier states. An executor that runs several epochs at
   once finds these itself (`watches_epochs` is False).

Never here: which transaction calls, or when.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import repeat
from types import MethodType
from typing import Any
from weakref import WeakSet

from headrace.config import Config
from headrace.core.epoch_changes import Changes, OperatorChanges
from headrace.core.later.builtin import BUILT_IN
from headrace.core.placement import shard_of
from headrace.core.signature import Args as Args
from headrace.core.signature import Signature, never
from headrace.errors import BadRequest, BadValue, ModelError, Poisoned, UnknownFunction
from headrace.model.app import App, Schedule
from headrace.model.operator import Function
from headrace.wire.values import MISSING, Key, Values, check_key, shown, written_us

NOWHERE: Any = object()
LARGE = 100_000  # entities

Table = dict[Key, Any]  # one operator's entities: key -> sealed value


class Noted(Table):
    """A table that notes which keys were written."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.changed: dict[Key, None] = {}

    def __setitem__(self, key: Key, state: Any) -> None:
        self.changed[key] = None
        super().__setitem__(key, state)

    def __delitem__(self, key: Key) -> None:
        self.changed[key] = None
        super().__delitem__(key)

    def pop(self, key: Key, *default: Any) -> Any:
        self.changed[key] = None
        return super().pop(key, *default)


class Program:
    """The app, compiled. `functions` finds an entry by reference (`transfer`) and by name ("account.transfer")."""

    def __init__(
        self,
        app: App,
        config: Config,
        like: Program | None = None,
        base: Callable[[str], Table] = lambda operator: {},
        over: Program | None = None,
    ) -> None:
        """`like` is a program of the same app and configuration, whose compiled parts are reused; `over` is one whose
        state is shared; `base` makes the lower layer of an operator."""
        self.app, self.config = app, config
        self.seed: int = over.seed if over is not None else like.seed if like is not None else 0
        self.operators = {**app.operators, BUILT_IN.name: BUILT_IN}
        self.values: Values
        try:
            self.values = like.values if like is not None else values_of(app, config)
        except BadValue as error:
            raise ModelError(f"app {app.name}: {error}") from None
        self.tables: dict[str, Table] = over.tables if over is not None else {}
        self.bases: dict[str, Table] = over.bases if over is not None else {}
        self.watched: dict[str, dict[Key, None]] = over.watched if over is not None else {}  # with the folded keys
        self.watches_epochs = True
        self.sharing: WeakSet[Program] = over.sharing if over is not None else WeakSet()
        if over is None:
            for name in self.operators:
                is_noted = name == BUILT_IN.name or self.operators[name].ttl_us is not None
                self.tables[name], self.bases[name] = Noted() if is_noted else {}, base(name)
        noted = {name: table.changed for name, table in self.tables.items() if isinstance(table, Noted)}
        self.later: dict[str, dict[Key, None]] = noted  # written keys of deferred or expiring entities
        self.sharing.add(self)
        self.functions: dict[Function | str, Entry] = {}  # Headrace's own functions only by reference
        self.named: dict[str, Entry] = {}  # all of them
        sweeps = [operator.expire for operator in app.operators.values() if operator.expire is not None]
        for function in (*app.functions, *BUILT_IN.functions.values(), *sweeps):
            twin = like.functions[function] if like is not None else None
            name = function.operator.name
            entry = Entry(function, self.tables[name], self.bases[name], self.values, like=twin)
            if function.operator.partition_by is not None:
                entry.fits = never  # its keys are checked one by one
            self.functions[function] = self.named[function.full_name] = entry
            if function in function.operator.functions.values() and function.operator is not BUILT_IN:
                self.functions[function.full_name] = entry
        self.numbered = list(self.entries)  # by number, as they are named in messages
        for number, entry in enumerate(self.numbered):
            entry.number = number
        if like is None:
            for schedule in app.schedules.values():
                self._check_schedule(schedule)
        self.notes = False  # whether functions run on the lower layer
        if over is not None and over.notes:
            self._run_below()

    def _check_schedule(self, schedule: Schedule) -> None:
        try:
            entry = self.find(schedule.function)
            self.check_key(schedule.of, entry)
            entry.admit(schedule.args)
            tick = BUILT_IN.functions["tick"]
            self.functions[tick].admit((0, schedule.function, schedule.of, schedule.args))
        except BadRequest as error:
            raise ModelError(f"app {self.app.name}: schedule {schedule.name}: {error}") from None

    # --- state --------------------------------------------------------------------------------------------------------

    def load(self, operator: str, entities: Table) -> None:
        """Load state that does not count as a change."""
        self.bases[operator].update(entities)
        self._look_at_size()

    def state(self, operator: str, key: Key) -> Any:
        """Sealed, or MISSING."""
        state = self.tables[operator].get(key, NOWHERE)
        return self.bases[operator].get(key, MISSING) if state is NOWHERE else state

    def items(self, operator: str) -> Iterator[tuple[Key, Any]]:
        """Every entity of an operator that has a state, with its sealed state."""
        table = self.tables[operator]
        for key, state in self.bases[operator].items():
            if key not in table:
                yield key, state
        for key, state in table.items():
            if state is not MISSING:
                yield key, state

    def visible(self, entities: list[tuple[str, Key, Any]], now_us: int) -> list[tuple[str, Key, Any]]:
        """Without expired entities that are not deleted yet."""
        lives = {name: operator.ttl_us for name, operator in self.operators.items() if operator.ttl_us is not None}
        if not lives:
            return entities
        return [
            (name, key, state)
            for name, key, state in entities
            if name not in lives or now_us < written_us(state) + lives[name]
        ]

    def count(self, operator: str) -> int:
        """How many entities have a state."""
        table, base = self.tables[operator], self.bases[operator]
        if not base:
            return len(table)
        gone = list(table.values()).count(MISSING)  # in one go: another thread may call this
        return len(base) + len(table) - len(base.keys() & table.keys()) - gone

    def take_written(self) -> list[tuple[str, Key, Any]]:
        """The changes since the last call, or the start: operator, key, and sealed state or MISSING."""
        written: list[tuple[str, Key, Any]] = []
        for name, table in self.take_tables().items():
            written += zip(repeat(name), table, table.values())
        return written

    def take_tables(self) -> dict[str, Table]:
        """The same by operator. The caller owns the tables: a large state continues with new ones, so nothing is
        copied."""
        taken: dict[str, Table] = {}
        for name, table in self.tables.items():
            if name in self.watched and self.watches_epochs:
                self._fold(name)
                base = self.bases[name]
                taken[name] = {key: base.get(key, MISSING) for key in self.watched[name]}
                self.watched[name].clear()
                continue
            if self.notes and type(table) is dict:
                taken[name], self.tables[name] = table, {}
                continue
            taken[name] = dict(table)
            if not self.notes:
                self._fold(name)
            table.clear()
        if self.notes:
            for program in self.sharing:
                program._run_below()
        self._look_at_size()
        return {name: table for name, table in taken.items() if table}

    def _fold(self, name: str) -> None:
        """Fold the upper layer into the lower one."""
        table, base = self.tables[name], self.bases[name]
        base.update(table)
        for key in [key for key, state in table.items() if state is MISSING]:
            del base[key]
        if self.watches_epochs and name in self.watched:
            self.watched[name].update(dict.fromkeys(table))  # without the states: old ones are not needed
        table.clear()

    def watch(self, operators: Iterable[str]) -> None:
        """From now on, `take_changes` returns what epochs change in these."""
        self.watched.update({name: {} for name in operators if name in self.tables})

    def watch_epochs(self, is_one_at_a_time: bool) -> None:
        """Set, before the first epoch, whether epochs run one by one with `take_changes` between them."""
        if is_one_at_a_time is not self.watches_epochs:
            self.watches_epochs = is_one_at_a_time
            if self.notes:
                self._run_below()

    def take_changes(self) -> Changes:
        """The changes since the last call, of watched operators."""
        changes: Changes = {}
        for name in self.watched:
            table = self.tables[name]
            if table:
                keys, base = list(table), self.bases[name]
                try:
                    befores = list(operator.itemgetter(*keys, keys[0])(base)[:-1])  # the fastest way, if all are there
                except KeyError:
                    befores = list(map(base.get, keys, repeat(MISSING)))
                changes[name] = OperatorChanges(keys, befores, list(table.values()))
                self._fold(name)
        return changes

    def show_later(self, state_of: Callable[[str, Key], Any]) -> list[tuple[Any, Any]]:
        """The written entities that happen later: key, and sealed state or MISSING. Of those that expire: operator and
        key, and the time of the write or MISSING."""
        shown: list[tuple[Any, Any]] = []
        for name, keys in self.later.items():
            for key in keys:
                state = state_of(name, key)
                if name == BUILT_IN.name:
                    shown.append((key, state))
                else:
                    shown.append(((name, key), state if state is MISSING else written_us(state)))
        return shown

    def take_later(self) -> list[tuple[Any, Any]]:
        """The same, since the last call."""
        later = self.show_later(self.state)
        for keys in self.later.values():
            keys.clear()
        return later

    def forget_later(self, chains: Mapping[Any, Container[Key]]) -> None:
        """Drop what no epoch under way has changed: it is known."""
        for name, keys in self.later.items():
            if keys:
                alive = chains[self.operators[name]]
                for key in [key for key in keys if key not in alive]:
                    del keys[key]

    def _look_at_size(self) -> None:
        if not self.notes and not any(self.tables.values()) and sum(map(len, self.bases.values())) >= LARGE:
            for program in self.sharing:
                program._run_below()

    def _run_below(self) -> None:
        self.notes = True
        for entry in self.entries:
            name = entry.operator.name
            is_watched = self.watches_epochs and name in self.watched
            entry.written, entry.table = self.tables[name], self.tables[name] if is_watched else self.bases[name]

    # --- functions ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry, once."""
        for entry in self.named.values():
            yield entry
            yield entry.sealed

    def find(self, function: object) -> Entry:
        """The entry of a function; raises UnknownFunction, with the reason, if there is none."""
        if isinstance(function, Function | str):
            entry = self.functions.get(function)
            if entry is not None:
                return entry
        name = function.full_name if isinstance(function, Function) else function
        if type(name) is not str:
            what = getattr(function, "__name__", None) or shown(function)
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

    def check_keys(self, keys: list[Any]) -> bool:
        """Check many keys at once; after False, check them one by one."""
        limit, kinds = self.config.key_bytes_max, set(map(type, keys))
        if kinds == {str}:
            return all(map(str.isascii, keys)) and max(map(len, keys)) <= limit
        try:
            return kinds == {int} and bool(self.values.encode_plain(keys))  # fails over 64 bits
        except OverflowError:
            return False

    def check_key(self, key: Any, entry: Entry | None = None) -> None:
        """Check that it is a key and has a shard. In every mode: refusals must not depend on the mode."""
        check_key(key, self.config.key_bytes_max)
        if entry is not None and entry.operator.partition_by is not None:
            shard_of(entry.operator, key, self.config.shards)


def values_of(app: App, config: Config) -> Values:
    return Values(app.records(), bytes_max=config.value_bytes_max, depth_max=config.value_depth_max)


class Entry:
    """One function, ready to run. Its twin, `sealed`, runs arguments that are not all scalars: it takes them encoded as
    one value."""

    __slots__ = (
        "base",
        "body",
        "chains",
        "context",
        "fits",
        "function",
        "is_plain",
        "lessons",
        "name",
        "number",
        "operator",
        "owners",
        "run",
        "sealed",
        "signature",
        "table",
        "written",
    )

    def __init__(
        self,
        function: Function,
        table: Table,
        base: Table,
        values: Values,
        twin: Entry | None = None,
        like: Entry | None = None,
    ) -> None:
        self.function, self.table, self.base, self.operator = function, table, base, function.operator
        self.signature: Signature
        self.fits: Callable[[Args], bool]
        self.number: int
        self.name, self.body, self.is_plain = function.full_name, function.body, not function.is_async
        if twin is None:
            self.signature = like.signature if like is not None else Signature(function, values)
            self.fits = like.fits if like is not None else self.signature.compile_fits()
            self.sealed = Entry(function, table, base, values, twin=self)
        else:
            self.signature, self.sealed = twin.signature, self
            self.fits = never
            body, decode = function.body, values.decode
            self.body = lambda context, data: body(context, *decode(data))
        self.written: Any = None  # where changes are also noted, if functions run on the lower layer
        self.number = 0
        self.owners: dict[Key, int] = {}  # the known workers of its keys
        self.lessons: Any = None  # what is being learned about its calls
        self.chains: Any = None  # of the operator's entities, in the ordered mode
        self.context: Any = None  # of the running or the next call: see bind
        self.run: Callable[..., Any] = never

    def bind(self, context: Any) -> None:
        self.context, self.run = context, MethodType(self.body, context)

    def find(self, key: Key) -> Any:
        """The sealed state of an entity, or MISSING. Call it when `table.get(key)` gives None."""
        state = self.table.get(key, NOWHERE)
        return self.base.get(key, MISSING) if state is NOWHERE else state

    def lacks(self, key: Key) -> bool:
        """Must the entity's state be fetched first? Only where state is lent."""
        return type(self.base) is not dict and key not in self.table and self.base.lacks(key)  # type: ignore[attr-defined]

    def store(self, key: Key, state: Any) -> None:
        if self.written is not None:
            self.written[key] = state
        if state is not MISSING or (self.table is not self.base and key in self.base):
            self.table[key] = state
        else:
            self.table.pop(key, None)

    def admit(self, args: Args) -> tuple[Entry, Args]:
        """The slow path: the entry that runs these arguments, and their form; raises if they do not fit."""
        packed = self.signature.admit(args)
        return (self.sealed, (packed,)) if isinstance(packed, bytes) else (self, packed)

    def decreed(self, why: str) -> Entry:
        """The same function, but it fails: for a transaction that aborts by decree. Not bound yet."""
        entry = copy.copy(self)

        def fail(context: Any, *args: Any) -> Any:
            raise Poisoned(why)

        entry.body, entry.is_plain = fail, True
        return entry

    def __repr__(self) -> str:
        return f"<entry {self.name}>"
