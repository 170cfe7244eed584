"""The driver of all tests that step the core themselves: what is submitted, when, and what comes back.

`Driver` is an engine, or a coordinator and its workers, in one thread. `Cluster` (cluster.py) adds links that are held
back, `World` (outside.py) time and an outside world, `Hand` (durability/hand.py) a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace import App, Config
from headrace.core.admission import Admission
from headrace.core.coordinator import on_workers
from headrace.core.engine import Engine
from headrace.core.events import Answer, FailedRun, LogFailures, ReadResult, Refuse, Submit, Tick
from headrace.core.origin import FromClient
from headrace.runtime.client import Replies, Reply
from headrace.sim.fleet import Choose, Fleet
from headrace.wire.messages import RequestIds


class Driver(Fleet):
    """With 0 workers an engine. Submissions get the tokens 0, 1, 2 and so on; `replies[token]` are those that left."""

    def __init__(
        self,
        app: App,
        config: Config | None = None,
        workers: int = 0,
        mode: str = "auto",
        *,
        choose: Choose = lambda ready: ready[0],
        now_us: int = 0,
        **core: Any,
    ) -> None:
        self.app, self.config, self.choose = app, config or Config(), choose
        self.core: Any = (
            on_workers(app, self.config, workers, mode, **core) if workers else Engine(app, self.config, **core)
        )
        self.engine, self.coordinator = self.core, self.core.backend
        self.workers, self.links, self.timers = {}, {}, {}
        self.now_us, self.effects = now_us, []
        self.messages = self.bytes = 0
        self.submitted = 0
        self.replies: dict[int, list[Reply]] = {}
        self.refusals: dict[Any, Exception] = {}
        self.found: dict[Any, dict[Any, Any]] = {}  # what was read, by its token: (operator, key) -> state
        self.failed: list[FailedRun] = []
        self.failed_more: dict[tuple[str, str], int] = {}
        self.prepare()
        self.program = self.core.program
        self.admission = Admission(self.program)
        self._apply(0, self.core.start(now_us))

    def prepare(self) -> None:
        """What is done with the core before it starts."""

    def hand_over(self, *admitted: Any, now_us: int | None = None) -> range:
        """One step with these batches, at this time. Returns their tokens."""
        self.now_us = self.now_us if now_us is None else now_us
        tokens = range(self.submitted, self.submitted + len(admitted))
        self.submitted += len(admitted)
        self.submit(Submit(list(zip(tokens, admitted, strict=True))))
        return tokens

    def submit_at(self, now_us: int, *batches: tuple[RequestIds, Sequence[Any]]) -> range:
        """One step with these batches, `(ids, calls)` each. Returns their tokens."""
        return self.hand_over(*(self.admission.admit(FromClient(ids), calls) for ids, calls in batches), now_us=now_us)

    def call_at(self, now_us: int, request_id: str, *call: Any) -> Reply:
        """One call in a step of its own, with an interval of 0."""
        (token,) = self.submit_at(now_us, ([request_id], [call]))
        return self.replies[token][0]

    def tick(self, now_us: int) -> None:
        self.now_us = now_us
        self.submit(Tick())

    @property
    def timer_us(self) -> int | None:
        """When the core wants to go on."""
        return self.timers.get(0)

    def finish(self) -> None:
        """Let the time pass that the engine still waits for."""
        if self.timer_us is not None:
            self.tick(self.timer_us)
        assert self.timer_us is None
        assert set(self.replies) | set(self.refusals) == set(range(self.submitted))

    def state(self) -> dict[tuple[str, Any], Any]:
        """All entities of an engine as they are now: (operator, key) -> state."""
        return {
            (name, key): self.program.values.unseal(value)
            for name, table in self.core.state.tables.items()
            for key, value in table.items()
        }

    # --- what comes back ---

    def _apply(self, node: int, effects: list[Any]) -> None:
        super()._apply(node, effects)
        left, self.effects = self.effects, []
        for effect in left:
            self.take(effect)

    def take(self, effect: Any) -> None:
        """An effect of the core for the outside."""
        if isinstance(effect, Answer | Refuse):
            assert effect.token not in self.replies, f"submission {effect.token} was answered twice"
            assert effect.token not in self.refusals, f"submission {effect.token} was answered twice"
        if isinstance(effect, Answer):
            answers = effect.answers
            assert len(answers.tids) == len(answers.epochs) == len(answers.results), "columns differ in length"
            self.replies[effect.token] = list(Replies(answers, self.program.values.unseal))
        elif isinstance(effect, Refuse):
            self.refusals[effect.token] = effect.error
        elif isinstance(effect, ReadResult):
            unseal = self.program.values.unseal
            self.found[effect.token] = {(name, key): unseal(value) for name, key, value in effect.entities}
        elif isinstance(effect, LogFailures):
            self.failed += effect.runs
            for place, count in effect.more.items():
                self.failed_more[place] = self.failed_more.get(place, 0) + count
        else:
            raise AssertionError(f"unknown effect: {effect!r}")
