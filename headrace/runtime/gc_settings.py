"""The garbage collector, in a process that is Headrace's own.

Epochs are kept for a while to answer repeated requests, and to look through them again and again, for cycles that are
not there, would stop everything for a tenth of a second at a time. What is there at the start stays; what comes later
is looked at while it is young.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 200_000  # between two looks at what is young


def settle() -> None:
    """To be called once the process has what it begins with."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 20, 50)
