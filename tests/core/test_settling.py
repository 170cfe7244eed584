"""A root is done when all of its calls are, and an abort takes back all of them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Abort, App, Context
from headrace.core.coordinator import Coordinator
from tests.cluster import Cluster, on, plant

app = App("settling")
thing = app.operator("thing")


@thing.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@thing.register
def put(ctx: Context, value: Any) -> None:
    ctx.put(value)


@thing.register
def read(ctx: Context) -> Any:
    return ctx.get()


@thing.register
def send_put(ctx: Context, to: str, value: Any) -> None:
    ctx.call_async(put, to, value)


# --- B1: shares are exact ---------------------------------------------------------------------------------------------


@thing.register
def bounce(ctx: Context, keys: list[str], last: str, left: int) -> None:
    """To and fro; one of the two calls of each level ends at once, and the last one lies elsewhere."""
    ctx.call_async(add, ctx.key, 1)
    if left:
        ctx.call_async(bounce, keys[left % 2], keys, last, left - 1)
    else:
        ctx.call_async(add, last, 1)


def about_one(shares: set[int]) -> bool:
    """As published: floats, and a tolerance of 1e-9."""
    return sum(2.0**-share for share in shares) >= 1 - 1e-9


def bounced() -> Cluster:
    """A lone transaction of which everything has happened but its very last call."""
    keys, last = [on(1), on(2)], on(3)
    cluster = Cluster(app, 3)
    cluster.settle()
    cluster.hold((1, 3), (2, 3))
    cluster.send([(bounce, keys[0], keys, last, 60)])
    cluster.deliver_all(until_answered=True)
    return cluster


def test_b1_a_root_is_never_done_while_a_call_is_under_way() -> None:
    cluster = bounced()
    assert not cluster.replies
    cluster.release()
    cluster.settle()
    assert cluster.replies[0][0].ok
    assert cluster.state()["thing", on(3)] == 1


def test_b1_with_floats_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "is_whole", about_one)
    assert bounced().replies, "answered, though the last call has not arrived"


# --- B3: an abort is atomic -------------------------------------------------------------------------------------------


@thing.register
def fail(ctx: Context) -> None:
    raise Abort("no")


@thing.register
def fail_and_write(ctx: Context, failing: str, written: str) -> None:
    ctx.call_async(fail, failing)
    ctx.call_async(put, written, "never")


def aborted() -> Cluster:
    """One call has failed and everybody knows; its sibling has not arrived. The next epoch is on its way."""
    cluster = Cluster(app, 3)
    cluster.settle()
    cluster.hold((1, 3))
    cluster.send([(fail_and_write, on(1), on(2), on(3)), (read, on(3))])
    cluster.send([(read, on(3)), (send_put, on(2), on(1), "next")])
    cluster.deliver_all(until_answered=True)
    return cluster


def test_b3_a_late_sibling_of_a_call_that_failed_never_commits() -> None:
    cluster = aborted()
    assert not cluster.replies
    cluster.release()
    cluster.settle()
    assert [reply.status for reply in cluster.replies[0]] == ["aborted", "ok"]
    assert [cluster.replies[token][at].result for token, at in ((0, 1), (1, 0))] == [None, None]
    assert cluster.state() == {("thing", on(1)): "next"}
    cluster.check_left_behind()


def test_b3_a_coordinator_that_did_not_count_messages_would_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_has_settled", lambda self, flight: len(flight.idle) == self.workers)
    assert aborted().replies, "answered, though a call of it is under way"
