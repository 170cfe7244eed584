"""Planted mistakes: each is one that a tired engineer could make in the core. The simulator must catch every one.

A mutant replaces one attribute of the production code while it is planted. A caught mutant proves that the checks work;
one that is not caught shows a hole in the checks, not in the core.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headrace.config import Config
from headrace.core import channel, contexts, coordinator, egress, engine, ledger, restore, worker
from headrace.core.admission import Admission
from headrace.core.events import Answer, Submit
from headrace.core.ordered import chains, exchange, executor, gathering, prediction, repair, stretch
from headrace.core.origin import FromClient
from headrace.durability import recovery
from headrace.durability.log import log, takeover
from headrace.durability.log import segments as log_chain
from headrace.durability.snapshots import snapshots
from headrace.model.app import App
from headrace.model.context import Context
from headrace.sim.cases import Judge, draw_case
from headrace.sim.fleet import Fleet
from headrace.sim.run import simulate
from headrace.wire.messages import Body, Frame, TransactionAborted, TransactionRevived

MODULES = (  # they import names from each other
    chains,
    coordinator,
    exchange,
    gathering,
    executor,
    prediction,
    repair,
    stretch,
    worker,
    restore,
    log_chain,
    log,
    recovery,
    snapshots,
    takeover,
)


class Mutant(NamedTuple):
    name: str
    where: Any
    attribute: str
    plant: Callable[[Any], Any]  # returns the wrong attribute for the right one
    hint: int = 0  # a seed that showed it: tried first
    look: Callable[[int], list[str]] | None = None  # the violations of a seed; by default those of a simulation
    besides: tuple[Any, ...] = ()  # other mutants that it needs


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    right = getattr(mutant.where, mutant.attribute)
    wrong = mutant.plant(right)
    places = [place for place in (mutant.where, *MODULES) if getattr(place, mutant.attribute, None) is right]
    with contextlib.ExitStack() as stack:
        for other in mutant.besides:
            stack.enter_context(planted(other))
        for place in places:
            stack.callback(setattr, place, mutant.attribute, right)
            setattr(place, mutant.attribute, wrong)
        yield


def look_of(mutant: Mutant) -> Callable[[int], list[str]]:
    return mutant.look or (lambda seed: simulate(seed).violations)


def caught_by(mutant: Mutant, seeds: range) -> int | None:
    """The first of these seeds that shows it. A mutant that fails itself, because the core has changed since, proves
    nothing: that is an error."""
    order: list[int] = [mutant.hint, *seeds]
    look = look_of(mutant)
    with planted(mutant):
        for seed in order:
            violations = look(seed)
            if any("mutants.py" in violation for violation in violations):
                raise AssertionError(f"{mutant.name}: the mutant itself broke: {violations[0]}")
            if violations:
                return seed
    return None


# --- channels ---------------------------------------------------------------------------------------------------------


def takes_duplicates(right: Any) -> Any:
    def receive(self: channel.Channels, now_us: int, frame: Frame) -> list[Body]:
        bodies: list[Body] = right(self, now_us, frame)
        is_ours = frame.term == self.term and frame.to == self.me
        if not bodies and is_ours and frame.body is not None and frame.sequence <= self.peer(frame.source).received:
            return [frame.body]
        return bodies

    return receive


def takes_gaps(right: Any) -> Any:
    def receive(self: channel.Channels, now_us: int, frame: Frame) -> list[Body]:
        if frame.term == self.term and frame.to == self.me and frame.body is not None:
            peer = self.peer(frame.source)
            peer.received = max(peer.received, frame.sequence - 1)
        bodies: list[Body] = right(self, now_us, frame)
        return bodies

    return receive


def takes_old_terms(right: Any) -> Any:
    def receive(self: channel.Channels, now_us: int, frame: Frame) -> list[Body]:
        if frame.term < self.term:
            frame = Frame(self.term, frame.source, frame.to, frame.sequence, 0, frame.body)
        bodies: list[Body] = right(self, now_us, frame)
        return bodies

    return receive


def never_resends(right: Any) -> Any:
    def upkeep(self: channel.Channels, now_us: int) -> list[Any]:
        return [send for send in right(self, now_us) if send.frame.body is None]

    return upkeep


# --- request ids ------------------------------------------------------------------------------------------------------


def knows_no_ids(right: Any) -> Any:
    return lambda self, ids, first, count: True


def any_call_will_do(right: Any) -> Any:
    return lambda self, epoch, at, row: True


# --- coordinator ------------------------------------------------------------------------------------------------------


def settles_unheard(right: Any) -> Any:
    def has_settled(self: Any, flight: Any) -> bool:
        if flight.is_lone:
            return bool(right(self, flight))
        return bool(len(flight.idle) >= self.workers)

    return has_settled


def settles_without_shares(right: Any) -> Any:
    def has_settled(self: Any, flight: Any) -> bool:
        return bool(flight.shares) if flight.is_lone else bool(right(self, flight))

    return has_settled


def keeps_the_term(right: Any) -> Any:
    def begin(self: channel.Channels, term: int) -> None:
        right(self, term if self.me or term == 1 else self.term)

    return begin


def forgets_the_log(right: Any) -> Any:
    def recover(self: Any, now_us: int, worker: int, effects: list[Any]) -> None:
        self.log = [epoch for epoch in self.log if epoch.phase != "final"]
        right(self, now_us, worker, effects)

    return recover


def copies_too_early(right: Any) -> Any:
    def copied(self: Any, entities: Any) -> None:
        right(self, entities[1:])

    return copied


def aliases_the_copy(right: Any) -> Any:
    def copied(self: Any, entities: Any) -> None:
        log = list(self.log)
        right(self, entities)
        self.log = log  # what the copy holds is run again

    return copied


def spares_the_poisoned(right: Any) -> Any:
    def suspect(self: Any, tid: int) -> None:
        right(self, tid)
        self.poisoned.discard(tid)

    return suspect


def answers_again(right: Any) -> Any:
    """After a recovery, a reply that was sent is sent once more."""

    def answer(self: Any, now_us: int, effects: list[Any]) -> None:
        before = list(self.waiting)
        right(self, now_us, effects)
        if getattr(self.backend, "term", 0) > 1:
            self.waiting += [submission for submission in before if submission not in self.waiting][:1]

    return answer


def answers_early(right: Any) -> Any:
    return lambda self: self.last is None or self.last.phase != "open"


# --- ordered execution ------------------------------------------------------------------------------------------------


def repairs_nobody(right: Any) -> Any:
    def ripple(self: Any, call: Any, links: Any, at: int) -> None:
        if at + 1 == len(links):
            right(self, call, links, at)

    return ripple


def shows_aborted_writes(right: Any) -> Any:
    return lambda links, at, tid, aborted: right(links, at, tid, set())


def says_one_is_true(right: Any) -> Any:
    return lambda one, other: bool(one == other)


def one_becomes_true(seed: int) -> list[str]:
    """A state changes from 1 to True below a transaction that has read it, in some order of the messages."""
    app = App("types")
    box = app.operator("box")

    @box.register
    def keep(ctx: Context, value):  # type: ignore[no-untyped-def]
        ctx.put(value)

    @box.register
    def tell(ctx: Context, to: int, value):  # type: ignore[no-untyped-def]
        ctx.call_async(keep, to, value)

    @box.register
    def show(ctx: Context):  # type: ignore[no-untyped-def]
        return ctx.get()

    fleet = Fleet(app, Config(), 2, "ordered", random.Random(seed).choice)
    fleet.settle()
    calls: list[Any] = [(keep, at, 1) for at in range(8)]
    calls += [call for at in range(8) for call in ((tell, at + 8, at, True), (show, at))]
    fleet.submit(Submit([(0, Admission(fleet.coordinator.program).admit(FromClient("x"), calls))]))
    (answer,) = [effect for effect in fleet.settle() if isinstance(effect, Answer)]
    shown = answer.answers.results[9::2]
    return [] if all(value is True for value in shown) else [f"after True was kept, {shown} was shown"]


def merges_backwards(right: Any) -> Any:
    return lambda self, part, call, state, deltas: right(self, part, call, state, deltas[::-1])


def cancels_nothing(right: Any) -> Any:
    return lambda self, part, tid, place: None


def hears_no_mending(right: Any) -> Any:
    return lambda self, part, tid, place, worker: None


def revives_nobody(right: Any) -> Any:
    return lambda self, part, tid: None


def answers_once(right: Any) -> Any:
    """A result that changes is ignored."""

    def answered(self: Any, part: Any, tid: int, place: bytes, n: int, attempt: int, result: Any) -> Any:
        call = self.calls_of(part, tid).get(place)
        if call is not None and call.frame is not None and n in call.frame.answers:
            return None
        return right(self, part, tid, place, n, attempt, result)

    return answered


def last_failure_wins(right: Any) -> Any:
    def report(self: Any, now_us: int, number: int, progress: Any, effects: list[Any]) -> None:
        part = self.ordered.parts.get(number)
        if part is not None:
            for tid, failures in part.failures.items():
                part.failures[tid] = {min(failures): failures[max(failures)]}
        right(self, now_us, number, progress, effects)

    return report


def reports_while_busy(right: Any) -> Any:
    return lambda self, part: part.at == len(part.rows)


def lends_the_latest(right: Any) -> Any:
    return lambda self, entity, tid: right(self, entity, 1 << 60)


def installs_nothing(right: Any) -> Any:
    return lambda self: right(self)[1:]


# --- mistakes that only large programs show ---------------------------------------------------------------------------


def in_a_case(seed: int) -> list[str]:
    return Judge().judge(draw_case(seed)).violations


def counts_tries_by_frame(right: Any) -> Any:
    """A call that replaces another one starts counting again."""
    return lambda self, n, number: right(self, n, self.attempt(n) + 1)


def numbers_no_try(right: Any) -> Any:
    return lambda self: chains.PREDICTED


def takes_any_try(right: Any) -> Any:
    def answered(self: Any, part: Any, tid: int, place: bytes, n: int, attempt: int, result: Any) -> Any:
        call = self.calls_of(part, tid).get(place)
        if call is not None and call.frame is not None:
            attempt = call.frame.attempt(n)
        return right(self, part, tid, place, n, attempt, result)

    return answered


def closes_over_equal_puts(right: Any) -> Any:
    """A put after an await leaves no record if it writes the value that is there already."""

    def close(self: Any, call: Any, n: int, context: Any, before: Any) -> None:
        is_equal = not context._deltas and not context._read and context._state is before
        if not (n and is_equal and n not in call.frame.segments):
            right(self, call, n, context, before)

    return close


def drops_equal_puts(right: Any) -> Any:
    def put(self: Any, value: Any) -> None:
        if type(value) is not type(self._state) or value != self._state:
            right(self, value)

    return put


def never_holds(right: Any) -> Any:
    def count(self: Any, part: Any, tid: int) -> bool:
        part.vain, part.vain_of[tid] = 0, 0
        return bool(right(self, part, tid))

    return count


def tells_aborts_twice(right: Any) -> Any:
    """An abort is sent again after it was taken back."""

    def tell_all(self: Any, part: Any, row: Any) -> None:
        right(self, part, row)
        if isinstance(row, TransactionRevived):
            right(self, part, TransactionAborted(row.tid))

    return tell_all


def takes_nothing_back(right: Any) -> Any:
    return lambda self, part, call, frame, n: None


def fails_at_two_places(right: Any) -> Any:
    """A call fails elsewhere than before, and its first failure stays."""

    def fail(self: Any, part: Any, call: Any, *rest: Any) -> None:
        call.failure = None
        right(self, part, call, *rest)

    return fail


def predicts_twins(right: Any) -> Any:
    """A call with arguments that only equal the predicted ones is taken for what was predicted."""

    def gives(self: prediction.Template, key: Any, args: Any, binding: Any, target: Any, given: Any) -> bool:
        if bool(right(self, key, args, binding, target, given)):
            return True
        made = self.fill(key, args) if binding is self.binding and not self.is_awaited else None
        return made is not None and made[2] is target and made[3] == given

    return gives


def picks_what_is_elsewhere(right: Any) -> Any:
    """The owners of predicted calls are off by one row."""

    def owners(templates: Any, args: Any) -> Any:
        found = right(templates, args)
        return found and [*found[1:], found[0]]

    return owners


NUMBERLESS = (Mutant("tries have no numbers", exchange.Exchange, "_new_attempt", numbers_no_try),)

PROGRAM_MUTANTS = tuple(
    mutant._replace(look=in_a_case)
    for mutant in (
        Mutant(
            "tries are counted by each call", chains.AwaitFrame, "renew", counts_tries_by_frame, 131, besides=NUMBERLESS
        ),
        Mutant("an answer to an older try is taken", exchange.Exchange, "answered", takes_any_try, 30),
        Mutant("an equal put leaves no record", repair.Repair, "_close", closes_over_equal_puts, 340),
        Mutant("an equal put is dropped", contexts.OrderedContext, "put", drops_equal_puts, 9),
        Mutant("nothing is ever held", exchange.Exchange, "_count_vain", never_holds, 286),
        Mutant("an abort is told twice", exchange.Exchange, "_tell_all", tells_aborts_twice, 0),
        Mutant("what is awaited no more is not taken back", repair.Repair, "_take_back", takes_nothing_back, 305),
        Mutant("a prediction may differ by a twin", prediction.Template, "gives", predicts_twins, 613),
        Mutant("a failure that moved stays where it was", repair.Repair, "_fail", fails_at_two_places, 525),
        Mutant("predicted calls go to another worker", prediction, "owners_of_predicted", picks_what_is_elsewhere, 816),
    )
)

MUTANTS = (
    Mutant("channels take duplicates", channel.Channels, "receive", takes_duplicates),
    Mutant("channels do not mind gaps", channel.Channels, "receive", takes_gaps, 0),
    Mutant("channels take old terms", channel.Channels, "receive", takes_old_terms, 8),
    Mutant("what is lost is not sent again", channel.Channels, "upkeep", never_resends, 4),
    Mutant("request ids are not remembered", ledger.Ledger, "claim", knows_no_ids),
    Mutant("a request id may come with another call", engine.Engine, "_same_call", any_call_will_do),
    Mutant("an epoch settles without comparing counters", coordinator.Coordinator, "_has_settled", settles_unheard, 3),
    Mutant("a lone epoch settles on any share", coordinator.Coordinator, "_has_settled", settles_without_shares, 9),
    Mutant("a recovery begins no new term", channel.Channels, "begin", keeps_the_term, 4),
    Mutant("a recovery forgets epochs that were final", coordinator.Coordinator, "_recover", forgets_the_log, 7),
    Mutant("a copy of the state lacks an entity", coordinator.Coordinator, "_copied", copies_too_early, 1),
    Mutant("what a copy holds is run again", coordinator.Coordinator, "_copied", aliases_the_copy, 1),
    Mutant("who overran gets another chance for ever", coordinator.Coordinator, "_suspect", spares_the_poisoned, 7),
    Mutant("a reply leaves twice after a recovery", engine.Engine, "_answer", answers_again),
    Mutant("a reply leaves before its epoch is final", egress.Submission, "is_final", answers_early),
    Mutant("those above a late call are not repaired", executor.OrderedExecutor, "_ripple", repairs_nobody, 12),
    Mutant("aborted writes are seen", chains, "value_before", shows_aborted_writes, 1),
    Mutant("1 is True", chains, "same", says_one_is_true, look=one_becomes_true),
    Mutant(
        "merges are repeated in another order", executor.OrderedExecutor, "_fold", merges_backwards, 338, look=in_a_case
    ),
    Mutant("cancelled calls stay", executor.OrderedExecutor, "cancel", cancels_nothing, 128),
    Mutant("a failure that was mended stays", executor.OrderedExecutor, "mended", hears_no_mending, 13),
    Mutant("an abort is never taken back", executor.OrderedExecutor, "revive", revives_nobody, 27),
    Mutant("an answer that changes is not heard", executor.OrderedExecutor, "answered", answers_once, 28),
    Mutant("the last failure wins", worker.Worker, "_report", last_failure_wins, 13),
    Mutant("a busy worker says it is idle", executor.OrderedExecutor, "is_idle", reports_while_busy, 53),
    Mutant("what is lent is of the future", gathering.Gathering, "_state_below", lends_the_latest, 7),
    Mutant("a write of a stretch is lost", stretch.Stretch, "writes", installs_nothing, 7),
)
