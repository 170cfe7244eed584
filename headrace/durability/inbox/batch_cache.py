"""The worker's cache of batches. An epoch's message says where its rows are; the worker reads them itself."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.epoch import Batch
from headrace.core.program import Program
from headrace.durability.inbox.arrow_rows import Row
from headrace.durability.inbox.batch_calls import decode_stored, reread_calls
from headrace.durability.store import Store
from headrace.wire.messages import Run

CACHED_BATCHES_MAX = 4


class BatchCache:
    """Keeps the batches that a worker used last, as many epochs take rows from the same batch."""

    def __init__(self, store: Store, program: Program) -> None:
        self.store, self.program = store, program
        self._batches: dict[bytes, Batch] = {}

    def fill(self, run: Run) -> Run:
        """Returns the same message with its rows."""
        functions: list[int] = []
        keys: list[Any] = []
        args: list[Row] = []
        for stored, start, size in run.stored or ():
            batch = self._find(stored)
            functions += [entry.number for entry in batch.entries[start : start + size]]
            keys += batch.keys[start : start + size]
            args += batch.args[start : start + size]
        number = functions[0] if len(set(functions)) == 1 else functions
        return msgspec.structs.replace(run, functions=number, keys=keys, args=args, stored=None)

    def _find(self, stored: bytes) -> Batch:
        batch = self._batches.pop(stored, None)
        if batch is None:
            batch = reread_calls(self.store, decode_stored(stored), self.program)
            if len(self._batches) >= CACHED_BATCHES_MAX:
                del self._batches[next(iter(self._batches))]
        self._batches[stored] = batch  # the most recently used batch comes last
        return batch
