"""Orders in which a fleet's links deliver and its nodes run: fair ones, and ones that no network would have for long.

A schedule is called again and again to choose the next one of those that are ready: a link, (from, to), or the number
of a node that has work to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Ready = Any
Schedule = Callable[[list[Ready]], Ready]


def at_random(rng: random.Random) -> Schedule:
    return rng.choice


def in_turn(rng: random.Random) -> Schedule:
    """Round robin."""
    last: dict[Ready, int] = {}
    count = 0

    def choose(ready: list[Ready]) -> Ready:
        nonlocal count
        count += 1
        chosen = min(ready, key=lambda each: last.get(each, 0))
        last[chosen] = count
        return chosen

    return choose


def sticky(rng: random.Random) -> Schedule:
    """Stays with one as long as it is ready, or nearly so."""
    chosen: list[Ready] = [None]
    leaves = rng.choice((0.0, 0.02, 0.1))

    def choose(ready: list[Ready]) -> Ready:
        if chosen[0] not in ready or rng.random() < leaves:
            chosen[0] = rng.choice(ready)
        return chosen[0]

    return choose


def newest(rng: random.Random) -> Schedule:
    """The one that became ready last."""
    since: dict[Ready, int] = {}
    count = 0

    def choose(ready: list[Ready]) -> Ready:
        nonlocal count
        count += 1
        for each in set(since) - set(ready):
            del since[each]
        for each in ready:
            since.setdefault(each, count)
        return max(ready, key=lambda each: since[each])

    return choose


def starved(rng: random.Random) -> Schedule:
    """Some get their turn only if nothing else is ready."""
    poor: dict[Ready, bool] = {}
    share, mercy = rng.choice((0.2, 0.4, 0.7)), rng.choice((0.0, 0.0, 0.01))

    def choose(ready: list[Ready]) -> Ready:
        for each in ready:
            if each not in poor:
                poor[each] = rng.random() < share
        rich = [each for each in ready if not poor[each]]
        return rng.choice(rich if rich and rng.random() >= mercy else ready)

    return choose


def weighted(rng: random.Random) -> Schedule:
    """Some are a thousand times as slow as others."""
    weights: dict[Ready, float] = {}

    def choose(ready: list[Ready]) -> Ready:
        for each in ready:
            if each not in weights:
                weights[each] = 10 ** rng.uniform(0, 3)
        return rng.choices(ready, [weights[each] for each in ready])[0]

    return choose


def ranked(rng: random.Random) -> Schedule:
    """One worker is far away: what it sends, or what is sent to it, comes last or first."""
    end, worst, is_last = rng.randrange(2), rng.randint(0, 4), rng.random() < 0.7

    def choose(ready: list[Ready]) -> Ready:
        far = [each for each in ready if (each[end] if isinstance(each, tuple) else each) == worst]
        near = [each for each in ready if each not in far]
        return rng.choice((near or far) if is_last else (far or near))

    return choose


def messages_first(rng: random.Random) -> Schedule:
    """No node works while a message is pending."""

    def choose(ready: list[Ready]) -> Ready:
        return rng.choice([each for each in ready if isinstance(each, tuple)] or ready)

    return choose


def work_first(rng: random.Random) -> Schedule:
    """No message arrives while a node has work."""

    def choose(ready: list[Ready]) -> Ready:
        return rng.choice([each for each in ready if not isinstance(each, tuple)] or ready)

    return choose


def changing(rng: random.Random) -> Schedule:
    """Any of these for a while, then another."""
    schedule = [at_random(rng)]

    def choose(ready: list[Ready]) -> Ready:
        if rng.random() < 0.02:
            schedule[0] = rng.choice(SIMPLE)(rng)
        return schedule[0](ready)

    return choose


SIMPLE = (at_random, in_turn, sticky, newest, starved, weighted, ranked, messages_first, work_first)
SCHEDULES = {make.__name__: make for make in (*SIMPLE, changing)}
UNEVEN = ("starved", "weighted", "sticky", "changing")
