"""Renewal: sealed values of an older version of the app, as this version would seal them.

A record that lacks a field gets the field's default. Everything else stays as it is, so two values of which one is
older are the same exactly if they are after a renewal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import BadValue, TooLarge
from headrace.wire.native_form import is_native
from headrace.wire.typed_values import codec_for
from headrace.wire.values import MISSING, WRAP_BYTES, Values, is_wrapped, same, wrap, written_us

UNREADABLE = (BadValue, TooLarge, msgspec.DecodeError, ValueError, TypeError, LookupError, ArithmeticError)


def renew(sealed: Any, values: Values) -> Any:
    """The value as `values` seals it; raises one of UNREADABLE if this version of the app cannot hold it."""
    if type(sealed) is not bytes or sealed == MISSING:
        return sealed
    inner = sealed[WRAP_BYTES:] if is_wrapped(sealed) else sealed
    value = values.decode(inner)
    made = codec_for(type(value), values).seal(value) if is_native(inner) else values.seal(value)
    return wrap(made, written_us(sealed)) if is_wrapped(sealed) else made


def same_renewed(older: Any, now: Any, values: Values) -> bool:
    """Are they the same, if fields that the older one lacks are at their default?"""
    if same(older, now):
        return True
    if type(older) is not bytes or type(now) is not bytes:
        return False
    try:
        return same(renew(older, values), now)
    except UNREADABLE:
        return False
