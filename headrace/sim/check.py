"""What must hold after a run: the invariants of the history as a whole.

The others (answers that differ, terms out of order, an answer without a request) are checked during the run.
"""

from __future__ import annotations

from collections import Counter
from itertools import repeat
from typing import Any, NamedTuple

from headrace.core.admission import Admission
from headrace.core.later.builtin import BUILT_IN
from headrace.core.origin import FromClient
from headrace.core.program import Program
from headrace.sim.history import History, HistoryRow, StateRead
from headrace.sim.oracle import Entity, Oracle
from headrace.sim.promises import Logbook, LogRow
from headrace.sim.timer_check import NEVER_US, TimerCheck
from headrace.sim.workload import Spin, Workload
from headrace.wire.messages import Failure, Response
from headrace.wire.native_form import is_native
from headrace.wire.renewal import renew, same_renewed
from headrace.wire.values import WRAP_BYTES, Values, is_wrapped, written_us

State = dict[Entity, Any]
Tables = dict[str, dict[Any, Any]]


class ReferenceState(NamedTuple):
    """The reference's state after a transaction."""

    state: State
    written: dict[Entity, int]  # when states that expire were written
    time_us: int  # of the log

    def encoded(self, values: Values) -> dict[Entity, bytes]:
        return {entity: stamped(values.encode(value), self.written.get(entity)) for entity, value in self.state.items()}


class Reference:
    """The log in order: what a loop over it has to run, and everything that decides the results."""

    def __init__(self) -> None:
        self.rows: list[HistoryRow] = []
        self.limits: list[dict[str, int]] = []
        self.times_us: list[int] = []
        self.decrees: dict[int, Failure] | None = None  # None: it is not known which were aborted by decree
        self.responses: dict[str, Response] = {}
        self.wrong: list[str] = []
        self.moments = [ReferenceState({}, {}, 0)]  # after each transaction, once the oracle has run it
        self.probes: Counter[str] = Counter()  # what the oracle has seen

    def add(self, row: HistoryRow, limits: dict[str, int], time_us: int) -> None:
        self.rows.append(row)
        self.limits.append(limits)
        self.times_us.append(time_us)

    @classmethod
    def of_history(cls, history: History) -> Reference:
        """Without a log: the answers, by TID."""
        log = cls()
        for row in history.in_order():
            log.add(row, {}, 0)
        return log

    @classmethod
    def of_log(cls, history: History, book: Logbook, program: Program) -> Reference:
        """The durable log must hold each request that ran, once; and every answer must come from it."""
        log, admission = cls(), Admission(program)
        log.decrees, log.responses = book.decrees, book.responses
        seen: dict[str, int] = {}
        for each in book.rows:
            if each.is_own:
                log.add(own_row(each, program), each.limits, each.epoch.closed_us)
                continue
            row = history.rows.get(each.request_id)
            if each.request_id in seen:
                log.wrong.append(f"{each.request_id} is in the log as TID {seen[each.request_id]} and {each.tid}")
            elif row is None:
                log.wrong.append(f"TID {each.tid} in the log is {each.request_id!r}, which no client sent")
            elif (row.tid, row.epoch) != (each.tid, each.epoch.number):
                place = f"TID {row.tid} of epoch {row.epoch}, in the log it is {each.tid} of {each.epoch.number}"
                log.wrong.append(f"{each.request_id} was {row.status} as {place}")
            else:
                log.wrong += check_call(each, row, admission)
                log.add(row, each.limits, each.epoch.closed_us)
            seen[each.request_id] = each.tid
        lost = [row.request_id for row in history.rows.values() if row.tid is not None and row.request_id not in seen]
        if lost:
            log.wrong.append(f"acknowledged, but not in the log: {lost}")
        return log

    def respond(self, unseal: Any) -> Any:
        """Returns a function that gives the logged responses of the outside world."""

        def respond(call: str, name: str, args: tuple[Any, ...]) -> tuple[Any, str | None]:
            response = self.responses.get(call)
            if response is None:
                self.wrong.append(f"the log has no response to external call {call} of {name}")
                return None, "there is no response"
            return unseal(response.result), response.failure

        return respond


def own_row(logged: LogRow, program: Program) -> HistoryRow:
    """A row that Headrace made itself: only the state shows its result."""
    epoch, at = logged.epoch, logged.row
    entry, args = epoch.entries[at], epoch.args[at]
    if entry is entry.sealed:
        args = tuple(program.values.decode(args[0]))
    row = HistoryRow(logged.request_id, (entry.function, epoch.keys[at], *map(program.values.unseal, args)), 0, False)
    row.tid, row.epoch, row.answered = logged.tid, epoch.number, 1 << 62
    return row


def check_call(logged: LogRow, row: HistoryRow, admission: Admission) -> list[str]:
    """The log must hold the call that was requested."""
    epoch, at = logged.epoch, logged.row
    batch = admission.admit(FromClient([row.request_id]), [row.call])
    asked = (batch.entries[0], batch.keys[0], batch.args[0])
    found = (epoch.entries[at], epoch.keys[at], epoch.args[at])
    is_same = asked[0] is found[0] and repr(asked[1]) == repr(found[1]) and len(asked[2]) == len(found[2])
    if is_same and all(map(same_renewed, found[2], asked[2], repeat(admission.program.values))):
        return []
    return [f"{row.request_id} asked for {asked[0].name}{asked[1:]!r}, the log has {found[0].name}{found[1:]!r}"]


def check_history(
    history: History, reference: Reference, workload: Workload, oracle: Oracle, snapshots: dict[int, Tables]
) -> list[str]:
    """Everything that is wrong with a run whose requests were all answered."""
    log, values = reference.rows, oracle.values
    assert values is not None
    wrong = check_gate(history)
    wrong += check_log(log)
    wrong += check_real_time(log)
    if wrong or reference.wrong:
        return wrong
    workload.hooks.watch(None)
    workload.hooks.has_dawdled = False  # this transaction or an earlier one, whose decree may have come later
    moments, later = reference.moments, TimerCheck(workload.app.schedules.values(), history.kept)
    oracle.respond = reference.respond(values.unseal)
    for row, limits, oracle.now_us in zip(log, reference.limits, reference.times_us, strict=True):
        oracle.calls_max = limits.get("calls_max", oracle.calls_max)
        oracle.depth_max = limits.get("depth_max", oracle.depth_max)
        before, written = dict(oracle.state), dict(oracle.written)
        expected = oracle.transact(*row.call)
        if reference.decrees is None and workload.hooks.has_dawdled and row.failure and row.failure.code == "poisoned":
            expected = ("aborted", *failure_of(row.failure))
            oracle.state = before
        decreed = None if reference.decrees is None else reference.decrees.get(row.tid or 0)
        if decreed is not None:  # it aborts, whatever the function would have done
            oracle.state, oracle.written = before, written
            expected = ("aborted", *failure_of(decreed))
        elif expected[1] == Spin.__name__ and reference.decrees is not None:
            wrong.append(f"TID {row.tid} does not return, and the log has no decree about it")
        if row.answered < 1 << 62:
            wrong += check_row(row, expected, values)
        later.hear(row, oracle.now_us, before, oracle.state, expected[0] != "ok")
        wrong += workload.check_state(oracle, row.tid or 0)
        moments.append(ReferenceState(oracle.state, dict(oracle.written), oracle.now_us))
        oracle.state = dict(oracle.state)
    wrong += reference.wrong
    wrong += later.end(moments[-1].state, moments[-1].time_us if workload.is_timeless else NEVER_US - 1)
    reference.probes = later.probes
    lives_us = {name: operator.ttl_us for name, operator in workload.app.operators.items() if operator.ttl_us}
    for state_read in history.reads:
        wrong += check_state_read(state_read, log, moments, lives_us, values)
    for epoch, tables in snapshots.items():
        end = max((at for at, row in enumerate(log, start=1) if (row.epoch or 0) <= epoch), default=0)
        wrong += check_snapshot(epoch, tables, moments[end], values)
    return wrong + workload.check(log)


def check_snapshot(epoch: int, tables: Tables, moment: ReferenceState, values: Values) -> list[str]:
    """A snapshot must hold the state at the end of its epoch."""
    found = {(name, key): canonical(sealed, values) for name, table in tables.items() for key, sealed in table.items()}
    expected = moment.encoded(values)
    if found == expected:
        return []
    differing = sorted((e for e in {*found, *expected} if found.get(e) != expected.get(e)), key=repr)
    texts = [f"{e}: {found.get(e)!r}, not {expected.get(e)!r}" for e in differing[:4]]
    return [f"the snapshot of epoch {epoch} is not the state at its end: {'; '.join(texts)}"]


def check_rest(coordinator: Any, workers: dict[int, Any]) -> list[str]:
    """When nothing happens any more, nothing may be left over: all queues are empty, and every entity is on its
    worker."""
    engine = coordinator.engine
    wrong = [
        f"the coordinator has left over {name}: {left!r}"
        for name in ("flights", "backlog", "gathering", "telling")
        if (left := getattr(coordinator, name))
    ]
    if engine.waiting:
        wrong.append(f"the engine has left over submissions: {engine.waiting!r}")
    if len(engine.sequencing.open):
        wrong.append(f"{len(engine.sequencing.open)} transactions were never run")
    if any(table.written for table in engine.state.tables.values()):
        wrong.append("the coordinator's copy of the state records writes that nobody takes")
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
        for name, table in worker.state.tables.items():
            operator = worker.program.app.operators.get(name, BUILT_IN)
            strays = [key for key, _ in table.items() if coordinator.shards.owner(operator, key) != number]
            if strays:
                wrong.append(f"worker {number} holds {name} {strays!r}, which belong to others")
    return wrong


def check_gate(history: History) -> list[str]:
    """Exactly the bad requests must have been refused."""
    return [
        f"{row.request_id} {row.call!r} was {row.status}: {row.failure}"
        for row in history.rows.values()
        if row.status == "unanswered" or (row.status == "refused") != row.is_bad
    ]


def check_log(log: list[HistoryRow]) -> list[str]:
    """Every request must be logged once, nothing else, and epochs must be in order."""
    tids = [row.tid for row in log]
    if tids != list(range(1, len(log) + 1)):
        return [f"the TIDs that were answered are not 1 to {len(log)}: {tids}"]
    epochs = [row.epoch or 0 for row in log]
    if epochs != sorted(epochs):
        return [f"epochs out of order: {epochs}"]
    return []


def check_real_time(log: list[HistoryRow]) -> list[str]:
    """A request that was answered before another one was sent must come before it in the log."""
    first_answer, wrong = 1 << 62, []
    for row in reversed(log):
        if first_answer < row.sent:
            wrong.append(f"TID {row.tid} was sent at {row.sent}, after one with a larger TID had its answer")
        first_answer = min(first_answer, row.answered)
    return wrong


def check_row(row: HistoryRow, expected: tuple[Any, ...], values: Values) -> list[str]:
    """The reply must be the oracle's."""
    failure = row.failure
    if expected[0] == "ok":
        if failure is None and values.encode(row.result) == values.encode(expected[1]):
            return []
    elif failure is not None and expected[1] == Spin.__name__:
        if failure.code == "poisoned":
            return []
    elif failure is not None and failure_of(failure) == expected[1:]:
        return []
    found = ("ok", row.result) if failure is None else ("aborted", *failure_of(failure))
    return [f"TID {row.tid} {row.call!r} was answered {found!r}, the oracle says {expected!r}"]


def failure_of(failure: Failure) -> tuple[Any, ...]:
    return failure.type, failure.message, failure.function, failure.key


def check_state_read(
    state_read: StateRead,
    log: list[HistoryRow],
    moments: list[ReferenceState],
    lives_us: dict[str, int],
    values: Values,
) -> list[str]:
    """A read must return the oracle's state at the end of an epoch: not before what was answered when it was sent, not
    after what was sent when it returned. Expired states must not be found, though they may not be deleted yet."""
    what = f"state of {state_read.operator or 'everything'}{'' if state_read.key is None else f', {state_read.key!r}'}"
    if not state_read.found:
        return [f"the {what}, asked at {state_read.asked}, was never found"]
    found = {}
    for operator, key, state in state_read.entities:
        if (operator, key) in found:
            return [f"the {what} has {operator} {key!r} twice"]
        found[operator, key] = canonical(state, values)
    least = max((row.tid or 0 for row in log if row.answered < state_read.asked), default=0)
    ends = [0] + [at for at, row in enumerate(log, start=1) if at == len(log) or log[at].epoch != row.epoch]
    possible = []
    for end in ends:
        if end >= least and all(row.sent < state_read.found for row in log[:end]):
            moment = moments[end]
            state = selected(moment.state, state_read)
            if is_found(found, moment._replace(state=state), moments[-1].time_us, lives_us, values):
                return []
            possible.append((end, state))
    seen = {(operator, key): values.unseal(state) for operator, key, state in state_read.entities}
    return [f"the {what} that was read is not that of any epoch's end: {differences(seen, possible)}"]


def is_found(
    found: dict[Entity, bytes], moment: ReferenceState, last_us: int, lives_us: dict[str, int], values: Values
) -> bool:
    """Whether the state matches. The log's time may be later than that of the last epoch that has run."""
    expected = moment.encoded(values)
    for entity in list(expected):
        if entity[0] in lives_us:
            ends_us = moment.written[entity] + lives_us[entity[0]]
            if ends_us <= moment.time_us or (ends_us <= last_us and entity not in found):
                del expected[entity]
    return found == expected


def canonical(sealed: Any, values: Values) -> bytes:
    """The state as the newest version of the app encodes it, in the form that does not depend on its declared type."""
    sealed = renew(sealed, values)
    time_us = written_us(sealed) if is_wrapped(sealed) else None
    inner = sealed if time_us is None else bytes(sealed[WRAP_BYTES:])
    if type(inner) is not bytes or is_native(inner):
        inner = values.encode(values.unseal(inner))
    return stamped(inner, time_us)


def stamped(encoded: bytes, time_us: int | None) -> bytes:
    """Adds the time at which it was written, if there is one."""
    return encoded if time_us is None else b"%d " % time_us + encoded


def selected(state: State, state_read: StateRead) -> State:
    return {
        (operator, key): value
        for (operator, key), value in state.items()
        if (state_read.operator is None or operator == state_read.operator)
        and (state_read.key is None or same(key, state_read.key))
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
    return " | ".join(texts) or "it holds something that no client had sent"
