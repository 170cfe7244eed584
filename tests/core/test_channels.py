"""Frames between workers: cut ones are refused and come again, and none is much larger than the bound."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace import App, Config, Context
from headrace.core.channel import Channels
from headrace.errors import BadMessage
from headrace.wire import messages
from headrace.wire.codec import decode_frame, encode
from headrace.wire.messages import Final, Made, Traffic
from tests.cluster import Cluster, exactly, looped, on, outcome
from tests.core.things import LOSABLE, app

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


# --- no message is much larger than the bound -------------------------------------------------------------------------

talking = App("talking")

order = talking.operator("order")


@order.register
def tell(ctx: Context, size: int) -> str:
    return "z" * size


@order.register
async def hear(ctx: Context, key: str, size: int) -> int:
    return len(await ctx.call(tell, key, size))


@order.register
def keep(ctx: Context, text: str) -> None:
    ctx.put(text)


@order.register
def hand_on(ctx: Context, key: str, size: int) -> None:
    ctx.call_async(keep, key, "w" * size)


def test_calls_and_answers_travel_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a few large ones come after many small ones."""
    monkeypatch.setattr(messages, "PART_BYTES_MAX", 20_000)
    cluster, key = Cluster(talking, 2), on(2, "target", 2)
    here = [on(1, f"from {n} ", 2) for n in range(100)]
    calls: list[Any] = [(hand_on, each, key, 1) for each in here]
    calls += [call for each in here[:30] for call in ((hear, each, key, 4_000), (hand_on, each, key, 4_000))]
    replies, state = looped(calls)
    assert [outcome(reply) for reply in cluster.run(calls)] == replies
    assert exactly(cluster.state()) == exactly(state)
    sizes = [len(encode(frame)) for frame in cluster.sent if isinstance(frame.body, Traffic)]
    assert sum(sizes) > 200_000
    assert max(sizes) < 30_000
