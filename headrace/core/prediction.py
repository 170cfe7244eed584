"""Prediction: call graphs that follow from a function's arguments (Styx 6.3, call-graph caching).

The first runs of a function are watched. If it always makes the same calls, to keys and with arguments that are its own
arguments, its own key or constants, its calls are predicted from then on: the callee's worker runs them at their place
without waiting for a message. Whoever runs the caller compares, and tells only what turned out otherwise. So a wrong
prediction costs time and never changes a result.

A *source* says where a value comes from: the number of an argument, SELF, or a constant in a list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.core.chain import Made, same
from headrace.core.program import Args, Entry
from headrace.wire.values import HIGH, LOW, Key

SELF = -1
CALLS_MAX = 8  # a function that makes more is not predicted

Source = int | list[Any]


class Template(NamedTuple):
    """One predicted call of a function."""

    n: int
    is_awaited: bool
    entry: Entry
    key: Source
    args: tuple[Source, ...]

    def fill(self, key: Key, args: Args) -> Made | None:
        """The call, if these arguments make a simple one."""
        target = value_of(self.key, key, args)
        kind = type(target)
        if not (kind is str and len(target) <= 64 and target.isascii()) and not (
            kind is int and target < HIGH and target > LOW
        ):
            return None
        given = tuple([value_of(source, key, args) for source in self.args])
        return (self.is_awaited, self.entry, target, given) if self.entry.fits(given) else None


Predictions = dict[Entry, list[Template]]


def value_of(source: Source, key: Key, args: Args) -> Any:
    if type(source) is list:
        return source[0]
    return key if source == SELF else args[source]  # type: ignore[index]


class Lessons:
    """What has been seen of one function."""

    def __init__(self, runs_watched: int) -> None:
        self.runs, self.runs_watched = 0, runs_watched
        self.calls: list[tuple[bool, Entry, list[Source], list[list[Source]]]] | None = None

    def note(self, key: Key, args: Args, made: list[Made]) -> bool | None:
        """One more run. True once its calls can be predicted, False once they cannot, None while it is not known."""
        self.runs += 1
        if self.calls is None:
            self.calls = [
                (is_awaited, entry, sources(target, key, args), [sources(value, key, args) for value in given])
                for is_awaited, entry, target, given in made
            ]
        elif not self._agrees(key, args, made):
            return False
        if not 0 < len(self.calls) <= CALLS_MAX:
            return False
        return True if self.runs >= self.runs_watched else None

    def _agrees(self, key: Key, args: Args, made: list[Made]) -> bool:
        assert self.calls is not None
        if len(made) != len(self.calls):
            return False
        for (was_awaited, was_entry, of_key, of_args), (is_awaited, entry, target, given) in zip(
            self.calls, made, strict=True
        ):
            if was_awaited != is_awaited or was_entry is not entry or len(of_args) != len(given):
                return False
            for possible, value in zip([of_key, *of_args], [target, *given], strict=True):
                possible[:] = [source for source in possible if fits(source, value, key, args)]
                if not possible:
                    return False
        return True

    def templates(self, function: Entry) -> list[list[Any]]:
        """As they travel."""
        assert self.calls is not None
        return [
            [function.number, n, is_awaited, entry.number, of_key[0], [possible[0] for possible in of_args]]
            for n, (is_awaited, entry, of_key, of_args) in enumerate(self.calls, start=1)
        ]


def sources(value: Any, key: Key, args: Args) -> list[Source]:
    """Where a value may come from, the likeliest first."""
    found: list[Source] = [at for at, arg in enumerate(args) if same(arg, value)]
    if same(key, value):
        found.append(SELF)
    found.append([value])
    return found


def fits(source: Source, value: Any, key: Key, args: Args) -> bool:
    if type(source) is int and source >= len(args):
        return False
    return same(value_of(source, key, args), value)


def read_templates(rows: list[Any], entries: list[Entry]) -> Predictions:
    predictions: Predictions = {}
    for function, n, is_awaited, entry, key, args in rows:
        template = Template(n, is_awaited, entries[entry], key, tuple(args))
        predictions.setdefault(entries[function], []).append(template)
    return predictions
