"""Bytes from outside: values and messages are decoded exactly or refused, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import BadMessage, BadValue, TooLarge
from headrace.wire import codec
from headrace.wire.messages import Answers, Calls, Failure, Refusal
from tests.core.carried import ALLOWED, VALUES
from tests.programs import MANY

# --- what comes in from outside ---------------------------------------------------------------------------------------

HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 100_000,
    b"\x81\x01" * 50_000,
    b"\xa2\xff\xff",
    b"\x81\x81\x01\x02\x02",
    b"\x81\x91\x91\x01\x02",
    b"\xc7\x00\x01",
    b"\xc7\x01\x03x",
    b"\xc7\x02\x04\xff\xff",
    b"\xc7\x01\x05x",
    b"\xc7\x01\x06x",
    b"\xd4\x63x",
    b"\xd6\xff\x00\x00\x00\x01",
    b"\xc7\x0c\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff",
]


def extension(code: int, inner: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, inner))


def extensions_within(depth: int) -> bytes:
    data = b"\x01"
    for _ in range(depth):
        data = extension(1, b"\x91" + data)
    return data


HOSTILE += [
    extensions_within(3_000),
    extension(1, b"\xc0"),
    extension(2, b"\xc0"),
    extension(2, msgspec.msgpack.encode(["Nobody", {}])),
    extension(2, msgspec.msgpack.encode([["Point"], {}])),
    extension(2, msgspec.msgpack.encode(["Point", {}])),
    extension(2, msgspec.msgpack.encode(["Point", []])),
    extension(2, msgspec.msgpack.encode(["Point", None])),
    extension(2, msgspec.msgpack.encode(["Money", {"nothing": 1}])),
    extension(2, msgspec.msgpack.encode(["Money", {1: 1}])),
    extension(2, msgspec.msgpack.encode(["Money", 1])),
    extension(3, b"1E+99999999999999999999999"),
    extension(4, b"2024-13-01"),
    extension(5, b"0000-00-00"),
    extension(6, b"{}"),
]


def decode_or_refuse(data: bytes) -> None:
    with contextlib.suppress(BadValue, TooLarge):
        VALUES.decode(data)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:12].hex())
def test_hostile_bytes_are_refused_or_decoded_and_nothing_else(data: bytes) -> None:
    decode_or_refuse(data)


@given(st.binary(max_size=200))
@settings(max_examples=3 * MANY)
def test_arbitrary_bytes_are_refused_or_decoded_and_nothing_else(data: bytes) -> None:
    decode_or_refuse(data)


@given(ALLOWED, st.data())
@settings(max_examples=3 * MANY)
def test_bytes_cut_short_or_changed_are_refused_or_decoded_and_nothing_else(value: Any, data: Any) -> None:
    encoded = VALUES.encode(value)
    at = data.draw(st.integers(0, len(encoded) - 1))
    decode_or_refuse(encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :])
    with pytest.raises(BadValue):
        VALUES.decode(encoded[:at])
    with pytest.raises(BadValue):
        VALUES.decode(encoded + b"\x00")


# --- the codec --------------------------------------------------------------------------------------------------------

WIRE_KEYS = st.text(max_size=5) | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=5)
TEXTS = st.text(max_size=5)
FAILURES = st.builds(Failure, TEXTS, TEXTS, TEXTS, st.none() | TEXTS, st.none() | WIRE_KEYS)
IDS = TEXTS | st.lists(TEXTS, max_size=3)
MESSAGES = st.one_of(
    st.builds(
        Calls,
        IDS,
        st.lists(TEXTS, max_size=3),
        st.lists(WIRE_KEYS, max_size=3),
        st.lists(st.binary(max_size=9), max_size=3),
    ),
    st.builds(
        Answers,
        IDS,
        st.lists(st.none() | st.integers(1, (1 << 63) - 1), max_size=3),
        st.lists(st.none() | st.integers(1, 1 << 60), max_size=3),
        st.lists(ALLOWED.map(VALUES.seal), max_size=3),
        st.dictionaries(st.integers(0, 9), FAILURES, max_size=2),
    ),
    st.builds(Refusal, FAILURES),
)


@given(MESSAGES)
@settings(max_examples=2 * MANY)
def test_a_message_comes_back_exactly(message: Any) -> None:
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    assert repr(back) == repr(message)


@given(MESSAGES, st.data())
@settings(max_examples=2 * MANY)
def test_a_message_cut_short_or_changed_is_refused_or_decoded_and_nothing_else(message: Any, data: Any) -> None:
    encoded = codec.encode(message)
    at = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(BadMessage):
        codec.decode(encoded[:at])
    with contextlib.suppress(BadMessage):
        codec.decode(encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1 :])


@given(st.binary(max_size=100))
@example(b"\x85\xa4type\xa5calls\xa3ids\xa1x\xa9functions\xdd\xff\xff\xff\xff")
@example(b"\x82\xa4type\xa5calls\xa3ids" + b"\x91" * 100_000)
@example(b"\x81\xa4type\xa6nobody")
@example(msgspec.msgpack.encode({"type": "refusal", "failure": ["x"], "more": 1}))
@settings(max_examples=2 * MANY)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        codec.decode(data)


def test_a_message_over_the_limit_is_too_large() -> None:
    message = Refusal(Failure("bad_request", "BadRequest", "x" * 100))
    size = len(codec.encode(message))
    assert codec.decode(codec.encode(message, bytes_max=size), bytes_max=size) == message
    with pytest.raises(TooLarge):
        codec.encode(message, bytes_max=size - 1)
    with pytest.raises(TooLarge):
        codec.decode(codec.encode(message), bytes_max=size - 1)
