"""Migration: converts state that other code has written for the current code."""

from __future__ import annotations

from typing import Any

from headrace.config import Config
from headrace.core.program import values_of
from headrace.core.state import States
from headrace.errors import AppChanged
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint, needs_migration
from headrace.model.operator import RESERVED
from headrace.wire.native_form import lifted, native_parts
from headrace.wire.values import RECORD, Values, is_wrapped, shown, wrap, written_us


def migrate(tables: dict[str, States], old: Fingerprint, new: Fingerprint, app: App, now_us: int) -> dict[str, States]:
    """The state for changed code, at the log's time: the states of each operator whose type changed go through its
    `migrate`; if an operator gets a time to live, it starts now."""
    needed = [name for name in needs_migration(old, new) if tables.get(name)]
    values = LooseValues()
    todays = values_of(app, Config())
    seal = todays.seal
    migrated = dict(tables)
    for name in needed:
        hook = app.operators[name].migrate if name in app.operators else None
        if hook is None:
            differences = "; ".join(old.differences(new)[:5])
            raise AppChanged(
                f"{len(tables[name])} entities of operator {name!r} were written by other code ({differences}). Add a "
                f"migration, as in app.operator({name!r}, migrate=function), where function(key, old) returns the new "
                "state, or None to remove the entity; records arrive as dicts of their fields"
            )
        table = migrated[name] = {}
        for key, state in tables[name].items():
            try:
                made = hook(key, values.unseal(state))
                if made is not None:
                    table[key] = wrap(seal(made), written_us(state)) if is_wrapped(state) else seal(made)
            except Exception as error:
                raise AppChanged(f"the migration of operator {name!r} fails for {shown(key)}: {error!r}") from error
    for name, operator in app.operators.items():
        for key, state in migrated.get(name, {}).items():
            if operator.ttl_us is not None and not is_wrapped(state):
                migrated[name][key] = wrap(state, now_us)
            elif operator.ttl_us is None and is_wrapped(state):
                migrated[name][key] = seal(todays.unseal(state))
    return {name: table for name, table in migrated.items() if name in app.operators or name == RESERVED}


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
