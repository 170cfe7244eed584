"""Values: what may be state, an argument or a result, and how it is carried unchanged.

Rules:
1. A *sealed* value is either an immutable scalar, as it is, or `bytes`: the msgpack form of anything else. Where a
   value is sealed, `bytes` always means "encoded", so a user's own bytes are encoded too.
2. Sealing copies and unsealing copies: a sealed value shares no mutable object with other code.
3. A value comes back as it was, with exactly the same type. Types that msgpack cannot distinguish (tuple and list) or
   does not know become extension types; all others are refused with the path to the culprit. Nothing is changed
   silently.
4. Two sealed values are the `same` if their bytes are: 1, 1.0 and True differ, a NaN equals itself.

A record of a declared type may have another form, which is faster: see `wire/typed_values.py`.

Never here: state, transactions, sockets, pickle.
"""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from msgspec.msgpack import Ext

from headrace.errors import BadKey, BadValue, TooLarge
from headrace.wire.defaults import complete, defaults_of
from headrace.wire.hints import Hints
from headrace.wire.native_form import (
    NATIVE_KEY,
    NativeForm,
    in_iso,
    is_native,
    lifted,
    mentions,
    native_parts,
    record_name,
)
from headrace.wire.types import DATETIME_CODE, FROM_TEXT, TEXTUAL, TUPLE_CODE, DeclaredRecord

# Ints that CPython stores in one digit: two comparisons with these are fast, a chained one is not. They take the
# fast paths; all others are checked in full.
LOW, HIGH = -(1 << 30) + 1, (1 << 30) - 1
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1  # what msgpack can hold

Key = str | int | bytes

MISSING = b"\xc1"  # an entity without state: the one byte that no encoded value begins with
TUPLE, RECORD, DATETIME = TUPLE_CODE, 2, DATETIME_CODE
DICT = 8  # around a dict that could be taken for a record in its native form
EXPIRING = 7  # around a state with a time to live: see `wrap`
WRAP_BYTES = 14


KEPT = frozenset((bool, float, type(None)))  # scalars of bounded size: nothing to check
# What msgspec, and the constructors of values, raise if something cannot be encoded or decoded.
FAILURES = (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


encode_scalar = msgspec.msgpack.Encoder().encode


def same(one: Any, other: Any) -> bool:
    """Of two sealed values."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return encode_scalar(one) == encode_scalar(other)
    return bool(one == other)


class RecordType(NamedTuple):
    """How one dataclass or struct is encoded and rebuilt."""

    cls: type
    name: str
    fields: tuple[str, ...]
    build: Callable[[dict[str, Any]], Any]


class Values:
    """Seals and unseals values. Knows the dataclasses and structs of one app, by name."""

    def __init__(self, records: Iterable[type] = (), *, bytes_max: int = 1 << 20, depth_max: int = 64) -> None:
        self.bytes_max, self.depth_max = bytes_max, depth_max
        self.records: dict[type, RecordType] = {cls: record_of(cls) for cls in records}
        self.by_name: dict[str, RecordType] = {record.name: record for record in self.records.values()}
        self.hints = Hints()
        self.codecs: dict[Any, Any] = {}  # of declared types: see `wire/typed_values.py`
        self._natives: dict[str, NativeForm] = {}
        self._encode = self.encode_plain = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._from_ext).decode

    def seal(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            if INT_MIN <= value <= INT_MAX:
                return value
            raise BadValue(f"{shown(value)} does not fit into 64 bits")
        if kind in KEPT:
            return value
        if kind is str:
            if len(value) > self.bytes_max:
                what = f"a str of {len(value)} characters"
                raise TooLarge(f"{what} is over the limit of {self.bytes_max} bytes (value_bytes_max)")
            if not value.isascii():
                self._check_unicode(value)
            return value
        return self.encode(value)

    def unseal(self, sealed: Any) -> Any:
        if type(sealed) is not bytes:
            return sealed
        return self.decode(sealed[WRAP_BYTES:] if is_wrapped(sealed) else sealed)

    def native_form(self, record: DeclaredRecord) -> NativeForm:
        name = record_name(record.cls)
        if name not in self._natives:
            self._natives[name] = NativeForm(record)
        return self._natives[name]

    def _check_unicode(self, value: str) -> None:
        try:
            length = len(value.encode())
        except UnicodeEncodeError as error:
            raise BadValue(f"a str that is not valid Unicode: {error.reason}") from None
        if length > self.bytes_max:
            raise TooLarge(f"a str of {length} bytes is over the limit of {self.bytes_max} (value_bytes_max)")

    def encode(self, value: Any) -> bytes:
        """Encode any value as bytes, scalars too."""
        try:
            lowered = self._lower(value, 0, [self.bytes_max])
            if type(lowered) is dict and next(iter(lowered), None) == NATIVE_KEY:
                lowered = Ext(DICT, self._encode(lowered))
            data = self._encode(lowered)
        except BadValue as error:
            raise BadValue(f"{self._culprit(value)}: {error}") from None
        if len(data) > self.bytes_max:
            what = f"a {type(value).__name__} of {len(data)} bytes"
            raise TooLarge(f"{what} is over the limit of {self.bytes_max} (value_bytes_max)")
        return data

    def decode(self, data: bytes) -> Any:
        if len(data) > self.bytes_max:
            raise TooLarge(f"{len(data)} bytes are over the limit of {self.bytes_max} (value_bytes_max)")
        try:
            if is_native(data):
                return self._from_native(data)
            return self._decode(data)
        except FAILURES as error:
            raise BadValue(f"not an encoded value: {error}") from None

    def _from_native(self, data: bytes) -> Any:
        name, lift, fields = native_parts(data)
        form = self._natives.get(name)
        if form is None:
            record = self.by_name.get(name)
            if record is None:
                raise ValueError(f"{name} is not a dataclass or struct of this app")
            of = self.hints.type_of(record.cls)
            if not isinstance(of, DeclaredRecord) or not of.is_native:  # it was, in an older version of the app
                return record.build(lifted(lift, fields))
            form = self.native_form(of)
        if not data.startswith(form.head):  # of an older version of the app
            complete(name, fields, self.by_name[name].fields, defaults_of(form.cls))
        return form.decode(data)

    def _lower(self, value: Any, depth: int, room: list[int]) -> Any:
        """The same value in msgpack's own types and extension types. `room` is what is left of the limit: a value that
        contains one part many times is not walked much further than that."""
        kind = type(value)
        room[0] -= len(value) + 1 if kind is bytes or kind is str else 1
        if room[0] < 0:
            raise TooLarge(f"a value of more than {self.bytes_max} bytes is over the limit (value_bytes_max)")
        if kind in KEPT or kind is bytes:
            return value
        if kind is int or kind is str:
            return self.seal(value)
        if depth >= self.depth_max:
            raise BadValue(f"nested deeper than {self.depth_max} (value_depth_max)")
        depth += 1
        if kind is dict:
            return {self._lower_key(key): self._lower(item, depth, room) for key, item in value.items()}
        if kind is list:
            return [self._lower(item, depth, room) for item in value]
        if kind is tuple:
            return Ext(TUPLE, self._encode([self._lower(item, depth, room) for item in value]))
        if kind in TEXTUAL:
            code, to_text, _ = TEXTUAL[kind]
            text = to_text(value).encode()
            room[0] -= len(text)
            if room[0] < 0:
                raise TooLarge(f"a value of more than {self.bytes_max} bytes is over the limit (value_bytes_max)")
            return Ext(code, text)
        if kind is datetime.datetime:
            return Ext(DATETIME, self._encode(lower_datetime(value)))
        record = self.records.get(kind)
        if record is None:
            raise BadValue(refusal(kind))
        try:
            fields = {name: self._lower(getattr(value, name), depth, room) for name in record.fields}
        except AttributeError as error:
            raise BadValue(f"a {kind.__name__} lacks a field: {error}") from None
        return Ext(RECORD, self._encode([record.name, fields]))

    def _lower_key(self, key: Any) -> Any:
        if type(key) is str or type(key) is int:
            return self.seal(key)
        if type(key) is not bytes:
            raise BadValue(f"a dict key must be a str, int or bytes, not {type(key).__name__}")
        return key

    def _culprit(self, value: Any) -> str:
        """The path to the part that could not be lowered. Called only after a failure; it stops at the limit."""
        path, room = type(value).__name__, [self.bytes_max]
        for depth in range(self.depth_max):
            record = self.records.get(type(value))
            steps: Iterable[tuple[str, Any]] = ()
            if type(value) is dict:
                steps = ((f"[{shown(key)}]", item) for key, item in value.items())
            elif type(value) in (list, tuple):
                steps = ((f"[{i}]", item) for i, item in enumerate(value))
            elif record is not None:
                steps = ((f".{name}", getattr(value, name, None)) for name in record.fields)
            for step, item in steps:
                try:
                    self._lower(item, depth + 1, room)
                except BadValue:
                    path, value = path + step, item
                    break
                except TooLarge:
                    return path
            else:
                break
        return path

    def _from_ext(self, code: int, data: memoryview) -> Any:
        if code == TUPLE:
            return tuple(self._decode(data))
        if code == DICT:
            return self._decode(data)
        if code == RECORD:
            name, fields = self._decode(data)
            record = self.by_name.get(name)
            if record is None:
                raise ValueError(f"{name} is not a dataclass or struct of this app")
            return record.build(fields)
        if code == DATETIME:
            return raise_datetime(*self._decode(data))
        if code in FROM_TEXT:
            return FROM_TEXT[code](str(data, "utf-8"))
        raise ValueError(f"unknown extension type {code}")


def plain(sealed: Any) -> Any:
    """A sealed value in JSON's own types, for readers without the app: a record is a dict of its fields, a tuple a
    list; dates, times, decimals and UUIDs are strings, bytes are base64 strings, also as keys of a dict (whose ints
    stay ints). The original types are lost: to get them back, unseal with the app's `Values`."""
    if type(sealed) is not bytes:
        return sealed
    return msgspec.to_builtins(opened(sealed))


def as_json(sealed: Any) -> bytes:
    """`plain` as JSON, in a single call. A float that is NaN or infinite becomes null."""
    return _to_json(opened(sealed) if type(sealed) is bytes else sealed)


def opened(sealed: bytes) -> Any:
    """Like `plain`, but bytes are still bytes; a JSON encoder turns them into base64 strings."""
    try:
        data = sealed[WRAP_BYTES:] if is_wrapped(sealed) else sealed
        if not is_native(data):
            return _open(data)
        _, lift, fields = native_parts(data)
        return in_iso(fields) if mentions(lift, DATETIME) else fields
    except FAILURES as error:
        raise BadValue(f"not an encoded value: {error}") from None


def _open_ext(code: int, data: memoryview) -> Any:
    if code in (TUPLE, DICT):
        return _open(data)
    if code == RECORD:
        _, fields = _open(data)
        return fields
    if code == DATETIME:
        return raise_datetime(*_open(data)).isoformat()
    if code in FROM_TEXT:
        return str(data, "utf-8")
    raise ValueError(f"unknown extension type {code}")


_open = msgspec.msgpack.Decoder(ext_hook=_open_ext).decode
_to_json = msgspec.json.Encoder().encode


def wrap(sealed: Any, written_us: int) -> bytes:
    """A sealed value with the time at which it was written: an extension type of msgpack that is used nowhere else."""
    inner = sealed if type(sealed) is bytes else msgspec.msgpack.encode(sealed)
    size = len(inner) + 8
    return b"\xc9" + size.to_bytes(4, "big") + bytes((EXPIRING,)) + written_us.to_bytes(8, "big") + inner


def is_wrapped(sealed: Any) -> bool:
    return type(sealed) is bytes and len(sealed) > WRAP_BYTES and sealed[0] == 0xC9 and sealed[5] == EXPIRING


def written_us(wrapped: bytes) -> int:
    return int.from_bytes(wrapped[6:WRAP_BYTES], "big")


def size_of(sealed: Any) -> int:
    """The bytes of a sealed value, as limits count them: numbers are free, since the number of calls bounds them."""
    if type(sealed) is str:
        return len(sealed) if sealed.isascii() else len(sealed.encode())
    return len(sealed) if type(sealed) is bytes else 0


def shown(value: Any) -> str:
    """A value for a message: bounded, and the same in every run (a `repr` may recurse, be huge, or contain an
    address)."""
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}…"
    if kind is int:
        return str(value) if value.bit_length() <= 200 else f"an int of {value.bit_length()} bits"
    return repr(value) if kind in KEPT else f"a {kind.__name__}"


def refusal(kind: type) -> str:
    """Why a value of this type is not carried, and what to do about it."""
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        name = kind.__name__
        return f"{name} is not known to the app: use it in a function's annotations, or call app.record({name})"
    if kind in (set, frozenset):
        return f"a {kind.__name__} has no order to carry: use a sorted list or tuple"
    for base in (bool, int, float, str, bytes, dict, list, tuple):
        if issubclass(kind, base):
            return f"{kind.__module__}.{kind.__qualname__} is not exactly {base.__name__}: convert it first"
    if kind.__module__ == "numpy":
        return f"numpy.{kind.__name__} is not a plain value: use .item() or .tolist()"
    return (
        f"a {kind.__module__}.{kind.__qualname__} cannot be carried; plain values, dataclasses and msgspec structs can"
    )


def lower_datetime(value: datetime.datetime) -> tuple[str, int, int | None, str | None]:
    """Its text without a zone, its fold, the zone's offset in microseconds and its given name. A zone with rules is not
    carried: the rules differ between machines."""
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:
        raise BadValue(
            f"a datetime in a {type(zone).__name__}: only fixed offsets can be carried, as in .astimezone(datetime.UTC)"
        )
    text = value.replace(tzinfo=None).isoformat()
    if zone is None:
        return text, value.fold, None, None
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    is_plain = name == datetime.timezone(offset).tzname(None)
    return text, value.fold, offset // datetime.timedelta(microseconds=1), None if is_plain else name


def raise_datetime(text: str, fold: int, offset_us: int | None, name: str | None) -> datetime.datetime:
    value = datetime.datetime.fromisoformat(text).replace(fold=fold)
    if offset_us is None:
        return value
    offset = datetime.timedelta(microseconds=offset_us)
    zone = datetime.timezone(offset) if name is None else datetime.timezone(offset, name)
    return value.replace(tzinfo=zone)


AS_TEXT = (uuid.UUID, datetime.date, datetime.datetime, Decimal, tuple)  # whose text makes a good key


def check_key(key: Any, bytes_max: int) -> None:
    """A key is exactly a str, an int of 64 bits or bytes: 1, 1.0 and True would be one key in a dict."""
    kind = type(key)
    if kind is str:
        try:
            size = len(key) if key.isascii() else len(key.encode())
        except UnicodeEncodeError:
            raise BadKey(f"the key {shown(key)} is not valid Unicode") from None
    elif kind is bytes:
        size = len(key)
    elif kind is int:
        if not INT_MIN <= key <= INT_MAX:
            raise BadKey(f"the key {shown(key)} does not fit into 64 bits")
        return
    else:
        advice = ": use str(...)" if kind in AS_TEXT else ""
        raise BadKey(f"a key must be a str, an int or bytes, not {shown(key)} ({kind.__name__}){advice}")
    if size > bytes_max:
        raise BadKey(f"a key of {size} bytes is over the limit of {bytes_max} (key_bytes_max): {shown(key)}")


def record_of(cls: type) -> RecordType:
    name = record_name(cls)
    if issubclass(cls, msgspec.Struct):
        if hasattr(cls, "__post_init__"):
            raise BadValue(f"the struct {name} has a __post_init__, which would run again each time: use a dataclass")
        defaults_of(cls)  # refuses a default that is shared; the struct fills in the others itself
        return RecordType(cls, name, cls.__struct_fields__, lambda fields: cls(**fields))
    if not dataclasses.is_dataclass(cls):
        raise BadValue(f"{name} is neither a dataclass nor a msgspec struct")
    names, defaults = tuple(field.name for field in dataclasses.fields(cls)), defaults_of(cls)

    def build(fields: dict[str, Any]) -> Any:
        # Rebuilt without __init__: it may compute, check or count, and it did so when the value was made.
        made = object.__new__(cls)
        if len(fields) != len(names):  # fields were added since
            fields = complete(name, fields, names, defaults)
        for field in names:
            object.__setattr__(made, field, fields[field])
        return made

    return RecordType(cls, name, names, build)
