"""The fingerprint of an app: what its functions do and what its state consists of, in a few bytes.

A log can only be replayed by the code that wrote it. So a fingerprint is kept with the log and compared part by part
when an app starts; differences are described for people. Rules:
1. What does not change a result does not change the fingerprint: comments, layout, docstrings, module names, the
   process, the hash seed.
2. A function counts with its own source and everything it refers to in the app's own modules: helpers, classes,
   constants. Of installed libraries only the name counts. Registered functions and record types are separate parts,
   under their names.
3. A mutable constant (a list, a dict, an object) counts as the source that made it, not as its present content.

Never here: files (except the source that `inspect` finds), the log, what to do about a difference.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from headrace.model.app import App, Schedule, collect, hints_of
from headrace.model.operator import Function, Operator
from headrace.model.source import Survey, digest_of

MAY_HOLD_ALL = "*"  # for an operator whose state type is not declared


class OperatorPrint(msgspec.Struct, frozen=True):
    """What an operator's state is and how it behaves. `holds` are the record types inside its state."""

    state: str
    holds: list[str]
    combine: str = ""
    partition_by: str = ""
    ttl: str = ""
    migrate: str = ""


class TypePrint(msgspec.Struct, frozen=True):
    """A record type: its fields with their types, in order, and a digest of its code."""

    fields: list[tuple[str, str]]
    code: str


class Fingerprint(msgspec.Struct, frozen=True):
    """Only digests and names: it can be printed, stored and compared without the app."""

    app: str
    functions: dict[str, str]
    operators: dict[str, OperatorPrint]
    types: dict[str, TypePrint]
    schedules: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """One digest of all of it."""
        return digest_of(self.plain())

    def plain(self) -> dict[str, Any]:
        """The fingerprint in msgpack's and JSON's own types."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_plain(cls, plain: Any) -> Fingerprint:
        return msgspec.convert(plain, cls)

    def differences(self, other: Fingerprint) -> list[str]:
        """What is different in the other, later one, as text; empty if they are the same."""
        found = [] if self.app == other.app else [f"the app is {other.app}, it was {self.app}"]
        found += changes("operator", self.operators, other.operators)
        for name, operator in self.operators.items():
            if name in other.operators:
                found += [f"operator {name}: {change}" for change in in_operator(operator, other.operators[name])]
        found += changes("type", self.types, other.types)
        for name, kind in self.types.items():
            if name in other.types:
                found += [f"type {name}: {change}" for change in in_type(kind, other.types[name])]
        for what, old, new in (
            ("function", self.functions, other.functions),
            ("schedule", self.schedules, other.schedules),
        ):
            found += changes(what, old, new)
            found += [f"{what} {name} changed" for name in old if name in new and old[name] != new[name]]
        return found


def fingerprint(app: App) -> Fingerprint:
    """The fingerprint of an app as it is now. Take it when the app starts: sources are read at that time."""
    records = {record: record.__qualname__ for record in app.records()}
    survey = Survey(app, records)
    return Fingerprint(
        app.name,
        {function.full_name: of_function(function, survey) for function in app.functions},
        {name: of_operator(operator, survey) for name, operator in app.operators.items()},
        {name: TypePrint(fields_of(record), digest_of(survey.methods(record))) for record, name in records.items()},
        {name: of_schedule(schedule) for name, schedule in app.schedules.items()},
    )


def needs_migration(old: Fingerprint, new: Fingerprint) -> list[str]:
    """The operators whose stored state the new code cannot use as it is: those that are gone, those whose state type,
    or a record inside it, has other fields, and those that got a migration, or another one. All other changes leave the
    state as it is."""
    return [name for name, operator in old.operators.items() if not takes_state(operator, name, old, new)]


def remade(old: Fingerprint, new: Fingerprint) -> list[str]:
    """The operators whose stored state is different when the new code starts: they are migrated, or their states get or
    lose a time to live."""
    turned = [
        name
        for name, operator in new.operators.items()
        if name in old.operators and bool(old.operators[name].ttl) != bool(operator.ttl)
    ]
    return [*needs_migration(old, new), *turned]


def takes_state(operator: OperatorPrint, name: str, old: Fingerprint, new: Fingerprint) -> bool:
    now = new.operators.get(name)
    if now is None or (now.migrate and now.migrate != operator.migrate):
        return False
    declared_now = MAY_HOLD_ALL not in now.holds
    if MAY_HOLD_ALL not in operator.holds and declared_now and operator.state != now.state:
        return False
    held = old.types if MAY_HOLD_ALL in operator.holds else operator.holds
    return all(same_fields(old.types.get(kind), new.types.get(kind)) for kind in held)


def same_fields(old: TypePrint | None, new: TypePrint | None) -> bool:
    return old is not None and new is not None and old.fields == new.fields


# --- differences as text ----------------------------------------------------------------------------------------------


def changes(what: str, old: Iterable[str], new: Iterable[str]) -> list[str]:
    gone = [f"{what} {name} is gone" for name in old if name not in new]
    return gone + [f"{what} {name} is new" for name in new if name not in old]


def in_operator(old: OperatorPrint, new: OperatorPrint) -> list[str]:
    found = []
    for part in ("state", "ttl"):
        before, after = getattr(old, part), getattr(new, part)
        if before != after:
            found.append(f"{part} is {after or 'not declared'}, it was {before or 'not declared'}")
    for part in ("combine", "partition_by", "migrate"):
        before, after = getattr(old, part), getattr(new, part)
        if before != after:
            found.append(f"{part} {'is gone' if not after else 'changed' if before else 'is new'}")
    return found


def in_type(old: TypePrint, new: TypePrint) -> list[str]:
    before, after = dict(old.fields), dict(new.fields)
    found = changes("field", before, after)
    for name, kind in before.items():
        if name in after and after[name] != kind:
            found.append(f"field {name} is {after[name]}, it was {kind}")
    if not found and old.fields != new.fields:
        found.append("its fields are in another order")
    if old.code != new.code:
        found.append("its code changed")
    return found


# --- the parts --------------------------------------------------------------------------------------------------------


def of_function(function: Function, survey: Survey) -> str:
    hints = [[name, type_text(hint)] for name, hint in hints_of(function).items()]
    return digest_of([survey.function(function), hints])


def of_schedule(schedule: Schedule) -> str:
    called = [stable_repr(value) for value in (schedule.of, *schedule.args)]
    return f"{schedule.when.text}: {schedule.function}({', '.join(called)})"


def of_operator(operator: Operator, survey: Survey) -> OperatorPrint:
    held: dict[type, None] = {}
    collect(operator.state, held)
    return OperatorPrint(
        state="" if operator.state is None else type_text(operator.state),
        holds=[MAY_HOLD_ALL] if operator.state is None else sorted(record.__qualname__ for record in held),
        combine=of_hook(operator.combine, survey),
        partition_by=of_hook(operator.partition_by, survey),
        ttl="" if operator.ttl_us is None else f"{operator.ttl_us} us",
        migrate=of_hook(operator.migrate, survey),
    )


def of_hook(function: Any, survey: Survey) -> str:
    return "" if function is None else digest_of(survey.value(function))


def fields_of(record: type) -> list[tuple[str, str]]:
    hints = typing.get_type_hints(record, include_extras=True)
    if issubclass(record, msgspec.Struct):
        names = record.__struct_fields__
    else:
        names = tuple(field.name for field in dataclasses.fields(cast(Any, record)))
    return [(name, type_text(hints.get(name, Any))) for name in names]


def type_text(hint: Any) -> str:
    """A type as text, the same however it was written."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin is typing.Annotated:
        return f"{type_text(parts[0])} with {', '.join(map(stable_repr, hint.__metadata__))}"
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is not None and (origin is typing.Union or getattr(origin, "__name__", "") == "UnionType"):
        return " | ".join(sorted(map(type_text, parts)))
    if origin is not None and parts:
        inside = ", ".join("..." if part is Ellipsis else type_text(part) for part in parts)
        return f"{type_text(origin)}[{inside}]"
    return str(hint.__qualname__) if isinstance(hint, type) else stable_repr(hint)


def stable_repr(value: Any) -> str:
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
