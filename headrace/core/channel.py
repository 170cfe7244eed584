"""Channels: messages between the coordinator and the workers arrive once and in order, or not at all.

Rules:
1. A message has a term and a number on its channel. Duplicates and messages from older terms are dropped. A message
   that comes too early waits for those before it, or for its term to begin here, while there is room.
2. Messages not acknowledged in time are resent, oldest first, a window at a time. Acknowledgements travel with
   messages in the other direction, or alone if there are none.
3. A new term resets every channel; no message of the old term gets through.

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
        self.sent = self.received = 0  # counts, in this term
        self.unacknowledged: deque[Frame] = deque()
        self.last_sent_us = 0  # when the oldest of them was last sent
        self.is_resending = False  # some may be lost
        self.owes_since_us: int | None = None  # since when an acknowledgement is due
        self.early: dict[int, Body] = {}  # by number: messages that came too early


class Channels:
    """All channels of one node."""

    def __init__(self, me: int, config: Config) -> None:
        self.me, self.term = me, 0
        self.resend_us, self.window = config.resend_us, config.window_frames_max
        self.peers: dict[int, Channel] = {}
        self.ahead: list[Frame] = []  # of terms that have not begun here
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
        """The messages that are next in order: often one; none if this frame is not the next of this term."""
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
            if frame.sequence <= channel.received:  # our acknowledgement was lost
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
        """Frames that came before this term began, to be received now."""
        frames, self.ahead = self.ahead, []
        return [frame for frame in frames if frame.term == self.term]

    def upkeep(self, now_us: int) -> list[Send]:
        """What is due: overdue acknowledgements, and messages that may be lost."""
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
        """When `upkeep` next has work to do."""
        due = None
        for channel in self.peers.values():
            if channel.unacknowledged:
                at_us = channel.last_sent_us + self.resend_us
                due = at_us if due is None or at_us < due else due
            if channel.owes_since_us is not None:
                at_us = channel.owes_since_us + self.resend_us // 4
                due = at_us if due is None or at_us < due else due
        return due
