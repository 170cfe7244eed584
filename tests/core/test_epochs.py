"""Where epochs end does not matter, and the next one does not wait for the last."""

from __future__ import annotations

import pytest

from headrace.core.epoch import Batch
from headrace.core.events import Read
from headrace.core.origin import FromClient, FromSource
from tests.cluster import Cluster, check_like_the_loop, looped
from tests.core.scenario import check_scenario
from tests.core.things import SKEW, app


@pytest.mark.parametrize("transactions_max", range(1, 7))
def test_b4_where_epochs_end_does_not_matter(transactions_max: int) -> None:
    """T1 a=1; T2 b=(a, c); T3 c=1: as published b is (1, 1) in one epoch and (1, 0) in two."""
    assert looped(SKEW)[0][3] == ("ok", (1, 0))
    for in_flight in (1, 3):
        ways = {"epoch_transactions_max": transactions_max, "epochs_in_flight_max": in_flight, "predict_after_runs": 1}
        check_like_the_loop(app, SKEW, workers=(1, 3), seeds=range(4), **ways)


def test_the_next_epoch_starts_while_the_last_one_settles() -> None:
    check_scenario("next_epoch_starts")


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_a_call_is_answered_though_clients_read_all_the_time(readers: int) -> None:
    cluster = Cluster(app, 2)
    for _ in range(readers):
        cluster.submit(Read("state"))
    cluster.send([SKEW[0]])
    reads = 0
    while not cluster.replies and reads < 1_000:
        assert cluster.deliver()
        cluster.now_us += 50
        if cluster.found:
            cluster.found.clear()
            reads += 1
            cluster.submit(Read("state"))  # whoever has read reads again at once
    assert cluster.replies, f"no answer in {reads} reads"


def test_a_batch_cannot_be_changed() -> None:
    batch = Batch(FromSource("", "s", 0), [], [], [])
    for name, value in (("origin", FromClient("")), ("ids", "x"), ("keys", [])):
        with pytest.raises(AttributeError):
            setattr(batch, name, value)
    with pytest.raises(AttributeError):
        batch.origin.number = 1  # type: ignore[misc,union-attr]
