"""The one codec for messages: msgpack, typed, limited in size. Everything that is not a valid message is a
`BadMessage`."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import BadMessage, TooLarge
from headrace.wire.messages import Frame, Message

MESSAGE_BYTES_MAX = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_frames = msgspec.msgpack.Decoder(Frame)


def encode(message: Message | Frame, bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
    data = _encoder.encode(message)
    if len(data) > bytes_max:
        raise TooLarge(f"a message of {len(data)} bytes is over the limit of {bytes_max}: send smaller batches")
    return data


def decode(data: bytes, bytes_max: int = MESSAGE_BYTES_MAX) -> Message:
    message: Message = _decoded(_decoder, data, bytes_max)
    return message


def decode_frame(data: bytes, bytes_max: int = MESSAGE_BYTES_MAX) -> Frame:
    frame: Frame = _decoded(_frames, data, bytes_max)
    return frame


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes, bytes_max: int) -> Any:
    if len(data) > bytes_max:
        raise TooLarge(f"a message of {len(data)} bytes is over the limit of {bytes_max}: send smaller batches")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a message: {error}") from None
