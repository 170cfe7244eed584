"""Styx, section 7: a test for each claim about failures. Where Headrace departs from the paper on purpose, its
docstring says.

The largest departure: the input is not in somebody else's queue. Every epoch is in a log of our own before it is
answered, with all that decides its results, so a recovery needs nobody to send anything again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace import App, Context
from headrace.core.epoch import Epoch
from headrace.core.events import Lost, Responded, TakeSnapshot
from headrace.core.log_records import Intent
from headrace.core.snapshot_metadata import SequencingMetadata
from headrace.durability.log.log import read_log
from headrace.durability.recovery import OpenedStore
from headrace.errors import NotDeterministic
from headrace.sim.disk import SimStore
from headrace.wire.messages import Begin, Response, Run
from tests.cluster import looped, outcome
from tests.durability.hand import Hand, after_power_loss, drop, memory, put, turned, weather
from tests.durability.hand import app as machine
from tests.paper.items import add, app, bump, move, note, note_tid, point, read, touch

CALLS: list[Any] = [
    *((add, key, at) for at, key in enumerate("abcabc")),
    (move, "a", "b", 2),
    (move, "b", "c", 500),
    (bump, "c", "a"),
    (touch, "r", "x", "y"),
    (touch, "r", "y", "z"),
    (point, "p", "q"),
]


def logged(store: SimStore) -> list[Epoch]:
    """The epochs in the log, as far as it reaches back."""
    records = Hand(after_power_loss(store), app).opened_store.records
    batches: dict[int, Any] = {}
    decoded = [records.decode(each.number, each.data, batches).record for each in read_log(store, first=None)]
    return [record for record in decoded if isinstance(record, Epoch)]


# --- 7.1 Incremental snapshots and recovery ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("after", range(1, 5))
def test_a_snapshot_is_the_state_at_the_end_of_an_epoch(after: int, workers: int) -> None:
    """7.1: "Styx aligns snapshots with the completion of transaction epochs to take a consistent cut"."""
    store = memory()
    hand = Hand(store, app, workers, seed=after, epoch_transactions_max=3)
    for at in range(after):
        hand.send(f"batch{at}", CALLS[3 * at : 3 * at + 3])
    hand.take_snapshot()
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    assert loaded.manifest.epoch == after
    unseal = hand.core.program.values.unseal
    state = {(name, key): unseal(value) for name, table in loaded.tables.items() for key, value in table.items()}
    assert state == looped(CALLS[: 3 * after])[1]


def test_a_snapshot_holds_the_counters_and_where_in_the_input_it_stands() -> None:
    """7.1, Algorithm 1: offsets of input and output, epoch count, sequence count. Ours holds also what else the next
    epoch depends on: the last batch of each source, the request ids that are kept, the time."""
    hand = Hand(memory(), app, epoch_transactions_max=3)
    hand.now_us = 77
    hand.run("all", CALLS)
    hand.take_snapshot()
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    manifest = loaded.manifest
    metadata = manifest.metadata
    assert (manifest.epoch, manifest.position, metadata.sequencing) == (4, 5, SequencingMetadata(12, 12, 77))
    assert metadata.store.marks[-1][0] == 4, "the replies that are kept"
    assert metadata.ledger.oldest == 1


def written(hand: Hand, before: set[str]) -> int:
    """Entities in what the last snapshot added."""
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    objects = [stored for layer in loaded.manifest.layers for stored in layer.objects]
    return sum(stored.rows for stored in objects if stored.name not in before)


@pytest.mark.parametrize("workers", [0, 3])
def test_the_cost_of_a_snapshot_is_what_changed_since_the_last(workers: int) -> None:
    """7.1: O(N + c). A delta map has an entity once, however often it changed."""
    store = memory()
    hand = Hand(store, app, workers)
    hand.run("many", [(add, f"k{at}", 1) for at in range(300)])
    hand.take_snapshot()
    before = set(store.list("state/"))
    hand.run("few", [(add, f"k{at % 3}", 1) for at in range(90)])
    hand.take_snapshot()
    assert written(hand, before) == 3
    before = set(store.list("state/"))
    hand.run("none", [(read, "k1")])
    hand.take_snapshot()
    assert written(hand, before) == 0
    assert Hand(store, app, workers).state()["item", "k1"] == 31


@pytest.mark.parametrize("workers", [0, 2])
def test_transactions_go_on_while_a_snapshot_is_written(workers: int) -> None:
    """7.1: "asynchronously, allowing Styx to continue processing incoming transactions". What they change is not in
    it."""
    store = memory()
    hand = Hand(store, app, workers)
    hand.run("before", [(note, "a", 1), (add, "b", 1)])
    hand.submit(TakeSnapshot("token"))
    save = hand.hold_save()
    for at in range(5):
        assert hand.run(f"meanwhile{at}", [(note, "a", 2), (add, "b", 1)])[1].result == at + 2
    hand.rest.append(save)
    hand.settle()
    assert hand.snapshots == {"token": 1}
    loaded = hand.opened_store.snapshots.load()
    assert loaded is not None
    unseal = hand.core.program.values.unseal
    assert {key: unseal(value) for key, value in loaded.tables["item"].items()} == {"a": [1], "b": 1}
    assert Hand(store, app, workers).state() == {("item", "a"): [1, 2, 2, 2, 2, 2], ("item", "b"): 6}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_recovery_starts_from_the_latest_snapshot_that_was_completed_and_runs_only_what_came_after(
    workers: int,
) -> None:
    """7.1, recovery, and Algorithm 2. A snapshot that was not finished is as if it had never been begun."""
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=1)
    hand.run("covered", CALLS[:6])
    hand.take_snapshot()
    replies = hand.run("after", CALLS[6:])
    hand.submit(TakeSnapshot("token"))
    save = hand.hold_save()
    store.dies_at = store.operations + 1, "after"  # one object is written; the manifest never
    with pytest.raises(BaseException, match="memory"):
        hand.store_work.save(save.snapshot)
    found = after_power_loss(store)
    assert len(found.list("state/")) > len(found.list("snapshots/"))
    hand = Hand(found, app, workers)
    waiting = [item for item in hand.core.backlog if isinstance(item, Epoch)]
    flying = list(hand.core.backend.flights) if workers else []
    assert len(waiting) + len(flying) == 6, "those after the snapshot, each as it was"
    assert hand.run("after", CALLS[6:]) == replies
    assert hand.state() == looped(CALLS)[1]


def test_all_workers_have_begun_before_an_epoch_is_run_after_a_recovery() -> None:
    """7.1: "v) verifies that the cluster is healthy before executing a new epoch": on each channel the state comes
    first, and a worker that is not there yet gets nothing else."""
    store = memory()
    Hand(store, app, 3).run("all", CALLS)
    sent: dict[int, list[type]] = {}

    class Listening(Hand):
        def _apply(self, node: int, effects: list[Any]) -> None:
            for effect in effects if node == 0 else ():
                frame = getattr(effect, "frame", None)
                if frame is not None and frame.body is not None:
                    sent.setdefault(frame.to, []).append(type(frame.body))
            super()._apply(node, effects)

    hand = Listening(store, app, 3)
    hand.settle()
    assert sorted(sent) == [1, 2, 3]
    for bodies in sent.values():
        assert bodies[0] is Begin
        assert Run in bodies
        assert Begin not in bodies[bodies.index(Run) :]


@pytest.mark.parametrize("seed", range(3))
def test_compaction_merges_deltas_and_changes_nothing(seed: int) -> None:
    """7.1, Algorithm 1: "S = compact(S, delta)", with deletions, which the paper does not have."""
    rng = random.Random(seed)
    store = memory()
    hand = Hand(store, machine)
    calls: list[Any] = []
    for number in range(25):
        key = f"k{rng.randrange(6)}"
        calls.append((drop, key) if rng.random() < 0.3 else (put, key, number))
        hand.run(f"batch{number}", calls[-1:])
        hand.take_snapshot()
        loaded = hand.opened_store.snapshots.load()
        assert loaded is not None
        assert len(loaded.manifest.layers) < 8, "the deltas are merged"
    assert Hand(store, machine).state() == looped(calls)[1]


# --- 7.2 Sequencer recovery -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_recovery_the_sequence_is_the_one_observed_before_the_failure(
    workers: int, with_snapshot: bool
) -> None:
    """7.2: "the sequencer matches the epoch sizes to the ones recorded by the log". Ours are logged as they are, with
    their transactions: another epoch size, or other arrivals, change nothing."""
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2)
    hand.run("first", [(note_tid, "log")] * 3)
    if with_snapshot:
        hand.take_snapshot()
    hand = Hand(store, app, workers, epoch_transactions_max=5)
    before = hand.run("then", [(note_tid, "log")] * 6)
    assert [(reply.tid, reply.epoch) for reply in before] == [(4, 3), (5, 3), (6, 3), (7, 3), (8, 3), (9, 4)]
    for size in (1, 100):
        hand = Hand(store, app, workers, epoch_transactions_max=size)
        assert hand.run("then", [(note_tid, "log")] * 6) == before
        assert hand.state() == {("item", "log"): list(range(1, 10))}
    last = hand.run("last", [(note_tid, "log")])
    assert [(reply.tid, reply.epoch) for reply in last] == [(10, 5)], "and it goes on behind all that was given"


def test_an_epoch_is_in_the_log_with_its_size_before_any_of_it_is_answered() -> None:
    """7.2: "at the start of each epoch, Styx logs the number of transactions contained in that epoch"."""
    store = memory()
    hand = Hand(store, app, epoch_transactions_max=2)
    token = hand.send("all", CALLS[:5])
    hand.compute()
    assert not hand.replies
    hand.sync(2)
    hand.compute()
    assert [len(epoch) for epoch in logged(store)] == [2, 2]
    assert not hand.replies
    hand.sync()
    hand.compute()
    assert [len(epoch) for epoch in logged(store)] == [2, 2, 1]
    assert token in hand.replies


# --- 7.3 Exactly-once processing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("durable", range(7))
def test_the_mutations_of_a_transaction_are_reflected_exactly_once(durable: int, workers: int) -> None:
    """7.3, Lemma 7.1, by a failure after each record of the log, with clients that ask until they are answered."""
    store = memory()
    for _ in range(3):
        hand = Hand(store, app, workers, epoch_transactions_max=2)
        hand.send("all", CALLS)
        hand.compute()
        for _ in range(min(durable, len(hand.records))):
            hand.sync(1)
            hand.compute()
    hand = Hand(store, app, workers)
    assert [outcome(reply) for reply in hand.run("all", CALLS)] == looped(CALLS)[0]
    assert hand.state() == looped(CALLS)[1]


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("progress", [2, 5, 9, 14])
def test_a_transaction_that_a_failure_interrupts_is_run_again_as_a_whole(lost: int, progress: int) -> None:
    """7.3: "the complete transaction is re-executed ... except for resetting all TCP channels": what was under way in
    the old term is not heard in the new one."""
    hand = Hand(memory(), app, 3, seed=lost)
    token = hand.send("all", CALLS)
    for _ in range(progress):
        hand.deliver()
    under_way = {link: list(frames) for link, frames in hand.links.items() if frames}
    hand.submit(Lost(lost))
    for link, frames in under_way.items():  # they arrive once more, late
        hand.links[link].extend(frames)
    hand.settle()
    assert [outcome(reply) for reply in hand.replies[token]] == looped(CALLS)[0]
    assert hand.state() == looped(CALLS)[1]


# --- 7.4 Exactly-once output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(5))
def test_a_reply_is_written_to_the_output_once_however_many_were_there_before_the_failure(kept: int) -> None:
    """7.4, i to iv: the last output is compared with what is replayed, by TID, and is not written again. Ours are also
    compared: a replay that differs stops."""
    store = memory()
    hand = Hand(store, app, epoch_transactions_max=3)
    token = hand.send("all", CALLS)
    hand.compute()
    hand.sync()
    hand.compute()
    replies = hand.replies[token]
    for _ in range(kept):
        hand.work()
    for _ in range(2):
        hand = Hand(store, app)
        hand.settle()
    output = [hand.opened_store.records.decode_replies(record.data) for record in read_log(store, "replies")]
    assert [epoch.number for epoch in output] == [1, 2, 3, 4]
    assert [tid for epoch in output for tid in epoch.tids] == [reply.tid for reply in replies]
    assert hand.run("all", CALLS) == replies


def test_a_client_gets_its_reply_without_waiting_for_a_snapshot() -> None:
    """7.4: unlike where "clients can only retrieve responses after those are persisted in a snapshot"."""
    store = memory()
    assert Hand(store, app).run("a", [(add, "a", 1)])[0].result == 1
    assert store.list("snapshots/") == []
    assert Hand(store, app).run("a", [(add, "a", 1)])[0].result == 1


# --- 7.5 Non-deterministic functions ----------------------------------------------------------------------------------

chancy = App("chancy")
dice = chancy.operator("dice")


@dice.register
async def throw(ctx: Context, other: str) -> list[Any]:
    thrown = [ctx.random.random(), str(ctx.uuid()), str(ctx.now), await ctx.call(throw_once, other)]
    ctx.put([*ctx.get([]), thrown])
    return thrown


@dice.register
def throw_once(ctx: Context) -> list[Any]:
    thrown = [ctx.random.randrange(1 << 60), str(ctx.uuid())]
    ctx.put([*ctx.get([]), thrown])
    return thrown


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_random_numbers_are_the_same_when_they_are_drawn_again(before: int, after: int) -> None:
    """7.5, randomness. Departure: no number is logged; all follow from the store's seed, the TID and the call."""
    store = memory()
    calls: list[Any] = [(throw, key, other) for key in "abc" for other in "cde"]
    hand = Hand(store, chancy, before, now_us=1_000, seed=1, epoch_transactions_max=4)
    replies, state = hand.run("all", calls), hand.state()
    drawn = [reply.result[0] for reply in replies]
    assert len(set(drawn)) == len(drawn)
    hand = Hand(store, chancy, after, now_us=9_000_000, seed=2)
    assert hand.run("all", calls) == replies
    assert hand.state() == state
    other = Hand(memory(), chancy, before, now_us=1_000).run("all", calls)
    assert [reply.result[0] for reply in other] != drawn, "another store has another seed"


@dice.register
async def buy(ctx: Context, price: int) -> Any:
    ctx.put(await ctx.call_external("shop", ctx.key, price))
    return ctx.get()


chancy.external("shop", lambda key, *args: None)  # the tests answer in its place


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", [1, 2, 3])
def test_an_external_call_at_the_three_critical_points_of_figure_9(point: int, workers: int) -> None:
    """7.5. 1: the key is logged before the call. 2: so is the response, and a replay takes it from there. 3: a snapshot
    makes both superfluous. The call is made once all that comes before is final, so nobody else has to wait for it."""
    store = memory()
    hand = Hand(store, chancy, workers)
    hand.send("all", [(buy, "a", 5), (throw_once, "b")])
    hand.compute()
    assert not hand.performs, "1: not before the intent is durable"
    while hand.sync() or hand.work() or hand.deliver():
        pass
    (call,) = hand.performs
    assert (call.name, call.args) == ("shop", ("a", 5))
    if point > 1:
        hand.submit(Responded(call.call, "bread"))
        assert not hand.replies, "2: not before the response is durable"
        hand.settle()
        replies = hand.replies[0]
    if point > 2:
        hand.take_snapshot()
        hand.run("more", [(throw_once, "c")])
        hand.take_snapshot()
    hand = Hand(store, chancy, workers, snapshots_kept=1)
    while hand.sync() or hand.work() or hand.deliver():
        pass
    if point == 1:
        assert list(hand.performs) == [call], "called again, with the same key"
        return
    assert not hand.performs
    assert hand.run("all", [(buy, "a", 5), (throw_once, "b")]) == replies
    assert replies[0].result == "bread"
    if point > 2:
        hand.run("last", [(throw_once, "c")])
        hand.take_snapshot()
        kept = [
            hand.opened_store.records.decode(each.number, each.data, {}).record for each in read_log(store, first=None)
        ]
        assert not any(isinstance(record, Intent | Response) for record in kept), "3: they are gone from the log"


def test_a_function_that_depends_on_something_else_is_found_by_the_replay_and_named() -> None:
    """7.5: "Styx requires that the functions authored by developers are also deterministic". Here that is checked."""
    store = memory()
    Hand(store, machine).run("all", [(weather, "w")])
    with turned("rainy"), pytest.raises(NotDeterministic, match=r"item\.weather of 'w'"):
        Hand(store, machine).settle()


def test_a_store_is_opened_by_one_at_a_time() -> None:
    """Beyond section 7, which has one coordinator that never fails: whoever opens the store takes it over."""
    store = memory()
    first = Hand(store, app)
    first.send("a", [(add, "a", 1)])
    OpenedStore(store, app, first.config)
    with pytest.raises(Exception, match="another process has taken over"):
        first.settle()
    assert not first.replies
