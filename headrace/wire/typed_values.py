"""Codecs: seal and unseal the values of one declared type, and refuse all others.

A record is sealed in one of two forms, and both can be read without its class:

- The *native form*, if the value is exactly of its type and msgspec loses nothing of it: the map of the fields that
  msgspec writes, with a head (`wire/native_form.py`). Writing and reading it is one call of msgspec.
- The form of `Values.encode` for all others, such as a record with an int in a float field.

Which form a value has depends on the value alone, so equal values have equal bytes.

Rules:
1. The check is part of sealing: there is no way to seal a value of a declared type without it.
2. A value that does not have the type is refused: the message names the part, the type wanted and what was found.

Never here: which operator or function has a type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from headrace.errors import BadValue
from headrace.wire.native_form import NativeForm, is_native
from headrace.wire.types import (
    ABSENT,
    DeclaredRecord,
    DeclaredType,
    DictType,
    Fault,
    ListType,
    Room,
    ScalarType,
    Source,
    UnionType,
    compile_check,
    compile_function,
)
from headrace.wire.values import FAILURES, Values, shown

SEAL = """
def seal(v):
    try:
        if {test}:
            data = head + {written}
            if len(data) <= bytes_max{whole}:
                return data
    except FAILURES:
        pass
    return slowly(v)
"""


ROOM_FACTOR = 5  # a part of a value takes at most three, and its length


class Nothing:
    """The type of no value."""


class Codec:
    """Of one declared type. Two shortcuts are for hot loops: `quick` is int if every small int is a value of the type,
    and sealed as it is. `decode` reads encoded values in the form that most of them have; for the others it raises a
    msgspec.DecodeError, and `Values.decode` reads them."""

    def __init__(self, of: DeclaredType, values: Values) -> None:
        self.type, self.values = of, values
        self.exactly = compile_check(of, values.bytes_max)
        self.quick: Any = int if of.takes_int else Nothing
        record = record_in(of)
        self.native: NativeForm | None = None
        if record is not None and record.is_native and fits_depth(record, values):
            with contextlib.suppress(OverflowError, TypeError, RuntimeError):  # too large, or not known to msgspec
                self.native = values.native_form(record)
        self.seal: Callable[[Any], Any] = self._seal_checked
        self.decode: Callable[[bytes], Any] = values.decode
        if self.native is not None:
            self.seal, self.decode = self._compile_seal(self.native), self.native.decode
            if of.is_immutable:
                self.seal, self.decode = remembering(self.seal, self.decode, self.native.head)
        elif is_plain(of) and fits_depth(of, values):
            self.seal = self._seal_plain

    def fault(self, value: Any) -> str | None:
        """What is wrong with the value, if it does not have the type."""
        if self.exactly(value):
            return None
        if type(self.type) is ScalarType:  # the usual case, without its general form
            is_float = self.type.kind is float and type(value) is int
            return None if is_float else f"wanted {self.type.text}, found {shown(value)} ({type(value).__name__})"
        # Enough room for all that `Values.encode` takes: what is larger, or deeper, is refused there.
        found = self.type.fault(value, Room(ROOM_FACTOR * self.values.bytes_max, self.values.depth_max))
        return None if found is None else describe(found, self.type)

    def check(self, value: Any) -> None:
        """Raises BadValue."""
        trouble = self.fault(value)
        if trouble is not None:
            raise BadValue(trouble)

    def _seal_checked(self, value: Any) -> Any:
        self.check(value)
        return self.values.seal(value)

    def _seal_plain(self, value: Any) -> Any:
        """Lists and dicts of scalars: msgspec writes them as `Values.encode` does."""
        if self.exactly(value):
            try:
                data = self.values.encode_plain(value)
            except FAILURES:
                return self._seal_checked(value)
            if len(data) <= self.values.bytes_max and not is_native(data):
                return data
        return self._seal_checked(value)

    def _compile_seal(self, form: NativeForm) -> Callable[[Any], Any]:
        """With the check in it: a call less for each value."""
        seal: Callable[[Any], Any] = self.compile_natively(form, SEAL, "seal", slowly=self._seal_checked)
        return seal

    def compile_natively(self, form: NativeForm, template: str, name: str, **names: Any) -> Any:
        """A function over a value `v`, from a template with the check of the type in it."""
        source = Source(self.values.bytes_max)
        source.names |= {"head": form.head, "bytes_max": self.values.bytes_max}
        source.names |= {"FAILURES": (*FAILURES, AttributeError), **names}
        whole = f" and data.startswith({source.name(form.map_head)}, {len(form.head)})" if form.may_omit else ""
        test, written = form.record.test("v", source, False), form.writing(source)
        return compile_function(source, template.format(test=test, written=written, whole=whole).splitlines(), name)


def codec_for(hint: Any, values: Values) -> Codec:
    """The codec of a type, made once for these values. Raises `Unsupported`."""
    try:
        found = values.codecs.get(hint)
    except TypeError:  # it has a note that cannot be hashed
        return Codec(values.hints.type_of(hint), values)
    if found is None:
        found = values.codecs[hint] = Codec(values.hints.type_of(hint), values)
    return found


def remembering(
    seal: Callable[[Any], Any], decode: Callable[[bytes], Any], head: bytes
) -> tuple[Callable[[Any], Any], Callable[[bytes], Any]]:
    """The same for values that cannot change: if the one decoded last is put back, it is not encoded again."""
    last: tuple[Any, bytes] = (Nothing, b"")

    def seal_again(value: Any) -> Any:
        known, sealed = last
        return sealed if value is known else seal(value)

    def decode_and_remember(sealed: bytes) -> Any:
        nonlocal last
        value = decode(sealed)
        if sealed.startswith(head):  # not of an older version
            last = (value, sealed)
        return value

    return seal_again, decode_and_remember


def describe(fault: Fault, of: DeclaredType) -> str:
    if fault.found is ABSENT:
        return f"{of.text}{fault.path} is missing, wanted {fault.wanted}"
    found = f"{shown(fault.found)} ({type(fault.found).__name__})"
    where = f"{of.text}{fault.path}: " if fault.path else ""
    return f"{where}wanted {fault.wanted}, found {found}"


def record_in(of: DeclaredType) -> DeclaredRecord | None:
    """The record that values of the type are, if there is one: of `Account | None` it is Account."""
    members = of.members if isinstance(of, UnionType) else [of]
    records = [each for each in members if isinstance(each, DeclaredRecord)]
    return records[0] if len(records) == 1 else None


def is_plain(of: DeclaredType) -> bool:
    """Whether msgspec writes its values as `Values.encode` does: lists and dicts of scalars."""
    if isinstance(of, ListType):
        return of.kind is list and (isinstance(of.item, ScalarType) or is_plain(of.item))
    return isinstance(of, DictType) and (isinstance(of.item, ScalarType) or is_plain(of.item))


def fits_depth(of: DeclaredType, values: Values) -> bool:
    return of.depth is not None and of.depth <= values.depth_max
