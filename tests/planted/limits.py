"""Mistakes that break the promises of the section "Limits"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Calls of a transaction are limited, awaited and one-way together.",
        "headrace/core/serial.py",
        "        transaction.calls_left -= 1\n",
        "",
    ),
    Mistake(
        "The number of waiting callers is limited, even if the function catches the error.",
        "headrace/core/serial.py",
        "if depth >= self.depth_max:",
        "if depth > self.depth_max:",
    ),
    Mistake(
        "Only the setting limits their depth, not Python's stack.",
        "headrace/core/serial.py",
        "if depth >= self.depth_max:",
        "if depth >= min(self.depth_max, 1_000):",
    ),
    Mistake(
        "The bytes of a transaction's values are limited, even if the function catches the error.",
        "headrace/core/contexts.py",
        "        return self.doomed(\n            LimitReached(",
        "        return (\n            LimitReached(",
    ),
    Mistake(
        "A function that exhausts memory or the stack aborts, with the code `poisoned`.",
        "headrace/core/raised.py",
        "    return code, name, issubclass(kind, MemoryError | RecursionError)",
        "    return code, name, issubclass(kind, MemoryError)",
    ),
    Mistake(
        "The message about a limit names the size and the setting.",
        "headrace/core/contexts.py",
        " calls in one transaction (calls_max)",
        " calls in one transaction",
    ),
    Mistake(
        "A setting out of its range is refused by name.",
        "headrace/config.py",
        "if not least <= value < 1 << 62:",
        "if not least <= value:",
    ),
)
