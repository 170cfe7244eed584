"""The state at an epoch, as an onlooker reads it, against what the runtime itself had at that epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import App, Config, Context, Runtime
from headrace.durability.columns import join
from headrace.durability.log.changelog import Changelog
from headrace.durability.reading.views import CHANGES, REPLAY, SNAPSHOT, EpochEnd, View
from headrace.durability.store import DirectoryStore
from headrace.errors import BadRequest, StoreError
from tests.waiting import eventually

NEVER = Config(snapshot_interval_us=1 << 60, replay_transactions_max=1 << 60)


def app_with(changes: bool) -> App:
    app = App("bank")
    account = app.operator("account", changes=changes)
    app.operator("empty")

    @account.register
    def add(ctx: Context, amount: int) -> int:
        balance: int = ctx.get(0) + amount
        if balance:
            ctx.put(balance)
        else:
            ctx.delete()
        return balance

    return app


def run(runtime: Runtime, epochs: list[tuple[str, int]]) -> dict[int, dict[Any, Any]]:
    """Each call an epoch; the state after each."""
    seen = {}
    for key, amount in epochs:
        runtime.client.call("account.add", key, amount)
        seen[runtime.metrics()["epochs"]] = dict(runtime.state("account"))
    return seen


def read(view: View, moment: EpochEnd, **given: Any) -> dict[Any, Any]:
    print = view.app_fingerprint(moment)
    view.check(print)
    rows = [
        row
        for within in view.ranges(moment, view.scan(moment, print), 3, given.get("keys"))
        for found in view.read(moment, print, within, **given)
        for row in zip(join(found.keys), join(found.states), strict=True)
    ]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


CALLS = [("a", 5), ("b", 7), ("a", -5), ("c", 1), ("b", 1), ("a", 2), ("d", 4), ("c", -1)]


@pytest.mark.parametrize(("changes", "with_app", "how"), [(True, False, CHANGES), (False, True, REPLAY)])
def test_any_epoch_after_a_snapshot_can_be_read(tmp_path: Path, changes: bool, with_app: bool, how: str) -> None:
    app = app_with(changes)
    with Runtime(app, NEVER, store=tmp_path) as runtime:
        seen = run(runtime, CALLS[:3])
        runtime.snapshot()
        base = max(seen)
        seen |= run(runtime, CALLS[3:])
        runtime.client.call("account.add", "z", 1)  # so that all before it is surely kept
        if changes:
            wait_for_changes(tmp_path, max(seen))
        view = View(DirectoryStore(tmp_path), "account", app if with_app else None)
        for epoch in range(base, max(seen) + 1):
            moment = view.at(epoch)
            assert moment.how == (SNAPSHOT if epoch == base else how)
            assert read(view, moment) == seen[epoch], epoch
            assert read(view, moment, keys=["a", "c", "nobody"]) == {
                key: value for key, value in seen[epoch].items() if key in ("a", "c")
            }


def wait_for_changes(where: Path, epoch: int) -> None:
    """They are in the store a little after they were answered."""
    eventually(lambda: Changelog(DirectoryStore(where)).bounds()[1] >= epoch)


def test_with_a_changelog_the_newest_moment_is_the_last_epoch(tmp_path: Path) -> None:
    with Runtime(app_with(True), NEVER, store=tmp_path) as runtime:
        view = View(DirectoryStore(tmp_path), "account")
        seen = run(runtime, CALLS[:4])  # before there is any snapshot
        wait_for_changes(tmp_path, max(seen))
        moment = view.newest()
        assert (moment.how, moment.snapshot_id) == (CHANGES, None)
        assert read(view, moment) == seen[moment.epoch] == seen[max(seen)]
        runtime.snapshot()
        seen |= run(runtime, CALLS[4:])
        wait_for_changes(tmp_path, max(seen))
        moment = view.newest()
        assert moment.how == CHANGES
        assert read(view, moment) == seen[max(seen)]


def test_without_one_it_is_the_newest_snapshot(tmp_path: Path) -> None:
    with Runtime(app_with(False), NEVER, store=tmp_path) as runtime:
        seen = run(runtime, CALLS[:3])
        view = View(DirectoryStore(tmp_path), "account")
        with pytest.raises(BadRequest, match="no snapshot yet"):
            view.newest()
        with pytest.raises(BadRequest, match="has no snapshot of epoch 2; it has snapshots of epochs none"):
            view.at(2)
        runtime.snapshot()
        run(runtime, CALLS[3:])
        assert read(view, view.newest()) == seen[max(seen)]
    assert view.newest().epoch == len(CALLS)


def test_an_epoch_that_cannot_be_read_says_which_can(tmp_path: Path) -> None:
    with Runtime(app_with(False), NEVER, store=tmp_path) as runtime:
        for call in CALLS:
            run(runtime, [call])
            if call[1] > 3:  # after epochs 1, 2 and 7; three are kept
                runtime.snapshot()
        run(runtime, CALLS)
    view = View(DirectoryStore(tmp_path), "account")
    with pytest.raises(BadRequest, match=r"older than the oldest snapshot .* of epoch 2"):
        view.at(1)
    with pytest.raises(BadRequest, match=r"epochs 2, 7, 16.*option\(\"app\".*changes=True"):
        view.at(5)
    with pytest.raises(BadRequest, match="no epoch 99: the last one so far is 16"):
        view.at(99)


def test_a_snapshot_that_was_retired_meanwhile_says_so(tmp_path: Path) -> None:
    with Runtime(app_with(False), NEVER, store=tmp_path) as runtime:
        run(runtime, CALLS[:1])
        runtime.snapshot()
        view = View(DirectoryStore(tmp_path), "account")
        moment = view.newest()
        print = view.app_fingerprint(moment)
        for call in CALLS[1:6]:
            run(runtime, [call])
            runtime.snapshot()
    with pytest.raises(
        StoreError, match=r"has been deleted in the meantime; there are snapshots of epochs .*Load the table again"
    ):
        list(view.read(moment, print))


def test_an_operator_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    with Runtime(app_with(False), NEVER, store=tmp_path) as runtime:
        run(runtime, CALLS[:1])
    view = View(DirectoryStore(tmp_path), "acount")
    with pytest.raises(BadRequest, match="no operator 'acount'; it has: account, empty"):
        view.check(view.app_fingerprint(view.newest()))
    view = View(DirectoryStore(tmp_path), "empty")
    assert read(view, view.newest()) == {}


def test_entities_past_their_time_are_not_there(tmp_path: Path) -> None:
    app = App("bank")
    session = app.operator("session", ttl=10, changes=True)
    tick = app.operator("tick")

    @session.register
    def visit(ctx: Context) -> None:
        ctx.put("here")

    @tick.register
    def beat(ctx: Context) -> None:
        ctx.put(1)

    clock = [1_000_000]
    with Runtime(app, NEVER, clock=lambda: clock[0], store=tmp_path) as runtime:
        runtime.client.call(visit, "early")
        clock[0] += 6_000_000
        runtime.client.call(visit, "late")
        runtime.snapshot()
        view = View(DirectoryStore(tmp_path), "session")
        moment = view.newest()
        assert {key for found in view.read(moment, view.app_fingerprint(moment)) for key in join(found.keys)} == {
            "early",
            "late",
        }
        clock[0] += 5_000_000
        runtime.client.call(beat, "x")
        runtime.snapshot()
        moment = view.newest()
        assert {key for found in view.read(moment, view.app_fingerprint(moment)) for key in join(found.keys)} == {
            "late"
        }
        assert set(runtime.state(session)) == {"late"}
