"""Waiting for what another thread, process or store does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0  # only a hang takes this long
LONG_PATIENCE_S = 600.0  # where Spark or Kafka take part


def eventually(
    condition: Callable[[], Any], patience_s: float = PATIENCE_S, what: str = "it", pause_s: float = 0.005
) -> Any:
    """Wait until the condition holds, and return what it returned."""
    until_s = time.monotonic() + patience_s
    while not (held := condition()):
        assert time.monotonic() < until_s, f"{what} never came true"
        time.sleep(pause_s)
    return held
