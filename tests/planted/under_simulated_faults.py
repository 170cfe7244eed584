"""Mistakes that break the promises of the section "Under simulated faults"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "With disks that lose, tear, refuse and flip data, every reply and the final state are those of a loop over the"
        " log.",
        "headrace/durability/log/frames.py",
        "if crc != _CRC.unpack_from(",
        "if kind != RECORD and crc != _CRC.unpack_from(",
    ),
    Mistake(
        "A kill, a power loss, a pause or a takeover is survived at any effect and any operation of the store, in "
        "recoveries too.",
        "headrace/durability/log/takeover.py",
        "proven = frame.number if frame.end <= segment.header.sealed else frame.synced",
        "proven = frame.number",
    ),
    Mistake(
        "What a log has promised is kept, whichever writer takes over.",
        "headrace/durability/log/log.py",
        "            self._check_fence()\n        except ObjectMissing as error:",
        "        except ObjectMissing as error:",
    ),
    Mistake(
        "Planted bugs are caught.",
        "headrace/sim/run.py",
        "world.violations += check_history(",
        "_ = check_history(",
    ),
)
