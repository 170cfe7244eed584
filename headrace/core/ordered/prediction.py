"""Prediction: call graphs that follow from a function's arguments (Styx 6.3, call-graph caching).

The first runs of a function are watched. If it always makes the same calls, to keys and with arguments that are its own
arguments, its own key or constants, its calls are predicted from then on: the callee's worker runs them at their place
without waiting for a message. The caller's worker compares, and sends only what differs. So a wrong prediction costs
time and never changes a result.

A *source* says where a value comes from: the number of an argument, SELF, or a constant in a list.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from headrace.core import order
from headrace.core.ordered.chains import Made, OrderedBinding, same_args
from headrace.core.signature import Args, never
from headrace.wire.values import HIGH, LOW, Key, same

SELF = -1
CALLS_MAX = 8  # a function that makes more is not predicted

Source = int | list[Any]


class Template:
    """One predicted call of a function."""

    __slots__ = (
        "args",
        "binding",
        "constant",
        "fits",
        "is_awaited",
        "is_bare",
        "is_fit",
        "is_simple",
        "key",
        "n",
        "needs",
        "places",
    )

    def __init__(self, n: int, is_awaited: bool, binding: OrderedBinding, key: Source, args: list[Source]) -> None:
        self.n, self.is_awaited, self.binding, self.key, self.args = n, is_awaited, binding, key, args
        self.places: dict[int, bytes] = {}  # by the root's worker
        self.constant: Args | None = None  # the arguments, if none of them depends on the call
        if all(type(source) is list for source in args):
            self.constant = tuple([source[0] for source in args])  # type: ignore[index]
        # What `partition_by` makes of a key may be an error, which not all workers know: such calls are not predicted.
        self.fits = binding.fits if binding.placed is None else never
        self.is_bare = self.fits(())  # it takes no arguments
        self.is_fit = self.constant is not None and self.fits(self.constant)
        self.needs = 1 + max(
            [SELF, *(source for source in (key, *args) if type(source) is int)]
        )  # arguments of the caller
        self.is_simple = self.is_fit and type(key) is int and key >= 0  # only the key depends on the call

    def place(self, worker: int) -> bytes:
        """The call's place if this worker has the root."""
        place = self.places.get(worker)
        if place is None:
            at = order.awaited if self.is_awaited else order.sent
            place = self.places[worker] = at(order.ROOT, self.n, worker)
        return place

    def at(self, worker: int, args: Args) -> tuple[bytes, OrderedBinding, Key, Args]:
        """A simple call, and its place if this worker has the root."""
        return self.places.get(worker) or self.place(worker), self.binding, args[self.key], self.constant  # type: ignore[index,return-value]

    def fill(self, key: Key, args: Args) -> Made | None:
        """The call that these arguments make, if any. It depends on nothing else, so all workers agree."""
        if len(args) < self.needs:
            return None
        if self.is_simple:
            target = args[self.key]  # type: ignore[index]
            if type(target) is int and target < HIGH and target > LOW:
                return (self.is_awaited, self.binding, target, self.constant)  # type: ignore[return-value]
        source = self.key
        target = args[source] if type(source) is int and source >= 0 else value_of(source, key, args)
        if type(target) is int:
            if target >= HIGH or target <= LOW:
                return None
        elif type(target) is not str or len(target) > 64 or not target.isascii():
            return None
        if self.is_fit:
            return (self.is_awaited, self.binding, target, self.constant)  # type: ignore[return-value]
        given = tuple([value_of(source, key, args) for source in self.args])
        return (self.is_awaited, self.binding, target, given) if self.fits(given) else None

    def gives(self, key: Key, args: Args, binding: OrderedBinding, target: Key, given: Args) -> bool:
        """Is this certainly the call that `fill` gives? Fast: compares the key only by identity."""
        source = self.key
        if binding is not self.binding or self.is_awaited or len(args) < self.needs:
            return False
        if type(source) is not int or source < 0 or args[source] is not target:
            return False
        if self.constant is None or self.constant or given:
            made = self.fill(key, args)
            return made is not None and same_args(made[3], given)
        return (
            target < HIGH and target > LOW
            if type(target) is int
            else type(target) is str and len(target) <= 64 and target.isascii()
        ) and self.is_bare


Predictions = dict[OrderedBinding, list[Template]]


def owners_of_predicted(templates: list[Template], args: list[Args]) -> list[int | None] | None:
    """For a column of calls of a function that makes just one simple call: the worker that each of these goes to, None
    where it is not known. So most rows of other workers can be skipped."""
    if len(templates) != 1 or not templates[0].is_simple or min(map(len, args), default=0) < templates[0].needs:
        return None
    targets = list(map(itemgetter(templates[0].key), args))
    if set(map(type, targets)) != {int} or max(targets) >= HIGH or min(targets) <= LOW:  # other types may be equal
        return None
    return list(map(templates[0].binding.owners.get, targets))


def value_of(source: Source, key: Key, args: Args) -> Any:
    if type(source) is list:
        return source[0]
    return key if source == SELF else args[source]  # type: ignore[index]


class Lessons:
    """What was seen in the runs of one function."""

    def __init__(self, runs_watched: int) -> None:
        self.runs, self.runs_watched = 0, runs_watched
        self.calls: list[tuple[bool, OrderedBinding, list[Source], list[list[Source]]]] | None = None

    def note(self, key: Key, args: Args, made: list[Made]) -> bool | None:
        """Add a run. True once its calls can be predicted, False once they cannot, None while that is open."""
        self.runs += 1
        if self.calls is None:
            self.calls = [
                (is_awaited, binding, sources(target, key, args), [sources(value, key, args) for value in given])
                for is_awaited, binding, target, given in made
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
        for (was_awaited, was_binding, of_key, of_args), (is_awaited, binding, target, given) in zip(
            self.calls, made, strict=True
        ):
            if was_awaited != is_awaited or was_binding is not binding or len(of_args) != len(given):
                return False
            for possible, value in zip([of_key, *of_args], [target, *given], strict=True):
                possible[:] = [source for source in possible if fits(source, value, key, args)]
                if not possible:
                    return False
        return True

    def templates(self, function: OrderedBinding) -> list[list[Any]]:
        """The templates as they are sent."""
        assert self.calls is not None
        return [
            [function.number, n, is_awaited, binding.number, of_key[0], [possible[0] for possible in of_args]]
            for n, (is_awaited, binding, of_key, of_args) in enumerate(self.calls, start=1)
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


def read_templates(rows: list[Any], bindings: list[OrderedBinding]) -> Predictions:
    predictions: Predictions = {}
    for number, n, is_awaited, binding, key, args in rows:
        template = Template(n, is_awaited, bindings[binding], key, args)
        predictions.setdefault(bindings[number], []).append(template)
    for function, templates in list(predictions.items()):
        templates.sort(key=lambda template: template.n)
        if [template.n for template in templates] != list(range(1, len(templates) + 1)):
            del predictions[function]
    return predictions
