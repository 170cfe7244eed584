"""A failing run made smaller: fewer faults, transactions, workers and odd limits, as long as it still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from headrace.config import Config
from headrace.sim.parameters import Faults, Parameters
from headrace.sim.run import RunReport, run

ATTEMPTS_MAX = 300

Tried = TypeVar("Tried")
Seen = TypeVar("Seen")


def shrink(parameters: Parameters, attempts_max: int = ATTEMPTS_MAX) -> tuple[Parameters, RunReport]:
    """The smallest failing run that was found, and its report. Its first violation begins with the same words."""
    return smallest(parameters, run, candidates, kind_of, attempts_max)


def smallest(
    tried: Tried,
    look: Callable[[Tried], Seen],
    candidates: Callable[[Tried], Iterator[Tried]],
    kind_of: Callable[[Seen], str],
    attempts_max: int,
) -> tuple[Tried, Seen]:
    """The smallest of the candidates, and of their candidates, that fails in the same way. `kind_of` returns "" for one
    that does not fail."""
    seen = look(tried)
    kind, attempts = kind_of(seen), 0
    is_smaller = bool(kind)
    while is_smaller:
        is_smaller = False
        for smaller in candidates(tried):
            attempts += 1
            if attempts > attempts_max:
                return tried, seen
            found = look(smaller)
            if kind_of(found) == kind:
                tried, seen, is_smaller = smaller, found, True
                break
    return tried, seen


def kind_of(report: RunReport) -> str:
    if report.is_clean:
        return ""
    words = report.violations[0].split()
    return " ".join(word for word in words[:12] if word.isalpha()) or "other"


def candidates(parameters: Parameters) -> Iterator[Parameters]:
    """All that are one step smaller."""
    replace: Callable[..., Parameters] = dataclasses.replace
    with_faults: Callable[..., Faults] = dataclasses.replace
    calm = Faults()
    for field in dataclasses.fields(Faults):
        usual = getattr(calm, field.name)
        if getattr(parameters.faults, field.name) != usual:
            yield replace(parameters, faults=with_faults(parameters.faults, **{field.name: usual}))
    for transactions in (1, 2, 3, 5, 8, parameters.transactions // 2, parameters.transactions - 1):
        if 0 < transactions < parameters.transactions:
            yield replace(parameters, transactions=transactions)
    if parameters.store == "objects":
        yield replace(parameters, store="files")
    if parameters.clients > 1:
        yield replace(parameters, clients=1)
    for workers in range(1, parameters.workers):
        yield replace(parameters, workers=workers)
    usual_config = Config(resend_us=20_000, silence_us_max=150_000, wall_limit_us=100_000)
    for field in dataclasses.fields(Config):
        usual = getattr(usual_config, field.name)
        if getattr(parameters.config, field.name) != usual:
            yield replace(parameters, config=dataclasses.replace(parameters.config, **{field.name: usual}))
    kept = tuple(range(parameters.transactions)) if parameters.only is None else parameters.only
    for size in (len(kept) // 2, len(kept) // 4, 1):
        for at in range(0, len(kept), size) if size else ():
            yield replace(parameters, only=kept[:at] + kept[at + size :])
    for field in dataclasses.fields(Faults):
        strength = getattr(parameters.faults, field.name)
        if type(strength) is int and strength > 1:
            yield replace(parameters, faults=with_faults(parameters.faults, **{field.name: strength - 1}))
