"""What must hold when a run is over: the invariants that look at the history as a whole.

The others (answers that differ, terms out of order, an answer nobody asked for) are watched while it runs.
"""

from __future__ import annotations

from typing import Any

from headrace.sim.history import History, Look, Row
from headrace.sim.oracle import Entity, Oracle
from headrace.sim.workload import Spin, Workload
from headrace.wire.values import Values

State = dict[Entity, Any]


def check_history(history: History, workload: Workload, oracle: Oracle, values: Values) -> list[str]:
    """All that is wrong with a run whose requests have all been answered."""
    wrong = check_gate(history)
    log = history.in_order()
    wrong += check_log(log)
    wrong += check_real_time(log)
    if wrong:
        return wrong
    workload.hooks.watch(None)
    states: list[State] = [{}]
    for row in log:
        wrong += check_row(row, oracle.transact(*row.call), values)
        states.append(oracle.state if row.failure is None else states[-1])
        oracle.state = dict(oracle.state)
    for look in history.looks:
        wrong += check_look(look, log, states, values)
    return wrong + workload.check(log)


def check_rest(coordinator: Any, workers: dict[int, Any], log: list[Row]) -> list[str]:
    """When nothing happens any more, nothing is left over: no queue holds anything, and every entity is where it
    belongs."""
    wrong = [
        f"the coordinator has left over {name}: {left!r}"
        for name in ("flights", "backlog", "gathering", "waiting")
        if (left := getattr(coordinator, name))
    ]
    if len(coordinator.sequencing.open):
        wrong.append(f"{len(coordinator.sequencing.open)} transactions were never run")
    aborts = sum(row.failure is not None for row in log)
    if (coordinator.committed, coordinator.aborted) != (len(log) - aborts, aborts):
        wrong.append(f"counted {coordinator.committed} and {coordinator.aborted} aborts of {len(log)} and {aborts}")
    for number, node in {0: coordinator, **workers}.items():
        for peer, channel in node.channels.peers.items():
            if channel.unacknowledged or channel.early:
                left = f"{len(channel.unacknowledged)} frames for {peer} and {len(channel.early)} from it"
                wrong.append(f"node {number} has {left} left over")
    if sorted(workers) != list(range(1, coordinator.workers + 1)):
        wrong.append(f"the workers are {sorted(workers)}, not 1 to {coordinator.workers}")
    for number, worker in workers.items():
        ordered = worker.ordered
        chains = [key for of_operator in ordered.chains.values() for key in of_operator]
        for name, left in (
            ("epochs", worker.progress),
            ("early messages", worker.early),
            ("parts", ordered.parts),
            ("calls to repair", ordered.heap),
            ("aborted", ordered.aborted),
            ("chains", chains),
        ):
            if left:
                wrong.append(f"worker {number} has left over {name}: {left!r}")
        for name, table in worker.program.tables.items():
            operator = worker.program.app.operators[name]
            strays = [key for key in table if coordinator.shards.owner(operator, key) != number]
            if strays:
                wrong.append(f"worker {number} holds {name} {strays!r}, which belong to others")
    return wrong


def check_gate(history: History) -> list[str]:
    """Who should have been refused was, and nobody else."""
    return [
        f"{row.request_id} {row.call!r} was {row.status}: {row.failure}"
        for row in history.rows.values()
        if row.status == "unanswered" or (row.status == "refused") != row.is_bad
    ]


def check_log(log: list[Row]) -> list[str]:
    """Every request is logged once, nothing else is, and epochs hold them in order."""
    tids = [row.tid for row in log]
    if tids != list(range(1, len(log) + 1)):
        return [f"the TIDs that were answered are not 1 to {len(log)}: {tids}"]
    epochs = [row.epoch or 0 for row in log]
    if epochs != sorted(epochs):
        return [f"epochs out of order: {epochs}"]
    return []


def check_real_time(log: list[Row]) -> list[str]:
    """Who was answered before another one was sent comes before it in the log."""
    first_answer, wrong = 1 << 62, []
    for row in reversed(log):
        if first_answer < row.sent:
            wrong.append(f"TID {row.tid} was sent at {row.sent}, after one with a larger TID had its answer")
        first_answer = min(first_answer, row.answered)
    return wrong


def check_row(row: Row, expected: tuple[Any, ...], values: Values) -> list[str]:
    """The reply is the oracle's."""
    failure = row.failure
    if expected[0] == "ok":
        if failure is None and values.encode(row.result) == values.encode(expected[1]):
            return []
    elif failure is not None and expected[1] == Spin.__name__:
        if failure.code == "poisoned":
            return []
    elif failure is not None and (failure.type, failure.message, failure.function, failure.key) == expected[1:]:
        return []
    found = ("ok", row.result) if failure is None else ("aborted", *failure_of(row))
    return [f"TID {row.tid} {row.call!r} was answered {found!r}, the oracle says {expected!r}"]


def failure_of(row: Row) -> tuple[Any, ...]:
    failure = row.failure
    return () if failure is None else (failure.type, failure.message, failure.function, failure.key)


def check_look(look: Look, log: list[Row], states: list[State], values: Values) -> list[str]:
    """What was found is the oracle's state at the end of an epoch: not before what had been answered when it was asked,
    not after what was sent when it was found."""
    what = f"state of {look.operator or 'everything'}{'' if look.key is None else f', {look.key!r}'}"
    if not look.found:
        return [f"the {what}, asked at {look.asked}, was never found"]
    found = {}
    for operator, key, state in look.entities:
        if (operator, key) in found:
            return [f"the {what} has {operator} {key!r} twice"]
        found[operator, key] = canonical(state, values)
    least = max((row.tid or 0 for row in log if row.answered < look.asked), default=0)
    ends = [0] + [at for at, row in enumerate(log, start=1) if at == len(log) or log[at].epoch != row.epoch]
    possible = []
    for end in ends:
        if end >= least and all(row.sent < look.found for row in log[:end]):
            state = selected(states[end], look)
            if {entity: values.encode(value) for entity, value in state.items()} == found:
                return []
            possible.append((end, state))
    seen = {(operator, key): values.unseal(state) for operator, key, state in look.entities}
    return [f"the {what} is at no end of an epoch what was found: {differences(seen, possible)}"]


def canonical(sealed: Any, values: Values) -> bytes:
    return sealed if type(sealed) is bytes else values.encode(sealed)


def selected(state: State, look: Look) -> State:
    return {
        (operator, key): value
        for (operator, key), value in state.items()
        if (look.operator is None or operator == look.operator) and (look.key is None or same(key, look.key))
    }


def same(key: Any, other: Any) -> bool:
    return type(key) is type(other) and bool(key == other)


def differences(seen: State, possible: list[tuple[int, State]]) -> str:
    texts = []
    for end, state in possible[-2:]:
        keys = sorted({*seen, *state}, key=repr)
        rows = [
            f"{key}: {seen.get(key, 'nothing')!r}, not {state.get(key, 'nothing')!r}"
            for key in keys
            if repr(seen.get(key, "nothing")) != repr(state.get(key, "nothing"))
        ]
        texts.append(f"at TID {end}: {'; '.join(rows)}")
    return " | ".join(texts) or "it holds what nobody had sent"
