"""New code that only adds: it replays what older code has logged. Everything else is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from headrace.errors import AppChanged
from tests.durability.hand import Hand, memory
from tests.durability.versions import ADDS, BREAKS, draw_edits, kind_of, source_of, workshop

NAMES = ("ann", "bob", "cy", "dee")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    with workshop(tmp_path) as made:
        yield made


def orders(rng: random.Random, count: int) -> list[Any]:
    """What is asked for, without types: key, to, amount, size."""
    return [(rng.choice(NAMES), rng.choice(NAMES), rng.randint(1, 99), rng.randint(1, 5)) for _ in range(count)]


def calls(module: ModuleType, asked: list[Any]) -> list[Any]:
    return [("account.order", key, module.Order(to, amount), module.Part(size)) for key, to, amount, size in asked]


def in_types_of(module: ModuleType, value: Any, kind: str) -> Any:
    """A value of an older version in the types of this one: msgspec fills in what is new."""
    kinds = {"reply": module.Receipt | None, "account": module.Account, "notes": list[module.Note], "totals": int}
    return msgspec.convert(msgspec.to_builtins(value), kinds[kind], strict=False)


def told(module: ModuleType, replies: list[Any]) -> list[Any]:
    return [(each.tid, each.status, in_types_of(module, each.result, "reply")) for each in replies]


def states(module: ModuleType, state: dict[Any, Any]) -> dict[Any, Any]:
    return {(name, key): in_types_of(module, value, name) for (name, key), value in state.items()}


def reference(module: ModuleType, asked: list[Any], now: ModuleType) -> tuple[list[Any], dict[Any, Any]]:
    """What these orders give, one after the other, in one go and by one version; in the types of another."""
    hand = Hand(memory(), module.app)
    replies = hand.run("all", calls(module, asked))
    return [row[1:] for row in told(now, replies)], states(now, visible(hand))


def visible(hand: Hand) -> dict[Any, Any]:
    return {entity: state for entity, state in hand.state().items() if entity[0] != "headrace"}


class Story:
    """A store that an older version has written, until it crashes or stops."""

    def __init__(self, old: ModuleType, rng: random.Random, workers: int, count: int, is_clean: bool) -> None:
        self.old, self.rng, self.workers, self.store = old, rng, workers, memory()
        self.settings: dict[str, Any] = {"workers": workers, "epoch_transactions_max": rng.choice((1, 5, 50))}
        self.asked, self.replies = dict[str, Any](), dict[str, Any]()
        self.hand: Hand | None = None
        hand = self.start(old)
        for number in range(rng.randint(1, 6)):
            self.ask(hand, f"before {number}", max(1, count // 6))
            if rng.random() < 0.2:
                hand.take_snapshot()
        if is_clean:
            hand.settle()
            assert hand.take_snapshot() is not None

    def ask(self, hand: Hand, stem: str, count: int) -> None:
        """Send some orders; then anything may happen to them."""
        sent = {f"{stem}/{at}": each for at, each in enumerate(orders(self.rng, count))}
        token = hand.send(list(sent), calls(self.old, list(sent.values())))
        self.asked |= sent
        for _ in range(self.rng.choice((0, 3, 10, 1_000))):
            if not hand.happen(self.rng):
                break
        if token in hand.replies:
            self.replies |= dict(zip(sent, hand.replies[token], strict=True))

    def start(self, module: ModuleType) -> Hand:
        now_us = 0 if self.hand is None else self.hand.now_us
        self.hand = Hand(self.store, module.app, now_us=now_us, **self.settings)
        return self.hand

    def check(self, hand: Hand, module: ModuleType) -> None:
        """All that was asked for so far, asked again: what was told once is told again, and all together is what the
        old version gives in one go."""
        ids = list(self.asked)
        replies = hand.run(ids, calls(module, list(self.asked.values())))
        again = dict(zip(ids, replies, strict=True))
        assert told(module, [again[each] for each in self.replies]) == told(module, list(self.replies.values()))
        self.replies = again
        order = sorted(ids, key=lambda each: again[each].tid)
        outcomes, state = reference(self.old, [self.asked[each] for each in order], module)
        assert [row[1:] for row in told(module, [again[each] for each in order])] == outcomes
        assert visible(hand) == state

    def check_old(self) -> None:
        self.check(self.start(self.old), self.old)


@pytest.mark.parametrize("seed", range(60))
def test_what_happens_with_a_random_newer_version_is_what_the_rule_says(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    edits, is_clean = draw_edits(rng), rng.random() < 0.4
    old, new = make(source_of(())), make(source_of(edits))
    story = Story(old, rng, rng.choice((0, 0, 2)), rng.choice((6, 30, 300)), is_clean)
    kind = kind_of(edits)
    if kind == ADDS:
        for number in range(rng.randint(1, 2)):
            hand = story.start(new)
            story.check(hand, new)
            story.old, more = new, story.old
            story.ask(hand, f"after {number}", 5)
            story.old = more
        story.check(story.start(new), new)
        return
    found = story.start(old)
    is_at_end = not found.core.backlog  # also after a crash, if it came at the right moment
    assert is_at_end or not is_clean
    before: dict[Any, Any] = {}
    if is_at_end:
        found.settle()  # timers may be due
        before = visible(found)
        found.take_snapshot()
    if is_at_end and (kind != BREAKS or not before):
        assert visible(story.start(new)) == states(new, before)
    else:
        with pytest.raises(AppChanged, match=r"migrate=" if is_at_end else "headrace upgrade"):
            story.start(new)
        story.check_old()
