"""Changes: what an epoch has made of the entities of operators that log them, from its start to its end.

Rules:
1. It is the net change: before is the state at the epoch's start, after that at its end, MISSING where there was none.
   What happened in between, and what an abort put back, is not seen.
2. An entity stands there at most once. It may stand there though its state is the same, and the order is anybody's:
   who keeps the changes leaves such entities out, and puts the others in order.
3. Changes decide no result. They are made again whenever the epoch is run again.

Never here: how they are kept, who reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.wire.values import Key


class OperatorChanges(NamedTuple):
    """Of one operator, in columns; the states are sealed."""

    keys: list[Key]
    befores: list[Any]
    afters: list[Any]


Changes = dict[str, OperatorChanges]  # by operator
