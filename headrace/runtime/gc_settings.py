"""Settings of Python's garbage collector, for processes that belong to Headrace.

Epochs are kept for a while to answer repeated requests. Searching them again and again for cycles, of which there are
none, would stop the process for a tenth of a second each time. Objects that exist at the start are never searched;
later ones are searched while they are young.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 200_000  # between two collections of young objects


def freeze_gc() -> None:
    """Call this once the process has loaded what it starts with."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 20, 50)
