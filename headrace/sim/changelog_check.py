"""What must hold for the changelog after a run: each record is what the reference says, and none is missing.

The reference knows the state after each transaction, so also at both ends of every epoch: the difference between them
must have been logged, no matter which worker ran the epoch, in which mode, and how often.
"""

from __future__ import annotations

from typing import Any

from headrace.durability.log.changelog import Changelog, EpochChanges, is_state
from headrace.durability.recovery import OpenedStore
from headrace.errors import StoreError
from headrace.sim.check import Reference, canonical
from headrace.sim.disk import Disk, SimStore
from headrace.sim.oracle import Entity
from headrace.wire.values import Values

Pair = tuple[bytes | None, bytes | None]


def check_changes(changes: dict[int, EpochChanges], log: Reference, values: Values) -> list[str]:
    """Checks all records that were ever written."""
    ends = {row.epoch or 0: at for at, row in enumerate(log.rows, start=1)}
    wrong: list[str] = []
    end = 0
    for epoch in range(1, max(ends, default=0) + 1):
        before, end = log.moments[end], ends.get(epoch, end)
        record = changes.get(epoch)
        if record is not None:
            states = before.encoded(values), log.moments[end].encoded(values)
            for operator, since in record.since.items():
                if since <= epoch:
                    wrong += check_record(record, operator, *states, values)
                    wrong += check_previous(changes.get(epoch - 1), record, operator)
    return wrong


def check_record(
    record: EpochChanges, operator: str, before: dict[Entity, bytes], after: dict[Entity, bytes], values: Values
) -> list[str]:
    expected: dict[Entity, Pair] = {
        entity: (before.get(entity), after.get(entity))
        for entity in {**before, **after}
        if entity[0] == operator and before.get(entity) != after.get(entity)
    }
    changed = record.of(operator)
    rows = [] if changed is None else list(zip(*changed, strict=True))
    found: dict[Entity, Pair] = {(operator, key): (sealed(one, values), sealed(two, values)) for key, one, two in rows}
    keys = [({int: 0, str: 1, bytes: 2}[type(key)], key) for key, _, _ in rows]
    where = f"the changes of {operator} in epoch {record.epoch}"
    if keys != sorted(keys) or len(found) != len(rows):
        return [f"{where} are not in order, or hold an entity twice: {[key for _, key in keys]}"]
    if found != expected:
        differing = sorted((e for e in {*found, *expected} if found.get(e) != expected.get(e)), key=repr)
        texts = [f"{e}: {found.get(e)!r}, not {expected.get(e)!r}" for e in differing[:4]]
        return [f"{where} differ from the reference: {'; '.join(texts)}"]
    return []


def sealed(state: Any, values: Values) -> bytes | None:
    return canonical(state, values) if is_state(state) else None


def check_previous(previous: EpochChanges | None, record: EpochChanges, operator: str) -> list[str]:
    """The changes that a record says are there must be there."""
    since = record.since[operator]
    if since == record.epoch or (previous is not None and previous.since.get(operator) == since):
        return []
    return [f"epoch {record.epoch} has the changes of {operator} since {since}, and those before it are missing"]


def check_changelog(
    disk: Disk, changes: dict[int, EpochChanges], opened_store: OpenedStore, log: Reference
) -> list[str]:
    """Checks the changelog on the disk: it must be what was written, and reach to the log's end."""
    try:
        with disk.without_faults():
            changelog = Changelog(SimStore(disk, "onlooker"))
            oldest, newest = changelog.bounds()
            left = list(changelog.read(oldest))
    except StoreError as error:
        return [f"the changelog cannot be read: {error!r}"]
    wrong = [
        f"the changelog's epoch {each.epoch} is not what was kept"
        for each in left
        if (kept := changes.get(each.epoch)) is not None  # else its writer died before it reported it
        and (each.header != kept.header or any(repr(each.of(name)) != repr(kept.of(name)) for name in each.operators))
    ]
    last = max((row.epoch or 0 for row in log.rows), default=0)
    if opened_store.changes is not None and newest != last:
        wrong.append(f"the changelog ends with epoch {newest}, the log with epoch {last}")
    return wrong
