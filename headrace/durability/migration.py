"""Migration: converts state that other code has written for the current code."""

from __future__ import annotations

from typing import Any

from headrace.core.program import state_codec
from headrace.core.state import States
from headrace.durability.added_fields import fill
from headrace.durability.conversion import checked
from headrace.errors import AppChanged, BadValue, TooLarge
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, needs_migration
from headrace.model.operator import RESERVED, Operator
from headrace.wire.native_form import lifted, native_parts
from headrace.wire.values import RECORD, Values, is_wrapped, shown, wrap, written_us


def migrate(
    tables: dict[str, States], old: Fingerprint, new: Fingerprint, app: App, now_us: int, values: Values
) -> dict[str, States]:
    """The state for changed code, at the log's time: the states of each operator whose type changed go through its
    `migrate`; fields that are new and have a default are filled in; if an operator gets a time to live, it starts
    now. `values` are the new code's."""
    needed = [name for name in needs_migration(old, new) if tables.get(name)]
    others = {name: table for name, table in tables.items() if name not in needed}
    migrated = fill(others, old, new, values)
    for name in needed:
        operator = app.operators.get(name)
        if operator is None or operator.migrate is None:
            raise refusal(name, len(tables[name]), old, new)
        migrated = migrated | {name: converted(operator, tables[name], values)}
    for name, operator in app.operators.items():
        for key, state in migrated.get(name, {}).items():
            if operator.ttl_us is not None and not is_wrapped(state):
                migrated[name][key] = wrap(state, now_us)
            elif operator.ttl_us is None and is_wrapped(state):
                migrated[name][key] = state_codec(operator, values).seal(values.unseal(state))
    return {name: table for name, table in migrated.items() if name in app.operators or name == RESERVED}


def refusal(name: str, count: int, old: Fingerprint, new: Fingerprint) -> AppChanged:
    differences = "; ".join((old.obstacles(new) or old.differences(new))[:5])
    return AppChanged(
        f"{count} entities of operator {name!r} were written by other code ({differences}). Add a migration, as in "
        f"app.operator({name!r}, migrate=function), where function(key, old) returns the new state, or None to remove "
        "the entity; records arrive as dicts of their fields"
    )


def converted(operator: Operator, table: States, values: Values) -> States:
    """The states that `migrate` makes of these."""
    assert operator.migrate is not None
    loose, made, seal = LooseValues(), {}, state_codec(operator, values).seal
    for key, state in table.items():
        try:
            new = operator.migrate(key, loose.unseal(state))
            if new is not None:
                sealed = seal(checked(new, operator.state))
                made[key] = wrap(sealed, written_us(state)) if is_wrapped(state) else sealed
        except (BadValue, TooLarge) as error:
            raise AppChanged(
                f"the migration of operator {operator.name!r} gives a wrong state for {shown(key)}: {error}"
            ) from error
        except Exception as error:
            raise AppChanged(
                f"the migration of operator {operator.name!r} fails for {shown(key)}: {error!r}"
            ) from error
    return made


class LooseValues(Values):
    """Decodes values without their types: a record becomes a dict of its fields."""

    def _from_ext(self, code: int, data: memoryview) -> Any:
        if code == RECORD:
            _, fields = self._decode(data)
            return fields
        return super()._from_ext(code, data)

    def _from_native(self, data: bytes) -> Any:
        _, lift, fields = native_parts(data)
        return lifted(lift, fields)
