"""Holes that were found in the published Styx, each as the sentence that must hold here, with a schedule that fails on
the mistake. Where it is cheap, the mistake is planted to show that.

The numbers are those of the list of holes, B1 to B16. Those about recovery and snapshots come last.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import random
import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import Abort, App, Config, Context
from headrace.core.channel import Channels
from headrace.core.coordinator import Coordinator, Lost, Rescale, Rescaled
from headrace.core.ordered import chains
from headrace.core.ordered.executor import OrderedExecutor
from headrace.core.sequencing import TID_MAX, Sequencer
from headrace.durability.reading.store_reader import StoreReader
from headrace.errors import BadMessage
from headrace.runtime.inprocess import Runtime
from headrace.wire.codec import decode_frame, encode
from headrace.wire.messages import Final, Made, Run, Traffic
from headrace.wire.values import Values
from tests.cluster import Cluster, check_like_the_loop, exactly, looped, on, outcome, plant
from tests.durability.hand import Hand, after_power_loss, memory
from tests.waiting import eventually

app = App("holes")
thing = app.operator("thing")
seen: list[Any] = []  # what functions saw while they ran, also in runs that came to nothing


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


@thing.register
def send_add(ctx: Context, to: str, amount: int) -> None:
    ctx.call_async(add, to, amount)


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


# --- B2: drift is noticed on every worker -----------------------------------------------------------------------------


@thing.register
def go(ctx: Context, pointer: str) -> None:
    ctx.call_async(follow, pointer)


@thing.register
def follow(ctx: Context) -> None:
    ctx.call_async(add, ctx.get(), 1)


OLD, NEW, POINTER = on(3, "old"), on(3, "new"), on(2, "pointer")
INCREMENTS: list[Any] = [(send_put, on(3), POINTER, NEW)] + [(go, on(1, f"root{at}"), POINTER) for at in range(10)]


def moved() -> dict[Any, Any]:
    """Ten increments through a pointer that a lower TID moves, after all ten have run."""
    cluster = Cluster(app, 3)
    cluster.run([(put, POINTER, OLD)])
    cluster.hold((3, 2))
    cluster.send(INCREMENTS)
    cluster.deliver_all()
    cluster.release()
    cluster.settle()
    return cluster.state()


def test_b2_ten_increments_through_a_moved_pointer_are_ten() -> None:
    assert moved() == {("thing", POINTER): NEW, ("thing", NEW): 10}
    check_like_the_loop(app, [(put, POINTER, OLD), *INCREMENTS], predict_after_runs=1)


def test_b2_if_only_the_roots_worker_looked_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    check = OrderedExecutor._check

    def check_own(self: Any, part: Any, record: Any) -> None:
        if part.owner(record.order[0]) == self.me:
            check(self, part, record)

    monkeypatch.setattr(OrderedExecutor, "_check", check_own)
    assert moved().get(("thing", NEW)) != 10


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


# --- B4: where epochs end does not matter -----------------------------------------------------------------------------


@thing.register
async def both(ctx: Context, a: str, c: str) -> Any:
    ctx.put((await ctx.call(read, a), await ctx.call(read, c)))
    return ctx.get()


A, B, C = on(1, "a"), on(2, "b"), on(3, "c")
SKEW: list[Any] = [(put, A, 0), (put, C, 0), (send_put, B, A, 1), (both, B, A, C), (send_put, B, C, 1), (read, B)]


@pytest.mark.parametrize("transactions_max", range(1, 7))
def test_b4_where_epochs_end_does_not_matter(transactions_max: int) -> None:
    """T1 a=1; T2 b=(a, c); T3 c=1: as published b is (1, 1) in one epoch and (1, 0) in two."""
    assert looped(SKEW)[0][3] == ("ok", (1, 0))
    for in_flight in (1, 3):
        ways = {"epoch_transactions_max": transactions_max, "epochs_in_flight_max": in_flight, "predict_after_runs": 1}
        check_like_the_loop(app, SKEW, workers=(1, 3), seeds=range(4), **ways)


# --- B5: nothing is lost, nothing repeated ----------------------------------------------------------------------------

LOSABLE: list[Any] = [(send_add, on(1 + at % 3, f"r{at}"), on(1 + at % 2, "hot"), 1) for at in range(8)] + SKEW


@pytest.mark.parametrize("copy_after", [1, 1_000], ids=["often copied", "never copied"])
@pytest.mark.parametrize("worker", [1, 3])
def test_b5_a_worker_lost_at_any_moment_loses_and_repeats_nothing(worker: int, copy_after: int) -> None:
    """As published, a transaction that was put off to the next epoch was skipped by the offsets of a snapshot. Here no
    epoch leaves one behind, and a copy of the state stands between two epochs."""
    expected, state = looped(LOSABLE)
    at, is_over = 0, False
    while not is_over:
        cluster = Cluster(app, 3, seed=at, epoch_transactions_max=5, replay_transactions_max=copy_after)
        cluster.settle()
        cluster.send(LOSABLE[:9], LOSABLE[9:])
        is_over = not all(cluster.deliver() for _ in range(at))
        cluster.submit(Lost(worker))
        cluster.settle()  # which asserts that no submission is answered twice
        assert [outcome(reply) for token in (0, 1) for reply in cluster.replies[token]] == expected, f"after {at} steps"
        assert cluster.state() == state, f"after {at} steps"
        cluster.check_left_behind()
        at += 2
    assert at > 40


# --- B9: TIDs have room, and an end -----------------------------------------------------------------------------------


@thing.register
def note_tid(ctx: Context, to: str) -> int:
    ctx.call_async(put_tid, to)
    return ctx.tid


@thing.register
def put_tid(ctx: Context) -> None:
    ctx.put([*ctx.get([]), ctx.tid])


@pytest.mark.parametrize("first", [(1 << 31) - 2, (1 << 32) - 2, (1 << 53) - 2, TID_MAX - 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_b9_tids_beyond_31_bits_are_what_they_are(first: int, workers: int) -> None:
    for seed in range(4):
        cluster = Cluster(app, workers, seed=seed)
        cluster.coordinator.sequencing.sequencer = Sequencer(lc=first - 1)
        tids = list(range(first, first + 5))
        replies = cluster.run([(note_tid, on(1 + at % 3), on(2, "to")) for at in range(5)])
        assert [reply.tid for reply in replies] == [reply.result for reply in replies] == tids
        assert cluster.state() == {("thing", on(2, "to")): tids}


def test_b9_there_is_no_tid_beyond_63_bits() -> None:
    sequencer = Sequencer(lc=TID_MAX - 2)
    with pytest.raises(OverflowError, match="does not fit into 63 bits"):
        sequencer.take(3)
    assert list(sequencer.take(2)) == [TID_MAX - 1, TID_MAX], "what was refused has taken nothing"
    with pytest.raises(OverflowError):
        sequencer.take(1)
    cluster = Cluster(app, 3)
    cluster.coordinator.sequencing.sequencer = sequencer
    with pytest.raises(OverflowError):
        cluster.send([(add, on(1), 1)])
    assert not cluster.bodies(Run), "and nothing has run under another one"


# --- B13: values are what they were -----------------------------------------------------------------------------------


@app.record
@dataclasses.dataclass
class Point:
    x: Any
    y: tuple[int, ...]


@app.record
class Name(msgspec.Struct):
    text: str


VALUES: list[Any] = [
    *((), (1, (2, [3, (4,)])), [(1,), [1]], {"k": (1,), 7: b"7", b"b": {}}, b"", b"\xc1", "é", "1", 1, True, 1.0, None),
    *(0.0, -0.0, float("nan"), (1 << 64) - 1, -(1 << 63), decimal.Decimal("1.10"), uuid.UUID(int=5)),
    *(datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)),
    *(Point((1, 2), (3,)), Name("n"), [Point(Name("in"), ()), (True, 1, 1.0)]),
]


@thing.register
async def pass_on(ctx: Context, to: str, value: Any) -> Any:
    """Carried as an argument, as state, as an answer and as a result; awaited and one-way."""
    ctx.call_async(put, ctx.key, value)
    await ctx.call(put, to, value)
    return await ctx.call(read, to)


def test_b13_values_keep_their_types_over_workers_recovery_and_rescale() -> None:
    calls = [(pass_on, on(1, f"from{at}"), on(2, f"to{at}"), value) for at, value in enumerate(VALUES)]
    expected, state = looped(calls)
    assert list(map(repr, expected)) == [repr(("ok", value)) for value in VALUES]
    cluster = Cluster(app, 3, seed=13, replay_transactions_max=1, entities_per_frame_max=3)
    assert list(map(repr, cluster.results(calls))) == list(map(repr, VALUES))
    for event in (Lost(1), Rescale("wider", 5), Lost(4), Rescale("narrower", 2), Lost(2)):
        cluster.submit(event)
        cluster.settle()
        assert exactly(cluster.state()) == exactly(state), f"after {event}"
        again = cluster.results([(read, to) for _, _, to, _ in calls])
        assert list(map(repr, again)) == list(map(repr, VALUES)), f"after {event}"
    assert [effect.workers for effect in cluster.others if isinstance(effect, Rescaled)] == [5, 2]


@pytest.mark.parametrize("keys", [[1, "1", b"1", -1], [0, 1 << 63, -(1 << 63), ""]], ids=["alike", "at the edges"])
def test_b13_keys_keep_their_types_over_recovery_and_rescale(keys: list[Any]) -> None:
    calls = [(add, key, at + 1) for at, key in enumerate(keys)]
    cluster = Cluster(app, 3, seed=1)
    cluster.run(calls)
    for event in (Rescale("wider", 4), Lost(2), Rescale("narrower", 1)):
        cluster.submit(event)
        cluster.settle()
        assert exactly(cluster.state()) == exactly(looped(calls)[1]), f"after {event}"


# --- B14: nothing is shared -------------------------------------------------------------------------------------------


@thing.register
def spoil(ctx: Context, given: list[Any]) -> list[Any]:
    """Changes what it was given, and what it has read, and keeps and returns both."""
    given.append(ctx.get(0))
    ctx.put(len(given))
    return given


@thing.register
async def share_out(ctx: Context, keys: list[str]) -> Any:
    given: list[Any] = ["given"]
    for key in keys:
        ctx.call_async(spoil, key, given)
        ctx.call_async(spoil, key, given)
    answer = await ctx.call(spoil, keys[-1], given)
    answer.append("changed by the caller")
    keys.append("changed")
    given.append("changed afterwards")
    return [given, answer, keys]


SHARED: list[Any] = [(share_out, on(worker, f"r{at}"), [A, B, C]) for at in range(3) for worker in (1, 2, 3)]
SHARED += [(send_put, on(2), A, 7), (share_out, on(1), [A, A]), (read, A), (read, C)]


def test_b14_sibling_calls_callers_and_second_runs_share_nothing() -> None:
    check_like_the_loop(app, SHARED, workers=(1, 2, 3), predict_after_runs=2)


def test_b14_values_that_were_shared_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[bytes, Any] = {}
    decode = Values.decode
    monkeypatch.setattr(Values, "decode", lambda self, data: known.setdefault(data, decode(self, data)))
    cluster = Cluster(app, 2, slice_calls_max=10)
    cluster.settle()
    cluster.send(SHARED)
    for _ in range(60):  # each run spoils what the next one sees: it may never end
        cluster.deliver()
    assert list(map(outcome, cluster.replies.get(0, ()))) != looped(SHARED)[0]


# --- B15: a cut frame is refused, and the channel stays in step -------------------------------------------------------


def test_b15_a_frame_cut_at_any_byte_is_refused_and_the_channel_stays_in_step() -> None:
    bodies = [Final(1), Traffic(2, [Made(1, b"\x01", 3, "key", (1, "text"), 0, 0, 0)]), Final(3)]
    here, there = Channels(1, Config()), Channels(2, Config())
    frames = [encode(here.send(0, 2, body).frame) for body in bodies]
    for at in range(len(frames[1])):
        with pytest.raises(BadMessage):
            decode_frame(frames[1][:at])
    for spoilt in (frames[1] + b"\x00", frames[1] * 2, b"\xc1" + frames[1]):
        with pytest.raises(BadMessage):
            decode_frame(spoilt)
    arrived = there.receive(0, decode_frame(frames[0])) + there.receive(0, decode_frame(frames[2]))
    assert arrived == bodies[:1], "the last one has to wait: one before it is missing"
    for send in here.upkeep(Config().resend_us):
        arrived += there.receive(1, decode_frame(encode(send.frame)))
    assert arrived == bodies
    assert there.peer(1).received == 3


class CuttingCluster(Cluster):
    """Every third frame, of any kind, arrives cut at a random byte."""

    def __init__(self, seed: int) -> None:
        self.rng, self.refused = random.Random(seed), 0
        super().__init__(app, 3, seed=seed, epoch_transactions_max=4)
        choose = self.choose
        self.choose = lambda ready: self.cut(choose(ready))

    def cut(self, chosen: Any) -> Any:
        if isinstance(chosen, tuple) and self.rng.randrange(3) == 0:
            self.links[chosen][0] = self.links[chosen][0][: self.rng.randrange(len(self.links[chosen][0]))]
        return chosen

    def deliver(self) -> bool:
        try:
            return super().deliver()
        except BadMessage:
            self.refused += 1
            return True


@pytest.mark.parametrize("seed", range(4))
def test_b15_epochs_end_as_ever_while_frames_are_cut(seed: int) -> None:
    cluster = CuttingCluster(seed)
    assert list(map(outcome, cluster.run(LOSABLE))) == looped(LOSABLE)[0]
    assert cluster.state() == looped(LOSABLE)[1]
    assert cluster.refused > 10


# --- B16: a run sees its own writes, also the second time -------------------------------------------------------------


@thing.register
async def rewrite(ctx: Context, other: str) -> list[Any]:
    """Reads what it wrote: at once, after an await, and after a call that came back to the same entity."""
    trace = [ctx.get(0)]
    ctx.put(trace[0] * 10)
    trace.append(ctx.get())
    trace.append(await ctx.call(call_back, other, ctx.key))
    trace.append(ctx.get())
    ctx.put(ctx.get() + 2)
    trace.append(ctx.get())
    seen.append(trace[0])
    return trace


@thing.register
async def call_back(ctx: Context, to: str) -> int:
    return int(await ctx.call(add, to, 1))


def rewritten() -> list[Any]:
    """The entity's value changes below a transaction that has run."""
    cluster = Cluster(app, 3)
    cluster.run([(put, A, 1)])
    seen.clear()
    cluster.hold((2, 1))
    cluster.send([(send_put, B, A, 5), (rewrite, A, C), (read, A)])
    cluster.deliver_all()
    cluster.release()
    cluster.settle()
    assert seen[0] == 1, "it ran too early"
    return [reply.result for reply in cluster.replies[1]]


def test_b16_a_run_sees_its_own_writes_also_when_it_runs_again() -> None:
    assert rewritten() == [None, [5, 50, 51, 51, 53], 53]
    assert set(seen) == {1, 5}


def test_b16_a_run_that_did_not_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(records: Any, at: int, tid: int, aborted: set[int]) -> Any:
        others = [records[0], *(record for record in records[1:at] if record.order[0] != tid)]
        return value_before(others, len(others), tid, aborted)

    value_before = chains.value_before
    plant(monkeypatch, "value_before", of_others)
    assert rewritten() != [None, [5, 50, 51, 51, 53], 53]


# --- B5 to B8, B10 to B13: snapshots and recovery ---------------------------------------------------------------------

COUNT: list[Any] = [(add, "n", 1)] * 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ran", range(4))
def test_b5_a_snapshot_loses_no_transaction_that_has_not_run(ran: int, workers: int) -> None:
    """Epochs of two: some have run when it is taken, others wait, and the last row is not even in a closed one. Only
    those that ran are in it; it says that the others are still to be read."""
    store = memory()
    hand = Hand(store, app, workers, epoch_transactions_max=2, epoch_interval_us=1_000, epochs_in_flight_max=1)
    hand.send("five", COUNT)
    hand.sync()
    for _ in range(40):
        if hand.core.last is not None and hand.core.last.number >= ran:
            break
        hand.deliver()
    hand.core.journal.wanted.append("token")
    while (hand.deliver() or hand.sync() or hand.work()) and "token" not in hand.snapshots:
        pass
    hand = Hand(store, app, workers)
    assert [reply.result for reply in hand.run("five", COUNT)] == [1, 2, 3, 4, 5]
    assert hand.state() == {("thing", "n"): 5}


def test_b6_snapshots_go_on_after_an_idle_hour(tmp_path: Path) -> None:
    """The thread that writes them waits for work, however long that takes."""
    now_us = [0]
    with Runtime(app, clock=lambda: now_us[0], store=tmp_path) as runtime:
        for number in range(1, 8):
            now_us[0] += 3_600_000_000
            runtime.client.call(add, "n", 1)
            assert runtime.snapshot() == {"epoch": number}
    manifests = StoreReader(tmp_path, app).snapshots.manifests()
    assert {manifest.epoch for manifest in manifests} >= {5, 6, 7}


@pytest.mark.parametrize("workers", [0, 2])
def test_b7_a_second_failure_before_the_next_snapshot_restores_what_the_first_did(workers: int) -> None:
    store = memory()
    hand = Hand(store, app, workers)
    replies = hand.run("five", COUNT)
    hand.take_snapshot()
    hand.run("more", COUNT)
    for _ in range(3):
        hand = Hand(store, app, workers)
        hand.compute()
    assert hand.state() == {("thing", "n"): 10}
    assert hand.run("five", COUNT) == replies
    assert hand.run("again", COUNT)[0].tid == 11


def test_b8_compaction_goes_by_epoch_and_not_by_name() -> None:
    """Nine, ten, eleven: as text, "9" comes after "11"."""
    store = memory()
    hand = Hand(store, app)
    for epoch in range(1, 25):
        hand.run(f"batch{epoch}", [(put, "a", epoch), (put, f"b{epoch % 3}", epoch)])
        hand.take_snapshot()
        assert hand.opened.snapshots.compact(hand.opened.log.term, hand.opened.fingerprint) is None, "done by now"
        again = Hand(after_power_loss(store), app)
        assert not again.core.backlog, "nothing is replayed"
        assert again.state()["thing", "a"] == epoch
        assert again.state()["thing", f"b{epoch % 3}"] == epoch
    assert hand.opened.snapshots.manifests()[-1].layers[0].epoch > 1, "some were folded"


@pytest.mark.parametrize("workers", [0, 2])
def test_b10_a_recovery_before_the_first_record_ends(workers: int) -> None:
    store = memory()
    for _ in range(3):
        hand = Hand(store, app, workers)
        hand.settle()
    assert hand.state() == {}
    assert hand.run("five", COUNT)[4].result == 5


class Slow:
    """A store whose syncs, or snapshots, wait until they are let go."""

    def __init__(self, store: Any, operation: str, prefix: str) -> None:
        self.store, self.url, self.can_append = store, store.url, store.can_append
        self.operation, self.prefix = operation, prefix
        self.go, self.reached = threading.Event(), threading.Event()

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self.store, operation)
        if operation != self.operation:
            return method

        def wait(name: str, *rest: Any) -> Any:
            if name.startswith(self.prefix):
                self.reached.set()
                assert self.go.wait(30)
            return method(name, *rest)

        return wait


def test_b11_nothing_is_acknowledged_before_it_is_synced_and_b12_nobody_waits_for_the_disk_but_replies() -> None:
    """The engine takes in and runs what comes while the log is synced. Whoever asks for state gets it after that."""
    store = Slow(memory(), "sync", "log/")
    with Runtime(app, store=store) as runtime:  # type: ignore[arg-type]
        first = runtime.client.submit("first", [(add, "n", 1)], wait=False)
        assert store.reached.wait(30)
        second = runtime.client.submit("second", [(add, "n", 1)], wait=False)
        eventually(lambda: runtime.metrics()["committed"] >= 2, pause_s=0.001)
        assert not first.done()
        assert not second.done()
        assert store.store.disk.worst().files.keys() == store.store.disk.files.keys()
        store.go.set()
        assert [future.result(30).results for future in (first, second)] == [[1], [2]]
        assert runtime.state("thing") == {"n": 2}


def test_b12_calls_are_answered_while_a_snapshot_is_written() -> None:
    store = Slow(memory(), "create", "snapshots/")
    with Runtime(app, Config(snapshot_interval_us=1), store=store) as runtime:  # type: ignore[arg-type]
        assert runtime.client.call(add, "n", 1) == 1
        assert store.reached.wait(30)
        assert [runtime.client.call(add, "n", 1) for _ in range(20)] == list(range(2, 22))
        assert runtime.state("thing") == {"n": 21}
        store.go.set()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("folds", [False, True], ids=["one snapshot", "folded"])
def test_b13_types_survive_a_snapshot(workers: int, folds: bool) -> None:
    odd: list[Any] = [(1, 2), [(), {"a": (b"x",)}], b"\xc1", -0.0, 1 << 63, None, decimal.Decimal("1.0"), True]
    store = memory(can_append=False)
    hand = Hand(store, app, workers)
    hand.run("values", [(put, f"k{at}", value) for at, value in enumerate(odd)])
    for number in range(9 if folds else 1):
        hand.run(f"other{number}", [(put, "other", number)])
        hand.take_snapshot()
    hand = Hand(store, app, workers)
    state = hand.state()
    assert [repr(state["thing", f"k{at}"]) for at in range(len(odd))] == list(map(repr, odd))
