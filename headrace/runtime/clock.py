"""The clock. All code that needs the time gets it as an argument, and tests pass their own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def system_clock() -> Clock:
    """Microseconds since 1970, starting from the machine's time. It never goes back."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1_000
