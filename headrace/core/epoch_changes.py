"""Changes: what an epoch changed in the entities of operators that log their changes.

Rules:
1. A change is a net change: from the state at the epoch's start to that at its end, MISSING where there is none.
   States in between, and writes that an abort undid, do not show.
2. An entity appears at most once, in any order, and may appear though its state is the same. The code that keeps the
   changes drops such entities and sorts the others.
3. Changes decide no result. They are computed again whenever the epoch runs again.

Never here: how they are stored, what reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.wire.values import Key


class OperatorChanges(NamedTuple):
    """The changes of one operator, as columns; states are sealed."""

    keys: list[Key]
    befores: list[Any]
    afters: list[Any]


Changes = dict[str, OperatorChanges]  # by operator
