"""Mistakes that break the promises of the section "Maintaining a store"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A store can be read while the app runs.",
        "headrace/durability/reading/store_reader.py",
        'first = bounds(self.store, "log")[0]',
        'first = Log.take_over(self.store, "log").first',
    ),
    Mistake(
        "State can be read at any epoch that the store reaches.",
        "headrace/durability/reading/store_reader.py",
        "loaded = self.load(epoch if before is None else before)",
        "loaded = self.load(before)",
    ),
    Mistake(
        "A restored store continues from its epoch and knows its request ids.",
        "headrace/durability/reading/store_reader.py",
        "ledger=LedgerMetadata(first)",
        "ledger=LedgerMetadata(replay.epoch + 1)",
    ),
    Mistake(
        "`headrace verify` names functions whose results differ from what was answered.",
        "headrace/cli/replay.py",
        "data = encode([result, None if failure is None",
        "data = encode([None if failure is None",
    ),
    Mistake(
        "A broken record stops the start; a repair cuts it off.",
        "headrace/durability/log/store_repair.py",
        'if bounds(store, "replies")[1] + reader.epoch0 > last:',
        'if bounds(store, "replies")[1] + reader.epoch0 < epoch:',
    ),
)
