"""The one clock. Whoever needs the time is handed this, or a stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def system_clock() -> Clock:
    """Microseconds since 1970, as the machine has it now; and from then on it never goes back."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000
