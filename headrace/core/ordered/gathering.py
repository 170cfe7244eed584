"""A worker's part in gathering: it lends entities, or it runs the stretch and returns the changes.

    Gather ──► Lent from all to the gatherer ──► (Asked ──► Lent)* ──► the stretch runs ──► Installed to all

Rules:
1. The coordinator sends `Gather` when nothing is under way for the epoch and all below the stretch is final. So lent
   state is final, and no other worker touches these transactions until they are over.
2. Lenders send what the stretch will probably need: the entities of its roots, predicted ones, and those that it has
   touched so far. A root's entity that was not lent has no state.
3. Records of the stretch stay in their chains until `Installed` comes; then its writes replace them at once.

Never here: which transactions are gathered, how they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from headrace.config import Config
from headrace.core.channel import Channels
from headrace.core.decrees import decree
from headrace.core.epoch import Epoch
from headrace.core.ordered.chains import Call, locate, value_before
from headrace.core.ordered.exchange import EpochPart
from headrace.core.ordered.executor import OrderedExecutor
from headrace.core.ordered.progress import Progress
from headrace.core.ordered.stretch import Entity, Stretch
from headrace.core.program import Program
from headrace.core.shares import add_share
from headrace.core.state import State
from headrace.errors import BadMessage
from headrace.wire.messages import (
    PART_BYTES_MAX,
    Entities,
    Gather,
    Gathered,
    Installed,
    LendRequest,
    Lent,
    Need,
    Respond,
    StretchRows,
    in_parts,
)
from headrace.wire.values import MISSING, size_of

COORDINATOR = 0
HINTS_MAX = 10_000  # entities requested in advance, because the last stretch used them


class Gathering(ABC):
    """A mixin of the worker."""

    me: int
    config: Config
    program: Program
    state: State
    ordered: OrderedExecutor
    channels: Channels
    progress: dict[int, Progress]

    def __init__(self) -> None:
        self.stretch: Stretch | None = None  # under the limits of the running epochs
        self.hints: list[Entity] = []  # others' entities that the last stretch used

    @abstractmethod
    def _report(self, now_us: int, number: int, progress: Progress, effects: list[Any]) -> None:
        """Report the progress of an epoch to the coordinator."""

    # --- the beginning ---

    def _take_gather(self, now_us: int, gather: Gather, effects: list[Any]) -> None:
        part, progress = self.ordered.parts.get(gather.epoch), self.progress.get(gather.epoch)
        if part is None or progress is None or gather.first not in part.tids or gather.last not in part.tids:
            raise BadMessage(
                f"TIDs {gather.first} to {gather.last} cannot be gathered: they are not running on this worker"
            )
        progress.received[COORDINATOR] += 1
        progress.is_reported, progress.report_at_us, progress.gather = False, None, gather
        if gather.share is not None:
            assert progress.shares is not None
            add_share(progress.shares, gather.share)
        if gather.worker == self.me:
            self._begin_stretch(part, progress, gather)
        else:
            self._tell_state(part, gather.worker, Lent, gather.first, self._lent(part, progress, gather))

    def _lent(self, part: EpochPart, progress: Progress, gather: Gather) -> Entities:
        roots = dict.fromkeys(self._roots(part, progress, gather))
        lent = []
        for entity in {**roots, **dict.fromkeys(self._touched(part, progress, gather))}:
            state = self._state_below(entity, gather.first)
            if state is not MISSING or entity not in roots:
                lent.append((*entity, state))
        return lent

    def _rows(self, part: EpochPart, progress: Progress, gather: Gather) -> Iterator[tuple[int, Any, Any, Any]]:
        """The rows of the stretch: each root's worker, binding, key and arguments."""
        run, bindings = progress.run, self.ordered.bindings.by_number
        if run is not None:
            for row in range(part.tids.index(gather.first), part.tids.index(gather.last) + 1):
                number = run.functions if isinstance(run.functions, int) else run.functions[row]
                yield part.owners[row], bindings[number], run.keys[row], run.args[row]

    def _roots(self, part: EpochPart, progress: Progress, gather: Gather) -> Iterator[Entity]:
        """The entities of own roots."""
        for owner, binding, key, _ in self._rows(part, progress, gather):
            if owner == self.me:
                yield binding.operator.name, key

    def _touched(self, part: EpochPart, progress: Progress, gather: Gather) -> Iterator[Entity]:
        """Own entities that the stretch has called, or probably will."""
        for tid in stretch_of(part, gather):
            for call in self._calls(part, tid):
                yield call.binding.operator.name, call.key
            yield from sorted(part.touched.get(tid, ()), key=repr)
        if part.predictions:
            for _, binding, key, args in self._rows(part, progress, gather):
                for template in part.predictions.get(binding, ()):
                    made = template.fill(key, args)
                    if made is not None and self.ordered._owner(made[1], made[2]) == self.me:
                        yield made[1].operator.name, made[2]

    def _calls(self, part: EpochPart, tid: int) -> Iterable[Call]:
        calls = part.calls.get(tid, ())
        if type(calls) is dict:
            return calls.values()
        return (calls,) if type(calls) is Call else calls

    # --- the gatherer ---

    def _begin_stretch(self, part: EpochPart, progress: Progress, gather: Gather) -> None:
        run = progress.run
        assert run is not None, "the gatherer must have received the epoch"
        if self.stretch is None or self.stretch.program is not self.program:
            ran = 0 if self.stretch is None else self.stretch.executor.ran
            self.stretch = Stretch(self.program, self.state.seed)
            self.stretch.executor.ran = ran
        epoch = Epoch(gather.epoch, 0, 0)
        rows = list(self._rows(part, progress, gather))
        epoch.entries = [row[1].entry for row in rows]
        epoch.keys, epoch.args = [row[2] for row in rows], [row[3] for row in rows]
        epoch.tids, epoch.closed_us = stretch_of(part, gather), part.time_us
        epoch.decreed = {row: decree(epoch, row) for row, tid in enumerate(epoch.tids) if tid in run.poisoned}
        self.stretch.begin(epoch, partial(self._own_state, tid=gather.first))
        progress.told = progress.late = 0
        progress.awaited = dict.fromkeys(set(gather.lenders) - {self.me}, 1)
        if progress.shares is None:
            self._ask(part, progress, self.hints)
            progress.late = 0
        early, progress.lent_early = progress.lent_early, []
        for source, row in early:
            self._take_lent(progress, source, row)

    def _ask(self, part: EpochPart, progress: Progress, entities: Iterable[Entity]) -> None:
        assert progress.gather is not None
        for owner, wanted in self._by_owner(entities).items():
            if owner != self.me:
                progress.awaited[owner] = progress.awaited.get(owner, 0) + 1
                progress.late += len(wanted)
                self.ordered.tell(part, owner, LendRequest(progress.gather.first, wanted))

    def _take_stretch_rows(self, part: EpochPart, progress: Progress, source: int, rows: list[StretchRows]) -> None:
        for row in rows:
            if isinstance(row, LendRequest):
                lent = [(*entity, self._state_below(entity, row.tid)) for entity in row.entities]
                self._tell_state(part, source, Lent, row.tid, lent)
            elif isinstance(row, Installed):
                progress.installed += row.entities
                if row.is_last:
                    entities, progress.installed = progress.installed, []
                    self._install(part, progress, row.tid, entities)
            elif progress.gather is None:
                progress.lent_early.append((source, row))
            else:
                self._take_lent(progress, source, row)

    def _tell_state(
        self, part: EpochPart, worker: int, kind: type[Lent | Installed], tid: int, entities: Entities
    ) -> None:
        for some, is_last in in_parts(entities, self.config.entities_per_frame_max):
            self.ordered.tell(part, worker, kind(tid, some, is_last))

    def _take_lent(self, progress: Progress, source: int, lent: Lent) -> None:
        assert self.stretch is not None
        for operator, key, state in lent.entities:
            self.stretch.lend(operator, key, state)
        progress.awaited[source] -= lent.is_last
        if not progress.awaited[source]:
            del progress.awaited[source]

    def _respond_to_stretch(self, progress: Progress, respond: Respond) -> None:
        """The stretch continues: its external call has a response."""
        assert self.stretch is not None
        progress.received[COORDINATOR] += 1
        progress.is_reported, progress.needs = False, []
        responses = {(respond.tid, response.call): response for response in respond.responses}
        self.stretch.epoch.responses.update(responses)

    def _gatherer(self) -> Progress | None:
        """The epoch with a stretch that this worker can run now."""
        for progress in self.progress.values():
            gather = progress.gather
            if gather is not None and gather.worker == self.me and not progress.awaited and not progress.needs:
                return progress
        return None

    def _run_stretch(self, now_us: int, effects: list[Any]) -> None:
        """Run a slice of the stretch. Messages may come between slices."""
        progress, stretch = self._gatherer(), self.stretch
        if progress is None:
            return
        assert stretch is not None
        assert progress.gather is not None
        gather, part = progress.gather, self.ordered.parts[progress.gather.epoch]
        for owner, binding, key, _ in self._rows(part, progress, gather) if stretch.is_new else ():
            if owner != self.me:
                stretch.lend(binding.operator.name, key, MISSING)  # unless it was lent: rule 2
        need = stretch.run(self.config.slice_calls_max)
        if isinstance(need, Need):
            progress.needs = [need]
            self._tell_outcomes(now_us, progress, effects)
            self._report(now_us, gather.epoch, progress, effects)
        elif need is not None:
            self._ask(part, progress, need)
        elif stretch.is_done:
            self._tell_outcomes(now_us, progress, effects)
            self._give_back(part, progress, gather)

    def _tell_outcomes(self, now_us: int, progress: Progress, effects: list[Any]) -> None:
        """Send the stretch's new outcomes, in messages of bounded size."""
        assert self.stretch is not None
        epoch, at = self.stretch.epoch, progress.told
        progress.told, size = len(epoch.results), 0
        for end in range(at + 1, progress.told + 1):
            size += size_of(epoch.results[end - 1])
            if size > PART_BYTES_MAX or end == progress.told:
                tids = epoch.tids[at:end]
                failures = {epoch.tids[row]: epoch.failures[row] for row in range(at, end) if row in epoch.failures}
                told = Gathered(epoch.number, tids[0], epoch.results[at:end], failures)
                effects.append(self.channels.send(now_us, COORDINATOR, told))
                size, at = 0, end

    def _give_back(self, part: EpochPart, progress: Progress, gather: Gather) -> None:
        """The stretch is over: send its writes to their workers, and its end to the lenders."""
        assert self.stretch is not None
        roots = {(binding.operator.name, key) for _, binding, key, _ in self._rows(part, progress, gather)}
        used = [entity for entity in self.stretch.used() if entity not in roots]
        self.hints = [each for owner, some in self._by_owner(used).items() if owner != self.me for each in some]
        del self.hints[HINTS_MAX:]
        writes = self._by_owner(self.stretch.writes())
        self.stretch.forget()
        for worker in sorted({*gather.lenders, *writes} - {self.me}):
            self._tell_state(part, worker, Installed, gather.last, writes.get(worker, []))
        self._install(part, progress, gather.last, writes.get(self.me, []))

    # --- the end ---

    def _install(self, part: EpochPart, progress: Progress, last: int, entities: Entities) -> None:
        """Replace all that the stretch's transactions left here by its writes."""
        gather, progress.gather = progress.gather, None
        if gather is not None:
            self.ordered.forget(part, stretch_of(part, gather))
        for n, (operator, key, state) in enumerate(entities, start=1):
            binding = next(each for each in self.ordered.bindings.by_number if each.operator.name == operator)
            self.ordered.install(part, last, n, binding, key, MISSING if state == MISSING else state)

    def _by_owner(self, entities: Iterable[Any]) -> dict[int, list[Any]]:
        """(operator, key, ...), by the worker that owns the entity."""
        found: dict[int, list[Any]] = {}
        for entity in entities:
            owner = self.ordered.shards.owner(self.program.operators[entity[0]], entity[1])
            found.setdefault(owner, []).append(entity)
        return found

    def _own_state(self, entity: Entity, tid: int) -> Any:
        operator, key = entity
        if self.ordered.shards.owner(self.program.operators[operator], key) != self.me:
            raise LookupError(entity)
        return self._state_below(entity, tid)

    def _state_below(self, entity: Entity, tid: int) -> Any:
        operator, key = entity
        chain = self.ordered.chains[operator].get(key)
        if chain is None:
            return self.state.tables[operator].get(key)
        if type(chain) is not list:
            return chain.seen if chain.order[0] >= tid else self.state.tables[operator].get(key)
        return value_before(chain, locate(chain, (tid, b"")), tid, self.ordered.aborted)


def stretch_of(part: EpochPart, gather: Gather) -> range:
    """Its TIDs."""
    return part.tids[part.tids.index(gather.first) : part.tids.index(gather.last) + 1]
