"""Exhaustive blows: at every effect of a coordinator, and at every operation of its store, one run for each."""

from __future__ import annotations

import os

import pytest

from headrace.sim.recoveries import RECOVERIES, WAYS, RecoveryScenario, strike_everywhere

STRIDE = int(os.environ.get("HEADRACE_STRIDE", "5"))  # every fifth point; HEADRACE_STRIDE=1 looks at all of them


@pytest.mark.parametrize("recovery", RECOVERIES, ids=lambda recovery: recovery.name)
def test_a_blow_at_any_point_is_survived(recovery: RecoveryScenario) -> None:
    wrong, struck, count = {}, 0, 0
    for way, point, report in strike_everywhere(recovery, STRIDE):
        count += 1
        struck += any("coordinator" in fault or fault == "power lost" for fault in report.faults)
        if not report.is_clean:
            wrong[way, point] = report.violations[:2]
    assert wrong == {}
    assert count > 40 // STRIDE
    assert struck >= count - 1


def test_every_way_is_tried() -> None:
    assert {way for recovery in RECOVERIES for way in recovery.ways} == set(WAYS)
    assert len(RECOVERIES) >= 10
