"""The progress of an epoch on a worker, with its message counts per channel."""

from __future__ import annotations

from typing import Any

from headrace.core.epoch import Epoch
from headrace.core.epoch_changes import Changes
from headrace.wire.messages import Entities, Failure, Gather, Need, Run


class Progress:
    def __init__(self, run: Run | None, workers: int) -> None:
        self.run = run
        self.sent = [0] * (workers + 1)
        self.received = [0] * (workers + 1)
        self.is_reported = False
        self.report_at_us: int | None = None  # when a delayed report is due
        self.shares: set[int] | None = None  # of a lone epoch: what this worker holds
        self.mine: list[int] = []  # TIDs of own roots
        self.result: tuple[list[Any], dict[int, Failure]] | None = None  # in the serial mode
        self.later: list[tuple[Any, Any]] = []  # and changes of deferred and expiring state
        self.changes: Changes = {}  # in the serial mode
        self.digest: bytes | None = None  # in the serial mode
        self.needs: list[Need] = []  # external calls without a response
        self.epoch: Epoch | None = None  # in the serial mode, while it waits for one
        self.gather: Gather | None = None  # its stretch that is being gathered
        self.awaited: dict[int, int] = {}  # by worker: how many state messages the gatherer still waits for
        self.lent_early: list[tuple[int, Any]] = []  # before this worker's `Gather` came
        self.installed: Entities = []  # a stretch's changes, until all of them are here
        self.told = 0  # rows of the stretch whose outcomes the coordinator knows
        self.late = 0  # entities requested while the stretch ran
