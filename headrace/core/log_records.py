"""What the log holds: epochs, batches of sources, and notes about transactions.

An `Epoch` and a source's `Batch` are records as they are (core/epoch.py). The notes are known only while an epoch runs:
a decree, the intent to call an external system, and its `Response` (wire/messages.py); or when it runs again after a
crash: `Accepted`.
"""

from __future__ import annotations

import msgspec

from headrace.core.epoch import Batch, Epoch
from headrace.wire.messages import Failure, Response


class Decree(msgspec.Struct, frozen=True, tag="decree"):
    """These transactions abort, whatever their functions do in a rerun."""

    failures: dict[int, Failure]  # by TID


class Intent(msgspec.Struct, frozen=True, tag="intent"):
    """An external call is about to be made."""

    tid: int
    call: str  # which of the transaction's calls
    name: str
    digest: str  # of its arguments


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The logged replies of these transactions stand: a recovery gave other ones, wrote the same, and was allowed to go
    on."""

    epoch: int
    differences: dict[int, str]  # by TID: what was answered, and what the second run gave


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """From now on only snapshots of this epoch or later are used: what only older ones need may be deleted."""

    epoch: int


Note = Decree | Intent | Response | Accepted | Retired
Record = Epoch | Batch | Note
