"""Calls that a user gives to the simulator: a Hypothesis strategy, or a function of a random generator.

A call is `(function, key, *args)`, as in `client.batch`. A strategy or a function gives one call, or a list of calls
that are made one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from headrace.errors import ModelError
from headrace.model.operator import Function
from headrace.sim.user_app import DrawCalls
from headrace.sim.workload import Call
from headrace.wire.values import shown

EXAMPLES = 150  # of a strategy, from which a run draws


def calls_from(given: Any) -> Callable[[int], DrawCalls]:
    """A function from the seed of a run to what draws its calls."""
    kind = type(given)
    if any(base.__name__ == "SearchStrategy" for base in kind.__mro__):
        return lambda seed: FromStrategy(given, seed)
    if callable(given) and not isinstance(given, Function):
        return lambda seed: lambda rng: as_calls(given(rng))
    raise ModelError(
        f"--calls takes a Hypothesis strategy, or a function of a random.Random, that gives (function, key, *args), "
        f"not {shown(given)}"
    )


def as_calls(drawn: Any) -> list[Call]:
    calls = drawn if isinstance(drawn, list) else [drawn]
    for call in calls:
        if not isinstance(call, tuple) or len(call) < 2 or not isinstance(call[0], Function | str):
            raise ModelError(f"--calls gave {shown(call)}; a call is (function, key, *args), as in client.batch")
    return calls


class FromStrategy:
    """Draws examples of a strategy for a seed, then calls from these. (Hypothesis gives no example twice; a run should
    make the same call again.)"""

    def __init__(self, strategy: Any, seed: int) -> None:
        self.strategy, self.seed = strategy, seed
        self.examples: list[list[Call]] = []

    def __call__(self, rng: random.Random) -> list[Call]:
        if not self.examples:
            self.examples = examples_of(self.strategy, self.seed)
        return rng.choice(self.examples)


def examples_of(strategy: Any, seed: int) -> list[list[Call]]:
    try:
        import hypothesis
    except ImportError:
        raise ModelError("--calls with a strategy needs Hypothesis: pip install hypothesis") from None
    found: list[list[Call]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(drawn: Any) -> None:
        found.append(as_calls(drawn))

    collect()
    if not found:
        raise ModelError("--calls gave no calls: its strategy is empty")
    return found
