"""Added fields: record types that have got fields with defaults since other code of the app wrote a store.

Rules:
1. What was stored without such a field has its default. State gets it when it is loaded, so that it is there for good:
   if a later version has another default, the state stays as it is.
2. A row that was logged before a field existed has not set it, whatever it holds under that name.
3. A default is the same each time. If one is not, or is no value of the field's type, nothing starts.

Never here: which differences are allowed (model/fingerprint.py), migrations.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headrace.core.signature import conforms
from headrace.core.state import States
from headrace.errors import AppChanged
from headrace.model.app import is_record
from headrace.model.fingerprint import MAY_HOLD_ALL, Fingerprint, added_fields
from headrace.model.operator import RESERVED
from headrace.wire.defaults import defaults_of, described
from headrace.wire.hints import name_of
from headrace.wire.renewal import UNREADABLE, renew
from headrace.wire.values import Values, same, shown

AddedFields = Mapping[str, Collection[str]]  # by type


def fill(tables: dict[str, States], old: Fingerprint, new: Fingerprint, values: Values) -> dict[str, States]:
    """The states with the fields that their types have got since, at their defaults."""
    added = added_fields(old, new)
    if not added:
        return tables
    check_defaults(added, values)
    filled = dict(tables)
    for name in tables:
        if name == RESERVED or (name in new.operators and holds_any(old, name, added)):
            filled[name] = {key: renewed(name, key, state, values) for key, state in tables[name].items()}
    return filled


def holds_any(old: Fingerprint, operator: str, added: AddedFields) -> bool:
    holds = old.operators[operator].holds if operator in old.operators else [MAY_HOLD_ALL]
    return MAY_HOLD_ALL in holds or any(kind in added for kind in holds)


def renewed(operator: str, key: Any, state: Any, values: Values) -> Any:
    try:
        return renew(state, values)
    except UNREADABLE as error:
        raise AppChanged(
            f"the state of {shown(key)} in operator {operator!r} does not fit with the new fields: {error}. Add a "
            f"migration, as in app.operator({operator!r}, migrate=function)"
        ) from None


def check_defaults(added: AddedFields, values: Values) -> None:
    """Raises if a default could not stand in what is stored already."""
    for kind in values.records:
        for name in added.get(kind.__qualname__, ()):
            where, hint = f"{kind.__qualname__}.{name}", typing.get_type_hints(kind, include_extras=True)[name]
            try:
                make = defaults_of(kind)[name]
                one, other = make(), make()
                is_stable = same(values.seal(one), values.seal(other))
            except Exception as error:  # a factory is the user's
                raise AppChanged(f"the default of the new field {where} cannot be used: {error}") from error
            if not is_stable:
                raise AppChanged(
                    f"the default of the new field {where} is another one each time, so what is stored already would "
                    "never be the same: use a constant, or write a migration"
                )
            if is_known(hint) and not conforms(one, hint):
                raise AppChanged(
                    f"the default of the new field {where} is {shown(one)}, which is no {name_of(hint)}: change one "
                    "of the two"
                )


def is_known(hint: Any) -> bool:
    """Whether msgspec can check values of this type; a field may have any."""
    try:
        msgspec.convert(None, hint)
    except msgspec.ValidationError:
        return True
    except TypeError:
        return False
    return True


def reset(value: Any, added: AddedFields) -> None:
    """Set these fields to their defaults, wherever they are in a value that nobody else holds."""
    if isinstance(value, dict):
        for part in value.values():
            reset(part, added)
    elif isinstance(value, list | tuple):
        for part in value:
            reset(part, added)
    elif is_record(type(value)):
        names = [name for name, _, _ in described(type(value))]
        fresh = [name for name in names if name in added.get(type(value).__qualname__, ())]
        defaults = defaults_of(type(value)) if fresh else {}
        for name in names:
            if name in fresh:
                set_field(value, name, defaults[name]())
            else:
                reset(getattr(value, name, None), added)


def set_field(record: Any, name: str, value: Any) -> None:
    if dataclasses.is_dataclass(record):
        object.__setattr__(record, name, value)
    else:
        msgspec.structs.force_setattr(record, name, value)
