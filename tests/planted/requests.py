"""Mistakes that break the promises of the section "Requests"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A bad request is refused, and the rest of its batch runs.",
        "headrace/core/admission.py",
        "                refused[position] = failure_of(error)\n",
        "                raise\n",
    ),
    Mistake(
        "A refused request gets no TID.",
        "headrace/core/engine.py",
        "        submission = Submission.of(token, batch)\n",
        "        submission = Submission.of(token, batch)\n"
        "        self.sequencing.sequencer.lc += len(batch.refused)\n",
    ),
    Mistake(
        "A repeated request id never runs twice and gets an equal reply.",
        "headrace/core/ledger.py",
        "if len(set(ids)) < len(ids) or any(map(self.find, ids)):",
        "if any(map(self.find, ids)):",
    ),
    Mistake(
        "A request id with another call is refused and changes nothing.",
        "headrace/core/engine.py",
        "all(same_renewed(one, other, values) for one, other in zip(known, now, strict=True))",
        "known == now",
    ),
    Mistake(
        "A batch sent again with its request id gets the same replies.",
        "headrace/core/ledger.py",
        "if ids in self.runs or ids in self.stems:",
        "if ids in self.stems:",
    ),
    Mistake(
        "`raise_any` raises the first failure of a batch, with its row, function and key.",
        "headrace/runtime/client.py",
        "row = min(self.failures)",
        "row = max(self.failures)",
    ),
    Mistake(
        "One request id from many threads runs once.",
        "headrace/core/ledger.py",
        "if row is None or row < self.epochs[0].first:",
        "if row is None or not self.epochs[0].first <= row < self.epochs[-1].first:",
    ),
    Mistake(
        "A request id is kept for at least the retention, as far as the maximum number of ids allows.",
        "headrace/core/ledger.py",
        "if epoch.phase != FINAL or (self.kept <= self.rows_max and now_us - epoch.closed_us <= self.retention_us):",
        "if epoch.phase != FINAL:",
    ),
    Mistake(
        "Memory for request ids is bounded.",
        "headrace/core/ledger.py",
        "if self.kept * 8 <= self.rows_max * 9 and (",
        "if self.kept * 8 <= self.rows_max * 9 or (",
    ),
)
