"""Frames that are old, misplaced, of the wrong shape or make no sense are refused or ignored, and harm nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace import App, Context
from headrace.core import order
from headrace.core.events import Lost, Received
from headrace.errors import BadMessage, HeadraceError
from headrace.wire.codec import decode_frame, encode
from headrace.wire.messages import (
    AnsweredAll,
    Begin,
    Final,
    Frame,
    Gather,
    Idle,
    Made,
    Run,
    Show,
    Shown,
    Traffic,
    TransactionAborted,
)
from tests.cluster import Cluster, exactly, looped, on, outcome

app = App("bad_frames")
node = app.operator("node")


def part_of(key: Any) -> Any:
    """A `partition_by` that does not do for every key."""
    if key == "raises":
        raise RuntimeError("no part")
    return {"no key": 1.5, "none": None, "huge": "x" * (2 << 20)}.get(key, key.split("/")[0])


parted = app.operator("parted", partition_by=part_of)
A, B, C = on(1, "a"), on(2, "b"), on(3, "c")
RING = [A, B, C]


@node.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


@node.register
def spread(ctx: Context, amount: int) -> int:
    for key in RING:
        ctx.call_async(add, key, amount)
    return add.body(ctx, amount)  # type: ignore[no-any-return]


@parted.register
def keep(ctx: Context, value: Any) -> None:
    ctx.put(value)


GOOD: list[Any] = [(spread, A, 1), (spread, B, 10), (add, C, 100), (spread, C, 1_000), (keep, "k/1", 1)]


def hand_over(cluster: Cluster, source: int, to: int, body: Any) -> HeadraceError | None:
    """A message in its turn on its channel, as if the source had sent it: what does the other one say?"""
    sender = (cluster.coordinator if source == 0 else cluster.workers[source]).channels
    frame = decode_frame(encode(sender.send(cluster.now_us, to, body).frame))
    try:
        cluster._step(to, Received(frame))
    except HeadraceError as error:
        return error
    return None


def check_unharmed(cluster: Cluster, before: list[Any]) -> None:
    """It goes on as if nothing had been."""
    assert list(map(outcome, cluster.run(GOOD))) == looped(before + GOOD)[0][len(before) :]
    assert exactly(cluster.state()) == exactly(looped(before + GOOD)[1])
    cluster.check_left_behind()


def running() -> Cluster:
    """An epoch has run, and another one is on its way."""
    cluster = Cluster(app, 3)
    cluster.run(GOOD)
    cluster.hold((3, 0))
    cluster.send(GOOD)
    cluster.deliver_all()
    assert len(cluster.replies) == 1
    return cluster


@pytest.mark.parametrize("seed", range(6))
def test_frames_of_an_old_term_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(app, 3, seed=seed)
    cluster.run(GOOD)
    cluster.submit(Lost(2))
    cluster.send(GOOD)
    old = [frame for frame in cluster.sent if frame.term == 1]
    assert {type(frame.body) for frame in old} >= {Begin, Run, Idle, Traffic, Final}
    while cluster.deliver():
        frame = rng.choice(old)
        cluster._step(frame.to, Received(frame))
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)


@pytest.mark.parametrize("seed", range(6))
def test_frames_that_come_twice_or_too_early_or_to_another_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(app, 3, seed=seed)
    cluster.run(GOOD)
    cluster.send(GOOD)
    while cluster.deliver():
        frame = rng.choice(cluster.sent)
        newer = Frame(frame.term + 1, 1 + frame.to % 3, frame.to, 1, 0, Final(1))
        astray = Frame(frame.term, frame.source, (frame.to + 1) % 4, frame.sequence, 0, frame.body)
        early = [decode_frame(frames[-1]) for frames in cluster.links.values() if frames]
        for wrong in (frame, newer, *early):
            cluster._step(wrong.to, Received(wrong))
        cluster._step(frame.to, Received(astray))
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)


def rows_of(frame: bytes, rows: Any) -> bytes:
    """The same frame with other rows."""
    message = msgspec.msgpack.decode(frame)
    message["body"]["rows"] = rows
    return msgspec.msgpack.encode(message)


ROW = [0, 1, b"\x01", 0, "k", [], 0, 0, 0]  # a call, as it travels
BAD_ROWS: dict[str, Any] = {
    "no list": 7,
    "a number for a row": [7],
    "an empty row": [[]],
    "of an unknown kind": [[99, *ROW[1:]]],
    "of no kind": [[None, *ROW[1:]]],
    "cut short": [ROW[:5]],
    "with one thing too many": [[*ROW, 1]],
    "a text for a TID": [[0, "1", *ROW[2:]]],
    "a number for a place": [[0, 1, 1, *ROW[3:]]],
    "a text for a function": [[*ROW[:3], "add", *ROW[4:]]],
    "a number for arguments": [[*ROW[:5], 1, *ROW[6:]]],
    "a failure that is none": [[3, 1, b"\x01", "no failure"]],
}


@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_of_the_wrong_shape_is_refused_when_it_is_decoded(rows: Any) -> None:
    frame = encode(Frame(1, 1, 2, 1, 0, Traffic(1, [Made(1, b"\x01", 0, "k", (), 0, 0, 0)])))
    assert decode_frame(rows_of(frame, [ROW])) == decode_frame(frame)
    with pytest.raises(BadMessage):
        decode_frame(rows_of(frame, rows))


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an unknown body": lambda m: m["body"].update(type="gossip"),
    "a body without its kind": lambda m: m["body"].pop("type"),
    "another frame": lambda m: m.update(type="calls"),
    "a field too many": lambda m: m.update(more=1),
    "a field too many in the body": lambda m: m["body"].update(more=1),
    "a field missing": lambda m: m.pop("sequence"),
    "a text for the term": lambda m: m.update(term="1"),
    "a list for a body": lambda m: m.update(body=[1]),
    "a text for the epoch": lambda m: m["body"].update(epoch="1"),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_frame_of_an_unknown_kind_or_shape_is_refused(spoil: Any) -> None:
    message = msgspec.msgpack.decode(encode(Frame(1, 0, 1, 1, 0, Final(1))))
    assert decode_frame(msgspec.msgpack.encode(message)) == Frame(1, 0, 1, 1, 0, Final(1))
    spoil(message)
    with pytest.raises(BadMessage):
        decode_frame(msgspec.msgpack.encode(message))


def test_every_frame_of_a_run_is_refused_when_it_is_cut() -> None:
    cluster = running()
    kinds: dict[Any, Frame] = {type(frame.body): frame for frame in cluster.sent}
    assert set(kinds) >= {Begin, Run, Idle, Traffic, Final}
    for frame in kinds.values():
        data = encode(frame)
        for at in range(len(data)):
            with pytest.raises(BadMessage):
                decode_frame(data[:at])


IDLE = Idle(2, [0] * 4, [0] * 4, [], {}, [], {}, [])
MISPLACED: dict[str, tuple[int, int, Any]] = {
    "a worker gets a report": (0, 1, IDLE),
    "a worker gets shown state": (0, 1, Shown(1, [])),
    "a worker begins a term": (2, 1, Begin([1], 1, 1, [])),
    "a worker gives an epoch": (2, 1, Run(9, "ordered", (1, 1, 1), 0, [], [], None, [], [])),
    "a worker ends an epoch": (2, 1, Final(2)),
    "a worker has a stretch gathered": (2, 1, Gather(2, 6, 6, 1, [])),
    "a worker asks for state": (2, 1, Show(1)),
}


@pytest.mark.parametrize("what", MISPLACED.values(), ids=MISPLACED)
def test_a_message_from_somebody_who_may_not_send_it_is_refused(what: tuple[int, int, Any]) -> None:
    cluster = running()
    assert isinstance(hand_over(cluster, *what), BadMessage)
    cluster.release()
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)


IGNORED: dict[str, tuple[int, int, Any]] = {
    "a report of an epoch that is over": (1, 0, Idle(1, [0] * 4, [1, 0, 0, 0], ["x"], {}, [], {}, [])),
    "a report of an epoch to come": (1, 0, Idle(9, [0] * 4, [1, 0, 0, 0], ["x"], {}, [], {}, [])),
    "state that nobody asked for": (1, 0, Shown(99, [("node", A, 666)])),
}


@pytest.mark.parametrize("what", IGNORED.values(), ids=IGNORED)
def test_the_coordinator_ignores_what_is_of_another_time(what: tuple[int, int, Any]) -> None:
    cluster = running()
    assert hand_over(cluster, *what) is None
    cluster.release()
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)


def made(tid: int, function: int = 0) -> Made:
    return Made(tid, order.ROOT + b"\x01\x02", function, A, (1,), 0, 0, 0)


OF_ANOTHER_TIME: dict[str, tuple[int, int, Any]] = {
    "a call of an epoch that is over": (2, 1, Traffic(1, [made(1)])),
    "a call of a lone one that is over": (2, 1, Traffic(1, [made(1)], 1, (1, 2, 0))),
    "an abort in an epoch that is over": (2, 1, Traffic(1, [TransactionAborted(1)])),
    "the end of an epoch that is over": (0, 1, Final(1)),
    "the end of an epoch that never was": (0, 1, Final(99)),
    "a stretch of an epoch that is over": (0, 1, Gather(1, 1, 1, 1, [1, 2, 3])),
}


@pytest.mark.parametrize("what", OF_ANOTHER_TIME.values(), ids=OF_ANOTHER_TIME)
def test_a_worker_refuses_what_is_of_an_epoch_that_is_over(what: tuple[int, int, Any]) -> None:
    cluster = running()
    assert isinstance(hand_over(cluster, *what), BadMessage)
    cluster.release()
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)


NONSENSE: dict[str, Any] = {
    "a function that there is not": made(6, function=9_999),
    "a negative function": made(6, function=-1),
    "a TID of another epoch": made(1),
    "an abort of a TID of another epoch": TransactionAborted(1),
    "answers to TIDs of which one is of another epoch": AnsweredAll(6, 1, [6, 1], [0, 0]),
    "more answers than TIDs": AnsweredAll(6, 1, [6], [0, 0]),
}


@pytest.mark.parametrize("row", NONSENSE.values(), ids=NONSENSE)
def test_a_worker_refuses_rows_that_make_no_sense(row: Any) -> None:
    cluster = running()
    assert isinstance(hand_over(cluster, 2, 1, Traffic(2, [row])), BadMessage)
    cluster.release()
    cluster.settle()
    check_unharmed(cluster, GOOD * 2)
