"""Random programs for property tests: those of `headrace/sim/programs.py`, each with a log of its calls."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from headrace.sim.programs import KEYS, Body, Interpreter, ProgramShape, Root, draw_bodies, draw_root, draw_shape

MANY = settings.default.max_examples  # type: ignore[union-attr]

interpreter = Interpreter("anything")
app = interpreter.app


class Program(NamedTuple):
    seed: int
    shape: ProgramShape
    keys: list[Any]
    bodies: list[Body]
    roots: list[Root]

    def calls(self) -> list[tuple[Any, ...]]:
        """Its log. From now on the functions of the app run its bodies."""
        interpreter.load(self.bodies, self.keys, self.shape.modulus)
        return [interpreter.call(root) for root in self.roots]


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    shape = draw_shape(rng, size_max=12)
    keys = rng.sample(KEYS, shape.keys)
    bodies = draw_bodies(rng, shape, keys)
    count = rng.randint(1, rng.choice((3, 10, 30, 60)))
    return Program(seed, shape, keys, bodies, [draw_root(rng, shape, keys) for _ in range(count)])


PROGRAMS = st.integers(0, 1 << 32).map(draw)
