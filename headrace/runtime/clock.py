"""The one clock. Whoever needs the time is handed this, or a stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def system_clock() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000
