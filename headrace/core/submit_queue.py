"""The queue between admission and sequencing: which of the waiting batches is taken first.

Rules:
1. A policy gives each batch a rank when it arrives. The lowest rank is taken first, and of equal ranks the one that
   arrived first.
2. Whatever the policy says, batches of one source are taken in the order in which they arrived: the next one is only
   valid after the one before.

Batches are logged in the order in which they are taken. So a policy decides the order of the log. It does not change
the results that a given log produces.

Never here: clocks. A policy decides by what it is given, so that a run can be repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.core.epoch import Batch
from headrace.core.origin import FromSource


class WaitingBatch(NamedTuple):
    arrival: int  # how many batches arrived before
    token: Any  # the driver's
    batch: Batch


Policy = Callable[[WaitingBatch], Any]
"""The rank of a batch that arrives. Ranks of one policy can be compared with each other."""


def first_come(waiting: WaitingBatch) -> int:
    """All ranks are equal: batches are taken as they arrive."""
    return 0


class SubmitQueue:
    def __init__(self, policy: Policy = first_come) -> None:
        self.policy = policy
        self.arrived = 0
        self._heap: list[tuple[Any, WaitingBatch]] = []  # by rank, then by arrival
        self._ranks: dict[str, Any] = {}  # by source: the rank of its last batch, while any batch waits

    def put(self, token: Any, batch: Batch) -> None:
        waiting = WaitingBatch(self.arrived, token, batch)
        self.arrived += 1
        rank = self.policy(waiting)
        if isinstance(batch.origin, FromSource):
            rank = self._ranks[batch.origin.source] = max(rank, self._ranks.get(batch.origin.source, rank))
        heapq.heappush(self._heap, (rank, waiting))

    def take(self) -> WaitingBatch:
        """The next batch. Call it while `len` is not 0."""
        _, waiting = heapq.heappop(self._heap)
        if not self._heap:
            self._ranks.clear()
        return waiting

    def __len__(self) -> int:
        return len(self._heap)
