"""The one codec for messages: msgpack, typed, limited in size; whatever is no message of ours is a `BadMessage`."""

from __future__ import annotations

import msgspec

from headrace.errors import BadMessage, TooLarge
from headrace.wire.messages import Message

MESSAGE_BYTES_MAX = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message, bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
    data = _encoder.encode(message)
    if len(data) > bytes_max:
        raise TooLarge(f"a message of {len(data)} bytes is over the limit of {bytes_max}: send smaller batches")
    return data


def decode(data: bytes, bytes_max: int = MESSAGE_BYTES_MAX) -> Message:
    if len(data) > bytes_max:
        raise TooLarge(f"a message of {len(data)} bytes is over the limit of {bytes_max}: send smaller batches")
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a message: {error}") from None
    return message
