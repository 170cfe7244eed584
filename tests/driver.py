"""An engine driven by hand: what a test submits, in which steps and at what times, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace import App, Config
from headrace.core.admission import Admission
from headrace.core.engine import Engine
from headrace.core.events import Answer, Refuse, SetTimer, Submit, Tick
from headrace.runtime.client import Replies, Reply
from headrace.wire.messages import RequestIds

END_US = 1 << 61


class Driver:
    """Submissions get the tokens 0, 1, 2 and so on; `replies[token]` are the answers that have left."""

    def __init__(self, app: App, config: Config | None = None) -> None:
        self.engine = Engine(app, config)
        self.admission = Admission(self.engine.program)
        self.submitted = 0
        self.replies: dict[int, list[Reply]] = {}
        self.refusals: dict[int, Exception] = {}
        self.timer_us: int | None = None

    def submit(self, now_us: int, *batches: tuple[RequestIds, Sequence[Any]]) -> range:
        """One step with these batches, `(ids, calls)` each. Returns their tokens."""
        return self.hand_over(now_us, *(self.admission.admit(ids, calls) for ids, calls in batches))

    def hand_over(self, now_us: int, *admitted: Any) -> range:
        tokens = range(self.submitted, self.submitted + len(admitted))
        self.submitted += len(admitted)
        self._take(self.engine.step(now_us, Submit(list(zip(tokens, admitted, strict=True)))))
        return tokens

    def tick(self, now_us: int) -> None:
        self._take(self.engine.step(now_us, Tick()))

    def finish(self) -> None:
        """Let the time pass that the engine still waits for."""
        if self.timer_us is not None:
            self.tick(self.timer_us)
        assert self.timer_us is None
        assert set(self.replies) | set(self.refusals) == set(range(self.submitted))

    def call(self, now_us: int, request_id: str, *call: Any) -> Reply:
        """One call in a step of its own, with an interval of 0."""
        (token,) = self.submit(now_us, ([request_id], [call]))
        return self.replies[token][0]

    def _take(self, effects: list[Any]) -> None:
        self.timer_us = None
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.timer_us = effect.at_us
                continue
            assert effect.token not in self.replies, f"submission {effect.token} was answered twice"
            assert effect.token not in self.refusals, f"submission {effect.token} was answered twice"
            if isinstance(effect, Answer):
                answers = effect.answers
                assert len(answers.tids) == len(answers.epochs) == len(answers.results), "columns differ in length"
                self.replies[effect.token] = list(Replies(answers, self.engine.program.values.unseal))
            else:
                assert isinstance(effect, Refuse)
                self.refusals[effect.token] = effect.error

    def state(self) -> dict[tuple[str, Any], Any]:
        """All entities: (operator, key) -> state."""
        program = self.engine.program
        return {
            (name, key): program.values.unseal(value)
            for name, table in program.tables.items()
            for key, value in table.items()
        }
