"""Channels: messages between the coordinator and the workers arrive once and in order, or not at all.

Rules:
1. A message has a term and, on its channel, a number. What comes twice or from an older term is dropped; what comes too
   early waits for those before it, or for its term to begin here, as far as there is room.
2. What is not acknowledged in time is sent again, from the oldest on, a window at a time. An acknowledgement rides on
   what goes back anyway, else it goes alone.
3. A new term starts every channel anew; nothing of the old term gets through.

Never here: what the messages mean, sockets, clocks.
"""

from __future__ import annotations

from collections import deque

from headrace.config import Config
from headrace.core.events import Send
from headrace.wire.messages import Body, Frame

EARLY_FRAMES_MAX, AHEAD_FRAMES_MAX = 64, 1024


class Channel:
    """Both directions between this node and one other."""

    __slots__ = ("early", "is_resending", "last_sent_us", "owes_since_us", "received", "sent", "unacknowledged")

    def __init__(self) -> None:
        self.sent = self.received = 0  # how many, in this term
        self.unacknowledged: deque[Frame] = deque()
        self.last_sent_us = 0  # when the oldest of them was sent last
        self.is_resending = False  # some may have got lost
        self.owes_since_us: int | None = None  # an acknowledgement, since when
        self.early: dict[int, Body] = {}  # by number: what came before its turn


class Channels:
    """All channels of one node."""

    def __init__(self, me: int, config: Config) -> None:
        self.me, self.term = me, 0
        self.resend_us, self.window = config.resend_us, config.window_frames_max
        self.peers: dict[int, Channel] = {}
        self.ahead: list[Frame] = []  # of a term that has not begun here
        self.resent = self.dropped = 0

    def begin(self, term: int) -> None:
        self.term, self.peers = term, {}

    def peer(self, node: int) -> Channel:
        channel = self.peers.get(node)
        if channel is None:
            channel = self.peers[node] = Channel()
        return channel

    def send(self, now_us: int, to: int, body: Body) -> Send:
        channel = self.peer(to)
        channel.sent += 1
        channel.owes_since_us = None
        frame = Frame(self.term, self.me, to, channel.sent, channel.received, body)
        if not channel.unacknowledged:
            channel.last_sent_us = now_us
        channel.unacknowledged.append(frame)
        return Send(frame)

    def receive(self, now_us: int, frame: Frame) -> list[Body]:
        """The messages whose turn it is with this frame: often one, none if it is not the next one of this term."""
        if frame.term != self.term or frame.to != self.me:
            self.dropped += 1
            if frame.term > self.term and frame.to == self.me and len(self.ahead) < AHEAD_FRAMES_MAX:
                self.ahead.append(frame)
            return []
        channel = self.peer(frame.source)
        while channel.unacknowledged and channel.unacknowledged[0].sequence <= frame.acknowledged:
            channel.unacknowledged.popleft()
            channel.last_sent_us = now_us - self.resend_us if channel.is_resending else now_us
        if frame.body is None:
            return []
        if channel.owes_since_us is None:
            channel.owes_since_us = now_us
        if frame.sequence != channel.received + 1:
            self.dropped += 1
            if frame.sequence <= channel.received:  # it did not hear that we have it
                channel.owes_since_us = now_us - self.resend_us
            elif len(channel.early) < EARLY_FRAMES_MAX:
                channel.early[frame.sequence] = frame.body
            return []
        bodies = [frame.body]
        channel.received += 1
        while channel.early:
            body = channel.early.pop(channel.received + 1, None)
            if body is None:
                break
            bodies.append(body)
            channel.received += 1
        return bodies

    def take_ahead(self) -> list[Frame]:
        """What came before this term began: to be received now."""
        frames, self.ahead = self.ahead, []
        return [frame for frame in frames if frame.term == self.term]

    def upkeep(self, now_us: int) -> list[Send]:
        """What is due: acknowledgements owed for long, and messages that may have got lost."""
        due = []
        for node, channel in self.peers.items():
            channel.is_resending &= bool(channel.unacknowledged)
            if channel.unacknowledged and now_us - channel.last_sent_us >= self.resend_us:
                channel.last_sent_us, channel.owes_since_us, channel.is_resending = now_us, None, True
                for frame in list(channel.unacknowledged)[: self.window]:
                    self.resent += 1
                    again = Frame(self.term, self.me, node, frame.sequence, channel.received, frame.body)
                    due.append(Send(again))
            elif channel.owes_since_us is not None and now_us - channel.owes_since_us >= self.resend_us // 4:
                channel.owes_since_us = None
                due.append(Send(Frame(self.term, self.me, node, 0, channel.received)))
        return due

    def next_due_us(self) -> int | None:
        """When `upkeep` has something to do."""
        due = None
        for channel in self.peers.values():
            if channel.unacknowledged:
                at_us = channel.last_sent_us + self.resend_us
                due = at_us if due is None or at_us < due else due
            if channel.owes_since_us is not None:
                at_us = channel.owes_since_us + self.resend_us // 4
                due = at_us if due is None or at_us < due else due
        return due
