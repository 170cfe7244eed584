"""Many writers of one log: what each of them was promised is in it for ever."""

from __future__ import annotations

import os
from collections import Counter

from headrace.sim.writers import Writers, simulate_writers

MANY = int(60 * float(os.environ.get("HEADRACE_EXAMPLES", "1")))


def test_what_was_promised_is_kept_whoever_takes_over() -> None:
    faults: Counter[str] = Counter()
    promised = 0
    for seed in range(MANY):
        writers = Writers(seed)
        assert writers.run() == [], seed
        faults.update(writers.faults)
        promised += len(writers.promised)
    assert promised > 20 * MANY
    for kind in ("appends: Fenced", "takes over: Fenced", "power lost", "store full", "flipped bits", "unsynced holes"):
        assert faults[kind], kind


def test_a_seed_repeats_itself() -> None:
    for seed in range(5):
        lines: list[list[str]] = [[], []]
        for each in lines:
            Writers(seed, each.append).run()
        assert lines[0] == lines[1]
        assert simulate_writers(seed) == []
