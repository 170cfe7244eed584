"""A fleet under a test's hand: which links are held back, what was sent, what was answered; and the loop to compare."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from headrace import App, Config, Reply
from headrace.core.events import Answer, Read, ReadResult, Send
from headrace.core.origin import FromClient
from headrace.core.placement import ShardMap
from headrace.model.operator import Operator
from headrace.sim.cases import exactly as exactly
from headrace.sim.cases import outcome as outcome
from headrace.sim.oracle import Oracle
from headrace.wire.messages import Body, Frame, Row, Traffic
from tests.driver import Driver

Link = tuple[int, int]  # from, to; 0 is the coordinator
ANYWHERE = Operator("anywhere")


def on(worker: int, name: str = "k", workers: int = 3, shards: int = Config().shards) -> str:
    """A key that this one of so many workers owns."""
    placed = ShardMap.even(shards, workers)
    return next(key for n in range(10_000) if placed.owner(ANYWHERE, key := f"{name}{n}") == worker)


def at_random(seed: int) -> Callable[[list[Any]], Any]:
    return random.Random(seed).choice


class Cluster(Driver):
    """A coordinator and its workers; a test holds links back, and looks at what was sent."""

    def __init__(self, app: App, workers: int = 3, mode: str = "auto", seed: int | None = None, **config: int) -> None:
        self.held: set[Link] = set()  # links that deliver nothing for now
        self.sent: list[Frame] = []
        self.others: list[Any] = []  # effects of the coordinator that are neither replies nor state
        choose = (lambda ready: ready[0]) if seed is None else at_random(seed)
        super().__init__(app, Config(**config), workers, mode, choose=choose)

    def send(self, *batches: Sequence[Any]) -> None:
        """Submit in one step: each batch is a list of (function, key, *args)."""
        numbered = enumerate(batches, self.submitted)
        self.hand_over(*(self.admission.admit(FromClient(f"batch{n}"), calls) for n, calls in numbered))

    def run(self, calls: Sequence[Any]) -> list[Reply]:
        """Submit one batch and let everything happen."""
        self.send(calls)
        self.settle()
        return self.replies[self.submitted - 1]

    def results(self, calls: Sequence[Any]) -> list[Any]:
        return [reply.unwrap() for reply in self.run(calls)]

    def state(self) -> dict[Any, Any]:
        """All entities: (operator, key) -> state."""
        self.submit(Read("state"))
        self.settle()
        return self.found.pop("state")

    # --- the network ---

    def deliver(self) -> bool:
        kept = {link: self.links.pop(link) for link in list(self.links) if link in self.held}
        try:
            return super().deliver()
        finally:
            for link, frames in kept.items():
                frames.extend(self.links.get(link, ()))
                self.links[link] = frames

    def hold(self, *links: Link) -> None:
        self.held.update(links)

    def release(self, *links: Link) -> None:
        self.held.difference_update(links or set(self.held))

    def deliver_all(self, until_answered: bool = False) -> None:
        """All that is under way and not held; the clock stands still."""
        while not (until_answered and self.replies) and self.deliver():
            pass

    def _apply(self, node: int, effects: list[Any]) -> None:
        self.sent += [effect.frame for effect in effects if isinstance(effect, Send)]
        super()._apply(node, effects)

    def take(self, effect: Any) -> None:
        if isinstance(effect, Answer | ReadResult):
            super().take(effect)
        else:
            self.others.append(effect)

    # --- what was sent ---

    def bodies(self, kind: type[Body]) -> list[Any]:
        """Messages of this kind, each once, however often it was sent."""
        numbered = {(f.term, f.source, f.to, f.sequence): f.body for f in self.sent if isinstance(f.body, kind)}
        return list(numbered.values())

    def rows(self, kind: type[Row]) -> list[Any]:
        """What workers told each other: rows of this kind."""
        return [row for traffic in self.bodies(Traffic) for row in traffic.rows if isinstance(row, kind)]

    def check_left_behind(self) -> None:
        for worker in self.workers.values():
            left = (worker.progress, worker.ordered.parts, worker.early)
            assert not any(left), "an epoch was left behind"


def looped(calls: Sequence[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """What the reference gives: one transaction after the other, on one dict."""
    oracle = Oracle()
    return [oracle.transact(*call) for call in calls], oracle.state


def serially(app: App, calls: Sequence[Any], **config: int) -> tuple[list[Any], dict[Any, Any]]:
    """What one worker gives: the reference for limits and for calls that are wrong."""
    driver = Driver(app, Config(**config))
    driver.submit_at(0, ("all", calls))
    driver.finish()
    return [outcome(reply) for reply in driver.replies[0]], driver.state()


def check_like(
    expected: tuple[list[Any], dict[Any, Any]],
    app: App,
    calls: Sequence[Any],
    workers: Iterable[int] = (2, 3),
    seeds: Iterable[int] = range(8),
    **config: int,
) -> None:
    """Under every one of these schedules, replies and state are as expected."""
    for count in workers:
        for seed in seeds:
            cluster = Cluster(app, count, seed=seed, **config)
            replies = list(map(outcome, cluster.run(calls)))
            assert list(map(repr, replies)) == list(map(repr, expected[0])), f"{count} workers, seed {seed}"
            assert exactly(cluster.state()) == exactly(expected[1]), f"{count} workers, seed {seed}"
            cluster.check_left_behind()


def check_like_the_loop(app: App, calls: Sequence[Any], **ways: Any) -> None:
    check_like(looped(calls), app, calls, **ways)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Any) -> None:
    """Wherever the core uses this function, it makes this mistake instead."""
    modules = [module for path, module in sorted(sys.modules.items()) if path.startswith("headrace.core.")]
    users = [module for module in modules if hasattr(module, name)]
    assert users, f"nothing in the core is named {name}"
    for module in users:
        monkeypatch.setattr(module, name, mistake)


def tree(shape: Sequence[Any], share: int, split: Callable[[set[int]], int]) -> list[int]:
    """The shares that come back from a call of this shape (a list of the calls it makes) that was given `share`: every
    call takes half of what its caller holds, and what is left comes back."""
    held, returned = {share}, []
    for called in shape:
        returned += tree(called, split(held), split)
    return returned + sorted(held)
