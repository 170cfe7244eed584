"""A root is done when all of its calls are, and an abort takes back all of them."""

from __future__ import annotations

import pytest

from headrace.core.coordinator import Coordinator
from tests.cluster import plant
from tests.core.scenario import check_scenario, played


def about_one(shares: set[int]) -> bool:
    """As published: floats, and a tolerance of 1e-9."""
    return sum(2.0**-share for share in shares) >= 1 - 1e-9


def test_b1_a_root_is_never_done_while_a_call_is_under_way() -> None:
    check_scenario("last_call_under_way")


def test_b1_with_floats_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "is_whole", about_one)
    answered = "deliver\n----\nbatch 0: "
    assert answered in played("last_call_under_way"), "answered, though the last call has not arrived"


def test_b3_a_late_sibling_of_a_call_that_failed_never_commits() -> None:
    check_scenario("late_sibling")


def test_b3_a_coordinator_that_did_not_count_messages_would_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_has_settled", lambda self, flight: len(flight.idle) == self.workers)
    answered = "deliver\n----\nbatch 0: "
    assert answered in played("late_sibling"), "answered, though a call of it is under way"
