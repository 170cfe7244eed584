"""Several workers in one thread: a coordinator, its workers, and channels that deliver on request.

For tests and experiments. Nothing gets lost; the caller chooses the order in which the channels deliver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.config import Config
from headrace.core.backend import MakeExecutor
from headrace.core.coordinator import Coordinator, on_workers
from headrace.core.events import Received, Send, SetTimer, Start, Stop, Tick
from headrace.core.ordered.exchange import Caps
from headrace.core.program import Program
from headrace.core.serial import SerialExecutor
from headrace.core.worker import Worker
from headrace.model.app import App
from headrace.wire.codec import decode_frame, encode

Choose = Callable[[list[Any]], Any]


class Fleet:
    caps = Caps()  # of its workers,
    executor: MakeExecutor = SerialExecutor  # for epochs that one of them runs alone

    def __init__(
        self,
        app: App,
        config: Config | None = None,
        workers: int = 2,
        mode: str = "auto",
        choose: Choose = lambda ready: ready[0],
        program: Program | None = None,
    ) -> None:
        """`program` is the app, if it is compiled already: then a fleet starts faster."""
        self.app, self.config, self.choose = app, config or Config(), choose
        self.engine = on_workers(app, self.config, workers, mode, program=program)
        assert isinstance(self.engine.backend, Coordinator)
        self.coordinator = self.engine.backend
        self.workers: dict[int, Worker] = {}
        self.links: dict[tuple[int, int], deque[bytes]] = {}  # (from, to) -> frames on their way
        self.timers: dict[int, int] = {}
        self.now_us = 0
        self.effects: list[Any] = []  # of the coordinator, for the outside
        self.messages = self.bytes = 0
        self._apply(0, self.engine.start(0))

    def submit(self, event: Any) -> None:
        """Any event from outside: Submit, Read, Rescale, Lost, ..."""
        self._apply(0, self.engine.step(self.now_us, event))

    def deliver(self) -> bool:
        """Delivers one frame, or lets one node continue its work. False if nothing is pending."""
        ready: list[Any] = [link for link, frames in self.links.items() if frames]
        ready += [node for node, at_us in self.timers.items() if at_us <= self.now_us]
        if not ready:
            return False
        chosen = self.choose(ready)
        if isinstance(chosen, tuple):
            frame = decode_frame(self.links[chosen].popleft())
            self._step(chosen[1], Received(frame))
        else:
            self._step(chosen, Tick())
        return True

    def settle(self) -> list[Any]:
        """Runs until nothing is pending, timers included; returns what left the coordinator."""
        while True:
            while self.deliver():
                pass
            if not self.timers:
                break
            self.now_us = max(self.now_us, min(self.timers.values()))
        effects, self.effects = self.effects, []
        return effects

    def _step(self, node: int, event: Any) -> None:
        if node == 0:
            self._apply(0, self.engine.step(self.now_us, event))
        elif node in self.workers:
            self._apply(node, self.workers[node].step(self.now_us, event))

    def _apply(self, node: int, effects: list[Any]) -> None:
        self.timers.pop(node, None)
        for effect in effects:
            if isinstance(effect, Send):
                data = encode(effect.frame)
                self.messages += 1
                self.bytes += len(data)
                self.links.setdefault((node, effect.frame.to), deque()).append(data)
            elif isinstance(effect, SetTimer):
                self.timers[node] = effect.at_us
            elif isinstance(effect, Start):
                self.workers[effect.worker] = Worker(
                    self.app,
                    self.config,
                    effect.worker,
                    self.coordinator.program,
                    effect.term,
                    self.caps,
                    self.executor,
                )
                self.timers.pop(effect.worker, None)
            elif isinstance(effect, Stop):
                self.workers.pop(effect.worker, None)
                self.timers.pop(effect.worker, None)
            else:
                self.effects.append(effect)
