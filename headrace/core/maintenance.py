"""What a coordinator does between two epochs: read state, copy it, change the number of workers.

Rules:
1. It starts once no epoch is under way. Every worker sends the state it was asked for; the next epoch waits for that.
2. The coordinator updates its copy of the state from the changes since the last request; with a log, the copy is also
   a snapshot.
3. When an epoch is final, its workers send what it changed in operators that log their changes. Channels keep their
   order, so a worker's changes arrive before the state that it sends later.

Never here: how epochs run, what happens when a worker is lost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headrace.core.channel import Channels
from headrace.core.engine import Engine
from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes, OperatorChanges
from headrace.core.events import Read, Refuse, Rescale, Rescaled, Start, Stop, TakeSnapshot
from headrace.core.placement import ShardMap
from headrace.errors import ConfigError
from headrace.wire import messages
from headrace.wire.messages import Entities, Show, Shown
from headrace.wire.values import MISSING


class CopyState(NamedTuple):
    """Bring the coordinator's copy of the state up to date."""


Between = Read | Rescale | TakeSnapshot | CopyState
"""What happens between two epochs."""


class StateGathering(NamedTuple):
    """State that workers send between two epochs."""

    entities: Entities
    missing: set[int]
    then: Callable[[int, Entities, list[Any]], None]


class ChangesGathering(NamedTuple):
    """Changes of a final epoch, as workers send them."""

    changes: Changes
    missing: set[int]


class Maintenance:
    """The half of the coordinator that works between epochs."""

    workers: int
    shards: ShardMap
    channels: Channels

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config, self.program, self.journal = engine.config, engine.program, engine.journal
        self.backlog: deque[Between | Epoch] = engine.backlog  # what comes next
        self.log: list[Epoch] = []  # since the last copy of the state, which is `engine.state`
        self.logged = 0  # their transactions
        self.copied_tid = 0
        self.gathering: StateGathering | None = None
        self.asked_for: Between = CopyState()  # what the gathering is for
        self.asked = 0
        self.telling: dict[int, ChangesGathering] = {}  # by epoch
        self.overran: set[int] = set()  # TIDs that did not return in time
        self.chances: dict[int, int] = {}  # of TIDs that overran in a replay
        self.poisoned: set[int] = set()

    @property
    @abstractmethod
    def term(self) -> int:
        """The term of the channels."""

    @abstractmethod
    def check(self, workers: int) -> None:
        """Raise ConfigError if this number of workers is not possible."""

    @abstractmethod
    def _begin_term(self, now_us: int, effects: list[Any]) -> None:
        """All workers start from the copy of the state."""

    # --- state ---

    def _do_between(self, now_us: int, event: Between, effects: list[Any]) -> None:
        self.asked_for = event
        if isinstance(event, Read):
            show = Show(self._token(), event.operator, event.key, places=event.places)
            self._gather(now_us, show, effects, self._found(event.token))
        elif isinstance(event, Rescale):
            try:
                self.check(event.workers)
            except ConfigError as error:
                effects.append(Refuse(event.token, error))
                return
            self._gather(now_us, Show(self._token(), is_delta=True), effects, self._rescaled(event))
        else:
            self._gather(now_us, Show(self._token(), is_delta=True), effects, self._taken(event))

    def _token(self) -> int:
        self.asked += 1
        return self.asked

    def _gather(self, now_us: int, show: Show, effects: list[Any], then: Any) -> None:
        self.gathering = StateGathering([], set(range(1, self.workers + 1)), then)
        for worker in self.gathering.missing:
            effects.append(self.channels.send(now_us, worker, show))

    def _take_shown(self, now_us: int, worker: int, shown: Shown, effects: list[Any]) -> None:
        gathering = self.gathering
        if gathering is None or shown.token != self.asked:
            return
        gathering.entities.extend(shown.entities)
        if shown.is_last:
            gathering.missing.discard(worker)
        if not gathering.missing:
            self.gathering = None
            gathering.then(now_us, gathering.entities, effects)

    def _found(self, token: Any) -> Any:
        def then(now_us: int, entities: Entities, effects: list[Any]) -> None:
            self.engine.has_read(token, entities)

        return then

    def _taken(self, event: TakeSnapshot | CopyState) -> Any:
        def then(now_us: int, entities: Entities, effects: list[Any]) -> None:
            self._copied(entities)
            if isinstance(event, TakeSnapshot):
                self.journal.wanted.append(event.token)
            if self.journal.wants_snapshot(now_us, self.engine.last_number()):
                self.engine.take_snapshot(now_us, entities)
            else:
                self.journal.carry(entities)

        return then

    def _copied(self, changed: Entities) -> None:
        """Update the copy with the changes of everything that has run since."""
        copy = self.engine.state.tables
        for operator, key, state in changed:
            copy[operator].put(key, MISSING if state == MISSING else state)
        ran = len(self.log) - sum(isinstance(item, Epoch) for item in self.backlog)
        if ran:
            self.copied_tid = self.log[ran - 1].tids[-1]
        self.log = self.log[ran:]
        self.logged = sum(map(len, self.log))
        self.overran = {tid for tid in self.overran if tid > self.copied_tid}
        self.poisoned = {tid for tid in self.poisoned if tid > self.copied_tid}
        self.chances = {tid: left for tid, left in self.chances.items() if tid > self.copied_tid}

    def _rescaled(self, event: Rescale) -> Any:
        def then(now_us: int, entities: Entities, effects: list[Any]) -> None:
            self._copied(entities)
            self.journal.carry(entities)
            before, was = self.shards, self.workers
            self.shards, self.workers = before.rescaled(event.workers), event.workers
            effects += [Start(worker, self.term + 1) for worker in range(was + 1, self.workers + 1)]
            effects += [Stop(worker) for worker in range(self.workers + 1, was + 1)]
            self._begin_term(now_us, effects)
            moved = sum(one != other for one, other in zip(before.owners, self.shards.owners, strict=True))
            effects.append(Rescaled(event.token, self.workers, moved))

        return then

    # --- changes ---

    def take_changes(self) -> Changes | None:
        return None  # workers send them later

    def _expect_changes(self, epoch: int, workers: Iterable[int]) -> None:
        """These workers will send what this epoch changed on their shards."""
        if self.journal.logs_changes:
            self.telling[epoch] = ChangesGathering({}, set(workers))

    def _take_changed(self, now_us: int, worker: int, told: messages.Changed, effects: list[Any]) -> None:
        telling = self.telling.get(told.epoch)
        if telling is None:
            return
        for operator, keys, befores, afters in told.changes:
            changed = telling.changes.setdefault(operator, OperatorChanges([], [], []))
            changed.keys.extend(keys)
            changed.befores.extend(befores)
            changed.afters.extend(afters)
        if told.is_last:
            telling.missing.discard(worker)
        if not telling.missing:
            del self.telling[told.epoch]
            self.journal.changed(told.epoch, telling.changes)
