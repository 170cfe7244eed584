"""The network of one node: frames to and from the other nodes over ZeroMQ, encrypted, from known keys only.

A node binds one socket on which all others send to it, and connects one socket to each of them. Rules:
1. CURVE on every connection. A node whose key is not in the address book gets no connection; it may try again. So a
   node connects only to nodes that have its key (`known`); a node that was accepted is `linked`. The secret key never
   leaves the process that made it.
2. A frame counts as sent by the node whose key brought it. A frame that is truncated, of an unknown type, too large, or
   claims another sender is refused: counted and dropped. It never stops a node.
3. Only `wait` blocks. What a peer does not accept yet is kept, up to a limit, then dropped: the channels send it again.
   So two nodes that flood each other still receive, and `is_congested` tells them to slow down.

Never here: the meaning of frames, which nodes are alive, processes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from headrace.errors import BadMessage, TooLarge
from headrace.wire import codec
from headrace.wire.messages import Frame

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # access is decided by keys
FRAME_BYTES_MAX = 1 << 30
QUEUE_FRAMES_MAX = 256  # of each connection, on either side
KEPT_FRAMES_MAX = 4_096  # for one peer that accepts no more, or is not connected yet
RECEIVE_FRAMES_MAX = 256  # at once
RECONNECT_MS = 20
HANDSHAKE_MS = 1_000  # then it starts again: a peer refused with 300 may not notice, and waits this long
ACCEPTED, REJECTED = b"200", b"300"  # after 300 the peer's ZeroMQ tries again; after 400 it never would


class Keys(NamedTuple):
    """A CURVE key pair, as text (Z85)."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Counts(NamedTuple):
    """What a network has done so far."""

    sent: int = 0  # frames
    sent_bytes: int = 0
    refused: int = 0  # messages
    strangers: int = 0  # connections
    dropped: int = 0  # frames, for a peer that accepted no more

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(add, self, other))


def bind(listening: zmq.Socket[Any], host: str) -> str:
    """Listen on a free port, on the interface that other nodes know by this name. If the address is not one of this
    machine's own, as behind a gateway, listen on all interfaces. Returns the address for the other nodes."""
    try:
        listening.bind(f"tcp://{socket.gethostbyname(host)}:*")
    except (OSError, zmq.ZMQError):
        listening.bind(f"tcp://{EVERYWHERE}:*")
    port = listening.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{host}:{port}"


class Network:
    """`refresh` is called before an unknown key is refused: the address book may have changes that were not read
    yet."""

    def __init__(self, me: int, keys: Keys, refresh: Callable[[], None] | None = None, host: str = LOOPBACK) -> None:
        self.me, self.keys, self._refresh = me, keys, refresh
        self.sent = self.sent_bytes = self.refused = self.strangers = self.dropped = 0
        self._nodes: dict[str, int] = {}  # public key -> node
        self.linked: set[str] = set()  # the keys of the nodes that were accepted
        self.links_changed = False  # to be reported: a node has become known or linked
        self._pushes: dict[int, zmq.Socket[bytes]] = {}
        self._kept: dict[int, dict[tuple[int, int], bytes]] = {}  # node -> frames by term and sequence, in their order
        self._full: set[int] = set()  # connected peers for which frames are kept
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._zap = self._context.socket(zmq.REP)  # libzmq asks here whether to accept a key (ZAP, RFC 27)
        self._zap.bind("inproc://zeromq.zap.01")
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        self._pull.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._pull.setsockopt(zmq.CURVE_SERVER, 1)
        self._pull.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._pull.setsockopt(zmq.ZAP_DOMAIN, b"headrace")
        self.endpoint = bind(self._pull, host)
        for each in (self._zap, self._pull):
            self._poller.register(each, zmq.POLLIN)

    # --- the address book ---

    def add_node(self, node: int, key: str, endpoint: str | None) -> None:
        """Add a node with its key and address. With None, the address follows later. Frames for a node that is not in
        the address book yet are kept. If the node had another key before, they were for its predecessor and are
        dropped."""
        if self._nodes.get(key) != node:
            if node in self._nodes.values():
                self.forget(node)
            self._nodes[key] = node
            self.links_changed = True
        if endpoint is None or node in self._pushes:
            return
        push = self._context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        push.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        push.setsockopt_string(zmq.CURVE_SERVERKEY, key)
        push.setsockopt_string(zmq.CURVE_PUBLICKEY, self.keys.public)
        push.setsockopt_string(zmq.CURVE_SECRETKEY, self.keys.secret)
        push.connect(endpoint)
        self._pushes[node] = push
        self._push_kept(node)

    def forget(self, node: int) -> None:
        """Exchange no more frames with this node until `add_node` is called again."""
        self._nodes = {key: known for key, known in self._nodes.items() if known != node}
        self.linked &= self.known
        self._kept.pop(node, None)
        push = self._pushes.pop(node, None)
        if push is not None:
            self._unmark_full(node, push)
            push.close(0)

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._nodes)

    # --- frames ---

    def send(self, frame: Frame) -> None:
        node, number = frame.to, (frame.term, frame.sequence)
        kept = self._kept.get(node, {})
        if number in kept and frame.body is not None:
            return  # a repeat of a frame that has not left yet
        data = codec.encode(frame, FRAME_BYTES_MAX)
        self.sent += 1
        self.sent_bytes += len(data)
        push = self._pushes.get(node)
        if push is not None and not kept and self._push(push, data):
            return
        if len(kept) >= KEPT_FRAMES_MAX:
            self.dropped += 1
            return
        kept[number] = data
        self._kept[node] = kept
        if push is not None:
            self._mark_full(node, push)

    def receive(self) -> list[Frame]:
        """The frames that have arrived, in order; only some of them, if there are many."""
        frames: list[Frame] = []
        for _ in range(RECEIVE_FRAMES_MAX):
            try:
                part = self._pull.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            is_whole = not part.more
            while part.more:
                part = self._pull.recv(copy=False)  # the parts of a message arrive together
            frame = self._decoded(part) if is_whole else None
            if frame is None:
                self.refused += 1
            else:
                frames.append(frame)
        return frames

    def _decoded(self, part: zmq.Frame) -> Frame | None:
        try:
            frame = codec.decode_frame(part.buffer, FRAME_BYTES_MAX)  # type: ignore[arg-type]
        except (BadMessage, TooLarge):
            return None
        speaks_for_itself = self._nodes.get(str(part.get("User-Id"))) == frame.source
        return frame if speaks_for_itself and frame.to == self.me else None

    # --- waiting ---

    def watch(self, fd: int) -> None:
        """`wait` also ends when this file descriptor can be read."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def wait(self, timeout_ms: int | None) -> set[int]:
        """Wait until a frame can be received, a kept one can be sent, or a watched file descriptor can be read (those
        are returned); at most this long."""
        ready: set[int] = set()
        for what, _ in self._poller.poll(timeout_ms):
            if isinstance(what, int):
                ready.add(what)
            elif what is self._zap:
                self._authenticate()
        for node in sorted(self._full):
            self._push_kept(node)
        return ready

    @property
    def is_congested(self) -> bool:
        """Some peer does not accept its frames: produce no more for now."""
        return bool(self._full)

    @property
    def counts(self) -> Counts:
        return Counts(self.sent, self.sent_bytes, self.refused, self.strangers, self.dropped)

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- inside ---

    def _push(self, push: zmq.Socket[bytes], data: bytes) -> bool:
        try:
            push.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _push_kept(self, node: int) -> None:
        kept, push = self._kept.pop(node, {}), self._pushes[node]
        while kept and self._push(push, kept[next(iter(kept))]):
            del kept[next(iter(kept))]
        if kept:
            self._kept[node] = kept
            self._mark_full(node, push)
        else:
            self._unmark_full(node, push)

    def _mark_full(self, node: int, push: zmq.Socket[bytes]) -> None:
        if node not in self._full:
            self._full.add(node)
            self._poller.register(push, zmq.POLLOUT)

    def _unmark_full(self, node: int, push: zmq.Socket[bytes]) -> None:
        if node in self._full:
            self._full.remove(node)
            self._poller.unregister(push)

    def _authenticate(self) -> None:
        """Answer the connection requests: accept those with a known key."""
        while self._zap.poll(0):
            version, request, *_, mechanism, credential = self._zap.recv_multipart()
            key = z85.encode(credential).decode() if mechanism == b"CURVE" else ""
            if key not in self._nodes and self._refresh is not None:
                self._refresh()
            is_known = key in self._nodes
            self.strangers += not is_known
            if is_known and key not in self.linked:
                self.linked.add(key)
                self.links_changed = True
            status, text = (ACCEPTED, b"OK") if is_known else (REJECTED, b"no such key")
            self._zap.send_multipart([version, request, status, text, key.encode() if is_known else b"", b""])
