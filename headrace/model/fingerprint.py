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
from typing import Any, NamedTuple, cast

import msgspec

from headrace.model.app import App, Schedule, collect, hints_of, is_record
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


class TypePrint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record type: its fields with their types, in order, a digest of its code, and digests of the defaults that its
    fields have. A default counts: it decides what a function makes that does not name the field, and what a stored
    record holds that lacks it. (An older fingerprint has the defaults in `code`: then they count as changed.)"""

    fields: list[tuple[str, str]]
    code: str
    defaults: dict[str, str] = {}


class VersionDifference(NamedTuple):
    """One difference between two versions of an app."""

    text: str
    is_addition: bool = False  # it leaves everything as it is that the older version could do


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
        return [each.text for each in self.compare(other)]

    def obstacles(self, other: Fingerprint) -> list[str]:
        """The differences for which the other, later code must not replay what this code has logged. All but these: a
        new function, operator, schedule or type, and a new field with a default, after the fields that were there."""
        return [each.text for each in self.compare(other) if not each.is_addition]

    def compare(self, other: Fingerprint) -> list[VersionDifference]:
        """What is different in the other, later one."""
        found = [] if self.app == other.app else [VersionDifference(f"the app is {other.app}, it was {self.app}")]
        found += changes("operator", self.operators, other.operators)
        for name, operator in self.operators.items():
            if name in other.operators:
                texts = in_operator(operator, other.operators[name])
                found += [VersionDifference(f"operator {name}: {text}") for text in texts]
        found += changes("type", self.types, other.types)
        for name, kind in self.types.items():
            if name in other.types:
                inside = in_type(kind, other.types[name])
                found += [each._replace(text=f"type {name}: {each.text}") for each in inside]
        for what, old, new in (
            ("function", self.functions, other.functions),
            ("schedule", self.schedules, other.schedules),
        ):
            found += changes(what, old, new)
            changed = [name for name in old if name in new and old[name] != new[name]]
            found += [VersionDifference(f"{what} {name} changed") for name in changed]
        return found


def fingerprint(app: App) -> Fingerprint:
    """The fingerprint of an app as it is now. Take it when the app starts: sources are read at that time."""
    records = {record: record.__qualname__ for record in app.records()}
    survey = Survey(app, records)
    return Fingerprint(
        app.name,
        {function.full_name: of_function(function, survey) for function in app.functions},
        {name: of_operator(operator, survey) for name, operator in app.operators.items()},
        {name: of_type(record, survey) for record, name in records.items()},
        {name: of_schedule(schedule) for name, schedule in app.schedules.items()},
    )


def needs_migration(old: Fingerprint, new: Fingerprint) -> list[str]:
    """The operators whose stored state the new code cannot use: those that are gone, those whose state type, or a
    record inside it, has other fields (except for new ones with a default), and those that got a migration, or another
    one. All other changes leave the state as it is."""
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
    return all(takes_fields(old.types.get(kind), new.types.get(kind)) for kind in held)


def takes_fields(old: TypePrint | None, new: TypePrint | None) -> bool:
    """Whether the new type has all fields of the old one as they were, and a default for each other field."""
    if old is None or new is None:
        return False
    known = dict(old.fields)
    kept = [(name, kind) for name, kind in new.fields if name in known]
    return kept == old.fields and all(name in known or name in new.defaults for name, _ in new.fields)


def added_fields(old: Fingerprint, new: Fingerprint) -> dict[str, list[str]]:
    """The types with new fields that have a default, and these fields."""
    found = {}
    for name, kind in new.types.items():
        before = old.types.get(name)
        known = kind.fields if before is None else before.fields
        names = [each for each, _ in kind.fields if each not in dict(known) and each in kind.defaults]
        if names:
            found[name] = names
    return found


# --- differences as text ----------------------------------------------------------------------------------------------


def changes(what: str, old: Iterable[str], new: Iterable[str]) -> list[VersionDifference]:
    gone = [VersionDifference(f"{what} {name} is gone") for name in old if name not in new]
    return gone + [VersionDifference(f"{what} {name} is new", True) for name in new if name not in old]


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


def in_type(old: TypePrint, new: TypePrint) -> list[VersionDifference]:
    before, after = dict(old.fields), dict(new.fields)
    found = [VersionDifference(f"field {name} is gone") for name in before if name not in after]
    for at, name in enumerate(after):
        if name not in before:
            found.append(new_field(name, name in new.defaults, at >= len(before)))
    for name, kind in before.items():
        if name in after and after[name] != kind:
            found.append(VersionDifference(f"field {name} is {after[name]}, it was {kind}"))
        elif name in after and old.defaults.get(name) != new.defaults.get(name):
            found.append(VersionDifference(f"field {name}: its default changed"))
    if [name for name in before if name in after] != [name for name in after if name in before]:
        found.append(VersionDifference("its fields are in another order"))
    if old.code != new.code:
        found.append(VersionDifference("its code changed"))
    return found


def new_field(name: str, has_default: bool, is_last: bool) -> VersionDifference:
    if not has_default:
        return VersionDifference(f"field {name} is new and has no default")
    if not is_last:  # R(1, 2) means something else now
        return VersionDifference(f"field {name} is new, and not after the fields that were there")
    return VersionDifference(f"field {name} is new", True)


# --- the parts --------------------------------------------------------------------------------------------------------


def of_function(function: Function, survey: Survey) -> str:
    hints = [[name, type_text(hint)] for name, hint in hints_of(function).items()]
    return digest_of([survey.function(function), hints])


def of_type(record: type, survey: Survey) -> TypePrint:
    defaults = {
        name: digest_of(survey.default(record, name, given)) for name, (given, _) in defaults_in(record).items()
    }
    return TypePrint(fields_of(record), digest_of(survey.methods(record)), defaults)


def of_schedule(schedule: Schedule) -> str:
    called = [repr_of(value) for value in (schedule.of, *schedule.args)]
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


def defaults_in(record: type) -> dict[str, tuple[Any, bool]]:
    """The default of each field that has one, or its factory: then with True."""
    is_struct = issubclass(record, msgspec.Struct)
    fields: Any = msgspec.structs.fields(record) if is_struct else dataclasses.fields(cast(Any, record))
    found = {}
    for field in fields:
        for given, is_factory in ((field.default, False), (field.default_factory, True)):
            if given is not dataclasses.MISSING and given is not msgspec.NODEFAULT:
                found[field.name] = (given, is_factory)
    return found


def repr_of(value: Any) -> str:
    """A value as text. A record is shown without fields that are at their default, which its type's print covers: so a
    new field with a default changes nothing."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(repr_of, value))})"
    if not is_record(type(value)):
        return stable_repr(value)
    defaults = {name: repr_of(given() if made else given) for name, (given, made) in defaults_in(type(value)).items()}
    fields = [(name, repr_of(getattr(value, name, None))) for name, _ in fields_of(type(value))]
    shown = [f"{name}={text}" for name, text in fields if defaults.get(name) != text]
    return f"{type(value).__qualname__}({', '.join(shown)})"


def stable_repr(value: Any) -> str:
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
